//! The index of a lane: maps each cached block to the record that holds its newest data.
//!
//! A hash table of 4 KiB blocks ([`table`]) in which most blocks are found in the one cache line of their bucket. It grows and
//! shrinks in steps, between which it serves requests ([`tables`]). A block that several records cover in parts has a side entry
//! with one location for each 512 bytes. Side entries are allocated in slabs, so that no commit moves existing ones, and a resize
//! neither.
//!
//! An entry also holds what a read of the block needs, the offset and the checksum of its data, so that a hit does not wait for
//! the record first. This is a copy: if the data does not match the checksum, the read loads the record.
//!
//! Invariants: a location in the index names a segment of this lane that is not retired. The index does not know which of two
//! records is newer: callers apply records in the order of the log.

mod rows;
mod table;
mod tables;

use crate::{
    Environment,
    position::{Location, NONE},
};
use alloc::{boxed::Box, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, SECTOR};
use core::{alloc::Layout, ops::RangeInclusive};
pub(crate) use rows::{SharedLines, Start};
use table::Entry;
use tables::Tables;
pub(crate) use tables::{Memory, RESERVED_MAX, Stepped};

/// Offset and checksum of the data of a whole block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockData {
    /// From the base of the record's segment, in bytes.
    pub offset: u32,
    /// CRC32C of the block.
    pub sum: u32,
}

/// The records that hold a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found<'a> {
    /// One record holds all of it.
    Whole(Location),
    /// Each 512 bytes have a location of their own; `NONE` where nothing is cached.
    Parts(&'a Parts),
}

pub(crate) const PARTS: usize = (CHECKSUM_BLOCK / SECTOR) as usize;
pub(crate) type Parts = [Location; PARTS];

const END: u32 = u32::MAX;
/// Slot bit of an entry whose `segment` is the number of a side entry.
const IN_PARTS: u32 = 1 << 31;
/// Slot bit of an entry that was read since it was written: it gets a second chance.
const WAS_READ: u32 = 1 << 30;
/// Slot bit of an entry whose `data` is known.
const HAS_DATA: u32 = 1 << 29;
/// Slot bit of an entry that got a second chance.
const HAD_CHANCE: u32 = 1 << 28;
/// Slot bit of an entry whose block is metadata of a file system.
const IS_METADATA: u32 = 1 << METADATA_BIT;
const METADATA_BIT: u32 = 27;
const SLOT: u32 = IS_METADATA - 1;
/// Side entries in a slab: a page.
const SIDE_SLAB: usize = 64;

const NO_DATA: BlockData = BlockData { offset: 0, sum: 0 };

/// The index of one lane.
pub(crate) struct Index {
    table: Tables,
    sides: Sides,
    /// Blocks that are metadata, each held whole by one record.
    metadata: u32,
}

/// The side entries.
struct Sides {
    slabs: Vec<Box<[Parts]>>,
    /// Entries that were allocated at least once.
    used: u32,
    /// Free list: each free entry has the number of the next one in place of its first segment.
    free: u32,
}

impl Entry {
    /// The entry of a block that one record holds whole.
    const fn whole(key: u32, location: Location, data: Option<BlockData>) -> Self {
        let (flag, data) = match data {
            Some(data) => (HAS_DATA, data),
            None => (0, NO_DATA),
        };
        Self { key, slot: location.slot | flag, segment: location.segment, data }
    }

    /// The entry of a block of which nothing is known yet.
    const fn fresh(key: u32) -> Self {
        Self { key, slot: SLOT, segment: u32::MAX, data: NO_DATA }
    }

    const fn is_fresh(&self) -> bool {
        self.segment == u32::MAX
    }

    const fn is_in_parts(&self) -> bool {
        self.slot & IN_PARTS != 0
    }

    /// The location of the record that holds the whole block.
    const fn location(&self) -> Location {
        Location { segment: self.segment, slot: self.slot & SLOT }
    }

    /// 1 for a block that is metadata and that one record holds whole, else 0.
    const fn metadata(&self) -> u32 {
        (self.slot & IS_METADATA) >> METADATA_BIT
    }

    fn note_read(&mut self) {
        if self.slot & WAS_READ == 0 {
            self.slot |= WAS_READ;
        }
    }
}

