//! Backends of a transport, and the allocation of segments to their caches.
//!
//! A backend is created in crash order: its segments name the cache, then its state block is stored, then its row. The row is
//! the commit point, and removing the row frees all segments at once.

use super::{
    Tables, Transport,
    rows::{active_row, first_free, no_such, rows},
};
use crate::{Environment, Settings, slots::InBoth};
use alloc::{format, string::String, vec::Vec};
use cbd_format::{
    BackendEntry as BackendRow,
    tables::{
        FEATURE_DATA_CRC, MODE_MOVED, MODE_WRITEBACK, STATE_ACTIVE, STATE_FREE, decode_text, encode_text,
    },
};
use cbd_types::{BackendId, Error, ErrorKind, HostId, MutationPoint, Result};

/// The mutation points of storing a backend's row durably.
pub(super) const ROW: InBoth = InBoth {
    first_fence: MutationPoint::BackendRowFirstFence,
    second: MutationPoint::BackendRowSecond,
    fence: MutationPoint::BackendRowFence,
};

/// The properties of a new backend.
#[derive(Clone, Debug)]
pub struct BackendSpec {
    /// The host that owns it.
    pub host: HostId,
    /// Path of the backing device.
    pub path: String,
    /// Identity of the backing device besides its path.
    pub identity: String,
    /// Size of the backing device in bytes.
    pub size: u64,
    /// Its logical sector in bytes.
    pub sector: u32,
    /// Bytes of the cache, rounded down to whole segments; `None` for a backend without a cache.
    pub cache_bytes: Option<u64>,
    /// Number of lanes: the largest power of two that is at most this and leaves each lane 8 segments.
    pub lanes_max: u32,
    /// Queues that serve it.
    pub handlers: u32,
    /// Whether data is checksummed.
    pub data_crc: bool,
    /// Settings.
    pub settings: Settings,
}

/// A backend, decoded from its row.
#[derive(Clone, Debug)]
pub struct BackendEntry {
    /// The number of its row.
    pub id: BackendId,
    /// The host that owns it.
    pub host: HostId,
    /// Random identity.
    pub uuid: [u8; 16],
    /// Path of the backing device.
    pub path: String,
    /// Identity of the backing device besides its path.
    pub identity: String,
    /// Size of the backing device in bytes, as it was recorded.
    pub size: u64,
    /// Its logical sector in bytes.
    pub sector: u32,
    /// Segments of its cache, the state segment included; 0 without one.
    pub cache_segments: u32,
    /// Lanes of its cache.
    pub lanes: u32,
    /// Queues that serve it.
    pub handlers: u32,
    /// Whether data is checksummed.
    pub data_crc: bool,
    /// Settings.
    pub settings: Settings,
    /// A rescue has moved it to the disk that is recorded here, and the user has not confirmed yet that it is to be served
    /// from there.
    pub is_moved: bool,
}

impl BackendEntry {
    /// Segments of its cache that can hold a log, as [`CacheStatus::segments`](crate::CacheStatus::segments) counts them:
    /// all but the state segment; 0 without a cache.
    #[must_use]
    pub const fn log_segments(&self) -> u32 {
        self.cache_segments.saturating_sub(1)
    }
}

