//! Changes of the cache of a running process, in the steps that `cbd-runtime` takes: a cache comes, goes, grows and shrinks while
//! the clients go on.
//!
//! Invariants: a step takes no time of its own: between two steps the clients and the background worker do anything.

use super::{ADMINISTRATOR, Caching, Process, WakeFlag};
use crate::actor::act_as;
use crate::environment::SimEnvironment;
use cbd_device::{Device, Hold};
use cbd_engine::{Cache, CacheMode, Settings, Shrink, Transport};
use cbd_types::{BackendId, Epoch, Error, ErrorKind, Result};
use std::sync::Arc;
use std::task::Waker;

type SimHold = Hold<SimEnvironment>;

/// A change that goes on, and how far it is.
pub(super) enum Change {
    /// An empty cache is open, but no request goes through it yet.
    Attaching {
        /// The cache.
        caching: Box<Caching>,
        /// Set while the route is held.
        hold: Option<SimHold>,
    },
    /// Requests go past the cache, and it is written back.
    Draining {
        /// The cache, and its settings before.
        cache: Arc<Cache<SimEnvironment>>,
        /// See `cache`.
        before: Settings,
        /// It is drained up to this epoch first.
        epoch: Epoch,
        /// Set while the route is held.
        hold: Option<SimHold>,
    },
    /// A cache collects segments that it gives up.
    Shrinking {
        /// The backend of the cache.
        backend: BackendId,
        /// The segments.
        shrink: Option<Shrink<SimEnvironment>>,
    },
    /// A cache gets segments at the next step.
    Growing {
        /// The backend of the cache.
        backend: BackendId,
        /// The cache.
        cache: Arc<Cache<SimEnvironment>>,
        /// The number of segments.
        segments: u32,
    },
    /// It has ended, or was given up.
    Ended(Advanced),
}

/// The outcome of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advanced {
    /// The change goes on.
    Goes,
    /// Requests go through the new cache.
    Attached,
    /// The backend has no cache any more.
    Detached,
    /// A cache has more segments.
    Grown,
    /// A cache has fewer segments.
    Shrunk,
    /// Nothing has changed.
    Refused,
}

/// Where a change happens.
pub(super) struct Place {
    transport: Arc<Transport<SimEnvironment>>,
    device: Arc<Device<SimEnvironment>>,
}

impl Place {
    pub(super) fn of(
        transport: &Arc<Transport<SimEnvironment>>,
        device: &Arc<Device<SimEnvironment>>,
    ) -> Self {
        Self { transport: Arc::clone(transport), device: Arc::clone(device) }
    }

    /// Holds the route. No other thread does.
    fn hold(&self) -> SimHold {
        let Some(hold) = self.device.hold(Waker::from(Arc::new(WakeFlag::default()))) else {
            panic!("the route is held already");
        };
        hold
    }
}

/// Whether the backing device has everything that the cache held.
fn is_done(cache: &Cache<SimEnvironment>, epoch: Epoch) -> bool {
    cache.is_drained(epoch) && !cache.status().is_changing_mode
}

impl Change {
    /// What goes on, for a report.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Attaching { hold: None, .. } => "a cache was made",
            Self::Attaching { .. } => "the route is held for a new cache",
            Self::Draining { hold: None, .. } => "the cache is drained to be detached",
            Self::Draining { .. } => "the route is held to detach the cache",
            Self::Shrinking { .. } => "a cache shrinks",
            Self::Growing { .. } => "a cache grows",
            Self::Ended(_) => "a change has ended",
        }
    }

    /// Takes a step for which the background worker and the queues need not stand still.
    ///
    /// # Panics
    /// If the engine refuses what it must not refuse.
    pub(super) fn advance_beside(&mut self, place: &Place) {
        let ended = match self {
            Self::Attaching { caching, hold } => match hold.take() {
                None => {
                    *hold = Some(place.hold());
                    return;
                }
                Some(held) if held.busy_queues() > 0 => {
                    *hold = Some(held);
                    return;
                }
                Some(held) => {
                    // Writes that went straight to the backing device are flushed by the next flush of their client.
                    caching.cache.note_unflushed();
                    let changed = held.change(Some(Arc::clone(&caching.cache)));
                    assert!(changed.is_ok(), "a queue was quiet and is no more");
                    // The process takes the cache over.
                    Advanced::Attached
                }
            },
            Self::Draining { cache, epoch, hold, .. } => {
                if hold.is_none() && is_done(cache, *epoch) {
                    *hold = Some(place.hold());
                }
                // The rest needs the worker to stand still.
                return;
            }
            Self::Shrinking { backend, shrink } => {
                if shrink.as_ref().is_some_and(|shrink| shrink.missing() > 0) {
                    return;
                }
                let Some(shrink) = shrink.take() else { return };
                let finished = place.transport.finish_shrink(*backend, shrink);
                finished.unwrap_or_else(|error| panic!("a cache does not shrink: {error}"));
                Advanced::Shrunk
            }
            Self::Growing { backend, cache, segments } => {
                match place.transport.grow_cache(*backend, cache, *segments) {
                    Ok(()) => Advanced::Grown,
                    Err(error) if error.kind() == ErrorKind::NoSpace => Advanced::Refused,
                    Err(error) => panic!("a cache does not grow: {error}"),
                }
            }
            Self::Ended(_) => return,
        };
        if ended != Advanced::Attached {
            *self = Self::Ended(ended);
        }
    }
}

