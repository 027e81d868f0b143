//! Misses in whole blocks, sequential streams and readahead.

use super::*;
use crate::{readahead::BYTES_MAX, streams::STEP_MAX};
use cbd_engine::{BypassReason, ReadFill, Readahead};

const KIB: u64 = 1 << 10;

/// Reads `length` bytes at `start` and waits for them; returns what the disk received.
fn fetch(rig: &mut Rig, start: u64, length: u64) -> Vec<(&'static str, u64, u64)> {
    rig.submit(read(5, start, length));
    rig.poll_until_done();
    rig.asked()
}

/// Reads 128 KiB from `start` on, which makes a stream; returns the first step of its readahead.
fn stream(rig: &mut Rig, start: u64) -> (&'static str, u64, u64) {
    fetch(rig, start, 32 * KIB);
    fetch(rig, start + 32 * KIB, 32 * KIB);
    rig.submit(read(5, start + 64 * KIB, 64 * KIB));
    let asked = rig.asked();
    assert_eq!(asked[0], ("read", start + 64 * KIB, 64 * KIB), "what was asked for comes first");
    assert_eq!(asked.len(), 2);
    asked[1]
}

impl Rig {
    /// Polls until the last request completes; its bytes.
    fn poll_until_done(&mut self) -> Vec<u8> {
        for _ in 0..4 {
            if let Some(done) = self.done.pop() {
                self.done.clear();
                assert!(done.result.is_ok(), "{:?}", done.result);
                return done.buffer.to_vec();
            }
            self.queue.poll(&mut self.done);
        }
        panic!("it does not complete")
    }

    fn set(&self, change: impl FnOnce(&mut Settings)) {
        let mut settings = self.cache.settings();
        change(&mut settings);
        self.cache.set_settings(settings).expect("it is in range");
    }

    /// Writes and reclaims until the cache does not hold the block at `start`.
    fn evict(&mut self, start: u64) {
        self.set(|settings| settings.gc_percent = 0);
        for number in 0..1000 {
            if self.cache.extents(ByteRange::at(start, BLOCK)).iter().all(|extent| !extent.cached) {
                return;
            }
            self.submit(write(6, CHUNK / 2 + number % 64 * BLOCK, BLOCK, 1));
            self.make_room();
            self.done.clear();
        }
        panic!("the block stays");
    }

    fn bypassed(&self, reason: BypassReason) -> u64 {
        self.cache.status().bypassed.of(reason)
    }
}

#[test]
fn a_miss_of_a_part_of_a_block_is_read_and_cached_as_a_whole_block() {
    let mut rig = rig();
    assert_eq!(fetch(&mut rig, 512, 512), [("read", 0, BLOCK)]);
    rig.poll();
    assert_eq!(rig.cache.status().filled_bytes, BLOCK);
    assert_eq!(fetch(&mut rig, 1024, 3072), [], "it is cached");
    // The first and the last block of a longer read.
    assert_eq!(fetch(&mut rig, 2 * BLOCK + 512, 2 * BLOCK), [("read", 2 * BLOCK, 3 * BLOCK)]);
    rig.poll();
    assert_eq!(rig.cache.status().filled_bytes, 4 * BLOCK);
}

#[test]
fn a_miss_of_an_atomic_unit_becomes_no_longer() {
    let mut rig = rig();
    assert_eq!(fetch(&mut rig, 512, 16 << 10), [("read", 512, 16 << 10)]);
    rig.poll();
    assert_eq!(rig.cache.status().filled_bytes, 16 << 10);
}

#[test]
fn only_what_is_missing_of_a_block_is_read() {
    let mut rig = rig();
    rig.submit(write(0, 512, 512, 3));
    rig.submit(write(0, 3072, 512, 4));
    rig.completed();
    assert_eq!(fetch(&mut rig, 2048, 512), [("read", 1024, 2048)]);
    rig.poll();
    assert_eq!(fetch(&mut rig, 1024, 2048), [], "it is cached");
    assert_eq!(fetch(&mut rig, 0, BLOCK), [("read", 0, 512), ("read", 3584, 512)]);
    rig.submit(read(1, 0, BLOCK));
    let expected = [[7; 512].as_slice(), &[3; 512], &[7; 2048], &[4; 512], &[7; 512]].concat();
    assert_eq!(rig.poll_until_done(), expected);
}

#[test]
fn the_last_block_of_a_device_ends_with_the_device() {
    let mut rig = rig_of(DEVICE - 512);
    rig.queue.backing.bad = DEVICE;
    assert_eq!(fetch(&mut rig, DEVICE - 1024, 512), [("read", DEVICE - BLOCK, BLOCK - 512)]);
}

