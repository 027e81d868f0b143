//! Caches that backends get and lose while their devices are in use.
//!
//! A cache is attached in the crash order of a new backend: its segments name it, its state block is stored, then the row names it.
//! A crash before the row leaves free segments, a crash behind it an empty cache. A cache is detached by one store of the row, which
//! frees all its segments at once.
//!
//! Behind a cache that was attached there can be writes that went straight to the backing device and that no flush has covered. Who
//! opens the cache after a crash must flush the backing device with the first flush of a client. The feature of caches that can be
//! bypassed says so, also to earlier programs, so a region gets it with its first attached cache.
//!
//! Invariants: a cache that is detached holds nothing that the backing device lacks, and stores nothing any more; nothing is sent
//! past a cache that a row still names.
//!
//! Elsewhere: when no request is on its way (`Hold` in `cbd-device`).

use super::{SharedSpace, Tables, Transport, User, caches::CachePlan, shared::write_shared};
use crate::Environment;
use alloc::format;
use cbd_format::{BackendEntry as BackendRow, COUNTER_END, superblock::FEATURE_BYPASS, tables::USE_UNKNOWN};
use cbd_types::{BackendId, BootId, Epoch, Error, ErrorKind, Result};

/// The cache that a row names.
pub(super) struct Named<'a> {
    pub plan: &'a CachePlan,
    pub cache_id: u64,
    /// The use record.
    pub used: (u32, BootId),
    pub shared: Option<SharedSpace>,
}

/// Writes the cache of a backend into its row; `None` for a backend without one.
pub(super) fn write_cache(row: &mut BackendRow, cache: Option<&Named<'_>>) {
    let (use_state, use_boot) = cache.map_or((USE_UNKNOWN, BootId::UNKNOWN), |cache| cache.used);
    row.use_state = use_state.into();
    row.use_boot = use_boot.0;
    row.cache_id = cache.map_or(0, |cache| cache.cache_id).into();
    row.lanes = cache.map_or(0, |cache| cache.plan.lanes).into();
    row.segments = cache.map_or(0, |cache| cache.plan.segments.len() as u32).into();
    row.state_segment = cache.map_or(u32::MAX, |cache| cache.plan.segments[0].0).into();
    write_shared(row, cache.and_then(|cache| cache.shared));
}

impl<E: Environment> Transport<E> {
    /// Gives a backend without a cache an empty one of `bytes`, with at most `lanes_max` lanes.
    /// [`open_cache`](Self::open_cache) opens it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::AlreadyExists`] if the backend has a cache, [`ErrorKind::NoSpace`] as
    /// [`create_backend`](Self::create_backend), and as [`require_feature`](Self::require_feature).
    pub fn attach_cache(&self, id: BackendId, bytes: u64, lanes_max: u32) -> Result<()> {
        self.attach_cache_after(id, bytes, lanes_max, Epoch(0), None)
    }

    /// As [`attach_cache`](Self::attach_cache). The epochs of the cache continue above `after`, the last one that an earlier cache of
    /// the backend is known to have drained. With `shared`, it shares its space.
    ///
    /// # Errors
    /// As [`attach_cache`](Self::attach_cache), and [`ErrorKind::InvalidArgument`] for an epoch that is not possible and as
    /// [`share_cache`](Self::share_cache).
    pub fn attach_cache_after(
        &self,
        id: BackendId,
        bytes: u64,
        lanes_max: u32,
        after: Epoch,
        shared: Option<SharedSpace>,
    ) -> Result<()> {
        let entry = self.backend(id)?;
        if after.0 >= COUNTER_END / 4 {
            let text = format!("no cache can have counted to epoch {after}");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let mut tables = self.tables.lock();
        if entry.cache_segments > 0 {
            let text = format!("backend {id} has a cache already");
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        let plan = self.plan_cache(&mut tables, bytes, entry.size, lanes_max)?;
        self.check_shared(shared, plan.segments.len() as u32, plan.lanes)?;
        let cache_id = self.environment.random() | 1;
        let used = self.first_use(&mut tables, true)?;
        // Before the row: what was written without the cache may not be flushed yet.
        tables.superblocks.require(&self.region, FEATURE_BYPASS)?;
        // 1. and 2.
        self.place_cache(&mut tables, id.0, &plan, cache_id, after)?;
        // 3. From now on the backend has the cache.
        let named = Named { plan: &plan, cache_id, used, shared };
        self.update_row(&mut tables, id, |row| write_cache(row, Some(&named)))
    }

    /// Takes the cache of a backend away, and frees its segments. The caller has stopped the cache and its background worker, and
    /// no request is on its way.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InvalidArgument`] for a backend without a cache; [`ErrorKind::Busy`] if the cache is
    /// still in use, or holds something that the backing device lacks.
    pub fn detach_cache(&self, id: BackendId) -> Result<()> {
        let entry = self.backend(id)?;
        if entry.cache_segments == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("backend {id} has no cache")));
        }
        let mut tables = self.tables.lock();
        tables.check_finished(id)?;
        self.forget_cache(&mut tables, id)
    }

    /// Takes a cache away that was just [attached](Self::attach_cache) and that no request has used.
    ///
    /// # Errors
    /// As [`detach_cache`](Self::detach_cache), but the cache need not have been opened.
    pub fn take_unused_cache_back(&self, id: BackendId) -> Result<()> {
        let mut tables = self.tables.lock();
        if tables.is_open(id) {
            tables.check_finished(id)?;
        }
        self.forget_cache(&mut tables, id)
    }

    fn forget_cache(&self, tables: &mut Tables<E>, id: BackendId) -> Result<()> {
        self.update_row(tables, id, |row| write_cache(row, None))?;
        // Who still has the cache can do nothing with it.
        tables.open.retain(|(known, _)| *known != id);
        self.release_unused(tables);
        Ok(())
    }
}

impl<E: Environment> Tables<E> {
    /// Refuses a cache that is not open, since what it holds is not known, and one that may still be written or dirty.
    fn check_finished(&self, id: BackendId) -> Result<()> {
        let busy = |why: &str| Err(Error::new(ErrorKind::Busy, format!("the cache of backend {id} {why}")));
        let mut is_known = false;
        for (_, user) in self.open.iter().filter(|(known, _)| *known == id) {
            match user {
                User::Opening(token) if token.strong_count() > 0 => return busy("is being opened"),
                User::Opening(_) => {}
                User::Open(cache) => match cache.upgrade() {
                    Some(cache) if cache.is_running() => return busy("is in use"),
                    Some(cache) if !cache.holds_nothing_dirty() => {
                        return busy("holds data that the backing device lacks");
                    }
                    Some(_) => is_known = true,
                    // It is gone, and with it the knowledge of what it held.
                    None => {}
                },
            }
        }
        if is_known { Ok(()) } else { busy("is not open: what it holds is not known") }
    }
}
