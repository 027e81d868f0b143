//! The guest's memory: mappings of the files that a front end handed over.
//!
//! Invariants: pieces do not overlap; a piece is no larger than its file was when it was mapped; a later truncation of
//! the file is detected ([`GuestMap::check`]); the memory is accessed only by copies and atomics, never through a
//! reference; the sizes of all pieces are counted before anything is mapped, for this front end and for all of them
//! together ([`MemoryLimits`]): address space that front ends use is not available for threads and buffers.

use crate::dirty_log::{DirtyLog, Marks};
use crate::malformed;
use crate::mapped::check_size;
use crate::threads::name_of;
use cbd_export::budget::{Budget, Share};
use cbd_guard::Registration;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::sync::Arc;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

/// Most pieces of one guest: as many as a message of the protocol can hold.
pub(crate) const PIECES_MAX: usize = 32;

/// A piece of memory as the front end describes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    /// Guest physical address.
    pub(crate) guest: u64,
    /// Bytes.
    pub(crate) size: u64,
    /// Address in the front end; ring addresses in messages are such addresses.
    pub(crate) front_end: u64,
    /// Offset in its file.
    pub(crate) offset: u64,
}

/// Limits on the memory that front ends may hand over.
#[derive(Clone, Debug)]
pub(crate) struct MemoryLimits {
    /// Most bytes of one front end.
    pub(crate) each: u64,
    /// Most bytes of all front ends together.
    pub(crate) all: Arc<Budget>,
}

impl MemoryLimits {
    /// Refuses pieces that are too large together, with a log of dirty pages of `log` bytes, before any of them is mapped.
    fn check(&self, pieces: impl Iterator<Item = Piece>, log: u64) -> Result<()> {
        let sum = pieces.fold(log, |sum: u64, piece| sum.saturating_add(piece.size));
        if sum <= self.each {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "the front end hands over {sum} bytes of memory; one front end may hand over {} (guest_memory_max in the \
                 configuration)",
                self.each
            ),
        ))
    }

    /// Takes bytes from the budget of all front ends.
    pub(crate) fn take(&self, bytes: u64) -> Result<Share> {
        self.all.take(bytes).ok_or_else(|| {
            Error::new(
                ErrorKind::NoSpace,
                format!(
                    "the front end hands over {bytes} bytes of memory more; all front ends of this process have {} and may have {} \
                     together (guest_memory_total in the configuration)",
                    self.all.used(),
                    self.all.limit()
                ),
            )
        })
    }
}

#[derive(Debug)]
struct Mapped {
    piece: Piece,
    // In this order: the address range is deregistered, then unmapped, then no longer counted.
    guard: Registration,
    region: Arc<GuestRegionMmap<Marks>>,
    _share: Share,
}

/// An immutable map of a guest's memory; a change creates a new one.
#[derive(Debug)]
pub(crate) struct GuestMap {
    memory: GuestMemoryMmap<Marks>,
    mapped: Vec<Arc<Mapped>>,
    dirty: Arc<DirtyLog>,
    /// Number of lost mappings before this map was created.
    losses: u64,
}

impl GuestMap {
    pub(crate) fn empty(dirty: &Arc<DirtyLog>) -> Self {
        Self {
            memory: GuestMemoryMmap::default(),
            mapped: Vec::new(),
            dirty: Arc::clone(dirty),
            losses: cbd_guard::losses(),
        }
    }

    /// A map of these pieces; stores to them are logged in `dirty`.
    pub(crate) fn new(
        pieces: Vec<(Piece, File)>,
        limits: &MemoryLimits,
        dirty: &Arc<DirtyLog>,
    ) -> Result<Self> {
        let losses = cbd_guard::losses();
        check_count(pieces.len())?;
        limits.check(pieces.iter().map(|(piece, _)| *piece), dirty.bytes())?;
        let mapped =
            pieces.into_iter().map(|(piece, file)| map(piece, file, limits, dirty)).collect::<Result<_>>()?;
        Self::of(mapped, dirty, losses)
    }

    /// The same map with one more piece.
    pub(crate) fn with(&self, piece: Piece, file: File, limits: &MemoryLimits) -> Result<Self> {
        check_count(self.mapped.len() + 1)?;
        limits.check(self.mapped.iter().map(|mapped| mapped.piece).chain([piece]), self.dirty.bytes())?;
        let mut mapped = self.mapped.clone();
        mapped.push(map(piece, file, limits, &self.dirty)?);
        Self::of(mapped, &self.dirty, self.losses)
    }

    /// The same map without a piece; its offset in the file is not compared.
    pub(crate) fn without(&self, piece: Piece) -> Result<Self> {
        let same = |mapped: &Arc<Mapped>| {
            let other = mapped.piece;
            (other.guest, other.size, other.front_end) == (piece.guest, piece.size, piece.front_end)
        };
        if !self.mapped.iter().any(same) {
            return Err(malformed(format!(
                "the front end removes {} bytes at {:#x} of the guest, which it has not handed over",
                piece.size, piece.guest
            )));
        }
        let left = self.mapped.iter().filter(|mapped| !same(mapped)).cloned().collect();
        Self::of(left, &self.dirty, self.losses)
    }

