//! A transport: the superblock and the tables of a region, and the allocation of segments to backends.
//!
//! Invariants: a backend's row is the commit point. A segment names the cache that it was assigned to, and belongs to it only
//! while a row names the same cache. So a crash while a backend is created or removed leaves free segments, never a partial
//! backend.

mod attach;
mod backends;
mod blkdevs;
mod caches;
mod channels;
mod extend;
mod grow;
mod hosts;
mod joined;
mod metadata;
mod moved;
mod moves;
mod names;
pub mod owner;
mod pins;
mod remnants;
mod resize;
mod rows;
mod shared;
mod superblocks;
mod uses;
mod view;

pub use backends::{BackendEntry, BackendSpec};
pub use blkdevs::{BlkdevEntry, BlkdevSpec};
pub use channels::{ChannelArea, RemoteBlkdev, RemoteState, ServedBlkdev};
pub use hosts::HostEntry;
pub use moved::FormerDisk;
pub use moves::{MoveAnswer, MoveOffer, MoveRefusal, MoveState, MoveWish};
pub use pins::StoredPins;
pub use shared::SharedSpace;
use superblocks::Superblocks;
pub use uses::{Mixed, Pages};

use crate::{Cache, Environment, Mutex, lane_map::SEGMENTS_PER_LANE, slots::TwoSlots};
use alloc::{
    boxed::Box,
    format,
    string::String,
    sync::{Arc, Weak},
    vec,
    vec::Vec,
};
use cbd_format::{
    BackendEntry as BackendRow, BlkdevEntry as BlkdevRow, HostEntry as HostRow, Layout, PAGE, SegmentEntry,
    SegmentShape, SlotContent, Superblock,
    record::bytes_of,
    superblock::{FEATURE_BYPASS, FEATURE_SHARED, FEATURE_USE_NOTES, MAGIC},
    tables::STATE_ACTIVE,
};
use cbd_types::{BackendId, Error, ErrorKind, MutationPoint, Pmem, Region, Result, SegmentId, Size};

/// Bytes of the smallest cache in any region: one lane and the state segment, with the smallest segment size.
pub const CACHE_SIZE_MIN: u64 = (SEGMENTS_PER_LANE as u64 + 1) * cbd_format::layout::SEGMENT_SIZE_MIN;

/// Options for formatting a region.
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

/// The properties of a transport.
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
    /// The offsets and sizes of all areas.
    pub layout: Layout,
    /// Bytes of a row's slot in the host, backend, blkdev and segment tables.
    pub bytes_per_row: [u32; 4],
    /// Segments that belong to no backend.
    pub free_segments: u32,
}

struct Tables<E: Environment> {
    superblocks: Superblocks,
    hosts: Vec<TwoSlots<HostRow>>,
    backends: Vec<TwoSlots<BackendRow>>,
    blkdevs: Vec<TwoSlots<BlkdevRow>>,
    segments: Vec<TwoSlots<SegmentEntry>>,
    open: Vec<(BackendId, User<E>)>,
    /// What this host has; `None` in a region of one host, which has all.
    shares: Option<joined::Shares>,
}

/// The user of a cache. An entry is removed after the referenced object was dropped.
enum User<E: Environment> {
    /// Recovery is running, without the lock of the tables.
    Opening(Weak<()>),
    Open(Weak<Cache<E>>),
}

impl<E: Environment> Tables<E> {
    /// The cache of a backend, if it is open.
    fn open_caches(&self, id: BackendId) -> impl Iterator<Item = Arc<Cache<E>>> + '_ {
        self.open.iter().filter(move |(known, _)| *known == id).filter_map(|(_, user)| match user {
            User::Open(cache) => cache.upgrade(),
            User::Opening(_) => None,
        })
    }
}

impl<E: Environment> User<E> {
    fn is_there(&self) -> bool {
        match self {
            Self::Opening(token) => token.strong_count() > 0,
            Self::Open(cache) => cache.strong_count() > 0,
        }
    }
}

