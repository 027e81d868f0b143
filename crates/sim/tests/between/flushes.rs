//! Other operations run between the steps of a flush.

use crate::meeting::{Met, meet};
use crate::rig::{BLOCK, MOMENTS_MAX, READER, Rig, WRITER, try_write};
use cbd_engine::{Admission, ZeroProgress};
use cbd_sim::act_as;
use cbd_types::{ByteRange, CHUNK};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

/// A write arrives between the steps of a flush. The next flush marks it, so that later damage of the write is
/// detected.
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

/// The operation that stores records in [`a_flush_waits_for_records_that_are_being_stored`].
#[derive(Clone, Copy, Debug)]
enum Stores {
    Write,
    WritesTogether,
    Zeroes,
    Discard,
}

/// A flush waits for records that are stored but not fenced; otherwise their epoch would count as complete
/// without them.
#[test]
fn a_flush_waits_for_records_that_are_being_stored() {
    for what in [Stores::Write, Stores::WritesTogether, Stores::Zeroes, Stores::Discard] {
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
            // A request without data begins with a fence that covers no store.
            let fences = before.fences + u64::from(matches!(what, Stores::Zeroes | Stores::Discard));
            let others = move || {
                let now = memory.counters();
                noted.set(now.stores > before.stores && now.fences == fences);
                act_as(READER);
                cache.flush().expect("the cache runs");
                act_as(WRITER);
            };
            act_as(WRITER);
            let writes =
                [0, 1].map(|chunk| (ByteRange::at(chunk * CHUNK, BLOCK), &[2; BLOCK as usize][..]).into());
            let zero = |discard| {
                let (range, waker) = (ByteRange::at(0, BLOCK), Waker::noop());
                let done = rig.cache.zero(range, discard, &mut ZeroProgress::default(), waker);
                assert!(matches!(done, Ok(Admission::Done(_))));
            };
            let ((), met) = meet(moment, others, || match what {
                Stores::Write => assert!(try_write(&rig.cache, 0, 2), "there is space"),
                Stores::WritesTogether => {
                    rig.cache.write_together(cbd_types::Class::Unmarked, &writes, Waker::noop(), |_, done| {
                        assert!(matches!(done, Ok(Admission::Done(_))));
                    })
                }
                Stores::Zeroes => zero(false),
                Stores::Discard => zero(true),
            });
            match met {
                Met::Came => assert!(!are_stored.get(), "{what:?}, moment {moment}: it did not wait"),
                Met::Blocked => waits += u32::from(are_stored.get()),
                Met::Never => break,
            }
        }
        // Before the mirror and the fence; with data, before the record, too.
        assert!(waits >= 2, "{what:?}: {waits} moments at which it waits");
    }
}

/// While a flush waits for the pass, another flush can close and cover its epoch. It then stores and fences
/// nothing.
#[test]
fn a_flush_that_the_pass_of_another_flush_covered_makes_no_pass_of_its_own() {
    let mut served = 0;
    for moment in 1..MOMENTS_MAX {
        let rig = Rig::new(2);
        rig.write(0, 1);
        let after_others = Rc::new(Cell::new(None));
        let (cache, memory, noted) = (Arc::clone(&rig.cache), rig.memory.clone(), Rc::clone(&after_others));
        let others = move || {
            act_as(WRITER);
            cache.flush().expect("the cache runs");
            // Another pass would find this write to mark.
            assert!(try_write(&cache, CHUNK, 2), "there is space");
            noted.set(Some(memory.counters()));
            act_as(READER);
        };
        act_as(READER);
        let before = rig.memory.counters();
        let (flushed, met) = meet(moment, others, || rig.cache.flush());
        flushed.expect("the cache runs");
        match met {
            Met::Came => {}
            Met::Blocked => continue,
            Met::Never => break,
        }
        let (now, others) = (rig.memory.counters(), after_others.get().expect("the others ran"));
        if moment == 1 {
            // The flush had closed its epoch and was about to begin the pass.
            assert_eq!((now.stores, now.fences), (others.stores, others.fences), "a pass of its own");
            assert!(others.fences > before.fences);
            served += 1;
        }
    }
    assert_eq!(served, 1, "no flush ran before the pass began");
}

/// Two FUA writes to one lane store one mark, whatever other writes do meanwhile: a second mark would
/// overwrite the last durable one while the first is not durable.
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