impl<E: Environment> Transport<E> {
    /// Creates a backend, and its cache if it has one.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if the cache is larger than the free space or smaller than the minimum, or the table is full;
    /// [`ErrorKind::InvalidArgument`] for a spec that is out of its ranges.
    pub fn create_backend(&self, spec: &BackendSpec) -> Result<BackendId> {
        let settings = spec.settings.validated()?;
        if !(512..=4096).contains(&spec.sector) || !spec.sector.is_power_of_two() {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("a sector of {} bytes", spec.sector)));
        }
        if spec.size == 0 || !spec.size.is_multiple_of(u64::from(spec.sector)) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a backing device of {} bytes is not whole sectors of {}", spec.size, spec.sector),
            ));
        }
        if !(1..=128).contains(&spec.handlers) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{} handlers: 1 to 128 are possible", spec.handlers),
            ));
        }
        let (path_length, path) = encode_text("path", &spec.path)?;
        let (identity_length, identity) = encode_text("identity of the backing device", &spec.identity)?;
        let mut tables = self.tables.lock();
        let row = first_free(&tables.backends, |row| row.state.get(), "backend")?;
        let plan = match spec.cache_bytes {
            None => None,
            Some(bytes) => Some(self.plan_cache(&tables, bytes, spec)?),
        };
        let cache_id = self.environment.random() | 1;
        let (use_state, use_boot) = self.first_use(&mut tables, plan.is_some())?;
        if let Some(plan) = &plan {
            // 1. and 2.
            self.place_cache(&mut tables, row as u32, plan, cache_id)?;
        }
        // 3. The row: from now on the backend exists.
        let ownership = tables.backends[row].content().map_or(1, |old| old.ownership.get() + 1);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.environment.random().to_le_bytes());
        uuid[8..].copy_from_slice(&self.environment.random().to_le_bytes());
        tables.backends[row].keep_in_both(
            &self.region,
            ROW,
            BackendRow {
                state: STATE_ACTIVE.into(),
                host: spec.host.0.into(),
                ownership: ownership.into(),
                cache_id: if plan.is_some() { cache_id } else { 0 }.into(),
                size: spec.size.into(),
                sector: spec.sector.into(),
                lanes: plan.as_ref().map_or(0, |plan| plan.lanes).into(),
                segments: plan.as_ref().map_or(0, |plan| plan.segments.len() as u32).into(),
                state_segment: plan.as_ref().map_or(u32::MAX, |plan| plan.segments[0].0).into(),
                handlers: spec.handlers.into(),
                gc_percent: u32::from(settings.gc_percent).into(),
                consistency: settings.consistency.code().into(),
                dirty_target_percent: u32::from(settings.dirty_target_percent).into(),
                writeback_rate: settings.writeback_rate.into(),
                features: if spec.data_crc { FEATURE_DATA_CRC } else { 0 }.into(),
                cache_mode: MODE_WRITEBACK.into(),
                path_length,
                identity_length,
                uuid,
                created_ms: self.environment.wall_ms().into(),
                path,
                identity,
                on_write_error: settings.on_write_error.code().into(),
                write_error_after_s: settings.write_error_after_s.into(),
                use_state: use_state.into(),
                reserved: 0.into(),
                use_boot: use_boot.0,
                reserved2: [0; 96],
            },
        )?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        Ok(BackendId(row as u32))
    }

    /// All backends.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] for a row with a valid checksum and invalid content.
    pub fn backends(&self) -> Result<Vec<BackendEntry>> {
        let tables = self.tables.lock();
        rows(&tables.backends, |row| row.state.get()).map(|(id, row)| backend_entry(id, row)).collect()
    }

    /// One backend.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::Damaged`] as in [`backends`](Self::backends) and if both copies of the row
    /// are lost.
    pub fn backend(&self, id: BackendId) -> Result<BackendEntry> {
        let mut tables = self.tables.lock();
        if tables.is_backend_lost(id.index()) {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "backend {id}: both copies of its row are damaged; what its cache holds is kept but cannot be reached, \
                     and its disk may lack acknowledged writes"
                ),
            ));
        }
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        row.content().map_or_else(|| Err(no_such("backend", id.index())), |row| backend_entry(id.0, row))
    }

    /// Stores settings for the next start. [`Cache::set_settings`](crate::Cache::set_settings) changes the settings of an
    /// open cache.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::InvalidArgument`] for a value out of its range.
    pub fn update_settings(&self, id: BackendId, settings: Settings) -> Result<()> {
        let settings = settings.validated()?;
        self.update_backend(id, |row| {
            row.gc_percent = u32::from(settings.gc_percent).into();
            row.consistency = settings.consistency.code().into();
            row.dirty_target_percent = u32::from(settings.dirty_target_percent).into();
            row.writeback_rate = settings.writeback_rate.into();
            row.on_write_error = settings.on_write_error.code().into();
            row.write_error_after_s = settings.write_error_after_s.into();
        })
    }

    /// Stores the path at which the backing device was found last, for the next start.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::InvalidArgument`] for a path that is too long.
    pub fn update_path(&self, id: BackendId, path: &str) -> Result<()> {
        let (path_length, path) = encode_text("path", path)?;
        self.update_backend(id, |row| {
            row.path_length = path_length;
            row.path = path;
        })
    }

    /// Removes a backend and frees its segments. The content of its cache is dropped: the caller has drained it, or drops it
    /// intentionally.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::Busy`] while its cache is open or a blkdev uses it.
    pub fn remove_backend(&self, id: BackendId) -> Result<()> {
        if let Some(blkdev) = self.blkdevs().iter().find(|blkdev| blkdev.backend == id) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("blkdev {} stands on backend {id}: stop it first", blkdev.id),
            ));
        }
        let mut tables = self.tables.lock();
        if tables.is_open(id) {
            return Err(Error::new(ErrorKind::Busy, format!("the cache of backend {id} is open")));
        }
        self.update_row(&mut tables, id, |row| row.state = STATE_FREE.into())
    }

    pub(super) fn update_backend(&self, id: BackendId, change: impl FnOnce(&mut BackendRow)) -> Result<()> {
        self.update_row(&mut self.tables.lock(), id, change)
    }

    pub(super) fn update_row(
        &self,
        tables: &mut Tables<E>,
        id: BackendId,
        change: impl FnOnce(&mut BackendRow),
    ) -> Result<()> {
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        let Some(mut content) = row.content().copied() else { return Err(no_such("backend", id.index())) };
        change(&mut content);
        row.keep_in_both(&self.region, ROW, content)?;
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }
}

