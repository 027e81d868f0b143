//! The engine against a plain array: every operation, every consistency setting, caches that are always full,
//! and crashes at random stores with restarts. At the end the disk alone is compared byte for byte.
//!
//! `CBD_SEED` is the first seed, `CBD_ROUNDS` the number of worlds, `CBD_TURNS` their length.

use cbd_engine::Consistency;
use cbd_sim::{Happened, Mix, Watchdog, World, WorldOptions, from_environment};
use std::time::Duration;

/// Runs worlds, and returns the sum of what happened in them.
fn run(name: &str, rounds: u64, options: impl Fn(u64) -> WorldOptions) -> Happened {
    let first = from_environment("CBD_SEED", 1);
    let rounds = from_environment("CBD_ROUNDS", rounds);
    let turns = from_environment("CBD_TURNS", 1500);
    let mut all = Happened::default();
    for seed in first..first + rounds {
        let _watchdog = Watchdog::new(Duration::from_secs(120), format!("{name}, seed {seed}"));
        let mut world = World::new(options(seed));
        world.run(turns);
        world.quiesce();
        world.check_everything();
        all = all.and(world.finish());
    }
    println!("{name}: {all:?}");
    assert!(all.completed > 0 && all.drains > 0);
    all
}

#[test]
fn strict_agrees_with_the_array() {
    let all = run("strict", 10, |seed| WorldOptions::small(seed, Consistency::Strict));
    assert!(all.images_checked > 0);
}

#[test]
fn checkpoint_agrees_with_the_array() {
    run("checkpoint", 6, |seed| WorldOptions::small(seed, Consistency::Checkpoint));
}

#[test]
fn without_order_it_agrees_with_the_array() {
    run("none", 6, |seed| WorldOptions::small(seed, Consistency::None));
}

#[test]
fn without_data_checksums_it_agrees_with_the_array() {
    run("no checksums", 6, |seed| WorldOptions {
        data_crc: false,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
}

#[test]
fn one_lane_agrees_with_the_array() {
    run("one lane", 4, |seed| WorldOptions {
        lanes_max: 1,
        segments: 9,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
}

#[test]
fn large_sectors_agree_with_the_array() {
    run("large sectors", 4, |seed| WorldOptions {
        sector: 4096,
        size: (8 << 20) + 5 * 4096,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
}

#[test]
fn a_cache_that_holds_everything_agrees_with_the_array() {
    run("large cache", 4, |seed| WorldOptions {
        segment_size: 256 << 10,
        segments: 33,
        ..WorldOptions::small(seed, Consistency::Checkpoint)
    });
}

#[test]
fn a_disk_that_fails_half_of_the_time_agrees_with_the_array() {
    let all = run("failing disk", 6, |seed| WorldOptions {
        read_errors_permille: 500,
        write_errors_permille: 500,
        // Longer than the run, so that no write is refused because the disk did not flush for that time.
        write_error_after_s: 86400,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
    assert!(all.failed_reads > 0);
}

#[test]
fn a_disk_that_fails_now_and_then_agrees_with_the_array() {
    run("failing disk, many epochs", 4, |seed| WorldOptions {
        read_errors_permille: 20,
        write_errors_permille: 60,
        ..WorldOptions::small(seed, Consistency::Checkpoint)
    });
}

#[test]
fn settings_that_change_meanwhile_agree_with_the_array() {
    run("settings", 8, |seed| WorldOptions {
        vary_settings: true,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
}

#[test]
fn streams_that_are_read_ahead_beside_writes_agree_with_the_array() {
    let all = run("streams", 8, |seed| WorldOptions {
        depth: 8,
        read_errors_permille: if seed.is_multiple_of(2) { 20 } else { 0 },
        vary_settings: true,
        mix: Mix { write: 20, read: 70, ..Mix::ALL },
        ..WorldOptions::small(seed, Consistency::Strict)
    });
    // The test proves nothing unless data was read ahead, used, and overwritten before its use.
    assert!(all.rare.read_ahead_used > 0 && all.rare.read_ahead_stale > 0, "{:?}", all.rare);
}

#[test]
fn tiny_devices_agree_with_the_array() {
    let sizes = [512, 1024, 4096, 4608, 64 << 10, 4 << 20, (4 << 20) + 512];
    run("tiny devices", 7, |seed| WorldOptions {
        size: sizes[seed as usize % sizes.len()],
        ..WorldOptions::small(seed, Consistency::Strict)
    });
}

#[test]
fn sixteen_lanes_agree_with_the_array() {
    run("sixteen lanes", 3, |seed| WorldOptions {
        size: (40 << 20) + 99 * 512,
        segments: 129,
        clients: 3,
        in_flight_max: 12,
        mix: Mix { discard: 8, ..Mix::ALL },
        ..WorldOptions::small(seed, Consistency::Strict)
    });
}
