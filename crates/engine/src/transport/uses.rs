//! Opening caches, and the use records of caches in an ordinary file.
//!
//! A crash of the machine leaves a mixture of old and new pages of such a file. Recovery must not use a mixture: it would
//! write old dirty data over a newer disk. So each backend's row records how its cache is used, and in which boot.
//!
//! Invariants where [`Pmem::mixes_pages`](cbd_types::Pmem::mixes_pages):
//! - the superblocks name `FEATURE_USE_NOTES` before any row has a use record: an earlier program, which would leave stale
//!   records behind, refuses the region from then on;
//! - `USE_DIRTY` with this boot is on the disk before the first store into a cache that is opened;
//! - a row has `USE_CLEAN` only while nothing in the cache is dirty, and `USE_DIRTY` is on the disk again before the first
//!   write is acknowledged;
//! - a row has `USE_SYNCED` only if all pages of the cache were on the disk while no thread could change them;
//! - `USE_UNSURE` counts as `USE_DIRTY`. It is set by a failed sync and remains until all pages of the cache were stored
//!   again and a later sync has succeeded: the kernel considers pages clean that a failed sync has not written.
//!
//! With these records, a cache that was in use in another boot is emptied if nothing in it can have been dirty. It is refused
//! if it can have held dirty data.
//! Each change of a table reaches the disk at once (`TwoSlots::keep_in_both`), so the tables are no mixture.
//!
//! Recovery runs without the lock of the tables, so that the first write of another cache does not wait for it. A cache that
//! is being opened counts as open: it cannot be opened again, removed, or recorded as synced.
//!
//! Elsewhere: when data is on the disk (`cbd-pmem`), messages to the user (`cbd-runtime`).

use super::{SEGMENTS_PER_LANE, Tables, Transport, User, backends::ROW, rows::no_such};
use crate::{
    Cache, Environment,
    context::Identity,
    lane_map::LaneMap,
    recovery::{Opening, recover},
};
use alloc::{boxed::Box, format, sync::Arc, vec::Vec};
use cbd_format::{
    BackendEntry as BackendRow, StateShape,
    superblock::{FEATURE_BYPASS, FEATURE_USE_NOTES},
    tables::{STATE_ACTIVE, USE_CLEAN, USE_DIRTY, USE_SYNCED, USE_UNKNOWN, USE_UNSURE},
};
use cbd_types::{BackendId, BootId, Error, ErrorKind, InFlight, MutationPoint, Region, Result, SegmentId};

/// Whether all pages of a cache are those that its last user stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    /// All of them are.
    Whole,
    /// No boot is recorded: an earlier program used the cache last, or it was copied from memory that keeps every store. The
    /// cache is recovered.
    Unknown,
    /// A mixture of old and new pages, but nothing in the cache was dirty: the cache is emptied.
    MixedClean,
    /// A mixture of old and new pages, and the cache can have held dirty data: the cache is refused.
    MixedDirty,
}

/// The action for a cache of [`Pages::MixedDirty`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Mixed {
    /// Refuse to open it.
    #[default]
    Refuse,
    /// Open it for inspection, and leave its use record unchanged: the next open refuses it again.
    Look,
    /// Recover it as it is, because the user requested this. Old data may be written over newer data.
    Recover,
}

/// The location and parts of a cache, checked against the region.
pub(super) struct Found {
    /// The pages of the cache, according to the use record in its row.
    pages: Pages,
    boot: BootId,
    identity: Identity,
    state_segment: SegmentId,
    /// The segments of the log.
    segments: Vec<SegmentId>,
    settings: crate::Settings,
}

impl<E: Environment> Transport<E> {
    /// The use record for the row of a new backend. When this returns, the superblocks name the feature if the record needs
    /// it.
    ///
    /// # Errors
    /// As [`Transport::require_feature`].
    pub(super) fn first_use(&self, tables: &mut Tables<E>, has_cache: bool) -> Result<(u32, BootId)> {
        if has_cache && self.region.mixes_pages() {
            tables.superblocks.require(&self.region, FEATURE_USE_NOTES)?;
            Ok((USE_CLEAN, self.region.boot()))
        } else {
            Ok((USE_UNKNOWN, BootId::UNKNOWN))
        }
    }

