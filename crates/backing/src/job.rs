//! One operation from submission to completion: checked, split into steps, continued after short transfers.
//!
//! Both queues run the same [`Job`]s: the ring turns a [`Step`] into an entry, the synchronous queue into a system
//! call, and both pass the result to the job.
//!
//! Invariants: a step lies inside the device and is whole sectors; the number of attempts without progress is bounded;
//! an operation succeeds only when all of it was done.
//!
//! Elsewhere: execution of the steps, and ownership of the buffer during them (the queues).

use crate::claims::Mapping;
use crate::hold::Held;
use crate::identity::Kind;
use crate::length::Length;
use cbd_holder::Change;
use cbd_types::backing::BackingDone;
use cbd_types::{BackingGeometry, BackingOp, ByteRange, Error, ErrorKind, OpToken, Result};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Zeroes to write if the system cannot zero a range itself. They are in `.bss` and take no memory.
#[repr(align(4096))]
struct Zeroes([u8; ZERO_PIECE]);
static ZEROES: Zeroes = Zeroes([0; ZERO_PIECE]);

/// The zeroes, aligned for direct I/O.
pub(crate) fn zeroes() -> &'static [u8; ZERO_PIECE] {
    &ZEROES.0
}

const ZERO_PIECE: usize = 256 << 10;
/// Most bytes that one system call transfers; the kernel's own bound is a little below 2 GiB.
const TRANSFER_PIECE: usize = 1 << 30;
/// Most bytes that one call zeroes or punches: a call cannot be interrupted, and a disk may have to write all of them.
const BLOCK_PIECE: u64 = 128 << 20;
const FILE_PIECE: u64 = 4 << 30;
/// Most consecutive attempts without progress.
const ATTEMPTS_MAX: u8 = 64;

/// State that the queues of one backing device share. The descriptor, and with it the lock, lasts until the last queue
/// is dropped.
#[derive(Debug)]
pub(crate) struct Target {
    pub file: Held,
    pub path: PathBuf,
    pub kind: Kind,
    /// But for its size: see [`size`](Self::size).
    pub geometry: BackingGeometry,
    /// Its size in bytes, whole sectors; never falls.
    pub size: AtomicU64,
    pub read_only: bool,
    /// Whether the file had a name when it was opened; a file without a name cannot be deleted.
    pub is_named: bool,
    /// The required length, of a file.
    pub length: Length,
    /// Set once the device has refused the method; it is not tried again.
    pub no_zero_range: AtomicBool,
    pub no_punch: AtomicBool,
}

impl Target {
    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The change of the file, of a file beneath it, or of the paths to them. May block on the file system.
    pub fn change(&self) -> Option<Change> {
        self.files().find_map(|part| {
            let seen = cbd_holder::change::of(part.file.as_fd(), part.path, part.length.expected());
            part.length.change(part.path, seen)
        })
    }

    /// Refuses to flush a file that was deleted, whose data is lost when this process ends, or truncated: data is lost,
    /// and data written now may be lost when the user restores the file.
    pub fn check_files(&self) -> Result<()> {
        let change = self.files().find_map(|part| {
            let seen = cbd_holder::change::of_open(part.file.as_fd(), part.path, part.length.expected());
            part.length.change(part.path, seen)
        });
        match change {
            Some(change) => Err(Error::new(ErrorKind::Backing, change.to_string())),
            None => Ok(()),
        }
    }

