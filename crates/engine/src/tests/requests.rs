//! What requests do that find no space, a stopped cache, a failed region or a disk that refuses everything.

use super::Op;
use super::rig::{Options, Rig, SECTOR};
use crate::{Admission, BatchedWrite, ZeroProgress};
use alloc::{boxed::Box, sync::Arc, vec, vec::Vec};
use cbd_format::crc32c;
use cbd_types::{ByteRange, CHUNK, Class, Error, ErrorKind, LaneId, Result};
use core::sync::atomic::{AtomicUsize, Ordering};

const BLOCK: u64 = 4096;

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

/// Whether a request is done, waits, or fails with which error.
fn outcome(result: Result<Admission>) -> core::result::Result<bool, ErrorKind> {
    result.map(|admission| matches!(admission, Admission::Done(_))).map_err(|error| error.kind())
}

fn zero(rig: &Rig, range: ByteRange) -> core::result::Result<bool, ErrorKind> {
    outcome(rig.cache.zero(range, false, &mut ZeroProgress::default(), &rig.waker))
}

/// The outcomes of writes of a block each, by their numbers.
fn together(rig: &Rig, blocks: &[u64]) -> Vec<core::result::Result<bool, ErrorKind>> {
    let data = [7; BLOCK as usize];
    let writes: Vec<_> = blocks.iter().map(|number| (block(*number), &data[..]).into()).collect();
    let mut outcomes = vec![None; blocks.len()];
    rig.cache.write_together(Class::Unmarked, &writes, &rig.waker, |number, result| {
        outcomes[number] = Some(outcome(result))
    });
    outcomes.into_iter().map(|outcome| outcome.expect("each has one")).collect()
}

fn fill_up(rig: &Rig) {
    while rig.write(block(900), 1) {}
}

fn miss(rig: &Rig, range: ByteRange) -> crate::Miss {
    let (mut bytes, mut misses) = (vec![0; range.len() as usize], Vec::new());
    rig.cache.read(range, &mut bytes, &mut misses).expect("it runs");
    misses.pop().expect("it is not cached")
}

#[test]
fn the_first_request_that_makes_data_dirty_is_noted_before_anything_is_stored() {
    type Request = fn(&Rig) -> core::result::Result<bool, ErrorKind>;
    let requests: [Request; 3] = [
        |rig| outcome(rig.cache.write(block(0), &[1; BLOCK as usize], &rig.waker)),
        |rig| zero(rig, block(0)),
        |rig| together(rig, &[0]).remove(0),
    ];
    for request in requests {
        let (rig, count) = (Rig::new(Options::default()), Arc::new(AtomicUsize::new(0)));
        let noted = Arc::clone(&count);
        rig.cache.before_first_write(Box::new(move || match noted.fetch_add(1, Ordering::Relaxed) {
            0 => Err(Error::new(ErrorKind::System, "the test fails it")),
            _ => Ok(()),
        }));
        rig.transport.region().memory().take_ops();
        assert_eq!(request(&rig), Err(ErrorKind::System));
        assert_eq!(rig.transport.region().memory().take_ops(), []);
        assert_eq!((request(&rig), request(&rig)), (Ok(true), Ok(true)));
        assert_eq!(count.load(Ordering::Relaxed), 2, "noted once");
    }
}

#[test]
fn no_record_follows_a_store_that_failed() {
    let options = Options { device: 2 * CHUNK, lanes: 2, segments: 19, ..Options::default() };
    let rig = Rig::new(options);
    let waiting = miss(&rig, block(9));
    assert!(rig.write(block(0), 1) && rig.write(ByteRange::at(CHUNK, BLOCK), 1));
    let memory = rig.transport.region().memory();
    memory.fail_stores_after(0);
    assert_eq!(outcome(rig.cache.write(block(1), &[1; BLOCK as usize], &rig.waker)), Err(ErrorKind::Media));
    memory.take_ops();
    let media = Err(ErrorKind::Media);
    assert_eq!(outcome(rig.cache.write(block(1), &[1; BLOCK as usize], &rig.waker)), media);
    assert_eq!(zero(&rig, ByteRange { start: 0, end: 2 * CHUNK }), media);
    assert_eq!(together(&rig, &[1, 1024, 2]), [media, media, media]);
    rig.cache.complete_fill(waiting, &[1; BLOCK as usize]);
    let stored = memory.take_ops().into_iter().filter(|op| matches!(op, Op::Store(..))).count();
    assert_eq!(stored, 0);
    assert_eq!(rig.cache.flush().map_err(|error| error.kind()), Err(ErrorKind::Media));
}

#[test]
fn a_cache_that_is_stopped_while_writes_are_done_together_does_no_more_of_them() {
    let rig = Rig::new(Options::default());
    let data = [7; BLOCK as usize];
    // They are in one lane, so each has a fence of its own.
    let writes = [0, 1].map(|number| (block(number), &data[..]).into());
    let mut outcomes = Vec::new();
    rig.cache.write_together(Class::Unmarked, &writes, &rig.waker, |number, result| {
        rig.cache.stop();
        outcomes.push((number, outcome(result)));
    });
    assert_eq!(outcomes, [(0, Ok(true)), (1, Err(ErrorKind::Stopped))]);
    assert_eq!(rig.cache.status().written_bytes, BLOCK);
}

