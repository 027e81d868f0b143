//! The background worker frees a segment between the steps of a write that finds too few free ones.

use crate::meeting::{Met, meet};
use crate::rig::{BLOCK, MOMENTS_MAX, Rig, WRITER, step, try_write};
use cbd_engine::{Admission, OnWriteError, Settings, ZeroProgress};
use cbd_sim::{DiskFaults, act_as};
use cbd_types::{ByteRange, CHUNK};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

/// A range that the disk refuses. It is zeroed in the oldest segment of a full lane.
const REFUSED: ByteRange = ByteRange { start: CHUNK / 2, end: CHUNK / 2 + 512 };
/// An offset in the lane whose open segment has room.
const ROOMY: u64 = CHUNK;
/// The maximum number of records of a segment.
const SMALL_RECORDS: u64 = 448;
/// More steps than the background worker needs.
const STEPS_MAX: u32 = 20_000;

struct Alarm(AtomicBool);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A full cache of two lanes, one of which has room in its open segment. The background worker parks the refused range
/// of the other lane, whose open segment is full, in a segment of the reserve. Also returns the number of reserve
/// segments.
fn rig_that_is_full() -> (Rig, u32) {
    let rig = Rig::new(2);
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..rig.cache.settings() };
    rig.cache.set_settings(settings).expect("in range");
    rig.disk.set_faults(DiskFaults { unwritable: vec![REFUSED], ..DiskFaults::default() });
    rig.write(ROOMY, 1);
    // The oldest segment has so many records that reclaim needs more than one step of the background worker
    // for it. The last of these steps frees the segment before it accesses the lane that a write holds.
    let zero = |sector| {
        let range = ByteRange::at(CHUNK / 2 + sector * 512, 512);
        let admission = rig.cache.zero(range, false, &mut ZeroProgress::default(), Waker::noop());
        matches!(admission, Ok(Admission::Done(_)))
    };
    assert!((0..SMALL_RECORDS).all(zero));
    let mut block = 0;
    while try_write(&rig.cache, block * BLOCK, 2) {
        block += 1;
    }
    while zero(SMALL_RECORDS) {}
    rig.cache.request_drain();
    let reserve = rig.cache.status().free_segments;
    (rig, reserve)
}

/// Runs the background worker until `wanted` accepts the number of free segments; returns the number of
/// steps.
fn steps_until(rig: &Rig, wanted: impl Fn(u32) -> bool) -> u32 {
    let free = || rig.cache.status().free_segments;
    let took = (0..STEPS_MAX).find(|_| wanted(free()) || !step(&rig.environment, &rig.worker));
    assert!(wanted(free()), "{:?}", rig.cache.status());
    took.expect("an end")
}

/// The steps of the background worker up to the one that refills the reserve.
fn steps_before_the_release() -> u32 {
    let (rig, reserve) = rig_that_is_full();
    let taken = steps_until(&rig, |free| free < reserve);
    taken + steps_until(&rig, |free| free >= reserve) - 1
}

#[test]
fn a_write_that_meets_the_release_of_a_segment_is_done_or_woken() {
    let steps = steps_before_the_release();
    let (mut moments, mut waited) = (0, 0);
    for moment in 1..MOMENTS_MAX {
        let (rig, reserve) = rig_that_is_full();
        for _ in 0..steps {
            step(&rig.environment, &rig.worker);
        }
        assert_eq!(rig.cache.status().free_segments, reserve - 1);
        let (environment, worker) = (Arc::clone(&rig.environment), Rc::clone(&rig.worker));
        let others = move || {
            let _ = step(&environment, &worker);
        };
        let alarm = Arc::new(Alarm(AtomicBool::new(false)));
        let (admission, met) = meet(moment, others, || {
            act_as(WRITER);
            let waker = Waker::from(Arc::clone(&alarm));
            rig.cache.write(ByteRange::at(ROOMY + BLOCK, BLOCK), &[3; BLOCK as usize], &waker)
        });
        if met == Met::Never {
            break;
        }
        // The step may have to wait for the lane that the write holds, before or after it frees the segment.
        if rig.cache.status().free_segments < reserve {
            continue;
        }
        moments += 1;
        match admission.expect("the cache runs") {
            Admission::Done(_) => rig.expect(ROOMY + BLOCK, 3),
            Admission::Full => {
                waited += 1;
                let is_woken = alarm.0.load(Ordering::SeqCst);
                assert!(is_woken, "moment {moment}: the write waits for space that exists and is not woken");
            }
        }
    }
    assert!(moments >= 4 && waited >= 1, "{moments} moments, {waited} waits are too few");
}
