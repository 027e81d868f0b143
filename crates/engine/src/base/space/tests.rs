//! At how many free segments each decision changes.

use super::super::Requester;
use crate::Settings;
use crate::tests::rig::{Options, Rig, SEGMENT};
use cbd_types::CHUNK;

/// The largest numbers of free segments at which reclaim should run, and at which the cache is full; and the smallest one at
/// which reclaim is at ease.
fn borders(lanes: u32, log_segments: u32, gc_percent: u8) -> [u32; 3] {
    let settings = Settings { gc_percent, ..Settings::default() };
    let segments = u64::from(log_segments) + 1;
    let rig = Rig::new(Options { lanes, segments, settings, device: 2 * CHUNK, ..Options::default() });
    let base = rig.cache.base();
    assert_eq!((base.capacity(), base.pool().free()), (u64::from(log_segments) * SEGMENT, log_segments));
    let [mut above, mut full, mut ease] = [None; 3];
    loop {
        let free = base.pool().free();
        above = above.or(base.is_above_gc().then_some(free));
        full = full.or(base.is_full().then_some(free));
        ease = if base.is_reclaim_at_ease() { Some(free) } else { ease };
        if base.pool().take(Requester::Essential, None).is_err() {
            break;
        }
    }
    [above, full, ease].map(|border| border.expect("it is passed"))
}

#[test]
fn reclaim_runs_below_its_percentage_or_what_fills_leave_and_a_few_segments_more_are_full() {
    // 70 % of 32 segments are used: 10 are to be free.
    assert_eq!(borders(1, 32, 70), [9, 11, 8]);
    // 90 % of 100: exactly 10 are to be free. The cache is full with 3 more, the thirty-second part.
    assert_eq!(borders(1, 100, 90), [9, 12, 8]);
    // Of 40 that are to be free half of 16 open ones count.
    assert_eq!(borders(16, 400, 90), [31, 43, 30]);
    // What fills leave, and as much more as that exceeds the reserve.
    assert_eq!(borders(16, 160, 98), [5, 10, 4]);
}
