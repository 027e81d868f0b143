//! One moment that several caches have in common: their backing devices are written up to it and no further.
//!
//! [`CommonMoment::close`] closes an epoch of each cache, the cut:
//!
//! 1. It claims the limit of writeback of each cache (`epochs::limit`): nothing of a later epoch than the cut is written from then
//!    on.
//! 2. It closes all gates: a write that comes now waits (`base::gate`).
//! 3. It raises the epoch counter of each cache, and opens the gates. What a flush does besides follows behind that: passes, marks,
//!    fences.
//!
//! Invariants:
//! - every write that had completed before step 2 is in the cut of its cache: it loaded its epoch before the counter was raised;
//! - if a write B of any of the caches was submitted after a write A of any of them had completed, and A is behind the cut, so is B.
//!   A loaded its epoch after the counter of its cache was raised, so A completed after all gates were closed, and B found the gate
//!   of its cache closed, or opened again. So B loaded its epoch after the counter of its cache was raised. A write that passed its
//!   gate before it was closed may be on either side of the cut: it was submitted before anything behind the cut completed. The
//!   counters alone, raised one after the other without gates, would not do: A could be behind the cut of its cache, and B before
//!   the cut of another one, whose counter is raised next;
//! - the same holds for everything else that makes data dirty, each piece of a request, each retry of one that waited, zeroes and
//!   discards: all pass the gate first. A FUA write is a write, and then closes an epoch of its own behind it. Flushes may raise a
//!   counter meanwhile: the cut is the epoch that step 3 closed. Fills and second chances are clean, so the cut has no part of them;
//! - while there is a limit, no change goes past the cache (`cache::bypass`). One that had begun before was submitted before
//!   anything behind the cut completed, and what had completed is covered by a flush of the backing device that the caches want;
//! - the backing devices are at the common moment from when each of them has everything up to its cut ([`CommonMoment::check`]) until
//!   the first limit is lifted: by dropping the moment; or, once it is [held](CommonMoment::hold), when the pause of writeback is over
//!   or changed, or another drain is requested. A full cache does not lift it: its writers wait.
//!
//! Elsewhere: waiting for the drains and pausing writeback (`cbd-runtime`, `cbd-daemon`).

use super::Cache;
use crate::{Consistency, Environment, base::ClosedGate, epochs::Limit};
use alloc::{format, sync::Arc, vec::Vec};
use cbd_types::{Epoch, Error, ErrorKind, Result};

/// A common moment of several caches. Dropping it lets their writeback go on.
#[must_use = "writeback goes on behind the moment when this is dropped"]
pub struct CommonMoment<E: Environment> {
    members: Vec<Member<E>>,
    wall_ms: u64,
}

/// A cache and its cut.
struct Member<E: Environment> {
    cache: Arc<Cache<E>>,
    /// Everything up to this epoch is before the moment.
    cut: Epoch,
    /// Its limit is of this moment: it is lifted with it.
    is_claimed: bool,
}

impl<E: Environment> Drop for Member<E> {
    fn drop(&mut self) {
        // No other thread lifts it or claims another one while it is not held.
        if let Some(limit) = self.cache.base().epochs().limit().filter(|_| self.is_claimed) {
            self.cache.lift_limit(limit);
        }
    }
}

impl<E: Environment> CommonMoment<E> {
    /// Closes an epoch of each of `caches` at one moment, lets nothing behind it reach their backing devices, and requests that
    /// everything before it be drained at once.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for fewer than two caches, and for one that does not keep all writes in order;
    /// [`ErrorKind::Busy`] for one that has a common moment with others, and for the same one twice; [`ErrorKind::Stopped`] for
    /// one that was stopped. Nothing is held up then.
    pub fn close(caches: &[Arc<Cache<E>>]) -> Result<Self> {
        if caches.len() < 2 {
            return Err(Error::new(ErrorKind::InvalidArgument, "a common moment needs two caches or more"));
        }
        let mut members = Vec::with_capacity(caches.len());
        // 1. Dropping the members lifts the limits that were claimed.
        for cache in caches {
            cache.claim_moment()?;
            members.push(Member { cache: Arc::clone(cache), cut: Epoch(0), is_claimed: true });
        }
        let closed = raise_together(&mut members);
        for (member, closed_ms) in members.iter().zip(&closed) {
            member.cache.complete_closing(member.cut.0, *closed_ms);
            member.cache.request_drain_of(member.cut);
        }
        Ok(Self { members, wall_ms: closed.into_iter().min().unwrap_or(0) })
    }

    /// The moment in milliseconds since 1970 UTC: what completed before is on the backing devices once they have everything up to
    /// their cuts.
    #[must_use]
    pub const fn wall_ms(&self) -> u64 {
        self.wall_ms
    }