#[test]
fn of_writes_together_those_without_space_wait_and_the_others_are_done() {
    let options = Options { device: 2 * CHUNK, lanes: 2, segments: 19, ..Options::default() };
    let mut rig = Rig::new(options);
    assert!(rig.write(ByteRange::at(CHUNK, BLOCK), 1));
    fill_up(&rig);
    // The other lane has room in its open segment.
    assert_eq!(together(&rig, &[1, 1024, 2]), [Ok(false), Ok(true), Ok(false)]);
    assert!(rig.cache.status().writers_waiting);
    rig.disk.with(|state| state.unwritable = vec![ByteRange { start: 0, end: 2 * CHUNK }]);
    while !rig.cache.status().is_stalled {
        rig.step();
    }
    let refused = Err(ErrorKind::Backing);
    assert_eq!(together(&rig, &[1, 1025, 2]), [refused, Ok(true), refused]);
    assert_eq!(zero(&rig, block(3)), Ok(true), "a record without data still finds room");
    while zero(&rig, block(3)) == Ok(true) {}
    assert_eq!(zero(&rig, block(3)), refused);
}

#[test]
fn zeroes_of_several_lanes_continue_where_there_was_no_space() {
    let options = Options { device: 2 * CHUNK, lanes: 2, segments: 19, ..Options::default() };
    let mut rig = Rig::new(options);
    let lane = |at| rig.cache.base().identity().lanes.lane_of(at);
    // The first lane has room, the second one has none.
    let (first, second) = if lane(0) == LaneId(0) { (0, CHUNK) } else { (CHUNK, 0) };
    assert!(rig.write(ByteRange::at(first, BLOCK), 1));
    while rig.write(ByteRange::at(second, BLOCK), 1) {}
    while rig.zero(ByteRange::at(second, SECTOR), false) {}
    let (all, mut progress) = (ByteRange { start: 0, end: 2 * CHUNK }, ZeroProgress::default());
    let records = rig.cache.status().records;
    for _ in 0..3 {
        let result = rig.cache.zero(all, false, &mut progress, &rig.waker);
        assert_eq!(outcome(result), Ok(false));
        assert_eq!(rig.cache.status().records, records + 1, "the first lane is zeroed once");
    }
    rig.drain();
    assert_eq!(outcome(rig.cache.zero(all, false, &mut progress, &rig.waker)), Ok(true));
    for at in [first, second] {
        assert_eq!(rig.read(ByteRange::at(at, BLOCK)), [0; BLOCK as usize]);
    }
}

#[test]
fn nothing_is_cached_of_a_read_while_writes_wait_for_space() {
    let rig = Rig::new(Options::default());
    while rig.write(ByteRange::at(0, BLOCK + SECTOR), 1) {}
    assert!(rig.cache.status().writers_waiting);
    let range = ByteRange::at(2 << 20, SECTOR);
    let free = rig.cache.status().free_segments;
    rig.cache.complete_fill(miss(&rig, range), &[1; SECTOR as usize]);
    assert_eq!(rig.cache.status().filled_bytes, 0);
    rig.cache.stop_waiting(&rig.waker);
    assert!(!rig.cache.status().writers_waiting);
    assert_eq!(rig.cache.status().free_segments, free);
}

#[test]
fn a_stopped_cache_caches_nothing_of_a_read() {
    let rig = Rig::new(Options::default());
    let waiting = miss(&rig, block(3));
    rig.cache.stop();
    rig.cache.complete_fill(waiting, &[1; BLOCK as usize]);
    assert_eq!((rig.cache.status().filled_bytes, rig.cache.status().records), (0, 0));
}

#[test]
fn who_abandons_a_cache_wakes_those_that_wait() {
    let rig = Rig::new(Options::default());
    fill_up(&rig);
    assert!(rig.cache.status().writers_waiting && rig.room.rings() == 0);
    rig.cache.abandon();
    assert_eq!(rig.room.rings(), 1);
}

#[test]
fn each_request_that_stores_a_record_touches_its_lane() {
    type Request = fn(&Rig);
    let requests: [Request; 4] = [
        |rig| assert!(rig.write(block(0), 1)),
        |rig| assert!(rig.zero(block(0), false)),
        |rig| assert_eq!(together(rig, &[0]), [Ok(true)]),
        |rig| drop(rig.read(block(0))),
    ];
    for request in requests {
        let rig = Rig::new(Options::default());
        rig.cache.flush().expect("it runs");
        request(&rig);
        assert!(rig.cache.lanes()[0].is_touched());
    }
}

