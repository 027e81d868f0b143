//! What a cache says of itself, whom it wakes, and what it refuses.

use super::rig::{Options, Rig, SECTOR, SEGMENT};
use super::{Op, bell};
use crate::{Admission, CachedState, LogEntry, Settings, Step};
use alloc::{vec, vec::Vec};
use cbd_format::{RecordKind, SegmentHeader, record::bytes_of};
use cbd_types::{ByteRange, CHUNK, Class, ErrorKind, LaneId, Result, SegmentId};

const BLOCK: u64 = 4096;

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

/// Kind, slot and range of each record of the first lane.
fn records(rig: &Rig) -> Vec<(RecordKind, u32, ByteRange)> {
    let mut seen = Vec::new();
    for segment in rig.cache.log().segments(LaneId(0)) {
        rig.cache.log().visit(&segment, &mut |slot, entry| {
            let LogEntry::Record(record) = entry else { panic!("nothing is lost") };
            seen.push((record.kind(), slot, record.range()));
        });
    }
    seen
}

#[test]
fn each_request_is_one_record_with_its_lines_behind_it() {
    let rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1) && rig.write(ByteRange::at(BLOCK + SECTOR, 16 << 10), 2));
    assert!(rig.zero(block(9), false) && rig.zero(block(10), true));
    rig.read(block(20));
    let long = ByteRange::at(BLOCK + SECTOR, 16 << 10);
    let expected = [
        (RecordKind::Write, 0, block(0)),
        (RecordKind::Write, 1, long),
        (RecordKind::WriteZeroes, 3, block(9)),
        (RecordKind::Discard, 4, block(10)),
        (RecordKind::Fill, 5, block(20)),
    ];
    assert_eq!(records(&rig), expected);
    let status = rig.cache.status();
    assert_eq!((status.records, status.dirty_records, status.dirty_bytes), (5, 4, BLOCK + (16 << 10)));
    // Two copies of each line, and the data.
    assert_eq!(status.stored_bytes, 6 * 128 + 2 * BLOCK + (16 << 10));
    assert_eq!((status.written_bytes, status.filled_bytes), (BLOCK + (16 << 10), BLOCK));
    assert_eq!((status.read_hit_bytes, status.read_missed_bytes), (0, BLOCK));
    assert_eq!(
        (status.segments, status.free_segments, status.lanes, status.segment_size),
        (8, 7, 1, SEGMENT)
    );
    assert_eq!((status.used_segments(), status.index_blocks), (1, 1 + 5 + 1));
    assert!(!status.is_all_on_backing() && status.missing_bytes() == status.dirty_bytes);
}

#[test]
fn a_write_stores_its_data_its_record_and_the_mirror_and_fences_once() {
    let rig = Rig::new(Options::default());
    rig.transport.region().memory().take_ops();
    assert!(rig.write(block(0), 1));
    let base = rig.cache.log().segments(LaneId(0))[0].base;
    let header = [Op::Store(base, 128), Op::Store(base + SEGMENT - 4096, 128), Op::Fence];
    let data = base + SEGMENT - 4096 - BLOCK;
    let record = |slot: u64| [base + 4096 + slot * 64, base + 8192 + slot * 64].map(|at| Op::Store(at, 64));
    let first = [&header[..], &[Op::Store(data, BLOCK)], &record(0), &[Op::Fence]].concat();
    assert_eq!(rig.transport.region().memory().take_ops(), first);
    assert!(rig.write(ByteRange::at(SECTOR, SECTOR), 2));
    let second = [&[Op::Store(data - SECTOR, SECTOR)][..], &record(1), &[Op::Fence]].concat();
    assert_eq!(rig.transport.region().memory().take_ops(), second);
    assert!(rig.zero(block(7), false));
    // The first fence is evidence for a request that covers no lane.
    let third = [&[Op::Fence][..], &record(2), &[Op::Fence]].concat();
    assert_eq!(rig.transport.region().memory().take_ops(), third);
}

#[test]
fn without_checksums_the_data_is_durable_before_its_record() {
    let rig = Rig::new(Options { data_crc: false, ..Options::default() });
    assert!(rig.write(block(0), 1));
    rig.transport.region().memory().take_ops();
    assert!(rig.write(block(1), 1));
    let ops = rig.transport.region().memory().take_ops();
    assert!(matches!(ops[..], [Op::Store(_, BLOCK), Op::Fence, Op::Store(..), Op::Store(..), Op::Fence]));
}

