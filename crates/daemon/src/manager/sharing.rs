//! Caches that share the space of their transport: a thread divides it among them by their load.
//!
//! Every [`ROUND`] the thread reads what the engine has counted, and moves a few segments ([`cbd_runtime::share`]). Free segments are
//! used first. A cache that gives segments up drops only what its backing device has, at the pace of reclaim.
//!
//! Invariants: the thread holds no lock of the tables while a cache shrinks, and has the slot of one backend for
//! [`SHRINK_LIMIT`] at most; a backend whose slot another worker has is left out; from the moment at which a command makes room until it
//! has used it, no cache grows into that room.
//!
//! Elsewhere: who is to have how much (`cbd-runtime`), the crash order of growing and shrinking (`cbd-engine`).

use super::slots::{TakenSlot, TransportHandle};
use super::{Manager, Tables};
use crate::api::SharedInfo;
use crate::events::EventName;
use crate::size::format_size;
use cbd_engine::SharedSpace;
use cbd_runtime::RunningBackend;
use cbd_runtime::share::{Member, Tracker, grow, make_room, plan};
use cbd_types::{BackendId, Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often space is divided.
const ROUND: Duration = Duration::from_secs(2);
/// How long a cache may take to free what it gives up in a round; it keeps the rest.
const SHRINK_LIMIT: Duration = Duration::from_secs(1);
/// How long a command waits for a round, or for another command that makes room.
const SPACE_LIMIT: Duration = Duration::from_secs(10);
/// How often the sizes are logged while they change.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(60);

/// A transport and one of its backends.
type Place = (u32, BackendId);

/// What is known of the caches that share space.
#[derive(Default)]
pub(super) struct Sharing {
    /// Held while space is divided, and by a command from making room until it has used it.
    space: Mutex<()>,
    followed: Mutex<BTreeMap<Place, Followed>>,
    thread: Mutex<Option<Sender<()>>>,
}

/// A cache whose hits are followed.
struct Followed {
    tracker: Tracker,
    noted: Instant,
    /// Segments that it is to have.
    target: u32,
    /// The share of its reads that would hit besides with its maximum.
    gain_at_max: Option<f64>,
}

/// A cache that shares space, as the tables have it.
struct Sharer {
    id: BackendId,
    /// Weak: a backend that is stopped meanwhile is not kept.
    run: Weak<RunningBackend>,
    bounds: SharedSpace,
    segments: u32,
}

impl Sharer {
    /// The backend in a slot that was taken, if it still runs as it did, with the same bounds.
    fn run_in(&self, taken: &TakenSlot) -> Option<Arc<RunningBackend>> {
        let run = taken.slot.run.as_ref()?;
        let is_same = std::ptr::eq(Arc::as_ptr(run), self.run.as_ptr());
        (is_same && taken.slot.entry.shared == Some(self.bounds) && !taken.slot.stopping)
            .then(|| Arc::clone(run))
    }
}

/// The rounds of the thread.
#[derive(Default)]
struct Rounds {
    /// The transports on which caches gave up segments in the last round.
    moving: BTreeSet<u32>,
    /// The caches whose sizes have changed since the last summary, with their sizes then.
    changed: BTreeMap<Place, u32>,
    summary_due: Option<Instant>,
}

impl std::fmt::Debug for Sharing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Sharing").finish_non_exhaustive()
    }
}

impl Sharing {
    /// The bounds of a cache and what it gains, for status.
    pub(super) fn info(&self, place: Place, bounds: SharedSpace, segment_size: u64) -> SharedInfo {
        let bytes = |segments: u32| u64::from(segments) * segment_size;
        let followed = self.followed.lock();
        let known = followed.get(&place);
        SharedInfo {
            min: bytes(bounds.min),
            max: bytes(bounds.max),
            weight: bounds.weight,
            target: known.map(|known| known.target).filter(|target| *target > 0).map(bytes),
            gain_at_max: known.and_then(|known| known.gain_at_max),
        }
    }

    /// Tells the thread to end; it does within a round.
    pub(super) fn end_thread(&self) {
        self.thread.lock().take();
    }

