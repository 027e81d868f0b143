//! The interface to persistent memory, and the types that prove durability.
//!
//! A store is *in flight* until a fence by the same thread: a power failure keeps any part of it. The engine uses
//! [`Region`]; it returns [`InFlight`] for a store and converts it to [`Durable`] with a fence, and an acknowledgement
//! of a request requires a [`Durable`]. Recovery reads through [`Region::load`], which reports failed memory as an
//! error instead of a signal.

use crate::{BootId, ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, MutationPoint, Result};
use alloc::{format, string::String};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The failures that the bytes of a region survive.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Durability {
    /// A power failure: the region is mapped persistent memory.
    PowerFail,
    /// The end of the process, but not a crash of the machine: page cache, tmpfs, anonymous memory.
    ProcessCrash,
}

impl Durability {
    /// The name in status, metrics and documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PowerFail => "power-fail",
            Self::ProcessCrash => "process-crash",
        }
    }
}

/// Who may have the same memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reach {
    /// Processes of this kernel alone.
    Kernel,
    /// Guests of this machine, too: their memory may be such a file.
    Guests,
    /// Other machines, or other guests.
    Machines,
}

/// Memory that could not be read: poison, or a mapping that lost its medium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MediaError {
    /// Offset in the region, in bytes, of the access that failed.
    pub at: u64,
}

impl From<MediaError> for Error {
    fn from(error: MediaError) -> Self {
        Self::new(ErrorKind::Media, format!("the region's memory cannot be read at byte {}", error.at))
    }
}

/// Memory that is addressed in bytes, stored to and fenced; a mapping or a simulator implements it.
///
/// All offsets are from the first byte of the region. Callers check their offsets against [`len`](Self::len) first; an
/// access past the end is a [`MediaError`] of a load and a panic of a store, never an access to other memory.
pub trait Pmem: Send + Sync {
    /// Size of the region in bytes.
    fn len(&self) -> u64;

    /// Whether the size of the region is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The failures that fenced bytes survive.
    fn durability(&self) -> Durability;

    /// Copies `from` to `at`. Durable after the next [`fence`](Self::fence) of the calling thread; until then
    /// a crash keeps any subset of its 8-byte words.
    fn store(&self, at: u64, from: &[u8]);

    /// As [`store`](Self::store), and computes the CRC32C of each checksum block in the same pass: the first
    /// block is `first` bytes long, the others [`CHECKSUM_BLOCK`], the last one the rest. Each source byte is
    /// read once: the checksum is that of the stored bytes. `checksums` has one element for each block.
    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]);

    /// Stores one line of 64 bytes at a multiple of 64.
    fn store_line(&self, at: u64, line: &[u8; 64]);

    /// After this, everything that the calling thread has stored is in the persistence domain.
    fn fence(&self);

    /// Copies from the region; failing memory becomes an error.
    ///
    /// # Errors
    /// The offset at which the memory could not be read.
    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError>;

    /// As [`load`](Self::load), and returns the CRC32C of the bytes that were copied.
    ///
    /// # Errors
    /// The offset at which the memory could not be read.
    fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError>;

    /// Writes back lines that may be only in a processor's cache, without changing a byte; durable after the
    /// next fence.
    fn write_back(&self, at: u64, length: u64);

    /// Makes what the calling thread has stored there visible to other hosts: when it returns, a load of any host that
    /// [`observe`](Self::observe)s the bytes gets them, and no later load of this thread was executed before. For bytes that
    /// only this host writes.
    fn publish(&self, at: u64, length: u64) {
        self.write_back(at, length);
        self.fence();
        // Orders the loads that follow, which the fence of persistent stores does not do on all processors.
        core::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Stores bytes for other hosts, which need not survive a crash. Any host that has [observed](Self::observe) what the calling
    /// thread has stored so later gets these bytes once it observes them. For bytes that only this host writes. Memory that is
    /// coherent between its hosts need not write anything back for it.
    fn share(&self, at: u64, from: &[u8]) {
        self.store(at, from);
        self.publish(at, from.len() as u64);
    }

    /// As [`share`](Self::share), and returns the CRC32C of the bytes that were stored. Each source byte is read once.
    fn share_summed(&self, at: u64, from: &[u8]) -> u32 {
        let mut sum = [0];
        self.store_summed(at, from, from.len(), &mut sum);
        self.publish(at, from.len() as u64);
        sum[0]
    }

    /// The next loads of these bytes get what other hosts have published, not what this host's caches have of an earlier load.
    /// For bytes that this host does not write. Memory that is coherent between its hosts needs nothing for it.
    fn observe(&self, at: u64, length: u64) {
        let _ = (at, length);
    }

    /// Who may have the same memory, which no lock of this kernel tells.
    fn reach(&self) -> Reach {
        Reach::Kernel
    }

    /// Gives the memory up: from now on no store of this process reaches it, [`failed_at`](Self::failed_at) is not `None`, and loads
    /// fail. Memory that others than this kernel reach must implement it.
    fn give_up(&self) {}

    /// A hint that the line at `at` will be used soon.
    fn prefetch(&self, at: u64) {
        let _ = at;
    }

    /// The offset of the first store that has ever failed: from then on a fence proves nothing. Inexpensive; checked
    /// after every fence that leads to an acknowledgement.
    fn failed_at(&self) -> Option<u64> {
        None
    }

    /// The boot of the machine in which this process runs; [`BootId::UNKNOWN`] where it is not known.
    fn boot(&self) -> BootId {
        BootId::UNKNOWN
    }

    /// Whether a crash of the machine leaves a mixture of old and new pages, as in an ordinary file, whose pages the
    /// kernel writes back in any order. False for memory that keeps every fenced store, and for memory whose content
    /// ends with the machine.
    fn mixes_pages(&self) -> bool {
        false
    }

    /// If [`mixes_pages`](Self::mixes_pages): returns when the present content of the pages with these `length` bytes
    /// at `at` is on the disk.
    ///
    /// # Errors
    /// The system error; it is then not known which of the pages are on the disk.
    fn sync(&self, at: u64, length: u64) -> Result<()> {
        let _ = (at, length);
        Ok(())
    }

    /// The kind of the mapping and its copy methods, for status.
    fn describe(&self) -> String {
        String::from("memory")
    }
}

