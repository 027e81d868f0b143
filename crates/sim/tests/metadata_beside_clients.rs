//! Verification of the metadata of a region beside clients and crashes: no false alarm, and a copy that is repaired is as good as the
//! other one.

use cbd_engine::Consistency;
use cbd_sim::world::Copies;
use cbd_sim::{Happened, Seeded, World, WorldOptions, from_environment};
use cbd_types::{ByteRange, Structure};
use std::collections::BTreeMap;

fn options(seed: u64) -> WorldOptions {
    WorldOptions {
        pins: seed.is_multiple_of(3),
        crash_permille: 0,
        ..WorldOptions::small(seed, Consistency::ALL[seed as usize % 3])
    }
}

fn seeds(rounds: u64) -> std::ops::Range<u64> {
    let first = from_environment("CBD_SEED", 1);
    first..first + from_environment("CBD_ROUNDS", rounds)
}

/// A copy that was damaged.
struct Injected {
    structure: Structure,
    copy: ByteRange,
    other: ByteRange,
    /// Its bytes after the damage.
    bytes: Vec<u8>,
}

fn bytes(world: &World, range: ByteRange) -> Vec<u8> {
    world.memory().image()[range.start as usize..range.end as usize].to_vec()
}

fn flip(world: &World, random: &mut Seeded, range: ByteRange) {
    for _ in 0..random.between(1, 4) {
        world.memory().flip(random.between(range.start, range.end - 1), random.below(8) as u32);
    }
}

/// Damages one copy of some structures that were stored.
fn inject(world: &mut World, random: &mut Seeded) -> Vec<Injected> {
    let mut injected = Vec::new();
    for (structure, copies) in world.metadata_copies() as Vec<Copies> {
        let which = random.below(2) as usize;
        let (copy, other) = (copies[which], copies[1 - which]);
        let before = bytes(world, copy);
        if before.iter().all(|byte| *byte == 0) || !random.chance(250) {
            continue;
        }
        flip(world, random, copy);
        let bytes = bytes(world, copy);
        if bytes != before {
            injected.push(Injected { structure, copy, other, bytes });
        }
    }
    injected
}

/// Damage of one copy is found and repaired while clients write, also if the process crashes during the repair. Then the other copy
/// is damaged and the process or the power ends: nothing is lost, since the repaired copy is enough.
#[test]
fn a_repaired_copy_is_enough_for_the_next_process() {
    let mut found_of = BTreeMap::<&str, u64>::new();
    let (mut crashes, mut happened) = (0, Happened::default());
    for seed in seeds(100) {
        let mut random = Seeded::new(seed);
        let mut world = World::new(options(seed));
        for _ in 0..3 {
            world.run(random.between(20, 300));
            let injected = inject(&mut world, &mut random);
            world.run(random.between(0, 20));
            let crash_at = random.chance(400).then(|| random.between(1, 6));
            // What recovery completes is not found any more.
            let is_same_process = match world.verify_metadata(crash_at) {
                Some(found) => {
                    assert_eq!(
                        (found.unrepaired, found.error.is_none()),
                        (0, true),
                        "seed {seed}: {found:?}"
                    );
                    for copy in &found.copies {
                        let is_known = injected.iter().any(|injected| injected.copy.start == copy.at);
                        assert!(is_known, "seed {seed}: a false alarm: {copy:?}");
                        *found_of.entry(copy.structure.name()).or_default() += 1;
                    }
                    true
                }
                None => false,
            };
            crashes += u64::from(!is_same_process);
            let again = world.verify_metadata(None).expect("no crash was asked for");
            let is_whole = (again.unrepaired, again.error.is_none()) == (0, true);
            assert!(is_whole && (again.repaired == 0 || !is_same_process), "seed {seed}: {again:?}");
            let in_use = world.metadata_copies();
            for injected in &injected {
                let is_in_use = in_use.iter().any(|(structure, copies)| {
                    *structure == injected.structure && copies.contains(&injected.copy)
                });
                let is_left = bytes(&world, injected.copy) == injected.bytes;
                let Injected { structure, copy, .. } = injected;
                assert!(!is_left || !is_in_use, "seed {seed}: {structure:?} at {copy} is not repaired");
                flip(&world, &mut random, injected.other);
            }
            world.crash();
            world.check_everything();
            // Superblocks and the header of the state are not completed by recovery.
            let completed = world.verify_metadata(None).expect("no crash was asked for");
            assert_eq!(completed.unrepaired, 0, "seed {seed}: {completed:?}");
        }
        happened = happened.and(world.finish());
    }
    println!("{found_of:?}, {crashes} crashes, {happened:?}");
    let kinds = found_of.values().filter(|count| **count > 20).count();
    assert!(kinds >= 8 && crashes > 50 && happened.power_cuts > 100, "{found_of:?} {crashes}");
}

/// Nothing that clients, writeback, reclaim, resizes, modes and crashes leave is damage.
#[test]
fn what_processes_and_crashes_leave_is_no_damage() {
    let mut happened = Happened::default();
    for seed in seeds(200) {
        let mut world = World::new(WorldOptions {
            verifies: true,
            fickle_permille: 0,
            vary_modes: seed % 5 == 2,
            varies_route: seed.is_multiple_of(5),
            varies_size: seed % 5 == 1,
            crash_permille: 20,
            ..options(seed)
        });
        world.run(400);
        happened = happened.and(world.finish());
    }
    println!("{happened:?}");
    assert!(happened.verified_structures > 30_000 && happened.power_cuts > 50, "{happened:?}");
}
