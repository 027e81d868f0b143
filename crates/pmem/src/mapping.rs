//! A mapped region: the persistent memory that the engine stores into.
//!
//! Invariants: while a [`Mapping`] lives, its region is locked against other daemons. A failed store is recorded permanently
//! ([`Mapping::failed`]): from then on a fence of this mapping proves nothing, and code that completes requests after a fence
//! must check this first.
//!
//! Elsewhere: opening (`open`), copying (`copy`), the content (the engine).

use crate::boot::this_boot;
use crate::calibrate::{Calibration, Figures, calibrate};
use crate::collapse::Collapse;
use crate::copy::{self, Fault};
use crate::errors::from_io;
use crate::extend;
use crate::file::{HostLocks, Locked};
use crate::memory::Memory;
use crate::methods::{Available, CLASS_SIZES, CopyMethod, Methods};
use crate::open::{self, OpenOptions, Opened, Opening};
use crate::processor::Flush;
use crate::routines::{fence, processor as routines};
use crate::sharing;
use cbd_holder::Change;
use cbd_sys::memory::Hint;
use cbd_types::{BootId, Durability, Error, ErrorKind, MediaError, Pmem, Reach, Result};
use core::fmt::Write;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The kind of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// A file on a DAX file system, mapped synchronously.
    DaxFile,
    /// A device-DAX character device.
    DeviceDax,
    /// A file in the page cache of another file system.
    File,
    /// A file in shared memory.
    Tmpfs,
    /// Memory without a file.
    Memfd,
}

impl Kind {
    /// The name in the output of `status`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DaxFile => "dax-file",
            Self::DeviceDax => "devdax",
            Self::File => "file",
            Self::Tmpfs => "tmpfs",
            Self::Memfd => "memfd",
        }
    }
}

/// The copy methods of one class of sizes.
#[derive(Clone, PartialEq, Debug)]
pub struct SizeMethod {
    /// The size that was measured, in bytes; sizes near it share the method.
    pub size: usize,
    /// The method of stores.
    pub store: CopyMethod,
    /// The method of stores with a checksum in one pass; `None` if the checksum is computed over a copy.
    pub store_summed: Option<CopyMethod>,
    /// Nanoseconds of a durable store with its fence; `None` if the method was not chosen by measurement.
    pub store_ns: Option<f64>,
    /// Nanoseconds of a durable store with checksum and fence.
    pub store_summed_ns: Option<f64>,
}

/// The properties of a mapping, for status.
#[derive(Clone, PartialEq, Debug)]
pub struct Info {
    /// The kind of the mapping.
    pub kind: Kind,
    /// The failures that its content survives.
    pub durability: Durability,
    /// Bytes.
    pub size: u64,
    /// The file system of its file.
    pub file_system: String,
    /// The copy methods, by size.
    pub methods: Vec<SizeMethod>,
    /// The write-back instruction.
    pub flush: Flush,
    /// The duration of the open.
    pub opening: Opening,
    /// Whether the kernel keeps its descriptions of the pages in the device itself: another machine that has it mapped overwrites them.
    pub pages_in_device: bool,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

/// The value of `failed` while no store has failed.
const NONE: u64 = u64::MAX;

/// What the caches of the hosts do that have a memory mapped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Coherence {
    /// A load of a host gets what another host has stored.
    Hardware,
    /// Only what was written back, once the loading host has dropped its copy of the line.
    Software,
}

/// A region, locked and mapped.
#[derive(Debug)]
pub struct Mapping {
    /// Dropped before the memory is unmapped: fields are dropped in their order. Locked while the mapping grows.
    collapses: Mutex<Vec<Collapse>>,
    memory: Memory,
    methods: Methods,
    /// The offset of the first failed store. Written with plain stores: this path must not use a locked instruction.
    failed: AtomicU64,
    kind: Kind,
    durability: Durability,
    file_system: String,
    pages_in_device: bool,
    warnings: Vec<String>,
    /// The bytes that were mapped where the file system lacked space for more, and why. True until the mapping grows.
    no_space: Option<(usize, String)>,
    opening: Opening,
    boot: BootId,
    mixes_pages: bool,
    /// `None`: as [`reach`](Pmem::reach) says.
    coherence: Option<Coherence>,
    figures: Option<[Figures; CLASS_SIZES.len()]>,
    /// Touch every page, also of what it grows by.
    populate: bool,
    /// Holds the lock of the region.
    file: Option<Locked>,
}

