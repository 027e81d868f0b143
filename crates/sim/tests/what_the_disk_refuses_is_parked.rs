//! A disk that refuses some sectors permanently, or until it is repaired: the refused data is parked, all other
//! operations continue, no data is lost, and no old data replaces newer data.

use cbd_engine::{Consistency, OnWriteError};
use cbd_sim::{Happened, Mix, Watchdog, Wish, World, WorldOptions, from_environment};
use cbd_types::{ByteRange, CHUNK, Operation};
use std::time::Duration;

const KIB: u64 = 1 << 10;
/// Three sectors inside the second block.
const BAD: ByteRange = ByteRange { start: 5 * KIB, end: 6 * KIB + 512 };

const fn wish(operation: Operation, start: u64, length: u64) -> Wish {
    Wish { operation, range: ByteRange { start, end: start + length }, fua: false }
}

const fn write(start: u64, length: u64) -> Wish {
    wish(Operation::Write, start, length)
}

const FLUSH: Wish = wish(Operation::Flush, 0, 0);

/// One lane in front of little more than a chunk, on a disk that refuses to write `BAD`.
fn quiet(consistency: Consistency) -> WorldOptions {
    WorldOptions {
        size: CHUNK + 64 * KIB + 512,
        clients: 1,
        lanes_max: 1,
        crash_permille: 0,
        crash_in_recovery_permille: 0,
        unwritable: &[BAD],
        on_write_error: OnWriteError::Park,
        write_error_after_s: 10,
        ..WorldOptions::small(7, consistency)
    }
}

fn ask(world: &mut World, wishes: &[Wish]) {
    for wish in wishes {
        assert!(world.submit(*wish));
        world.quiesce();
    }
}

fn guarded(name: &str) -> Watchdog {
    Watchdog::new(Duration::from_secs(60), name.to_owned())
}

#[test]
fn just_the_refused_sectors_are_parked_and_the_rest_is_written_back() {
    let _watchdog = guarded("just the refused sectors");
    let mut world = World::new(quiet(Consistency::Strict));
    ask(&mut world, &[write(0, 16 * KIB), FLUSH, write(64 * KIB, 4 * KIB), FLUSH]);
    world.drain();
    let status = world.status();
    assert_eq!(status.parked, [BAD]);
    assert_eq!((status.parked_bytes, status.dirty_bytes), (BAD.len(), BAD.len()));
    assert!(status.void_reason.is_some_and(|reason| reason.contains("parked")));
    assert!(status.parked_total > 0 && status.backing_trouble.is_none());
    let all_of_the_rest = 16 * KIB + 4 * KIB - BAD.len();
    assert!(world.disk().counters().written_bytes >= all_of_the_rest);
    world.check_everything();
    let happened = world.finish();
    assert!(happened.parked > 0 && happened.unparked > 0);
}

#[test]
fn until_the_timeout_nothing_is_parked_and_strict_stays_crash_consistent() {
    let _watchdog = guarded("until the bound");
    let mut world = World::new(quiet(Consistency::Strict));
    ask(&mut world, &[write(0, 16 * KIB), FLUSH]);
    let begun = world.clock_ms();
    while world.clock_ms() < begun + 9_000 {
        world.run_worker_until_idle();
        world.advance(100);
        let status = world.status();
        assert!(status.parked.is_empty() && status.backing_is_consistent);
        world.check_backing();
    }
    assert!(world.status().backing_trouble.is_some());
    world.drain();
    assert_eq!(world.status().parked, [BAD]);
    world.finish();
}

#[test]
fn a_parked_range_is_known_after_a_restart_and_taken_when_the_disk_is_repaired() {
    let _watchdog = guarded("after a restart");
    let mut world = World::new(quiet(Consistency::Strict));
    ask(&mut world, &[write(4 * KIB, 4 * KIB), FLUSH]);
    world.drain();
    for _ in 0..3 {
        world.stop_and_start();
        let status = world.status();
        assert_eq!((status.parked, status.backing_is_consistent), (vec![BAD], false));
        world.check_changed();
    }
    world.repair_disk();
    world.stop_and_start();
    world.run_worker_until_idle();
    let status = world.status();
    assert_eq!((status.parked, status.dirty_bytes), (Vec::new(), 0));
    assert!(world.status().backing_is_consistent);
    world.check_backing();
    world.finish();
}

#[test]
fn a_parked_range_is_retried_without_a_request_but_rarely() {
    let _watchdog = guarded("seldom");
    let mut world = World::new(quiet(Consistency::Strict));
    ask(&mut world, &[write(4 * KIB, 4 * KIB), FLUSH]);
    world.drain();
    world.run_worker_until_idle();
    let (before, stored) = (world.disk().counters().failed, world.status().stored_bytes);
    let hour = 3_600_000;
    let begun = world.clock_ms();
    while world.clock_ms() < begun + hour {
        world.advance(1000);
        world.run_worker_until_idle();
    }
    let tries = world.disk().counters().failed - before;
    assert!((6..30).contains(&tries), "{tries} attempts in an hour");
    assert_eq!(world.status().stored_bytes, stored, "an idle cache writes its log");
    world.repair_disk();
    world.advance(600_000);
    world.run_worker_until_idle();
    assert_eq!(world.status().parked, []);
    world.finish();
}

