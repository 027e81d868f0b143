//! A running backend gets a cache, or loses it, while clients use its device.
//!
//! Attach: the cache is made and opened while requests still go straight to the backing device. It is empty, so it does not matter
//! that it does not see them. When no request is on its way, the route changes.
//!
//! Detach: requests go past the cache (`passthrough`) until the backing device has everything. When no request is on its way, the
//! row of the backend forgets the cache, durably, and the route changes.
//!
//! Invariants: requests wait only while those that were submitted before complete, and while a row is stored; whatever fails, and
//! wherever the process ends, the backend has its cache or has none, and nothing is lost.
//!
//! Elsewhere: the protocol with the queues (`cbd-device`), the crash order (`cbd-engine`).

use crate::backend::Caching;
use crate::disk::lanes_max_here;
use crate::drain::{DrainProgress, DrainRequest, NotDrained};
use crate::{ProcessEnvironment, RunningBackend};
use cbd_device::{Device, Hold};
use cbd_engine::{CacheMode, Settings, SharedSpace, Transport};
use cbd_types::{Epoch, Error, ErrorKind, Result};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long requests may wait for those that were submitted before a change of the route.
const HOLD_LIMIT: Duration = Duration::from_secs(5);

/// How often a detach drains the cache: a write may have been cached behind the drain, if the backing device failed.
const DRAINS_MAX: usize = 8;

/// Wakes the thread that holds a route.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Holds the route of `device` until no request is on its way.
///
/// # Errors
/// [`ErrorKind::Busy`] if another thread holds it; [`ErrorKind::TimedOut`] if requests take too long.
fn hold_quiet(device: &Arc<Device<ProcessEnvironment>>) -> Result<Hold<ProcessEnvironment>> {
    let waker: Waker = Arc::new(Unpark(std::thread::current())).into();
    let hold = device
        .hold(waker)
        .ok_or_else(|| Error::new(ErrorKind::Busy, "the device is being changed by another command"))?;
    let end = Instant::now() + HOLD_LIMIT;
    loop {
        let busy = hold.busy_queues();
        if busy == 0 {
            return Ok(hold);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(
                ErrorKind::TimedOut,
                format!(
                    "requests of {busy} queues did not complete within {} s, and nothing was changed: the backing device does not answer \
                     them; repeat when it does",
                    HOLD_LIMIT.as_secs()
                ),
            ));
        }
        std::thread::park_timeout(left);
    }
}

/// Why a cache was not detached.
#[derive(Debug)]
pub enum NotDetached {
    /// The backing device does not have everything.
    NotDrained(NotDrained),
    /// Another error.
    Other(Error),
}

impl RunningBackend {
    /// Gives the backend, which has none, a cache of `bytes`, and sends the requests of clients through it. The epochs of the cache
    /// continue above `after`, so that its recovery points are later than those of an earlier cache. With `shared`, it shares its
    /// space; `bytes` are its minimum then.
    ///
    /// # Errors
    /// Those of [`Transport::attach_cache`] and [`Transport::open_cache`]; [`ErrorKind::TimedOut`] if requests that are on their way
    /// do not complete. The backend has no cache then.
    pub fn attach_cache(
        &self,
        transport: &Transport<ProcessEnvironment>,
        environment: &Arc<ProcessEnvironment>,
        bytes: u64,
        after: Epoch,
        shared: Option<SharedSpace>,
    ) -> Result<()> {
        let lanes_max = lanes_max_here(transport, bytes);
        transport.attach_cache_after(self.id, bytes, lanes_max, after, shared)?;
        let opened = self.open_cache(transport, environment);
        let attached = opened.and_then(|caching| {
            let caching = Arc::new(caching);
            self.route_through(&caching).inspect_err(|_| caching.stop())
        });
        attached.map_err(|error| match transport.take_unused_cache_back(self.id) {
            Ok(()) => error,
            Err(left) => error.while_doing(format!("the empty cache could not be removed again ({left})")),
        })
    }