#[test]
fn the_header_of_a_segment_says_where_it_stands_in_the_history_of_its_lane() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1));
    rig.cache.flush().expect("it runs");
    rig = rig.reopened();
    assert!(rig.write(block(1), 1));
    let epoch = rig.cache.status().epoch.0;
    let logs = rig.cache.log().segments(LaneId(0));
    assert_eq!(logs.len(), 2, "a new run begins a new segment");
    let mut bytes = [0; 128];
    rig.transport.region().load(logs[1].base, &mut bytes).expect("it can be read");
    let cache_id = rig.cache.base().identity().cache_id;
    let header = SegmentHeader::decode(&bytes).expect("long enough").verify(logs[1].segment, cache_id, 1);
    let header = header.expect("it is good");
    let counters = [header.ordinal, header.run, header.cut, header.first_sequence, header.epoch];
    assert_eq!(counters.map(u64::from), [2, 2, 1, 2, epoch]);
    assert_eq!((header.generation.get(), header.ownership.get(), header.lane.get()), (1, 1, 0));
    assert_ne!(header.salt.get(), 0);
    let mut copy = [0; 128];
    rig.transport.region().load(logs[1].base + SEGMENT - 4096, &mut copy).expect("it can be read");
    assert_eq!((copy, bytes_of(&header)), (bytes, &bytes[..]));
    assert_ne!(logs[0].segment, logs[1].segment);
    assert!(logs[1].segment != SegmentId(0), "that holds the state");
}

#[test]
fn a_stopped_cache_refuses_everything_and_marks_its_lanes() {
    let rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1));
    rig.cache.stop();
    assert!(!rig.cache.lanes()[0].is_touched() && !rig.cache.is_abandoned());
    let stopped = Some(ErrorKind::Stopped);
    assert_eq!(kind(rig.cache.write(block(0), &[1; 4096], &rig.waker)), stopped);
    assert_eq!(
        kind(rig.cache.zero(block(0), true, &mut crate::ZeroProgress::default(), &rig.waker)),
        stopped
    );
    assert_eq!(kind(rig.cache.flush()), stopped);
    assert_eq!(kind(rig.cache.force_unit_access(&[block(0)])), stopped);
    assert_eq!(kind(rig.cache.read(block(0), &mut [0; 4096], &mut Vec::new())), stopped);
    let mut results = Vec::new();
    let data = [1; 4096];
    let writes = [0, 1].map(|number| (block(number), &data[..]).into());
    rig.cache.write_together(Class::Unmarked, &writes, &rig.waker, |number, result| {
        results.push((number, kind(result)))
    });
    assert_eq!(results, [(0, stopped), (1, stopped)]);
}

#[test]
fn an_abandoned_cache_leaves_no_mark() {
    let rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1) && !rig.cache.is_abandoned());
    rig.cache.abandon();
    assert!(rig.cache.is_abandoned() && rig.cache.lanes()[0].is_touched());
    assert_eq!(kind(rig.cache.flush()), Some(ErrorKind::Stopped));
    rig.cache.stop();
    assert!(rig.cache.lanes()[0].is_touched());
}

#[test]
fn who_waits_for_space_is_woken_by_reclaim_and_by_a_stop() {
    let mut rig = Rig::new(Options::default());
    let mut count = 0;
    while rig.write(block(count % 900), 1) {
        count += 1;
    }
    assert_eq!(rig.cache.base().pool().free(), rig.cache.base().pool().reserve());
    assert_eq!((rig.cache.status().writers_waiting, rig.room.rings()), (true, 0));
    rig.cache.stop_waiting(&rig.waker);
    assert!(!rig.cache.status().writers_waiting);
    assert!(!rig.write(block(0), 1));
    rig.settle();
    assert!(rig.room.rings() == 1 && rig.write(block(0), 1));
    while rig.write(block(count % 900), 1) {
        count += 1;
    }
    rig.cache.stop();
    assert_eq!(rig.room.rings(), 2);
}

#[test]
fn the_worker_is_woken_by_a_drain_by_settings_and_by_the_first_write_after_a_rest() {
    let mut rig = Rig::new(Options::default());
    let (bell, waker) = bell();
    rig.cache.set_worker_waker(waker);
    rig.cache.request_drain();
    assert_eq!(bell.rings(), 1);
    rig.cache.set_settings(Settings { gc_percent: 50, ..Settings::default() }).expect("valid");
    assert_eq!((bell.rings(), rig.cache.settings().gc_percent), (2, 50));
    let invalid = Settings { gc_percent: 99, ..Settings::default() };
    assert_eq!(kind(rig.cache.set_settings(invalid)), Some(ErrorKind::InvalidArgument));
    assert_eq!((bell.rings(), rig.cache.settings().gc_percent), (2, 50));
    rig.settle();
    assert!(rig.write(block(0), 1));
    assert_eq!(bell.rings(), 3);
    assert!(rig.write(block(1), 1));
    assert_eq!(bell.rings(), 3, "it is awake");
}