impl Index {
    /// An index that performs best with up to `blocks` blocks. `seed` scatters them; see [`rows::Start::new`].
    pub(crate) fn new(blocks: usize, seed: u32) -> Self {
        let table = Tables::new(blocks, seed).unwrap_or_else(no_memory::<Entry, _>);
        Self { table, sides: Sides { slabs: Vec::new(), used: 0, free: END }, metadata: 0 }
    }

    /// Whether it has, or will have at the end of a resize that is on its way, the size for `blocks` blocks.
    pub(crate) fn is_sized_for(&self, blocks: usize) -> bool {
        self.table.is_sized_for(blocks)
    }

    /// Begins a resize to the blocks for which `memory` was allocated; its steps follow. `false` if one is on its way; nothing
    /// has changed then.
    pub(crate) fn begin_resize(&mut self, memory: &mut Memory) -> bool {
        self.table.begin_resize(memory)
    }

    /// Takes a step of a resize, in bounded time; see [`tables`]. When it is done, `memory` has what was freed.
    pub(crate) fn resize_step(&mut self, memory: &mut Memory) -> Stepped {
        self.table.step(memory)
    }

    /// The progress of a resize, from 0 to 2^32; without one 2^32.
    pub(crate) const fn resized(&self) -> u64 {
        self.table.resized()
    }

    /// Removes all blocks.
    pub(crate) fn clear(&mut self) {
        self.table.clear();
        (self.sides.used, self.sides.free, self.metadata) = (0, END, 0);
    }

    /// Blocks in the index.
    pub(crate) fn live(&self) -> u32 {
        self.table.live()
    }

    /// Blocks in the index that are metadata and that one record holds whole.
    pub(crate) const fn metadata(&self) -> u32 {
        self.metadata
    }

