//! Backing devices and the backend table of a transport: the row of a disk, and the creation of a row for a new one.
//!
//! Elsewhere: identifying a disk (`cbd-backing`), the table (`cbd-engine`).

use crate::ProcessEnvironment;
use cbd_backing::{Backing, BackingFile, Identity, Options};
use cbd_engine::{BackendEntry, BackendSpec, Settings, SharedSpace, Transport};
use cbd_format::Superblock;
use cbd_types::{AlignedBuffer, BackendId, BackingOp, Error, ErrorKind, HostId, Name, OpToken, Pmem, Result};
use std::path::Path;

/// Bytes of a page of a region; each of its superblocks is one page.
const PAGE: u64 = 4096;

/// Enough lanes that two threads seldom contend for the same one.
const LANES_PER_PROCESSOR: u32 = 16;

/// Segments of a cache for each of its lanes. The open segment of a lane is half empty on average, so this bounds the
/// share of a small cache that holds no blocks.
const SEGMENTS_PER_LANE: u64 = 16;

/// Default number of queues of a backend: one for each processor, at most this many.
const HANDLERS_MAX: u32 = 8;

/// Properties of a disk that was inspected.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Its identity.
    pub identity: Identity,
    /// Size in bytes.
    pub size: u64,
    /// Logical sector in bytes.
    pub sector: u32,
    /// Whether it holds a transport: it is a region, or a copy of one.
    pub is_region: bool,
}

impl Disk {
    /// Inspects the disk at `path`. It is locked only during the inspection: a start locks it for the run, and checks
    /// that it is still the same disk.
    ///
    /// # Errors
    /// Those of [`BackingFile::open`].
    pub fn inspect(path: impl AsRef<Path>) -> Result<Self> {
        Self::of(&BackingFile::open(path, Options::default())?)
    }

    /// The properties of an open disk.
    ///
    /// # Errors
    /// Those of [`Backing::open_queue`].
    pub fn of(file: &BackingFile) -> Result<Self> {
        let geometry = file.geometry();
        let is_region = holds_superblock(file)?;
        Ok(Self { identity: file.identity(), size: geometry.size, sector: geometry.sector, is_region })
    }

    /// Whether `entry` is the row of this disk.
    #[must_use]
    pub fn is_of(&self, entry: &BackendEntry) -> bool {
        Identity::parse(&entry.identity).is_ok_and(|recorded| recorded.same_disk(&self.identity).is_ok())
    }
}

/// Whether the first or the last page of the disk holds a superblock of a transport. An unreadable page counts as one without
/// a superblock.
fn holds_superblock(file: &BackingFile) -> Result<bool> {
    let pages = file.geometry().size / PAGE;
    let mut queue = file.open_queue(2)?;
    let places = [0, pages.saturating_sub(1) * PAGE];
    for (token, offset) in places.into_iter().enumerate().filter(|_| pages > 0) {
        let buffer = AlignedBuffer::zeroed(PAGE as usize);
        queue.submit(OpToken(token as u64), BackingOp::Read { offset, buffer });
    }
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        let before = done.len();
        queue.wait(&mut done);
        if done.len() == before {
            break;
        }
    }
    let is_ours = |op: &BackingOp| match op {
        BackingOp::Read { buffer, .. } => Superblock::decode(buffer).is_some_and(|block| block.is_ours()),
        _ => false,
    };
    Ok(done.iter().any(|one| one.result.is_ok() && is_ours(&one.op)))
}

/// Refuses a disk that shares bytes with the disk of an existing row: a loop device over the same file, a partition of the
/// same disk.
///
/// # Errors
/// [`ErrorKind::AlreadyExists`], which names the row.
pub fn refuse_overlap(path: &str, disk: &Disk, entries: &[BackendEntry]) -> Result<()> {
    let overlaps = |entry: &&BackendEntry| {
        Identity::parse(&entry.identity).is_ok_and(|recorded| recorded.overlaps(&disk.identity))
    };
    let Some(entry) = entries.iter().find(overlaps) else { return Ok(()) };
    Err(Error::new(
        ErrorKind::AlreadyExists,
        format!(
            "{path} shows bytes of {}, which is backend {} already; the same disk is cached once: stop that backend first, or start \
             it by its own path",
            entry.path, entry.id
        ),
    ))
}

