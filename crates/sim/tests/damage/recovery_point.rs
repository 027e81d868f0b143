//! The recovery point is a lower bound: everything that completed and was flushed before it is on the disk.

use crate::rig::{BLOCK, Rig, Seen};
use cbd_engine::{Cache, Consistency, Environment, Settings, Step};
use cbd_types::{ByteRange, Epoch};
use std::sync::Arc;
use std::task::Waker;

const FIRST: u64 = 0;
const SECOND: u64 = 1 << 20;

fn now_ms(rig: &Rig) -> u64 {
    rig.environment.wall_ms()
}

/// Writes and flushes, and returns a time after that.
fn write_and_flush(rig: &Rig, at: u64, value: u8) -> u64 {
    assert!(rig.try_write(at, BLOCK, value));
    rig.cache.flush().unwrap();
    now_ms(rig)
}

/// Runs the background worker until drained moves.
fn drain_one_batch(rig: &mut Rig) {
    let before = rig.cache.status().drained_epoch;
    for _ in 0..10_000 {
        rig.step();
        if rig.cache.status().drained_epoch != before {
            return;
        }
    }
    panic!("nothing is drained: {:?}", rig.cache.status());
}

#[test]
fn it_is_not_later_than_a_flushed_write_that_the_disk_lacks() {
    let mut rig = Rig::new();
    let first = write_and_flush(&rig, FIRST, 1);
    rig.environment.advance(1000);
    let second = write_and_flush(&rig, SECOND, 2);
    // The disk fails for an hour, or it is slow, or the rate is low.
    rig.environment.advance(3_600_000);
    drain_one_batch(&mut rig);
    let status = rig.cache.status();
    assert!(status.backing_is_consistent && status.dirty_records > 0);
    assert_eq!((rig.on_disk(FIRST), rig.on_disk(SECOND)), (Seen::All(1), Seen::Initial));
    let point = status.drained_wall_ms;
    assert!(point < second, "{point} is later than the missing write at {second}");
    assert!(point > first - 100, "{point} is too far before {first}");
    rig.drain();
    let point = rig.cache.status().drained_wall_ms;
    assert!(point > second - 100 && point < now_ms(&rig), "{point}, {second}");
}

#[test]
fn after_a_restart_it_does_not_date_what_was_closed_before_by_the_restart() {
    let mut rig = Rig::new();
    write_and_flush(&rig, FIRST, 1);
    rig.drain();
    let known = rig.cache.status().drained_wall_ms;
    assert!(known > 0);
    assert!(rig.try_write(FIRST + BLOCK, BLOCK, 1));
    rig.cache.flush().unwrap();
    rig.environment.advance(1000);
    let second = write_and_flush(&rig, SECOND, 2);
    rig.environment.advance(3_600_000);
    let mut rig = rig.restart();
    assert_eq!(rig.cache.status().drained_wall_ms, known);
    let opened = now_ms(&rig);
    drain_one_batch(&mut rig);
    assert_eq!(rig.on_disk(SECOND), Seen::Initial);
    let point = rig.cache.status().drained_wall_ms;
    assert!((known..second).contains(&point), "{point} is not between {known} and {second}");
    // When all recovered data is drained, the recovery point is the time of the restart.
    drain_one_batch(&mut rig);
    assert_eq!(rig.on_disk(SECOND), Seen::All(2));
    let point = rig.cache.status().drained_wall_ms;
    assert!(point > second && point <= opened, "{point} is not between {second} and {opened}");
}