/// Evidence of stores that no fence has followed yet.
#[must_use = "stores in flight are lost by a power cut until they are fenced"]
#[derive(Debug)]
pub struct InFlight(());

impl InFlight {
    /// One token for both: one fence makes both durable.
    pub fn and(self, other: Self) -> Self {
        let Self(()) = other;
        self
    }

    /// As [`and`](Self::and), in place.
    pub fn join(&mut self, other: Self) {
        let Self(()) = other;
    }
}

/// Evidence that the stores are in the persistence domain. Only [`Region::fence`] creates one.
#[derive(Debug)]
pub struct Durable(());

impl Durable {
    /// A second token for another request that the same fence made durable.
    #[must_use]
    pub const fn share(&self) -> Self {
        Self(())
    }
}

/// Bytes that [`Region::write_back`] writes back at once; memory fails in pages.
const WRITE_BACK_STEP: u64 = 4096;

/// Bytes that [`Region::write_back`] reads at once, into a buffer on the stack.
const READ_STEP: usize = 512;

/// The unit in which the kernel writes a file.
const PAGE: u64 = 4096;

/// A persistent memory whose stores return evidence of their durability.
#[derive(Debug)]
pub struct Region<P> {
    memory: P,
    has_sync_failed: AtomicBool,
    taker: Taker,
}

/// Bytes of the name of a host.
const NAME_BYTES: usize = 64;

/// The host that has taken the region; written once.
#[derive(Debug)]
struct Taker {
    is_known: AtomicBool,
    process: AtomicU32,
    name: [AtomicU64; NAME_BYTES / 8],
}

impl Taker {
    const fn none() -> Self {
        Self {
            is_known: AtomicBool::new(false),
            process: AtomicU32::new(0),
            name: [const { AtomicU64::new(0) }; NAME_BYTES / 8],
        }
    }

    fn store(&self, name: &str, process: u32) {
        let mut bytes = [0; NAME_BYTES];
        bytes.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        for (word, bytes) in self.name.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.process.store(process, Ordering::Relaxed);
        self.is_known.store(true, Ordering::Release);
    }

    #[cold]
    fn error(&self) -> Option<Error> {
        if !self.is_known.load(Ordering::Acquire) {
            return None;
        }
        let bytes = self.name.iter().flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        let name: alloc::vec::Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        let process = self.process.load(Ordering::Relaxed);
        Some(Error::new(
            ErrorKind::Stopped,
            format!(
                "another machine has taken the region: {} (process {process} there) opened it while this host gave no sign of life; \
                 nothing is read from it or stored in it any more: end the other one, or use another region, and restart this one",
                if name.is_empty() {
                    "a host".into()
                } else {
                    format!("host {}", String::from_utf8_lossy(&name))
                }
            ),
        ))
    }
}

