//! Others come between the steps of a flush.

use crate::meeting::{Met, meet};
use crate::rig::{BLOCK, MOMENTS_MAX, READER, Rig, WRITER, try_write};
use cbd_sim::act_as;
use cbd_types::ByteRange;
use std::sync::Arc;

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