pub(crate) fn available() -> &'static Available {
    static AVAILABLE: OnceLock<Available> = OnceLock::new();
    AVAILABLE.get_or_init(Available::detect)
}

/// The result of one measurement, on memory of this process.
fn calibrated() -> Option<&'static Calibration> {
    static CALIBRATED: OnceLock<Option<Calibration>> = OnceLock::new();
    const SCRATCH: usize = 8 << 20;
    CALIBRATED
        .get_or_init(|| {
            let memory = Memory::scratch(SCRATCH).ok()?.ok()?;
            let _ = memory.advise(Hint::HugePages);
            let _ = memory.advise(Hint::Populate);
            calibrate(available(), &memory, 0, SCRATCH as u64)
        })
        .as_ref()
}

impl Mapping {
    /// Opens, locks and maps the region at `path`: a file or a device-DAX device.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another daemon has it; [`ErrorKind::NoSpace`] if its space cannot be allocated;
    /// [`ErrorKind::InvalidArgument`] for objects that cannot be a region (a block device, a directory), or are too small;
    /// and system errors. The file is then unchanged.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        let forced = CopyMethod::from_environment()?.or(options.copy);
        let methods = choose(forced)?;
        let opened = open::open(path.as_ref(), options, available().processor.flush)?;
        let mut mapping = Self { coherence: options.coherence, ..Self::new(opened, methods) };
        if let Some(boot) = options.boot {
            (mapping.boot, mapping.mixes_pages) = (boot, true);
        }
        Ok(mapping)
    }

    /// A region of `size` bytes in memory; it is freed when the process ends.
    ///
    /// # Errors
    /// If the memory cannot be allocated.
    pub fn anonymous(size: u64) -> Result<Self> {
        Self::anonymous_with(size, None)
    }

    /// As [`anonymous`](Self::anonymous), with the copy method `method` if one is given.
    ///
    /// # Errors
    /// If the memory cannot be allocated, or the processor lacks the method.
    pub fn anonymous_with(size: u64, method: Option<CopyMethod>) -> Result<Self> {
        let methods = choose(CopyMethod::from_environment()?.or(method))?;
        Ok(Self::new(open::anonymous(size)?, methods))
    }

    fn new(opened: Opened, (methods, figures): Chosen) -> Self {
        Self {
            no_space: opened.no_space.map(|why| (opened.memory.len(), why)),
            collapses: Mutex::new(match opened.kind {
                Kind::Tmpfs => vec![Collapse::begin(&opened.memory)],
                _ => Vec::new(),
            }),
            memory: opened.memory,
            methods,
            failed: AtomicU64::new(NONE),
            kind: opened.kind,
            durability: opened.durability,
            opening: opened.opening,
            boot: this_boot(),
            // Memory without a file on a disk is either lost with the machine, or keeps every store.
            mixes_pages: opened.durability != Durability::PowerFail
                && matches!(opened.kind, Kind::File | Kind::DaxFile),
            coherence: None,
            file_system: opened.file_system,
            pages_in_device: opened.pages_in_device,
            warnings: opened.warnings,
            figures,
            populate: opened.populate,
            file: opened.file,
        }
    }

    /// Lets other hosts open the region, which they share. Returns the locks of its hosts; `None` for memory that no other process can
    /// open.
    ///
    /// # Errors
    /// System errors.
    pub fn share_with_hosts(&self) -> Result<Option<HostLocks>> {
        let Some(file) = &self.file else { return Ok(None) };
        let failed =
            |error: io::Error| from_io(&error, "the lock of the region cannot be shared with other hosts");
        file.share_with_hosts().map_err(failed)?;
        HostLocks::of(file).map(Some).map_err(failed)
    }

    /// The size that the region can grow to: that of its file or device now, or `wanted`, to which a file can be extended. Nothing
    /// changes. `path` is the one that it was opened as.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a size that the file or device does not have and cannot get;
    /// [`ErrorKind::Unsupported`] for memory without a file; [`ErrorKind::Media`] for a file that was deleted or cut short;
    /// [`ErrorKind::NoSpace`] without address space behind the region; system errors.
    pub fn size_to_grow_to(&self, path: &Path, wanted: Option<u64>) -> Result<u64> {
        extend::size_to_grow_to(self.file.as_ref(), &self.memory, path, wanted)
    }

    /// Bytes of the region's file or device now, as far as they can be mapped; `None` if that is not known.
    #[must_use]
    pub fn size_of_file(&self, path: &Path) -> Option<u64> {
        extend::size_now(self.file.as_ref()?, path).ok()
    }

    /// Grows to `size` bytes, of [`size_to_grow_to`](Self::size_to_grow_to), while threads use the memory: a smaller file is
    /// extended, with allocated space. Nothing else changes in the file.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if its file system has too little; system errors. The file is unchanged then.
    pub fn grow(&self, path: &Path, size: u64) -> Result<()> {
        let mut collapses = self.collapses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = self.failed() {
            return Err(Error::new(
                ErrorKind::Media,
                format!("a store into the region failed at byte {at}: it does not grow any more"),
            ));
        }
        let from = self.memory.len();
        let Some(file) = self.file.as_ref().filter(|_| size > from as u64) else { return Ok(()) };
        extend::extend(file, &self.memory, path, size)?;
        let _ = open::advise(&self.memory, from, self.kind, self.populate);
        if self.kind == Kind::Tmpfs {
            collapses.push(Collapse::begin_from(&self.memory, from));
        }
        Ok(())
    }

    /// The change of the region's file, which was opened as `path`: deleted or moved. This queries the file's file system,
    /// which may respond slowly. A truncation is not reported here: an access to the missing part reports it.
    #[must_use]
    pub fn change(&self, path: &Path) -> Option<Change> {
        cbd_holder::change::of(self.file.as_ref()?.as_fd(), path, 0)
    }

    #[cfg(test)]
    pub(crate) const fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The mapped file, if the mapping has one.
    pub(crate) fn file(&self) -> Option<&Locked> {
        self.file.as_ref()
    }

    /// Measures the methods again on this memory, in a range of at least 2 MiB without data, which is overwritten. This takes
    /// some tens of milliseconds.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] if the range is not inside the region or is too small; [`ErrorKind::Media`] if memory fails.
    pub fn calibrate(&mut self, free: Range<u64>) -> Result<()> {
        let length = free.end.saturating_sub(free.start);
        if free.end > self.len() || length < 2 << 20 {
            return Err(Error::new(
                ErrorKind::OutOfRange,
                format!(
                    "bytes {}..{} of a region of {} cannot be measured on",
                    free.start,
                    free.end,
                    self.len()
                ),
            ));
        }
        if CopyMethod::from_environment()?.is_some() {
            return Ok(());
        }
        let Some(calibration) = calibrate(available(), &self.memory, free.start, length) else {
            return Err(Error::new(
                ErrorKind::Media,
                format!("the region's memory fails somewhere in bytes {}..{}", free.start, free.end),
            ));
        };
        self.methods = calibration.methods;
        self.figures = Some(calibration.figures);
        Ok(())
    }

    /// The offset of the first failed store or write-back. Data that was fenced since then may not be durable: code that
    /// completes requests checks this after the fence and before the completion. It costs one load.
    #[inline]
    pub fn failed(&self) -> Option<u64> {
        let at = self.failed.load(Ordering::Relaxed);
        (at != NONE).then_some(at)
    }

    /// Stores and fences with the fastest method and without any other work: benchmarks use this as the bound.
    #[inline]
    pub fn bare_copy(&self, at: u64, from: &[u8]) {
        self.store(at, from);
        self.fence();
    }

    /// The same mapping, with this coherence instead of that of the memory.
    #[must_use]
    pub fn with_coherence(self, coherence: Coherence) -> Self {
        Self { coherence: Some(coherence), ..self }
    }

    /// How hosts see what others store. Unless it was chosen, memory that only one machine has is coherent, and other memory is not.
    #[must_use]
    pub fn coherence(&self) -> Coherence {
        self.coherence.unwrap_or(match self.reach() {
            Reach::Machines => Coherence::Software,
            Reach::Kernel | Reach::Guests => Coherence::Hardware,
        })
    }

    /// The properties of this mapping.
    pub fn info(&self) -> Info {
        let methods = CLASS_SIZES.iter().enumerate().map(|(class, &size)| SizeMethod {
            size,
            store: self.methods.stores[class].method,
            store_summed: self.methods.checksums[class].map(|sum| sum.method),
            store_ns: self.figures.map(|figures| figures[class].store_ns),
            store_summed_ns: self.figures.map(|figures| figures[class].store_summed_ns),
        });
        let no_space =
            self.no_space.iter().filter(|(mapped, _)| *mapped == self.memory.len()).map(|(_, why)| why);
        Info {
            kind: self.kind,
            durability: self.durability,
            size: self.len(),
            file_system: self.file_system.clone(),
            methods: methods.collect(),
            flush: available().processor.flush,
            opening: self.opening,
            pages_in_device: self.pages_in_device,
            warnings: self.warnings.iter().chain(no_space).cloned().collect(),
        }
    }

    /// The offset of a failure in an access of `length` bytes at `at`.
    fn offset_of(&self, fault: Fault, at: u64, length: u64) -> u64 {
        match fault {
            Fault::Failed(failure) if failure.address >= self.memory.base() => {
                let offset = (failure.address - self.memory.base()) as u64;
                // The system may report only the page.
                offset.clamp(at, at.saturating_add(length.saturating_sub(1)))
            }
            _ => at,
        }
    }

    #[inline]
    fn check(&self, done: core::result::Result<(), Fault>, at: u64, length: u64) {
        if let Err(fault) = done {
            self.note(fault, at, length);
        }
    }

    #[cold]
    fn note(&self, fault: Fault, at: u64, length: u64) {
        assert!(
            fault != Fault::Outside,
            "a store of {length} bytes at {at} reaches past the region's {} bytes",
            self.len()
        );
        if self.failed().is_none() {
            self.failed.store(self.offset_of(fault, at, length), Ordering::Relaxed);
        }
    }

    #[cold]
    fn media_error(&self, fault: Fault, at: u64, length: usize) -> MediaError {
        MediaError { at: self.offset_of(fault, at, length as u64) }
    }
}

