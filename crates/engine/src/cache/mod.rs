//! A cache: its lanes, the state that they share, and the health of its backing device.
//!
//! A request starts here and locks a lane (`lane`), which stores into or reads from the region through the state that lanes share
//! (`base`).
//!
//! Invariants: a lane's lock is taken before the locks of tails, damage and backing device, under which no other lock is taken.
//!
//! Elsewhere: the operations in a locked lane (`lane`), writeback and reclaim (`worker`), recovery (`recovery`).

mod backing;
mod bypass;
mod classes;
mod curve;
mod damage;
mod fill;
mod flush;
mod index_size;
mod map;
mod metadata;
mod mode;
mod moment;
mod overload;
mod pace;
mod parked_counters;
mod parking;
mod pins;
mod read;
mod read_ahead;
mod resize;
mod scan;
mod status;
mod together;
mod verify;
mod view;
mod write;
mod zero;

use crate::{
    Environment, Mutex, Settings,
    base::{Base, FirstWrite},
    lane::Lane,
    position::Cursor,
    slots::{InBoth, TwoSlots},
};
use alloc::{boxed::Box, sync::Arc, vec::Vec};
use backing::BackingHealth;
use bypass::Bypassing;
use cbd_format::LaneTail;
use cbd_types::{BackendId, ByteRange, CHUNK, Epoch, InFlight, LaneId, Result};
use core::task::Waker;
use damage::DamageLog;
use overload::Overload;
pub(crate) use parked_counters::ParkedCounters;
pub(crate) use scan::Met;

pub(crate) use bypass::Covered;
pub use bypass::{BYPASS_MAX, Bypass, BypassTicket, FlushTicket};
pub use fill::Miss;
pub use index_size::IndexResize;
pub(crate) use index_size::index_blocks_per_lane;
pub use map::{CacheMap, MAP_CELLS_MAX, MapCell};
pub use moment::CommonMoment;
pub(crate) use pace::{Moved, PaceBoard};
pub use pace::{Pace, PaceReason};
pub use resize::Shrink;
pub use status::{BackingTrouble, CacheStatus, CachedState, DamagedRange};
pub use together::{BatchedWrite, TOGETHER};
pub use verify::{Comparison, Holding, Part, Repair};
pub use view::{LogEntry, LogSegmentView, LogView};
pub use write::Admission;
pub use zero::ZeroProgress;

/// A cache in front of one backing device.
///
/// Field order: data that every request reads and that is rarely written comes first; data that the background worker writes
/// often comes last.
#[repr(C)]
pub struct Cache<E: Environment> {
    lanes: Box<[Lane<E>]>,
    base: Base<E>,
    tails: Mutex<E, Vec<TwoSlots<LaneTail>>>,
    bypass: Bypassing<E>,
    overload: Overload,
    damage: DamageLog<E>,
    backing: BackingHealth<E>,
    parked: ParkedCounters<E>,
    pace: PaceBoard<E>,
    /// The position where writeback begins in each lane; recovery sets it, the background worker reads it.
    cursors: Mutex<E, Vec<Cursor>>,
}

impl<E: Environment> Cache<E> {
    /// A cache of empty lanes, before recovery.
    pub(crate) fn new(base: Base<E>, lanes: Vec<Lane<E>>, tails: Vec<TwoSlots<LaneTail>>) -> Arc<Self> {
        let cursors = alloc::vec![Cursor::default(); lanes.len()];
        Arc::new(Self {
            lanes: lanes.into_boxed_slice(),
            base,
            tails: Mutex::<E, _>::new(tails),
            bypass: Bypassing::new(),
            overload: Overload::default(),
            damage: DamageLog::new(),
            backing: BackingHealth::new(),
            parked: ParkedCounters::new(),
            pace: PaceBoard::new(),
            cursors: Mutex::<E, _>::new(cursors),
        })
    }

    /// The state that the lanes share.
    #[inline]
    pub(crate) const fn base(&self) -> &Base<E> {
        &self.base
    }

    /// The lanes, in the order of their numbers.
    #[inline]
    pub(crate) const fn lanes(&self) -> &[Lane<E>] {
        &self.lanes
    }

    /// The lane with this number.
    #[inline]
    pub(crate) fn lane(&self, id: LaneId) -> &Lane<E> {
        &self.lanes[id.index()]
    }

    /// The lane that the byte at `at` of the device belongs to.
    #[inline]
    pub(crate) fn lane_of(&self, at: u64) -> &Lane<E> {
        self.lane(self.base.identity().lanes.lane_of(at))
    }

    /// The lane of `range`, which lies in one chunk. Prefetches its index lines, so that they are loaded while the lane is
    /// locked.
    #[inline]
    pub(crate) fn prefetched_lane(&self, range: ByteRange) -> &Lane<E> {
        let lane = self.lane_of(range.start);
        lane.prefetch(self.base.identity().lanes, range);
        lane
    }

