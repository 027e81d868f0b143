//! Verification beside clients, writeback, reclaim and crashes: no false alarm, and no missed damage.

use cbd_engine::Consistency;
use cbd_sim::{DiskFaults, Happened, Mix, Seeded, Wish, World, WorldOptions, from_environment};
use cbd_types::{ByteRange, Flaw, Operation, VerifyLevel};

fn options(seed: u64) -> WorldOptions {
    WorldOptions {
        verifies: true,
        // The memory of a world cannot tell a client's buffer from data that the engine copies later.
        fickle_permille: 0,
        volatile_cache: !seed.is_multiple_of(5),
        discard_zeroes: !seed.is_multiple_of(7),
        data_crc: !seed.is_multiple_of(11),
        pins: seed.is_multiple_of(4),
        ..WorldOptions::small(seed, Consistency::ALL[seed as usize % 3])
    }
}

fn run(rounds: u64, turns: u64, change: fn(&mut WorldOptions)) -> Happened {
    let first = from_environment("CBD_SEED", 1);
    let mut happened = Happened::default();
    for seed in first..first + from_environment("CBD_ROUNDS", rounds) {
        let mut options = options(seed);
        change(&mut options);
        let mut world = World::new(options);
        world.run(turns);
        happened = happened.and(world.finish());
    }
    assert_eq!(happened.findings, 0);
    println!("{happened:?}");
    happened
}

#[test]
fn what_clients_and_writeback_change_is_no_damage() {
    let happened = run(200, 500, |_| {});
    assert!(happened.verified_bytes > 1 << 28, "{happened:?}");
    assert!(happened.power_cuts > 50, "{happened:?}");
}

#[test]
fn what_goes_past_the_cache_is_no_damage() {
    run(100, 500, |options| {
        options.bypasses = true;
        options.vary_modes = options.seed.is_multiple_of(2);
    });
}

#[test]
fn caches_that_come_and_go_and_change_their_size_are_no_damage() {
    run(60, 500, |options| options.varies_route = true);
    run(60, 500, |options| options.varies_size = true);
}

/// What a world has injected, and where.
#[derive(Default)]
struct Injected {
    /// Sectors that the disk alone has changed.
    on_disk: Vec<(ByteRange, Vec<u8>)>,
}

/// Flips bits in the region and changes sectors of the disk that the cache holds clean.
fn inject(world: &mut World, random: &mut Seeded) -> Injected {
    let area = world.segment_area();
    let image = world.memory().image();
    let used = |at: u64| image[(at / 64 * 64) as usize..][..64].iter().any(|byte| *byte != 0);
    for _ in 0..random.between(1, 6) {
        let at = random.between(area.start + (64 << 10), area.end - 1);
        if used(at) {
            world.memory().flip(at, random.below(8) as u32);
        }
    }
    let mut injected = Injected::default();
    for part in world.clean_parts() {
        if random.chance(100) {
            let range = ByteRange::at(part.start, 512);
            injected.on_disk.push((range, world.disk().scribble(range)));
        }
    }
    injected
}

/// Damage in memory and on the disk is found in one pass. What a good copy of exists is repaired, the rest cannot be read, and nothing
/// else changes.
#[test]
fn all_damage_is_found_in_one_pass_and_repaired_where_a_good_copy_exists() {
    let first = from_environment("CBD_SEED", 1);
    let mut found = [0_u64; 9];
    for seed in first..first + from_environment("CBD_ROUNDS", 120) {
        let mut random = Seeded::new(seed);
        let mut world = World::new(WorldOptions {
            verifies: false,
            data_crc: true,
            crash_permille: 0,
            mix: Mix { large_permille: 5, ..Mix::ALL },
            ..options(seed)
        });
        world.run(random.between(50, 600));
        world.quiesce();
        if random.chance(700) {
            world.drain();
        }
        world.expect_damage();
        let injected = inject(&mut world, &mut random);
        let findings = world.verify_everything(true);
        let is_found = |range: &ByteRange, flaws: &[Flaw]| {
            findings.iter().any(|(flaw, of, _)| flaws.contains(flaw) && of.overlaps(range))
        };
        for (range, former) in &injected.on_disk {
            // A flip may have hit the same block.
            let flaws = [Flaw::BackingDiffers, Flaw::BackingChanged, Flaw::BothDamaged];
            if is_found(range, &flaws) && !is_found(range, &[Flaw::BackingChanged]) {
                continue;
            }
            // Without a copy in the cache, which reclaim may have removed, no witness is left. What the cache has read from the disk
            // before is not what clients wrote: the user decides.
            let has_witness = world.is_any_cached(*range);
            let is_listed = is_found(range, &flaws);
            assert!(is_listed || !has_witness, "seed {seed}: {range} is not found: {findings:?}");
            world.disk().restore(*range, former);
        }
        for (flaw, range, repaired) in &findings {
            found[Flaw::ALL.iter().position(|known| known == flaw).expect("listed")] += 1;
            let expected = matches!(flaw, Flaw::CacheDamaged | Flaw::BackingDiffers | Flaw::RecordCopy);
            // A full cache has no space for data that the disk has.
            let is_right = *repaired == expected || *flaw == Flaw::CacheDamaged;
            assert!(is_right, "seed {seed}: {flaw:?} {range}");
        }
        // A second pass finds only what is lost, and what the disk has since it was drained.
        world.drain();
        let second = world.verify_everything(true);
        for (flaw, range, _) in &second {
            let is_known = match flaw {
                Flaw::Quarantined | Flaw::DirtyDamaged => true,
                Flaw::CacheDamaged => is_found(range, &[Flaw::DirtyDamaged, Flaw::CacheDamaged]),
                _ => false,
            };
            assert!(is_known, "seed {seed}: {flaw:?} {range} after {findings:?}");
        }
        for block in world.unreadable() {
            let lost = second.iter().any(|(_, range, _)| range.overlaps(&block));
            assert!(lost, "seed {seed}: {block} cannot be read, and is not listed: {second:?}");
            world.submit(Wish { operation: Operation::Write, range: block, fua: false });
            world.quiesce();
        }
        world.finish();
    }
    println!("{:?}", Flaw::ALL.iter().zip(found).collect::<Vec<_>>());
    assert!(found[1] > 20 && found[2] > 10 && found[5] > 50 && found[8] > 0, "{found:?}");
}