    /// The files that hold the data.
    fn files(&self) -> impl Iterator<Item = Part<'_>> {
        let is_file = self.kind == Kind::File && self.is_named;
        let own = is_file.then_some(Part {
            file: &self.file,
            path: &self.path,
            length: &self.length,
            mapping: Some(Mapping { top: ByteRange { start: 0, end: u64::MAX }, at: 0 }),
        });
        let beneath = self.file.beneath.iter().filter_map(|claim| {
            let length = claim.length.as_ref()?;
            let file = &claim.held_object.as_ref()?.file;
            Some(Part { file, path: &claim.path, length, mapping: claim.mapping })
        });
        own.into_iter().chain(beneath)
    }

    /// Refuses a write after the end of a truncated file: it would extend the file, and the hole would read as zeroes.
    fn check_before_write(&self, range: ByteRange) -> Result<()> {
        self.files().try_for_each(|part| part.length.check(part.file.as_fd(), part.path, part.end_of(range)))
    }

    /// Refuses a read after the least length that was seen, even if the file is longer now.
    fn check_before_read(&self, range: ByteRange) -> Result<()> {
        self.files().try_for_each(|part| part.length.check_known(part.path, part.end_of(range)))
    }

    /// Refuses a finished read after the end of a file beneath: a loop device that uses the page cache returns zeroes
    /// there. A read of the backing file itself would have been short.
    fn check_after_read(&self, range: ByteRange) -> Result<()> {
        if self.file.beneath.is_empty() { Ok(()) } else { self.check_before_write(range) }
    }
}

/// A file that holds data of a backing device.
struct Part<'a> {
    file: &'a Held,
    path: &'a Path,
    length: &'a Length,
    /// The mapping from the backing device to it; `None` if it is not known.
    mapping: Option<Mapping>,
}

impl Part<'_> {
    /// The end of these bytes of the backing device in the file; the maximum if it is not known.
    fn end_of(&self, range: ByteRange) -> u64 {
        self.mapping.map_or(u64::MAX, |mapping| mapping.end_of(range))
    }
}

/// The next system call of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Read into the buffer from `skip` on.
    Read { at: u64, skip: usize, length: usize },
    /// Write the buffer from `skip` on.
    Write { at: u64, skip: usize, length: usize },
    /// Write zeroes from [`zeroes`].
    WriteZeroes { at: u64, length: usize },
    /// `fallocate` with this mode.
    Allocate { mode: i32, at: u64, length: u64 },
    /// `fdatasync`.
    Sync,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Method {
    ZeroRange,
    Punch,
    Write,
}

/// An operation in progress.
#[derive(Debug)]
pub(crate) struct Job {
    pub token: OpToken,
    pub op: BackingOp,
    done: u64,
    attempts: u8,
    method: Method,
}

impl Job {
    pub fn new(token: OpToken, op: BackingOp, target: &Target) -> Self {
        let first = if matches!(op, BackingOp::Discard { .. }) { Method::Punch } else { Method::ZeroRange };
        let mut job = Self { token, op, done: 0, attempts: 0, method: first };
        job.method = job.allowed(first, target);
        job
    }

    /// The result if it is known without the device: for refused and empty operations.
    pub fn known_result(&self, target: &Target) -> Option<Result<()>> {
        if matches!(self.op, BackingOp::Flush) {
            return None;
        }
        let range = self.range();
        let size = target.size();
        if target.read_only && !matches!(self.op, BackingOp::Read { .. }) {
            let text =
                format!("{} is open for reading only: cannot {}", target.path.display(), self.description());
            return Some(Err(Error::new(ErrorKind::ReadOnly, text)));
        }
        if range.start > range.end || range.end > size {
            let text =
                format!("cannot {} of {}: it has {size} bytes", self.description(), target.path.display());
            return Some(Err(Error::new(ErrorKind::OutOfRange, text)));
        }
        let sector = u64::from(target.geometry.sector);
        if !range.start.is_multiple_of(sector) || !range.end.is_multiple_of(sector) {
            let text = format!(
                "cannot {} of {}: not whole sectors of {sector} bytes",
                self.description(),
                target.path.display()
            );
            return Some(Err(Error::new(ErrorKind::InvalidArgument, text)));
        }
        if range.is_empty() {
            return Some(Ok(()));
        }
        let checked = match &self.op {
            BackingOp::Read { .. } => target.check_before_read(range),
            BackingOp::Write { .. } | BackingOp::WriteZeroes { .. } | BackingOp::Discard { .. } => {
                target.check_before_write(range)
            }
            BackingOp::Flush => Ok(()),
        };
        checked.err().map(|error| Err(self.while_doing(error)))
    }

