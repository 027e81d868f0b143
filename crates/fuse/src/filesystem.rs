//! The replies of the file system: a root directory, and in it the device as a file.
//!
//! Invariants: a reply depends on the call and the geometry alone, of which only the size can grow; nothing blocks, nothing does I/O. A call
//! that needs the device is returned as [`Answer::Device`].
//!
//! Elsewhere: reading and answering messages, and the data itself ([`crate::worker`]).

use crate::call::{Call, sets_more_than_times};
use crate::wire::{self, Attr, AttrOut, Dirent, EntryOut, InHeader, InitOut, OpenOut, StatfsOut};
use cbd_types::{ByteRange, Geometry, Operation};
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::IntoBytes;

/// The node of the file.
pub const FILE_NODE: u64 = 2;
/// The largest transfer of one read or write.
pub const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// Bytes of a page; a message holds a limited number of pages.
const PAGE: usize = 4096;
/// The pages of one message: one more than its bytes, for memory that does not begin at a page. The kernel
/// takes the least of this and of its own limit.
pub const TRANSFER_PAGES_MAX: u16 = 257;
/// Asynchronous requests that the kernel sends before it waits for replies; more than a loop device has tags.
const BACKGROUND_MAX: u16 = 512;
/// Names and attributes never change while the file system is mounted, but for the size, which the kernel is told
/// ([`crate::loop_device::LoopThread::grow`]); the kernel revalidates them once a day.
const VALID_SECONDS: u64 = 86_400;

/// The configuration of the file system.
#[derive(Debug)]
pub struct Filesystem {
    /// The name of the file.
    pub name: String,
    /// The device in it, but for its size.
    geometry: Geometry,
    /// The size of the device in bytes; it never falls.
    size: AtomicU64,
    /// Whether writes are refused.
    read_only: bool,
}

/// How a call is answered.
#[derive(PartialEq, Eq, Debug)]
pub enum Answer {
    /// No reply.
    NoReply,
    /// An errno.
    Error(i32),
    /// Success, with these bytes.
    Bytes(Vec<u8>),
    /// As `Bytes`; the file has one more opener.
    Opened(Vec<u8>),
    /// Success; the file has one opener less.
    Released,
    /// The device executes an operation.
    Device(Transfer),
}

/// An operation of the device, validated against its geometry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The operation.
    pub operation: Operation,
    /// The range, in whole sectors.
    pub range: ByteRange,
    /// Durable before the reply.
    pub fua: bool,
    /// For a read: bytes of the range before the first requested one.
    pub skip: usize,
    /// For a read: requested bytes that exist. For a write: all of them.
    pub length: usize,
}

impl Transfer {
    const fn of(operation: Operation, range: ByteRange) -> Self {
        Self { operation, range, fua: false, skip: 0, length: 0 }
    }
}

impl Filesystem {
    /// The file system of this device.
    pub const fn new(name: String, geometry: Geometry, read_only: bool) -> Self {
        Self { name, geometry, size: AtomicU64::new(geometry.size), read_only }
    }

    /// The size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Lets the file reach to `size`, as the device does already. The kernel learns of it with the next message that
    /// returns attributes; it keeps attributes that it has for [`VALID_SECONDS`].
    pub fn grow(&self, size: u64) {
        self.size.fetch_max(size, Ordering::AcqRel);
    }

    /// Determines the reply to a call.
    pub fn answer(&self, header: &InHeader, call: Call) -> Answer {
        match call {
            Call::Read { offset, size } => self.read(header.nodeid, offset, size),
            Call::Write { offset, size, flags } => self.write(header.nodeid, offset, size, flags),
            Call::Fsync => Answer::Device(Transfer::of(Operation::Flush, ByteRange::at(0, 0))),
            Call::Fallocate { offset, length, mode } => self.fallocate(header.nodeid, offset, length, mode),
            Call::Init { major, minor, max_readahead, flags, .. } => init(major, minor, max_readahead, flags),
            Call::Lookup { found } if found && header.nodeid == wire::ROOT_NODE => self.entry(),
            Call::Lookup { .. } => Answer::Error(libc::ENOENT),
            Call::GetAttr => self.attributes(header.nodeid),
            Call::SetAttr { valid, size } => self.set_attributes(header.nodeid, valid, size),
            Call::Open { flags } => self.open(header.nodeid, flags),
            Call::OpenDir => opened(header.nodeid == wire::ROOT_NODE, libc::ENOTDIR, 0),
            Call::ReadDir { offset, size } => self.list(offset, size),
            Call::Release => Answer::Released,
            Call::ReleaseDir | Call::FsyncDir | Call::Destroy => Answer::Bytes(Vec::new()),
            Call::StatFs => self.sizes(),
            Call::NoReply => Answer::NoReply,
            Call::Unknown => Answer::Error(libc::ENOSYS),
        }
    }

