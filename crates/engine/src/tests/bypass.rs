//! Changes that go past the cache: what waits for them, and what they wait for.

use super::rig::{Asked, Options, Rig};
use super::{Still, bell, std::sync::Mutex};
use crate::{
    Admission, Bypass, BypassReason, BypassTicket, Cache, CacheMode, FlushTicket, Settings, Step,
    ZeroProgress,
};
use alloc::{sync::Arc, task::Wake};
use cbd_types::{ByteRange, Class, ErrorKind, LaneId};
use core::task::Waker;

const BLOCK: u64 = 4096;

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

/// A rig in this mode, which is in force.
fn rig(cache_mode: CacheMode) -> Rig {
    let settings = Settings { cache_mode, ..Settings::default() };
    let mut rig = Rig::new(Options { settings, ..Options::default() });
    rig.run();
    assert!(!rig.cache.status().is_changing_mode);
    rig
}

/// A rig in writeback mode in which changes may go past the cache by choice.
fn rig_by_choice() -> Rig {
    let settings = Settings { sequential_write_cutoff: 1, ..Settings::default() };
    Rig::new(Options { settings, ..Options::default() })
}

fn begun(rig: &Rig, range: ByteRange) -> BypassTicket {
    match rig.cache.begin_bypass(range, BypassReason::Mode, &rig.waker) {
        Ok(Bypass::Begun(ticket)) => ticket,
        other => panic!("{range}: {other:?}"),
    }
}

#[test]
fn a_change_waits_for_a_bypass_that_it_overlaps_and_is_woken_at_its_end() {
    let rig = rig_by_choice();
    let ticket = begun(&rig, block(3));
    let (room, waker) = bell();
    let data = [1; BLOCK as usize];
    assert!(matches!(rig.cache.write(block(3), &data, &waker), Ok(Admission::Full)));
    let mut progress = ZeroProgress::default();
    assert!(matches!(rig.cache.zero(block(3), true, &mut progress, &waker), Ok(Admission::Full)));
    assert!(matches!(rig.cache.begin_bypass(block(3), BypassReason::Mode, &waker), Ok(Bypass::Wait)));
    let mut waits = false;
    rig.cache.write_together(Class::Unmarked, &[(block(3), &data[..]).into()], &waker, |_, result| {
        waits = matches!(result, Ok(Admission::Full));
    });
    assert!(waits);
    assert!(matches!(rig.cache.write(block(4), &data, &waker), Ok(Admission::Done(_))), "beside it");
    assert_eq!(room.rings(), 0);
    rig.cache.end_bypass(ticket, Some(&data), true);
    assert_eq!(room.rings(), 1, "one waker waits once");
    assert!(matches!(rig.cache.write(block(3), &data, &waker), Ok(Admission::Done(_))));
}

#[test]
fn nothing_is_filled_while_a_bypass_is_on_its_way() {
    let rig = rig(CacheMode::Writearound);
    let mut misses = alloc::vec::Vec::new();
    let mut into = [0; BLOCK as usize];
    rig.cache.read(block(3), &mut into, &mut misses).expect("it runs");
    let ticket = begun(&rig, block(3));
    rig.cache.read(block(3), &mut into, &mut misses).expect("it runs");
    misses.drain(..).for_each(|miss| rig.cache.complete_fill(miss, &into));
    rig.cache.end_bypass(ticket, None, true);
    rig.cache.read(block(3), &mut into, &mut misses).expect("it runs");
    assert_eq!(misses.len(), 1, "neither the fill before it nor the one beside it was recorded");
    misses.drain(..).for_each(|miss| rig.cache.cancel_fill(miss));
}

/// Writes a block through the cache.
fn write_through(rig: &Rig, number: u64) {
    let ticket = begun(rig, block(number));
    rig.cache.end_bypass(ticket, Some(&[1; BLOCK as usize]), true);
}