    /// Whether all pages of a backend's cache are those that its last user stored.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn pages_of(&self, id: BackendId) -> Result<Pages> {
        let row = self.backend_row(id).ok_or_else(|| no_such("backend", id.index()))?;
        Ok(self.pages_in(&row))
    }

    fn pages_in(&self, row: &BackendRow) -> Pages {
        let is_this_boot = self.region.boot().is_same_known(BootId(row.use_boot));
        match row.use_state.get() {
            _ if row.cache_id.get() == 0 => Pages::Whole,
            USE_UNKNOWN if self.region.mixes_pages() => Pages::Unknown,
            USE_UNKNOWN | USE_SYNCED => Pages::Whole,
            USE_CLEAN | USE_DIRTY | USE_UNSURE if is_this_boot => Pages::Whole,
            USE_CLEAN => Pages::MixedClean,
            _ => Pages::MixedDirty,
        }
    }

    /// Opens the cache of a backend and recovers it from its log.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InvalidArgument`] for a backend without a cache; [`ErrorKind::Busy`] if the
    /// cache is open; [`ErrorKind::Damaged`] if the row contradicts the region; [`ErrorKind::Torn`] if the machine crashed
    /// while the cache was in use and could hold dirty data.
    pub fn open_cache(&self, id: BackendId) -> Result<Arc<Cache<E>>> {
        self.open_cache_if(id, Mixed::Refuse)
    }

    /// As [`open_cache`](Self::open_cache); `mixed` determines the action where that function would return
    /// [`ErrorKind::Torn`].
    ///
    /// # Errors
    /// As [`open_cache`](Self::open_cache).
    pub fn open_cache_if(&self, id: BackendId, mixed: Mixed) -> Result<Arc<Cache<E>>> {
        let entry = self.backend(id)?;
        let mut tables = self.tables.lock();
        let found = self.find_cache(&mut tables, id, &entry)?;
        let pages = found.pages;
        if pages == Pages::MixedDirty && mixed == Mixed::Refuse {
            return Err(torn(id, &entry.path, found.boot));
        }
        if pages == Pages::MixedClean {
            self.empty_found(&found);
        }
        let notes = pages != Pages::MixedDirty || mixed != Mixed::Look;
        if notes {
            self.note_opening(&mut tables, id)?;
        }
        // The entry in `open` is valid until this function returns, even with an error.
        let opening = Arc::new(());
        tables.open.push((id, User::Opening(Arc::downgrade(&opening))));
        drop(tables);
        let cache = recover(Opening {
            environment: Arc::clone(&self.environment),
            region: Arc::clone(&self.region),
            layout: self.layout.lock().clone(),
            identity: found.identity,
            segments: found.segments,
            settings: found.settings,
        })?;
        self.use_opened(id, &entry, &cache, notes)?;
        Ok(cache)
    }

    /// Completes the opening of a cache: what the tables say of it is applied, and it is open.
    #[inline(never)]
    fn use_opened(
        &self,
        id: BackendId,
        entry: &super::BackendEntry,
        cache: &Arc<Cache<E>>,
        notes: bool,
    ) -> Result<()> {
        let mut tables = self.tables.lock();
        if notes && self.region.mixes_pages() {
            self.note_opened(&mut tables, id, cache)?;
        }
        if tables.superblocks.block().has_incompatible(FEATURE_BYPASS) {
            cache.allow_bypass();
        }
        if notes {
            self.return_surplus(&mut tables, id, cache)?;
        }
        // The backend may have grown meanwhile.
        if let Some(row) = tables.backends[id.index()].content() {
            cache.grow(row.size.get());
        }
        self.restore_pins(&tables, id, cache)?;
        cache.begin_classes();
        cache.count_hits_up_to(self.largest_size(entry, cache))?;
        tables.open.push((id, User::Open(Arc::downgrade(cache))));
        Ok(())
    }

    pub(super) fn empty_found(&self, found: &Found) {
        let Found { identity, state_segment, segments, .. } = found;
        self.empty_cache(segments, *state_segment, identity.lanes.lanes, identity.cache_id);
    }

    pub(super) fn find_cache(
        &self,
        tables: &mut Tables<E>,
        id: BackendId,
        entry: &super::BackendEntry,
    ) -> Result<Found> {
        if tables.is_open(id) {
            return Err(Error::new(ErrorKind::Busy, format!("the cache of backend {id} is open already")));
        }
        let Some(row) = tables.backends[id.index()].content() else {
            return Err(no_such("backend", id.index()));
        };
        if row.cache_id.get() == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("backend {id} has no cache")));
        }
        let damaged = |what: &str| Error::new(ErrorKind::Damaged, format!("backend {id}: {what}"));
        let lanes = LaneMap { lanes: row.lanes.get() };
        let state_segment = SegmentId(row.state_segment.get());
        if !row.lanes.get().is_power_of_two()
            || !(StateShape { lanes: row.lanes.get() }).fits(self.segment_size)
            || entry.size > lanes.device_max()
        {
            return Err(damaged("the number of lanes is impossible"));
        }
        let mut segments = tables.segments_of(id);
        let Some(state_at) = segments.iter().position(|segment| *segment == state_segment) else {
            return Err(damaged("its state segment does not belong to it"));
        };
        segments.remove(state_at);
        if (segments.len() as u32) / lanes.lanes < SEGMENTS_PER_LANE {
            return Err(damaged("it has fewer segments than its lanes need"));
        }
        Ok(Found {
            pages: self.pages_in(row),
            boot: BootId(row.use_boot),
            identity: Identity {
                backend: id,
                cache_id: row.cache_id.get(),
                ownership: row.ownership.get(),
                lanes,
                size_when_opened: entry.size,
                sector: entry.sector,
                data_crc: entry.data_crc,
                state_base: self.segment_base(state_segment),
            },
            state_segment,
            segments,
            settings: entry.settings,
        })
    }

    /// Records that the cache is in use, before any store into it. On memory that does not mix pages this clears a use record
    /// that is left from the memory from which the region was copied.
    pub(super) fn note_opening(&self, tables: &mut Tables<E>, id: BackendId) -> Result<()> {
        let Some(row) = tables.backends[id.index()].content() else { return Ok(()) };
        let state = row.use_state.get();
        if !self.region.mixes_pages() {
            return if state == USE_UNKNOWN {
                Ok(())
            } else {
                note(tables, &self.region, id, USE_UNKNOWN, BootId::UNKNOWN)
            };
        }
        // Stored even if the row has this record already: after a failed sync the record can be in memory only, and a later
        // successful sync does not write it to the disk unless it is stored again.
        note(tables, &self.region, id, USE_DIRTY, self.region.boot())
    }

    /// Records the result of recovery: a cache in which nothing is dirty is recorded as clean until its first write.
    fn note_opened(&self, tables: &mut Tables<E>, id: BackendId, cache: &Cache<E>) -> Result<()> {
        let is_unsure =
            tables.backends[id.index()].content().is_some_and(|row| row.use_state.get() == USE_UNSURE);
        if is_unsure || !cache.holds_nothing_dirty() {
            return Ok(());
        }
        let boot = self.region.boot();
        note(tables, &self.region, id, USE_CLEAN, boot)?;
        let (tables, region) = (Arc::clone(&self.tables), Arc::clone(&self.region));
        cache.before_first_write(Box::new(move || {
            note(&mut tables.lock(), &region, id, USE_DIRTY, region.boot())
        }));
        Ok(())
    }

    /// Syncs the region to the disk and records that its caches were synced, so that another boot recovers them. Caches that
    /// are still open are left out; returns their number. Does nothing on memory that does not mix pages.
    ///
    /// # Errors
    /// The system error; then nothing is recorded as synced.
    pub fn sync(&self) -> Result<usize> {
        if !self.region.mixes_pages() {
            return Ok(0);
        }
        let mut guard = self.tables.lock();
        let tables = &mut *guard;
        // 1. The lock of the tables prevents any cache from being opened from here on. A cache that is open is not recorded.
        tables.open.retain(|(_, user)| user.is_there());
        let open: Vec<BackendId> = tables.open.iter().map(|(id, _)| *id).collect();
        let boot = self.region.boot();
        let in_use = (0..).map(BackendId).zip(&tables.backends).filter(|(_, row)| {
            row.content().is_some_and(|row| {
                row.state.get() == STATE_ACTIVE
                    && matches!(row.use_state.get(), USE_CLEAN | USE_DIRTY | USE_UNSURE)
                    // The pages that another boot left are a mixture, on the disk too.
                    && boot == BootId(row.use_boot)
            })
        });
        let in_use: Vec<BackendId> = in_use.map(|(id, _)| id).collect();
        let (open, closed): (Vec<_>, Vec<_>) = in_use.into_iter().partition(|id| open.contains(id));
        if closed.is_empty() {
            return Ok(open.len());
        }
        // 2. All pages are on the disk before a row records that.
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        let mut stored = self.region.nothing_in_flight();
        for id in &closed {
            stored = stored.and(self.store_unsure_again(tables, *id));
        }
        self.region.fence(MutationPoint::OpenFence, stored);
        if let Err(error) = self.region.sync(MutationPoint::UseSync, 0, self.region.size()) {
            note_unsure(tables, &self.region);
            return Err(error);
        }
        // 3. The rows.
        for id in closed {
            note(tables, &self.region, id, USE_SYNCED, BootId::UNKNOWN)?;
        }
        Ok(open.len())
    }

    /// Stores the pages of a closed cache again if a sync has failed since it was opened, in this process or in an earlier
    /// one. In flight until the caller fences.
    fn store_unsure_again(&self, tables: &Tables<E>, id: BackendId) -> InFlight {
        let is_unsure =
            tables.backends[id.index()].content().is_some_and(|row| row.use_state.get() == USE_UNSURE);
        let mut stored = self.region.nothing_in_flight();
        if !is_unsure && !self.region.has_sync_failed() {
            return stored;
        }
        for segment in tables.segments_of(id) {
            let base = self.segment_base(segment);
            stored = stored.and(self.region.touch_pages(MutationPoint::SyncAgain, base, self.segment_size));
        }
        stored
    }
}