fn backend_entry(id: u32, row: &BackendRow) -> Result<BackendEntry> {
    let damaged =
        |what: &str| Error::new(ErrorKind::Damaged, format!("backend {id}: its {what} is impossible"));
    let percent = |value: u32, what| u8::try_from(value).map_err(|_| damaged(what));
    let settings = Settings {
        gc_percent: percent(row.gc_percent.get(), "gc_percent")?,
        consistency: crate::Consistency::from_code(row.consistency.get())
            .ok_or_else(|| damaged("consistency"))?,
        writeback_rate: row.writeback_rate.get(),
        dirty_target_percent: percent(row.dirty_target_percent.get(), "dirty_target_percent")?,
        on_write_error: crate::OnWriteError::from_code(row.on_write_error.get())
            .ok_or_else(|| damaged("on_write_error"))?,
        write_error_after_s: row.write_error_after_s.get(),
    }
    .validated()
    .map_err(|_| damaged("setting"))?;
    let sector = row.sector.get();
    if !(512..=4096).contains(&sector)
        || !sector.is_power_of_two()
        || !row.size.get().is_multiple_of(u64::from(sector))
    {
        return Err(damaged("sector"));
    }
    if ![MODE_WRITEBACK, MODE_MOVED].contains(&row.cache_mode.get()) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("backend {id} has cache mode {}, which this program does not know", row.cache_mode),
        ));
    }
    Ok(BackendEntry {
        id: BackendId(id),
        host: HostId(row.host.get()),
        uuid: row.uuid,
        path: decode_text("path", row.path_length, &row.path)?,
        identity: decode_text("identity", row.identity_length, &row.identity)?,
        size: row.size.get(),
        sector,
        cache_segments: row.segments.get(),
        lanes: row.lanes.get(),
        handlers: row.handlers.get(),
        data_crc: row.features.get() & FEATURE_DATA_CRC != 0,
        settings,
        is_moved: row.cache_mode.get() == MODE_MOVED,
    })
}
