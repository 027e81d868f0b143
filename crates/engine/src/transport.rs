//! A transport: the superblock and the tables of a region, and how backends get their segments.
//!
//! Always true here: a backend's row is the commit point. Segments name the cache that they were given to, and count only
//! while a row names the same cache; so a crash while a backend is made or removed leaves free segments, never
//! a half one.

use crate::{
    Cache, Environment, Mutex, Settings, cache::Identity, lane::LaneMap, recovery::Opening, slots::TwoSlots,
};
use alloc::{
    format,
    string::String,
    sync::{Arc, Weak},
    vec,
    vec::Vec,
};
use cbd_format::{
    BackendEntry as BackendRow, BlkdevEntry as BlkdevRow, Drained, HostEntry as HostRow, LaneMark, LaneTail,
    Layout, PAGE, SegmentEntry, SegmentHeader, SlotContent, StateShape, Superblock,
    record::bytes_of,
    segment::STATE_MAGIC,
    superblock::MAGIC,
    tables::{FEATURE_DATA_CRC, STATE_ACTIVE, STATE_FREE, decode_text, encode_text},
};
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, HostId, LaneId, Pmem, Region, Result, SegmentId};

/// Segments that each lane is to have at least.
const SEGMENTS_PER_LANE: u32 = 8;

/// How a region is formatted.
#[derive(Clone, Copy, Debug)]
pub struct FormatOptions {
    /// Bytes of a segment; chosen by the region's size if `None`.
    pub segment_size: Option<u64>,
    /// Format even if the region holds a transport or other data.
    pub force: bool,
    /// Rows of the host table.
    pub host_rows: u32,
    /// Rows of the backend table.
    pub backend_rows: u32,
    /// Rows of the blkdev table.
    pub blkdev_rows: u32,
}

impl Default for FormatOptions {
    fn default() -> Self {
        Self { segment_size: None, force: false, host_rows: 16, backend_rows: 64, blkdev_rows: 64 }
    }
}

/// What a transport is.
#[derive(Clone, Debug)]
pub struct TransportInfo {
    /// First eight bytes of the region as a number.
    pub magic: u64,
    /// Format version on media.
    pub version: u32,
    /// Compatible, read-only compatible and incompatible feature bits.
    pub features: [u64; 3],
    /// Random identity.
    pub uuid: [u8; 16],
    /// When it was formatted, in milliseconds since 1970 UTC.
    pub created_ms: u64,
    /// Where everything lies.
    pub layout: Layout,
    /// Bytes of a row's slot in the host, backend, blkdev and segment tables.
    pub bytes_per_row: [u32; 4],
    /// Segments that belong to nobody.
    pub free_segments: u32,
}

/// A host as the table has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostEntry {
    /// Its row.
    pub id: HostId,
    /// Its name.
    pub name: String,
}

/// What a new backend is to be.
#[derive(Clone, Debug)]
pub struct BackendSpec {
    /// The host that owns it.
    pub host: HostId,
    /// Path of the backing device.
    pub path: String,
    /// What the backing device is known by besides its path.
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

/// A backend as the table has it.
#[derive(Clone, Debug)]
pub struct BackendEntry {
    /// Its row.
    pub id: BackendId,
    /// The host that owns it.
    pub host: HostId,
    /// Random identity.
    pub uuid: [u8; 16],
    /// Path of the backing device.
    pub path: String,
    /// What the backing device is known by besides its path.
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
}

/// What a new blkdev is to be.
#[derive(Clone, Debug)]
pub struct BlkdevSpec {
    /// The backend it stands on.
    pub backend: BackendId,
    /// The host that serves it.
    pub host: HostId,
    /// How it is reached, as the user asked for it.
    pub export: String,
}

/// A blkdev as the table has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlkdevEntry {
    /// Its row.
    pub id: BlkdevId,
    /// The backend it stands on.
    pub backend: BackendId,
    /// The host that serves it.
    pub host: HostId,
    /// How it is reached.
    pub export: String,
}