/// The error for a region that is too small for a cache, with the size of the smallest sufficient one.
fn too_small(size: u64, segment_size: u64, layout_of: impl Fn(u64) -> Result<Layout>) -> Error {
    let minimum = u64::from(SEGMENTS_PER_LANE + 1);
    // The tables occupy the space of some segments.
    let sizes = (minimum..minimum + 256).map(|segments| segments * segment_size);
    let holds_a_cache =
        |size: &u64| layout_of(*size).is_ok_and(|layout| layout.segment_count > SEGMENTS_PER_LANE);
    let smallest = sizes.into_iter().find(holds_a_cache);
    let limit = smallest.map_or_else(String::new, |smallest| format!(", {} in all", Size(smallest)));
    let text = format!(
        "a region of {} is too small: the smallest cache needs {minimum} segments of {}{limit}; use a larger region or smaller segments",
        Size(size),
        Size(segment_size)
    );
    Error::new(ErrorKind::NoSpace, text)
}

/// A region with its tables.
pub struct Transport<E: Environment> {
    environment: Arc<E>,
    region: Arc<Region<E::Memory>>,
    /// Bytes of a segment.
    segment_size: u64,
    /// Changes while the tables are locked. Its lock is held for no other lock.
    layout: Mutex<E, Box<Layout>>,
    tables: Arc<Mutex<E, Tables<E>>>,
    /// This process as a host of a shared region.
    joined: Option<joined::Joined<E>>,
}

impl<E: Environment> Transport<E> {
    /// Creates a transport in a region of one host, and opens it.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] if the region holds a transport or the tables of one, [`ErrorKind::Foreign`] if it holds
    /// other data, both unless `force` is set; [`ErrorKind::NoSpace`] if it is too small for one cache.
    pub fn format(
        environment: Arc<E>,
        region: Region<E::Memory>,
        options: &FormatOptions,
    ) -> Result<Arc<Self>> {
        let region = Self::create(&environment, region, options, false)?;
        // Opening also syncs the superblocks to the disk of an ordinary file.
        Self::open(environment, region)
    }