    /// Notes what the caches of a transport have counted; returns them as members of the division.
    fn members(&self, handle: &TransportHandle, sharers: &[Sharer]) -> Vec<Member> {
        let size = handle.transport.info().layout.segment_size;
        let mut followed = self.followed.lock();
        sharers
            .iter()
            .filter_map(|sharer| {
                let cache = sharer.run.upgrade()?.cache()?;
                let now = Instant::now();
                let known = followed.entry((handle.id, sharer.id)).or_insert_with(|| Followed {
                    tracker: Tracker::default(),
                    noted: now,
                    target: 0,
                    gain_at_max: None,
                });
                known.tracker.note(&cache.hit_curve(), now.duration_since(known.noted).as_secs_f64());
                known.noted = now;
                let member = Member {
                    segments: sharer.segments,
                    min: sharer.bounds.min,
                    max: sharer.bounds.max,
                    weight: sharer.bounds.weight,
                    curve: known.tracker.curve(size),
                    is_waiting: cache.has_waiting_writers(),
                };
                let reads = member.curve.reads;
                known.gain_at_max = (reads > 0.0).then(|| (member.gain_at_max() / reads).clamp(0.0, 1.0));
                Some(member)
            })
            .collect()
    }

    fn note_targets(&self, transport: u32, sharers: &[Sharer], targets: &[u32]) {
        let mut followed = self.followed.lock();
        for (sharer, target) in sharers.iter().zip(targets) {
            if let Some(known) = followed.get_mut(&(transport, sharer.id)) {
                known.target = *target;
            }
        }
    }
}

/// The bounds that a request asks for; `None` for a cache of fixed size.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a weight without a maximum, and for bounds that no cache can have.
pub(super) fn bounds_of(
    handle: &TransportHandle,
    min: u64,
    max: Option<u64>,
    weight: Option<u16>,
) -> Result<Option<SharedSpace>> {
    let invalid = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
    let Some(max) = max else {
        return match weight {
            None => Ok(None),
            Some(_) => {
                invalid("a weight is for a cache that shares space: give its size as MIN..MAX".to_owned())
            }
        };
    };
    if min == 0 {
        return invalid("a cache that shares space needs a minimum above 0".to_owned());
    }
    let weight = weight.unwrap_or(1);
    if !(1..=SharedSpace::WEIGHT_MAX).contains(&weight) {
        return invalid(format!("a weight is 1 to {}, not {weight}", SharedSpace::WEIGHT_MAX));
    }
    if min > max {
        let text = format!(
            "the minimum of the cache, {}, is above its maximum, {}",
            format_size(min),
            format_size(max)
        );
        return invalid(text);
    }
    let size = handle.transport.info().layout.segment_size;
    let segments = |bytes: u64| u32::try_from(bytes / size).unwrap_or(u32::MAX);
    Ok(Some(SharedSpace { min: segments(min), max: segments(max), weight }))
}

/// A warning for a maximum that the region does not have.
pub(super) fn too_large(handle: &TransportHandle, bounds: Option<SharedSpace>) -> Option<String> {
    let layout = handle.transport.info().layout;
    let bounds = bounds.filter(|bounds| bounds.max > layout.segment_count)?;
    let bytes = |segments: u32| format_size(u64::from(segments) * layout.segment_size);
    Some(format!(
        "the maximum of the cache, {}, is more than the region has, {}: it cannot grow so far",
        bytes(bounds.max),
        bytes(layout.segment_count)
    ))
}

/// The caches that share space, of each transport.
fn pools_of(tables: &Tables) -> Vec<(TransportHandle, Vec<Sharer>)> {
    let mut pools = Vec::new();
    for (&id, slot) in tables.iter().filter(|(_, slot)| !slot.is_taken) {
        let Ok(running) = &slot.running else { continue };
        let sharers: Vec<Sharer> = running
            .backends
            .iter()
            .filter(|(_, slot)| slot.work.is_none() && !slot.stopping)
            .filter_map(|(&id, slot)| {
                let run = slot.run.as_ref()?;
                run.cache()?;
                let (bounds, segments) = (slot.entry.shared?, slot.entry.cache_segments);
                Some(Sharer { id, run: Arc::downgrade(run), bounds, segments })
            })
            .collect();
        if !sharers.is_empty() {
            pools.push((running.handle(id), sharers));
        }
    }
    pools
}

impl Manager {
    /// Starts the thread that divides space.
    pub(super) fn start_balancer(self: &Arc<Self>) {
        let (stop, stopped) = channel();
        let manager = Arc::downgrade(self);
        let work = move || {
            let mut rounds = Rounds::default();
            while stopped.recv_timeout(ROUND) == Err(RecvTimeoutError::Timeout) {
                match manager.upgrade() {
                    Some(manager) => manager.balance(&mut rounds),
                    None => return,
                }
            }
        };
        match std::thread::Builder::new().name("cbd-balancer".to_owned()).spawn(work) {
            Ok(_) => *self.sharing.thread.lock() = Some(stop),
            Err(error) => tracing::warn!("caches that share space keep their sizes: {error}"),
        }
    }

