//! The dirty page log: the pages of the guest's memory that a front end transfers once more while it migrates the guest.
//!
//! The front end hands over a bitmap with one bit for each page of guest physical memory. It takes and clears bits at any
//! time, and transfers their pages afterwards. `vm-memory` calls [`Marks`] after each store to guest memory, whatever is
//! stored: data, statuses, rings.
//!
//! Invariants: a bit is set after the store that it stands for, with release ordering, so whoever clears it transfers what
//! was stored; a bitmap that is marked in has a bit for every page of the guest's memory. No bit is lost between two bitmaps:
//! while the log is on, the next one gets the bits that are left in the former one, and all bits if there was none, because the
//! rings, or a server that was killed, may have stored something of which there is no record.

use crate::malformed;
use crate::mapped::MappedFile;
use crate::memory::MemoryLimits;
use cbd_export::budget::Share;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::{Bytes, VolatileMemory};

/// Bytes of a page, for every guest.
const PAGE: u64 = 4096;
/// Pages of a byte of the bitmap.
const BITS: u64 = 8;

/// The bitmap that a front end has handed over.
#[derive(Debug)]
pub(crate) struct Pages {
    // In this order: the file is unmapped, then no longer counted.
    file: MappedFile,
    _share: Share,
}

impl Pages {
    /// `size` bytes at `offset` of `file`.
    pub(crate) fn open(file: File, offset: u64, size: u64, limits: &MemoryLimits) -> Result<Self> {
        let share = limits.take(size)?;
        Ok(Self { file: MappedFile::open(file, offset, size, "the log of dirty pages")?, _share: share })
    }

    /// The first address of the guest that has no bit.
    fn end(&self) -> u64 {
        (self.file.size() as u64).saturating_mul(BITS * PAGE)
    }

    /// Sets the bits in `to` that are set here; false if this bitmap was lost.
    fn copy_to(&self, to: &Self) -> bool {
        let (from, into) = (self.file.bytes(), to.file.bytes());
        for at in 0..self.file.size().min(to.file.size()) {
            let bits = from.load::<u8>(at, Ordering::Acquire).unwrap_or(u8::MAX);
            if bits != 0
                && let Ok(byte) = into.get_atomic_ref::<AtomicU8>(at)
            {
                byte.fetch_or(bits, Ordering::Release);
            }
        }
        !self.file.is_lost()
    }

    /// Sets the bits of the pages of `length` bytes at `begin`.
    fn mark(&self, begin: u64, length: u64) {
        let last = length.checked_sub(1).and_then(|length| begin.checked_add(length));
        let Some(last) = last.map(|at| at / PAGE) else { return };
        let first = begin / PAGE;
        let bitmap = self.file.bytes();
        for at in first / BITS..=last / BITS {
            let from = first.saturating_sub(at * BITS);
            let to = (last - at * BITS).min(BITS - 1);
            let bits = (0xFF << from) as u8 & (0xFF >> (BITS - 1 - to)) as u8;
            // `DirtyLog` compares the sizes before the log is on.
            let byte = usize::try_from(at).ok().and_then(|at| bitmap.get_atomic_ref::<AtomicU8>(at).ok());
            debug_assert!(byte.is_some(), "page {} has no bit", at * BITS + from);
            if let Some(byte) = byte {
                // After the store to the guest's memory: who clears the bit sees the store.
                byte.fetch_or(bits, Ordering::Release);
            }
        }
    }
}

/// The log of a front end's guest.
#[derive(Debug, Default)]
pub(crate) struct DirtyLog {
    /// Whether the front end has turned it on. Changes only while no ring runs, as the next two.
    is_on: AtomicBool,
    /// Whether it is on and has a bitmap.
    is_marking: AtomicBool,
    pages: RwLock<Option<Arc<Pages>>>,
}

