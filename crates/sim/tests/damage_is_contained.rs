//! A flipped bit, a poisoned line or a poisoned page anywhere in a cache: no wrong data is read or written back, few
//! blocks cannot be read, all other operations continue, and an overwrite repairs the damage.

use cbd_engine::Consistency;
use cbd_sim::{Mix, Seeded, Watchdog, Wish, World, WorldOptions, from_environment};
use cbd_types::{ByteRange, Operation};
use std::time::Duration;

const PAGE: u64 = 4096;

#[derive(Clone, Copy, Debug)]
enum Damage {
    Bit,
    Line,
    Page,
}

fn options(seed: u64) -> WorldOptions {
    WorldOptions {
        mix: Mix { large_permille: 5, ..Mix::ALL },
        crash_permille: 0,
        crash_in_recovery_permille: 0,
        ..WorldOptions::small(seed, Consistency::Strict)
    }
}

fn ask(world: &mut World, operation: Operation, range: ByteRange) {
    assert!(world.submit(Wish { operation, range, fua: false }));
    world.quiesce();
}

fn hurt(world: &World, damage: Damage, at: u64, random: &mut Seeded) {
    match damage {
        Damage::Bit => world.memory().flip(at, random.below(8) as u32),
        Damage::Line => world.memory().poison(ByteRange::at(at / 64 * 64, 64)),
        Damage::Page => world.memory().poison(ByteRange::at(at / PAGE * PAGE, PAGE)),
    }
}

/// Damages one offset, with or without a following restart, and returns the number of unreadable blocks.
fn damage_and_heal(
    seed: u64,
    damage: Damage,
    restart: bool,
    choose: impl Fn(&World, &mut Seeded) -> u64,
) -> usize {
    let _watchdog =
        Watchdog::new(Duration::from_secs(120), format!("{damage:?}, restart {restart}, seed {seed}"));
    let mut world = World::new(options(seed));
    let mut random = Seeded::new(seed);
    world.run(random.between(20, 400));
    world.quiesce();
    ask(&mut world, Operation::Flush, ByteRange::at(0, 0));
    world.expect_damage();
    let at = choose(&world, &mut random);
    hurt(&world, damage, at, &mut random);
    if restart {
        world.crash();
    }
    let unreadable = world.unreadable();
    // The world continues; only reads of the damaged data may fail.
    world.run(50);
    world.quiesce();
    ask(&mut world, Operation::Flush, ByteRange::at(0, 0));
    if random.chance(500) {
        world.crash();
    }
    for block in world.unreadable() {
        ask(&mut world, Operation::Write, block);
    }
    assert_eq!(world.unreadable(), [], "seed {seed}, {damage:?}: an overwrite heals");
    world.finish();
    unreadable.len()
}

fn anywhere_in_segments(world: &World, random: &mut Seeded) -> u64 {
    let area = world.segment_area();
    let image = world.memory().image();
    // The first segment holds the state of the lanes. Only used lines are chosen.
    let used = |at: &u64| image[(at / 64 * 64) as usize..][..64].iter().any(|byte| *byte != 0);
    (0..1000)
        .map(|_| random.between(area.start + (64 << 10), area.end - 1))
        .find(used)
        .unwrap_or_else(|| unreachable!("something was written"))
}

fn anywhere_in_state(world: &World, random: &mut Seeded) -> u64 {
    let area = world.segment_area();
    random.between(area.start, area.start + (64 << 10) - 1)
}

fn run(damage: Damage, restart: bool, rounds: u64) {
    let first = from_environment("CBD_SEED", 1);
    let mut hit = 0;
    for seed in first..first + from_environment("CBD_ROUNDS", rounds) {
        let unreadable = damage_and_heal(seed, damage, restart, anywhere_in_segments);
        // A page of data holds parts of three checksum blocks of a large write, or eight writes of a sector.
        let most = if matches!(damage, Damage::Page) { 8 } else { 1 };
        assert!(unreadable <= most, "seed {seed}: {damage:?} costs {unreadable} blocks");
        hit += usize::from(unreadable > 0);
    }
    println!("{damage:?}, restart {restart}: {hit} times something could not be read");
}

#[test]
fn a_flipped_bit_costs_one_block() {
    run(Damage::Bit, false, 8);
}

#[test]
fn a_flipped_bit_costs_one_block_after_a_restart() {
    run(Damage::Bit, true, 8);
}

#[test]
fn a_poisoned_line_costs_one_block() {
    run(Damage::Line, false, 8);
    run(Damage::Line, true, 8);
}

#[test]
fn a_poisoned_page_costs_its_data_only() {
    run(Damage::Page, false, 10);
    run(Damage::Page, true, 10);
}

#[test]
fn a_poisoned_page_of_the_state_costs_nothing() {
    let first = from_environment("CBD_SEED", 1);
    for seed in first..first + from_environment("CBD_ROUNDS", 16) {
        let unreadable = damage_and_heal(seed, Damage::Page, true, anywhere_in_state);
        assert_eq!(unreadable, 0, "seed {seed}");
    }
}

/// A full cache is damaged in many places, repeatedly, with restarts in between.
#[test]
fn much_damage_gives_errors_and_no_wrong_data() {
    let first = from_environment("CBD_SEED", 1);
    let mut most = 0;
    for seed in first..first + from_environment("CBD_ROUNDS", 10) {
        let _watchdog = Watchdog::new(Duration::from_secs(120), format!("much damage, seed {seed}"));
        let mut random = Seeded::new(seed);
        let mut world = World::new(WorldOptions { worker_percent: 4, ..options(seed) });
        world.expect_damage();
        for _ in 0..4 {
            world.run(random.between(20, 300));
            world.quiesce();
            ask(&mut world, Operation::Flush, ByteRange::at(0, 0));
            for _ in 0..random.between(1, 12) {
                let damage = *random.pick(&[Damage::Bit, Damage::Line, Damage::Page]);
                let at = anywhere_in_segments(&world, &mut random);
                hurt(&world, damage, at, &mut random);
            }
            if random.chance(600) {
                world.crash();
            }
        }
        // The repair can meet damage that no read had met before.
        for _ in 0..20 {
            let unreadable = world.unreadable();
            most = most.max(unreadable.len());
            if unreadable.is_empty() {
                break;
            }
            for block in unreadable {
                ask(&mut world, Operation::Write, block);
            }
        }
        assert_eq!(world.unreadable(), [], "seed {seed}: an overwrite heals");
        world.finish();
    }
    println!("at most {most} blocks could not be read");
}
