//! Short histories that crash at every single store, write-back and fence, with several outcomes of the stores that
//! were not fenced. Recovery then crashes as well, writing continues, the process crashes again, and every
//! acknowledged change must still be present.
//!
//! `CBD_FATES` is the number of outcomes tried for each event (more find more).

use cbd_engine::{Consistency, OnWriteError};
use cbd_sim::{Mix, Watchdog, Wish, World, WorldOptions, from_environment, until_crash};
use cbd_types::{ByteRange, CHUNK, Operation};
use std::time::Duration;

const KIB: u64 = 1 << 10;

#[derive(Clone, Copy)]
enum Do {
    Ask(Wish),
    /// Continues until every request is complete.
    Quiesce,
    /// The background worker steps until it has nothing to do.
    Maintain,
    Drain,
    /// From here on, the disk accepts all writes.
    Repair,
    Stop,
}

const fn ask(operation: Operation, start: u64, length: u64, fua: bool) -> Do {
    Do::Ask(Wish { operation, range: ByteRange { start, end: start + length }, fua })
}

const fn write(start: u64, length: u64) -> Do {
    ask(Operation::Write, start, length, false)
}

const FLUSH: Do = ask(Operation::Flush, 0, 0, false);

/// One lane of eight segments, with a disk slightly larger than a chunk.
fn options(seed: u64) -> WorldOptions {
    WorldOptions {
        size: CHUNK + 64 * KIB + 512,
        segments: 9,
        clients: 1,
        mix: Mix::ALL,
        crash_in_recovery_permille: 0,
        ..WorldOptions::small(seed, Consistency::Strict)
    }
}

fn play(world: &mut World, history: &[Do]) {
    for step in history {
        match *step {
            Do::Ask(wish) => drop(world.submit(wish)),
            Do::Quiesce => world.quiesce(),
            Do::Maintain => world.run_worker_until_idle(),
            Do::Drain => world.drain(),
            Do::Repair => world.repair_disk(),
            Do::Stop => world.stop(),
        }
    }
}

/// Plays the history with a crash at each event; returns the number of events.
fn crash_everywhere(name: &str, history: &[Do], change: impl Fn(&mut WorldOptions)) -> u64 {
    let make = |seed| {
        let mut options = options(seed);
        change(&mut options);
        World::new(options)
    };
    let events = {
        let mut world = make(0);
        let before = world.memory().events();
        play(&mut world, history);
        world.memory().events() - before
    };
    let fates = from_environment("CBD_FATES", 3);
    let first = from_environment("CBD_SEED", 1);
    let mut crashed = 0;
    for event in 1..=events {
        for fate in first..first + fates {
            let _watchdog =
                Watchdog::new(Duration::from_secs(60), format!("{name}, event {event}, fate {fate}"));
            let mut world = make(fate << 32 | event);
            world.memory().crash_after(event, fate);
            // With another seed the last event may not be reached; the crash then follows the whole history.
            crashed += u64::from(until_crash(|| play(&mut world, history)).is_err());
            // Every third recovery crashes, too.
            world.crash_with((fate % 3 == 0).then_some(1 + (event + fate) % 30));
            // The world continues, and crashes again.
            play(
                &mut world,
                &[write(512, KIB), write(CHUNK - KIB, 2 * KIB), FLUSH, write(40 * KIB, 4 * KIB)],
            );
            world.crash();
            world.check_changed();
            play(&mut world, &[write(0, 512)]);
            world.finish();
        }
    }
    println!("{name}: {events} events, {fates} fates each, {crashed} crashes");
    assert!(crashed * 10 >= events * fates * 9);
    events
}

#[test]
fn writes_overwrites_and_flushes() {
    let history = [
        write(0, 4 * KIB),
        write(512, 512),
        write(8 * KIB, 16 * KIB),
        FLUSH,
        write(512, 1024),
        ask(Operation::Write, 4 * KIB, 4 * KIB, true),
        ask(Operation::Read, 0, 16 * KIB, false),
        write(0, 8 * KIB),
        Do::Quiesce,
    ];
    assert!(crash_everywhere("writes", &history, |_| {}) > 30);
}

#[test]
fn writes_without_data_checksums() {
    let history = [write(0, 4 * KIB), write(512, 512), FLUSH, write(0, 16 * KIB), write(4 * KIB, 512)];
    crash_everywhere("no checksums", &history, |options| options.data_crc = false);
}

#[test]
fn zeroes_and_discards_over_two_lanes() {
    let history = [
        write(CHUNK - 8 * KIB, 16 * KIB),
        ask(Operation::WriteZeroes, CHUNK - 4 * KIB, 8 * KIB, false),
        FLUSH,
        write(CHUNK - 512, 1024),
        ask(Operation::Discard, CHUNK - 8 * KIB, 10 * KIB, true),
        write(CHUNK + 512, 512),
        Do::Maintain,
        ask(Operation::Discard, 0, CHUNK + 32 * KIB, false),
        Do::Drain,
    ];
    let events = crash_everywhere("zeroes", &history, |options| {
        options.segments = 17;
        options.lanes_max = 2;
    });
    assert!(events > 40);
}

