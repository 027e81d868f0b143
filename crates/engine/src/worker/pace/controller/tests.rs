//! The controller alone, with a cache and a disk of two numbers.

use super::*;

const MIB: i64 = 1 << 20;
const STEP_MS: u64 = 100;

/// Dirty data above the target that a load adds to and a disk takes from.
struct Plant {
    controller: Controller,
    error: i64,
    /// Bytes a second that the disk takes at most.
    disk: i64,
    most: u64,
}

impl Plant {
    fn new(error: i64, disk: i64) -> Self {
        Self { controller: Controller::default(), error, disk, most: u64::MAX }
    }

    /// Steps for `ms` under `load` bytes a second. Returns the lowest and the highest error.
    fn run(&mut self, load: i64, ms: u64) -> (i64, i64) {
        let (mut lowest, mut highest) = (self.error, self.error);
        for _ in 0..ms / STEP_MS {
            let rate = self.controller.rate() as i64;
            let share = |bytes: i64| bytes * STEP_MS as i64 / 1000;
            self.error += share(load) - share(rate.min(self.disk));
            self.controller.step(Interval {
                ms: STEP_MS,
                dirtied: share(load).unsigned_abs(),
                error: self.error,
                least: 1000,
                most: self.most,
                is_limited: rate > self.disk,
            });
            (lowest, highest) = (lowest.min(self.error), highest.max(self.error));
        }
        (lowest, highest)
    }
}

#[test]
fn a_load_that_begins_is_held_at_the_target_without_swinging_over_it() {
    let mut plant = Plant::new(-50 * MIB, 100 * MIB);
    let (_, highest) = plant.run(8 * MIB, 300_000);
    assert!(highest < 5 * MIB, "{highest} bytes above the target");
    assert!(plant.error.abs() < MIB, "{} bytes from the target at the end", plant.error);
    assert!(plant.controller.rate().abs_diff(8 << 20) < 1 << 18, "{}", plant.controller.rate());
}

#[test]
fn the_rate_follows_a_step_of_the_load_and_returns_to_the_target() {
    let mut plant = Plant::new(0, 100 * MIB);
    plant.run(4 * MIB, 300_000);
    let (_, highest) = plant.run(8 * MIB, 300_000);
    assert!(highest < 40 * MIB, "ten seconds of the difference: {highest}");
    assert!(plant.error.abs() < MIB);
    let (lowest, _) = plant.run(2 * MIB, 300_000);
    assert!(lowest > -60 * MIB && plant.error.abs() < MIB, "{lowest}");
}

#[test]
fn what_the_load_does_not_explain_is_learned() {
    // Of what the disk takes a half was overwritten: the dirty data falls twice as fast.
    let mut plant = Plant::new(0, 100 * MIB);
    for _ in 0..6000 {
        let rate = plant.controller.rate() as i64;
        plant.error += (8 * MIB - 2 * rate) / 10;
        let (error, dirtied) = (plant.error, 8 * MIB as u64 / 10);
        plant.controller.step(Interval {
            ms: STEP_MS,
            dirtied,
            error,
            least: 1000,
            most: u64::MAX,
            is_limited: false,
        });
    }
    assert!(plant.error.abs() < MIB, "{} bytes from the target", plant.error);
    assert!(plant.controller.integral < -3 * MIB);
}

#[test]
fn nothing_winds_up_while_the_disk_takes_less_than_it_is_sent() {
    let mut plant = Plant::new(0, 6 * MIB);
    plant.run(8 * MIB, 600_000);
    assert!(plant.error > 1000 * MIB && plant.controller.integral <= MIB);
    // The load ends, and the rate with what is above the target.
    plant.run(0, 600_000);
    let (lowest, _) = plant.run(4 * MIB, 300_000);
    assert!(lowest > -60 * MIB, "{lowest}");
    assert!(plant.error.abs() < MIB, "{}", plant.error);
}

#[test]
fn nothing_winds_up_at_a_limit_or_below_the_target() {
    let mut plant = Plant::new(0, 100 * MIB);
    plant.most = 4 << 20;
    plant.run(8 * MIB, 600_000);
    assert_eq!(plant.controller.rate(), 4 << 20);
    assert!(plant.controller.integral <= MIB, "{}", plant.controller.integral);
    let mut plant = Plant::new(-1000 * MIB, 100 * MIB);
    plant.run(MIB, 600_000);
    assert_eq!((plant.controller.integral, plant.controller.rate()), (0, 1000));
}

#[test]
fn a_clock_that_stands_still_or_jumps_does_no_harm() {
    let mut controller = Controller::default();
    let mut step = |ms| {
        controller.step(Interval {
            ms,
            dirtied: 1 << 20,
            error: 64 * MIB,
            least: 1000,
            most: u64::MAX,
            is_limited: false,
        });
        (controller.load, controller.integral, controller.rate)
    };
    let (load, integral, _) = step(0);
    assert_eq!((load, integral), (0, 0), "no time has passed");
    let (load, integral, rate) = step(u64::MAX);
    assert_eq!(load, 0, "a mebibyte in very long");
    assert!(integral < MIB && rate < 8 << 20, "a long interval counts as a second: {integral}, {rate}");
}

#[test]
fn the_rate_stays_within_its_bounds_for_all_numbers() {
    for error in [i64::MIN, -1, 0, 1, i64::MAX] {
        for (least, most) in [(0, 0), (5, 3), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            for dirtied in [0, 1, u64::MAX] {
                let mut controller = Controller::default();
                for _ in 0..3 {
                    let ms = STEP_MS;
                    controller.step(Interval { ms, dirtied, error, least, most, is_limited: false });
                    let rate = controller.rate();
                    let least = least.min(i64::MAX as u64);
                    assert!(rate >= least && rate <= most.max(least), "{rate} from {least} to {most}");
                }
            }
        }
    }
}