    /// The last epoch before the moment, for each cache in the order of [`close`](Self::close).
    pub fn cuts(&self) -> impl Iterator<Item = Epoch> + '_ {
        self.members.iter().map(|member| member.cut)
    }

    /// Whether all backing devices are at the moment.
    ///
    /// # Errors
    /// The first cache whose backing device is not, and why; [`ErrorKind::Busy`] if it may be later.
    pub fn check(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| member.cache.check_at(member.cut))
    }

    /// Leaves the backing devices at the moment until the pause of their writeback is over, or a drain is requested. The caller has
    /// paused it (`Settings::writeback_paused_until_ms`) before.
    ///
    /// # Errors
    /// As [`check`](Self::check); and the first cache of which another drain was requested meanwhile. Nothing is held then.
    pub fn hold(mut self) -> Result<()> {
        self.check()?;
        for Member { cache, cut, .. } in &self.members {
            if cache.base().epochs().requested() > cut.0 {
                return Err(cache.error(ErrorKind::Busy, "another drain of it was requested meanwhile"));
            }
        }
        for member in &mut self.members {
            member.is_claimed = false;
            member.cache.base().epochs().hold_limit(member.cut.0);
            // The background worker waits for the end of the pause.
            member.cache.base().wakeups().wake();
        }
        Ok(())
    }
}

/// 2. and 3. of closing. Returns for each cache a time before which no write behind its cut completed.
fn raise_together<E: Environment>(members: &mut [Member<E>]) -> Vec<u64> {
    let mut closed = Vec::with_capacity(members.len());
    let caches: Vec<Arc<Cache<E>>> = members.iter().map(|member| Arc::clone(&member.cache)).collect();
    let mut gates: Vec<ClosedGate<'_, E>> = Vec::with_capacity(members.len());
    // 2. All gates are closed before the first counter is raised.
    gates.extend(caches.iter().map(|cache| cache.base().gate().close()));
    // 3. The limit is raised before anything of the closed epoch can be looked for.
    for member in members {
        let epochs = member.cache.base().epochs();
        let (cut, closed_ms) = epochs.raise(member.cache.base().context());
        epochs.raise_limit(cut);
        member.cut = Epoch(cut);
        closed.push(closed_ms);
    }
    drop(gates);
    closed
}

impl<E: Environment> Cache<E> {
    /// An error that names the backend.
    fn error(&self, kind: ErrorKind, text: &str) -> Error {
        Error::new(kind, format!("backend {}: {text}", self.backend()))
    }

    /// Whether the cache can have a common moment with others now; [`CommonMoment::close`] checks it, too.
    ///
    /// # Errors
    /// As [`CommonMoment::close`].
    pub fn check_common_moment(&self) -> Result<()> {
        self.base().gate().check_running()?;
        let settings = self.settings();
        if settings.consistency == Consistency::None {
            let text = "with consistency=none its disk is written in no order: set consistency=strict or checkpoint first";
            return Err(self.error(ErrorKind::InvalidArgument, text));
        }
        if settings.can_bypass() || !self.caches_writes() {
            let text = "its settings let writes go past the cache to the disk at once: set cache_mode=writeback \
                        sequential_write_cutoff=off congestion_write_us=off when_full=wait first";
            return Err(self.error(ErrorKind::InvalidArgument, text));
        }
        if self.base().epochs().limit().is_some() {
            return Err(self.has_moment());
        }
        Ok(())
    }

    fn has_moment(&self) -> Error {
        let text = "it has a common moment with other backends already: wait for its end, or end it with writeback=on";
        self.error(ErrorKind::Busy, text)
    }

    /// Claims the limit of writeback.
    fn claim_moment(&self) -> Result<()> {
        self.check_common_moment()?;
        if self.base().epochs().claim_limit() { Ok(()) } else { Err(self.has_moment()) }
    }

    /// Whether the backing device has everything up to `cut`, and nothing else.
    fn check_at(&self, cut: Epoch) -> Result<()> {
        self.base().gate().check_running()?;
        if self.base().epochs().limit().is_none_or(|limit| limit.epoch != cut.0) {
            return Err(self.error(ErrorKind::Busy, "its common moment has ended"));
        }
        if !self.is_drained(cut) {
            return Err(self.error(ErrorKind::Busy, "its disk does not have everything yet"));
        }
        match self.status().void_reason {
            Some(reason) => {
                Err(self.error(ErrorKind::Backing, &format!("its disk is not crash-consistent: {reason}")))
            }
            None => Ok(()),
        }
    }

    /// Whether writeback is held at a moment that this cache has in common with others, or is being written up to one.
    pub fn has_common_moment(&self) -> bool {
        self.base().epochs().limit().is_some()
    }

    /// Lets writeback go on behind a limit that is held.
    pub(super) fn end_hold(&self) {
        if let Some(limit) = self.base().epochs().limit().filter(|limit| limit.is_held) {
            self.lift_limit(limit);
        }
    }

    /// Lets writeback go on behind `limit`.
    pub(crate) fn lift_limit(&self, limit: Limit) {
        self.base().epochs().lift_limit(limit);
        self.wake_waiting_for_drained();
        self.base().wakeups().wake();
    }
}