type Chosen = (Methods, Option<[Figures; CLASS_SIZES.len()]>);

fn choose(forced: Option<CopyMethod>) -> Result<Chosen> {
    if let Some(method) = forced {
        return Ok((available().forced(method)?, None));
    }
    if let Some(calibration) = calibrated() {
        return Ok((calibration.methods, Some(calibration.figures)));
    }
    // Not measured, for lack of memory: use the method that is usually the fastest.
    let first = available().stores.first().map_or(CopyMethod::Portable, |store| store.method);
    Ok((available().forced(first)?, None))
}

impl Pmem for Mapping {
    #[inline]
    fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    fn durability(&self) -> Durability {
        self.durability
    }

    #[inline]
    fn store(&self, at: u64, from: &[u8]) {
        self.check(copy::store(&self.memory, &self.methods, at, from), at, from.len() as u64);
    }

    #[inline]
    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        let done = copy::store_summed(&self.memory, &self.methods, at, from, first, checksums);
        self.check(done, at, from.len() as u64);
    }

    #[inline]
    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.check(copy::store(&self.memory, &self.methods, at, line), at, 64);
    }

    #[inline]
    fn fence(&self) {
        fence();
    }

    #[inline]
    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        let length = into.len();
        copy::load(&self.memory, &self.methods, at, into).map_err(|fault| self.media_error(fault, at, length))
    }

    #[inline]
    fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        let length = into.len();
        copy::load_summed(&self.memory, &self.methods, at, into)
            .map_err(|fault| self.media_error(fault, at, length))
    }

    fn write_back(&self, at: u64, length: u64) {
        self.check(copy::write_back(&self.memory, &self.methods, at, length), at, length);
    }

    fn share(&self, at: u64, from: &[u8]) {
        if self.coherence() == Coherence::Software {
            self.store(at, from);
            return self.publish(at, from.len() as u64);
        }
        // What this thread has shared before is visible first. Pairs with the acquire fence in `observe`.
        std::sync::atomic::fence(Ordering::Release);
        self.check(copy::share(&self.memory, &self.methods, at, from), at, from.len() as u64);
    }

    fn share_summed(&self, at: u64, from: &[u8]) -> u32 {
        let length = from.len() as u64;
        if self.coherence() == Coherence::Software {
            let mut sum = [0];
            self.store_summed(at, from, from.len(), &mut sum);
            self.publish(at, length);
            return sum[0];
        }
        // As in `share`.
        std::sync::atomic::fence(Ordering::Release);
        let shared = sharing::store_summed(&self.memory, &self.methods, at, from);
        // What was not stored is not what the checksum is of: whoever loads it finds a difference.
        let sum = *shared.as_ref().unwrap_or(&0);
        self.check(shared.map(drop), at, length);
        sum
    }

    fn observe(&self, at: u64, length: u64) {
        if self.coherence() == Coherence::Hardware {
            // What is loaded from here on was shared no earlier than what this thread has loaded before.
            return std::sync::atomic::fence(Ordering::Acquire);
        }
        // What was stored before reaches the memory first; the eviction is complete before any later load.
        routines::fence();
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        // A line that cannot be evicted cannot be loaded either, which the load reports.
        let _ = copy::evict(&self.memory, available(), at, length);
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    fn reach(&self) -> Reach {
        match self.kind {
            // Without DAX the pages are in this kernel's cache, which no other one shares.
            _ if self.mixes_pages => Reach::Kernel,
            Kind::DaxFile | Kind::DeviceDax => Reach::Machines,
            Kind::Tmpfs => Reach::Guests,
            Kind::File | Kind::Memfd => Reach::Kernel,
        }
    }

    fn give_up(&self) {
        let _growing = self.collapses.lock().unwrap_or_else(PoisonError::into_inner);
        // What failed before, if anything did, is of no interest any more.
        self.failed.store(0, Ordering::Relaxed);
        // If the system refuses, the failure stays recorded, so that nothing is acknowledged.
        let _ = self.memory.give_up();
    }

    #[inline]
    fn prefetch(&self, at: u64) {
        if let Some(line) = self.memory.pointer(at, 1) {
            routines::prefetch(line);
        }
    }

    #[inline]
    fn failed_at(&self) -> Option<u64> {
        self.failed()
    }

    fn boot(&self) -> BootId {
        self.boot
    }

    fn mixes_pages(&self) -> bool {
        self.mixes_pages
    }

    fn sync(&self, at: u64, length: u64) -> Result<()> {
        self.memory
            .sync(at, length)
            .map_err(|error| from_io(&error, "the region's pages cannot be brought to its disk"))
    }

    fn describe(&self) -> String {
        let info = self.info();
        let mut text =
            format!("{} on {}, {}, copies", info.kind.name(), info.file_system, info.durability.name());
        let mut last = None;
        for method in &info.methods {
            if last != Some(method.store) {
                let comma = if last.is_some() { "," } else { "" };
                let _ = write!(text, "{comma} {} from {} bytes", method.store, method.size);
                last = Some(method.store);
            }
        }
        let _ = write!(text, ", write-back {}", info.flush);
        if self.coherence() == Coherence::Software {
            text.push_str(", software coherence");
        }
        text
    }
}

#[cfg(test)]
mod tests;
