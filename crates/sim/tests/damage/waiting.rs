//! No thread sleeps while it has work: flushes concurrent with the background worker, and clients that wait while a
//! cache is stopped.

use crate::outside::Alarm;
use crate::rig::{BLOCK, Rig, Seen, Shape};
use cbd_engine::{Admission, Settings, Step};
use cbd_types::ByteRange;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Runs the background worker as a daemon does, until it sleeps and was not woken.
fn run_until_asleep(rig: &mut Rig, woken: &Alarm) {
    for _ in 0..5000 {
        if rig.step() == (Step::Idle { until_ms: None }) && !woken.rang() {
            return;
        }
    }
    panic!("the background worker never sleeps");
}

/// A call of a client has ended since the worker slept: it must have woken the background worker, or left no work.
fn run_until_asleep_if_woken(rig: &mut Rig, woken: &Alarm) {
    if woken.rang() {
        run_until_asleep(rig, woken);
    }
}

#[test]
fn the_background_worker_never_sleeps_over_a_write_and_a_flush_that_came_at_any_reading_of_its_clock() {
    let mut has_come = 0;
    for reading in 1..40 {
        for flush in [false, true] {
            let mut rig = Rig::new();
            let woken = Arc::new(Alarm::default());
            rig.cache.set_worker_waker(Waker::from(Arc::clone(&woken)));
            run_until_asleep(&mut rig, &woken);
            assert!(rig.try_write(0, BLOCK, 1));
            assert!(woken.rang(), "the first write after a rest wakes");
            let cache = Arc::clone(&rig.cache);
            let (say, client) = channel();
            rig.environment.at_clock_reading(reading, move || {
                let client = std::thread::spawn(move || {
                    let admission = cache.write(ByteRange::at(BLOCK, BLOCK), &[2; 4096], Waker::noop());
                    assert!(matches!(admission, Ok(Admission::Done(_))));
                    if flush {
                        cache.flush().unwrap();
                    }
                });
                // A pass reads the clock, too, and a flush waits for the pass: the rest of the flush then
                // follows later.
                let end = Instant::now() + Duration::from_millis(20);
                while !client.is_finished() && Instant::now() < end {
                    std::thread::yield_now();
                }
                say.send(client).unwrap();
            });
            run_until_asleep(&mut rig, &woken);
            if let Ok(client) = client.try_recv() {
                client.join().unwrap();
                run_until_asleep_if_woken(&mut rig, &woken);
            }
            if !rig.environment.is_hook_done() {
                continue;
            }
            has_come += 1;
            let status = rig.cache.status();
            assert_eq!(
                status.dirty_bytes, 0,
                "it sleeps; the write came at reading {reading}, flush {flush}"
            );
            assert_eq!(rig.on_disk(BLOCK), Seen::All(2));
        }
    }
    assert!(has_come > 10, "the write came {has_come} times");
}

/// How often the background worker was woken, and how often it ran, while a client wrote 4,000 sectors to a
/// full cache, 10 us each, and called `force` after each. With `urgent`, dirty data is to be written back at
/// once.
fn wakes_of_fua_writes(urgent: bool, force: impl Fn(&Rig, ByteRange)) -> (u32, u32) {
    const WRITES: u64 = 4000;
    const WRITES_PER_MS: u64 = 100;
    let shape = Shape { device: 8 << 20, lanes_max: 4, segment: 512 << 10, segments: 33 };
    let mut rig = Rig::of(shape);
    for at in (0..3 * shape.device).step_by(BLOCK as usize) {
        rig.write(at % shape.device, BLOCK, 1);
    }
    rig.drain();
    if urgent {
        let settings = Settings { dirty_target_percent: 0, ..rig.cache.settings() };
        rig.cache.set_settings(settings).unwrap();
    }
    let woken = Arc::new(Alarm::default());
    rig.cache.set_worker_waker(Waker::from(Arc::clone(&woken)));
    let (mut wakes, mut runs, mut due) = (0, 0, None::<u64>);
    for number in 0..WRITES {
        let range = ByteRange::at(number * 7919 % (shape.device / 512) * 512, 512);
        assert!(rig.try_write(range.start, 512, 2), "there is space");
        force(&rig, range);
        if number % WRITES_PER_MS == 0 {
            rig.environment.advance(1);
        }
        let is_woken = woken.rang();
        if is_woken || due.is_some_and(|due| due <= rig.environment.clock_ms()) {
            wakes += u32::from(is_woken);
            runs += 1;
            due = run_until_idle(&mut rig);
        }
    }
    (wakes, runs)
}