    /// Creates a transport in a region that at most [`host_rows`](FormatOptions::host_rows) hosts share.
    /// [`open_shared`](Self::open_shared) opens it.
    ///
    /// # Errors
    /// As [`format`](Self::format), and [`ErrorKind::Unsupported`] for a region in an ordinary file.
    pub fn format_shared(
        environment: &Arc<E>,
        region: Region<E::Memory>,
        options: &FormatOptions,
    ) -> Result<Region<E::Memory>> {
        if region.mixes_pages() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a region in an ordinary file cannot be shared: a crash of the machine would leave old and new pages of what its \
                 hosts decided; use a DAX file system, a device-DAX device, or for a trial a file in /dev/shm",
            ));
        }
        Self::create(environment, region, options, true)
    }

    /// Creates a transport in a region, which is then to be opened.
    fn create(
        environment: &Arc<E>,
        region: Region<E::Memory>,
        options: &FormatOptions,
        shared: bool,
    ) -> Result<Region<E::Memory>> {
        let size = region.size();
        let segment_size = options.segment_size.unwrap_or_else(|| Layout::default_segment_size(size));
        let FormatOptions { host_rows, backend_rows, blkdev_rows, .. } = *options;
        let layout_of = |size| {
            let new = if shared { Layout::shared } else { Layout::new };
            new(size, segment_size, host_rows, backend_rows, blkdev_rows)
        };
        let layout = match layout_of(size) {
            Ok(layout) if layout.segment_count > SEGMENTS_PER_LANE => layout,
            Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error),
            _ => return Err(too_small(size, segment_size, layout_of)),
        };
        if !options.force {
            refuse_used(&region)?;
        }
        // 1. Erase the superblocks: a crash from here on leaves no transport.
        let second = Layout::second_superblock(layout.region_size);
        let nothing = vec![0; PAGE as usize];
        let stored = region.store(0, &nothing).and(region.store(second, &nothing));
        region.fence(MutationPoint::FormatEraseFence, stored);
        region.sync(MutationPoint::FormatEraseSync, 0, PAGE)?;
        region.sync(MutationPoint::FormatEraseSync, second, PAGE)?;
        // 2. Empty tables.
        let mut stored = region.nothing_in_flight();
        let blank = vec![0; 64 * PAGE as usize];
        let first = if shared { PAGE } else { layout.host_area };
        let mut at = first;
        while at < layout.segment_area {
            let length = blank.len().min((layout.segment_area - at) as usize);
            stored = stored.and(region.store(at, &blank[..length]));
            at += length as u64;
        }
        region.fence(MutationPoint::FormatBlankFence, stored);
        region.sync(MutationPoint::FormatBlankSync, first, layout.segment_area - first)?;
        // 3. Both superblocks: from now on the transport exists.
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&environment.random().to_le_bytes());
        uuid[8..].copy_from_slice(&environment.random().to_le_bytes());
        // The superblocks of a shared region have no writer after this, so they have every feature that a host may need.
        let features = match (shared, region.mixes_pages()) {
            (true, _) => FEATURE_SHARED | FEATURE_BYPASS,
            (false, true) => FEATURE_USE_NOTES,
            (false, false) => 0,
        };
        let superblock = Superblock::new(&layout, uuid, environment.wall_ms()).with_incompatible(features);
        let stored = region.store(0, bytes_of(&superblock)).and(region.store(second, bytes_of(&superblock)));
        region.fence(MutationPoint::FormatSuperblockFence, stored);
        Ok(region)
    }

    /// Refuses a region that holds a transport, the tables of one, or other data in its first page.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] and [`ErrorKind::Foreign`].
    pub fn refuse_used(region: &Region<E::Memory>) -> Result<()> {
        refuse_used(region)
    }

    /// Opens the transport of a region.
    ///
    /// # Errors
    /// [`ErrorKind::Foreign`], [`ErrorKind::Damaged`] or [`ErrorKind::Unsupported`] with the errors of both superblocks. A
    /// region without a superblock that has the tables of a transport is damaged. A system error if a crash of the machine
    /// mixes pages and the superblocks and tables cannot be synced.
    pub fn open(environment: Arc<E>, region: Region<E::Memory>) -> Result<Arc<Self>> {
        Self::open_held(environment, Arc::new(region))
    }

    /// As [`open`](Self::open), for a region that its caller goes on to use.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_held(environment: Arc<E>, region: Arc<Region<E::Memory>>) -> Result<Arc<Self>> {
        let superblocks = Superblocks::read(&region).map_err(|error| match error.kind() {
            ErrorKind::Foreign => remnants::without_superblock(&region),
            _ => error,
        })?;
        let layout = Box::new(superblocks.layout());
        if layout.shared_parts().is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the region is shared by several hosts, and is opened only as one of them",
            ));
        }
        let tables = Tables::read(superblocks, &region)?;
        Ok(Arc::new(Self {
            environment,
            region,
            segment_size: layout.segment_size,
            layout: Mutex::<E, _>::new(layout),
            tables,
            joined: None,
        }))
    }

    /// The present layout of the region.
    fn layout(&self) -> Layout {
        **self.layout.lock()
    }

    fn segment_base(&self, segment: SegmentId) -> u64 {
        self.layout.lock().segment_base(segment)
    }

    fn segment_count(&self) -> u32 {
        self.layout.lock().segment_count
    }

    const fn segment_shape(&self) -> SegmentShape {
        SegmentShape { size: self.segment_size }
    }

    /// Abandons all open caches ([`Cache::abandon`]): another host has taken the region.
    pub fn abandon(&self) {
        let tables = self.tables.lock();
        let caches = tables.open.iter().filter_map(|(_, user)| match user {
            User::Open(cache) => cache.upgrade(),
            User::Opening(_) => None,
        });
        let caches: Vec<_> = caches.collect();
        // The last reference to a cache is not dropped under the lock.
        drop(tables);
        caches.iter().for_each(|cache| cache.abandon());
    }

    /// The region, for a caller that needs it beside the transport.
    pub fn shared_region(&self) -> Arc<Region<E::Memory>> {
        Arc::clone(&self.region)
    }

    /// The region.
    pub fn region(&self) -> &Region<E::Memory> {
        &self.region
    }

    /// The properties of the transport.
    pub fn info(&self) -> TransportInfo {
        let mut tables = self.tables.lock();
        let free_segments = self.free_for_this_host(&mut tables);
        let superblock = tables.superblocks.block();
        TransportInfo {
            magic: MAGIC,
            version: superblock.version.get(),
            features: [
                superblock.compatible.get(),
                superblock.read_only_compatible.get(),
                superblock.incompatible.get(),
            ],
            uuid: superblock.uuid,
            created_ms: superblock.created_ms.get(),
            layout: self.layout(),
            bytes_per_row: [
                HostRow::SLOT_SIZE as u32,
                BackendRow::SLOT_SIZE as u32,
                BlkdevRow::SLOT_SIZE as u32,
                SegmentEntry::SLOT_SIZE as u32,
            ],
            free_segments,
        }
    }
}

