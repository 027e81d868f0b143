//! The times that follow from what is dirty.

use super::*;

const fn seen(dirty_bytes: u64) -> Seen {
    Seen { dirty_bytes, capacity: 1000 }
}

#[test]
fn a_cache_is_full_when_the_dirty_data_has_grown_as_before() {
    let (mut trend, begun) = (Trend::default(), Instant::now());
    let at = |seconds| begun + Duration::from_secs(seconds);
    assert_eq!(trend.time_to_full_s(&seen(10), begun), None, "nothing is known");
    trend.sample(&seen(0), begun);
    assert_eq!(trend.time_to_full_s(&seen(10), begun + Duration::from_millis(10)), None, "too soon");
    assert_eq!(trend.time_to_full_s(&seen(100), at(2)), Some(18));
    assert_eq!(trend.time_to_full_s(&seen(1000), at(2)), Some(0));
    for second in 1..20 {
        trend.sample(&seen(500), at(second));
    }
    assert_eq!(trend.time_to_full_s(&seen(500), at(20)), None, "what came long ago is forgotten");
    assert_eq!(trend.time_to_full_s(&seen(400), at(20)), None, "it shrinks");
}