    /// The next step.
    pub fn step(&self, target: &Target) -> Step {
        let range = self.range();
        let at = range.start + self.done;
        let left = range.end - at;
        match &self.op {
            BackingOp::Flush => Step::Sync,
            BackingOp::Read { .. } => Step::Read { at, skip: self.done as usize, length: transfer(left) },
            BackingOp::Write { .. } => Step::Write { at, skip: self.done as usize, length: transfer(left) },
            BackingOp::WriteZeroes { .. } | BackingOp::Discard { .. } => {
                let length = left.min(if target.kind == Kind::Block { BLOCK_PIECE } else { FILE_PIECE });
                match self.method {
                    Method::ZeroRange => Step::Allocate {
                        mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
                        at,
                        length,
                    },
                    Method::Punch => Step::Allocate {
                        mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                        at,
                        length,
                    },
                    Method::Write => Step::WriteZeroes { at, length: left.min(ZERO_PIECE as u64) as usize },
                }
            }
        }
    }

    /// Processes the result of [`step`](Self::step): a count, or a negative errno, as a ring returns it. Returns the
    /// result of the operation once it is known; otherwise there is another step.
    pub fn advance(&mut self, target: &Target, answer: i32) -> Option<Result<()>> {
        let step = self.step(target);
        if answer < 0 {
            return self.failed(target, step, -answer);
        }
        let forward = match step {
            Step::Sync => return Some(target.check_files()),
            Step::Allocate { length, .. } => length,
            Step::Read { length, .. } | Step::Write { length, .. } | Step::WriteZeroes { length, .. } => {
                let count = (answer as u64).min(length as u64);
                if count == 0 && matches!(step, Step::Read { .. }) {
                    return Some(Err(self.error(
                        target,
                        "it ends before that offset; another program may have truncated it",
                    )));
                }
                // Direct I/O continues at a whole sector; a partially transferred sector is transferred again.
                if count == length as u64 { count } else { count - count % u64::from(target.geometry.sector) }
            }
        };
        self.done += forward;
        if self.done >= self.range().len() {
            return Some(match &self.op {
                BackingOp::Read { .. } => {
                    target.check_after_read(self.range()).map_err(|error| self.while_doing(error))
                }
                _ => Ok(()),
            });
        }
        if forward > 0 {
            self.attempts = 0;
            return None;
        }
        self.retry(target, "no byte was transferred")
    }

    fn failed(&mut self, target: &Target, step: Step, errno: i32) -> Option<Result<()>> {
        match errno {
            // ECANCELED: when a thread ends, the kernel cancels its operations on a ring.
            libc::EINTR | libc::EAGAIN | libc::ECANCELED => self.retry(target, &errno_text(errno)),
            libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENOTTY
                if matches!(step, Step::Allocate { .. }) =>
            {
                // EINVAL counts, too: some file systems require larger units. The last method reports real errors.
                let next = match (self.method, &self.op) {
                    (Method::Punch, BackingOp::Discard { .. }) => Method::ZeroRange,
                    (Method::ZeroRange, BackingOp::WriteZeroes { .. }) => Method::Punch,
                    _ => Method::Write,
                };
                if errno != libc::EINVAL {
                    let refused =
                        if self.method == Method::Punch { &target.no_punch } else { &target.no_zero_range };
                    refused.store(true, Ordering::Relaxed);
                }
                self.method = self.allowed(next, target);
                None
            }
            _ => {
                let kind = match errno {
                    libc::ENOSPC | libc::EDQUOT => ErrorKind::NoSpace,
                    _ => ErrorKind::Backing,
                };
                Some(Err(self.error_of(target, kind, &errno_text(errno))))
            }
        }
    }

    fn retry(&mut self, target: &Target, why: &str) -> Option<Result<()>> {
        self.attempts += 1;
        (self.attempts >= ATTEMPTS_MAX)
            .then(|| Err(self.error(target, &format!("{why} ({ATTEMPTS_MAX} attempts)"))))
    }

