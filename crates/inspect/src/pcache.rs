//! Writes the dirty data of a cache device of Linux's dm-pcache to the backing device, or to a block device that
//! replaces it.
//!
//! Invariants: the cache device is only read, and locked during the operation. A disk gets no data that could not be
//! read or whose checksum is wrong, and no data at all if it is too small to be the backing device. Written data is
//! flushed and then read back. The operation can be interrupted and repeated: it writes the same data again.
//!
//! Elsewhere: the content of the cache device (`cbd-pcache`); the choice of the disk, which the cache device does not
//! identify (the user).

use crate::Progress;
use cbd_backing::{
    Backing, BackingFile, DISK_TIMEOUT, Options as DiskOptions, PollableQueue, after_predecessor,
};
use cbd_pcache::{Cache, Finding, Image, LogEnd, RangeList, Scanned, Sink, Stage, Survey, Unreadable};
use cbd_types::backing::BackingDone;
use cbd_types::{AlignedBuffer, BackingOp, BackingQueue, ByteRange, Error, ErrorKind, OpToken, Result};
use serde::Serialize;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// Writes in flight.
const DEPTH: usize = 32;
/// Bytes that are read at a time in a sequential stream.
const READ_BYTES: usize = 1 << 20;
/// Failing memory fails in blocks of at most this size.
const PAGE: u64 = 4096;
/// The operation ends after this many failed writes.
const FAILURES_MAX: usize = 64;

/// The source and the destination.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cache device, or a copy of it in a file.
    pub cache: PathBuf,
    /// The disk.
    pub to: Option<PathBuf>,
    /// The options for reading the cache device.
    pub reading: cbd_pcache::Options,
}

/// The content of a cache device, and the result of the rescue.
#[derive(Debug, Serialize)]
pub struct Rescued {
    /// The cache device.
    pub cache: String,
    /// Its bytes.
    pub size: u64,
    /// The version field of its cache info.
    pub version: u8,
    /// The cache mode; 0 is writeback.
    pub mode: u32,
    /// Whether data has checksums.
    pub data_crc: bool,
    /// The percentage of used segments at which dm-pcache collects garbage.
    pub gc_percent: u32,
    /// Segments of the cache.
    pub segments: u32,
    /// The content of its log.
    #[serde(flatten)]
    pub survey: Survey,
    /// Dirty and intact ranges of the device.
    pub dirty: RangeList,
    /// Dirty and damaged ranges of the device; they are not written.
    pub damaged: RangeList,
    /// Damage of the cache device itself.
    pub findings: Vec<Finding>,
    /// Whether dirty data is damaged, or may be lost without a trace.
    pub is_harmed: bool,
    /// The destination.
    pub disk: Option<String>,
    /// The reason for which the destination cannot be used.
    pub disk_error: Option<String>,
    /// Bytes that were written, flushed, and read back.
    pub written_bytes: u64,
    /// Ranges whose write failed or whose read-back differs, with the error; the first of them.
    pub failed: Vec<Failed>,
}

/// A range whose write failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Failed {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// The error.
    pub error: String,
}

/// Reports the data that a rescue would write; changes nothing.
///
/// # Errors
/// When the cache device cannot be opened. An error of the disk is in the result.
pub fn examine(options: &Options, progress: &mut dyn FnMut(Progress)) -> Result<Rescued> {
    let (cache, survey) = opened(options, progress)?;
    let scanned = scan(&cache, &mut (), "reading the data", progress)?;
    let mut rescued = Rescued::new(options, &cache, survey, scanned);
    if let Some(to) = &options.to {
        rescued.disk_error = open_disk(to, &rescued.survey, true).err().map(|error| error.line());
    }
    Ok(rescued)
}

/// Writes the dirty data to the disk.
///
/// # Errors
/// When the cache device or the disk cannot be opened, or the disk cannot be flushed. Ranges that the disk refuses are
/// in the result.
pub fn rescue(options: &Options, progress: &mut dyn FnMut(Progress)) -> Result<Rescued> {
    let (cache, survey) = opened(options, progress)?;
    let to = options.to.as_ref();
    let to = to.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "the disk is not given (--to)"))?;
    let disk = after_predecessor(DISK_TIMEOUT, || open_disk(to, &survey, false))?;
    // 1. Write all intact data, in ascending order.
    let mut writer = Writer { disk: Disk::new(&disk)?, in_flight: Vec::new(), failed: Vec::new() };
    let scanned = scan(&cache, &mut writer, "writing to the disk", progress);
    // 2. Flush, even after an error.
    let failed = writer.finish()?;
    let scanned = scanned?;
    // 3. Read back.
    let mut reader = ReadBack { disk: Disk::new(&disk)?, known: &failed, differs: Vec::new(), same: 0 };
    scan(&cache, &mut reader, "reading back", progress)?;
    let (same, differs) = (reader.same, reader.differs);
    let mut rescued = Rescued::new(options, &cache, survey, scanned);
    rescued.written_bytes = same;
    rescued.failed = [failed, differs].concat();
    Ok(rescued)
}

