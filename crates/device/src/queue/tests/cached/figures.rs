//! What requests are counted as, and that nothing is lost when a queue ends.

use super::*;
use crate::{Counted, DeviceFigures, Outcome, WaitFor};
use cbd_engine::CacheMode;
use core::cell::Cell;
use std::thread_local;

thread_local! {
    static NOW: Cell<u64> = const { Cell::new(0) };
}

/// A millisecond passes at each look, so that all requests are timed.
fn clock() -> u64 {
    NOW.set(NOW.get() + 1_000_000);
    NOW.get()
}

/// A rig whose device has a clock.
fn timed(settings: Settings) -> Rig {
    let mut rig = rig_with(DEVICE, settings);
    rig.make_room();
    let device = Device::cached(Arc::clone(&rig.cache), rig.geometry).with_clock(clock);
    rig.queue = Queue::new(Arc::new(device), disk(), Waker::from(Arc::clone(&rig.bell)));
    rig
}

fn counted(figures: &DeviceFigures, operation: Operation, outcome: Outcome) -> (u64, u64) {
    let Counted { count, sum } = figures.of(operation).expect("it has had a queue").of(outcome);
    (count, sum)
}

fn waits(figures: &DeviceFigures, what: WaitFor) -> Counted {
    figures.waits().find(|(of, _)| *of == what).expect("all are there").1
}

#[test]
fn a_request_of_the_sample_has_the_time_at_which_it_came() {
    let mut rig = rig_with(DEVICE, Settings::default());
    rig.make_room();
    let device = Device::cached(Arc::clone(&rig.cache), rig.geometry)
        .with_clock(|| NOW.get())
        .with_sample(|| NOW.get());
    device.sample_for(64 << 20);
    rig.queue = Queue::new(Arc::new(device), disk(), Waker::from(Arc::clone(&rig.bell)));
    // So many in a short time that only few of them are timed.
    NOW.set(1_000_000_000);
    for id in 0..1000 {
        NOW.set(NOW.get() + 100);
        rig.submit(write(id, 0, 8 * BLOCK, 1));
    }
    // A pause: the one behind it is not timed, either.
    NOW.set(NOW.get() + 10_000_000_000);
    rig.submit(write(1000, 0, 8 * BLOCK, 1));
    let sampled: Vec<u32> = rig.queue.device.last_sampled(0).requests.iter().map(|seen| seen.ms).collect();
    assert_eq!(sampled.len(), 1001, "each has the sampled block of the first group");
    assert!(sampled[..1000].iter().all(|ms| *ms == 1000), "{sampled:?}");
    assert_eq!(sampled[1000], 11_000);
}

#[test]
fn reads_are_hits_or_misses_and_each_byte_is_one_of_them() {
    let mut rig = timed(Settings::default());
    rig.submit(write(0, 0, 2 * BLOCK, 1));
    rig.submit(read(1, 0, BLOCK));
    rig.submit(read(2, BLOCK, 3 * BLOCK));
    let mut out = vec![0; BLOCK as usize];
    assert!(rig.queue.read_into(3, ByteRange::at(0, BLOCK), &mut out).is_some());
    assert!(rig.queue.read_into(4, ByteRange::at(CHUNK, BLOCK), &mut out).is_none());
    while rig.queue.parked() > 0 {
        rig.poll();
    }
    rig.submit(read(5, 0, 77));
    rig.submit(read(6, BAD, BLOCK));
    while rig.queue.parked() > 0 {
        rig.poll();
    }
    let figures = rig.queue.device.figures();
    assert_eq!(counted(&figures, Operation::Write, Outcome::Cached), (1, 2 * BLOCK));
    // The first block of the second read was in the cache.
    assert_eq!(counted(&figures, Operation::Read, Outcome::Cached), (2, 3 * BLOCK));
    assert_eq!(counted(&figures, Operation::Read, Outcome::Disk), (2, 3 * BLOCK));
    let reads = figures.of(Operation::Read).unwrap();
    assert_eq!((reads.total(), reads.failed), (Counted { count: 4, sum: 6 * BLOCK }, 2));
    assert_eq!(reads.latency.buckets.iter().sum::<u64>(), 4);
}

#[test]
fn what_is_read_ahead_of_a_scan_is_no_hit() {
    let mut rig = timed(Settings::default());
    for block in 0..CHUNK / BLOCK {
        rig.submit(read(block, block * BLOCK, BLOCK));
        while rig.queue.parked() > 0 {
            rig.poll();
        }
    }
    let figures = rig.queue.device.figures();
    assert!(rig.asked().len() < (CHUNK / BLOCK / 4) as usize, "it is read ahead");
    assert_eq!(counted(&figures, Operation::Read, Outcome::Disk), (CHUNK / BLOCK, CHUNK));
    assert_eq!(counted(&figures, Operation::Read, Outcome::Cached), (0, 0));
}