impl<E: Environment> Tables<E> {
    /// Reads the tables, makes them durable, and completes rows of which one slot is outdated.
    #[inline(never)]
    fn read(superblocks: Superblocks, region: &Region<E::Memory>) -> Result<Arc<Mutex<E, Self>>> {
        let layout = superblocks.layout();
        let tables = Arc::new(Mutex::<E, _>::new(Self {
            superblocks,
            hosts: read_table(region, layout.host_area, layout.host_rows),
            backends: read_table(region, layout.backend_area, layout.backend_rows),
            blkdevs: read_table(region, layout.blkdev_area, layout.blkdev_rows),
            segments: read_segments(region, &layout),
            open: Vec::new(),
            shares: None,
        }));
        let mut now = tables.lock();
        now.keep_what_was_read(region)?;
        now.complete(region)?;
        drop(now);
        Ok(tables)
    }

    /// Makes the superblocks and rows that were just read durable, including on the disk of an ordinary file.
    ///
    /// After a mere process crash they may be only in a processor's cache, or in the kernel's page cache of a file. Nothing
    /// may be acknowledged that relies on a row that a power failure would revert. No superblock may be stored while the disk
    /// may still be writing the other one.
    ///
    /// # Errors
    /// The system error.
    fn keep_what_was_read(&self, region: &Region<E::Memory>) -> Result<()> {
        let mut relied_on = self.superblocks.write_back(region);
        for row in &self.hosts {
            relied_on = relied_on.and(row.write_back(region, MutationPoint::OpenHostsWriteBack));
        }
        for row in &self.backends {
            relied_on = relied_on.and(row.write_back(region, MutationPoint::OpenBackendsWriteBack));
        }
        for row in &self.blkdevs {
            relied_on = relied_on.and(row.write_back(region, MutationPoint::OpenBlkdevsWriteBack));
        }
        for row in &self.segments {
            relied_on = relied_on.and(row.write_back(region, MutationPoint::OpenSegmentsWriteBack));
        }
        for (at, length) in self.superblocks.tables() {
            relied_on = relied_on.and(region.touch_pages(MutationPoint::SyncAgain, at, length));
        }
        region.fence(MutationPoint::OpenFence, relied_on);
        self.superblocks.sync(region).map_err(not_opened)?;
        self.superblocks.erase_former(region).map_err(not_opened)?;
        self.sync_rows(region, MutationPoint::OpenSync)
    }

    /// For each row of which a crash left one slot outdated, stores the content durably into that slot too, including on the
    /// disk of an ordinary file.
    ///
    /// # Errors
    /// The system error.
    fn complete(&mut self, region: &Region<E::Memory>) -> Result<()> {
        let is_behind = any_behind(&self.hosts)
            || any_behind(&self.backends)
            || any_behind(&self.blkdevs)
            || any_behind(&self.segments);
        let mut stored = region.nothing_in_flight();
        for row in &mut self.hosts {
            stored = stored.and(row.complete(region));
        }
        for row in &mut self.backends {
            stored = stored.and(row.complete(region));
        }
        for row in &mut self.blkdevs {
            stored = stored.and(row.complete(region));
        }
        for row in &mut self.segments {
            stored = stored.and(row.complete(region));
        }
        region.fence(MutationPoint::OpenWholeFence, stored);
        if is_behind { self.sync_rows(region, MutationPoint::OpenWholeSync) } else { Ok(()) }
    }

    fn sync_rows(&self, region: &Region<E::Memory>, point: MutationPoint) -> Result<()> {
        for (at, length) in self.superblocks.tables() {
            region.sync(point, at, length).map_err(not_opened)?;
        }
        Ok(())
    }