    /// Memory of the index in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.table.bytes() + self.sides.slabs.len() * SIDE_SLAB * size_of::<Parts>()
    }

    /// Reserves memory for `blocks` more blocks, two of them in parts, so that the commit cannot fail. `None` if an allocation
    /// fails.
    pub(crate) fn reserve(&mut self, blocks: usize) -> Option<()> {
        self.table.reserve(blocks)?;
        self.sides.reserve(2)
    }

    /// The begin of the row of the chunk of block `key`: what the operations of a commit need to find its table and buckets.
    #[inline]
    pub(crate) const fn start(&self, key: u32) -> Start {
        self.table.start(key)
    }

    /// Prefetches the lines that commits of the blocks `keys`, in the chunk at `start`, will visit first. No instruction waits for
    /// a prefetch.
    #[inline]
    pub(crate) fn prefetch<E: Environment>(&self, start: Start, keys: RangeInclusive<u32>) {
        self.table.prefetch::<E>(start, keys);
    }

    /// As [`prefetch`](Self::prefetch), for the lines that the commits visit after those, once those have arrived. With
    /// `in_parts` the commits may cover the first and the last block in part.
    #[inline]
    pub(crate) fn prefetch_further<E: Environment>(
        &self,
        start: Start,
        keys: RangeInclusive<u32>,
        in_parts: bool,
    ) {
        if in_parts {
            self.prefetch_parts::<E>(start, *keys.start());
            if keys.start() != keys.end() {
                self.prefetch_parts::<E>(start, *keys.end());
            }
        }
        self.table.prefetch_further::<E>(start, keys);
    }

    /// Prefetches the parts of block `key`, in the chunk at `start`, if its entry is in its bucket and in parts.
    #[inline]
    fn prefetch_parts<E: Environment>(&self, start: Start, key: u32) {
        match self.table.peek(start, key) {
            Some(entry) if entry.is_in_parts() => {
                E::prefetch(core::ptr::from_ref(self.sides.get(entry.segment)).cast());
            }
            _ => {}
        }
    }

    /// Loads the lines that commits of `keys` will touch; see [`Tables::touch_all`].
    pub(crate) fn touch_all(&self, keys: impl Iterator<Item = u32> + Clone) -> u32 {
        self.table.touch_all(keys)
    }

    /// Addresses of its cache lines, or of most of them; they are valid until a resize ends.
    pub(crate) fn lines(&self) -> rows::Lines {
        self.table.lines()
    }

    /// The records that hold block `key`.
    pub(crate) fn get(&self, key: u32) -> Option<Found<'_>> {
        self.table.get(key).map(|entry| self.found(entry))
    }

    /// All blocks, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Found<'_>)> {
        self.table.iter().map(|entry| (entry.key, self.found(entry)))
    }

    /// The number of its buckets, each with three blocks on average when it is full.
    pub(crate) fn buckets(&self) -> usize {
        self.table.buckets()
    }

    /// The blocks of a bucket and of its chain, each with whether it was read since it was written.
    pub(crate) fn blocks_of(&self, bucket: usize) -> impl Iterator<Item = (u32, Found<'_>, bool)> {
        let entries = self.table.entries_of(bucket);
        entries.map(|entry| (entry.key, self.found(entry), entry.slot & WAS_READ != 0))
    }

    fn found(&self, entry: &Entry) -> Found<'_> {
        if entry.is_in_parts() {
            Found::Parts(self.sides.get(entry.segment))
        } else {
            Found::Whole(entry.location())
        }
    }

    /// Notes that the block was read.
    pub(crate) fn note_read(&mut self, key: u32) {
        if let Some(entry) = self.table.get_mut(key) {
            entry.note_read();
        }
    }

    /// Location and data of block `key`, if one record holds all of it and its data is known. Notes that the block was read.
    pub(crate) fn read_whole(&mut self, key: u32) -> Option<(Location, BlockData)> {
        let entry = self.table.get_mut(key)?;
        if entry.slot & (IN_PARTS | HAS_DATA) != HAS_DATA {
            return None;
        }
        entry.note_read();
        Some((entry.location(), entry.data))
    }

    /// Whether the block was read since it was written.
    pub(crate) fn was_read(&self, key: u32) -> bool {
        self.table.get(key).is_some_and(|entry| entry.slot & WAS_READ != 0)
    }

    /// Notes that block `key` got a second chance.
    pub(crate) fn note_chance(&mut self, key: u32) {
        if let Some(entry) = self.table.get_mut(key)
            && !entry.is_in_parts()
        {
            entry.slot |= HAD_CHANCE;
        }
    }

    /// Points the blocks from `key` on, which lie in the chunk at `start`, at `location`. `blocks` has the data of each block, if
    /// known. `is_metadata` is what they are from now on.
    #[inline]
    pub(crate) fn set_whole(
        &mut self,
        start: Start,
        key: u32,
        location: Location,
        is_metadata: bool,
        blocks: impl Iterator<Item = Option<BlockData>>,
    ) {
        debug_assert_eq!(start, self.start(key), "the chunk of the block");
        let entries = blocks.zip(key..).map(|(data, key)| Entry::whole(key, location, data));
        // No new entry has the bit, so that a former one is told from it.
        let mark = u32::from(is_metadata) << METADATA_BIT;
        self.table.get_or_insert_all(start, entries, |entry, new| {
            if entry.slot & (IN_PARTS | IS_METADATA) != 0 {
                if entry.is_in_parts() {
                    self.sides.release(entry.segment);
                } else {
                    self.metadata -= 1;
                }
            }
            *entry = Entry { slot: new.slot | mark, ..new };
            self.metadata += mark >> METADATA_BIT;
        });
    }

    /// Points the parts `first..end` of block `key` at `location`.
    pub(crate) fn set_parts(&mut self, key: u32, first: usize, end: usize, location: Location) {
        let entry = self.table.get_or_insert(Entry::fresh(key));
        if !entry.is_in_parts() {
            let before = if entry.is_fresh() { NONE } else { entry.location() };
            self.metadata -= entry.metadata();
            entry.segment = self.sides.take(before);
            entry.slot = IN_PARTS;
        }
        self.sides.get_mut(entry.segment)[first..end].fill(location);
    }

    /// Removes block `key`, or those of its parts, that are at `location`. Returns whether that was a whole block that
    /// had got a second chance.
    pub(crate) fn remove_at(&mut self, key: u32, location: Location) -> bool {
        let Some(entry) = self.table.get(key) else { return false };
        if !entry.is_in_parts() {
            let had_chance = entry.slot & HAD_CHANCE != 0;
            if entry.location() == location {
                self.metadata -= entry.metadata();
                self.table.remove(key);
                return had_chance;
            }
            return false;
        }
        let side = entry.segment;
        let parts = self.sides.get_mut(side);
        for part in parts.iter_mut().filter(|part| **part == location) {
            *part = NONE;
        }
        if parts.iter().all(|part| *part == NONE) {
            self.sides.release(side);
            self.table.remove(key);
        }
        false
    }

    /// Removes the parts `first..end` of block `key`, wherever they are. Memory for a block in parts is reserved.
    pub(crate) fn remove_parts(&mut self, key: u32, first: usize, end: usize) {
        let Some(entry) = self.table.get(key) else { return };
        if !entry.is_in_parts() && end - first == PARTS {
            self.metadata -= entry.metadata();
            return self.table.remove(key);
        }
        self.set_parts(key, first, end, NONE);
        self.remove_at(key, NONE);
    }

    /// Removes everything that is in `segment`.
    pub(crate) fn remove_segment(&mut self, segment: u32) {
        let mut gone = Vec::new();
        for (key, found) in self.iter() {
            match found {
                Found::Whole(at) if at.segment == segment => gone.push((key, at)),
                Found::Whole(_) => {}
                Found::Parts(parts) => {
                    gone.extend(parts.iter().filter(|at| at.segment == segment).map(|at| (key, *at)));
                }
            }
        }
        for (key, at) in gone {
            self.remove_at(key, at);
        }
    }
}