/// Runs the background worker until it has nothing to do. Returns the time at which it runs again unless it
/// is woken.
fn run_until_idle(rig: &mut Rig) -> Option<u64> {
    for _ in 0..5000 {
        if let Step::Idle { until_ms } = rig.worker.step() {
            return until_ms;
        }
    }
    panic!("the background worker never becomes idle");
}

#[test]
fn flushed_writes_wake_the_background_worker_at_most_every_few_milliseconds() {
    for urgent in [false, true] {
        let (wakes, runs) = wakes_of_fua_writes(urgent, |rig, _| rig.cache.flush().unwrap());
        assert!(wakes <= 20 && runs <= 40, "{wakes} wakes and {runs} runs in 40 ms, urgent: {urgent}");
    }
}

#[test]
fn fua_writes_wake_the_background_worker_at_most_every_few_milliseconds() {
    for urgent in [false, true] {
        let (wakes, runs) = wakes_of_fua_writes(urgent, |rig, range| {
            rig.cache.force_unit_access(&[range]).unwrap();
        });
        assert!(wakes <= 20 && runs <= 40, "{wakes} wakes and {runs} runs in 40 ms, urgent: {urgent}");
    }
}

#[test]
fn writers_that_wait_for_space_are_woken_when_the_cache_is_stopped() {
    let rig = Rig::new();
    let mut block = 0;
    while rig.try_write(block * BLOCK, BLOCK, 1) {
        block += 1;
    }
    rig.room.rang();
    rig.cache.stop();
    assert!(rig.room.rang());
    let again = rig.cache.write(ByteRange::at(0, BLOCK), &[1; 4096], Waker::noop());
    assert!(again.is_err(), "stopped");
}

/// Fills must leave space, so that writers do not wait for reclaim.
#[test]
fn fills_leave_a_segment_to_writers() {
    let rig = Rig::new();
    let blocks = rig.cache.size() / BLOCK;
    // Each block twice: a full cache records a range at its second miss.
    for block in (0..blocks).flat_map(|block| [block, block]) {
        let mut misses = Vec::new();
        let range = ByteRange::at(block * BLOCK, BLOCK);
        rig.cache.read(range, &mut vec![0; BLOCK as usize], &mut misses).unwrap();
        for miss in misses {
            let data = vec![7; miss.range.len() as usize];
            rig.cache.complete_fill(miss, &data);
        }
    }
    let status = rig.cache.status();
    assert!(status.free_segments < 3, "{} free: not enough was read", status.free_segments);
    // The open segment is full of fills.
    for block in 0..10 {
        assert!(rig.try_write(block * BLOCK, BLOCK, 8), "a writer waits");
    }
}

#[test]
fn writeback_keeps_to_its_rate_however_large_its_requests_are() {
    const RATE: u64 = 1 << 20;
    let mut rig = Rig::of(Shape { segment: 1 << 20, segments: 12, ..Shape::default() });
    let piece = u64::from(rig.cache.atomic_unit());
    let bytes = rig.cache.size();
    for at in (0..bytes).step_by(piece as usize) {
        assert!(rig.try_write(at, piece, 7));
    }
    rig.cache.set_settings(Settings { writeback_rate: RATE, ..rig.cache.settings() }).unwrap();
    let began = rig.environment.clock_ms();
    rig.drain();
    let took = rig.environment.clock_ms() - began;
    // The rate limit allows writeback to be ahead by a second's worth of data.
    assert!(took >= (bytes / RATE - 2) * 1000, "{bytes} bytes in {took} ms");
    assert!(took <= (bytes / RATE + 1) * 1000, "{bytes} bytes in {took} ms");
    assert_eq!(rig.cache.status().dirty_bytes, 0);
}