struct Tables<E: Environment> {
    hosts: Vec<TwoSlots<HostRow>>,
    backends: Vec<TwoSlots<BackendRow>>,
    blkdevs: Vec<TwoSlots<BlkdevRow>>,
    segments: Vec<TwoSlots<SegmentEntry>>,
    open: Vec<(BackendId, Weak<Cache<E>>)>,
}

/// A region with its tables.
pub struct Transport<E: Environment> {
    environment: Arc<E>,
    region: Arc<Region<E::Memory>>,
    superblock: Superblock,
    layout: Layout,
    tables: Mutex<E, Tables<E>>,
}

impl<E: Environment> Transport<E> {
    /// Makes a transport of a region.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] when it holds one, [`ErrorKind::Foreign`] when it holds other data, both unless
    /// `force`; [`ErrorKind::NoSpace`] when it is too small for one cache.
    pub fn format(
        environment: Arc<E>,
        region: Region<E::Memory>,
        options: &FormatOptions,
    ) -> Result<Arc<Self>> {
        let size = region.size();
        let segment_size = options.segment_size.unwrap_or_else(|| Layout::default_segment_size(size));
        let layout =
            Layout::new(size, segment_size, options.host_rows, options.backend_rows, options.blkdev_rows)?;
        let minimum = SEGMENTS_PER_LANE + 1;
        if layout.segment_count < minimum {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a region of {size} bytes holds {} segments of {segment_size}; the smallest cache needs {minimum}: \
                     use a larger region or smaller segments",
                    layout.segment_count
                ),
            ));
        }
        if !options.force {
            refuse_used(&region)?;
        }
        // 1. No superblock: from here on a crash leaves no transport.
        let second = Layout::second_superblock(layout.region_size);
        let nothing = vec![0; PAGE as usize];
        let stored = region.store(0, &nothing).and(region.store(second, &nothing));
        region.fence(stored);
        // 2. Empty tables.
        let mut stored = region.nothing_in_flight();
        let blank = vec![0; 64 * PAGE as usize];
        let mut at = layout.host_area;
        while at < layout.segment_area {
            let length = blank.len().min((layout.segment_area - at) as usize);
            stored = stored.and(region.store(at, &blank[..length]));
            at += length as u64;
        }
        region.fence(stored);
        // 3. Both superblocks: the transport is there.
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&environment.random().to_le_bytes());
        uuid[8..].copy_from_slice(&environment.random().to_le_bytes());
        let superblock = Superblock::new(&layout, uuid, environment.wall_ms());
        let stored = region.store(0, bytes_of(&superblock)).and(region.store(second, bytes_of(&superblock)));
        region.fence(stored);
        Self::open(environment, region)
    }

    /// Opens the transport of a region.
    ///
    /// # Errors
    /// [`ErrorKind::Foreign`], [`ErrorKind::Damaged`] or [`ErrorKind::Unsupported`] with what is wrong with both superblocks.
    pub fn open(environment: Arc<E>, region: Region<E::Memory>) -> Result<Arc<Self>> {
        let size = region.size();
        let (superblock, layout) = read_superblock(&region, 0).or_else(|first| {
            if size < 2 * PAGE {
                return Err(first);
            }
            read_superblock(&region, Layout::second_superblock(size)).map_err(|second| {
                // Where one copy is ours, what is wrong with it says more than "foreign".
                if first.kind() == ErrorKind::Foreign { second } else { first }
            })
        })?;
        if superblock.region_size.get() > size {
            return Err(Error::new(ErrorKind::Damaged, "the region is shorter than its transport"));
        }
        let tables = Tables {
            hosts: read_table(&region, layout.host_area, layout.host_rows),
            backends: read_table(&region, layout.backend_area, layout.backend_rows),
            blkdevs: read_table(&region, layout.blkdev_area, layout.blkdev_rows),
            segments: read_table(&region, layout.segment_table, layout.segment_count),
            open: Vec::new(),
        };
        // A predecessor that merely died may have left what was just read in a processor's cache; nothing may be
        // acknowledged on the strength of a row that a power cut would take back.
        let mut relied_on = region
            .write_back(0, PAGE)
            .and(region.write_back(Layout::second_superblock(layout.region_size), PAGE));
        for row in &tables.hosts {
            relied_on = relied_on.and(row.write_back(&region));
        }
        for row in &tables.backends {
            relied_on = relied_on.and(row.write_back(&region));
        }
        for row in &tables.blkdevs {
            relied_on = relied_on.and(row.write_back(&region));
        }
        for row in &tables.segments {
            relied_on = relied_on.and(row.write_back(&region));
        }
        region.fence(relied_on);
        Ok(Arc::new(Self {
            environment,
            region: Arc::new(region),
            superblock,
            layout,
            tables: Mutex::<E, _>::new(tables),
        }))
    }

    /// The region.
    pub fn region(&self) -> &Region<E::Memory> {
        &self.region
    }

    /// What the transport is.
    pub fn info(&self) -> TransportInfo {
        let tables = self.tables.lock();
        TransportInfo {
            magic: MAGIC,
            version: self.superblock.version.get(),
            features: [
                self.superblock.compatible.get(),
                self.superblock.read_only_compatible.get(),
                self.superblock.incompatible.get(),
            ],
            uuid: self.superblock.uuid,
            created_ms: self.superblock.created_ms.get(),
            layout: self.layout,
            bytes_per_row: [
                HostRow::SLOT_SIZE as u32,
                BackendRow::SLOT_SIZE as u32,
                BlkdevRow::SLOT_SIZE as u32,
                SegmentEntry::SLOT_SIZE as u32,
            ],
            free_segments: tables.free_segments().len() as u32,
        }
    }

    /// Registers a host: takes the row that has its name, the row `wanted`, or the first free one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a name that does not fit or a row that does not exist, [`ErrorKind::Busy`] when the row
    /// has another name, [`ErrorKind::NoSpace`] when the table is full.
    pub fn register_host(&self, name: &str, wanted: Option<HostId>) -> Result<HostId> {
        if name.is_empty() || name.chars().any(|c| c.is_control() || c == '/') {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "'{}' is no host name: it must not be empty and hold no '/' or control character",
                    name.escape_default()
                ),
            ));
        }
        let (name_length, name_field) = encode_text("host name", name)?;
        let mut tables = self.tables.lock();
        let named = tables.hosts.iter().position(|row| {
            row.content().is_some_and(|row| {
                row.state.get() == STATE_ACTIVE
                    && decode_text("host name", row.name_length, &row.name).is_ok_and(|known| known == name)
            })
        });
        let row = match (wanted, named) {
            (Some(wanted), _) if wanted.index() >= tables.hosts.len() => {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("host id {wanted} is out of range: the table has {} rows", tables.hosts.len()),
                ));
            }
            (Some(wanted), Some(named)) if wanted.index() != named => {
                return Err(Error::new(
                    ErrorKind::AlreadyExists,
                    format!("host '{name}' is registered with id {named}"),
                ));
            }
            (_, Some(named)) => return Ok(HostId(named as u32)),
            (Some(wanted), None) => {
                if is_active(tables.hosts[wanted.index()].content(), |row| row.state.get()) {
                    return Err(Error::new(
                        ErrorKind::Busy,
                        format!("host id {wanted} belongs to another host"),
                    ));
                }
                wanted.index()
            }
            (None, None) => first_free(&tables.hosts, |row| row.state.get(), "host")?,
        };
        let ownership = tables.hosts[row].content().map_or(1, |old| old.ownership.get() + 1);
        let stored = tables.hosts[row].store(
            &self.region,
            HostRow {
                state: STATE_ACTIVE.into(),
                name_length,
                ownership: ownership.into(),
                name: name_field,
                registered_ms: self.environment.wall_ms().into(),
                reserved: [0; 152],
            },
        );
        self.region.fence(stored);
        Ok(HostId(row as u32))
    }

    /// Removes a host.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::Busy`] while backends or blkdevs belong to it.
    pub fn unregister_host(&self, host: HostId) -> Result<()> {
        if let Some(backend) = self.backends()?.iter().find(|backend| backend.host == host) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("host {host} still has backend {}: stop it first", backend.id),
            ));
        }
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.hosts, host.index(), |row| row.state.get(), "host")?;
        let Some(mut content) = row.content().copied() else { return Ok(()) };
        content.state = STATE_FREE.into();
        let stored = row.store(&self.region, content);
        self.region.fence(stored);
        Ok(())
    }

    /// All hosts.
    pub fn hosts(&self) -> Vec<HostEntry> {
        let tables = self.tables.lock();
        rows(&tables.hosts, |row| row.state.get())
            .map(|(id, row)| HostEntry {
                id: HostId(id),
                // A name that is damaged is no reason to hide the host.
                name: decode_text("host name", row.name_length, &row.name).unwrap_or_default(),
            })
            .collect()
    }

    /// Makes a backend, and its cache if it has one.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] when the cache is larger than the free space or smaller than the smallest one, or the table is
    /// full; [`ErrorKind::InvalidArgument`] for a spec that is out of its ranges.
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
        if let Some(plan) = &plan {
            // 1. The segments name the cache. Without a row they are free all the same.
            let mut stored = self.region.nothing_in_flight();
            for segment in &plan.segments {
                stored = stored.and(tables.segments[segment.index()].store(
                    &self.region,
                    SegmentEntry {
                        backend: (row as u32).into(),
                        reserved: 0.into(),
                        cache_id: cache_id.into(),
                        reserved2: [0; 32],
                    },
                ));
            }
            self.region.fence(stored);
            // 2. The state block of an empty cache.
            self.initialise_state(plan, cache_id);
        }
        // 3. The row: now the backend is there.
        let ownership = tables.backends[row].content().map_or(1, |old| old.ownership.get() + 1);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&self.environment.random().to_le_bytes());
        uuid[8..].copy_from_slice(&self.environment.random().to_le_bytes());
        let stored = tables.backends[row].store(
            &self.region,
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
                cache_mode: 0.into(),
                path_length,
                identity_length,
                uuid,
                created_ms: self.environment.wall_ms().into(),
                path,
                identity,
                reserved: [0; 128],
            },
        );
        self.region.fence(stored);
        Ok(BackendId(row as u32))
    }

    fn plan_cache(&self, tables: &Tables<E>, bytes: u64, spec: &BackendSpec) -> Result<CachePlan> {
        let free = tables.free_segments();
        let size = self.layout.segment_size;
        let wanted = bytes / size;
        let minimum = u64::from(SEGMENTS_PER_LANE + 1);
        if wanted < minimum {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a cache of {bytes} bytes is too small: at least {minimum} segments of {size} bytes, {} bytes, are needed",
                    minimum * size
                ),
            ));
        }
        if wanted > free.len() as u64 {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a cache of {bytes} bytes is larger than the free space of the transport, {} bytes",
                    free.len() as u64 * size
                ),
            ));
        }
        let segments: Vec<SegmentId> = free.into_iter().take(wanted as usize).collect();
        let mut lanes = 1;
        while lanes * 2 <= spec.lanes_max
            && (segments.len() as u32 - 1) / (lanes * 2) >= SEGMENTS_PER_LANE
            && (StateShape { lanes: lanes * 2 }).fits(size)
        {
            lanes *= 2;
        }
        let map = LaneMap { lanes };
        if spec.size > map.device_max() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "a backing device of {} bytes is too large for a cache of {lanes} lanes, which reaches {} bytes: use a larger cache",
                    spec.size,
                    map.device_max()
                ),
            ));
        }
        Ok(CachePlan { segments, lanes })
    }

    fn initialise_state(&self, plan: &CachePlan, cache_id: u64) {
        let state = StateShape { lanes: plan.lanes };
        let base = self.layout.segment_base(plan.segments[0]);
        let absolute = |[a, b]: [u64; 2]| [base + a, base + b];
        let header = SegmentHeader {
            crc: 0.into(),
            magic: STATE_MAGIC.into(),
            cache_id: cache_id.into(),
            segment: plan.segments[0].0.into(),
            generation: 1.into(),
            salt: self.environment.random().into(),
            lane: 0.into(),
            lanes: plan.lanes.into(),
            ordinal: 0.into(),
            ownership: 1.into(),
            run: 0.into(),
            cut: 0.into(),
            first_sequence: 0.into(),
            epoch: 0.into(),
            reserved: [0; 40],
        }
        .sealed();
        let copy = base + self.layout.segment_shape().header_copy();
        let mut stored =
            self.region.store(base, bytes_of(&header)).and(self.region.store(copy, bytes_of(&header)));
        let mut drained = TwoSlots::<Drained>::empty(absolute(state.drained()), 0);
        stored = stored.and(drained.clear(&self.region));
        for lane in (0..plan.lanes).map(LaneId) {
            let place = u64::from(lane.0);
            let mut mark = TwoSlots::<LaneMark>::empty(absolute(state.mark(lane)), place);
            let mut tail = TwoSlots::<LaneTail>::empty(absolute(state.tail(lane)), place);
            stored = stored.and(mark.clear(&self.region)).and(tail.clear(&self.region));
        }
        self.region.fence(stored);
        // Stale slots are gone; now the first tails.
        let mut stored = self.region.nothing_in_flight();
        for lane in (0..plan.lanes).map(LaneId) {
            let mut tail = TwoSlots::<LaneTail>::empty(absolute(state.tail(lane)), u64::from(lane.0));
            stored =
                stored.and(tail.store(
                    &self.region,
                    LaneTail { ordinal: 1.into(), ownership: 1.into(), reserved: [0; 32] },
                ));
        }
        stored = stored.and(drained.store(
            &self.region,
            Drained {
                epoch: 0.into(),
                void_until: 0.into(),
                wall_ms: self.environment.wall_ms().into(),
                ownership: 1.into(),
                reserved: [0; 16],
            },
        ));
        self.region.fence(stored);
    }

    /// All backends.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] for a row whose checksum is right and whose content is not.
    pub fn backends(&self) -> Result<Vec<BackendEntry>> {
        let tables = self.tables.lock();
        rows(&tables.backends, |row| row.state.get()).map(|(id, row)| backend_entry(id, row)).collect()
    }

    /// One backend.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::Damaged`] as in [`backends`](Self::backends).
    pub fn backend(&self, id: BackendId) -> Result<BackendEntry> {
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        row.content().map_or_else(|| Err(no_such("backend", id.index())), |row| backend_entry(id.0, row))
    }

    /// Keeps settings for the next start; a cache that is open is changed by
    /// [`Cache::set_settings`].
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
        })
    }

    /// Removes a backend; its segments are free. What its cache holds is dropped: the caller has drained it, or means to.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], or [`ErrorKind::Busy`] while its cache is open or a blkdev stands on it.
    pub fn remove_backend(&self, id: BackendId) -> Result<()> {
        if let Some(blkdev) = self.blkdevs().iter().find(|blkdev| blkdev.backend == id) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("blkdev {} stands on backend {id}: stop it first", blkdev.id),
            ));
        }
        if self.tables.lock().open.iter().any(|(open, cache)| *open == id && cache.strong_count() > 0) {
            return Err(Error::new(ErrorKind::Busy, format!("the cache of backend {id} is open")));
        }
        self.update_backend(id, |row| row.state = STATE_FREE.into())
    }

    fn update_backend(&self, id: BackendId, change: impl FnOnce(&mut BackendRow)) -> Result<()> {
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        let Some(mut content) = row.content().copied() else { return Err(no_such("backend", id.index())) };
        change(&mut content);
        let stored = row.store(&self.region, content);
        self.region.fence(stored);
        Ok(())
    }

    /// Makes a blkdev on a backend.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for the backend, [`ErrorKind::Busy`] when one stands on it, [`ErrorKind::NoSpace`] when the
    /// table is full.
    pub fn create_blkdev(&self, spec: &BlkdevSpec) -> Result<BlkdevId> {
        self.backend(spec.backend)?;
        if let Some(blkdev) = self.blkdevs().iter().find(|blkdev| blkdev.backend == spec.backend) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("blkdev {} stands on backend {} already", blkdev.id, spec.backend),
            ));
        }
        let (export_length, export) = encode_text("export", &spec.export)?;
        let mut tables = self.tables.lock();
        let backend_uuid =
            tables.backends[spec.backend.index()].content().map_or([0; 16], |backend| backend.uuid);
        let row = first_free(&tables.blkdevs, |row| row.state.get(), "blkdev")?;
        let ownership = tables.blkdevs[row].content().map_or(1, |old| old.ownership.get() + 1);
        let stored = tables.blkdevs[row].store(
            &self.region,
            BlkdevRow {
                state: STATE_ACTIVE.into(),
                host: spec.host.0.into(),
                backend: spec.backend.0.into(),
                export_length,
                ownership: ownership.into(),
                backend_uuid,
                export,
                reserved: [0; 200],
            },
        );
        self.region.fence(stored);
        Ok(BlkdevId(row as u32))
    }

    /// All blkdevs whose backend is still the one they were made on.
    pub fn blkdevs(&self) -> Vec<BlkdevEntry> {
        let tables = self.tables.lock();
        rows(&tables.blkdevs, |row| row.state.get())
            .filter(|(_, row)| {
                tables.backends.get(row.backend.get() as usize).and_then(TwoSlots::content).is_some_and(
                    |backend| backend.state.get() == STATE_ACTIVE && backend.uuid == row.backend_uuid,
                )
            })
            .map(|(id, row)| BlkdevEntry {
                id: BlkdevId(id),
                backend: BackendId(row.backend.get()),
                host: HostId(row.host.get()),
                export: decode_text("export", row.export_length, &row.export).unwrap_or_default(),
            })
            .collect()
    }

    /// Removes a blkdev.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub fn remove_blkdev(&self, id: BlkdevId) -> Result<()> {
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.blkdevs, id.index(), |row| row.state.get(), "blkdev")?;
        let Some(mut content) = row.content().copied() else { return Err(no_such("blkdev", id.index())) };
        content.state = STATE_FREE.into();
        let stored = row.store(&self.region, content);
        self.region.fence(stored);
        Ok(())
    }

    /// Opens the cache of a backend and recovers what its log holds.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::InvalidArgument`] for a backend without a cache, [`ErrorKind::Busy`] when it is open,
    /// [`ErrorKind::Damaged`] when the row contradicts the region.
    pub fn open_cache(&self, id: BackendId) -> Result<Arc<Cache<E>>> {
        let entry = self.backend(id)?;
        let mut tables = self.tables.lock();
        tables.open.retain(|(_, cache)| cache.strong_count() > 0);
        if tables.open.iter().any(|(open, _)| *open == id) {
            return Err(Error::new(ErrorKind::Busy, format!("the cache of backend {id} is open already")));
        }
        let Some(row) = tables.backends[id.index()].content().copied() else {
            return Err(no_such("backend", id.index()));
        };
        if row.cache_id.get() == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("backend {id} has no cache")));
        }
        let damaged = |what: &str| Error::new(ErrorKind::Damaged, format!("backend {id}: {what}"));
        let lanes = LaneMap { lanes: row.lanes.get() };
        let state_segment = SegmentId(row.state_segment.get());
        if !row.lanes.get().is_power_of_two()
            || !(StateShape { lanes: row.lanes.get() }).fits(self.layout.segment_size)
            || entry.size > lanes.device_max()
        {
            return Err(damaged("the number of lanes is impossible"));
        }
        let mut segments = tables.segments_of(id, row.cache_id.get());
        let Some(state_at) = segments.iter().position(|segment| *segment == state_segment) else {
            return Err(damaged("its state segment does not belong to it"));
        };
        segments.remove(state_at);
        let cache = Cache::recover(Opening {
            environment: Arc::clone(&self.environment),
            region: Arc::clone(&self.region),
            layout: self.layout,
            identity: Identity {
                backend: id,
                cache_id: row.cache_id.get(),
                ownership: row.ownership.get(),
                lanes,
                size: entry.size,
                sector: entry.sector,
                data_crc: entry.data_crc,
                state_base: self.layout.segment_base(state_segment),
            },
            segments,
            settings: entry.settings,
        })?;
        let cache = Arc::new(cache);
        tables.open.push((id, Arc::downgrade(&cache)));
        Ok(cache)
    }
}