#[test]
fn extents_tell_what_is_cached_dirty_zero_or_neither() {
    let mut rig = Rig::new(Options { device: CHUNK + (64 << 10), segments: 17, ..Options::default() });
    assert!(rig.write(block(0), 1));
    rig.drain();
    assert!(rig.write(block(1), 2) && rig.write(block(2), 3) && rig.zero(block(4), false));
    let state = |first: u64, count: u64, zeroes, cached, dirty| CachedState {
        range: ByteRange::at(first * BLOCK, count * BLOCK),
        zeroes,
        cached,
        dirty,
    };
    let expected = [
        state(0, 1, false, true, false),
        state(1, 2, false, true, true),
        state(3, 1, false, false, false),
        state(4, 1, true, true, false),
        state(5, 1019 + 2, false, false, false),
    ];
    assert_eq!(rig.cache.extents(ByteRange::at(0, 1026 * BLOCK)), expected);
}

#[test]
fn damage_that_a_read_meets_fails_is_listed_once_and_ends_with_an_overwrite() {
    let rig = Rig::new(Options::default());
    assert!(rig.write(ByteRange::at(0, 2 * BLOCK), 1));
    let base = rig.cache.log().segments(LaneId(0))[0].base;
    let data = base + SEGMENT - 4096 - 2 * BLOCK;
    let _ = rig.transport.region().store(data + 100, &[9]);
    for _ in 0..2 {
        let (mut bytes, mut misses) = ([7; 4096], Vec::new());
        assert_eq!(kind(rig.cache.read(block(0), &mut bytes, &mut misses)), Some(ErrorKind::Media));
        assert!(bytes == [0; 4096] && misses.is_empty(), "nothing of it is returned");
    }
    assert_eq!(rig.read(block(1)), [1; 4096]);
    let status = rig.cache.status();
    assert_eq!((status.damage_found, status.damage_healed, status.damaged.len()), (1, 0, 1));
    assert_eq!(status.damaged[0].range, block(0));
    assert!(
        !status.backing_is_consistent
            && status.void_reason.is_some_and(|reason| reason.starts_with("1 ranges"))
    );
    let dirty = |range| rig.cache.extents(range)[0].dirty;
    assert!(dirty(block(0)));
    assert!(rig.write(block(0), 2));
    assert!(rig.cache.status().damaged.is_empty());
}

#[test]
fn damage_of_what_the_disk_has_is_read_from_there_and_cached_again() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1));
    rig.drain();
    let base = rig.cache.log().segments(LaneId(0))[0].base;
    let _ = rig.transport.region().store(base + SEGMENT - 4096 - BLOCK + 100, &[9]);
    assert_eq!(rig.read(block(0)), [1; 4096]);
    let status = rig.cache.status();
    assert_eq!((status.damage_found, status.damage_healed, status.damaged.len()), (1, 1, 0));
    assert_eq!(rig.read(block(0)), [1; 4096]);
    assert_eq!(rig.cache.status().damage_healed, 1, "it is cached again");
}

#[test]
fn damage_that_writeback_meets_is_quarantined_and_what_stands_beside_it_is_written() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(ByteRange::at(0, 3 * BLOCK), 1));
    let base = rig.cache.log().segments(LaneId(0))[0].base;
    let _ = rig.transport.region().store(base + SEGMENT - 4096 - 2 * BLOCK + 100, &[9]);
    rig.drain();
    let status = rig.cache.status();
    assert_eq!((status.quarantined_bytes, status.damage_found, status.dirty_bytes), (BLOCK, 1, 0));
    assert_eq!(status.damaged.iter().map(|damaged| damaged.range).collect::<Vec<_>>(), [block(1)]);
    assert!(!status.is_all_on_backing() && status.missing_bytes() == BLOCK);
    let bytes = rig.disk.with(|state| state.bytes[..3 * 4096].to_vec());
    let whole: Vec<bool> = bytes.chunks(4096).map(|bytes| bytes == [1; 4096]).collect();
    assert_eq!(whole, [true, false, true]);
    let expected =
        [(RecordKind::Write, 0, ByteRange::at(0, 3 * BLOCK)), (RecordKind::Quarantine, 2, block(1))];
    assert_eq!(records(&rig), expected);
    let recovered = rig.recovered();
    assert_eq!(recovered.status().damaged.len(), 1);
    assert_eq!(kind(recovered.read(block(1), &mut [0; 4096], &mut Vec::new())), Some(ErrorKind::Media));
    assert!(rig.write(block(1), 5));
    rig.drain();
    let status = rig.cache.status();
    assert!(status.backing_is_consistent && status.quarantined_bytes == 0);
}