    /// Sends the requests of clients through a cache that is empty.
    fn route_through(&self, caching: &Arc<Caching>) -> Result<()> {
        let hold = hold_quiet(self.device.device())?;
        // Writes that went straight to the backing device are flushed by the next flush of their client. Noted now, when the last of
        // them has returned: a flush that the background worker sends earlier does not cover it.
        caching.cache.note_unflushed();
        hold.change(Some(Arc::clone(&caching.cache))).map_err(|_| not_quiet())?;
        *self.caching.lock() = Some(Arc::clone(caching));
        Ok(())
    }

    /// Writes everything in the cache to the backing device, takes the cache away, and sends the requests of clients straight to the
    /// backing device. Returns the bytes that were written. `timeout` is the longest time without progress.
    ///
    /// # Errors
    /// [`NotDetached`]; the cache is used as before then.
    pub fn detach_cache(
        &self,
        transport: &Transport<ProcessEnvironment>,
        environment: &Arc<ProcessEnvironment>,
        timeout: Duration,
        report: &mut dyn FnMut(&DrainProgress) -> ControlFlow<Error>,
    ) -> std::result::Result<u64, NotDetached> {
        let other = NotDetached::Other;
        let Some(caching) = self.caching.lock().clone() else {
            let text = format!("backend {} has no cache", self.id);
            return Err(other(Error::new(ErrorKind::InvalidArgument, text)));
        };
        let before = caching.cache.settings();
        transport.allow_bypass(self.id).map_err(other)?;
        let past = Settings { cache_mode: CacheMode::Passthrough, writeback_paused_until_ms: 0, ..before };
        caching.cache.set_settings(past).map_err(other)?;
        let result = self.drain_and_hold(&caching, timeout, report).and_then(|(bytes, hold)| {
            self.forget_cache(transport, environment, &caching, hold).map_err(other)?;
            Ok(bytes)
        });
        if result.is_err() && caching.cache.is_running() {
            caching.cache.set_settings(before).map_err(other)?;
        }
        result
    }

    /// Drains the cache until it holds nothing that the backing device lacks while no request is on its way.
    fn drain_and_hold(
        &self,
        caching: &Caching,
        timeout: Duration,
        report: &mut dyn FnMut(&DrainProgress) -> ControlFlow<Error>,
    ) -> std::result::Result<(u64, Hold<ProcessEnvironment>), NotDetached> {
        let mut bytes = 0;
        for _ in 0..DRAINS_MAX {
            let request = DrainRequest::until_settled(&caching.cache);
            bytes += self.until_drained(request, timeout, report).map_err(NotDetached::NotDrained)?;
            let hold = hold_quiet(self.device.device()).map_err(NotDetached::Other)?;
            if caching.cache.holds_nothing_dirty() {
                return Ok((bytes, hold));
            }
        }
        let text = "the cache was not detached: writes keep being cached, because the backing device fails; see its status";
        Err(NotDetached::Other(Error::new(ErrorKind::Backing, text)))
    }

    /// Takes a cache away that holds nothing dirty, while no request is on its way.
    fn forget_cache(
        &self,
        transport: &Transport<ProcessEnvironment>,
        environment: &Arc<ProcessEnvironment>,
        caching: &Caching,
        hold: Hold<ProcessEnvironment>,
    ) -> Result<()> {
        caching.stop();
        let forgotten = transport.detach_cache(self.id);
        let is_there = transport.backend(self.id).is_ok_and(|entry| entry.cache_segments > 0);
        let next = match forgotten {
            Err(error) if is_there => {
                // The row still names the cache, so the cache goes on.
                let reopened = self.open_cache(transport, environment).map_err(|why| {
                    why.while_doing(format!(
                        "the cache was not detached ({error}), and could not be opened again"
                    ))
                })?;
                Some(Arc::new(reopened))
            }
            // The row is stored; an error says that it may not be on the disk of an ordinary file yet.
            forgotten => {
                if let Err(error) = forgotten {
                    tracing::warn!(backend = self.id.0, "the cache was detached: {error}");
                }
                None
            }
        };
        let cache = next.as_ref().map(|caching| Arc::clone(&caching.cache));
        hold.change(cache).map_err(|_| not_quiet())?;
        let is_detached = next.is_none();
        *self.caching.lock() = next;
        if is_detached {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::System,
            "the cache was not detached: its row could not be stored; it is used as before",
        ))
    }
}

fn not_quiet() -> Error {
    Error::new(ErrorKind::Busy, "a queue has begun a request while the route of its device was held")
}