impl DirtyLog {
    fn pages(&self) -> Option<Arc<Pages>> {
        self.pages.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_pages(&self, pages: Option<Pages>) {
        *self.pages.write().unwrap_or_else(PoisonError::into_inner) = pages.map(Arc::new);
        self.update();
    }

    fn update(&self) {
        let is_marking = self.is_on.load(Ordering::Acquire) && self.pages().is_some();
        self.is_marking.store(is_marking, Ordering::Release);
    }

    /// The name of the file of its bitmap, from the kernel.
    pub(crate) fn file(&self) -> Option<String> {
        self.pages().and_then(|pages| pages.file.name())
    }

    /// Bytes of its bitmap.
    pub(crate) fn bytes(&self) -> u64 {
        self.pages().map_or(0, |pages| pages.file.size() as u64)
    }

    /// Turns the log on or off, for memory that ends at `end`; no ring runs. A bitmap from before that is too small now is not used:
    /// the front end passes another one.
    pub(crate) fn turn(&self, on: bool, end: u64) {
        self.is_on.store(on, Ordering::Release);
        if on && self.pages().is_some_and(|pages| end > pages.end()) {
            self.set_pages(None);
        }
        self.update();
    }

    /// Checks the bitmap of a log that is on against memory that ends at `end`. If no ring `is_set_up`, the front end passes another
    /// bitmap with the rings, and one that is too small is not used any more; otherwise it must have passed one before.
    pub(crate) fn check_memory(&self, end: u64, is_set_up: bool) -> Result<()> {
        let Some(pages) = self.pages().filter(|_| self.is_on.load(Ordering::Acquire)) else { return Ok(()) };
        let covered = covers(&pages, end);
        if covered.is_err() && !is_set_up {
            self.set_pages(None);
            return Ok(());
        }
        covered
    }

    /// Continues with another bitmap, for memory that consists of `pieces` (address and bytes); no ring runs.
    pub(crate) fn replace(
        &self,
        pages: Pages,
        pieces: impl Iterator<Item = (u64, u64)> + Clone,
    ) -> Result<()> {
        if self.is_on.load(Ordering::Acquire) {
            covers(&pages, pieces.clone().map(|(begin, length)| begin + length).max().unwrap_or(0))?;
            if !self.pages().is_some_and(|former| former.copy_to(&pages)) {
                pieces.for_each(|(begin, length)| pages.mark(begin, length));
            }
        }
        self.set_pages(Some(pages));
        Ok(())
    }

    /// Fails if the bitmap was lost: bits that were set since then are not in it.
    pub(crate) fn check(&self) -> Result<()> {
        if self.pages().is_some_and(|pages| pages.file.is_lost()) {
            return Err(Error::new(
                ErrorKind::Media,
                "the log of dirty pages was removed: its file was truncated",
            ));
        }
        Ok(())
    }

    fn mark(&self, begin: u64, length: usize) {
        if !self.is_marking.load(Ordering::Acquire) {
            return;
        }
        if let Some(pages) = &*self.pages.read().unwrap_or_else(PoisonError::into_inner) {
            pages.mark(begin, length as u64);
        }
    }
}

fn covers(pages: &Pages, end: u64) -> Result<()> {
    if end <= pages.end() {
        return Ok(());
    }
    Err(malformed(format!(
        "the log of dirty pages ends at {:#x} of the guest's memory, which ends at {end:#x}",
        pages.end()
    )))
}

/// Where `vm-memory` reports stores to a piece of the guest's memory.
#[derive(Debug)]
pub(crate) struct Marks {
    log: Arc<DirtyLog>,
    /// Guest physical address of the piece.
    begin: u64,
}

impl Marks {
    /// Of a piece at the guest physical address `begin`.
    pub(crate) fn new(log: &Arc<DirtyLog>, begin: u64) -> Self {
        Self { log: Arc::clone(log), begin }
    }

    fn part(&self) -> PartMarks<'_> {
        PartMarks { log: &self.log, begin: self.begin }
    }
}

/// [`Marks`] of a part of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartMarks<'a> {
    log: &'a DirtyLog,
    begin: u64,
}

impl<'a> WithBitmapSlice<'a> for Marks {
    type S = PartMarks<'a>;
}

impl Bitmap for Marks {
    fn mark_dirty(&self, offset: usize, length: usize) {
        self.part().mark_dirty(offset, length);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.part().dirty_at(offset)
    }

    fn slice_at(&self, offset: usize) -> PartMarks<'_> {
        self.part().slice_at(offset)
    }
}

impl WithBitmapSlice<'_> for PartMarks<'_> {
    type S = Self;
}

impl BitmapSlice for PartMarks<'_> {}