/// Handles a failed allocation of an insert for which no memory was reserved. Only recovery inserts so, and a cache cannot be
/// opened without memory for its index.
#[cold]
#[inline(never)]
pub(super) fn no_memory<T, Nothing>() -> Nothing {
    alloc::alloc::handle_alloc_error(Layout::new::<T>())
}

/// Adds a slab of `length` copies of `fresh`. `None` if the allocation fails.
#[cold]
#[inline(never)]
fn add_slab<T: Clone>(slabs: &mut Vec<Box<[T]>>, fresh: T, length: usize) -> Option<()> {
    let mut slab = Vec::new();
    slab.try_reserve_exact(length).ok()?;
    slab.resize(length, fresh);
    slabs.try_reserve(1).ok()?;
    slabs.push(slab.into_boxed_slice());
    Some(())
}

impl Sides {
    fn get(&self, at: u32) -> &Parts {
        &self.slabs[at as usize / SIDE_SLAB][at as usize % SIDE_SLAB]
    }

    fn get_mut(&mut self, at: u32) -> &mut Parts {
        &mut self.slabs[at as usize / SIDE_SLAB][at as usize % SIDE_SLAB]
    }

    /// Reserves memory for `entries` more; entries on the free list are not counted.
    fn reserve(&mut self, entries: usize) -> Option<()> {
        while self.slabs.len() * SIDE_SLAB - (self.used as usize) < entries {
            add_slab(&mut self.slabs, [NONE; PARTS], SIDE_SLAB)?;
        }
        Some(())
    }

    /// Allocates an entry whose parts are all at `all`.
    fn take(&mut self, all: Location) -> u32 {
        let at = if self.free == END {
            self.reserve(1).unwrap_or_else(no_memory::<Parts, _>);
            // There are fewer entries than blocks, and blocks are counted in 32 bits.
            self.used += 1;
            self.used - 1
        } else {
            let at = self.free;
            self.free = self.get(at)[0].segment;
            at
        };
        *self.get_mut(at) = [all; PARTS];
        at
    }

    fn release(&mut self, at: u32) {
        self.get_mut(at)[0].segment = self.free;
        self.free = at;
    }
}

/// The blocks that `range` touches, each with the parts of it that the range covers.
pub(crate) fn blocks(range: ByteRange) -> impl Iterator<Item = (u64, usize, usize)> {
    range.split_at_multiples(CHECKSUM_BLOCK).map(|piece| {
        let block = piece.start / CHECKSUM_BLOCK;
        let base = block * CHECKSUM_BLOCK;
        (block, ((piece.start - base) / SECTOR) as usize, ((piece.end - base) / SECTOR) as usize)
    })
}

#[cfg(test)]
mod tests;
