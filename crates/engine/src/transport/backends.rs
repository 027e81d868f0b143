//! Backends of a transport, and the allocation of segments to their caches.
//!
//! A backend is created in crash order: its segments name the cache, then its state block is stored, then its row. The row is
//! the commit point, and removing the row frees all segments at once.

use super::{
    SharedSpace, Tables, Transport,
    attach::{Named, write_cache},
    joined::RowKind,
    names::name_of,
    rows::{active_row, no_such, rows},
    shared::read_shared,
};
use crate::{
    CacheMode, Consistency, Environment, OnWriteError, ReadFill, Readahead, Settings, WhenFull,
    settings::{METADATA_MAX_PERCENT_DEFAULT, PIN_PERCENT_DEFAULT, SEQUENTIAL_READ_CUTOFF},
    slots::InBoth,
};
use alloc::{format, string::String, vec::Vec};
use cbd_format::{
    BackendEntry as BackendRow, FieldText, SlotContent,
    superblock::FEATURE_BYPASS,
    tables::{
        FEATURE_DATA_CRC, MODE_MOVED, MODE_WRITEBACK, STATE_ACTIVE, STATE_FREE, decode_text, encode_name,
    },
};
use cbd_types::{BackendId, Epoch, Error, ErrorKind, HostId, MutationPoint, Name, Result};

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
    /// Its name; none if it has none, or if the field in the table does not hold a valid one.
    pub name: Option<Name>,
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
    /// How its cache shares its space with others; `None` for a cache of fixed size and without a cache.
    pub shared: Option<SharedSpace>,
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

impl BackendSpec {
    /// Validates the spec. Returns its texts.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a value that is out of its range.
    fn validated(&self) -> Result<DiskTexts<'_>> {
        self.settings.validated()?;
        if !(512..=4096).contains(&self.sector) || !self.sector.is_power_of_two() {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("a sector of {} bytes", self.sector)));
        }
        if self.size == 0 || !self.size.is_multiple_of(u64::from(self.sector)) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a backing device of {} bytes is not whole sectors of {}", self.size, self.sector),
            ));
        }
        if !(1..=128).contains(&self.handlers) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{} handlers: 1 to 128 are possible", self.handlers),
            ));
        }
        DiskTexts::new(&self.path, &self.identity)
    }

    /// Writes what the user chose into a row, without the texts.
    fn write(&self, row: &mut BackendRow) {
        row.host = self.host.0.into();
        row.size = self.size.into();
        row.sector = self.sector.into();
        row.handlers = self.handlers.into();
        row.features = if self.data_crc { FEATURE_DATA_CRC } else { 0 }.into();
        write_settings(self.settings, row);
    }
}

/// The path and the identity of a backing device, which fit into a row.
pub(super) struct DiskTexts<'a> {
    path: FieldText<'a, 512>,
    identity: FieldText<'a, 256>,
}

impl<'a> DiskTexts<'a> {
    /// The texts, if they fit.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if one is too long.
    pub(super) fn new(path: &'a str, identity: &'a str) -> Result<Self> {
        Ok(Self {
            path: FieldText::new("path", path)?,
            identity: FieldText::new("identity of the backing device", identity)?,
        })
    }

    /// Writes both into a row.
    pub(super) fn write(&self, row: &mut BackendRow) {
        self.path.write(&mut row.path_length, &mut row.path);
        self.identity.write(&mut row.identity_length, &mut row.identity);
    }
}

fn write_settings(settings: Settings, row: &mut BackendRow) {
    row.gc_percent = u32::from(settings.gc_percent).into();
    row.consistency = settings.consistency.code().into();
    row.dirty_target_percent = u32::from(settings.dirty_target_percent).into();
    row.writeback_rate = settings.writeback_rate.into();
    row.on_write_error = settings.on_write_error.code().into();
    row.write_error_after_s = settings.write_error_after_s.into();
    row.write_mode = settings.cache_mode.code().into();
    row.read_fill = settings.read_fill.code().into();
    // Rows of earlier versions have 0, so that stands for the default.
    row.sequential_read_cutoff = match settings.sequential_read_cutoff {
        SEQUENTIAL_READ_CUTOFF => 0.into(),
        0 => u64::MAX.into(),
        bytes => bytes.into(),
    };
    row.readahead = settings.readahead.code().into();
    row.sequential_write_cutoff = settings.sequential_write_cutoff.into();
    row.when_full = settings.when_full.code().into();
    row.congestion_read_us = settings.congestion_read_us.into();
    row.congestion_write_us = settings.congestion_write_us.into();
    row.read_latency_target_us = settings.read_latency_target_us.into();
    row.writeback_paused_until_ms = settings.writeback_paused_until_ms.into();
    // As above.
    row.pin_percent = match settings.pin_percent {
        PIN_PERCENT_DEFAULT => 0,
        percent => u16::from(percent),
    }
    .into();
    row.metadata_min_percent = u16::from(settings.metadata_min_percent).into();
    row.metadata_max_percent = match settings.metadata_max_percent {
        METADATA_MAX_PERCENT_DEFAULT => 0,
        percent => u16::from(percent),
    }
    .into();
}