impl<P: Pmem> Region<P> {
    /// The region in `memory`.
    pub const fn new(memory: P) -> Self {
        Self { memory, has_sync_failed: AtomicBool::new(false), taker: Taker::none() }
    }

    /// The underlying memory, for another use.
    pub fn into_memory(self) -> P {
        self.memory
    }

    /// The underlying memory.
    pub const fn memory(&self) -> &P {
        &self.memory
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.memory.len()
    }

    /// The failures that the region survives.
    pub fn durability(&self) -> Durability {
        self.memory.durability()
    }

    /// Evidence for no store, for code in which a fence is optional.
    pub const fn nothing_in_flight(&self) -> InFlight {
        InFlight(())
    }

    /// Stores bytes; see [`Pmem::store`].
    pub fn store(&self, at: u64, from: &[u8]) -> InFlight {
        self.memory.store(at, from);
        InFlight(())
    }

    /// Stores bytes with checksums; see [`Pmem::store_summed`].
    pub fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) -> InFlight {
        debug_assert_eq!(checksums.len(), blocks_of(from.len(), first), "one checksum for each block");
        self.memory.store_summed(at, from, first, checksums);
        InFlight(())
    }

    /// Stores one line; see [`Pmem::store_line`].
    pub fn store_line(&self, at: u64, line: &[u8; 64]) -> InFlight {
        debug_assert_eq!(at % 64, 0, "a line begins at a multiple of 64");
        self.memory.store_line(at, line);
        InFlight(())
    }

    /// Writes back data that recovery relied on; see [`Pmem::write_back`]. Unreadable memory is left out: no code
    /// relies on it, and a write-back of it would count as a failed store.
    pub fn write_back(&self, point: MutationPoint, at: u64, length: u64) -> InFlight {
        if !point.is_active() {
            return InFlight(());
        }
        for piece in ByteRange::at(at, length).split_at_multiples(WRITE_BACK_STEP) {
            if self.is_readable(piece) {
                self.memory.write_back(piece.start, piece.len());
                continue;
            }
            for line in piece.split_at_multiples(64) {
                if self.is_readable(line) {
                    self.memory.write_back(line.start, line.len());
                }
            }
        }
        InFlight(())
    }

    fn is_readable(&self, range: ByteRange) -> bool {
        let mut bytes = [0; READ_STEP];
        range
            .split_at_multiples(READ_STEP as u64)
            .all(|part| self.memory.load(part.start, &mut bytes[..part.len() as usize]).is_ok())
    }

    /// Fences: the stores in flight are durable.
    pub fn fence(&self, point: MutationPoint, stores: InFlight) -> Durable {
        let InFlight(()) = stores;
        if point.is_active() {
            self.memory.fence();
        }
        Durable(())
    }

    /// Makes the stores in flight durable and visible to other hosts; they were to these bytes. See [`Pmem::publish`].
    pub fn publish(&self, point: MutationPoint, stores: InFlight, at: u64, length: u64) -> Durable {
        let InFlight(()) = stores;
        if point.is_active() {
            self.memory.publish(at, length);
        }
        Durable(())
    }

    /// Stores bytes for other hosts that need not survive a crash; see [`Pmem::share`].
    pub fn share(&self, point: MutationPoint, at: u64, from: &[u8]) {
        if point.is_active() {
            self.memory.share(at, from);
        } else {
            self.memory.store(at, from);
        }
    }

    /// Stores bytes for other hosts with a checksum; see [`Pmem::share_summed`].
    pub fn share_summed(&self, point: MutationPoint, at: u64, from: &[u8]) -> u32 {
        if point.is_active() {
            return self.memory.share_summed(at, from);
        }
        let mut sum = [0];
        self.memory.store_summed(at, from, from.len(), &mut sum);
        sum[0]
    }

    /// Lets the next loads get what other hosts have published; see [`Pmem::observe`].
    pub fn observe(&self, point: MutationPoint, at: u64, length: u64) {
        if point.is_active() {
            self.memory.observe(at, length);
        }
    }

    /// The boot of the machine; see [`Pmem::boot`].
    pub fn boot(&self) -> BootId {
        self.memory.boot()
    }

    /// Whether a crash of the machine mixes old and new pages; see [`Pmem::mixes_pages`].
    pub fn mixes_pages(&self) -> bool {
        self.memory.mixes_pages()
    }

    /// Writes pages to the disk where a crash of the machine would mix them; see [`Pmem::sync`].
    ///
    /// # Errors
    /// The system error.
    pub fn sync(&self, point: MutationPoint, at: u64, length: u64) -> Result<()> {
        if !point.is_active() || !self.memory.mixes_pages() {
            return Ok(());
        }
        self.memory.sync(at, length).inspect_err(|_| self.has_sync_failed.store(true, Ordering::Relaxed))
    }

    /// Whether a [`sync`](Self::sync) has failed. The kernel then considers pages clean that are not on the disk,
    /// including pages outside of the range of that sync. A later sync omits them although it succeeds.
    pub fn has_sync_failed(&self) -> bool {
        self.has_sync_failed.load(Ordering::Relaxed)
    }

    /// Stores one line of each page again, unchanged, so that the next [`sync`](Self::sync) writes the page regardless
    /// of the results of earlier ones. No other thread may store to these pages meanwhile. Unreadable pages are left
    /// out. Blank pages, which may be holes of a file, are left out too. In flight until the caller fences.
    pub fn touch_pages(&self, point: MutationPoint, at: u64, length: u64) -> InFlight {
        if !point.is_active() || !self.memory.mixes_pages() {
            return InFlight(());
        }
        let mut line = [0; 64];
        for page in ByteRange::at(at, length).split_at_multiples(PAGE) {
            let used = page.split_at_multiples(64).find(|at| {
                let is_whole = at.len() == line.len() as u64;
                is_whole && self.memory.load(at.start, &mut line).is_ok() && line != [0; 64]
            });
            if let Some(used) = used {
                self.memory.store_line(used.start, &line);
            }
        }
        InFlight(())
    }

    /// Reads bytes; see [`Pmem::load`].
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if the memory fails.
    pub fn load(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.memory.load(at, into).map_err(|error| self.load_error(error))
    }

    /// Reads bytes with a checksum; see [`Pmem::load_summed`].
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if the memory fails.
    pub fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32> {
        self.memory.load_summed(at, into).map_err(|error| self.load_error(error))
    }

    /// Who has taken the region is in the error of its stores: this one is on the path of each read, whose stack is small.
    #[cold]
    fn load_error(&self, error: MediaError) -> Error {
        if self.taker.is_known.load(Ordering::Acquire) {
            return Error::new(
                ErrorKind::Stopped,
                "another machine has taken the region: nothing is read from it any more",
            );
        }
        error.into()
    }

    /// Who may have the same memory; see [`Pmem::reach`].
    pub fn reach(&self) -> Reach {
        self.memory.reach()
    }

    /// Gives the region up to another host, which has taken it: from now on no store reaches the memory, and all checks of stores
    /// fail.
    pub fn give_up_to(&self, name: &str, process: u32) {
        self.taker.store(name, process);
        self.memory.give_up();
    }

    /// The error of a region that another host has taken, which it names.
    pub fn taken(&self) -> Option<Error> {
        self.taker.error()
    }

    /// # Errors
    /// [`ErrorKind::Media`] once a store to the region has failed: from then on nothing may be acknowledged;
    /// [`ErrorKind::Stopped`] once another host has taken the region.
    pub fn check_stores(&self, point: MutationPoint) -> Result<()> {
        if point.is_active() { self.store_failure().map_or(Ok(()), Err) } else { Ok(()) }
    }

    /// The first failed store, if any, for status.
    pub fn store_failure(&self) -> Option<Error> {
        self.memory.failed_at().map(|at| {
            self.taken().unwrap_or_else(|| {
                Error::new(
                    ErrorKind::Media,
                    format!(
                        "the region's memory failed under a store at byte {at}: it accepts no more writes"
                    ),
                )
            })
        })
    }

    /// Hints that a line will be used soon.
    pub fn prefetch(&self, at: u64) {
        self.memory.prefetch(at);
    }
}

/// Number of checksum blocks in `length` bytes of which the first block holds `first`.
#[must_use]
pub const fn blocks_of(length: usize, first: usize) -> usize {
    if length <= first { 1 } else { 1 + (length - first).div_ceil(CHECKSUM_BLOCK as usize) }
}