#[test]
fn a_stream_is_served_from_what_was_read_ahead_and_caches_it_afterwards() {
    let mut rig = rig();
    assert_eq!(stream(&mut rig, 0), ("read", 128 * KIB, 128 * KIB));
    rig.poll_until_done();
    rig.poll();
    let cached = rig.cache.status().filled_bytes;
    // The first request of the step brings the next one, and completes at once.
    rig.submit(read(1, 128 * KIB, 64 * KIB));
    assert_eq!(rig.completed(), [(1, None)]);
    assert_eq!(rig.asked(), [("read", 256 * KIB, 256 * KIB)]);
    rig.poll();
    assert_eq!(rig.cache.status().filled_bytes, cached, "half of the step is not used yet");
    let mut out = vec![0; 64 << 10];
    assert!(matches!(rig.queue.read_into(2, ByteRange::at(192 * KIB, 64 * KIB), &mut out), Some(Ok(()))));
    assert!(out.iter().all(|byte| *byte == 7) && rig.asked().is_empty());
    rig.poll();
    assert_eq!(rig.cache.status().filled_bytes, cached + 128 * KIB);
}

#[test]
fn the_pieces_of_a_request_take_what_was_read_ahead_in_order() {
    let mut rig = rig();
    stream(&mut rig, 0);
    let mut at = 128 * KIB;
    while at < 3 << 20 {
        rig.submit(read(1, at, 64 * KIB));
        rig.poll();
        at += 64 * KIB;
    }
    let asked = rig.asked();
    assert!(asked.iter().all(|(_, _, length)| *length >= 128 * KIB), "{asked:?}");
    assert!(asked.windows(2).all(|two| two[0].1 + two[0].2 == two[1].1), "{asked:?}");
}

#[test]
fn a_request_that_comes_while_its_data_is_read_ahead_waits_for_that() {
    let mut rig = rig();
    stream(&mut rig, 0);
    rig.submit(read(1, 128 * KIB, 64 * KIB));
    rig.submit(read(2, 192 * KIB, 64 * KIB));
    assert_eq!((rig.asked(), rig.queue.parked()), (vec![("read", 256 * KIB, 256 * KIB)], 3));
    rig.queue.poll(&mut rig.done);
    assert!(rig.done.iter().all(|done| done.result.is_ok() && done.buffer.iter().all(|byte| *byte == 7)));
    assert_eq!((rig.completed().len(), rig.queue.parked()), (3, 0));
    assert_eq!(rig.asked(), []);
}

#[test]
fn data_that_was_read_ahead_is_not_used_after_a_write_to_it() {
    let mut rig = rig();
    stream(&mut rig, 0);
    rig.poll_until_done();
    // One block of what was read ahead is written, and in other bytes on the disk afterwards.
    rig.submit(write(0, 160 * KIB, BLOCK, 3));
    rig.evict(160 * KIB);
    rig.queue.backing.value = 9;
    rig.submit(read(1, 128 * KIB, 64 * KIB));
    let bytes = rig.poll_until_done();
    assert_eq!(bytes[32 << 10..36 << 10], [9; 4096]);
    rig.poll();
    assert_eq!(rig.pending_fills(), rig.queue.ahead.held().2);
}

#[test]
fn a_write_while_data_is_read_ahead_lets_those_who_wait_read_again() {
    let mut rig = rig();
    stream(&mut rig, 0);
    rig.submit(read(1, 128 * KIB, 64 * KIB));
    rig.asked();
    rig.submit(write(0, 160 * KIB, BLOCK, 3));
    rig.completed();
    rig.poll();
    assert_eq!(rig.asked(), [("read", 128 * KIB, 64 * KIB)]);
    rig.poll();
    assert_eq!(rig.queue.parked(), 0);
}

#[test]
fn an_error_of_readahead_is_seen_only_by_who_asks_for_the_data() {
    let mut rig = rig();
    rig.queue.backing.bad = 128 * KIB;
    stream(&mut rig, 0);
    rig.submit(read(1, 128 * KIB, 64 * KIB));
    rig.asked();
    assert_eq!(rig.poll(), [(5, None)]);
    assert_eq!(rig.asked(), [("read", 128 * KIB, 64 * KIB)]);
    assert_eq!(rig.poll(), [(1, Some(ErrorKind::Backing))]);
    rig.poll();
    assert_eq!((rig.pending_fills(), rig.queue.parked()), (0, 0));
}

#[test]
fn only_what_is_not_cached_is_read_ahead_up_to_the_end_of_the_device() {
    let mut rig = rig();
    rig.queue.backing.bad = DEVICE;
    rig.submit(write(0, DEVICE - 64 * KIB, BLOCK, 3));
    rig.submit(request(Operation::WriteZeroes, DEVICE - 32 * KIB, 8 << 10, false));
    fetch(&mut rig, DEVICE - 256 * KIB, 32 * KIB);
    fetch(&mut rig, DEVICE - 224 * KIB, 32 * KIB);
    rig.submit(read(5, DEVICE - 192 * KIB, 64 * KIB));
    let expected = [
        (DEVICE - 192 * KIB, 64 * KIB),
        (DEVICE - 128 * KIB, 64 * KIB),
        (DEVICE - 60 * KIB, 28 * KIB),
        (DEVICE - 24 * KIB, 24 * KIB),
    ];
    assert_eq!(rig.asked(), expected.map(|(start, length)| ("read", start, length)));
}

