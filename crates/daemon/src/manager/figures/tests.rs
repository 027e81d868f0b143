//! The times that follow from what is dirty.

use super::*;

const fn seen(dirty_bytes: u64, drained_ms: u64) -> Seen {
    Seen { dirty_bytes, capacity: 1000, is_complete: dirty_bytes == 0, drained_ms }
}

#[test]
fn a_cache_is_full_when_the_dirty_data_has_grown_as_before() {
    let (mut trend, begun) = (Trend::default(), Instant::now());
    let at = |seconds| begun + Duration::from_secs(seconds);
    assert_eq!(trend.time_to_full_s(&seen(10, 0), begun), None, "nothing is known");
    trend.sample(&seen(0, 0), begun, 1);
    assert_eq!(trend.time_to_full_s(&seen(10, 0), begun + Duration::from_millis(10)), None, "too soon");
    assert_eq!(trend.time_to_full_s(&seen(100, 0), at(2)), Some(18));
    assert_eq!(trend.time_to_full_s(&seen(1000, 0), at(2)), Some(0));
    for second in 1..20 {
        trend.sample(&seen(500, 0), at(second), 1);
    }
    assert_eq!(trend.time_to_full_s(&seen(500, 0), at(20)), None, "what came long ago is forgotten");
    assert_eq!(trend.time_to_full_s(&seen(400, 0), at(20)), None, "it shrinks");
}

#[test]
fn the_recovery_point_is_no_older_than_the_last_time_at_which_the_disk_had_everything() {
    let (mut trend, now) = (Trend::default(), Instant::now());
    assert_eq!(trend.recovery_point_age_ms(&seen(1, 0), 5000), None, "not known");
    assert_eq!(trend.recovery_point_age_ms(&seen(1, 2000), 5000), Some(3000));
    assert_eq!(trend.recovery_point_age_ms(&seen(0, 2000), 5000), Some(0));
    trend.sample(&seen(0, 2000), now, 9000);
    assert_eq!(trend.recovery_point_age_ms(&seen(1, 2000), 9500), Some(500), "after an idle time");
    trend.sample(&seen(1, 2000), now, 10_000);
    assert_eq!(trend.recovery_point_age_ms(&seen(1, 2000), 12_000), Some(3000));
    assert_eq!(trend.recovery_point_age_ms(&seen(1, 11_500), 12_000), Some(500), "it has moved on");
    assert_eq!(trend.recovery_point_age_ms(&seen(1, 13_000), 12_000), Some(0), "the clock was set back");
}