    /// A round: divides the space of each transport on which caches share it.
    fn balance(&self, rounds: &mut Rounds) {
        // The end of the daemon waits for this round.
        let Ok(_work) = self.begin_work() else { return };
        let Some(pools) = self.pools() else { return };
        self.sharing.followed.lock().retain(|(transport, id), _| {
            pools
                .iter()
                .any(|(handle, sharers)| handle.id == *transport && sharers.iter().any(|it| it.id == *id))
        });
        if pools.is_empty() {
            return;
        }
        // A command that makes room has it for long.
        let Some(_space) = self.sharing.space.try_lock() else { return };
        for (handle, sharers) in &pools {
            self.balance_transport(handle, sharers, rounds);
        }
        self.log_summary(rounds);
    }

    /// The caches that share space, of each transport; `None` while a command has the tables.
    fn pools(&self) -> Option<Vec<(TransportHandle, Vec<Sharer>)>> {
        Some(pools_of(&*self.tables_to_retry()?))
    }

    fn balance_transport(&self, handle: &TransportHandle, sharers: &[Sharer], rounds: &mut Rounds) {
        let mut members = self.sharing.members(handle, sharers);
        if members.len() != sharers.len() {
            // A cache was detached meanwhile.
            return;
        }
        let free = handle.transport.info().free_segments;
        let next = plan(&members, free, rounds.moving.contains(&handle.id));
        self.sharing.note_targets(handle.id, sharers, &next.targets);
        for ((sharer, member), wanted) in sharers.iter().zip(&mut members).zip(&next.shrinks) {
            if *wanted > 0 {
                member.segments -= self.take_from(handle, sharer, *wanted, None).unwrap_or_else(|error| {
                    tracing::debug!(
                        transport = handle.id,
                        backend = sharer.id.0,
                        "its cache keeps its size: {error}"
                    );
                    0
                });
            }
        }
        if next.shrinks.iter().any(|segments| *segments > 0) {
            rounds.moving.insert(handle.id);
        } else {
            rounds.moving.remove(&handle.id);
        }
        let free = handle.transport.info().free_segments;
        let more = grow(&members, &next.targets, free);
        for ((sharer, member), more) in sharers.iter().zip(&mut members).zip(more) {
            if more > 0 && self.give_to(handle, sharer, more) {
                member.segments += more;
            }
        }
        let size = handle.transport.info().layout.segment_size;
        let bytes = |segments: u32| format_size(u64::from(segments) * size);
        for ((sharer, member), target) in sharers.iter().zip(&members).zip(next.targets) {
            if sharer.segments != member.segments {
                rounds.changed.entry((handle.id, sharer.id)).or_insert(sharer.segments);
                tracing::debug!(
                    transport = handle.id,
                    backend = sharer.id.0,
                    "its cache of {} has {} now, on the way to {}",
                    bytes(sharer.segments),
                    bytes(member.segments),
                    bytes(target)
                );
            }
        }
    }

    /// Logs the caches whose sizes have changed, at most once in [`SUMMARY_INTERVAL`].
    fn log_summary(&self, rounds: &mut Rounds) {
        if rounds.changed.is_empty() || rounds.summary_due.is_some_and(|due| Instant::now() < due) {
            return;
        }
        let Some(pools) = self.pools() else { return };
        rounds.summary_due = Some(Instant::now() + SUMMARY_INTERVAL);
        for (handle, sharers) in &pools {
            let size = handle.transport.info().layout.segment_size;
            let bytes = |segments: u32| format_size(u64::from(segments) * size);
            for sharer in sharers {
                let Some(before) = rounds.changed.remove(&(handle.id, sharer.id)) else { continue };
                if before != sharer.segments {
                    tracing::info!(
                        transport = handle.id,
                        backend = sharer.id.0,
                        event = EventName::CacheResized.name(),
                        bytes = u64::from(sharer.segments) * size,
                        "its share of the space was {} and is {}",
                        bytes(before),
                        bytes(sharer.segments)
                    );
                }
            }
        }
        rounds.changed.clear();
    }