/// The properties of a new backend besides its disk.
#[derive(Clone, Debug)]
pub struct NewBackend {
    /// The host that owns it.
    pub host: HostId,
    /// Path of the disk.
    pub path: String,
    /// Bytes of its cache; `None` for a backend without a cache.
    pub cache_bytes: Option<u64>,
    /// Number of queues that serve it.
    pub handlers: u32,
    /// Whether data is checksummed.
    pub data_crc: bool,
    /// Settings.
    pub settings: Settings,
    /// Its name.
    pub name: Option<Name>,
}

impl NewBackend {
    /// Creates the backend's row, and its cache if it has one.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a disk that is a region, and those of [`Transport::create_backend`].
    pub fn create(self, transport: &Transport<ProcessEnvironment>, disk: &Disk) -> Result<BackendId> {
        self.create_sharing(transport, disk, None)
    }

    /// As [`create`](Self::create), with a cache that shares its space.
    ///
    /// # Errors
    /// As [`create`](Self::create), and those of [`Transport::share_cache`].
    pub fn create_sharing(
        self,
        transport: &Transport<ProcessEnvironment>,
        disk: &Disk,
        shared: Option<SharedSpace>,
    ) -> Result<BackendId> {
        if disk.is_region {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{0} holds a CBD transport: it is a region, or a copy of one, and no disk; give another path. If you do not \
                     need its contents, overwrite its first and last 4096 bytes with zeroes, and it is a plain file again",
                    self.path
                ),
            ));
        }
        let spec = BackendSpec {
            host: self.host,
            path: self.path,
            identity: disk.identity.to_token(),
            size: disk.size,
            sector: disk.sector,
            cache_bytes: self.cache_bytes,
            lanes_max: lanes_max_here(transport, self.cache_bytes.unwrap_or(0)),
            handlers: self.handlers,
            data_crc: self.data_crc,
            settings: self.settings,
        };
        transport.create_sharing_backend(&spec, self.name.as_ref(), shared)
    }
}

/// The maximum number of lanes of a cache of `segments` segments on a machine with so many processors.
#[must_use]
pub fn lanes_max(segments: u64, processors: u32) -> u32 {
    let by_space = u32::try_from(segments / SEGMENTS_PER_LANE).unwrap_or(u32::MAX);
    (LANES_PER_PROCESSOR * processors).min(by_space).max(1)
}

/// The maximum number of lanes of a cache of `bytes` in `transport` on this machine.
pub(crate) fn lanes_max_here(transport: &Transport<ProcessEnvironment>, bytes: u64) -> u32 {
    lanes_max(bytes / transport.info().layout.segment_size, processors())
}

/// The rows of the backend table, and descriptions of damaged ones. The rows are read one by one, so that a damaged row does
/// not hide others.
#[must_use]
pub fn entries<P: Pmem + 'static>(
    transport: &Transport<ProcessEnvironment<P>>,
) -> (Vec<BackendEntry>, Vec<String>) {
    let rows = transport.info().layout.backend_rows;
    let (mut entries, mut damaged) = (Vec::new(), Vec::new());
    for row in 0..rows {
        match transport.backend(BackendId(row)) {
            Ok(entry) => entries.push(entry),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => damaged.push(error.line()),
        }
    }
    (entries, damaged)
}

/// Default number of queues of a backend.
#[must_use]
pub fn default_handlers() -> u32 {
    processors().min(HANDLERS_MAX)
}

/// Processors that this process may use.
fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(1).min(4096))
}

