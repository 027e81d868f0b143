//! Others come between the steps of a flush.

use crate::meeting::{Met, meet};
use crate::rig::{BLOCK, MOMENTS_MAX, READER, Rig, WRITER, try_write};
use cbd_engine::Admission;
use cbd_sim::act_as;
use cbd_types::{ByteRange, CHUNK};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

/// A write that comes between the steps of one flush is marked by the next: when it is damaged later, that shows.
#[test]
fn a_write_between_the_steps_of_a_flush_is_marked_by_the_next() {
    let mut moments = 0;
    for moment in 1..MOMENTS_MAX {
        let rig = Rig::new(2);
        rig.write(0, 1);
        let cache = Arc::clone(&rig.cache);
        let others = move || {
            act_as(WRITER);
            assert!(try_write(&cache, 0, 2), "there is space");
            act_as(READER);
        };
        act_as(READER);
        let (flushed, met) = meet(moment, others, || rig.cache.flush());
        flushed.expect("the cache runs");
        match met {
            Met::Came => moments += 1,
            Met::Blocked => continue,
            Met::Never => break,
        }
        rig.cache.flush().expect("the cache runs");
        let image = rig.memory.image();
        let damaged = (0..image.len() as u64).step_by(BLOCK as usize / 64);
        for at in damaged.filter(|at| image[*at as usize..].starts_with(&[2; 64])) {
            rig.memory.flip(at, 5);
        }
        let rig = rig.restart();
        let seen = rig.see(0);
        assert!(seen.is_err(), "moment {moment}: what was flushed and is damaged reads as {seen:?}");
        let damaged = rig.cache.status().damaged;
        assert!(damaged.iter().any(|found| found.range.overlaps(&ByteRange::at(0, BLOCK))), "{damaged:?}");
    }
    assert!(moments >= 4, "{moments} moments are too few to come between");
}

/// A flush that comes while records are stored and not fenced waits for them: else their epoch would be complete without them.
#[test]
fn a_flush_waits_for_writes_that_are_being_stored() {
    for together in [false, true] {
        let mut waits = 0;
        for moment in 1..MOMENTS_MAX {
            let rig = Rig::new(2);
            for chunk in 0..2 {
                rig.write(chunk * CHUNK, 1);
            }
            rig.cache.flush().expect("the cache runs");
            let before = rig.memory.counters();
            let (cache, memory) = (Arc::clone(&rig.cache), rig.memory.clone());
            let are_stored = Rc::new(Cell::new(false));
            let noted = Rc::clone(&are_stored);
            let others = move || {
                let now = memory.counters();
                noted.set(now.stores > before.stores && now.fences == before.fences);
                act_as(READER);
                cache.flush().expect("the cache runs");
                act_as(WRITER);
            };
            act_as(WRITER);
            let writes = [0, 1].map(|chunk| (ByteRange::at(chunk * CHUNK, BLOCK), &[2; BLOCK as usize][..]));
            let ((), met) = meet(moment, others, || match together {
                true => rig.cache.write_together(&writes, Waker::noop(), |_, done| {
                    assert!(matches!(done, Ok(Admission::Done(_))))
                }),
                false => assert!(try_write(&rig.cache, 0, 2), "there is space"),
            });
            match met {
                Met::Came => {
                    assert!(!are_stored.get(), "together {together}, moment {moment}: it came before")
                }
                Met::Blocked => waits += u32::from(are_stored.get()),
                Met::Never => break,
            }
        }
        // Before the record, its mirror and the fence.
        assert!(waits >= 3, "{waits} moments at which it waits");
    }
}

/// Of two forced writes to one lane one mark is stored, whoever writes there meanwhile: a second one would go over the last that is
/// durable while the first is not.
#[test]
fn a_lane_is_marked_once_behind_a_fence() {
    let mut moments = 0;
    for moment in 1..MOMENTS_MAX {
        let rig = Rig::new(2);
        for chunk in [0, 1] {
            rig.write(chunk * CHUNK, 1);
            rig.write(chunk * CHUNK + BLOCK, 1);
        }
        let (cache, memory) = (Arc::clone(&rig.cache), rig.memory.clone());
        let by_others = Rc::new(Cell::new(0));
        let noted = Rc::clone(&by_others);
        let others = move || {
            let before = memory.counters().stores;
            assert!(try_write(&cache, 2 * BLOCK, 2), "there is space");
            noted.set(memory.counters().stores - before);
        };
        let one = ByteRange::at(0, BLOCK);
        let ranges = [one, ByteRange::at(CHUNK, BLOCK), ByteRange::at(BLOCK, BLOCK)];
        let before = rig.memory.counters().stores;
        let (forced, met) = meet(moment, others, || rig.cache.force_unit_access(&ranges));
        forced.expect("the cache runs");
        match met {
            Met::Came => moments += 1,
            Met::Blocked => continue,
            Met::Never => break,
        }
        let stored = rig.memory.counters().stores - before - by_others.get();
        assert_eq!(stored, 2, "moment {moment}: marks of two lanes");
    }
    assert!(moments >= 4, "{moments} moments are too few to come between");
}
