//! Other operations run between the steps of reclaim.

use crate::meeting::{Met, meet};
use crate::rig::{BLOCK, MOMENTS_MAX, Rig, WRITER, settle, try_write};
use cbd_sim::crash::crash_now;
use cbd_sim::{act_as, until_crash};
use cbd_types::ByteRange;
use std::sync::Arc;

/// Three clean segments of blocks, of which the first blocks were read.
fn rig_with_clean_segments() -> Rig {
    let rig = rig_with_unread_segments();
    (0..8).for_each(|block| rig.expect(block * BLOCK, 1 + block as u8));
    rig.set_gc(0);
    rig
}

/// Three clean segments of blocks, none of which was read.
fn rig_with_unread_segments() -> Rig {
    let rig = Rig::new(1);
    for block in 0..36 {
        rig.write(block * BLOCK, 1 + block as u8);
    }
    rig.drain();
    rig
}

/// The number of second chances that reclaim gives after `look` ran.
fn chances_after(look: impl FnOnce(&Rig)) -> u64 {
    let rig = rig_with_unread_segments();
    look(&rig);
    rig.set_gc(0);
    settle(&rig.environment, &rig.worker);
    let rare = rig.cache.status().rare;
    assert!(rare.segments_reclaimed >= 2, "{rare:?}");
    rare.second_chances
}

#[test]
fn a_block_that_a_client_reads_gets_a_second_chance() {
    assert_eq!(chances_after(|_| {}), 0);
    assert_eq!(chances_after(|rig| (0..4).for_each(|block| rig.expect(block * BLOCK, 1 + block as u8))), 4);
    // A read of several blocks uses another code path.
    let read = |rig: &Rig| {
        let (mut bytes, mut misses) = (vec![0; 4 * BLOCK as usize], Vec::new());
        rig.cache.read(ByteRange::at(0, 4 * BLOCK), &mut bytes, &mut misses).expect("it is there");
        assert_eq!(misses.len(), 0);
    };
    assert_eq!(chances_after(read), 4);
}

#[test]
fn a_query_of_what_is_cached_gives_no_second_chance() {
    let ask = |rig: &Rig| {
        let extents = rig.cache.extents(ByteRange::at(0, 36 * BLOCK));
        assert!(extents.iter().all(|extent| extent.cached && !extent.dirty), "{extents:?}");
    };
    assert_eq!(chances_after(ask), 0);
}

#[test]
fn a_write_while_its_block_is_given_a_second_chance_stays() {
    let mut moments = 0;
    for moment in 1..MOMENTS_MAX {
        let rig = rig_with_clean_segments();
        let cache = Arc::clone(&rig.cache);
        let others = move || {
            act_as(WRITER);
            (0..8).for_each(|block| assert!(try_write(&cache, block * BLOCK, 100 + block as u8)));
        };
        let ((), met) = meet(moment, others, || settle(&rig.environment, &rig.worker));
        match met {
            Met::Came => moments += 1,
            Met::Blocked => continue,
            Met::Never => break,
        }
        (0..36).for_each(|block| rig.expect(block * BLOCK, if block < 8 { 100 } else { 1 } + block as u8));
        let rig = rig.restart();
        (0..36).for_each(|block| rig.expect(block * BLOCK, if block < 8 { 100 } else { 1 } + block as u8));
    }
    assert!(moments >= 20, "{moments} moments are too few to come between");
}

/// The power is cut when a writer between the steps of reclaim has filled all the segments that it got.
#[test]
fn what_is_written_into_a_reclaimed_segment_survives_a_power_cut_at_once() {
    let mut moments = 0;
    for moment in 1..MOMENTS_MAX {
        let rig = rig_with_clean_segments();
        let cache = Arc::clone(&rig.cache);
        let written = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let count = Arc::clone(&written);
        let others = move || {
            act_as(WRITER);
            for block in 0..200 {
                if !try_write(&cache, (64 + block) * BLOCK, 1 + block as u8) {
                    break;
                }
                count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            crash_now();
        };
        let ended = until_crash(|| meet(moment, others, || settle(&rig.environment, &rig.worker)));
        let met = ended.map_or(Met::Came, |((), met)| met);
        match met {
            Met::Came => moments += 1,
            Met::Blocked => continue,
            Met::Never => break,
        }
        let rig = rig.restart();
        (0..36).for_each(|block| rig.expect(block * BLOCK, 1 + block as u8));
        for block in 0..written.load(std::sync::atomic::Ordering::Relaxed) {
            rig.expect((64 + block) * BLOCK, 1 + block as u8);
        }
        assert_eq!(rig.cache.status().damaged, [], "moment {moment}");
    }
    assert!(moments >= 20, "{moments} moments are too few to come between");
}
