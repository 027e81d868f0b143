//! Other operations run between the steps of writeback.

use crate::meeting::{Met, meet};
use crate::rig::{MOMENTS_MAX, Rig, WRITER, step, try_write};
use cbd_sim::{DiskImage, act_as};
use cbd_types::CHUNK;
use std::sync::Arc;

/// In `strict`, a write after a flush is not on the disk before the data that the flush covered, at whatever moment
/// the writes arrive. The later write has the lower address, so it would be first if both were written together.
#[test]
fn what_a_flush_covered_is_on_the_disk_first() {
    for earlier_chunk in [2, 3] {
        expect_in_order(earlier_chunk * CHUNK, CHUNK);
        expect_in_order(earlier_chunk * CHUNK, 0);
    }
}

fn expect_in_order(earlier: u64, later: u64) {
    let mut moments = 0;
    for moment in 1..MOMENTS_MAX {
        let rig = Rig::new(2);
        let cache = Arc::clone(&rig.cache);
        let others = move || {
            act_as(WRITER);
            for (value, at) in [(1, earlier), (2, later)] {
                assert!(try_write(&cache, at, value), "there is space");
                cache.flush().expect("the cache runs");
            }
            cache.request_drain();
        };
        let (is_drained, met) = meet(moment, others, || {
            let on = |disk: &DiskImage, at: u64, value: u8| {
                let mut bytes = [0; 512];
                disk.read(at, &mut bytes);
                bytes == [value; 512]
            };
            for _ in 0..60 {
                let _ = step(&rig.environment, &rig.worker);
                // Whatever remains of what was written and not flushed.
                for seed in 0..4 {
                    let left = rig.disk.image_after_power_cut(seed);
                    assert!(
                        on(&left, earlier, 1) || !on(&left, later, 2),
                        "moment {moment}: the later write is there first"
                    );
                }
            }
            on(&rig.disk.contents(), later, 2)
        });
        match met {
            Met::Came => moments += 1,
            Met::Blocked => continue,
            Met::Never => break,
        }
        assert!(moment > 100 || is_drained, "moment {moment}: not all of it is drained");
    }
    assert!(moments >= 20, "{moments} moments are too few to come between");
}

/// A drained epoch that other threads see is already durable.
#[test]
fn drained_is_seen_only_when_it_is_durable() {
    let rig = Rig::new(1);
    let cache = Arc::downgrade(&rig.cache);
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let note = Arc::clone(&seen);
    rig.memory.watch(1000, 1, move |moment| {
        if let Some(cache) = cache.upgrade() {
            note.lock().push((cache.drained_epoch(), moment));
        }
    });
    for round in 0..3 {
        rig.write(0, 1 + round);
        rig.drain();
    }
    rig.memory.unwatch();
    let moments = std::mem::take(&mut *seen.lock());
    assert!(moments.len() > 10, "{} moments", moments.len());
    for (drained, memory) in moments {
        let (environment, backend) = (Arc::clone(&rig.environment), rig.backend);
        let memory = memory.power_cut(1, cbd_sim::Keep::Nothing);
        let after = crate::rig::drained_of(environment, memory, backend);
        assert!(after >= drained, "{drained} was seen, and {after} is there after a power cut");
    }
}