    /// Reads need not be aligned: the surrounding sectors are read and not sent. A read past the end returns
    /// nothing.
    fn read(&self, node: u64, offset: u64, size: u32) -> Answer {
        if node != FILE_NODE || size as usize > TRANSFER_BYTES_MAX {
            return Answer::Error(libc::EINVAL);
        }
        let whole = ByteRange::at(0, self.size());
        let Some(requested) = ByteRange::at(offset, u64::from(size)).intersection(&whole) else {
            return Answer::Bytes(Vec::new());
        };
        let sector = u64::from(self.geometry.sector);
        let start = requested.start - requested.start % sector;
        let end = requested.end.next_multiple_of(sector).min(whole.end);
        Answer::Device(Transfer {
            skip: (requested.start - start) as usize,
            length: requested.len() as usize,
            ..Transfer::of(Operation::Read, ByteRange { start, end })
        })
    }

    /// Writes are whole sectors, as on any disk. Where the kernel's limit is 256 pages, a write of 1 MiB from
    /// memory that does not begin at a page boundary has one page too many, and the kernel cuts it at that
    /// page boundary, possibly inside a sector. Of such a message the whole sectors are written and counted,
    /// and the writer continues behind them.
    fn write(&self, node: u64, offset: u64, size: u32, flags: u32) -> Answer {
        if self.read_only {
            return Answer::Error(libc::EROFS);
        }
        if node != FILE_NODE || size as usize > TRANSFER_BYTES_MAX {
            return Answer::Error(libc::EINVAL);
        }
        let is_cut = size as usize + PAGE > TRANSFER_BYTES_MAX;
        let size = if is_cut { size - size % self.geometry.sector } else { size };
        let range = match self.whole_sectors(offset, u64::from(size)) {
            Ok(range) => range,
            Err(errno) => return Answer::Error(errno),
        };
        let fua = flags & (libc::O_DSYNC as u32) != 0;
        Answer::Device(Transfer { fua, length: size as usize, ..Transfer::of(Operation::Write, range) })
    }

    /// A punched hole is a discard, and refused where the device supports none; zeroing stays zeroing. The
    /// size does not change.
    fn fallocate(&self, node: u64, offset: u64, length: u64, mode: u32) -> Answer {
        if self.read_only {
            return Answer::Error(libc::EROFS);
        }
        if node != FILE_NODE {
            return Answer::Error(libc::EINVAL);
        }
        let punch = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32;
        let zero = libc::FALLOC_FL_ZERO_RANGE as u32;
        let operation = match mode {
            mode if mode == punch && self.geometry.discard => Operation::Discard,
            mode if mode & !(libc::FALLOC_FL_KEEP_SIZE as u32) == zero => Operation::WriteZeroes,
            _ => return Answer::Error(libc::EOPNOTSUPP),
        };
        match self.whole_sectors(offset, length) {
            Ok(range) => Answer::Device(Transfer::of(operation, range)),
            Err(errno) => Answer::Error(errno),
        }
    }

    fn whole_sectors(&self, offset: u64, length: u64) -> Result<ByteRange, i32> {
        let sector = u64::from(self.geometry.sector);
        let end = offset.checked_add(length).ok_or(libc::EINVAL)?;
        if length == 0 || !offset.is_multiple_of(sector) || !length.is_multiple_of(sector) {
            return Err(libc::EINVAL);
        }
        if end > self.size() {
            return Err(libc::ENOSPC);
        }
        Ok(ByteRange { start: offset, end })
    }