impl Rescued {
    fn new<I: Image>(options: &Options, cache: &Cache<I>, survey: Survey, scanned: Scanned) -> Self {
        let is_harmed = cache.harmful() > 0
            || scanned.damaged.count > 0
            || survey.impossible_keys > 0
            || survey.passed_key_sets > 0
            || survey.end.is_some_and(LogEnd::is_harmful);
        Self {
            cache: options.cache.display().to_string(),
            size: cache.size(),
            version: cache.version(),
            mode: cache.mode(),
            data_crc: cache.has_data_crc(),
            gc_percent: cache.gc_percent(),
            segments: cache.segments(),
            survey,
            dirty: scanned.dirty,
            damaged: scanned.damaged,
            findings: cache.findings().to_vec(),
            is_harmed,
            disk: options.to.as_ref().map(|to| to.display().to_string()),
            disk_error: None,
            written_bytes: 0,
            failed: Vec::new(),
        }
    }
}

fn opened(options: &Options, progress: &mut dyn FnMut(Progress)) -> Result<(Cache<CacheDevice>, Survey)> {
    let device = CacheDevice::open(&options.cache)?;
    let of_it =
        |error: Error| Error::new(error.kind(), format!("{}: {}", options.cache.display(), error.line()));
    let cache = Cache::open(device, options.reading).map_err(of_it)?;
    let survey = cache.survey(&mut |_, done, of| progress(Progress { doing: "reading the log", done, of }));
    Ok((cache, survey))
}

fn scan(
    cache: &Cache<CacheDevice>,
    sink: &mut dyn Sink,
    doing: &'static str,
    progress: &mut dyn FnMut(Progress),
) -> Result<Scanned> {
    cache.scan(sink, &mut |stage, done, of| {
        let doing = if stage == Stage::Verifying { "verifying" } else { doing };
        progress(Progress { doing, done, of });
    })
}

/// The disk, if it can be the backing device.
fn open_disk(path: &Path, survey: &Survey, read_only: bool) -> Result<BackingFile> {
    let options = DiskOptions { read_only, sector: Some(survey.grain), ..DiskOptions::default() };
    let disk = BackingFile::open(path, options)?;
    let size = disk.geometry().size;
    if size < survey.device_end {
        return Err(Error::new(
            ErrorKind::OutOfRange,
            format!(
                "{} has {size} bytes, and the cache has dirty data up to byte {}: it is not its backing device",
                path.display(),
                survey.device_end
            ),
        ));
    }
    Ok(disk)
}

/// A queue, used by one thread.
struct Disk {
    queue: Box<dyn PollableQueue>,
    done: Vec<BackingDone>,
}

impl Disk {
    fn new(file: &BackingFile) -> Result<Self> {
        Ok(Self { queue: file.open_queue(DEPTH)?, done: Vec::new() })
    }

    /// Executes one operation; no other one may be in flight.
    fn run(&mut self, op: BackingOp) -> Result<BackingOp> {
        self.queue.submit(OpToken(0), op);
        loop {
            self.queue.wait(&mut self.done);
            if let Some(done) = self.done.pop() {
                return done.result.map(|()| done.op);
            }
        }
    }

    fn read(&mut self, offset: u64, length: usize) -> Result<AlignedBuffer> {
        match self.run(BackingOp::Read { offset, buffer: AlignedBuffer::zeroed(length) })? {
            BackingOp::Read { buffer, .. } => Ok(buffer),
            _ => Err(Error::new(ErrorKind::System, "the queue returned another operation")),
        }
    }
}

/// Writes data with many requests in flight. The requests never overlap.
struct Writer {
    disk: Disk,
    /// Requests in flight.
    in_flight: Vec<ByteRange>,
    failed: Vec<Failed>,
}

impl Writer {
    fn reap(&mut self) -> Result<()> {
        self.disk.queue.wait(&mut self.disk.done);
        for done in self.disk.done.drain(..) {
            let at = self.in_flight.iter().position(|range| range.start == done.token.0);
            let range = at.map(|at| self.in_flight.swap_remove(at));
            if let (Some(range), Err(error)) = (range, done.result) {
                self.failed.push(Failed { offset: range.start, bytes: range.len(), error: error.line() });
            }
        }
        match self.failed.last() {
            Some(last) if self.failed.len() >= FAILURES_MAX => {
                let text = format!(
                    "the disk refused {FAILURES_MAX} writes, last at byte {}: {}",
                    last.offset, last.error
                );
                Err(Error::new(ErrorKind::Backing, text))
            }
            _ => Ok(()),
        }
    }

