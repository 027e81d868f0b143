//! A cache: its lanes, its segments, its pool, and what is known of its backing device.

use crate::{
    Environment, Mutex, Settings,
    context::{Context, Identity},
    epochs::Epochs,
    lane::Lane,
    log,
    logscan::Cursor,
    parking::ParkedCounters,
    pool::Pool,
    quarantine::DamageLog,
    rare::RareCounters,
    slots::TwoSlots,
    sync::{SharedBool, SharedU32, SharedU64},
    writeback::BackingHealth,
};
use alloc::{boxed::Box, sync::Arc, vec::Vec};
use cbd_format::{LaneTail, RecordPlace, SegmentShape};
use cbd_types::{
    BackendId, ByteRange, CHECKSUM_BLOCK, CHUNK, Epoch, Error, ErrorKind, LaneId, MutationPoint, Region,
    Result, SegmentId,
};
use core::sync::atomic::Ordering;
use core::task::Waker;

/// Bit of [`Segment::pins`]: reclaim is done with the segment; the last reader gives it back.
const RETIRED: u32 = 1 << 31;

/// Bit of [`Segment::pins`]: the segment was given back; whoever pins it now is wrong, and must not give it back twice.
const RETURNED: u32 = 1 << 30;

/// Bit of [`Cache::gate`]: no request is taken any more.
const STOPPED: u32 = 1;

/// Bit of [`Cache::gate`]: nothing was dirty when the cache was opened, and that this is going to change was not noted yet.
const UNNOTED: u32 = 2;

/// Notes durably that the cache is about to hold dirty data.
pub(crate) type FirstWrite = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// What is known of a segment while the cache is open.
pub(crate) struct Segment<E> {
    pub(crate) id: SegmentId,
    /// First byte in the region.
    pub(crate) base: u64,
    pub(crate) generation: SharedU32<E>,
    salt: SharedU64<E>,
    pub(crate) ordinal: SharedU64<E>,
    /// Readers that copy from it now, and [`RETIRED`].
    pins: SharedU32<E>,
}

impl<E: Environment> Segment<E> {
    pub(crate) const fn new(id: SegmentId, base: u64) -> Self {
        Self {
            id,
            base,
            generation: SharedU32::new(0),
            salt: SharedU64::new(0),
            ordinal: SharedU64::new(0),
            pins: SharedU32::new(0),
        }
    }

    /// A new life of the segment. Nobody reads it: it comes from the pool.
    pub(crate) fn begin(&self, generation: u32, salt: u64, ordinal: u64) {
        self.generation.store(generation, Ordering::Relaxed);
        self.salt.store(salt, Ordering::Relaxed);
        self.ordinal.store(ordinal, Ordering::Relaxed);
        self.pins.store(0, Ordering::Release);
    }

    pub(crate) fn place(&self, slot: u32) -> RecordPlace {
        RecordPlace { salt: self.salt.load(Ordering::Relaxed), segment: self.id, slot }
    }

    /// Under the lane's lock, where the index still names the segment.
    pub(crate) fn pin(&self) {
        self.pins.fetch_add(1, Ordering::Acquire);
    }
}

/// A cache in front of one backing device.
///
/// In this order: what every request reads, and hardly anything writes, stands before the first field that has its cache lines to
/// itself; what the background worker writes all the time stands behind it.
#[repr(C)]
pub struct Cache<E: Environment> {
    context: Context<E>,
    pub(crate) lanes: Box<[Lane<E>]>,
    pub(crate) segments: Box<[Segment<E>]>,
    /// What keeps requests out, as bits: [`STOPPED`], [`UNNOTED`]. Every request reads it, and hardly anything writes it.
    gate: SharedU32<E>,
    abandoned: SharedBool<E>,
    /// The background worker sleeps until somebody writes.
    pub(crate) worker_sleeps: SharedBool<E>,
    pub(crate) pool: Pool<E>,
    epochs: Epochs<E>,
    pub(crate) tails: Mutex<E, Vec<TwoSlots<LaneTail>>>,
    settings: Mutex<E, Settings>,
    /// What has to be noted outside before the first write; see [`UNNOTED`].
    first_write: Mutex<E, Option<FirstWrite>>,
    pub(crate) damage: Mutex<E, DamageLog>,
    backing: BackingHealth<E>,
    pub(crate) rare: RareCounters,
    parked: ParkedCounters<E>,
    maintenance: Mutex<E, Option<Waker>>,
    /// Where writeback begins in each lane; recovery knows, the background worker takes it.
    cursors: Mutex<E, Vec<Cursor>>,
}