    /// The list and the counters of damage.
    const fn damage_log(&self) -> &DamageLog<E> {
        &self.damage
    }

    /// The progress of writeback and the health of the backing device.
    pub(crate) const fn backing(&self) -> &BackingHealth<E> {
        &self.backing
    }

    /// The pace of writeback, and the latency of reads that missed.
    pub(crate) const fn pace_board(&self) -> &PaceBoard<E> {
        &self.pace
    }

    /// Counts a read of `bytes` of the backing device for a miss, which began at `begun_us` of [`Environment::monotonic_us`]. Writeback
    /// yields to such reads while they take longer than `read_latency_target_us`.
    pub fn note_backing_read(&self, bytes: u64, begun_us: u64) {
        self.pace.count_read(bytes, self.monotonic_us().saturating_sub(begun_us));
    }

    /// [`Environment::monotonic_us`].
    pub fn monotonic_us(&self) -> u64 {
        self.base.environment().monotonic_us()
    }

    /// The counters of parking.
    pub(crate) const fn parked_counters(&self) -> &ParkedCounters<E> {
        &self.parked
    }

    /// The backend of the cache.
    pub const fn backend(&self) -> BackendId {
        self.base.identity().backend
    }

    /// The random identity of the cache, which its segments name.
    pub(crate) const fn id(&self) -> u64 {
        self.base.identity().cache_id
    }

    /// Size of the device in bytes; it can grow (`Transport::grow_backend`).
    pub fn size(&self) -> u64 {
        self.base.size()
    }

    /// Accepts requests up to `size`, which the row of the backend has durably.
    pub(crate) fn grow(&self, size: u64) {
        self.base.grow(size);
    }

    /// Logical sector of the device in bytes.
    pub const fn sector(&self) -> u32 {
        self.base.identity().sector
    }

    /// A write of at most this many bytes that lies in one chunk is recovered whole or not at all.
    pub const fn atomic_unit(&self) -> u32 {
        self.base.shape().atomic_unit()
    }

    /// Splits a range into pieces that [`write`](Self::write) and [`read`](Self::read) accept: each in one chunk and at most an
    /// atomic unit. A range that is such a piece is returned whole.
    pub fn pieces(&self, range: ByteRange) -> impl Iterator<Item = ByteRange> + use<E> {
        let unit = u64::from(self.atomic_unit());
        range.split_at_multiples(CHUNK).flat_map(move |chunk| {
            let mut start = chunk.start;
            core::iter::from_fn(move || {
                let piece = ByteRange { start, end: chunk.end.min(start + unit) };
                start = piece.end;
                (!piece.is_empty()).then_some(piece)
            })
        })
    }

    /// Whether [`pieces`](Self::pieces) leaves `range` whole.
    pub(super) fn is_piece(&self, range: ByteRange) -> bool {
        self.pieces(range).eq(core::iter::once(range))
    }

    /// The settings in force.
    pub fn settings(&self) -> Settings {
        self.base.settings()
    }

    /// Changes the settings; they take effect at once. The transport stores them for the next start.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](cbd_types::ErrorKind::InvalidArgument) for a value out of range, and for settings with which
    /// requests go past the cache before the transport has stored them; nothing
    /// changes then.
    pub fn set_settings(&self, settings: Settings) -> Result<()> {
        self.check_allowed(&settings)?;
        let paused_until_ms = self.settings().writeback_paused_until_ms;
        self.base.set_settings(settings)?;
        if settings.writeback_paused_until_ms != paused_until_ms {
            self.end_hold();
        }
        self.begin_classes();
        self.change_mode(settings.cache_mode);
        self.base.wakeups().wake();
        Ok(())
    }

    /// Has writeback keep the recovery point younger than `max_ms` milliseconds, if it can; 0 for no such promise. The region does
    /// not store it.
    pub fn set_recovery_point_max_ms(&self, max_ms: u64) {
        self.pace.set_recovery_point_max_ms(max_ms);
        self.base.wakeups().wake();
    }

    /// Everything up to this epoch is durable on the backing device.
    pub fn drained_epoch(&self) -> Epoch {
        self.base.drained_epoch()
    }

    /// Closes the present epoch and requests that it be drained at once, as fast as `writeback_rate` allows. It is drained when
    /// [`drained_epoch`](Self::drained_epoch) has reached the result, or nothing is dirty.
    pub fn request_drain(&self) -> Epoch {
        let epoch = self.close_epoch();
        self.request_drain_of(epoch);
        epoch
    }

    /// Requests that everything up to `epoch`, which is closed, be drained at once.
    fn request_drain_of(&self, epoch: Epoch) {
        self.base.epochs().request(epoch);
        let _ = self.want_backing_flush();
        self.base.wakeups().wake();
    }

