//! In every mode, at any moment at which the region could be lost: the backing device holds everything that had
//! completed and was flushed before the recovery point in the status, regardless of crashes, backlogs and clock
//! changes.

use cbd_engine::Consistency;
use cbd_sim::{Happened, Mix, Watchdog, World, WorldOptions};
use std::time::Duration;

const FLUSHING: Mix = Mix { write: 50, read: 5, flush: 40, discard: 2, write_zeroes: 3, ..Mix::ALL };

fn histories(change: impl Fn(WorldOptions) -> WorldOptions) {
    let _watchdog = Watchdog::new(Duration::from_secs(600), "recovery points");
    for consistency in Consistency::ALL {
        let mut all = Happened::default();
        for seed in 0..10 {
            let options = WorldOptions {
                mix: FLUSHING,
                // The cache flushes often between the closing of an epoch and the end of its writeback.
                worker_percent: 4,
                segments: 25,
                lanes_max: 2,
                crash_permille: 5,
                ..WorldOptions::small(seed, consistency)
            };
            let mut world = World::new(change(options));
            for round in 1..=150 {
                world.run(10);
                world.check_backing();
                if round % 25 == 0 {
                    world.crash();
                }
            }
            all = all.and(world.finish());
        }
        assert!(all.points_checked > 200, "{consistency:?}: {all:?}");
        assert!(all.process_crashes > 10 && all.power_cuts > 10, "{consistency:?}: {all:?}");
    }
}

#[test]
fn with_a_backlog_and_crashes() {
    histories(|options| options);
}

#[test]
fn while_the_clock_is_set_back_and_forth() {
    histories(|options| WorldOptions { sets_clock: true, ..options });
}

#[test]
fn while_the_settings_change() {
    histories(|options| WorldOptions { vary_settings: true, ..options });
}

#[test]
fn on_a_disk_that_fails_now_and_then() {
    histories(|options| WorldOptions { write_errors_permille: 200, ..options });
}