/// After a failed sync: records for the next process that the pages of each cache in use must be stored again.
#[cold]
#[inline(never)]
fn note_unsure<E: Environment>(tables: &mut Tables<E>, region: &Region<E::Memory>) {
    let boot = region.boot();
    for row in &mut tables.backends {
        let Some(content) = row.content() else { continue };
        let is_in_use = content.state.get() == STATE_ACTIVE
            && matches!(content.use_state.get(), USE_CLEAN | USE_DIRTY)
            && boot == BootId(content.use_boot);
        if is_in_use {
            // If this fails too, the row stays unchanged: no slot may change while the other one is not on the disk.
            let _ = row.keep_in_both(region, ROW, |row| row.use_state = USE_UNSURE.into());
        }
    }
}

/// Stores the use record of a cache, and syncs it to the disk. Requires the feature first, so that earlier programs refuse
/// the region. `USE_UNSURE` of the same boot stays, unless the new record names no boot.
#[inline(never)]
fn note<E: Environment>(
    tables: &mut Tables<E>,
    region: &Region<E::Memory>,
    id: BackendId,
    state: u32,
    boot: BootId,
) -> Result<()> {
    let Some(row) = tables.backends.get_mut(id.index()) else { return Ok(()) };
    let Some(content) = row.content() else { return Ok(()) };
    if state != USE_UNKNOWN {
        tables.superblocks.require(region, FEATURE_USE_NOTES)?;
    }
    let was_unsure = content.use_state.get() == USE_UNSURE && boot.is_same_known(BootId(content.use_boot));
    let state = if was_unsure { USE_UNSURE } else { state };
    let kept = row.keep_in_both(region, ROW, |row| {
        row.use_state = state.into();
        row.use_boot = boot.0;
    });
    if let Err(error) = kept {
        note_unsure(tables, region);
        return Err(error);
    }
    region.check_stores(MutationPoint::TableStoreCheck)
}

fn torn(id: BackendId, path: &str, boot: BootId) -> Error {
    Error::new(
        ErrorKind::Torn,
        format!(
            "the cache of backend {id} ({path}) was in use in boot {boot} of the machine and was not closed: the machine crashed or was \
             restarted since, and of the region's pages some are new and others old; recovering them could write old data over newer. Compare the disk with a backup; then give up what the cache holds with cbdctrl \
             backend-stop -b {id} --discard-dirty BYTES (it says how many)"
        ),
    )
}
