//! Other operations run while two caches get a common moment.

use crate::meeting::{Meeting, Met, meet, meet_at_clock};
use crate::rig::{MOMENTS_MAX, Rig, WRITER, step, try_write};
use cbd_engine::{Cache, CommonMoment};
use cbd_sim::act_as;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

type Moment = CommonMoment<Meeting>;

fn close(caches: &[Arc<Cache<Meeting>>]) -> Moment {
    CommonMoment::close(caches).expect("nothing is in the way")
}

fn caches(rigs: &[Rig; 2]) -> [Arc<Cache<Meeting>>; 2] {
    rigs.each_ref().map(|rig| Arc::clone(&rig.cache))
}

fn on_disk(rig: &Rig, value: u8) -> bool {
    let mut bytes = [0; 512];
    rig.disk.durable().read(0, &mut bytes);
    bytes == [value; 512]
}

/// The workers step until both disks are at the moment.
fn reach(rigs: &[Rig; 2], moment: &Moment) {
    for _ in 0..1000 {
        if moment.check().is_ok() {
            return;
        }
        rigs.iter().for_each(|rig| {
            step(&rig.environment, &rig.worker);
        });
    }
    panic!("the disks do not get to the moment");
}

/// A client writes to one cache and then to the other at every moment at which their epochs are being closed: the second
/// write is not on its disk without the first.
#[test]
fn no_write_is_before_a_moment_without_the_one_that_completed_before_it() {
    // The clock is read before each epoch is closed.
    meet_at_clock();
    let mut moments = 0;
    for (first, moment) in (1..MOMENTS_MAX).flat_map(|moment| [(0, moment), (1, moment)]) {
        let rigs = [Rig::new(1), Rig::new(1)];
        let caches = caches(&rigs);
        let mut order = caches.clone();
        order.rotate_left(first);
        let others = move || {
            act_as(WRITER);
            for (cache, value) in order.iter().zip([1, 2]) {
                assert!(try_write(cache, 0, value), "there is space");
            }
        };
        let (common, met) = meet(moment, others, || close(&caches));
        if met == Met::Never {
            break;
        }
        reach(&rigs, &common);
        let (has_first, has_second) = (on_disk(&rigs[first], 1), on_disk(&rigs[1 - first], 2));
        assert!(has_first || !has_second, "moment {moment}: the second write is there without the first");
        moments += u32::from(met == Met::Came);
    }
    assert!(moments >= 10, "{moments} moments are too few to come between");
}

/// The epochs are closed at every moment of a step of a worker that has found nothing to do: what was written before is
/// not missed.
#[test]
fn a_disk_is_not_at_a_moment_without_what_was_written_while_its_worker_looked() {
    let mut moments = 0;
    for moment in 1..MOMENTS_MAX {
        let rigs = [Rig::new(2), Rig::new(2)];
        let caches = caches(&rigs);
        let common = Rc::new(RefCell::new(None));
        let note = Rc::clone(&common);
        let others = move || {
            act_as(WRITER);
            assert!(try_write(&caches[0], 0, 1), "there is space");
            note.replace(Some(close(&caches)));
        };
        let (_, met) = meet(moment, others, || step(&rigs[0].environment, &rigs[0].worker));
        match met {
            Met::Came => moments += 1,
            Met::Blocked => continue,
            Met::Never => break,
        }
        let common = common.take().expect("the epochs are closed");
        reach(&rigs, &common);
        assert!(on_disk(&rigs[0], 1), "moment {moment}: it is missing");
    }
    assert!(moments >= 4, "{moments} moments are too few to come between");
}
