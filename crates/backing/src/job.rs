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
use crate::commands::{Commands, DIFFERS, NOT_POSSIBLE, UNREADABLE};
use crate::hold::Held;
use crate::identity::Kind;
use crate::length::Length;
use cbd_holder::Change;
use cbd_types::backing::BackingDone;
use cbd_types::{
    AlignedBuffer, BackingGeometry, BackingOp, ByteRange, Error, ErrorKind, Expected, OpToken, Result,
};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

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
/// Most bytes that a verification or a comparison reads at a time.
const LOOK_PIECE: u64 = 1 << 20;
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
    /// Why reads go through the page cache, if they do.
    pub buffered: Option<String>,
    /// The commands by which the device verifies and compares in itself. Replaced when the user permits others.
    pub commands: RwLock<Arc<Commands>>,
}

impl Target {
    /// The commands by which the device verifies and compares in itself, as the user permits them now.
    pub fn commands(&self) -> Arc<Commands> {
        // A panic cannot leave the pointer inconsistent, so poisoning of the lock is ignored.
        Arc::clone(&self.commands.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// How verifications and comparisons are executed, and why not better, in one line.
    pub fn verify_method(&self) -> String {
        let method = self.commands().describe();
        match &self.buffered {
            None => method,
            Some(why) => {
                let reads = if self.commands().are_used() { "; reads in their place go" } else { "," };
                format!(
                    "{method}{reads} through the page cache ({why}): what is in memory is not read from the disk"
                )
            }
        }
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
    /// Have the device read or compare, by a command that blocks: `skip` bytes after the start of the operation.
    Command { at: u64, skip: u64, length: usize },
    /// Read into the scratch buffer, from its start.
    Look { at: u64, length: usize },
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
    /// What a verification or a comparison reads into; empty until its first step.
    scratch: AlignedBuffer,
    /// Whether the device verifies or compares in itself.
    by_command: bool,
}

impl Job {
    pub fn new(token: OpToken, op: BackingOp, target: &Target) -> Self {
        let first = if matches!(op, BackingOp::Discard { .. }) { Method::Punch } else { Method::ZeroRange };
        let by_command = target.commands().has_one_for(&op);
        let scratch = AlignedBuffer::default();
        let mut job = Self { token, op, done: 0, attempts: 0, method: first, scratch, by_command };
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
        if target.read_only && self.op.changes() {
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
        if let BackingOp::Compare { expected: Expected::Bytes(bytes), .. } = &self.op
            && bytes.len() as u64 != range.len()
        {
            let text = format!(
                "cannot {} of {}: {} bytes are expected",
                self.description(),
                target.path.display(),
                bytes.len()
            );
            return Some(Err(Error::new(ErrorKind::InvalidArgument, text)));
        }
        if range.is_empty() {
            return Some(Ok(()));
        }
        let checked = match &self.op {
            BackingOp::Read { .. } | BackingOp::Verify { .. } | BackingOp::Compare { .. } => {
                target.check_before_read(range)
            }
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
            BackingOp::Verify { .. } | BackingOp::Compare { .. } if self.by_command => Step::Command {
                at,
                skip: self.done,
                length: left.min(target.commands().limit(&self.op)) as usize,
            },
            BackingOp::Verify { .. } | BackingOp::Compare { .. } => {
                Step::Look { at, length: left.min(LOOK_PIECE) as usize }
            }
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
            Step::Read { length, .. }
            | Step::Command { length, .. }
            | Step::Look { length, .. }
            | Step::Write { length, .. }
            | Step::WriteZeroes { length, .. } => {
                let count = (answer as u64).min(length as u64);
                if count == 0 && matches!(step, Step::Read { .. } | Step::Look { .. }) {
                    return Some(Err(self.error(
                        target,
                        "it ends before that offset; another program may have truncated it",
                    )));
                }
                // Direct I/O continues at a whole sector; a partially transferred sector is transferred again.
                if count == length as u64 { count } else { count - count % u64::from(target.geometry.sector) }
            }
        };
        if matches!(step, Step::Look { .. })
            && let Some(error) = self.difference(target, forward)
        {
            return Some(Err(error));
        }
        self.done += forward;
        if self.done >= self.range().len() {
            return Some(match &self.op {
                BackingOp::Read { .. } | BackingOp::Verify { .. } | BackingOp::Compare { .. } => {
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

    /// Whether the next step blocks.
    pub fn blocks(&self) -> bool {
        self.by_command
    }

    /// Looks at the device by reads from now on.
    pub fn read_instead(&mut self) {
        self.by_command = false;
    }

    /// The scratch buffer, with this length.
    pub fn scratch(&mut self, length: usize) -> &mut [u8] {
        self.scratch.resize(length);
        &mut self.scratch
    }

    /// The error if the first `count` bytes of the scratch buffer are not what a comparison expects.
    fn difference(&self, target: &Target, count: u64) -> Option<Error> {
        let BackingOp::Compare { range, expected } = &self.op else { return None };
        let bytes = &self.scratch[..count as usize];
        let found = expected.first_difference(self.done as usize, bytes, target.geometry.sector as usize)?;
        let at = ByteRange::at(range.start + self.done + found.start, found.len());
        let what = if matches!(expected, Expected::Zeroes) { "zeroes" } else { "the expected content" };
        let text = format!("{at} of {} are not {what}", target.path.display());
        Some(Error::new(ErrorKind::Mismatch, text).at_path(target.path.to_string_lossy()).at_range(at))
    }

    fn failed(&mut self, target: &Target, step: Step, errno: i32) -> Option<Result<()>> {
        match errno {
            _ if matches!(step, Step::Command { .. }) && -errno == UNREADABLE => {
                Some(Err(self.error(target, "the device reports that it cannot read it")))
            }
            // A read finds what differs, or takes the place of a command that failed.
            _ if matches!(step, Step::Command { .. }) => {
                debug_assert!([DIFFERS, NOT_POSSIBLE].contains(&-errno), "{errno}");
                self.read_instead();
                None
            }
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
            .at_range(match self.step(target) {
                Step::Look { at, length } | Step::Command { at, length, .. } => {
                    ByteRange::at(at, length as u64)
                }
                _ => self.range(),
            })
    }
}

/// The range of `op`; empty for a flush.
pub(crate) fn range_of(op: &BackingOp) -> ByteRange {
    match op {
        BackingOp::Read { offset, buffer } | BackingOp::Write { offset, buffer } => {
            ByteRange::at(*offset, buffer.len() as u64)
        }
        BackingOp::WriteZeroes { range }
        | BackingOp::Discard { range }
        | BackingOp::Verify { range }
        | BackingOp::Compare { range, .. } => *range,
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
        BackingOp::Verify { .. } => "verify",
        BackingOp::Compare { .. } => "compare",
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
pub(crate) mod tests;