/// Writes a block through the cache, and begins a flush, which waits for the backing device.
fn flush_behind_a_write(rig: &Rig, seen: &mut u64, waker: &Waker) -> FlushTicket {
    write_through(rig, 3);
    let flush = rig.cache.flush_through(seen).expect("it runs").expect("something went past");
    assert!(rig.cache.flushed(flush, waker).is_none());
    flush
}

#[test]
fn a_flush_waits_for_the_backing_device_once() {
    let mut rig = rig(CacheMode::Writethrough);
    let mut seen = 0;
    let (room, waker) = bell();
    let flush = flush_behind_a_write(&rig, &mut seen, &waker);
    rig.run();
    assert!(room.rings() > 0);
    assert!(matches!(rig.cache.flushed(flush, &waker), Some(Ok(()))));
    assert!(rig.cache.flush_through(&mut seen).expect("it runs").is_none(), "nothing went past since");
}

#[test]
fn a_flush_that_waits_for_the_backing_device_fails_when_the_region_does() {
    let mut rig = rig(CacheMode::Writethrough);
    let (room, waker) = bell();
    let flush = flush_behind_a_write(&rig, &mut 0, &waker);
    let region = rig.transport.region();
    region.memory().fail_stores_after(0);
    let _ = region.store(0, &[0]);
    rig.worker.step();
    assert_eq!(room.rings(), 1, "no flush of the backing device would wake it any more");
    let failed = rig.cache.flushed(flush, &waker).expect("it has ended").expect_err("nothing was flushed");
    assert_eq!(failed.kind(), ErrorKind::Media);
}

#[test]
fn what_was_written_through_is_written_again_after_a_failed_flush_and_only_then() {
    for fails in [false, true] {
        let mut rig = rig(CacheMode::Writethrough);
        rig.disk.with(|state| state.refuses_flushes = fails);
        let mut seen = 0;
        let (_, waker) = bell();
        let flush = flush_behind_a_write(&rig, &mut seen, &waker);
        while matches!(rig.worker.step(), Step::Busy | Step::WaitBacking) {}
        assert_eq!(rig.cache.flushed(flush, &waker).map(|ended| ended.is_err()), Some(fails));
        rig.disk.with(|state| state.refuses_flushes = false);
        rig.disk.take_asked();
        rig.cache.request_drain();
        rig.environment.set_monotonic(60_000);
        rig.run();
        assert_eq!(rig.disk.take_asked().contains(&Asked::Write(block(3))), fails);
        assert_eq!(rig.cache.status().dirty_bytes, 0);
        assert_eq!(rig.cache.flush_through(&mut seen).is_err(), fails, "each client's next flush reports it");
        assert!(rig.cache.flush_through(&mut seen).is_ok(), "once");
    }
}

#[test]
fn what_bypasses_came_behind_is_forgotten_when_the_backing_device_has_it() {
    let mut rig = rig(CacheMode::Writethrough);
    let superseded = |rig: &Rig| rig.cache.lane(LaneId(0)).lock().has_superseded();
    (0..8).for_each(|number| write_through(&rig, number));
    assert!(!superseded(&rig), "nothing was cached before");
    (0..8).for_each(|number| write_through(&rig, number));
    assert!(superseded(&rig), "no flush has covered the first ones");
    rig.drain_without_clock();
    write_through(&rig, 100);
    assert!(!superseded(&rig));
}

#[test]
fn a_cache_whose_region_lacks_the_feature_is_not_bypassed() {
    let rig = Rig::new(Options::default());
    assert!(matches!(rig.cache.begin_bypass(block(0), BypassReason::Mode, &rig.waker), Ok(Bypass::Cached)));
    let settings = Settings { cache_mode: CacheMode::Writearound, ..Settings::default() };
    let refused = rig.cache.set_settings(settings).expect_err("the region is not marked");
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
}