#[test]
fn changes_are_cached_or_past_the_cache_with_the_reason() {
    let mut rig = timed(Settings { sequential_write_cutoff: 2 * BLOCK, ..Settings::default() });
    for block in 0..4 {
        rig.submit(write(block, block * BLOCK, BLOCK, 1));
        rig.poll();
    }
    // The disk refuses this one, and it is cached.
    for block in 0..3 {
        rig.submit(write(10 + block, BAD - 2 * BLOCK + block * BLOCK, BLOCK, 1));
        rig.poll();
    }
    rig.submit(request(Operation::Discard, CHUNK, BLOCK, false));
    rig.submit(request(Operation::WriteZeroes, 0, BLOCK, false));
    while rig.queue.parked() > 0 {
        rig.poll();
    }
    let past = Outcome::Past(BypassReason::Sequential);
    let figures = rig.queue.device.figures();
    assert_eq!(counted(&figures, Operation::Write, past), (2, 2 * BLOCK));
    assert_eq!(counted(&figures, Operation::Write, Outcome::Cached), (5, 5 * BLOCK));
    assert_eq!(counted(&figures, Operation::Discard, Outcome::Cached), (1, BLOCK));
    assert_eq!(counted(&figures, Operation::WriteZeroes, Outcome::Cached), (1, BLOCK));
    assert_eq!(past.name(Operation::Write), "past-sequential");
}

#[test]
fn a_batch_is_counted_write_by_write() {
    let mut rig = timed(Settings::default());
    for id in 0..TOGETHER as u64 {
        rig.plug(write(id, id * BLOCK, BLOCK, 1));
    }
    rig.plug(write(20, 0, 512, 1));
    rig.queue.give_up(&mut Vec::new());
    let figures = rig.queue.device.figures();
    let writes = figures.of(Operation::Write).unwrap();
    let count = TOGETHER as u64;
    assert_eq!((writes.total(), writes.failed), (Counted { count, sum: count * BLOCK }, 1));
    assert_eq!(writes.latency.buckets.iter().sum::<u64>(), count);
}

#[test]
fn waits_for_space_and_for_a_flush_are_timed() {
    let mut rig = timed(Settings::default());
    rig.fill_up();
    assert_eq!(waits(&rig.queue.device.figures(), WaitFor::Space), Counted::default(), "it still waits");
    rig.make_room();
    rig.poll();
    let figures = rig.queue.device.figures();
    let space = waits(&figures, WaitFor::Space);
    assert!(space.count == 1 && space.sum > 0, "{space:?}");

    let mut rig = timed(Settings { cache_mode: CacheMode::Writearound, ..Settings::default() });
    rig.submit(Request { fua: true, ..write(1, 0, BLOCK, 1) });
    rig.poll();
    rig.make_room();
    assert_eq!(rig.poll(), [(1, None)]);
    let figures = rig.queue.device.figures();
    let flush = waits(&figures, WaitFor::Flush);
    assert!(flush.count == 1 && flush.sum > 0, "{flush:?}");
    assert_eq!(counted(&figures, Operation::Write, Outcome::Past(BypassReason::Mode)), (1, BLOCK));
}

#[test]
fn past_the_cache_and_without_one_nothing_is_a_hit() {
    let mut rig = timed(Settings { cache_mode: CacheMode::Passthrough, ..Settings::default() });
    rig.submit(read(1, 0, BLOCK));
    rig.poll();
    let figures = rig.queue.device.figures();
    assert_eq!(counted(&figures, Operation::Read, Outcome::Past(BypassReason::Mode)), (1, BLOCK));

    let device = Arc::new(Device::uncached(rig.geometry).with_clock(clock));
    let mut queue: Queue<Still, Disk> = Queue::new(Arc::clone(&device), disk(), Waker::noop().clone());
    queue.submit(read(1, 0, BLOCK), &mut rig.done);
    queue.submit(Request { fua: true, ..write(2, 0, 2 * BLOCK, 1) }, &mut rig.done);
    queue.submit(request(Operation::Flush, 0, 0, false), &mut rig.done);
    while queue.parked() > 0 {
        queue.poll(&mut rig.done);
    }
    let figures = device.figures();
    assert_eq!(counted(&figures, Operation::Read, Outcome::Uncached), (1, BLOCK));
    assert_eq!(counted(&figures, Operation::Write, Outcome::Uncached), (1, 2 * BLOCK));
    assert_eq!(counted(&figures, Operation::Flush, Outcome::Uncached), (1, 0));
    assert_eq!(waits(&figures, WaitFor::Flush).count, 1, "that of the FUA write");
}

#[test]
fn nothing_is_lost_when_queues_end() {
    let mut rig = timed(Settings::default());
    let device = Arc::clone(&rig.queue.device);
    for round in 0..5 {
        let other = Queue::new(Arc::clone(&device), disk(), Waker::from(Arc::clone(&rig.bell)));
        rig.submit(write(round, 0, BLOCK, 1));
        rig.submit(request(Operation::Flush, 0, 0, false));
        let before = device.figures();
        drop(core::mem::replace(&mut rig.queue, other));
        assert_eq!(device.figures(), before);
        assert_eq!(counted(&before, Operation::Write, Outcome::Cached), (round + 1, (round + 1) * BLOCK));
        assert_eq!(before.of(Operation::Flush).unwrap().total().count, round + 1);
    }
}