impl<E: Environment> Transport<E> {
    /// Creates a backend, and its cache if it has one.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if the cache is larger than the free space or smaller than the minimum, or the table is full;
    /// [`ErrorKind::InvalidArgument`] for a spec that is out of its ranges.
    pub fn create_backend(&self, spec: &BackendSpec) -> Result<BackendId> {
        self.create_named_backend(spec, None)
    }

    /// As [`create_backend`](Self::create_backend), with a name.
    ///
    /// # Errors
    /// As there, and [`ErrorKind::AlreadyExists`] if a backend or a blkdev has the name.
    pub fn create_named_backend(&self, spec: &BackendSpec, name: Option<&Name>) -> Result<BackendId> {
        self.create_sharing_backend(spec, name, None)
    }

    /// As [`create_named_backend`](Self::create_named_backend), with a cache that shares its space.
    ///
    /// # Errors
    /// As [`create_named_backend`](Self::create_named_backend) and [`share_cache`](Self::share_cache).
    pub fn create_sharing_backend(
        &self,
        spec: &BackendSpec,
        name: Option<&Name>,
        shared: Option<SharedSpace>,
    ) -> Result<BackendId> {
        let texts = spec.validated()?;
        let mut tables = self.tables.lock();
        if let Some(name) = name {
            tables.refuse_backend_name(None, name)?;
            self.refuse_name_of_others(name)?;
        }
        let row =
            self.free_row(&mut tables, RowKind::Backend, |tables| &tables.backends, |row| row.state.get())?;
        let plan = match spec.cache_bytes {
            None => None,
            Some(bytes) => Some(self.plan_cache(&mut tables, bytes, spec.size, spec.lanes_max)?),
        };
        if let Some(plan) = &plan {
            self.check_shared(shared, plan.segments.len() as u32, plan.lanes)?;
        }
        if spec.settings.can_bypass() {
            tables.superblocks.require(&self.region, FEATURE_BYPASS)?;
        }
        let cache_id = self.environment.random() | 1;
        let used = self.first_use(&mut tables, plan.is_some())?;
        if let Some(plan) = &plan {
            // 1. and 2.
            self.place_cache(&mut tables, row as u32, plan, cache_id, Epoch(0))?;
        }
        // 3. The row: from now on the backend exists.
        let ownership = tables.backends[row].content().map_or(1, |old| old.ownership.get() + 1);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.environment.random().to_le_bytes());
        uuid[8..].copy_from_slice(&self.environment.random().to_le_bytes());
        let created_ms = self.environment.wall_ms();
        tables.backends[row].keep_in_both(&self.region, ROW, |row| {
            row.clear();
            texts.write(row);
            spec.write(row);
            row.state = STATE_ACTIVE.into();
            row.cache_mode = MODE_WRITEBACK.into();
            row.ownership = ownership.into();
            row.uuid = uuid;
            row.name = encode_name(name);
            row.created_ms = created_ms.into();
            write_cache(row, plan.as_ref().map(|plan| Named { plan, cache_id, used, shared }).as_ref());
        })?;
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
    /// [`ErrorKind::NotFound`], [`ErrorKind::InvalidArgument`] for a value out of its range, and as
    /// [`require_feature`](Self::require_feature) for settings with which requests can go past the cache.
    pub fn update_settings(&self, id: BackendId, settings: Settings) -> Result<()> {
        let settings = settings.validated()?;
        let mut tables = self.tables.lock();
        if settings.can_bypass() {
            // Before any record that goes with these settings: programs that do not know it refuse the region.
            tables.superblocks.require(&self.region, FEATURE_BYPASS)?;
        }
        self.update_row(&mut tables, id, |row| write_settings(settings, row))?;
        if settings.can_bypass() {
            tables.open_caches(id).for_each(|cache| cache.allow_bypass());
        }
        Ok(())
    }

