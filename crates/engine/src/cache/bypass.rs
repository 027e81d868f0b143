//! Changes that go past the cache, to the backing device alone, and the flushes of the backing device that they need.
//!
//! The caller sends the change itself, through its own queue of the backing device:
//!
//! 1. [`Cache::begin_bypass`] checks that the change may go past the cache, and makes durable that the cache holds nothing of the
//!    range.
//! 2. The caller submits the change. Requests that overlap it wait.
//! 3. [`Cache::end_bypass`] ends the wait, and in write-through mode records the data.
//!
//! Invariants:
//! - with `strict` and `checkpoint`, a change begins only while all epochs that clients have closed are drained: behind the last
//!   flush any order is legal, as on a disk with a volatile cache, and a change that is submitted before a flush completes is in no
//!   order with it;
//! - a flush completes only when a flush of the backing device has covered every bypass that had completed;
//! - the background worker alone flushes the backing device: when a flush fails, no other one that seems to have succeeded behind it
//!   can hide what was lost;
//! - in writeback mode a change goes past the cache by choice (`settings`), and is cached where that is not legal at once;
//! - a failed flush is reported by each queue once, and what the cache has recorded of the bypasses is written again.
//!
//! Elsewhere: one lane (`lane::bypass`), the phases of a change to another mode (`base::mode`).

use super::{
    Admission, Cache,
    write::{no_memory, other_data},
};
use crate::{
    BypassReason, CacheMode, Consistency, Environment, Mutex, Settings,
    base::{Lack, Phase, Requester},
    epochs::Limit,
    lane::{BypassId, LaneState, Obstacle},
    sync::{SharedBool, SharedU64},
};
use alloc::vec::Vec;
use cbd_format::record::{INVALIDATE_MAX, RecordKind};
use cbd_types::{ByteRange, Epoch, Error, ErrorKind, LaneId, MutationPoint, Result};
use core::sync::atomic::{AtomicU64, Ordering};
use core::task::Waker;

/// Zeroes and discards go past the cache in steps of at most this many bytes: the cache forgets a step while a lane is locked.
pub const BYPASS_MAX: u64 = INVALIDATE_MAX;

/// What a change has seen before it waits: the drained epoch, the mode and its phase, and the limit of writeback.
pub(super) type Seen = (Epoch, CacheMode, Phase, Option<Limit>);

/// What [`Cache::begin_in_lane`] lacks, or an error.
type Hindrance = core::result::Result<Lack, Error>;

/// The state of changes that go past the cache.
pub(super) struct Bypassing<E: Environment> {
    /// The region's superblocks have the feature: programs that do not know the records refuse the region.
    is_allowed: SharedBool<E>,
    /// Changes that the backing device has returned.
    returned: SharedU64<E>,
    /// The value of `returned` that a flush of the backing device has covered, and the one that a drain wants to be covered.
    flushed: SharedU64<E>,
    wanted: SharedU64<E>,
    /// A flush of the backing device has covered all write-through records up to this epoch.
    flushed_epoch: SharedU64<E>,
    /// Failed flushes of the backing device, whoever sent them.
    failures: SharedU64<E>,
    /// The number of the last of them that may have lost a change of which the cache has no data.
    reported: SharedU64<E>,
    /// Requests that wait until the backing device has what precedes them, or is flushed.
    waiting: Mutex<E, Vec<Waker>>,
    has_waiting: SharedBool<E>,
    /// A change was cached that would have gone past the cache if everything up to this epoch were drained: writeback hurries.
    wanted_order: SharedU64<E>,
    /// Everything up to this epoch is on the backing device; 0 if that must be looked up.
    in_order: SharedU64<E>,
    /// Bytes that settings would have sent past the cache, and that were cached because it was not legal. Nothing depends on it.
    refused: AtomicU64,
}