impl Process {
    /// Whether a change goes on.
    pub fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// Whether all writes are cached: requests go through a cache, and no change is to end that.
    pub fn caches_writes(&self) -> bool {
        let is_leaving = matches!(self.change, Some(Change::Draining { .. } | Change::Attaching { .. }));
        !is_leaving && self.caching.as_ref().is_some_and(|caching| caching.cache.caches_writes())
    }

    /// Makes a cache for the backend, which has none.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn begin_attach(&mut self, bytes: u64, lanes_max: u32) -> Result<()> {
        act_as(ADMINISTRATOR);
        self.transport.attach_cache(self.backend, bytes, lanes_max)?;
        let cache = self.transport.open_cache(self.backend)?;
        let caching = Box::new(Caching::new(cache, &self.disk, self.depth));
        self.change = Some(Change::Attaching { caching, hold: None });
        Ok(())
    }

    /// Lets requests go past the cache, and requests its drain.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn begin_detach(&mut self) -> Result<()> {
        act_as(ADMINISTRATOR);
        let Some(caching) = &self.caching else {
            return Err(Error::new(ErrorKind::InvalidArgument, "there is no cache"));
        };
        self.transport.allow_bypass(self.backend)?;
        let cache = Arc::clone(&caching.cache);
        let before = cache.settings();
        cache.set_settings(Settings {
            cache_mode: CacheMode::Passthrough,
            writeback_paused_until_ms: 0,
            ..before
        })?;
        let epoch = cache.request_drain();
        self.change = Some(Change::Draining { cache, before, epoch, hold: None });
        Ok(())
    }

    /// Grows `cache` of `backend`, or the own cache, at the next step.
    pub(crate) fn begin_grow(
        &mut self,
        other: Option<(BackendId, Arc<Cache<SimEnvironment>>)>,
        segments: u32,
    ) {
        let own = || self.caching.as_ref().map(|caching| (self.backend, Arc::clone(&caching.cache)));
        if let Some((backend, cache)) = other.or_else(own) {
            self.change = Some(Change::Growing { backend, cache, segments });
        }
    }

    /// Begins to shrink `cache` of `backend`, or the own cache.
    ///
    /// # Errors
    /// The error of the engine.
    pub(crate) fn begin_shrink(
        &mut self,
        other: Option<(BackendId, Arc<Cache<SimEnvironment>>)>,
        segments: u32,
    ) -> Result<()> {
        act_as(ADMINISTRATOR);
        let own = || self.caching.as_ref().map(|caching| (self.backend, Arc::clone(&caching.cache)));
        if let Some((backend, cache)) = other.or_else(own) {
            let shrink = Some(cache.begin_shrink(segments)?);
            self.change = Some(Change::Shrinking { backend, shrink });
        }
        Ok(())
    }

    /// Takes a step of the change that goes on.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn advance_change(&mut self) -> Result<Advanced> {
        act_as(ADMINISTRATOR);
        let place = Place::of(&self.transport, &self.device);
        let was_held = matches!(self.change, Some(Change::Draining { hold: Some(_), .. }));
        if let (true, Some(Change::Draining { cache, before, hold: Some(hold), .. })) =
            (was_held, self.change.take_if(|_| was_held))
        {
            return self.end_detach(cache, before, hold);
        }
        if let Some(change) = &mut self.change {
            change.advance_beside(&place);
        }
        Ok(self.note_ended())
    }

    /// Takes over what a step has ended, also one that ran beside other threads.
    pub fn note_ended(&mut self) -> Advanced {
        let is_through = |cache: &Arc<Cache<SimEnvironment>>| {
            self.device.cache().is_some_and(|routed| Arc::ptr_eq(&routed, cache))
        };
        match self.change.take() {
            Some(Change::Attaching { caching, hold: None }) if is_through(&caching.cache) => {
                self.caching = Some(*caching);
                Advanced::Attached
            }
            Some(Change::Ended(ended)) => ended,
            change => {
                self.change = change;
                Advanced::Goes
            }
        }
    }

    /// The last steps of a detach.
    fn end_detach(
        &mut self,
        cache: Arc<Cache<SimEnvironment>>,
        before: Settings,
        hold: SimHold,
    ) -> Result<Advanced> {
        if hold.busy_queues() > 0 {
            let epoch = Epoch(0);
            self.change = Some(Change::Draining { cache, before, epoch, hold: Some(hold) });
            return Ok(Advanced::Goes);
        }
        if !cache.holds_nothing_dirty() {
            // A write was cached behind the drain, because the disk fails: once more.
            drop(hold);
            let epoch = cache.request_drain();
            self.change = Some(Change::Draining { cache, before, epoch, hold: None });
            return Ok(Advanced::Goes);
        }
        // The worker, and then the cache, stop.
        self.caching = None;
        cache.stop();
        self.transport.detach_cache(self.backend)?;
        assert!(hold.change(None).is_ok(), "a queue was quiet and is no more");
        Ok(Advanced::Detached)
    }

    /// Gives up the change that goes on.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn give_change_up(&mut self) -> Result<()> {
        act_as(ADMINISTRATOR);
        match self.change.take() {
            Some(Change::Attaching { caching, hold }) => {
                drop(hold);
                let Caching { worker, cache } = *caching;
                drop(worker);
                cache.stop();
                self.transport.take_unused_cache_back(self.backend)
            }
            Some(Change::Draining { cache, before, hold, .. }) => {
                drop(hold);
                cache.set_settings(before)
            }
            _ => Ok(()),
        }
    }
}