impl Bitmap for PartMarks<'_> {
    fn mark_dirty(&self, offset: usize, length: usize) {
        self.log.mark(self.begin.saturating_add(offset as u64), length);
    }

    /// Only front ends read the log.
    fn dirty_at(&self, _offset: usize) -> bool {
        false
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { log: self.log, begin: self.begin.saturating_add(offset as u64) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system;
    use cbd_export::budget::Budget;

    fn limits() -> MemoryLimits {
        MemoryLimits { each: 1 << 30, all: Budget::new(1 << 20) }
    }

    fn pages(bytes: u64) -> Pages {
        Pages::open(system::sealed_memory(bytes).expect("memory"), 0, bytes, &limits()).expect("a bitmap")
    }

    fn bits(pages: &Pages) -> Vec<u8> {
        let mut bits = vec![0; pages.file.size()];
        pages.file.bytes().read_slice(&mut bits, 0).expect("inside");
        bits
    }

    #[test]
    fn each_page_of_a_range_has_its_bit() {
        for (begin, length, wanted) in [
            (0, 1, [1, 0, 0, 0]),
            (4095, 1, [1, 0, 0, 0]),
            (4095, 2, [3, 0, 0, 0]),
            (7 * 4096, 4096, [0x80, 0, 0, 0]),
            (7 * 4096, 4097, [0x80, 1, 0, 0]),
            (2 * 4096, 4 * 4096, [0x3C, 0, 0, 0]),
            (6 * 4096 + 5, 17 * 4096, [0xC0, 0xFF, 0xFF, 0]),
            (31 * 4096, 4096, [0, 0, 0, 0x80]),
            (5, 0, [0; 4]),
        ] {
            let pages = pages(4);
            pages.mark(begin, length);
            assert_eq!(bits(&pages), wanted, "{length} bytes at {begin}");
        }
    }

    #[test]
    fn parts_of_a_piece_mark_their_own_pages_while_the_log_is_on() {
        let log = Arc::new(DirtyLog::default());
        let end = 32 * PAGE;
        log.replace(pages(4), [(0, end)].into_iter()).expect("a bitmap");
        let marks = Marks::new(&log, 8 * PAGE);
        let part = marks.slice_at(4096).slice_at(4096);
        part.mark_dirty(0, 1);
        assert_eq!(bits(&log.pages().expect("there")), [0; 4]);
        log.turn(true, end);
        part.mark_dirty(0, 1);
        marks.mark_dirty(5 * 4096, 4096);
        assert_eq!(bits(&log.pages().expect("there")), [0, 0b10_0100, 0, 0]);
        log.turn(false, end);
        marks.mark_dirty(0, 1);
        assert_eq!(bits(&log.pages().expect("there")), [0, 0b10_0100, 0, 0]);
    }

    #[test]
    fn the_first_bitmap_of_a_log_that_is_on_has_all_pages_and_the_next_one_those_that_are_left() {
        let log = DirtyLog::default();
        let pieces = [(PAGE, 2 * PAGE), (9 * PAGE, PAGE)];
        log.turn(true, 10 * PAGE);
        log.replace(pages(2), pieces.into_iter()).expect("a bitmap");
        assert_eq!(bits(&log.pages().expect("there")), [0b110, 0b10]);
        let first = log.pages().expect("there");
        first.file.bytes().store(0_u8, 0, Ordering::Release).expect("cleared");
        log.replace(pages(3), pieces.into_iter()).expect("another one");
        assert_eq!(bits(&log.pages().expect("there")), [0, 0b10, 0]);
        log.turn(false, 10 * PAGE);
        log.replace(pages(2), pieces.into_iter()).expect("for a later migration");
        assert_eq!(bits(&log.pages().expect("there")), [0, 0]);
    }

    #[test]
    fn a_bitmap_that_is_too_small_is_refused_or_not_used_while_the_log_is_on() {
        let log = DirtyLog::default();
        log.replace(pages(1), [(0, 9 * PAGE)].into_iter()).expect("the log is off");
        log.check_memory(9 * PAGE, true).expect("the log is off");
        log.turn(true, 8 * PAGE);
        assert!(log.check_memory(8 * PAGE, true).is_ok() && log.is_marking.load(Ordering::Acquire));
        assert!(log.check_memory(8 * PAGE + 1, true).is_err());
        let refused = log.replace(pages(1), [(0, 9 * PAGE)].into_iter()).expect_err("too small");
        assert!(refused.line().contains("ends at 0x8000"));
        // Without rings the next one is the first.
        log.check_memory(8 * PAGE + 1, false).expect("another one follows");
        assert!(!log.is_marking.load(Ordering::Acquire));
        log.replace(pages(2), [(0, 9 * PAGE)].into_iter()).expect("large enough");
        assert_eq!(bits(&log.pages().expect("there")), [0xFF, 1]);
        // One from before that is too small when the log is turned on again.
        log.turn(false, 9 * PAGE);
        log.turn(true, 17 * PAGE);
        assert!(log.pages().is_none());
    }

    #[test]
    fn a_bitmap_that_is_not_in_its_file_or_beyond_the_limit_is_refused() {
        let file = || system::sealed_memory(4096).expect("memory");
        for (offset, size) in [(0, 0), (0, 4097), (4096, 1), (u64::MAX, 2)] {
            assert!(Pages::open(file(), offset, size, &limits()).is_err(), "{size} bytes at {offset}");
        }
        let few = MemoryLimits { each: 1 << 30, all: Budget::new(4095) };
        let refused = Pages::open(file(), 0, 4096, &few).expect_err("beyond the limit");
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
    }
}