    /// Whether everything up to `epoch` is on the backing device.
    pub fn is_drained(&self, epoch: Epoch) -> bool {
        if self.wants_backing_flush() {
            return false;
        }
        if self.drained_epoch() >= epoch {
            return true;
        }
        // Epochs without a write are never drained on their own, except up to a limit.
        self.base.epochs().limit().is_none()
            && self.lanes.iter().all(|lane| lane.lock().last_dirty_epoch() <= self.drained_epoch().0)
    }

    /// Bytes of data that the backing device does not have.
    pub fn dirty_bytes(&self) -> u64 {
        self.unwritten_bytes() + self.parked_bytes()
    }

    /// The same without parked ranges.
    pub(crate) fn unwritten_bytes(&self) -> u64 {
        self.lanes.iter().map(Lane::dirty_bytes).sum()
    }

    /// Bytes of data that records have ever dirtied, and [`unwritten_bytes`](Self::unwritten_bytes).
    pub(crate) fn dirtied_and_unwritten(&self) -> (u64, u64) {
        self.lanes
            .iter()
            .map(Lane::dirtied_and_dirty)
            .fold((0, 0), |sum, lane| (sum.0 + lane.0, sum.1 + lane.1))
    }

    /// Whether the backing device has everything: nothing is dirty, parked or damaged.
    pub fn holds_nothing_dirty(&self) -> bool {
        let status = self.status();
        status.dirty_records == 0
            && status.parked_bytes == 0
            && status.damaged.is_empty()
            && status.backing_is_consistent
    }

    /// Sets the waker that is called when the background worker has work.
    pub fn set_worker_waker(&self, waker: Waker) {
        self.base.wakeups().set_waker(waker);
    }

    /// Sets the callback that runs before the first request that makes data dirty. Call it before the cache is used.
    pub(crate) fn before_first_write(&self, note: FirstWrite) {
        self.base.gate().before_first_write(note);
    }

    /// Whether requests are accepted: [`stop`](Self::stop) was not called.
    pub fn is_running(&self) -> bool {
        self.base.gate().check_running().is_ok()
    }

    /// Refuses all further requests, wakes those that wait, and marks every lane. Dirty data stays in the region.
    pub fn stop(&self) {
        self.base.gate().stop();
        self.wake_all();
        if !self.is_abandoned() {
            self.close_epoch();
        }
    }

    /// As [`stop`](Self::stop), but no lane is marked, now or later: for a thread that failed in the middle of an operation.
    /// Acknowledged writes are in the region, and the process that opens it next recovers them.
    pub fn abandon(&self) {
        self.base.gate().abandon();
        self.wake_all();
    }

    /// Wakes all requests that wait.
    fn wake_all(&self) {
        self.base.pool().wake_all();
        self.wake_waiting_for_drained();
    }

    /// Whether [`abandon`](Self::abandon) was called.
    pub fn is_abandoned(&self) -> bool {
        self.base.gate().is_abandoned()
    }

    /// Removes `waker` from all wait lists: its requests were abandoned.
    pub fn stop_waiting(&self, waker: &Waker) {
        self.base.pool().forget(waker);
        self.stop_waiting_to_bypass(waker);
    }

    /// Sets whether requests without space fail from now on, or wait.
    pub(crate) fn set_stalled(&self, stalled: bool) {
        if self.backing.set_stalled(stalled) {
            self.base.pool().wake_all();
        }
    }

    /// The position where writeback begins in each lane.
    pub(crate) fn writeback_start(&self) -> Vec<Cursor> {
        self.cursors.lock().clone()
    }

    /// Sets the position where writeback begins in a lane; called by recovery.
    pub(crate) fn start_writeback_at(&self, lane: LaneId, cursor: Cursor) {
        self.cursors.lock()[lane.index()] = cursor;
    }

    /// The tail of a lane as stored in the region.
    pub(crate) fn stored_tail(&self, lane: LaneId) -> Option<LaneTail> {
        self.tails.lock()[lane.index()].content().copied()
    }

    /// Makes a new tail of a lane durable in both slots.
    pub(crate) fn store_tail(&self, lane: LaneId, names: InBoth, tail: LaneTail) {
        self.tails.lock()[lane.index()].store_in_both(self.base.region(), names, tail);
    }

    /// Repairs the slots of tails that do not hold the newest content. In flight until the caller fences.
    pub(crate) fn complete_tails(&self) -> InFlight {
        let region = self.base.region();
        let mut stored = region.nothing_in_flight();
        for tail in self.tails.lock().iter_mut() {
            stored = stored.and(tail.complete(region));
        }
        stored
    }
}

impl<E: Environment> core::fmt::Debug for Cache<E> {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.debug_struct("Cache").field("identity", self.base.identity()).finish_non_exhaustive()
    }
}