impl<E: Environment> Bypassing<E> {
    pub(super) fn new() -> Self {
        Self {
            is_allowed: SharedBool::new(false),
            returned: SharedU64::new(0),
            flushed: SharedU64::new(0),
            wanted: SharedU64::new(0),
            flushed_epoch: SharedU64::new(0),
            failures: SharedU64::new(0),
            reported: SharedU64::new(0),
            waiting: Mutex::<E, _>::new(Vec::new()),
            has_waiting: SharedBool::new(false),
            wanted_order: SharedU64::new(0),
            in_order: SharedU64::new(0),
            refused: AtomicU64::new(0),
        }
    }
}

/// Whether a change goes past the cache.
#[derive(Debug)]
pub enum Bypass {
    /// The caller submits it to the backing device, and then passes the ticket to [`Cache::end_bypass`].
    Begun(BypassTicket),
    /// It is cached: past the cache it would not be legal now.
    Cached,
    /// It waits; the waker is called when it may be able to begin.
    Wait,
}

/// A change that goes past the cache.
#[derive(Debug)]
#[must_use = "a bypass that does not end holds up requests of its range"]
pub struct BypassTicket {
    range: ByteRange,
    reason: BypassReason,
    by_choice: bool,
    begun_us: u64,
    lanes: Vec<(LaneId, BypassId)>,
}

impl BypassTicket {
    /// Whether the change could have been cached: the caller does so if the backing device refuses it.
    #[must_use]
    pub const fn is_by_choice(&self) -> bool {
        self.by_choice
    }
}

/// A flush of the backing device that a request waits for.
#[derive(Clone, Copy, Debug)]
#[must_use = "the request is complete only when the backing device is flushed"]
pub struct FlushTicket {
    returned: u64,
    failures: u64,
}

/// What a flush of the backing device covers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Covered {
    /// Write-through records up to this epoch.
    epoch: u64,
    /// As many changes that have gone past the cache.
    returned: u64,
}

impl<E: Environment> Cache<E> {
    /// Allows requests to go past the cache: the region has the feature.
    pub(crate) fn allow_bypass(&self) {
        if !self.bypass.is_allowed.swap(true, Ordering::SeqCst) {
            // An earlier process may have left changes that no flush has covered.
            self.note_unflushed();
        }
    }

    /// Notes that the backing device may have accepted changes, before the cache was in front of it, that no flush has covered: the
    /// next flush of a client flushes it too.
    pub fn note_unflushed(&self) {
        self.bypass.returned.fetch_add(1, Ordering::SeqCst);
    }

    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for settings that the region is not ready for.
    pub(super) fn check_allowed(&self, settings: &Settings) -> Result<()> {
        if settings.can_bypass() && !self.bypass.is_allowed.load(Ordering::SeqCst) {
            let text = "the region is not marked as one whose caches can be bypassed: store the settings in the transport first";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(())
    }

    /// Whether all writes are cached: neither the mode nor other settings send any past the cache.
    #[inline]
    pub fn caches_writes(&self) -> bool {
        self.is_writeback() && !self.base().mode().may_bypass()
    }

    /// Whether writes are cached as far as the mode says.
    #[inline]
    pub fn is_writeback(&self) -> bool {
        self.base().mode().is_writeback()
    }

    /// Begins a change that goes past the cache: a write of one [piece](Self::pieces), or zeroes or a discard of at most
    /// [`BYPASS_MAX`] bytes. When it has begun, the cache holds nothing of the range, durably, and other changes of the range wait.
    /// In writeback mode the change goes past by choice: it is cached where it would have to wait for writeback, and while the
    /// backing device fails.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn begin_bypass(&self, range: ByteRange, reason: BypassReason, waker: &Waker) -> Result<Bypass> {
        let base = self.base();
        debug_assert!(range.len() <= BYPASS_MAX, "{range} is too long for one bypass");
        base.gate().check_running()?;
        if !self.bypass.is_allowed.load(Ordering::SeqCst) {
            return Ok(Bypass::Cached);
        }
        let (mode, phase) = base.mode().get();
        let waits = mode != CacheMode::Writeback && phase != Phase::Draining;
        let seen = (self.drained_epoch(), mode, phase, base.epochs().limit());
        let by_choice = mode == CacheMode::Writeback;
        if by_choice && self.backing().is_in_trouble() {
            return Ok(Bypass::Cached);
        }
        if seen.3.is_some() {
            // Behind a common moment with other caches nothing may reach the backing device.
            return if waits { self.wait_for_drained(seen, waker) } else { Ok(Bypass::Cached) };
        }
        if !self.is_in_order() {
            let ordered = base.epochs().ordered();
            if by_choice && self.bypass.wanted_order.fetch_max(ordered, Ordering::SeqCst) < ordered {
                base.wakeups().wake();
            }
            return if waits {
                self.wait_for_drained(seen, waker)
            } else {
                self.cache_for_now(seen, range, waker)
            };
        }
        let begun_us = self.monotonic_us();
        let mut ticket = BypassTicket { range, reason, by_choice, begun_us, lanes: Vec::new() };
        for id in base.identity().lanes.touched_by(range, 0) {
            let begun = self.begin_in_lane(id, waker, !by_choice, &mut ticket);
            let outcome = match begun {
                Ok(None) => continue,
                Ok(Some(Obstacle::InFlight)) => Ok(Bypass::Wait),
                Ok(Some(Obstacle::Dirty)) if waits => self.wait_for_drained(seen, waker),
                Ok(Some(Obstacle::Dirty | Obstacle::Kept)) => {
                    self.unsettle_mode();
                    self.cache_for_now(seen, range, waker)
                }
                Err(Ok(Lack::Space)) if by_choice => Ok(Bypass::Cached),
                Err(Ok(lack)) => self.no_bypass(lack, waits),
                Err(Err(error)) => Err(error),
            };
            self.end_lanes(&ticket.lanes);
            return outcome;
        }
        self.overload.begin();
        Ok(Bypass::Begun(ticket))
    }