/// What recovery hands to [`Cache::assemble`].
pub(crate) struct Parts<E: Environment> {
    pub(crate) context: Context<E>,
    pub(crate) lanes: Vec<Lane<E>>,
    pub(crate) segments: Vec<Segment<E>>,
    pub(crate) epochs: Epochs<E>,
    pub(crate) tails: Vec<TwoSlots<LaneTail>>,
    pub(crate) settings: Settings,
}

impl<E: Environment> Cache<E> {
    pub(crate) fn assemble(parts: Parts<E>) -> Arc<Self> {
        let reserve = parts.lanes.len() as u32;
        let cursors = alloc::vec![Cursor::default(); parts.lanes.len()];
        Arc::new(Self {
            context: parts.context,
            lanes: parts.lanes.into_boxed_slice(),
            segments: parts.segments.into_boxed_slice(),
            pool: Pool::new(Vec::new(), reserve),
            epochs: parts.epochs,
            tails: Mutex::<E, _>::new(parts.tails),
            settings: Mutex::<E, _>::new(parts.settings),
            gate: SharedU32::new(0),
            first_write: Mutex::<E, _>::new(None),
            abandoned: SharedBool::new(false),
            damage: Mutex::<E, _>::new(DamageLog::default()),
            backing: BackingHealth::new(),
            rare: RareCounters::default(),
            parked: ParkedCounters::new(),
            maintenance: Mutex::<E, _>::new(None),
            worker_sleeps: SharedBool::new(false),
            cursors: Mutex::<E, _>::new(cursors),
        })
    }

    pub(crate) const fn context(&self) -> &Context<E> {
        &self.context
    }

    pub(crate) const fn epochs(&self) -> &Epochs<E> {
        &self.epochs
    }

    pub(crate) fn environment(&self) -> &E {
        self.context.environment()
    }

    pub(crate) fn region(&self) -> &Region<E::Memory> {
        self.context.region()
    }

    pub(crate) const fn shape(&self) -> SegmentShape {
        self.context.shape()
    }

    pub(crate) const fn identity(&self) -> &Identity {
        self.context.identity()
    }

    pub(crate) fn lane(&self, at: u64) -> &Lane<E> {
        &self.lanes[self.identity().lanes.lane_of(at).index()]
    }

    /// The lane of `range`, whose blocks are about to be looked up: asks for the lines where the index has them, so that they come
    /// while the lane is taken.
    pub(crate) fn approach(&self, range: ByteRange) -> &Lane<E> {
        const ASKED: u64 = 16 * CHECKSUM_BLOCK;
        let lane = self.lane(range.start);
        lane.lines.ask::<E>(self.keys(ByteRange::at(range.start, range.len().min(ASKED))));
        lane
    }

    /// The backend that the cache stands in front of.
    pub const fn backend(&self) -> BackendId {
        self.identity().backend
    }

    /// Size of the device in bytes.
    pub const fn size(&self) -> u64 {
        self.identity().size
    }

    /// Logical sector of the device in bytes.
    pub const fn sector(&self) -> u32 {
        self.identity().sector
    }

    /// A write of at most this many bytes that lies in one chunk is recovered whole or not at all.
    pub const fn atomic_unit(&self) -> u32 {
        self.context.shape().atomic_unit()
    }

    /// Cuts a range into pieces that [`write`](Self::write) and [`read`](Self::read) take: each in one chunk and at
    /// most an atomic unit. A range that is such a piece comes back whole.
    pub fn pieces(&self, range: cbd_types::ByteRange) -> impl Iterator<Item = cbd_types::ByteRange> + use<E> {
        let unit = u64::from(self.atomic_unit());
        range.split_at_multiples(CHUNK).flat_map(move |chunk| {
            let mut start = chunk.start;
            core::iter::from_fn(move || {
                let piece = cbd_types::ByteRange { start, end: chunk.end.min(start + unit) };
                start = piece.end;
                (!piece.is_empty()).then_some(piece)
            })
        })
    }

    /// The settings in force.
    pub fn settings(&self) -> Settings {
        *self.settings.lock()
    }