    /// The owner of a segment, if its row and the backend's row agree.
    fn owner(&self, segment: usize) -> Option<BackendId> {
        if self.shares.as_ref().is_some_and(|shares| !shares.has_segment(segment)) {
            return None;
        }
        let entry = self.segments[segment].content()?;
        let backend = entry.backend.get();
        let row = self.backends.get(backend as usize)?.content()?;
        let is_owner =
            row.state.get() == STATE_ACTIVE && row.cache_id.get() != 0 && row.cache_id == entry.cache_id;
        is_owner.then_some(BackendId(backend))
    }

    /// Whether the cache of a backend is open, or is being opened.
    fn is_open(&mut self, backend: BackendId) -> bool {
        self.open.retain(|(_, user)| user.is_there());
        self.open.iter().any(|(open, _)| *open == backend)
    }

    /// Whether a segment may hold data of a backend whose row is lost, or the segment's own row is lost, so that its owner is
    /// unknown.
    fn may_be_of_lost_row(&self, segment: usize) -> bool {
        let entry = &self.segments[segment];
        let row = entry.content().and_then(|entry| self.backends.get(entry.backend.get() as usize));
        entry.is_lost() || row.is_some_and(TwoSlots::is_lost) || self.may_be_of_lost_blkdev(segment)
    }

    /// Whether both copies of the row of a backend are lost and there is evidence that the backend existed: a segment or a
    /// blkdev that names it, or so many lost segment rows that all segments of a cache may be among them. A row that nothing
    /// names was never used, or was that of a backend without a cache and without a blkdev.
    fn is_backend_lost(&self, backend: usize) -> bool {
        if !self.backends.get(backend).is_some_and(TwoSlots::is_lost) {
            return false;
        }
        let names_it = |segment: &TwoSlots<SegmentEntry>| {
            segment
                .content()
                .is_some_and(|entry| entry.backend.get() as usize == backend && entry.cache_id.get() != 0)
        };
        let stands_on_it = |row: &TwoSlots<BlkdevRow>| {
            row.content()
                .is_some_and(|row| row.state.get() == STATE_ACTIVE && row.backend.get() as usize == backend)
        };
        let lost = self.segments.iter().filter(|segment| segment.is_lost()).count();
        lost > SEGMENTS_PER_LANE as usize
            || self.segments.iter().any(names_it)
            || self.blkdevs.iter().any(stands_on_it)
    }

    fn free_segments(&self) -> Vec<SegmentId> {
        let segments = 0..self.segments.len();
        segments
            .filter(|segment| self.shares.as_ref().is_none_or(|shares| shares.has_segment(*segment)))
            .filter(|segment| !self.is_used(*segment))
            .filter(|segment| !self.may_be_of_lost_row(*segment))
            .map(|segment| SegmentId(segment as u32))
            .collect()
    }

    fn segments_of(&self, backend: BackendId) -> Vec<SegmentId> {
        let segments = 0..self.segments.len();
        segments
            .filter(|segment| self.owner(*segment) == Some(backend))
            .map(|segment| SegmentId(segment as u32))
            .collect()
    }
}

/// Refuses a region that holds a transport, the tables of one, or other data in its first page. It is called unless the
/// caller forces the format.
fn refuse_used<P: Pmem>(region: &Region<P>) -> Result<()> {
    if remnants::holds_rows(region) {
        return Err(Error::new(
            ErrorKind::AlreadyExists,
            "the region holds a CBD transport, or the tables of one whose superblocks are gone; to destroy it and all data \
             in it, format with --force",
        ));
    }
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

fn any_behind<T: SlotContent>(table: &[TwoSlots<T>]) -> bool {
    table.iter().any(TwoSlots::is_behind)
}

fn not_opened(error: Error) -> Error {
    error.while_doing("the region was not opened: what it says of itself must be on its disk first")
}

#[inline(never)]
fn read_table<P: Pmem, T: SlotContent>(region: &Region<P>, area: u64, rows: u32) -> Vec<TwoSlots<T>> {
    (0..rows).map(|row| TwoSlots::read(region, Layout::slots::<T>(area, rows, row), u64::from(row))).collect()
}

#[inline(never)]
fn read_segments<P: Pmem>(region: &Region<P>, layout: &Layout) -> Vec<TwoSlots<SegmentEntry>> {
    let all = (0..layout.segment_count).map(SegmentId);
    all.map(|id| TwoSlots::read(region, layout.segment_slots(id), u64::from(id.0))).collect()
}

#[cfg(test)]
mod tests;