struct CachePlan {
    /// The state segment first.
    segments: Vec<SegmentId>,
    lanes: u32,
}

impl<E: Environment> Tables<E> {
    /// The owner of a segment, if its row and the backend's agree.
    fn owner(&self, segment: usize) -> Option<BackendId> {
        let entry = self.segments[segment].content()?;
        let backend = entry.backend.get();
        let row = self.backends.get(backend as usize)?.content()?;
        (row.state.get() == STATE_ACTIVE && row.cache_id.get() != 0 && row.cache_id == entry.cache_id)
            .then_some(BackendId(backend))
    }

    fn free_segments(&self) -> Vec<SegmentId> {
        let segments = 0..self.segments.len();
        segments
            .filter(|segment| self.owner(*segment).is_none())
            .map(|segment| SegmentId(segment as u32))
            .collect()
    }

    fn segments_of(&self, backend: BackendId, cache_id: u64) -> Vec<SegmentId> {
        let segments = 0..self.segments.len();
        segments
            .filter(|segment| {
                self.owner(*segment) == Some(backend)
                    && self.segments[*segment].content().is_some_and(|entry| entry.cache_id.get() == cache_id)
            })
            .map(|segment| SegmentId(segment as u32))
            .collect()
    }
}

fn read_superblock<P: Pmem>(region: &Region<P>, at: u64) -> Result<(Superblock, Layout)> {
    let mut bytes = [0; size_of::<Superblock>()];
    region.load(at, &mut bytes)?;
    Superblock::decode(&bytes)
        .ok_or_else(|| Error::new(ErrorKind::Foreign, "the region is too small for a superblock"))?
        .verify(region.size())
}