    /// Takes up to `segments` segments from a cache: those that it can free in [`SHRINK_LIMIT`] without writing, or with `drain` all
    /// that it can free before nothing progresses for so long. Returns their number; 0 if another worker has the slot.
    fn take_from(
        &self,
        handle: &TransportHandle,
        sharer: &Sharer,
        segments: u32,
        drain: Option<Duration>,
    ) -> Result<u32> {
        let why = "its share of the space is changing";
        let Some(mut taken) = self.try_take_slot(handle.id, sharer.id, why) else { return Ok(0) };
        let run = sharer.run_in(&taken);
        let end = Instant::now() + SHRINK_LIMIT;
        let mut look = |_: &cbd_runtime::ShrinkProgress| {
            if self.stopping.load(Ordering::SeqCst) {
                return ControlFlow::Break(super::stopping());
            }
            if drain.is_none() && Instant::now() >= end {
                return ControlFlow::Break(Error::new(ErrorKind::TimedOut, "the round has ended"));
            }
            ControlFlow::Continue(())
        };
        let timeout = drain.unwrap_or(SHRINK_LIMIT);
        let result = run.map_or(Ok(0), |run| {
            run.take_segments(&handle.transport, segments, drain.is_some(), timeout, &mut look)
        });
        let read = taken.read_entry();
        self.put_back(taken);
        read.and(result)
    }

    /// Gives a cache free segments; whether it has them.
    fn give_to(&self, handle: &TransportHandle, sharer: &Sharer, segments: u32) -> bool {
        let why = "its share of the space is changing";
        let Some(mut taken) = self.try_take_slot(handle.id, sharer.id, why) else { return false };
        let result = sharer.run_in(&taken).map(|run| run.grow_cache(&handle.transport, segments));
        let read = taken.read_entry();
        self.put_back(taken);
        match result.map(|grown| grown.and(read)) {
            Some(Ok(_)) => true,
            Some(Err(error)) => {
                tracing::debug!(
                    transport = handle.id,
                    backend = sharer.id.0,
                    "its cache does not grow: {error}"
                );
                false
            }
            None => false,
        }
    }

    /// Makes sure that `bytes` of a transport are free: what is missing, caches that share the space give up, down to their minima.
    /// No cache grows while the result lives.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if they have too little above their minima, or cannot free it; [`ErrorKind::Busy`] if another command
    /// makes room.
    pub(super) fn make_room(&self, handle: &TransportHandle, bytes: u64) -> Result<MutexGuard<'_, ()>> {
        let space = self.sharing.space.try_lock_for(SPACE_LIMIT).ok_or_else(|| {
            Error::new(ErrorKind::Busy, "the space of the transports is being divided; repeat the command")
        })?;
        let info = handle.transport.info();
        let size = info.layout.segment_size;
        let needed = u32::try_from(bytes / size).unwrap_or(u32::MAX).saturating_sub(info.free_segments);
        if needed == 0 {
            return Ok(space);
        }
        let pools = pools_of(&*self.tables()?);
        let Some((_, sharers)) = pools.into_iter().find(|(other, _)| other.id == handle.id) else {
            // The error of the engine says what there is.
            return Ok(space);
        };
        let members = self.sharing.members(handle, &sharers);
        if members.len() != sharers.len() {
            return Err(Error::new(
                ErrorKind::Busy,
                "a cache is being stopped or detached; repeat the command",
            ));
        }
        let format = |segments: u32| format_size(u64::from(segments) * size);
        let shrinks = make_room(&members, needed).map_err(|above| {
            Error::new(
                ErrorKind::NoSpace,
                format!(
                    "{} are needed: {} of the transport are free, and the caches that share its space have {} above their minima",
                    format_size(bytes),
                    format(info.free_segments),
                    format(above)
                ),
            )
        })?;
        for (sharer, segments) in sharers.iter().zip(shrinks) {
            if segments > 0 {
                let taken = self.take_from(handle, sharer, segments, Some(self.timeout(None)))?;
                tracing::info!(
                    transport = handle.id,
                    backend = sharer.id.0,
                    "its cache gave up {} for a command",
                    format(taken)
                );
            }
        }
        let free = handle.transport.info().free_segments;
        if u64::from(free) < bytes / size {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "{} are needed, and only {} are free: the caches that share the space could not give up more, because their backing \
                     devices lack what they hold, or other commands have them; status shows both",
                    format_size(bytes),
                    format(free)
                ),
            ));
        }
        Ok(space)
    }
}
