//! Other operations run between the steps of a read.

use crate::meeting::{Met, meet};
use crate::rig::{BLOCK, MOMENTS_MAX, READER, Rig, WRITER, same, settle, try_write};
use cbd_sim::act_as;
use cbd_types::{ByteRange, CHUNK};
use std::rc::Rc;
use std::sync::Arc;

/// Reclaims all clean segments and overwrites them with other data.
fn reuse_everything(rig: &Rig) -> impl FnOnce() + 'static {
    let (environment, worker) = (Arc::clone(&rig.environment), Rc::clone(&rig.worker));
    let cache = Arc::clone(&rig.cache);
    move || {
        for round in 0..3 {
            cache.request_drain();
            settle(&environment, &worker);
            act_as(WRITER);
            for at in (CHUNK / 2..CHUNK).step_by(BLOCK as usize).take(120) {
                if !try_write(&cache, at, 90 + round) {
                    break;
                }
            }
        }
        act_as(READER);
    }
}

#[test]
fn a_segment_that_is_read_is_not_reused() {
    let mut moments = 0;
    for moment in 1..MOMENTS_MAX {
        let rig = Rig::new(1);
        rig.write(0, 1);
        rig.drain();
        rig.set_gc(0);
        let others = reuse_everything(&rig);
        act_as(READER);
        let (mut bytes, mut misses) = (vec![0xee; BLOCK as usize], Vec::new());
        let (read, met) =
            meet(moment, others, || rig.cache.read(ByteRange::at(0, BLOCK), &mut bytes, &mut misses));
        match met {
            Met::Came => moments += 1,
            Met::Blocked => continue,
            Met::Never => break,
        }
        read.unwrap_or_else(|error| panic!("moment {moment}: {}", error.line()));
        if misses.is_empty() {
            assert_eq!(same(&bytes), Ok(1), "moment {moment}");
        }
        misses.into_iter().for_each(|miss| rig.cache.cancel_fill(miss));
        rig.expect(0, 1);
        let status = rig.cache.status();
        assert!(status.free_segments <= status.segments, "moment {moment}: a segment is free twice");
    }
    assert!(moments >= 3, "{moments} moments are too few to come between");
}

#[test]
fn a_reread_does_not_replace_a_concurrent_write() {
    let mut moments = 0;
    for moment in 1..MOMENTS_MAX {
        let rig = Rig::new(1);
        rig.write(0, 1);
        rig.drain();
        // The data of the block is damaged, and the disk has a copy.
        for at in (0..rig.memory.image().len() as u64).step_by(64) {
            if rig.memory.image()[at as usize..at as usize + 64] == [1; 64] {
                rig.memory.flip(at, 5);
                break;
            }
        }
        let cache = Arc::clone(&rig.cache);
        let others = move || {
            act_as(WRITER);
            assert!(try_write(&cache, 0, 2), "there is space");
            act_as(READER);
        };
        act_as(READER);
        let ((), met) = meet(moment, others, || {
            let (mut bytes, mut misses) = (vec![0xee; BLOCK as usize], Vec::new());
            rig.cache.read(ByteRange::at(0, BLOCK), &mut bytes, &mut misses).expect("the disk has it");
            // The data that the disk returned before the concurrent write.
            misses.into_iter().for_each(|miss| rig.cache.complete_fill(miss, &[1; BLOCK as usize]));
        });
        match met {
            Met::Came => moments += 1,
            Met::Blocked => continue,
            Met::Never => break,
        }
        rig.expect(0, 2);
        let rig = rig.restart();
        rig.expect(0, 2);
    }
    assert!(moments >= 3, "{moments} moments are too few to come between");
}