/// A region that holds anything is formatted only by force.
fn refuse_used<P: Pmem>(region: &Region<P>) -> Result<()> {
    let mut page = vec![0; PAGE as usize];
    for at in [0, Layout::second_superblock(region.size())] {
        region.load(at, &mut page)?;
        if Superblock::decode(&page).is_some_and(|block| block.is_ours()) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                "the region holds a CBD transport; to destroy it and all data in it, format with --force",
            ));
        }
        if at == 0 && page.iter().any(|byte| *byte != 0) {
            return Err(Error::new(
                ErrorKind::Foreign,
                "the region holds data that is not CBD's; to destroy it, format with --force",
            ));
        }
    }
    Ok(())
}

fn read_table<P: Pmem, T: SlotContent>(region: &Region<P>, area: u64, rows: u32) -> Vec<TwoSlots<T>> {
    (0..rows).map(|row| TwoSlots::read(region, Layout::slots::<T>(area, rows, row), u64::from(row))).collect()
}

fn is_active<T>(row: Option<&T>, state: impl Fn(&T) -> u32) -> bool {
    row.is_some_and(|row| state(row) == STATE_ACTIVE)
}

fn rows<T: SlotContent>(
    table: &[TwoSlots<T>],
    state: impl Fn(&T) -> u32 + Copy,
) -> impl Iterator<Item = (u32, &T)> {
    table.iter().enumerate().filter_map(move |(id, row)| {
        Some((id as u32, row.content().filter(|row| state(row) == STATE_ACTIVE)?))
    })
}

fn first_free<T: SlotContent>(
    table: &[TwoSlots<T>],
    state: impl Fn(&T) -> u32 + Copy,
    what: &str,
) -> Result<usize> {
    table.iter().position(|row| !is_active(row.content(), state)).ok_or_else(|| {
        Error::new(
            ErrorKind::NoSpace,
            format!("the {what} table of the transport is full ({} rows)", table.len()),
        )
    })
}

fn active_row<'a, T: SlotContent>(
    table: &'a mut [TwoSlots<T>],
    row: usize,
    state: impl Fn(&T) -> u32 + Copy,
    what: &str,
) -> Result<&'a mut TwoSlots<T>> {
    table.get_mut(row).filter(|row| is_active(row.content(), state)).ok_or_else(|| no_such(what, row))
}

fn no_such(what: &str, row: usize) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no {what} {row}"))
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
    if row.cache_mode.get() != 0 {
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
    })
}