#[test]
fn writes_that_come_together_share_a_fence_where_their_lanes_differ() {
    let options = Options { device: 2 * CHUNK, lanes: 2, segments: 19, ..Options::default() };
    let rig = Rig::new(options);
    let chunk = |lane: u32| {
        let at =
            [0, CHUNK].into_iter().find(|at| rig.cache.base().identity().lanes.lane_of(*at) == LaneId(lane));
        ByteRange::at(at.expect("each has one"), BLOCK)
    };
    assert!(rig.write(chunk(0), 9) && rig.write(chunk(1), 9));
    let (a, b) = ([1; 4096], [2; 4096]);
    let together = |writes: &[(ByteRange, &[u8])]| {
        rig.transport.region().memory().take_ops();
        let mut done = Vec::new();
        let writes: Vec<_> = writes.iter().map(|write| (*write).into()).collect();
        rig.cache.write_together(Class::Unmarked, &writes, &rig.waker, |number, result| {
            assert!(matches!(result, Ok(Admission::Done(_))));
            done.push(number);
        });
        let ops = rig.transport.region().memory().take_ops();
        (done, ops.iter().filter(|op| **op == Op::Fence).count())
    };
    assert_eq!(together(&[(chunk(0), &a), (chunk(1), &b)]), (vec![0, 1], 1));
    assert_eq!(together(&[(chunk(0), &a), (chunk(0), &b), (chunk(1), &a)]), (vec![0, 1, 2], 2));
    assert_eq!((rig.read(chunk(0)), rig.read(chunk(1))), (b.to_vec(), a.to_vec()));
    assert_eq!(rig.cache.status().written_bytes, 7 * BLOCK);
}

#[test]
fn a_cancelled_fill_is_not_cached() {
    let rig = Rig::new(Options::default());
    let miss = || {
        let mut misses = Vec::new();
        rig.cache.read(block(3), &mut [0; 4096], &mut misses).expect("it runs");
        misses.pop().expect("it is not cached")
    };
    rig.cache.cancel_fill(miss());
    assert!(rig.cache.lanes()[0].lock().pending_fills() == 0);
    let overtaken = miss();
    assert!(rig.write(ByteRange::at(3 * BLOCK, SECTOR), 5));
    rig.cache.complete_fill(overtaken, &[1; 4096]);
    assert_eq!(rig.cache.status().filled_bytes, 0);
    let (first, second) = (miss_of(&rig, 5), miss_of(&rig, 6));
    rig.cache.complete_fill(second, &[2; 4096]);
    rig.cache.complete_fill(first, &[1; 4096]);
    assert_eq!((rig.read(block(5)), rig.read(block(6))), (vec![1; 4096], vec![2; 4096]));
    assert_eq!(rig.cache.status().filled_bytes, 2 * BLOCK);
}

fn miss_of(rig: &Rig, number: u64) -> crate::Miss {
    let mut misses = Vec::new();
    rig.cache.read(block(number), &mut [0; 4096], &mut misses).expect("it runs");
    misses.pop().expect("it is not cached")
}

#[test]
fn reclaim_frees_the_segments_above_its_threshold_and_keeps_what_was_read() {
    let settings = Settings { gc_percent: 50, ..Settings::default() };
    let mut rig = Rig::new(Options { segments: 17, settings, ..Options::default() });
    for number in 0..13 * 11 {
        assert!(rig.write(block(number), 1));
    }
    rig.read(block(0));
    rig.read(block(1));
    rig.drain();
    let status = rig.cache.status();
    assert_eq!(status.segments, 16);
    assert!((8..10).contains(&status.free_segments), "{}", status.free_segments);
    assert_eq!(status.rare.second_chances, 2);
    assert!(status.rare.segments_reclaimed >= 5);
    let cached = |number| rig.cache.extents(block(number))[0].cached;
    assert!(cached(0) && cached(1) && !cached(2) && cached(13 * 11 - 1));
    assert_eq!(rig.read(block(2)), [1; 4096]);
}

#[test]
fn a_worker_without_work_sleeps_until_it_is_woken() {
    let mut rig = Rig::new(Options::default());
    while rig.worker.step() != (Step::Idle { until_ms: None }) {
        rig.environment.set_monotonic(u64::from(u32::MAX));
    }
    assert!(rig.cache.base().wakeups().is_asleep());
}

#[test]
fn a_region_has_sixteen_hosts_and_sixty_four_backends_and_blkdevs_unless_it_is_asked_for_others() {
    let options = crate::FormatOptions::default();
    assert_eq!((options.host_rows, options.backend_rows, options.blkdev_rows), (16, 64, 64));
    assert!(options.segment_size.is_none() && !options.force);
}