    fn of(mut mapped: Vec<Arc<Mapped>>, dirty: &Arc<DirtyLog>, losses: u64) -> Result<Self> {
        mapped.sort_by_key(|mapped| mapped.piece.guest);
        let regions = mapped.iter().map(|mapped| Arc::clone(&mapped.region)).collect::<Vec<_>>();
        let memory = if regions.is_empty() {
            GuestMemoryMmap::default()
        } else {
            GuestMemoryMmap::from_arc_regions(regions)
                .map_err(|error| malformed(format!("the guest's memory map is invalid: {error}")))?
        };
        Ok(Self { memory, mapped, dirty: Arc::clone(dirty), losses })
    }

    /// The memory itself.
    pub(crate) fn memory(&self) -> &GuestMemoryMmap<Marks> {
        &self.memory
    }

    /// Guest physical addresses and bytes of its pieces.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, u64)> + Clone {
        self.mapped.iter().map(|mapped| (mapped.piece.guest, mapped.piece.size))
    }

    /// Refuses a log of dirty pages of this many bytes that is too large beside the memory, before it is mapped.
    pub(crate) fn check_log(&self, bytes: u64, limits: &MemoryLimits) -> Result<()> {
        limits.check(self.mapped.iter().map(|mapped| mapped.piece), bytes)
    }

    /// The address behind the last piece.
    pub(crate) fn end(&self) -> u64 {
        self.pieces().map(|(begin, length)| begin + length).max().unwrap_or(0)
    }

    /// Names of the mapped files, with that of the log of dirty pages, from the kernel.
    pub(crate) fn files(&self) -> Vec<String> {
        let mut files: Vec<String> = self
            .mapped
            .iter()
            .filter_map(|mapped| mapped.region.file_offset())
            .map(|mapped| name_of(mapped.file()))
            .chain(self.dirty.file())
            .collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// The guest physical address of `address` in the front end.
    pub(crate) fn translate(&self, address: u64) -> Option<GuestAddress> {
        self.mapped.iter().map(|mapped| mapped.piece).find_map(|piece| {
            let within = address.checked_sub(piece.front_end).filter(|within| *within < piece.size)?;
            piece.guest.checked_add(within).map(GuestAddress)
        })
    }

    /// Fails if some of the memory was lost: bytes that were read from it since then may be zeroes that the guest did
    /// not write. The same for the log of dirty pages.
    pub(crate) fn check(&self) -> Result<()> {
        if cbd_guard::losses() == self.losses {
            return Ok(());
        }
        match self.mapped.iter().find(|mapped| mapped.guard.is_lost()) {
            None => self.dirty.check(),
            Some(lost) => Err(Error::new(
                ErrorKind::Media,
                format!(
                    "the guest's memory at {:#x} was removed or failed: its file was truncated, or a page is damaged",
                    lost.piece.guest
                ),
            )),
        }
    }
}

fn check_count(pieces: usize) -> Result<()> {
    if pieces > PIECES_MAX {
        return Err(malformed(format!("the front end hands over more than {PIECES_MAX} pieces of memory")));
    }
    Ok(())
}

fn map(piece: Piece, file: File, limits: &MemoryLimits, dirty: &Arc<DirtyLog>) -> Result<Arc<Mapped>> {
    let refused = |why: String| {
        malformed(format!(
            "{} bytes of memory at {:#x} of the guest cannot be mapped: {why}",
            piece.size, piece.guest
        ))
    };
    let size = usize::try_from(piece.size).map_err(|_| refused("too many".into()))?;
    if piece.front_end.checked_add(piece.size).is_none() {
        return Err(refused("its address range in the front end exceeds the address space".into()));
    }
    check_size(&file, piece.offset, piece.size).map_err(refused)?;
    let share = limits.take(piece.size)?;
    let mapping = MmapRegionBuilder::new_with_bitmap(size, Marks::new(dirty, piece.guest))
        .with_file_offset(FileOffset::new(file, piece.offset))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_NORESERVE | libc::MAP_SHARED)
        .build()
        .map_err(|error| refused(error.to_string()))?;
    let region = GuestRegionMmap::new(mapping, GuestAddress(piece.guest))
        .ok_or_else(|| refused("its range in the file overflows".into()))?;
    // SAFETY: `Mapped` drops the mapping after this; all accesses are volatile copies or atomic, and the guest may
    // change the memory at any time.
    let guard = unsafe { Registration::of_zeroes(region.as_ptr() as usize, region.size()) }?;
    debug_assert_eq!(region.len(), piece.size);
    Ok(Arc::new(Mapped { piece, guard, region: Arc::new(region), _share: share }))
}