    /// Changes the settings; they have effect at once. The transport keeps them for the next start.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a value out of its range; nothing changes then.
    pub fn set_settings(&self, settings: Settings) -> Result<()> {
        *self.settings.lock() = settings.validated()?;
        self.wake_worker();
        Ok(())
    }

    /// Everything up to this epoch is durable on the backing device.
    pub fn drained_epoch(&self) -> Epoch {
        self.epochs.drained()
    }

    /// Closes the present epoch: what completed before is in it or in an earlier one, and nothing that is submitted
    /// after this returns is.
    ///
    /// # Errors
    /// When the cache was stopped.
    pub fn flush(&self) -> Result<()> {
        self.check_running()?;
        self.close_epoch();
        self.region().check_stores(MutationPoint::FlushStoreCheck)
    }

    /// What FUA adds when the last pieces of its writes have committed: the epoch ends, and the writes' own lanes are marked, by one
    /// fence for all of them.
    ///
    /// # Errors
    /// When the cache was stopped.
    pub fn force_unit_access(&self, ranges: &[ByteRange]) -> Result<()> {
        self.check_running()?;
        self.epochs.force_unit_access(&self.context, &self.lanes, ranges)
    }

    /// A flush without the question whether the cache runs. Returns the epoch that it closed.
    pub(crate) fn close_epoch(&self) -> Epoch {
        self.epochs.close(&self.context, &self.lanes)
    }

    /// Milliseconds since the last pass, if a lane was touched since.
    pub(crate) fn unmarked_for_ms(&self, now_ms: u64) -> Option<u64> {
        let ended = self.epochs.pass_ended_ms();
        self.lanes.iter().any(Lane::is_touched).then(|| now_ms.saturating_sub(ended))
    }

    /// Closes the present epoch and asks that it be drained at once, as fast as `writeback_rate` lets it; it is when
    /// [`drained_epoch`](Self::drained_epoch) has reached the result, or nothing is dirty.
    pub fn request_drain(&self) -> Epoch {
        let epoch = self.close_epoch();
        self.epochs.request(epoch);
        self.wake_worker();
        epoch
    }

    /// Whether everything up to `epoch` is on the backing device.
    pub fn is_drained(&self, epoch: Epoch) -> bool {
        if self.drained_epoch() >= epoch {
            return true;
        }
        // Epochs in which nothing was written are never drained on their own.
        self.lanes.iter().all(|lane| {
            lane.state.lock().segments().all(|segment| segment.last_dirty_epoch <= self.drained_epoch().0)
        })
    }

    /// Who is called when there is work for the background worker.
    pub fn set_worker_waker(&self, waker: Waker) {
        *self.maintenance.lock() = Some(waker);
    }

    pub(crate) fn wake_worker(&self) {
        let waker = self.maintenance.lock().clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Says that a record is coming to a lane, and wakes the background worker if it sleeps: the first write after a rest begins
    /// the clock of writeback. See [`Lane::touch`].
    pub(crate) fn announce(&self, lane: &Lane<E>) {
        if lane.touch()
            && self.worker_sleeps.load(Ordering::SeqCst)
            && self.worker_sleeps.swap(false, Ordering::SeqCst)
        {
            self.wake_worker();
        }
    }

    /// Refuses all further requests, wakes those that wait, and marks every lane. Data that is dirty stays in the region.
    pub fn stop(&self) {
        self.gate.fetch_or(STOPPED, Ordering::SeqCst);
        self.pool.wake_all();
        if MutationPoint::StopMark.is_active() && !self.abandoned.load(Ordering::SeqCst) {
            self.close_epoch();
        }
    }

    /// As [`stop`](Self::stop), but nothing is marked, now or later: for when a thread failed in the middle of something. What was
    /// acknowledged is in the region, and whoever opens it next recovers it.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
        self.gate.fetch_or(STOPPED, Ordering::SeqCst);
        self.pool.wake_all();
    }

    /// Whether [`abandon`](Self::abandon) was called.
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Takes `waker` off the wait list for space: its requests were given up, and nobody would hear it.
    pub fn stop_waiting(&self, waker: &Waker) {
        self.pool.forget(waker);
    }

    /// # Errors
    /// [`ErrorKind::Stopped`] after [`stop`](Self::stop).
    pub(crate) fn check_running(&self) -> Result<()> {
        if self.gate.load(Ordering::SeqCst) & STOPPED == 0 { Ok(()) } else { Err(was_stopped()) }
    }