#[test]
fn nothing_is_read_ahead_where_it_is_off_or_the_disk_is_busy() {
    let mut rig = rig();
    rig.set(|settings| settings.readahead = Readahead::Off);
    for number in 0..8 {
        assert_eq!(fetch(&mut rig, number * 64 * KIB, 64 * KIB).len(), 1);
    }
    for (others, windows) in [(7, 0), (6, 0), (5, 1)] {
        let mut rig = rig_of(DEVICE);
        fetch(&mut rig, 0, 32 * KIB);
        fetch(&mut rig, 32 * KIB, 32 * KIB);
        // Of the 8 operations that the disk executes at a time, these and the last request are in flight.
        (0..others).for_each(|number| rig.submit(read(number, CHUNK + number * CHUNK / 64, 512)));
        rig.submit(read(9, 64 * KIB, 64 * KIB));
        assert_eq!(rig.queue.ahead.held().0, windows, "beside {others}");
    }
}

#[test]
fn what_was_read_ahead_is_bounded_and_freed_with_the_spare_memory() {
    // Streams that end early.
    let mut rig = rig();
    rig.queue.backing.bad = DEVICE;
    for number in 0..7 {
        for at in 0..6 {
            rig.submit(read(1, number * 1024 * KIB + at * 64 * KIB, 64 * KIB));
            rig.poll();
            assert!(rig.queue.ahead.held().1 <= BYTES_MAX, "{:?}", rig.queue.ahead.held());
        }
    }
    assert!(rig.queue.ahead.held().1 > BYTES_MAX - STEP_MAX, "{:?}", rig.queue.ahead.held());
    let mut rig = rig_of(DEVICE);
    stream(&mut rig, 0);
    let mut at = 128 * KIB;
    while at < CHUNK - 1024 * KIB {
        rig.submit(read(1, at, 32 * KIB));
        rig.poll();
        at += 32 * KIB;
        assert!(rig.queue.ahead.held().1 <= BYTES_MAX);
    }
    assert!(rig.queue.ahead.held().1 > 0 && rig.pending_fills() > 0);
    rig.poll();
    rig.queue.trim();
    assert_eq!((rig.queue.ahead.held().1, rig.pending_fills()), (0, 0));
}

#[test]
fn a_queue_that_is_given_up_or_dropped_cancels_what_it_reads_ahead() {
    let mut rig = rig();
    stream(&mut rig, 0);
    rig.submit(read(1, 128 * KIB, 64 * KIB));
    rig.queue.give_up(&mut rig.done);
    assert!(rig.completed().is_empty(), "the disk has what was asked for");
    rig.poll();
    rig.poll();
    rig.poll();
    assert_eq!((rig.queue.parked(), rig.pending_fills(), rig.queue.ahead.held().1), (0, 0, 0));
    stream(&mut rig, CHUNK);
    let Rig { cache, queue, .. } = rig;
    drop(queue);
    let pending: usize = (0..2).map(|lane| cache.log().pending_fills(LaneId(lane))).sum();
    assert_eq!(pending, 0);
}

#[test]
fn behind_the_cutoff_a_full_cache_records_nothing_and_readahead_continues() {
    let mut rig = rig();
    rig.fill_up();
    rig.make_room();
    rig.poll();
    rig.set(|settings| {
        settings.sequential_read_cutoff = 256 * KIB;
        settings.read_fill = ReadFill::All;
        settings.gc_percent = 0;
    });
    rig.queue.backing.bad = DEVICE;
    let before = rig.cache.status().filled_bytes;
    let mut operations = 0;
    for number in 0..32 {
        operations += fetch(&mut rig, CHUNK + number * 64 * KIB, 64 * KIB).len();
        rig.poll();
    }
    let status = rig.cache.status();
    assert!(operations < 12, "{operations} operations for 32 requests");
    assert!(status.filled_bytes - before <= 256 * KIB);
    assert!(rig.bypassed(BypassReason::Sequential) >= 512 * KIB, "{:?}", status.bypassed);
    assert_eq!(rig.bypassed(BypassReason::NotAdmitted), 0);
}

#[test]
fn while_the_cache_has_space_a_long_stream_is_recorded() {
    let mut rig = rig();
    rig.set(|settings| settings.sequential_read_cutoff = 64 * KIB);
    for number in 0..4 {
        fetch(&mut rig, number * 64 * KIB, 64 * KIB);
        rig.poll();
    }
    assert!(rig.cache.status().filled_bytes >= 192 * KIB);
    assert_eq!(rig.bypassed(BypassReason::Sequential), 0);
}

#[test]
fn misses_are_not_recorded_when_read_fill_is_off() {
    let mut rig = rig();
    rig.set(|settings| settings.read_fill = ReadFill::Off);
    fetch(&mut rig, 0, BLOCK);
    rig.poll();
    assert_eq!(fetch(&mut rig, 0, BLOCK), [("read", 0, BLOCK)]);
    rig.poll();
    assert_eq!((rig.cache.status().filled_bytes, rig.bypassed(BypassReason::ReadFillOff)), (0, 2 * BLOCK));
}