    /// `wanted`, or the next method if the device is known to refuse it.
    fn allowed(&self, wanted: Method, target: &Target) -> Method {
        let no_zero_range = target.no_zero_range.load(Ordering::Relaxed);
        let no_punch = target.no_punch.load(Ordering::Relaxed);
        let discard = matches!(self.op, BackingOp::Discard { .. });
        match wanted {
            Method::Punch if !no_punch => Method::Punch,
            Method::ZeroRange if !no_zero_range => Method::ZeroRange,
            Method::Punch if discard && !no_zero_range => Method::ZeroRange,
            // A block device that refuses zeroing refuses punching, too, so punching is not tried.
            Method::ZeroRange if !discard && !no_punch && target.kind == Kind::File => Method::Punch,
            _ => Method::Write,
        }
    }

    /// The range of the operation.
    pub fn range(&self) -> ByteRange {
        range_of(&self.op)
    }

    /// The completed operation.
    pub fn end(self, result: Result<()>) -> BackingDone {
        BackingDone { token: self.token, op: self.op, result }
    }

    fn while_doing(&self, error: Error) -> Error {
        error.while_doing(format!("cannot {}", self.description()))
    }

    fn description(&self) -> String {
        description_of(&self.op)
    }

    fn error(&self, target: &Target, why: &str) -> Error {
        self.error_of(target, ErrorKind::Backing, why)
    }

    fn error_of(&self, target: &Target, kind: ErrorKind, why: &str) -> Error {
        Error::new(kind, format!("cannot {} of {}: {why}", self.description(), target.path.display()))
            .at_path(target.path.to_string_lossy())
            .at_range(self.range())
    }
}

/// The range of `op`; empty for a flush.
pub(crate) fn range_of(op: &BackingOp) -> ByteRange {
    match op {
        BackingOp::Read { offset, buffer } | BackingOp::Write { offset, buffer } => {
            ByteRange::at(*offset, buffer.len() as u64)
        }
        BackingOp::WriteZeroes { range } | BackingOp::Discard { range } => *range,
        BackingOp::Flush => ByteRange::at(0, 0),
    }
}

/// The operation as a text that follows "cannot".
pub(crate) fn description_of(op: &BackingOp) -> String {
    let verb = match op {
        BackingOp::Read { .. } => "read",
        BackingOp::Write { .. } => "write",
        BackingOp::WriteZeroes { .. } => "zero",
        BackingOp::Discard { .. } => "discard",
        BackingOp::Flush => return String::from("flush the cache"),
    };
    format!("{verb} {}", range_of(op))
}

fn transfer(left: u64) -> usize {
    left.min(TRANSFER_PIECE as u64) as usize
}