    /// Lets requests go past the open cache of a backend, as with settings for that, without a change of the stored settings.
    ///
    /// # Errors
    /// As [`require_feature`](Self::require_feature).
    pub fn allow_bypass(&self, id: BackendId) -> Result<()> {
        let mut tables = self.tables.lock();
        tables.superblocks.require(&self.region, FEATURE_BYPASS)?;
        tables.open_caches(id).for_each(|cache| cache.allow_bypass());
        Ok(())
    }

    /// Stores the path at which the backing device was found last, for the next start.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::InvalidArgument`] for a path that is too long.
    pub fn update_path(&self, id: BackendId, path: &str) -> Result<()> {
        let path = FieldText::new("path", path)?;
        self.update_backend(id, |row| path.write(&mut row.path_length, &mut row.path))
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
        self.refuse_served(&tables, id, &[])?;
        self.update_row(&mut tables, id, |row| row.state = STATE_FREE.into())?;
        self.release_unused(&mut tables);
        Ok(())
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
        row.keep_in_both(&self.region, ROW, change)?;
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }
}

pub(super) fn backend_entry(id: u32, row: &BackendRow) -> Result<BackendEntry> {
    let damaged =
        |what: &str| Error::new(ErrorKind::Damaged, format!("backend {id}: its {what} is impossible"));
    let percent = |value: u32, what| u8::try_from(value).map_err(|_| damaged(what));
    let settings = Settings {
        gc_percent: percent(row.gc_percent.get(), "gc_percent")?,
        consistency: Consistency::from_code(row.consistency.get()).ok_or_else(|| damaged("consistency"))?,
        writeback_rate: row.writeback_rate.get(),
        dirty_target_percent: percent(row.dirty_target_percent.get(), "dirty_target_percent")?,
        on_write_error: OnWriteError::from_code(row.on_write_error.get())
            .ok_or_else(|| damaged("on_write_error"))?,
        write_error_after_s: row.write_error_after_s.get(),
        cache_mode: CacheMode::from_code(row.write_mode.get()).ok_or_else(|| damaged("write_mode"))?,
        read_fill: ReadFill::from_code(row.read_fill.get()).ok_or_else(|| damaged("read_fill"))?,
        sequential_read_cutoff: match row.sequential_read_cutoff.get() {
            0 => SEQUENTIAL_READ_CUTOFF,
            u64::MAX => 0,
            bytes => bytes,
        },
        readahead: Readahead::from_code(row.readahead.get()).ok_or_else(|| damaged("readahead"))?,
        sequential_write_cutoff: row.sequential_write_cutoff.get(),
        when_full: WhenFull::from_code(row.when_full.get()).ok_or_else(|| damaged("when_full"))?,
        congestion_read_us: row.congestion_read_us.get(),
        congestion_write_us: row.congestion_write_us.get(),
        read_latency_target_us: row.read_latency_target_us.get(),
        writeback_paused_until_ms: row.writeback_paused_until_ms.get(),
        pin_percent: match row.pin_percent.get() {
            0 => PIN_PERCENT_DEFAULT,
            value => percent(value.into(), "pin_percent")?,
        },
        metadata_min_percent: percent(row.metadata_min_percent.get().into(), "metadata_min_percent")?,
        metadata_max_percent: match row.metadata_max_percent.get() {
            0 => METADATA_MAX_PERCENT_DEFAULT,
            value => percent(value.into(), "metadata_max_percent")?,
        },
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
        name: name_of(&row.name),
        path: decode_text("path", row.path_length, &row.path)?,
        identity: decode_text("identity", row.identity_length, &row.identity)?,
        size: row.size.get(),
        sector,
        cache_segments: row.segments.get(),
        shared: read_shared(row),
        lanes: row.lanes.get(),
        handlers: row.handlers.get(),
        data_crc: row.features.get() & FEATURE_DATA_CRC != 0,
        settings,
        is_moved: row.cache_mode.get() == MODE_MOVED,
    })
}