/// A client that tries a bypass again whenever it is woken.
struct Client {
    cache: Arc<Cache<Still>>,
    range: ByteRange,
    ticket: Mutex<Option<BypassTicket>>,
}

impl Client {
    fn attempt(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        match self.cache.begin_bypass(self.range, BypassReason::Mode, &waker) {
            Ok(Bypass::Begun(ticket)) => *self.ticket.lock().expect("no panic") = Some(ticket),
            Ok(Bypass::Wait) => {}
            other => panic!("{other:?}"),
        }
    }
}

impl Wake for Client {
    fn wake(self: Arc<Self>) {
        if self.ticket.lock().expect("no panic").is_none() {
            self.attempt();
        }
    }
}

#[test]
fn a_change_of_what_the_disk_lacks_goes_past_the_cache_once_that_is_drained() {
    let mut rig = rig_by_choice();
    assert!(rig.write(block(1), 1));
    rig.cache
        .set_settings(Settings { cache_mode: CacheMode::Writethrough, ..rig.cache.settings() })
        .expect("it is ready");
    assert!(rig.write(block(3), 1), "the disk does not have block 1 yet");
    rig.cache.flush().expect("it runs");
    assert!(rig.write(block(4), 1), "an epoch later");
    while !rig.cache.base().mode().refuses_dirty() {
        rig.worker.step();
    }
    let client =
        Arc::new(Client { cache: Arc::clone(&rig.cache), range: block(3), ticket: Mutex::new(None) });
    client.attempt();
    assert!(client.ticket.lock().expect("no panic").is_none(), "the disk would get them in either order");
    let mut ticket = None;
    while ticket.is_none() && rig.cache.status().is_changing_mode {
        rig.worker.step();
        ticket = client.ticket.lock().expect("no panic").take();
    }
    assert!(rig.cache.status().is_changing_mode, "block 4 is not drained yet");
    rig.cache.end_bypass(ticket.expect("it was woken when block 3 was drained"), None, true);
    let asked = rig.disk.take_asked();
    assert!(asked.contains(&Asked::Write(block(3))) && !asked.contains(&Asked::Write(block(4))));
}

#[test]
fn after_a_failed_flush_of_the_disk_it_is_looked_up_again_what_is_in_order() {
    let mut rig = rig(CacheMode::Writethrough);
    let (_, waker) = bell();
    let _flush = flush_behind_a_write(&rig, &mut 0, &waker);
    // The epoch that the flush has closed is on the disk, unflushed, and that is remembered.
    write_through(&rig, 5);
    rig.disk.with(|state| state.refuses_flushes = true);
    while matches!(rig.worker.step(), Step::Busy | Step::WaitBacking) {}
    let next = rig.cache.begin_bypass(block(9), BypassReason::Mode, &rig.waker);
    assert!(matches!(next, Ok(Bypass::Cached)), "block 3 may be lost, and is written again first: {next:?}");
}

