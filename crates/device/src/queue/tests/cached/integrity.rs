//! Writes that come with a checksum of their data.

use super::*;
use cbd_engine::{CacheMode, crc32c};

/// A write of this value whose data is as it was sent, or not.
fn sent(id: u64, block: u64, value: u8, is_intact: bool) -> Request {
    let request = write(id, block * BLOCK, BLOCK, value);
    let sum = crc32c(&request.buffer);
    Request { data_crc: Some(if is_intact { sum } else { !sum }), ..request }
}

const DIFFERS: Option<ErrorKind> = Some(ErrorKind::Mismatch);

/// The first byte of a block, as a client reads it.
fn value(rig: &mut Rig, block: u64) -> u8 {
    rig.submit(read(99, block * BLOCK, BLOCK));
    for _ in 0..10 {
        rig.queue.poll(&mut rig.done);
    }
    rig.done.drain(..).next_back().expect("it completes").buffer[0]
}

#[test]
fn data_that_differs_from_its_checksum_is_not_stored_however_it_is_submitted() {
    let mut rig = rig();
    // One by one, as one request of a batch, and alone in a batch.
    rig.submit(sent(0, 0, 1, true));
    rig.submit(sent(1, 0, 2, false));
    assert_eq!((rig.completed(), value(&mut rig, 0)), (vec![(0, None), (1, DIFFERS)], 1));
    for id in 0..3 {
        rig.plug(sent(id, id, 3, id != 1));
    }
    assert_eq!(rig.poll(), [(0, None), (1, DIFFERS), (2, None)]);
    assert_eq!([0, 1, 2].map(|block| value(&mut rig, block)), [3, 7, 3]);
    for is_intact in [false, true] {
        rig.plug(sent(5, 5, 4, is_intact));
        let expected = if is_intact { (None, 4) } else { (DIFFERS, 7) };
        assert_eq!((rig.poll(), value(&mut rig, 5)), (vec![(5, expected.0)], expected.1));
    }
}

#[test]
fn a_write_that_waits_for_space_has_the_data_that_was_sent() {
    let mut rig = rig();
    rig.fill_up();
    rig.plug(sent(2000, 1, 2, false));
    rig.plug(sent(2001, 2, 2, true));
    rig.queue.unplug(&mut rig.done);
    assert_eq!(rig.completed(), [(2000, DIFFERS)], "the other one waits");
    rig.make_room();
    let ended: Vec<_> = (0..100).flat_map(|_| rig.poll()).collect();
    assert!(ended.contains(&(2001, None)), "{ended:?}");
}

#[test]
fn what_goes_past_the_cache_has_the_data_that_was_sent() {
    let submits: [fn(&mut Rig, Request); 2] = [Rig::submit, Rig::plug];
    for submit in submits {
        for settings in [
            Settings { cache_mode: CacheMode::Writearound, ..Settings::default() },
            Settings { sequential_write_cutoff: BLOCK, ..Settings::default() },
        ] {
            let mut rig = rig_with(DEVICE, settings);
            rig.make_room();
            submit(&mut rig, write(0, 0, BLOCK, 1));
            rig.poll();
            rig.asked();
            submit(&mut rig, sent(1, 1, 2, false));
            assert_eq!((rig.poll(), rig.asked()), (vec![(1, DIFFERS)], vec![]), "{settings:?}");
            submit(&mut rig, write(2, 40 * BLOCK, BLOCK, 1));
            rig.poll();
            rig.asked();
            submit(&mut rig, sent(3, 41, 2, true));
            assert_eq!(rig.asked(), [("write", 41 * BLOCK, BLOCK)], "{settings:?}");
            assert_eq!(rig.poll(), [(3, None)]);
        }
    }
}