    /// Counts bytes that were cached, although they were to go past the cache by choice.
    pub fn count_refused_bypass(&self, bytes: u64) {
        self.bypass.refused.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that settings would have sent past the cache, and that were cached because it was not legal.
    pub(super) fn refused_bypass_bytes(&self) -> u64 {
        self.bypass.refused.load(Ordering::Relaxed)
    }

    /// The epoch up to which writeback hurries, so that changes can go past the cache by choice.
    pub(crate) fn wanted_order(&self) -> u64 {
        self.bypass.wanted_order.load(Ordering::SeqCst)
    }

    /// The outcome where the invalidation found no space or no memory.
    fn no_bypass(&self, lack: Lack, waits: bool) -> Result<Bypass> {
        match lack {
            Lack::Space if waits => self.backing().check_not_stalled().map(|()| Bypass::Wait),
            Lack::Space => Ok(Bypass::Cached),
            Lack::Memory => no_memory().map(|_| Bypass::Wait),
            Lack::Data => other_data(),
        }
    }

    /// Begins the bypass in one lane, and adds it to `ticket`. Returns the obstacle, if there is one. `waits`: the waker is called
    /// when there is space.
    fn begin_in_lane(
        &self,
        id: LaneId,
        waker: &Waker,
        waits: bool,
        ticket: &mut BypassTicket,
    ) -> core::result::Result<Option<Obstacle>, Hindrance> {
        let (base, range) = (self.base(), ticket.range);
        ticket.lanes.try_reserve(1).map_err(|_| Ok(Lack::Memory))?;
        let lane = self.lane(id);
        let mut state = lane.lock();
        base.region().check_stores(MutationPoint::RecordAfterFailure).map_err(Err)?;
        match state.obstacle(base, range) {
            Some(Obstacle::InFlight) => {
                state.wait_for_bypass(waker).ok_or(Ok(Lack::Memory))?;
                return Ok(Some(Obstacle::InFlight));
            }
            Some(obstacle) => return Ok(Some(obstacle)),
            None => {}
        }
        lane.announce(base);
        let (bypass, _) =
            state.begin_bypass(base, range, Requester::Client, waits.then_some(waker)).map_err(Ok)?;
        ticket.lanes.push((id, bypass));
        drop(state);
        base.region().check_stores(MutationPoint::WriteStoreCheck).map_err(Err)?;
        Ok(None)
    }

    /// Whether all epochs that clients have closed are on the backing device, or their order does not matter. Between two flushes
    /// of clients any order is legal, even if the cache itself has closed an epoch there.
    fn is_in_order(&self) -> bool {
        // Both are read first: what is closed meanwhile is in no order with a request that was submitted before.
        let epochs = self.base().epochs();
        let (ordered, open) = (epochs.ordered(), epochs.present());
        if self.bypass.in_order.load(Ordering::SeqCst) >= ordered && ordered > 0 {
            return true;
        }
        let failures = self.bypass.failures.load(Ordering::SeqCst);
        if self.has_written_before(ordered + 1) {
            // What is written stays so, unless a flush of the backing device fails.
            self.bypass.in_order.store(ordered, Ordering::SeqCst);
            if self.bypass.failures.load(Ordering::SeqCst) != failures {
                self.bypass.in_order.store(0, Ordering::SeqCst);
            }
            return true;
        }
        let is_free = self.settings().consistency == Consistency::None;
        if is_free && epochs.void_until() < open {
            // Before the change overtakes earlier ones, the region records durably that the backing device alone is not
            // crash-consistent until they are drained.
            epochs.void_until_epoch(self.base().context(), open);
        }
        is_free
    }

    /// Whether the backing device has all data of the epochs before `epoch`, flushed or not.
    pub(crate) fn has_written_before(&self, epoch: u64) -> bool {
        let drained = self.drained_epoch().0;
        let oldest = |lane: &crate::lane::Lane<E>| lane.lock().oldest_unwritten_epoch(drained);
        self.lanes().iter().all(|lane| oldest(lane).is_none_or(|oldest| oldest >= epoch))
    }

    /// Adds a request to those that are woken when an epoch is drained or the mode changes. `seen` is what the caller saw.
    pub(super) fn wait_for_drained(&self, seen: Seen, waker: &Waker) -> Result<Bypass> {
        if self.wait_in_list(waker).is_none() {
            return no_memory().map(|_| Bypass::Wait);
        }
        self.bypass.has_waiting.store(true, Ordering::SeqCst);
        let (mode, phase) = self.base().mode().get();
        let now = (self.drained_epoch(), mode, phase, self.base().epochs().limit());
        if now != seen || self.base().gate().check_running().is_err() {
            // The wait list may have been woken before this waker was added to it.
            waker.wake_by_ref();
        }
        self.base().wakeups().wake();
        Ok(Bypass::Wait)
    }

    /// Adds a request to those that are woken when an epoch is drained, the mode changes, or a flush of the backing device ends.
    /// `None` if there is no memory for it.
    fn wait_in_list(&self, waker: &Waker) -> Option<()> {
        let mut waiting = self.bypass.waiting.lock();
        if !waiting.iter().any(|known| known.will_wake(waker)) {
            waiting.try_reserve(1).ok()?;
            waiting.push(waker.clone());
        }
        Some(())
    }

    /// Whether requests wait until the backing device has what precedes them.
    pub(crate) fn has_waiting_for_drained(&self) -> bool {
        self.bypass.has_waiting.load(Ordering::SeqCst)
    }

    /// Wakes the requests that wait until the backing device has what precedes them.
    pub(crate) fn wake_waiting_for_drained(&self) {
        // Always with the lock: a request that is added behind it sees what has changed before.
        let woken = {
            let mut waiting = self.bypass.waiting.lock();
            self.bypass.has_waiting.store(false, Ordering::SeqCst);
            core::mem::take(&mut *waiting)
        };
        woken.into_iter().for_each(Waker::wake);
    }

    /// Removes `waker` from the lists of requests that wait for a bypass, or to be bypassed.
    pub(super) fn stop_waiting_to_bypass(&self, waker: &Waker) {
        self.lanes().iter().for_each(|lane| lane.lock().stop_waiting_for_bypass(waker));
        let mut waiting = self.bypass.waiting.lock();
        waiting.retain(|known| !known.will_wake(waker));
        if waiting.is_empty() {
            self.bypass.has_waiting.store(false, Ordering::SeqCst);
        }
    }

    /// Ends a bypass: the change has returned from the backing device, or was never submitted. `accepted` is whether the backing
    /// device has done it; `data` is what was written, in memory that no client can access.
    pub fn end_bypass(&self, ticket: BypassTicket, data: Option<&[u8]>, accepted: bool) {
        // Before the request completes: a flush that follows must see it. A change that failed may have been done in part.
        self.bypass.returned.fetch_add(1, Ordering::SeqCst);
        let now_us = self.monotonic_us();
        self.overload.end(accepted.then(|| now_us.saturating_sub(ticket.begun_us)), now_us);
        if accepted {
            self.base().bypassed().count(ticket.reason, ticket.range.len());
        }
        data.into_iter().for_each(|data| self.pace_board().count_moved(data.len() as u64));
        let is_of_mode = ticket.reason == BypassReason::Mode;
        let records = accepted && is_of_mode && self.base().mode().get().0 == CacheMode::Writethrough;
        if let (true, Some(data), [(lane, id)]) = (records, data, &*ticket.lanes) {
            self.record_through(*lane, *id, ticket.range, data);
        }
        self.end_lanes(&ticket.lanes);
    }

    /// Ends the bypass in its lanes, and wakes the requests that waited for it.
    fn end_lanes(&self, lanes: &[(LaneId, BypassId)]) {
        for (id, bypass) in lanes {
            let woken = self.lane(*id).lock().end_bypass(*bypass);
            woken.into_iter().for_each(Waker::wake);
        }
    }

    /// Records data that the backing device has accepted, unless space is short.
    fn record_through(&self, id: LaneId, bypass: BypassId, range: ByteRange, data: &[u8]) {
        let (base, lane) = (self.base(), self.lane(id));
        let mut state = lane.lock();
        debug_assert!(state.is_being_bypassed(range), "{bypass:?} has ended");
        if base.gate().check_running().is_err()
            || base.region().check_stores(MutationPoint::RecordAfterFailure).is_err()
            || base.pool().has_waiters()
        {
            return;
        }
        lane.announce(base);
        self.record_clean(&mut state, RecordKind::WriteThrough.into(), range, data, Requester::Optional);
    }

    /// As [`flush`](Self::flush), for a request of a client. Returns a ticket if a flush of the backing device is needed as well:
    /// the background worker sends it, and [`flushed`](Self::flushed) says when it has ended.
    ///
    /// # Errors
    /// As [`flush`](Self::flush), and [`ErrorKind::Backing`] if a flush of the backing device has failed since `seen`: a bypass that
    /// had completed may be lost. `seen` is then its number, so that each caller reports it once.
    pub fn flush_through(&self, seen: &mut u64) -> Result<Option<FlushTicket>> {
        self.flush()?;
        let reported = self.bypass.reported.load(Ordering::SeqCst);
        if core::mem::replace(seen, reported) < reported {
            return Err(flush_failed());
        }
        Ok(self.has_unflushed_bypass().then(|| self.request_backing_flush()))
    }

    /// Requests a flush of the backing device that covers everything that has gone past the cache until now.
    pub fn request_backing_flush(&self) -> FlushTicket {
        let ticket = self.want_backing_flush();
        self.base().wakeups().wake();
        ticket
    }

    /// As [`request_backing_flush`](Self::request_backing_flush), without waking the background worker.
    pub(super) fn want_backing_flush(&self) -> FlushTicket {
        // The failures are read first: a flush that fails from now on fails the request.
        let failures = self.bypass.failures.load(Ordering::SeqCst);
        let returned = self.bypass.returned.load(Ordering::SeqCst);
        self.bypass.wanted.fetch_max(returned, Ordering::SeqCst);
        FlushTicket { returned, failures }
    }

    /// Whether the flush of the backing device that a ticket is for has ended, and how. If not, the waker is called when it has, or
    /// earlier.
    pub fn flushed(&self, ticket: FlushTicket, waker: &Waker) -> Option<Result<()>> {
        if self.wait_in_list(waker).is_none() {
            return Some(no_memory().map(drop));
        }
        // The wait list is taken behind each change of these numbers.
        if self.bypass.flushed.load(Ordering::SeqCst) >= ticket.returned {
            return Some(Ok(()));
        }
        if self.bypass.failures.load(Ordering::SeqCst) != ticket.failures {
            return Some(Err(flush_failed()));
        }
        // The background worker sends no flush any more in either case.
        let failed = self.base().gate().check_running();
        Some(failed.and_then(|()| self.base().region().check_stores(MutationPoint::FlushStoreCheck)))
            .filter(Result::is_err)
    }

    /// The number of the last failed flush of the backing device that [`flush_through`](Self::flush_through) reports.
    pub fn reported_failures(&self) -> u64 {
        self.bypass.reported.load(Ordering::SeqCst)
    }

    /// Whether the backing device has accepted changes that no flush has covered.
    pub(super) fn has_unflushed_bypass(&self) -> bool {
        self.bypass.returned.load(Ordering::SeqCst) != self.bypass.flushed.load(Ordering::SeqCst)
    }

    /// Whether a request waits for a flush of the backing device.
    pub(crate) fn wants_backing_flush(&self) -> bool {
        self.bypass.flushed.load(Ordering::SeqCst) < self.bypass.wanted.load(Ordering::SeqCst)
    }

    /// What a flush of the backing device covers that is submitted now.
    pub(crate) fn covered_by_flush(&self) -> Covered {
        // All write-through records of closed epochs are stored, and so the backing device has accepted their data.
        let epoch = self.base().epochs().covered() - 1;
        Covered { epoch, returned: self.bypass.returned.load(Ordering::SeqCst) }
    }

    /// A flush of the backing device has succeeded.
    pub(crate) fn backing_flushed(&self, covered: Covered) {
        self.bypass.flushed.fetch_max(covered.returned, Ordering::SeqCst);
        self.bypass.flushed_epoch.fetch_max(covered.epoch, Ordering::SeqCst);
        self.wake_waiting_for_drained();
    }

    /// A flush of the backing device has failed: what it covered may be lost there. Write-through records are written again. A
    /// change of which the cache has no data is reported by each queue's next flush.
    pub(crate) fn backing_flush_failed(&self) {
        let has_lost = self.has_unflushed_bypass();
        self.unsettle_mode();
        for lane in self.lanes() {
            let mut state = lane.lock();
            // What was read before may be newer than what is left.
            state.cancel_all_fills();
            state.distrust_write_through();
        }
        let failures = self.bypass.failures.fetch_add(1, Ordering::SeqCst) + 1;
        self.bypass.in_order.store(0, Ordering::SeqCst);
        if has_lost {
            self.bypass.reported.fetch_max(failures, Ordering::SeqCst);
        }
        self.wake_waiting_for_drained();
    }

    /// Whether a flush of the backing device has covered all write-through records up to `epoch`.
    pub(crate) fn has_flushed_through(&self, epoch: u64) -> bool {
        self.bypass.flushed_epoch.load(Ordering::SeqCst) >= epoch
    }

    /// The outcome of a client's change that may not be cached, because the mode has changed since it was submitted. It is to begin
    /// a bypass, and is woken at once for that. Called without a locked lane.
    #[cold]
    pub(super) fn goes_past(waker: &Waker) -> Result<Admission> {
        waker.wake_by_ref();
        Ok(Admission::Full)
    }

    /// Whether a cached change of `range` must wait for a bypass that is on its way to the backing device. Its waker is then on the
    /// list of those that are woken at its end.
    #[inline]
    pub(super) fn waits_for_bypass(
        state: &mut LaneState,
        range: ByteRange,
        waker: &Waker,
    ) -> Option<Result<Admission>> {
        if !state.is_being_bypassed(range) {
            return None;
        }
        Some(match state.wait_for_bypass(waker) {
            Some(()) => Ok(Admission::Full),
            None => no_memory(),
        })
    }
}

#[cold]
fn flush_failed() -> Error {
    let text = "a flush of the backing device failed: writes that went past the cache since the flush before may be lost";
    Error::new(ErrorKind::Backing, text)
}