#[test]
fn a_change_by_choice_is_cached_until_what_is_closed_is_drained_and_writeback_hurries() {
    let mut rig = rig_by_choice();
    let settings = rig.cache.settings();
    let choose = |rig: &Rig, number| {
        let chosen = rig.cache.begin_bypass(block(number), BypassReason::Sequential, &rig.waker);
        match chosen.expect("it runs") {
            Bypass::Begun(ticket) => {
                rig.cache.end_bypass(ticket, None, true);
                true
            }
            Bypass::Cached => false,
            Bypass::Wait => panic!("a change by choice does not wait for writeback"),
        }
    };
    assert!(rig.write(block(3), 1));
    assert_eq!((choose(&rig, 3), choose(&rig, 4)), (false, true), "dirty, and beside it");
    rig.cache.flush().expect("it runs");
    assert!(!choose(&rig, 5), "the closed epoch comes first");
    let until = |ms| Settings { writeback_paused_until_ms: ms, ..settings };
    rig.cache.set_settings(until(u64::MAX)).expect("they are good");
    rig.run();
    assert_eq!(rig.cache.status().dirty_bytes, BLOCK, "it does not end a pause");
    rig.cache.set_settings(until(0)).expect("they are good");
    rig.run();
    assert_eq!(rig.cache.status().dirty_bytes, 0, "no time has passed");
    assert!(choose(&rig, 5));
    assert!(rig.write(block(6), 1));
    rig.cache.flush().expect("it runs");
    rig.run();
    assert_eq!(rig.cache.status().dirty_bytes, BLOCK, "nothing more hurries");
    rig.disk.with(|state| state.unwritable = alloc::vec![block(6)]);
    rig.cache.request_drain();
    rig.run();
    assert!(!choose(&rig, 7), "the disk fails");
    rig.disk.with(|state| state.unwritable.clear());
    rig.environment.set_monotonic(60_000);
    rig.run();
    assert!(choose(&rig, 7));
    rig.disk.with(|state| state.refuses_flushes = true);
    let _ticket = rig.cache.request_backing_flush();
    rig.run();
    assert!(
        rig.cache.backing().is_in_trouble() && !choose(&rig, 8),
        "no epoch is closed, and the disk fails"
    );
    let bypassed = rig.cache.status().bypassed;
    assert_eq!(bypassed.of(BypassReason::Sequential), 3 * BLOCK);
}

#[test]
fn what_was_submitted_before_a_change_of_the_mode_makes_nothing_dirty_behind_it() {
    let rig = rig(CacheMode::Writethrough);
    let (room, waker) = bell();
    let data = [1; BLOCK as usize];
    assert!(matches!(rig.cache.write(block(3), &data, &waker), Ok(Admission::Full)));
    let mut progress = ZeroProgress::default();
    assert!(matches!(rig.cache.zero(block(3), true, &mut progress, &waker), Ok(Admission::Full)));
    let mut waits = 0;
    rig.cache.write_together(
        Class::Unmarked,
        &[3, 4].map(|number| (block(number), &data[..]).into()),
        &waker,
        |_, result| {
            waits += u32::from(matches!(result, Ok(Admission::Full)));
        },
    );
    assert_eq!(
        (waits, room.rings(), rig.cache.status().dirty_records),
        (2, 4, 0),
        "each tries again at once"
    );
}

#[test]
fn writes_that_go_around_leave_the_last_of_a_full_lane_to_invalidations() {
    for sectors in (0..64).step_by(3) {
        let rig = rig_by_choice();
        let is_short = |length| rig.cache.lane(LaneId(0)).lock().is_short_of_space(rig.cache.base(), length);
        let fill = |length: u64, from: u64| {
            let ranges = (0..1024).map(|number| ByteRange::at(from + number * length, length));
            ranges.take_while(|_| !is_short(length)).for_each(|range| assert!(rig.write(range, 1)));
        };
        let pool = rig.cache.base().pool();
        (0..1024).take_while(|_| pool.free() > pool.reserve()).for_each(|number| {
            assert!(rig.write(block(number), 1));
        });
        // The last segment, which so many records begin.
        (0..sectors).for_each(|number| assert!(rig.write(ByteRange::at(number * 512, 512), 1)));
        fill(BLOCK, 200 * BLOCK);
        // What has no room for a block may have room for sectors.
        fill(512, 600 * BLOCK);
        assert!(is_short(512));
        let has_room =
            |number: &u64| match rig.cache.begin_bypass(block(*number), BypassReason::Full, &rig.waker) {
                Ok(Bypass::Begun(ticket)) => {
                    rig.cache.end_bypass(ticket, None, true);
                    true
                }
                _ => false,
            };
        // Seven pages of 64 slots in a segment of 64 KiB, of which a sixteenth is 28.
        let invalidations = (800..1000).take_while(has_room).count();
        assert!(invalidations >= 28, "{invalidations} behind {sectors} sectors");
    }
}