/// Whether the copies agree is found by reads alone: a disk is trusted for what it can read, not for what is equal.
#[test]
fn a_disk_is_never_asked_whether_the_copies_agree() {
    let mut world = World::new(WorldOptions { verifies: false, crash_permille: 0, ..options(1) });
    let written = ByteRange::at(1 << 20, 8192);
    assert!(world.submit(Wish { operation: Operation::Write, range: written, fua: false }));
    world.quiesce();
    world.drain();
    let mut asked = |level| {
        let before = world.disk().counters();
        assert_eq!(world.verify(written, level, false).findings, []);
        let after = world.disk().counters();
        (after.reads - before.reads, after.verified - before.verified, after.compared - before.compared)
    };
    assert_eq!(asked(VerifyLevel::Newest), (0, 0, 0));
    assert_eq!(asked(VerifyLevel::All), (0, 1, 0));
    assert_eq!(asked(VerifyLevel::Agree), (1, 0, 0));
    world.finish();
}

/// A sector that the disk cannot read is named exactly, at the level that looks at it, and repaired if the cache has it.
#[test]
fn an_unreadable_sector_is_named_exactly_and_repaired_from_the_cache() {
    const CACHED: ByteRange = ByteRange { start: (1 << 20) + 1024, end: (1 << 20) + 1536 };
    const ALONE: ByteRange = ByteRange { start: (3 << 20) + 4096, end: (3 << 20) + 5120 };
    let mut world = World::new(WorldOptions { verifies: false, crash_permille: 0, ..options(1) });
    let written = ByteRange::at(1 << 20, 8192);
    assert!(world.submit(Wish { operation: Operation::Write, range: written, fua: false }));
    world.quiesce();
    world.drain();
    let unreadable = vec![CACHED, ALONE];
    world.disk().set_faults(DiskFaults { unreadable, ..DiskFaults::default() });
    let everything = ByteRange { start: 0, end: 8 << 20 };
    let mut found = |level, repair| {
        let verified = world.verify(everything, level, repair);
        assert_eq!((verified.changed_bytes, verified.error.is_none()), (0, true));
        verified.findings.iter().map(|found| (found.range, found.flaw, found.repaired)).collect::<Vec<_>>()
    };
    let alone = (ALONE, Flaw::Unreadable, false);
    assert_eq!(found(VerifyLevel::Newest, true), [alone]);
    assert_eq!(found(VerifyLevel::All, false), [(CACHED, Flaw::BackingUnreadable, false), alone]);
    assert_eq!(found(VerifyLevel::Agree, false), [(CACHED, Flaw::BackingUnreadable, false), alone]);
    assert_eq!(found(VerifyLevel::Agree, true), [(CACHED, Flaw::BackingUnreadable, true), alone]);
    // The disk remaps the sector when it is written.
    world.disk().set_faults(DiskFaults::default());
    let before = world.disk().counters().written_bytes;
    world.drain();
    assert_eq!(world.disk().counters().written_bytes - before, CACHED.len());
    assert_eq!(world.verify(everything, VerifyLevel::Agree, false).findings, []);
    world.finish();
}