#[test]
fn data_beside_a_parked_range_does_not_wait_for_the_retry_of_the_range() {
    let _watchdog = guarded("beside a parked range");
    let mut world = World::new(quiet(Consistency::Strict));
    ask(&mut world, &[write(4 * KIB, 4 * KIB), FLUSH]);
    world.drain();
    let pass = |world: &mut World, seconds: u64| {
        for _ in 0..seconds * 10 {
            world.run_worker_until_idle();
            world.advance(100);
        }
    };
    // Longer than writeback waits after a refusal, but shorter than the interval at which it retries parked data.
    pass(&mut world, 12);
    ask(&mut world, &[write(64 * KIB, 4 * KIB)]);
    pass(&mut world, 5);
    assert_eq!(world.status().dirty_bytes, BAD.len(), "five seconds later");
    world.finish();
}

#[test]
fn what_is_written_over_a_parked_range_ends_it() {
    let _watchdog = guarded("written over");
    let mut world = World::new(quiet(Consistency::Strict));
    ask(&mut world, &[write(4 * KIB, 4 * KIB), FLUSH]);
    world.drain();
    assert_eq!(world.status().parked, [BAD]);
    ask(&mut world, &[write(BAD.start, 512)]);
    assert_eq!(world.status().parked, [ByteRange { start: BAD.start + 512, end: BAD.end }]);
    assert!(!world.status().backing_is_consistent);
    world.drain();
    assert_eq!(world.status().parked, [BAD], "the disk refuses the newer data, too");
    world.repair_disk();
    ask(&mut world, &[write(0, 16 * KIB), FLUSH]);
    assert_eq!(world.status().parked, []);
    assert!(!world.status().backing_is_consistent, "the disk has nothing of it yet");
    world.finish();
}

#[test]
fn zeroes_and_discards_over_a_parked_range_end_it() {
    for operation in [Operation::WriteZeroes, Operation::Discard] {
        let _watchdog = guarded("zeroed");
        let mut world = World::new(quiet(Consistency::Strict));
        ask(&mut world, &[write(4 * KIB, 4 * KIB), FLUSH]);
        world.drain();
        world.repair_disk();
        ask(&mut world, &[wish(operation, 0, 64 * KIB)]);
        assert_eq!(world.status().parked, []);
        world.drain();
        assert_eq!(world.status().parked, []);
        world.finish();
    }
}

#[test]
fn zeroes_and_discards_that_are_refused_are_parked() {
    for operation in [Operation::WriteZeroes, Operation::Discard] {
        let _watchdog = guarded("refused zeroes");
        let mut world = World::new(quiet(Consistency::Strict));
        ask(&mut world, &[write(0, 16 * KIB), wish(operation, 0, 64 * KIB), FLUSH]);
        world.drain();
        assert_eq!(world.status().parked, [BAD]);
        world.stop_and_start();
        assert_eq!(world.status().parked, [BAD]);
        world.check_changed();
        world.finish();
    }
}

#[test]
fn reclaim_carries_what_is_parked() {
    let _watchdog = guarded("carried");
    let mut world = World::new(quiet(Consistency::Strict));
    let zeroed = wish(Operation::WriteZeroes, BAD.end - 512, 512);
    ask(&mut world, &[write(4 * KIB, 4 * KIB), FLUSH, zeroed, FLUSH]);
    world.drain();
    assert_eq!(world.status().parked, [BAD]);
    for round in 0..300 {
        ask(&mut world, &[write(128 * KIB + round % 16 * 16 * KIB, 16 * KIB), FLUSH]);
        world.run_worker_until_idle();
    }
    assert_eq!(world.status().parked, [BAD]);
    world.check_changed();
    world.stop_and_start();
    assert_eq!(world.status().parked, [BAD]);
    world.check_changed();
    world.finish();
}

#[test]
fn writeback_waits_for_a_disk_that_is_gone_and_parks_nothing() {
    const ALL: ByteRange = ByteRange { start: 0, end: CHUNK + 64 * KIB + 512 };
    let _watchdog = guarded("gone");
    let mut world =
        World::new(WorldOptions { unwritable: &[ALL], write_error_after_s: 0, ..quiet(Consistency::Strict) });
    for number in 0..8 {
        ask(&mut world, &[write(number * 64 * KIB, 16 * KIB)]);
    }
    ask(&mut world, &[FLUSH]);
    for _ in 0..200 {
        world.run_worker_until_idle();
        world.advance(1000);
    }
    let status = world.status();
    assert_eq!((status.parked, status.parked_total), (Vec::new(), 0));
    assert!(status.is_stalled && status.backing_is_consistent && status.backing_trouble.is_some());
    world.check_changed();
    world.repair_disk();
    world.drain();
    assert!(!world.status().is_stalled);
    world.finish();
}