    fn attr(&self, node: u64) -> Option<Attr> {
        let base = Attr { ino: node, blksize: self.geometry.physical_sector.max(4096), ..Attr::default() };
        match node {
            wire::ROOT_NODE => Some(Attr { mode: libc::S_IFDIR | 0o755, nlink: 2, ..base }),
            FILE_NODE => {
                let mode = libc::S_IFREG | if self.read_only { 0o400 } else { 0o600 };
                let size = self.size();
                Some(Attr { mode, nlink: 1, size, blocks: size.div_ceil(512), ..base })
            }
            _ => None,
        }
    }

    fn attributes(&self, node: u64) -> Answer {
        match self.attr(node) {
            Some(attr) => bytes(&AttrOut { attr_valid: VALID_SECONDS, attr, ..AttrOut::default() }),
            None => Answer::Error(libc::ENOENT),
        }
    }

    /// Setting times succeeds without an effect, because some tools require success. The size may be set to its present
    /// value.
    fn set_attributes(&self, node: u64, valid: u32, size: u64) -> Answer {
        let same_size = valid & !wire::SET_SIZE == valid || size == self.size();
        if sets_more_than_times(valid & !wire::SET_SIZE) || !same_size {
            return Answer::Error(libc::EPERM);
        }
        self.attributes(node)
    }

    fn entry(&self) -> Answer {
        let attr = self.attr(FILE_NODE).unwrap_or_default();
        bytes(&EntryOut {
            nodeid: FILE_NODE,
            entry_valid: VALID_SECONDS,
            attr_valid: VALID_SECONDS,
            attr,
            ..EntryOut::default()
        })
    }

    fn open(&self, node: u64, flags: u32) -> Answer {
        let writes = flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
        if self.read_only && writes {
            return Answer::Error(libc::EROFS);
        }
        let how = wire::OPEN_DIRECT_IO | wire::OPEN_PARALLEL_DIRECT_WRITES | wire::OPEN_NO_FLUSH;
        match opened(node == FILE_NODE, libc::EISDIR, how) {
            Answer::Bytes(bytes) => Answer::Opened(bytes),
            other => other,
        }
    }

    fn list(&self, offset: u64, size: u32) -> Answer {
        let directory = u32::from(libc::DT_DIR);
        let entries = [
            (wire::ROOT_NODE, ".", directory),
            (wire::ROOT_NODE, "..", directory),
            (FILE_NODE, self.name.as_str(), u32::from(libc::DT_REG)),
        ];
        let mut list = Vec::new();
        for (index, (ino, name, kind)) in entries.into_iter().enumerate() {
            let padded = size_of::<Dirent>() + name.len().next_multiple_of(8);
            if (index as u64) < offset {
                continue;
            }
            if list.len() + padded > size as usize {
                break;
            }
            let end = list.len() + padded;
            let entry = Dirent { ino, off: index as u64 + 1, namelen: name.len() as u32, kind };
            list.extend_from_slice(entry.as_bytes());
            list.extend_from_slice(name.as_bytes());
            list.resize(end, 0);
        }
        Answer::Bytes(list)
    }

    /// The block size is the granularity of discards: loop devices take theirs from here.
    fn sizes(&self) -> Answer {
        let geometry = &self.geometry;
        let bsize = geometry.discard_granularity.max(geometry.sector);
        bytes(&StatfsOut {
            blocks: self.size() / u64::from(bsize),
            files: 1,
            bsize,
            frsize: bsize,
            namelen: 255,
            ..StatfsOut::default()
        })
    }
}

/// Negotiates the features that both sides support. The page cache of the file is never used, so no feature
/// of it is negotiated.
fn init(major: u32, minor: u32, max_readahead: u32, flags: u32) -> Answer {
    if major > wire::MAJOR {
        // The kernel then repeats INIT with the version of the reply.
        return bytes(&InitOut { major: wire::MAJOR, minor: wire::MINOR, ..InitOut::default() });
    }
    if major < wire::MAJOR || minor < wire::MINOR_OLDEST {
        return Answer::Error(libc::EPROTO);
    }
    let wanted =
        wire::ASYNC_READ | wire::BIG_WRITES | wire::ASYNC_DIO | wire::PARALLEL_DIROPS | wire::MAX_PAGES;
    bytes(&InitOut {
        major: wire::MAJOR,
        minor: wire::MINOR,
        max_readahead,
        flags: flags & wanted,
        max_background: BACKGROUND_MAX,
        congestion_threshold: BACKGROUND_MAX / 4 * 3,
        max_write: TRANSFER_BYTES_MAX as u32,
        time_gran: 1,
        max_pages: TRANSFER_PAGES_MAX,
        ..InitOut::default()
    })
}