/// Settings that a start requests of an existing backend; `None` accepts the existing value.
#[derive(Clone, Default, Debug)]
pub struct RequestedSettings {
    /// Whether data is checksummed.
    pub data_crc: Option<bool>,
    /// Bytes of its cache, or the minimum of one that shares its space.
    pub cache_bytes: Option<u64>,
    /// The maximum in bytes, and the weight, of a cache that shares its space.
    pub shared: Option<(u64, u16)>,
    /// Number of queues that serve it.
    pub handlers: Option<u32>,
    /// Consistency of the backing device: strict, checkpoint or none.
    pub consistency: Option<cbd_engine::Consistency>,
    /// How writes go.
    pub cache_mode: Option<cbd_engine::CacheMode>,
    /// Its name.
    pub name: Option<Name>,
}

impl RequestedSettings {
    /// Refuses settings that differ from those that the backend was created with.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`], with the existing value.
    pub fn check(&self, entry: &BackendEntry, segment_size: u64) -> Result<()> {
        let differs = |what: &str, was: String| {
            Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "backend {} was made with {what} {was}; start it without that option, or stop it and create it again",
                    entry.id
                ),
            ))
        };
        if self.data_crc.is_some_and(|wanted| wanted != entry.data_crc) {
            return differs("data-crc", if entry.data_crc { "on" } else { "off" }.to_owned());
        }
        if let Some(wanted) = self.cache_bytes {
            let bytes = |segments: u32| u64::from(segments) * segment_size;
            let is_near = |wanted: u64, segments: u32| wanted.abs_diff(bytes(segments)) <= 2 * segment_size;
            let size = crate::size::format_size;
            match (entry.shared, self.shared) {
                (None, None) if is_near(wanted, entry.cache_segments) => {}
                (Some(has), Some((max, weight)))
                    if is_near(wanted, has.min) && is_near(max, has.max) && weight == has.weight => {}
                (None, _) => return differs("a cache of", size(bytes(entry.cache_segments))),
                (Some(has), _) => {
                    let text = format!(
                        "{} to {}, weight {} (change it with cache-resize)",
                        size(bytes(has.min)),
                        size(bytes(has.max)),
                        has.weight
                    );
                    return differs("a cache of", text);
                }
            }
        }
        if self.handlers.is_some_and(|wanted| wanted != entry.handlers) {
            return differs("handlers", entry.handlers.to_string());
        }
        if self.consistency.is_some_and(|wanted| wanted != entry.settings.consistency) {
            return differs(
                "consistency",
                format!("{} (change it with set)", entry.settings.consistency.name()),
            );
        }
        if self.cache_mode.is_some_and(|wanted| wanted != entry.settings.cache_mode) {
            return differs(
                "cache mode",
                format!("{} (change it with set)", entry.settings.cache_mode.name()),
            );
        }
        if self.name.is_some() && self.name != entry.name {
            let now = entry.name.as_ref().map_or("no name".to_owned(), |name| format!("the name {name}"));
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "backend {} has {now}; start it without that option, and change it with set",
                    entry.id
                ),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_engine::FormatOptions;
    use cbd_pmem::Mapping;
    use cbd_types::Region;
    use std::sync::Arc;

    #[test]
    fn a_cache_has_sixteen_lanes_for_each_processor_where_its_segments_suffice() {
        let environment = Arc::new(ProcessEnvironment::new());
        // Sixteen segments a lane, for more lanes than any test machine has.
        let region = Region::new(Mapping::anonymous(512 << 20).unwrap());
        let options = FormatOptions { segment_size: Some(64 << 10), ..FormatOptions::default() };
        let transport = Transport::format(environment, region, &options).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let disk = Disk::inspect(file.path()).unwrap();
        let lanes_of = |cache_bytes| {
            let new = NewBackend {
                host: HostId(0),
                path: file.path().display().to_string(),
                cache_bytes: Some(cache_bytes),
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
                name: None,
            };
            let backend = new.create(&transport, &disk).unwrap();
            transport.open_cache(backend).unwrap().lane_count()
        };
        let wanted = 16 * processors();
        let most = 1 << wanted.ilog2();
        assert_eq!(lanes_of((16 * u64::from(most)) * (64 << 10)), most);
        assert_eq!(lanes_of((16 * u64::from(most) - 1) * (64 << 10)), most / 2, "one segment too few");
        assert_eq!(lanes_of(9 * (64 << 10)), 1, "the smallest cache");
    }
}