fn fill_until_it_fails(options: WorldOptions) -> World {
    let mut world = World::new(options);
    world.expect_refusals();
    let mut number = 0;
    while world.happened().refused == 0 {
        number += 1;
        assert!(number < 200, "writes neither fail nor wait");
        assert!(world.submit(write(number % 60 * 16 * KIB, 16 * KIB)));
        world.quiesce();
    }
    world.settle();
    world
}

#[test]
fn with_stop_a_write_fails_when_the_cache_is_full_and_the_timeout_has_passed() {
    let _watchdog = guarded("stop");
    let mut world = fill_until_it_fails(WorldOptions {
        on_write_error: OnWriteError::Stop,
        ..quiet(Consistency::Strict)
    });
    let status = world.status();
    assert!(status.is_stalled && status.parked.is_empty());
    assert_eq!(status.parked_total, 0);
    // Reads continue, and all other operations do when the disk is repaired.
    world.check_changed();
    world.repair_disk();
    world.drain();
    assert!(!world.status().is_stalled);
    let refused = world.happened().refused;
    ask(&mut world, &[write(0, 16 * KIB)]);
    assert_eq!(world.happened().refused, refused);
    world.finish();
}

#[test]
fn a_flush_that_fails_for_a_long_time_parks_nothing() {
    let _watchdog = guarded("flush");
    let mut world = fill_until_it_fails(WorldOptions {
        refuses_flushes: true,
        unwritable: &[BAD],
        ..quiet(Consistency::Strict)
    });
    let status = world.status();
    assert!(status.is_stalled && status.drained_epoch.0 == 0);
    world.check_backing();
    world.check_changed();
    world.finish();
}

#[test]
fn a_full_cache_continues_although_the_disk_refuses_some_sectors() {
    const WRITES: Mix = Mix {
        write: 100,
        read: 3,
        flush: 20,
        discard: 1,
        write_zeroes: 2,
        fua_permille: 50,
        large_permille: 60,
    };
    const SOME: &[ByteRange] = &[
        ByteRange { start: CHUNK - 1024, end: CHUNK + 512 },
        ByteRange { start: 8 << 20, end: (8 << 20) + 512 },
    ];
    for seed in 1..4 {
        let _watchdog = Watchdog::new(Duration::from_secs(200), format!("full, seed {seed}"));
        let mut world = World::new(WorldOptions {
            mix: WRITES,
            in_flight_max: 16,
            unwritable: SOME,
            on_write_error: OnWriteError::Park,
            write_error_after_s: 0,
            ..WorldOptions::small(seed, Consistency::Strict)
        });
        world.press(20 << 20);
        let happened = world.finish();
        println!("full: {happened:?}");
        assert!(happened.parked > 0 && happened.waited_for_space > 0);
    }
}

fn roam(name: &str, consistency: Consistency, change: impl Fn(&mut WorldOptions)) -> Happened {
    const SOME: &[ByteRange] = &[
        ByteRange { start: 0, end: 1024 },
        ByteRange { start: CHUNK - 1024, end: CHUNK + 512 },
        ByteRange { start: (8 << 20) + 4096, end: (8 << 20) + 8192 },
    ];
    let first = from_environment("CBD_SEED", 1);
    let mut all = Happened::default();
    for seed in first..first + from_environment("CBD_ROUNDS", 16) {
        let _watchdog = Watchdog::new(Duration::from_secs(120), format!("{name}, seed {seed}"));
        let mut options = WorldOptions {
            unwritable: SOME,
            on_write_error: OnWriteError::Park,
            write_error_after_s: (seed % 2) as u32,
            ..WorldOptions::small(seed, consistency)
        };
        change(&mut options);
        let mut world = World::new(options);
        for round in 0..8 {
            world.run(from_environment("CBD_TURNS", 150));
            world.quiesce();
            world.check_changed();
            if round % 3 == 2 {
                world.repair_disk();
            } else {
                world.break_disk();
            }
        }
        all = all.and(world.finish());
    }
    println!("{name}: {all:?}");
    assert!(all.parked > 0 && all.unparked > 0);
    all
}

#[test]
fn nothing_is_lost_through_crashes_and_repairs_in_strict() {
    let all = roam("strict", Consistency::Strict, |_| {});
    assert!(all.images_checked > 0 && all.images_inconsistent > 0);
}

#[test]
fn nothing_is_lost_through_crashes_and_repairs_in_checkpoint() {
    roam("checkpoint", Consistency::Checkpoint, |options| options.vary_settings = true);
}

#[test]
fn nothing_is_lost_without_a_volatile_cache_or_checksums() {
    roam("bare", Consistency::Strict, |options| {
        options.volatile_cache = false;
        options.data_crc = false;
        options.discard_zeroes = false;
    });
}