fn opened(fits: bool, errno: i32, open_flags: u32) -> Answer {
    if fits { bytes(&OpenOut { open_flags, ..OpenOut::default() }) } else { Answer::Error(errno) }
}

fn bytes(body: &(impl IntoBytes + zerocopy::Immutable)) -> Answer {
    Answer::Bytes(body.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    const SIZE: u64 = 10 * 4096 + 512;

    fn filesystem() -> Filesystem {
        let geometry = Geometry {
            size: SIZE,
            sector: 512,
            physical_sector: 4096,
            atomic_unit: 1 << 20,
            discard: true,
            discard_granularity: 4096,
            rotational: false,
            fast_zeroes: true,
        };
        Filesystem::new("cbd0".into(), geometry, false)
    }

    fn answer_to(filesystem: &Filesystem, nodeid: u64, call: Call) -> Answer {
        filesystem.answer(&InHeader { nodeid, ..InHeader::default() }, call)
    }

    fn transfer(answer: Answer) -> Transfer {
        match answer {
            Answer::Device(transfer) => transfer,
            other => panic!("{other:?} is no operation of the device"),
        }
    }

    #[test]
    fn an_unaligned_read_reads_whole_sectors_and_sends_the_requested_bytes() {
        let read = transfer(answer_to(&filesystem(), FILE_NODE, Call::Read { offset: 700, size: 1000 }));
        assert_eq!(read.range, ByteRange { start: 512, end: 2048 });
        assert_eq!((read.skip, read.length), (188, 1000));
    }

    #[test]
    fn a_read_ends_at_the_end_of_the_device_and_returns_nothing_past_it() {
        let read =
            transfer(answer_to(&filesystem(), FILE_NODE, Call::Read { offset: SIZE - 512, size: 4096 }));
        assert_eq!(read.range, ByteRange { start: SIZE - 512, end: SIZE });
        assert_eq!(read.length, 512);
        for offset in [SIZE, SIZE + 1, u64::MAX] {
            let answer = answer_to(&filesystem(), FILE_NODE, Call::Read { offset, size: 4096 });
            assert_eq!(answer, Answer::Bytes(Vec::new()));
        }
    }

    #[test]
    fn whole_sectors_are_written_of_a_write_that_the_kernel_cut_inside_a_sector() {
        let mut filesystem = filesystem();
        filesystem.size = (4 << 20).into();
        let sector = filesystem.geometry.sector;
        for cut in [1, 100, PAGE as u32 - 1] {
            let size = TRANSFER_BYTES_MAX as u32 - cut;
            let header = InHeader { nodeid: FILE_NODE, ..InHeader::default() };
            let answer = filesystem.answer(&header, Call::Write { offset: 0, size, flags: 0 });
            let Answer::Device(transfer) = answer else { panic!("{answer:?}") };
            assert_eq!(transfer.length as u32, size / sector * sector);
            assert_eq!(transfer.range, ByteRange::at(0, transfer.length as u64));
        }
    }

    #[test]
    fn writes_that_are_not_whole_sectors_of_the_device_are_refused() {
        let cases = [
            (1, 512, libc::EINVAL),
            (0, 511, libc::EINVAL),
            (0, 0, libc::EINVAL),
            (SIZE, 512, libc::ENOSPC),
            (SIZE - 512, 1024, libc::ENOSPC),
            (u64::MAX - 511, 512, libc::EINVAL),
            (0, (1 << 20) + 512, libc::EINVAL),
        ];
        for (offset, size, errno) in cases {
            let answer = answer_to(&filesystem(), FILE_NODE, Call::Write { offset, size, flags: 0 });
            assert_eq!(answer, Answer::Error(errno), "{offset} {size}");
        }
    }

    #[test]
    fn a_synchronous_write_is_durable_when_answered() {
        for (flags, fua) in [(0, false), (libc::O_DSYNC, true), (libc::O_SYNC, true)] {
            let call = Call::Write { offset: 512, size: 512, flags: flags as u32 };
            assert_eq!(transfer(answer_to(&filesystem(), FILE_NODE, call)).fua, fua);
        }
    }

    #[test]
    fn holes_are_discards_only_where_the_device_supports_discards() {
        let punch = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32;
        let call = Call::Fallocate { offset: 4096, length: 8192, mode: punch };
        let mut filesystem = filesystem();
        assert_eq!(transfer(answer_to(&filesystem, FILE_NODE, call)).operation, Operation::Discard);
        filesystem.geometry.discard = false;
        assert_eq!(answer_to(&filesystem, FILE_NODE, call), Answer::Error(libc::EOPNOTSUPP));
    }

    #[test]
    fn zero_range_writes_zeroes_and_other_modes_are_not_supported() {
        let zero = libc::FALLOC_FL_ZERO_RANGE as u32;
        let keep = libc::FALLOC_FL_KEEP_SIZE as u32;
        for mode in [zero, zero | keep] {
            let call = Call::Fallocate { offset: 0, length: 512, mode };
            assert_eq!(transfer(answer_to(&filesystem(), FILE_NODE, call)).operation, Operation::WriteZeroes);
        }
        for mode in [0, keep, libc::FALLOC_FL_COLLAPSE_RANGE as u32, u32::MAX] {
            let call = Call::Fallocate { offset: 0, length: 512, mode };
            assert_eq!(answer_to(&filesystem(), FILE_NODE, call), Answer::Error(libc::EOPNOTSUPP));
        }
    }

    #[test]
    fn a_read_only_file_refuses_changes() {
        let filesystem = Filesystem { read_only: true, ..filesystem() };
        let zero = libc::FALLOC_FL_ZERO_RANGE as u32;
        for call in [
            Call::Write { offset: 0, size: 512, flags: 0 },
            Call::Fallocate { offset: 0, length: 512, mode: zero },
            Call::Open { flags: libc::O_RDWR as u32 },
        ] {
            assert_eq!(answer_to(&filesystem, FILE_NODE, call), Answer::Error(libc::EROFS));
        }
        assert!(matches!(answer_to(&filesystem, FILE_NODE, Call::Open { flags: 0 }), Answer::Opened(_)));
    }

    #[test]
    fn the_size_cannot_be_changed() {
        let shrink = Call::SetAttr { valid: wire::SET_SIZE, size: 0 };
        assert_eq!(answer_to(&filesystem(), FILE_NODE, shrink), Answer::Error(libc::EPERM));
        let same = Call::SetAttr { valid: wire::SET_SIZE, size: SIZE };
        assert!(matches!(answer_to(&filesystem(), FILE_NODE, same), Answer::Bytes(_)));
        let mode = Call::SetAttr { valid: wire::SET_MODE, size: 0 };
        assert_eq!(answer_to(&filesystem(), FILE_NODE, mode), Answer::Error(libc::EPERM));
    }

    #[test]
    fn a_listing_continues_where_it_stopped_and_fits_the_requested_size() {
        let list = |offset, size| match answer_to(&filesystem(), 1, Call::ReadDir { offset, size }) {
            Answer::Bytes(bytes) => bytes,
            other => panic!("{other:?}"),
        };
        assert_eq!(list(0, 4096).len(), 3 * 32);
        assert_eq!(list(2, 4096).len(), 32);
        assert_eq!(list(0, 40).len(), 32);
        assert!(list(3, 4096).is_empty() && list(u64::MAX, 4096).is_empty() && list(0, 0).is_empty());
    }

    #[test]
    fn only_features_that_both_sides_support_are_negotiated() {
        let Answer::Bytes(bytes) = init(7, 38, 1 << 17, wire::ASYNC_DIO | 1 << 16) else { panic!("refused") };
        let out = InitOut::read_from_bytes(&bytes).unwrap();
        assert_eq!(out.flags, wire::ASYNC_DIO);
        // A kernel that offers everything, FUSE over io_uring included (in the second word of flags).
        let Answer::Bytes(bytes) = init(7, 42, 0, u32::MAX) else { panic!("refused") };
        let out = InitOut::read_from_bytes(&bytes).unwrap();
        assert_eq!((out.flags & wire::INIT_EXTENDED, out.flags2), (0, 0));
        assert_eq!(init(7, 20, 0, 0), Answer::Error(libc::EPROTO));
        assert!(matches!(init(8, 1, 0, 0), Answer::Bytes(_)));
    }
}
