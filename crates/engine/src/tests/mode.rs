//! A change to a mode in which writes go past the cache: how much becomes dirty meanwhile.

use super::rig::{Options, Rig};
use super::{Bell, bell};
use crate::{Bypass, BypassReason, CacheMode, Settings};
use alloc::{sync::Arc, vec};
use cbd_types::ByteRange;
use core::task::Waker;

const BLOCK: u64 = 4096;
/// Writes of a block that are cached in a round in which nothing is written back.
const CACHED_AT_LEAST: u64 = 17;

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

/// A cache that changes its mode while the disk lacks blocks 0 and 40, of two epochs, and does not answer.
fn changing() -> (Rig, Arc<Bell>, Waker) {
    let settings = Settings { sequential_write_cutoff: 1, ..Settings::default() };
    let rig = Rig::new(Options { settings, ..Options::default() });
    assert!(rig.write(block(0), 1));
    rig.cache.flush().expect("it runs");
    assert!(rig.write(block(40), 1));
    rig.disk.with(|state| state.is_slow = true);
    let settings = Settings { cache_mode: CacheMode::Writearound, ..rig.cache.settings() };
    rig.cache.set_settings(settings).expect("they are good");
    let (room, waker) = bell();
    (rig, room, waker)
}

/// A client writes a block; false if it waits.
fn writes(rig: &Rig, number: u64, waker: &Waker) -> bool {
    match rig.cache.begin_bypass(block(number), BypassReason::Mode, waker).expect("it runs") {
        Bypass::Cached => {
            assert!(rig.write(block(number), 2), "block {number}");
            true
        }
        Bypass::Wait => false,
        Bypass::Begun(ticket) => {
            rig.cache.end_bypass(ticket, None, true);
            true
        }
    }
}

/// Runs the background worker until `is_done`.
fn step_until(rig: &mut Rig, is_done: impl Fn(&Rig) -> bool) {
    for _ in 0..1000 {
        if is_done(rig) {
            return;
        }
        rig.worker.step();
    }
    panic!("not done: {:?}", rig.cache.status());
}

#[test]
fn writes_wait_that_make_more_dirty_than_is_written_back_and_continue_when_it_is() {
    let (mut rig, room, waker) = changing();
    for number in 1..=CACHED_AT_LEAST {
        assert!(writes(&rig, number, &waker), "block {number}");
    }
    assert!(!writes(&rig, 18, &waker));
    rig.worker.step();
    assert_eq!(room.rings(), 0, "the disk has accepted nothing");
    rig.environment.set_monotonic(1000);
    rig.disk.with(|state| state.is_slow = false);
    // The client tries whenever it is woken, and at no other time.
    for _ in 0..100 {
        let heard = room.rings();
        rig.worker.step();
        if room.rings() > heard && writes(&rig, 18, &waker) {
            break;
        }
    }
    let status = rig.cache.status();
    assert_eq!((status.written_back_bytes, status.drained_epoch.0), (BLOCK, 0), "once block 0 was written");
    rig.run();
    assert!(!rig.cache.status().is_changing_mode);
}

#[test]
fn writes_are_cached_without_a_limit_while_the_disk_fails_and_those_that_wait_continue() {
    let (mut rig, room, waker) = changing();
    let waits = (1..50).find(|number| !writes(&rig, *number, &waker)).expect("it waits some time");
    rig.disk.with(|state| {
        state.unwritable = vec![block(0)];
        state.is_slow = false;
    });
    rig.run();
    assert!(room.rings() > 0);
    for number in waits..waits + 2 * CACHED_AT_LEAST {
        assert!(writes(&rig, number, &waker), "block {number}");
    }
}

#[test]
fn rounds_go_on_until_what_is_dirty_takes_the_disk_a_short_time() {
    let (mut rig, _, waker) = changing();
    for number in 1..=CACHED_AT_LEAST {
        assert!(writes(&rig, number, &waker), "block {number}");
    }
    // A disk that takes a second for two blocks.
    rig.environment.set_monotonic(1000);
    rig.disk.with(|state| state.is_slow = false);
    let first = rig.cache.base().mode().until();
    step_until(&mut rig, |rig| rig.cache.base().mode().until() > first);
    assert!(!rig.cache.base().mode().refuses_dirty(), "one more round");
    assert!(writes(&rig, 18, &waker), "it does not wait for them");
    rig.run();
    assert!(!rig.cache.status().is_changing_mode);
}