    /// As [`check_running`](Self::check_running), for a request that makes something dirty, before it takes a lane.
    ///
    /// # Errors
    /// As [`check_running`](Self::check_running), and what kept the first write from being noted.
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.gate.load(Ordering::SeqCst) == 0 { Ok(()) } else { self.pass_gate() }
    }

    #[cold]
    fn pass_gate(&self) -> Result<()> {
        self.check_running()?;
        // Whoever comes meanwhile waits here for the one that notes it.
        let mut first_write = self.first_write.lock();
        if let Some(note) = first_write.as_ref() {
            note()?;
        }
        *first_write = None;
        self.gate.fetch_and(!UNNOTED, Ordering::SeqCst);
        Ok(())
    }

    /// Has `note` called before the first request that makes something dirty. Before anybody uses the cache.
    pub(crate) fn before_first_write(&self, note: FirstWrite) {
        *self.first_write.lock() = Some(note);
        self.gate.fetch_or(UNNOTED, Ordering::SeqCst);
    }

    /// Whether the backing device has everything: nothing is dirty, parked or damaged.
    pub(crate) fn holds_nothing_dirty(&self) -> bool {
        let status = self.status();
        status.dirty_records == 0
            && status.parked_bytes == 0
            && status.damaged.is_empty()
            && status.backing_is_consistent
    }

    /// From now on requests without space fail, or wait again.
    pub(crate) fn set_stalled(&self, stalled: bool) {
        if self.backing.set_stalled(stalled) {
            self.pool.wake_all();
        }
    }

    /// How writeback goes.
    pub(crate) const fn backing(&self) -> &BackingHealth<E> {
        &self.backing
    }

    /// What is counted of parking.
    pub(crate) const fn parked_counters(&self) -> &ParkedCounters<E> {
        &self.parked
    }

    /// Where writeback begins in each lane.
    pub(crate) fn writeback_start(&self) -> Vec<Cursor> {
        self.cursors.lock().clone()
    }

    /// Recovery says where writeback begins in a lane.
    pub(crate) fn start_writeback_at(&self, lane: LaneId, cursor: Cursor) {
        self.cursors.lock()[lane.index()] = cursor;
    }

    /// A reader is done with a segment.
    pub(crate) fn unpin(&self, segment: u32) {
        if self.segments[segment as usize].pins.fetch_sub(1, Ordering::AcqRel) == RETIRED | 1 {
            self.give_back(segment);
        }
    }

    /// Reclaim is done with a segment: it goes back to the pool now, or when its last reader lets it go.
    pub(crate) fn retire(&self, segment: u32) {
        let pins = self.segments[segment as usize].pins.fetch_or(RETIRED, Ordering::AcqRel);
        if MutationPoint::RetireWaits.holds(pins == 0) {
            self.give_back(segment);
        }
    }

    fn give_back(&self, segment: u32) {
        self.segments[segment as usize].pins.fetch_or(RETURNED, Ordering::AcqRel);
        self.pool.release(segment);
    }

    /// Whether so many segments are used that reclaim should go on.
    pub(crate) fn is_above_gc(&self) -> bool {
        self.pool.free() < self.free_wanted()
    }

    /// Free segments that reclaim strives for.
    fn free_wanted(&self) -> u32 {
        let total = self.segments.len() as u64;
        let used = u64::from(self.settings().gc_percent) * total / 100;
        // A little more than fills leave, so that they and second chances find space while reclaim goes on.
        let more = self.pool.reserve().div_ceil(4);
        ((total - used) as u32).max(self.pool.left_to_writers() + more)
    }

    /// Whether something that is read now takes the place of something else.
    pub(crate) fn is_full(&self) -> bool {
        // Reclaim ends with a few more than it strives for.
        self.pool.free() < self.free_wanted() + (self.segments.len() as u32 / 32).max(2)
    }

    /// Whether reclaim keeps up with those who take segments.
    pub(crate) fn is_reclaim_at_ease(&self) -> bool {
        self.pool.free() + (self.pool.reserve() / 4).max(2) >= self.free_wanted()
    }
}

impl<E: Environment> core::fmt::Debug for Cache<E> {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.debug_struct("Cache").field("identity", self.identity()).finish_non_exhaustive()
    }
}

fn was_stopped() -> Error {
    Error::new(ErrorKind::Stopped, "the cache was stopped")
}

// A large record must always fit an empty segment.
const _: () = assert!(log::SLOTS_MAX_OF_RECORD <= 64);