#[test]
fn of_a_checkpoint_it_is_the_closing_of_the_last_epoch() {
    let mut rig = Rig::new();
    let settings = Settings { consistency: Consistency::Checkpoint, ..rig.cache.settings() };
    rig.cache.set_settings(settings).unwrap();
    write_and_flush(&rig, FIRST, 1);
    rig.environment.advance(1000);
    let second = write_and_flush(&rig, SECOND, 2);
    rig.environment.advance(1000);
    // The batch has begun, and its flush comes after the next write.
    rig.disk.set_latency(50);
    while rig.step() != Step::WaitBacking {}
    let third = write_and_flush(&rig, 2 * SECOND, 3);
    rig.environment.advance(5000);
    drain_one_batch(&mut rig);
    assert_eq!((rig.on_disk(SECOND), rig.on_disk(2 * SECOND)), (Seen::All(2), Seen::Initial));
    let point = rig.cache.status().drained_wall_ms;
    assert!(point > second - 100 && point < third, "{point} is not between {second} and {third}");
}

/// No flush followed the change of the clock, so no closed epoch shows it.
#[test]
fn it_is_not_later_than_a_clock_that_was_set_back_before_the_batch_ended() {
    let mut rig = Rig::new();
    rig.environment.advance(50_000);
    let closed = write_and_flush(&rig, FIRST, 1);
    rig.environment.set_wall_back(40_000);
    drain_one_batch(&mut rig);
    assert_eq!(rig.on_disk(FIRST), Seen::All(1));
    let (point, now) = (rig.cache.status().drained_wall_ms, now_ms(&rig));
    assert!(now < closed && point <= now, "{point} is later than the clock, which shows {now}");
}

#[test]
fn a_clock_that_was_set_back_sets_it_back_before_a_flush_completes() {
    for restarted in [false, true] {
        let mut rig = Rig::new();
        rig.environment.advance(50_000);
        write_and_flush(&rig, FIRST, 1);
        rig.drain();
        let before = rig.cache.status().drained_wall_ms;
        rig.environment.set_wall_back(40_000);
        let written = write_and_flush(&rig, SECOND, 2);
        assert!(written < before);
        // The clock is set forward again, so that it shows no trace of the change.
        rig.environment.set_wall_back(-60_000);
        if restarted {
            rig = rig.restart();
        }
        assert_eq!(rig.on_disk(SECOND), Seen::Initial);
        let point = rig.cache.status().drained_wall_ms;
        assert!(point < written, "restarted {restarted}: {point} is later than {written}");
    }
}

#[test]
fn epochs_that_were_closed_before_the_clock_was_set_back_are_not_dated_later_than_it() {
    let mut rig = Rig::new();
    rig.environment.advance(50_000);
    write_and_flush(&rig, FIRST, 1);
    rig.environment.set_wall_back(40_000);
    let written = write_and_flush(&rig, SECOND, 2);
    drain_one_batch(&mut rig);
    assert_eq!(rig.on_disk(SECOND), Seen::Initial);
    let point = rig.cache.status().drained_wall_ms;
    assert!(point < written, "{point} is later than {written}");
}

fn write_now(cache: &Cache<crate::outside::RigEnvironment>, at: u64, value: u8) {
    let data = [value; BLOCK as usize];
    cache.write(ByteRange::at(at, BLOCK), &data, Waker::noop()).unwrap();
}

#[test]
fn a_write_that_arrives_while_the_epoch_is_closed_is_not_dated_into_it() {
    let mut rig = Rig::new();
    write_now(&rig.cache, FIRST, 1);
    // Another client writes when the flush reads the clock.
    let (cache, environment) = (Arc::clone(&rig.cache), Arc::clone(&rig.environment));
    let done = Arc::new(parking_lot::Mutex::new(0));
    let note = Arc::clone(&done);
    rig.environment.at_wall_reading(move || {
        write_now(&cache, SECOND, 2);
        *note.lock() = environment.wall_ms();
    });
    rig.cache.flush().unwrap();
    let written = *done.lock();
    assert!(written > 0);
    while rig.cache.status().drained_epoch < Epoch(1) {
        rig.step();
        let status = rig.cache.status();
        if rig.on_disk(SECOND) != Seen::All(2) {
            assert!(status.drained_wall_ms <= written, "{} is later than {written}", status.drained_wall_ms);
        }
    }
}