#[test]
fn writeback_epoch_by_epoch() {
    let history = [
        write(0, 4 * KIB),
        write(8 * KIB, 512),
        FLUSH,
        write(0, 512),
        Do::Maintain,
        FLUSH,
        write(8 * KIB, 4 * KIB),
        Do::Drain,
        ask(Operation::Read, 0, 64 * KIB, false),
        Do::Quiesce,
        write(1024, 512),
        Do::Drain,
    ];
    crash_everywhere("writeback", &history, |_| {});
}

#[test]
fn writeback_of_many_epochs_in_one_batch() {
    let history = [
        write(0, 4 * KIB),
        FLUSH,
        write(0, 512),
        FLUSH,
        write(8 * KIB, 4 * KIB),
        Do::Drain,
        write(1024, 512),
        FLUSH,
        write(1024, 1024),
        Do::Drain,
    ];
    crash_everywhere("checkpoint", &history, |options| options.consistency = Consistency::Checkpoint);
}

#[test]
fn reclaim_of_a_full_cache() {
    let mut history = Vec::new();
    for round in 0..18 {
        history.push(write(round % 5 * 16 * KIB, 16 * KIB));
        history.push(ask(Operation::Read, round % 3 * 16 * KIB, 4 * KIB, false));
        if round % 4 == 3 {
            history.extend([FLUSH, Do::Maintain]);
        }
        history.push(Do::Quiesce);
    }
    crash_everywhere("reclaim", &history, |_| {});
}

#[test]
fn an_orderly_stop() {
    let history = [write(0, 4 * KIB), write(CHUNK, 512), FLUSH, write(512, 512), Do::Stop];
    crash_everywhere("stop", &history, |_| {});
}

/// The disk refuses two ranges: a part of a block, and sectors at the border of two chunks.
fn refuses(options: &mut WorldOptions) {
    options.unwritable =
        &[ByteRange { start: 1024, end: 2048 }, ByteRange { start: CHUNK - 512, end: CHUNK + 1024 }];
    options.on_write_error = OnWriteError::Park;
    options.write_error_after_s = 0;
}

#[test]
fn parking_what_the_disk_refuses() {
    let history = [
        write(0, 4 * KIB),
        FLUSH,
        write(CHUNK - KIB, 4 * KIB),
        Do::Drain,
        write(1024, 512),
        ask(Operation::WriteZeroes, CHUNK, KIB, false),
        Do::Drain,
        ask(Operation::Read, 0, 64 * KIB, false),
        Do::Quiesce,
        write(0, 4 * KIB),
        Do::Repair,
        Do::Drain,
        write(512, KIB),
        Do::Drain,
    ];
    let events = crash_everywhere("parking", &history, refuses);
    assert!(events > 60);
}

#[test]
fn parking_of_many_epochs_in_one_batch() {
    let history = [
        write(0, 4 * KIB),
        FLUSH,
        write(1536, 512),
        FLUSH,
        ask(Operation::Discard, CHUNK - 8 * KIB, 16 * KIB, false),
        Do::Drain,
        write(CHUNK, 512),
        FLUSH,
        Do::Repair,
        Do::Drain,
    ];
    crash_everywhere("parking in checkpoint", &history, |options| {
        refuses(options);
        options.consistency = Consistency::Checkpoint;
    });
}

#[test]
fn reclaim_of_a_full_cache_with_something_parked() {
    let mut history =
        vec![write(0, 4 * KIB), ask(Operation::WriteZeroes, CHUNK - KIB, 2 * KIB, false), FLUSH];
    for round in 0..18 {
        history.push(write(64 * KIB + round % 5 * 16 * KIB, 16 * KIB));
        if round % 4 == 3 {
            history.extend([FLUSH, Do::Maintain]);
        }
        history.push(Do::Quiesce);
    }
    let events = crash_everywhere("reclaim with something parked", &history, refuses);
    assert!(events > 100);
}

/// Every second sector, exactly as many as a lane can park.
const SCATTERED: [ByteRange; 25] = {
    let mut ranges = [ByteRange { start: 0, end: 512 }; 25];
    let mut number = 0;
    while number < ranges.len() {
        let start = number as u64 * 1024;
        ranges[number] = ByteRange { start, end: start + 512 };
        number += 1;
    }
    ranges
};

/// Carried records fill the last free segment; the lane can continue after a crash at any event.
#[test]
fn a_full_cache_carries_the_maximum_of_parked_data() {
    let mut history = vec![write(0, 16 * KIB), write(16 * KIB, 16 * KIB), FLUSH, Do::Drain];
    for round in 0..16 {
        history.push(write(64 * KIB + round % 5 * 16 * KIB, 16 * KIB));
    }
    history.push(Do::Quiesce);
    let events = crash_everywhere("much is parked", &history, |options| {
        refuses(options);
        options.unwritable = &SCATTERED;
        options.in_flight_max = 16;
    });
    assert!(events > 200);
}