    /// Waits for all requests, and flushes.
    fn finish(mut self) -> Result<Vec<Failed>> {
        while !self.in_flight.is_empty() {
            // Failed writes are already listed.
            let _ = self.reap();
        }
        self.disk.run(BackingOp::Flush)?;
        Ok(self.failed)
    }
}

impl Sink for Writer {
    fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        while self.in_flight.len() >= DEPTH {
            self.reap()?;
        }
        self.in_flight.push(ByteRange::at(offset, bytes.len() as u64));
        self.disk
            .queue
            .submit(OpToken(offset), BackingOp::Write { offset, buffer: AlignedBuffer::from_slice(bytes) });
        Ok(())
    }
}

/// Compares the data of the disk with the written data.
struct ReadBack<'a> {
    disk: Disk,
    /// Failed writes.
    known: &'a [Failed],
    differs: Vec<Failed>,
    same: u64,
}

impl Sink for ReadBack<'_> {
    fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        if self.known.iter().any(|failed| failed.offset == offset) {
            return Ok(());
        }
        let error = match self.disk.read(offset, bytes.len()) {
            Ok(read) if read[..] == *bytes => {
                self.same += bytes.len() as u64;
                return Ok(());
            }
            Ok(_) => "the data that was read back differs from the data that was written".to_owned(),
            Err(error) => format!("it cannot be read back: {}", error.line()),
        };
        if self.differs.len() < FAILURES_MAX {
            self.differs.push(Failed { offset, bytes: bytes.len() as u64, error });
        }
        Ok(())
    }
}

/// A cache device or a file with its content, locked and only read. It is read with direct I/O if possible, because
/// dm-pcache bypasses the page cache, too.
struct CacheDevice {
    size: u64,
    reader: RefCell<Reader>,
    /// The lock is held as long as this value lives.
    _file: BackingFile,
}

/// Concurrent sequential streams: log, keys, and the data of several processors.
const STREAMS: usize = 6;

struct Reader {
    disk: Disk,
    sector: u64,
    /// The last data of each stream; the last used stream is the last one.
    streams: Vec<Held>,
}

/// Bytes from `begin` on.
struct Held {
    begin: u64,
    bytes: AlignedBuffer,
}

impl Held {
    fn end(&self) -> u64 {
        self.begin + self.bytes.len() as u64
    }
}

impl CacheDevice {
    fn open(path: &Path) -> Result<Self> {
        let file = BackingFile::open(path, DiskOptions { read_only: true, ..DiskOptions::default() })?;
        let geometry = file.geometry();
        let disk = Disk::new(&file)?;
        let sector = u64::from(geometry.sector).max(PAGE);
        let reader = Reader { disk, sector, streams: Vec::new() };
        Ok(Self { size: geometry.size, reader: RefCell::new(reader), _file: file })
    }
}

impl Image for CacheDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, at: u64, into: &mut [u8]) -> std::result::Result<(), Unreadable> {
        let failed = Unreadable { at, length: into.len() as u64 };
        let end = at.checked_add(into.len() as u64).filter(|&end| end <= self.size).ok_or(failed)?;
        let mut reader = self.reader.borrow_mut();
        let held = reader.held(at, end, self.size).map_err(|_| failed)?;
        let skip = (at - held.begin) as usize;
        into.copy_from_slice(&held.bytes[skip..skip + into.len()]);
        Ok(())
    }
}

impl Reader {
    /// A buffer that holds all bytes from `at` to `end`.
    fn held(&mut self, at: u64, end: u64, size: u64) -> Result<&Held> {
        if let Some(found) = self.streams.iter().position(|held| held.begin <= at && end <= held.end()) {
            self.streams[found..].rotate_left(1);
        } else {
            // A sequential read reads ahead.
            let follows = self.streams.iter().position(|held| (held.begin..=held.end() + PAGE).contains(&at));
            let begin = at - at % self.sector;
            let needed = end.next_multiple_of(self.sector).min(size);
            let ahead =
                if follows.is_some() { (begin + READ_BYTES as u64).min(size).max(needed) } else { needed };
            let bytes = match self.disk.read(begin, (ahead - begin) as usize) {
                Err(_) if ahead > needed => self.disk.read(begin, (needed - begin) as usize)?,
                read => read?,
            };
            match follows {
                Some(found) => drop(self.streams.remove(found)),
                None if self.streams.len() >= STREAMS => drop(self.streams.remove(0)),
                None => {}
            }
            self.streams.push(Held { begin, bytes });
        }
        let last = self.streams.last();
        last.ok_or_else(|| Error::new(ErrorKind::System, "the data that was read is missing"))
    }
}