fn errno_text(errno: i32) -> String {
    io::Error::from_raw_os_error(errno).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::AlignedBuffer;

    fn target(kind: Kind) -> Target {
        let geometry = BackingGeometry {
            size: 1 << 40,
            sector: 512,
            physical_sector: 512,
            rotational: false,
            volatile_cache: true,
            discard_zeroes: true,
            discard_granularity: 512,
        };
        let file = Held::new(std::fs::File::open("/dev/null").expect("always there"));
        let (no_zero_range, no_punch) = (AtomicBool::new(false), AtomicBool::new(false));
        Target {
            file,
            path: "/dev/sdx".into(),
            kind,
            geometry,
            size: geometry.size.into(),
            read_only: false,
            is_named: true,
            length: Length::new(geometry.size),
            no_zero_range,
            no_punch,
        }
    }

    fn write(target: &Target) -> Job {
        let op = BackingOp::Write { offset: 4096, buffer: AlignedBuffer::zeroed(8192) };
        Job::new(OpToken(1), op, target)
    }

    fn zero(target: &Target) -> Job {
        Job::new(OpToken(1), BackingOp::WriteZeroes { range: ByteRange::at(0, 1 << 20) }, target)
    }

    fn mode(job: &Job, target: &Target) -> Option<i32> {
        match job.step(target) {
            Step::Allocate { mode, .. } => Some(mode & !libc::FALLOC_FL_KEEP_SIZE),
            _ => None,
        }
    }

    #[test]
    fn a_short_write_continues_at_the_last_whole_sector() {
        let target = target(Kind::File);
        let mut job = write(&target);
        assert!(job.advance(&target, 4096 + 700).is_none());
        assert_eq!(job.step(&target), Step::Write { at: 4096 + 4608, skip: 4608, length: 3584 });
        assert!(job.advance(&target, 3584).is_some_and(|result| result.is_ok()));
    }

    #[test]
    fn an_interrupted_write_is_retried_a_bounded_number_of_times() {
        for errno in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
            let target = target(Kind::File);
            let mut job = write(&target);
            let result = (0..1000).find_map(|_| job.advance(&target, -errno)).expect("bounded");
            assert_eq!(result.expect_err("failed").kind(), ErrorKind::Backing);
        }
    }

    #[test]
    fn a_write_that_transfers_no_byte_fails_after_a_bounded_number_of_attempts() {
        let target = target(Kind::File);
        let mut job = write(&target);
        let result = (0..1000).find_map(|_| job.advance(&target, 0)).expect("bounded");
        assert!(result.is_err());
    }

    #[test]
    fn an_error_names_operation_range_device_and_cause() {
        let target = target(Kind::Block);
        let error = write(&target).advance(&target, -libc::EIO).expect("ended").expect_err("failed");
        assert_eq!(error.kind(), ErrorKind::Backing);
        assert_eq!(
            error.line(),
            "cannot write bytes 4096..12288 of /dev/sdx: Input/output error (os error 5)"
        );
    }

    #[test]
    fn a_full_file_system_is_a_no_space_error() {
        let target = target(Kind::File);
        for errno in [libc::ENOSPC, libc::EDQUOT] {
            let error = write(&target).advance(&target, -errno).expect("ended").expect_err("failed");
            assert_eq!(error.kind(), ErrorKind::NoSpace);
        }
    }

    #[test]
    fn zeroing_a_file_falls_back_to_a_hole_and_then_to_writing_permanently() {
        let target = target(Kind::File);
        let mut job = zero(&target);
        assert_eq!(mode(&job, &target), Some(libc::FALLOC_FL_ZERO_RANGE));
        assert!(job.advance(&target, -libc::EOPNOTSUPP).is_none());
        assert_eq!(mode(&job, &target), Some(libc::FALLOC_FL_PUNCH_HOLE));
        assert!(job.advance(&target, -libc::EOPNOTSUPP).is_none());
        assert_eq!(job.step(&target), Step::WriteZeroes { at: 0, length: ZERO_PIECE });
        assert_eq!(mode(&zero(&target), &target), None);
    }

    #[test]
    fn a_discard_that_a_block_device_refuses_zeroes_the_range() {
        let target = target(Kind::Block);
        let op = BackingOp::Discard { range: ByteRange::at(0, 4096) };
        let mut job = Job::new(OpToken(1), op, &target);
        assert_eq!(mode(&job, &target), Some(libc::FALLOC_FL_PUNCH_HOLE));
        assert!(job.advance(&target, -libc::EOPNOTSUPP).is_none());
        assert_eq!(mode(&job, &target), Some(libc::FALLOC_FL_ZERO_RANGE));
        assert!(job.advance(&target, 0).is_some_and(|result| result.is_ok()));
    }

    #[test]
    fn a_large_range_of_a_disk_is_zeroed_in_pieces() {
        let target = target(Kind::Block);
        let op = BackingOp::WriteZeroes { range: ByteRange::at(0, 3 * BLOCK_PIECE) };
        let mut job = Job::new(OpToken(1), op, &target);
        assert!(job.advance(&target, 0).is_none() && job.advance(&target, 0).is_none());
        assert!(job.advance(&target, 0).is_some_and(|result| result.is_ok()));
    }
}