/// An offset beyond the blocks that [`fill_up`] writes.
const ELSEWHERE: u64 = 2 << 20;

/// Writes until one segment is free, which is the reserve, and then `pieces` writes of the maximum size.
fn fill_up(rig: &Rig, pieces: u64) {
    let mut block = 0;
    while rig.cache.status().free_segments > 1 {
        assert!(rig.try_write(block * BLOCK, BLOCK, 1), "there is space");
        block += 1;
    }
    let piece = u64::from(rig.cache.atomic_unit());
    for number in 0..pieces {
        assert!(rig.try_write(ELSEWHERE + number * piece, piece, 1), "there is space");
    }
}

/// A cache whose open segment has room for a block, but not for a large write; with `waits`, a writer waits with such
/// a write.
fn filled_up(waits: bool) -> Rig {
    let rig = Rig::new();
    fill_up(&rig, 0);
    let piece = u64::from(rig.cache.atomic_unit());
    let fitting = (0..).take_while(|number| rig.try_write(ELSEWHERE + number * piece, piece, 1)).count();
    let rig = Rig::new();
    fill_up(&rig, fitting as u64);
    if waits {
        assert!(!rig.try_write(ELSEWHERE, piece, 1), "there is no space");
    }
    assert_eq!(rig.cache.status().writers_waiting, waits);
    rig
}

/// Reads the block at `at` and offers the data of a miss to the cache.
fn read_and_fill(rig: &Rig, at: u64) {
    let mut misses = Vec::new();
    rig.cache.read(ByteRange::at(at, BLOCK), &mut [0; BLOCK as usize], &mut misses).unwrap();
    for miss in misses {
        rig.cache.complete_fill(miss, &[7; BLOCK as usize]);
    }
}

#[test]
fn a_fill_takes_no_space_while_a_writer_waits() {
    for waits in [false, true] {
        let rig = filled_up(waits);
        // Twice: a full cache records a range at its second miss.
        for _ in 0..2 {
            read_and_fill(&rig, rig.cache.size() - BLOCK);
        }
        let filled = rig.cache.status().filled_bytes;
        assert_eq!(filled, if waits { 0 } else { BLOCK }, "a writer waits: {waits}");
    }
}

#[test]
fn nothing_gets_a_second_chance_while_a_writer_waits() {
    for waits in [false, true] {
        let mut rig = filled_up(waits);
        // Only blocks of the oldest segment, which is reclaimed first.
        for block in 0..8 {
            read_and_fill(&rig, block * BLOCK);
        }
        rig.cache.request_drain();
        for _ in 0..5000 {
            if rig.cache.status().rare.segments_reclaimed > 0 {
                break;
            }
            rig.step();
        }
        let rare = rig.cache.status().rare;
        assert!(rare.segments_reclaimed > 0);
        assert_eq!(rare.second_chances == 0, waits, "{} second chances", rare.second_chances);
    }
}

#[test]
fn the_segment_that_takes_a_cache_over_its_watermark_wakes_the_background_worker() {
    let mut rig = Rig::new();
    rig.reclaim_at(50);
    let woken = Arc::new(Alarm::default());
    rig.cache.set_worker_waker(Waker::from(Arc::clone(&woken)));
    run_until_asleep(&mut rig, &woken);
    assert!(rig.try_write(0, BLOCK, 1));
    assert!(woken.rang(), "the first write after a rest wakes");
    assert!(run_until_idle(&mut rig).is_some(), "it waits for the clock, which stands still");
    let half = rig.cache.status().segments / 2;
    let mut taken = 1;
    for block in 1.. {
        let before = rig.cache.status().free_segments;
        assert!(rig.try_write(block * BLOCK, BLOCK, 1), "there is space");
        let free = rig.cache.status().free_segments;
        let is_over = free < before && free < half;
        taken += before - free;
        // Each fourth segment makes the open epoch large, and the background worker considers to close it.
        let is_large = free < before && taken.is_multiple_of(4);
        assert_eq!(woken.rang(), is_over || is_large, "{free} segments are free");
        if is_over {
            return;
        }
    }
}