#[test]
fn a_request_whose_own_store_fails_is_not_acknowledged() {
    type Request = fn(&Rig) -> core::result::Result<bool, ErrorKind>;
    let requests: [Request; 3] = [
        |rig| outcome(rig.cache.write(block(0), &[1; BLOCK as usize], &rig.waker)),
        |rig| zero(rig, block(0)),
        |rig| together(rig, &[0]).remove(0),
    ];
    for request in requests {
        let rig = Rig::new(Options::default());
        assert!(rig.write(block(9), 1));
        rig.transport.region().memory().fail_stores_after(0);
        assert_eq!(request(&rig), Err(ErrorKind::Media));
    }
}

#[test]
fn data_that_is_not_what_its_checksum_is_of_is_not_written() {
    for data_crc in [true, false] {
        let rig = Rig::new(Options { data_crc, ..Options::default() });
        let write = |range: ByteRange, sum: fn(u32) -> u32| {
            let data = vec![2; range.len() as usize];
            let write = BatchedWrite { range, data: &data, data_crc: Some(sum(crc32c(&data))) };
            let mut result = Ok(false);
            rig.cache.write_together(Class::Unmarked, &[write], &rig.waker, |_, done| result = outcome(done));
            result
        };
        let range = ByteRange::at(0, 8 * BLOCK);
        assert!((0..8).all(|number| rig.write(block(number), 1)));
        for (start, length) in [(0, BLOCK), (SECTOR, SECTOR), (0, 2 * BLOCK), (SECTOR, 4 * BLOCK)] {
            let (part, records) = (ByteRange::at(start, length), rig.cache.status().dirty_records);
            // More often than there is space for.
            for _ in 0..500 {
                assert_eq!(write(part, |sum| sum ^ 1), Err(ErrorKind::Mismatch), "{part}");
            }
            assert_eq!(rig.cache.status().dirty_records, records);
            assert!(rig.read(range).iter().all(|byte| *byte == 1), "{part}");
            assert_eq!(write(part, |sum| sum), Ok(true), "{part}");
            assert_eq!(rig.read(part), vec![2; length as usize]);
            assert!(rig.write(part, 1));
        }
        let data = [3; BLOCK as usize];
        let batch = [Some(crc32c(&data) ^ 1), Some(crc32c(&data)), None].into_iter().zip(0..);
        let batch: Vec<_> = batch
            .map(|(data_crc, number)| BatchedWrite { range: block(number), data: &data, data_crc })
            .collect();
        let mut results = Vec::new();
        rig.cache.write_together(Class::Unmarked, &batch, &rig.waker, |_, done| results.push(outcome(done)));
        assert_eq!(results, [Err(ErrorKind::Mismatch), Ok(true), Ok(true)]);
        let rig = rig.reopened();
        let firsts = rig.read(range).chunks(BLOCK as usize).map(|block| block[0]).collect::<Vec<_>>();
        assert_eq!(firsts, [1, 3, 3, 1, 1, 1, 1, 1], "the next process finds the same");
    }
}

#[test]
fn long_writes_and_long_fills_are_cached_as_short_ones_are() {
    let options = Options { device: 6 * CHUNK, segments: 40, ..Options::default() };
    let rig = Rig::new(options);
    for (number, length) in [SECTOR, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK].into_iter().enumerate() {
        // Far from the begin of the device, too.
        for start in [0, 5 * CHUNK].map(|far| far + number as u64 * 16 * BLOCK + SECTOR) {
            let (range, data) = (ByteRange::at(start, length), vec![number as u8 + 1; length as usize]);
            rig.cache.write_together(
                Class::Unmarked,
                &[(range, &data[..]).into()],
                &rig.waker,
                |_, result| {
                    assert_eq!(outcome(result), Ok(true));
                },
            );
            assert_eq!(rig.read(range), data);
            let read = ByteRange::at(start + 8 * BLOCK, length);
            let filled = rig.cache.status().filled_bytes;
            let data = rig.read(read);
            assert_eq!(rig.cache.status().filled_bytes, filled + length, "{length} bytes");
            assert_eq!(rig.read(read), data);
            assert!(rig.cache.extents(read).iter().all(|extent| extent.cached && !extent.dirty));
        }
    }
}

#[test]
fn hits_and_misses_are_counted_by_what_is_cached() {
    let rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1));
    rig.read(ByteRange::at(0, 2 * BLOCK));
    let status = rig.cache.status();
    assert_eq!((status.read_hit_bytes, status.read_missed_bytes), (BLOCK, BLOCK));
    rig.read(ByteRange::at(SECTOR, SECTOR));
    rig.read(ByteRange::at(0, 2 * BLOCK));
    let status = rig.cache.status();
    assert_eq!((status.read_hit_bytes, status.read_missed_bytes), (3 * BLOCK + SECTOR, BLOCK));
}

#[test]
fn an_epoch_is_drained_when_nothing_of_it_is_dirty() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1));
    let first = rig.cache.request_drain();
    assert!(!rig.cache.is_drained(first));
    rig.settle();
    assert!(rig.cache.is_drained(first) && rig.cache.drained_epoch() == first);
    let second = rig.cache.request_drain();
    assert!(rig.cache.is_drained(second) && rig.cache.drained_epoch() < second, "nothing was written in it");
    assert!(rig.write(block(0), 2));
    assert!(!rig.cache.is_drained(rig.cache.request_drain()));
}
