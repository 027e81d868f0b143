//! A lane that goes on in its last segment, because a quarantine took the last free one before the crash: what recovery
//! dropped there stays dropped, whatever is written over its data.

use crate::rig::{BLOCK, PAGE, Rig, Seen, Shape};
use cbd_engine::Transport;
use cbd_sim::Keep;
use cbd_types::{BackendId, ByteRange, Region};
use std::sync::{Arc, Mutex};

/// Chunks of two lanes. One of them is full of rot; the other's last write was torn.
const ROTTEN: u64 = 0;
const TORN: u64 = 4 << 20;
const TORN_BLOCK: u64 = TORN + 100 * BLOCK;
const VALUE: u8 = 77;

/// Crashed after so many steps of writeback, a torn write, and as many more as it takes until quarantines have used the
/// segments that are kept back. The base of the segment with the torn write; `None` where it did not come to that, or where
/// the write has a mark.
fn with_a_torn_write_after(steps: usize) -> Option<(Rig, u64)> {
    let mut rig = Rig::of(Shape { device: 8 << 20, lanes_max: 2, segments: 17, ..Shape::default() });
    rig.write(TORN, BLOCK, 1);
    let log = rig.first_log();
    let mut block = 0;
    while rig.try_write(ROTTEN + block * BLOCK, BLOCK, 9) {
        block += 1;
    }
    let rotten = rig.logs().into_iter().filter(|other| other.base != log.base);
    rotten.for_each(|log| rig.lose_data(log, 1));
    let reserve = rig.cache.status().free_segments;
    rig.cache.request_drain();
    for _ in 0..steps {
        rig.step();
    }
    if !rig.try_write(TORN_BLOCK, BLOCK, VALUE) {
        return None;
    }
    (0..300).find(|_| {
        rig.step();
        rig.cache.status().free_segments < reserve
    })?;
    rig.memory.flip(log.base + log.size - PAGE - 2 * BLOCK + 17, 3);
    let rig = rig.restart();
    (rig.cache.status().free_segments < reserve && rig.see(TORN_BLOCK) == Seen::Initial)
        .then_some((rig, log.base))
}

#[test]
fn a_dropped_record_does_not_come_back_with_data_that_is_written_later() {
    let (mut rig, base) = (0..200).find_map(with_a_torn_write_after).expect("one of the schedules");
    rig.drain();
    assert_eq!(rig.see(TORN_BLOCK), Seen::Initial);
    // The same bytes again, elsewhere on the device and in the same place of the segment.
    let moments = Arc::new(Mutex::new(Vec::new()));
    let witness = Arc::clone(&moments);
    rig.memory.watch(1000, 1, move |memory| witness.lock().expect("nobody panics").push(memory));
    assert!(rig.try_write(TORN + 200 * BLOCK, BLOCK, VALUE), "there is space");
    rig.memory.unwatch();
    let data = (base + (64 << 10) - PAGE - 2 * BLOCK) as usize;
    assert!(rig.memory.image()[data..][..BLOCK as usize].iter().all(|byte| *byte == VALUE));
    let moments = std::mem::take(&mut *moments.lock().expect("nobody panics"));
    assert!(moments.len() > 3, "{} moments", moments.len());
    for (moment, memory) in moments.iter().enumerate() {
        for fate in 0..200 {
            let memory = memory.fork().power_cut(fate, Keep::Random);
            let transport = Transport::open(Arc::clone(&rig.environment), Region::new(memory)).unwrap();
            let cache = transport.open_cache(BackendId(0)).unwrap();
            let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
            cache.read(ByteRange::at(TORN_BLOCK, BLOCK), &mut bytes, &mut misses).expect("nothing is lost");
            assert_eq!(misses.len(), 1, "moment {moment}, fate {fate}: it was not there after the crash");
            misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
        }
    }
}
