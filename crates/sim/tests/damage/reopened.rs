//! A lane that continues in its last segment, because a quarantine took the last free one before the crash. Records
//! that recovery dropped there stay dropped, whatever is written over their data. Also: which writers may use the
//! space behind such a quarantine.

use crate::rig::{BLOCK, PAGE, Rig, SECTOR, Seen, Shape};
use cbd_sim::Keep;
use cbd_types::ByteRange;

/// Chunks of two lanes. One lane is full of damage; the last write of the other was torn.
const ROTTEN: u64 = 0;
const TORN: u64 = 4 << 20;
const TORN_BLOCK: u64 = TORN + 100 * BLOCK;
const VALUE: u8 = 77;

/// A full cache, one lane of it damaged, and the base of the other lane's only segment, which has room. Also
/// returns the number of reserve segments.
fn full_beside_rot() -> (Rig, u64, u32) {
    let mut rig = Rig::of(Shape { device: 8 << 20, lanes_max: 2, segments: 17, ..Shape::default() });
    rig.write(TORN, BLOCK, 1);
    let log = rig.first_log();
    // Short writes: the damage of one segment takes more room than another has left behind its data.
    let mut sector = 0;
    while rig.try_write(ROTTEN + sector * SECTOR, SECTOR, 9) {
        sector += 2;
    }
    let rotten = rig.logs().into_iter().filter(|other| other.base != log.base);
    rotten.for_each(|log| rig.lose_data(log, 2));
    let reserve = rig.cache.status().free_segments;
    rig.cache.request_drain();
    (rig, log.base, reserve)
}

/// Writes back until quarantines have used a reserve segment.
fn use_the_reserve(rig: &mut Rig, reserve: u32) -> bool {
    (0..300).any(|_| {
        rig.step();
        rig.cache.status().free_segments < reserve
    })
}

/// A cache after `steps` steps of writeback, a torn write, as many more steps as quarantines need to use the reserve
/// segments, and a crash. `None` if the quarantines do not use the reserve, or if the write has a mark.
fn with_a_torn_write_after(steps: usize) -> Option<(Rig, u64)> {
    let (mut rig, base, reserve) = full_beside_rot();
    for _ in 0..steps {
        rig.step();
    }
    if !rig.try_write(TORN_BLOCK, BLOCK, VALUE) || !use_the_reserve(&mut rig, reserve) {
        return None;
    }
    rig.memory.flip(base + (64 << 10) - PAGE - 2 * BLOCK + 17, 3);
    let rig = rig.restart();
    (rig.cache.status().free_segments < reserve && rig.see(TORN_BLOCK) == Seen::Initial)
        .then_some((rig, base))
}

#[test]
fn writers_do_not_use_a_segment_that_is_reserved_for_quarantines() {
    let (mut rig, _, reserve) = full_beside_rot();
    assert!(rig.try_write(TORN_BLOCK, BLOCK, 1), "there is room in the open segment");
    assert!(use_the_reserve(&mut rig, reserve));
    assert!(!rig.try_write(TORN_BLOCK + BLOCK, BLOCK, 1), "a writer uses the space that quarantines need");
    rig.drain();
    assert!(rig.try_write(TORN_BLOCK + BLOCK, BLOCK, 1), "{:?}", rig.cache.status());
}

#[test]
fn a_dropped_record_does_not_come_back_with_data_that_is_written_later() {
    let (mut rig, base) = (0..200).find_map(with_a_torn_write_after).expect("one of the schedules");
    rig.drain();
    assert_eq!(rig.see(TORN_BLOCK), Seen::Initial);
    // The same bytes again, elsewhere on the device and at the same offset of the segment.
    let moments = rig.moments_of(|rig| {
        assert!(rig.try_write(TORN + 200 * BLOCK, BLOCK, VALUE), "there is space");
    });
    let data = (base + (64 << 10) - PAGE - 2 * BLOCK) as usize;
    assert!(rig.memory.image()[data..][..BLOCK as usize].iter().all(|byte| *byte == VALUE));
    for (moment, memory) in moments.iter().enumerate() {
        for fate in 0..200 {
            let cache = rig.opened(&memory.fork().power_cut(fate, Keep::Random));
            let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
            cache.read(ByteRange::at(TORN_BLOCK, BLOCK), &mut bytes, &mut misses).expect("nothing is lost");
            assert_eq!(misses.len(), 1, "moment {moment}, fate {fate}: it was not there after the crash");
            misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
        }
    }
}
