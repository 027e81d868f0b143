//! From each cached block of a lane to the record that holds its newest data.
//!
//! A hash table of 4 KiB blocks with chains: one head (4 bytes) and one node (24 bytes) for a block. Heads are
//! fixed when the lane is made and nodes come in slabs, so nothing is ever rehashed and a lookup touches two cache
//! lines. A block that several records cover in parts has a side entry with one location for each 512 bytes; these come in
//! slabs too, so that no commit moves what is there.
//!
//! A node also has what a read of the block needs, the place of its data and their checksum, so that a hit does not wait for the
//! record first. That is a copy: where the data do not match it, the record is asked.
//!
//! Always true here: a location in the index names a segment of this lane that is not retired. The index does not know
//! which of two records is newer: callers apply records in the order of the log.

use crate::Environment;
use alloc::{boxed::Box, vec, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, SECTOR, Safeguard};
use core::ops::RangeInclusive;

/// Where a record stands: the cache's own number of its segment, and its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    pub(crate) segment: u32,
    pub(crate) slot: u32,
}

/// Where the data of a whole block are, and what they sum up to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockData {
    /// From the base of the record's segment, in bytes.
    pub(crate) offset: u32,
    /// CRC32C of the block.
    pub(crate) sum: u32,
}

/// What is known of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found<'a> {
    /// One record holds all of it.
    Whole(Location),
    /// Each 512 bytes have a place of their own; `NONE` where nothing is cached.
    Parts(&'a Parts),
}

pub(crate) const PARTS: usize = (CHECKSUM_BLOCK / SECTOR) as usize;
pub(crate) type Parts = [Location; PARTS];

/// No location.
pub(crate) const NONE: Location = Location { segment: u32::MAX, slot: u32::MAX };

const END: u32 = u32::MAX;
/// Slot bit of a node whose `segment` is the number of a side entry.
const IN_PARTS: u32 = 1 << 31;
/// Slot bit of a node that was read since it was written: it gets a second chance.
const WAS_READ: u32 = 1 << 30;
/// Slot bit of a node whose `data` is known.
const HAS_DATA: u32 = 1 << 29;
const SLOT: u32 = HAS_DATA - 1;
const SLAB: usize = 1024;
/// Side entries in a slab: a page.
const SIDE_SLAB: usize = 64;

#[derive(Clone, Copy)]
struct Node {
    key: u32,
    next: u32,
    slot: u32,
    segment: u32,
    data: BlockData,
}

const NO_DATA: BlockData = BlockData { offset: 0, sum: 0 };

/// The index of one lane.
pub(crate) struct Index {
    heads: Box<[u32]>,
    slabs: Vec<Box<[Node]>>,
    /// Nodes handed out at least once.
    used: u32,
    /// Chain of nodes given back, each with the numbers of more of them.
    free: u32,
    /// How many numbers the first of the chain has; those behind it have all that they can.
    free_noted: u32,
    sides: Sides,
    live: u32,
}

/// The side entries.
struct Sides {
    slabs: Vec<Box<[Parts]>>,
    /// Entries handed out at least once.
    used: u32,
    /// Chain of entries given back, each with the number of the next in place of its first segment.
    free: u32,
}

/// Numbers of other free nodes that a free one has room for.
const NOTED: u32 = 5;

impl Node {
    /// The `place`-th number that a free node has noted.
    const fn noted(&self, place: u32) -> u32 {
        match place {
            0 => self.key,
            1 => self.slot,
            2 => self.segment,
            3 => self.data.offset,
            _ => self.data.sum,
        }
    }

    const fn note(&mut self, place: u32, at: u32) {
        let number = match place {
            0 => &mut self.key,
            1 => &mut self.slot,
            2 => &mut self.segment,
            3 => &mut self.data.offset,
            _ => &mut self.data.sum,
        };
        *number = at;
    }

    fn note_read(&mut self) {
        if self.slot & WAS_READ == 0 {
            self.slot |= WAS_READ;
        }
    }
}

impl Index {
    /// An index that is at its best with about `blocks` blocks.
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            heads: vec![END; blocks.next_power_of_two().clamp(16, 1 << 30)].into_boxed_slice(),
            slabs: Vec::new(),
            used: 0,
            free: END,
            free_noted: 0,
            sides: Sides { slabs: Vec::new(), used: 0, free: END },
            live: 0,
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.heads.fill(END);
        (self.used, self.free, self.free_noted, self.live) = (0, END, 0, 0);
        (self.sides.used, self.sides.free) = (0, END);
    }

    /// Blocks in the index.
    pub(crate) const fn live(&self) -> u32 {
        self.live
    }

    /// Bytes of memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        self.heads.len() * 4
            + self.slabs.len() * SLAB * size_of::<Node>()
            + self.sides.slabs.len() * SIDE_SLAB * size_of::<Parts>()
    }

    /// Makes room for `blocks` more blocks, two of them in parts, so that the commit cannot fail.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        // Nodes given back are not counted: they only make the reserve larger than asked.
        while self.slabs.len() * SLAB - (self.used as usize) < blocks {
            self.slabs.push(
                vec![Node { key: 0, next: END, slot: 0, segment: 0, data: NO_DATA }; SLAB].into_boxed_slice(),
            );
        }
        self.sides.reserve(2);
    }

    /// Asks for the nodes that commits of the blocks `keys` will visit first, and for the free ones that they will take, so that
    /// they need not wait for them later. Only the heads are waited for, and those of a range lie side by side.
    #[inline]
    pub(crate) fn ask<E: Environment>(&self, keys: RangeInclusive<u32>) {
        let blocks = keys.end() - keys.start() + 1;
        for key in keys {
            self.ask_node::<E>(self.heads[self.bucket(key)]);
        }
        if self.free != END {
            let free = self.node(self.free);
            for place in self.free_noted.saturating_sub(blocks)..self.free_noted {
                self.ask_node::<E>(free.noted(place));
            }
            if blocks > self.free_noted {
                self.ask_node::<E>(free.next);
            }
        }
    }

    /// As [`ask`](Self::ask), for the second nodes of their chains, when the first ones have come.
    #[inline]
    pub(crate) fn ask_further<E: Environment>(&self, keys: RangeInclusive<u32>) {
        for key in keys {
            let first = self.heads[self.bucket(key)];
            if first != END && self.node(first).key != key {
                self.ask_node::<E>(self.node(first).next);
            }
        }
    }

    #[inline]
    fn ask_node<E: Environment>(&self, at: u32) {
        if at != END {
            E::prefetch(core::ptr::from_ref(self.node(at)).cast());
        }
    }

    /// Loads the lines that commits of `keys` will touch, so that they do not wait for them later; no load waits for another.
    /// Returns something that depends on all of them, so that the loads are not optimised away.
    pub(crate) fn touch_all(&self, keys: impl Iterator<Item = u32> + Clone) -> u32 {
        let heads = keys.clone().fold(0, |all, key| all ^ self.heads[self.bucket(key)]);
        keys.fold(heads, |all, key| match self.heads[self.bucket(key)] {
            END => all,
            first => all ^ self.node(first).key,
        })
    }

    /// What is known of block `key`.
    pub(crate) fn get(&self, key: u32) -> Option<Found<'_>> {
        Some(self.found(self.node(self.find(key)?)))
    }

    /// All blocks, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Found<'_>)> {
        self.heads.iter().flat_map(move |head| {
            let mut at = *head;
            core::iter::from_fn(move || {
                if at == END {
                    return None;
                }
                let node = self.node(at);
                at = node.next;
                Some((node.key, self.found(node)))
            })
        })
    }

    fn found(&self, node: &Node) -> Found<'_> {
        if node.slot & IN_PARTS != 0 {
            Found::Parts(self.sides.get(node.segment))
        } else {
            Found::Whole(Location { segment: node.segment, slot: node.slot & SLOT })
        }
    }

    /// Notes that the block was read.
    pub(crate) fn note_read(&mut self, key: u32) {
        if let Some(at) = self.find(key) {
            self.node_mut(at).note_read();
        }
    }

    /// Where the data of block `key` are, if one record holds all of it and that is known, and notes that they were read.
    pub(crate) fn read_whole(&mut self, key: u32) -> Option<(Location, BlockData)> {
        let at = self.find(key)?;
        let node = self.node_mut(at);
        if node.slot & (IN_PARTS | HAS_DATA) != HAS_DATA {
            return None;
        }
        node.note_read();
        Some((Location { segment: node.segment, slot: node.slot & SLOT }, node.data))
    }

    /// Whether the block was read since it was written.
    pub(crate) fn was_read(&self, key: u32) -> bool {
        self.find(key).is_some_and(|at| self.node(at).slot & WAS_READ != 0)
    }

    /// All of block `key` is at `location`, its data at `data` if that is known.
    pub(crate) fn set_whole(&mut self, key: u32, location: Location, data: Option<BlockData>) {
        let at = self.find_or_insert(key);
        let node = *self.node(at);
        if node.slot & IN_PARTS != 0 {
            self.sides.give_back(node.segment);
        }
        let node = self.node_mut(at);
        node.segment = location.segment;
        node.slot = location.slot | if data.is_some() { HAS_DATA } else { 0 };
        node.data = data.unwrap_or(NO_DATA);
    }

    /// The parts `first..end` of block `key` are at `location`.
    pub(crate) fn set_parts(&mut self, key: u32, first: usize, end: usize, location: Location) {
        let known = self.find(key);
        let at = self.find_or_insert(key);
        let node = *self.node(at);
        let side = if known.is_some() && node.slot & IN_PARTS != 0 {
            node.segment
        } else {
            let before = match known {
                Some(_) => Location { segment: node.segment, slot: node.slot & SLOT },
                None => NONE,
            };
            let side = self.sides.take(before);
            let node = self.node_mut(at);
            node.segment = side;
            node.slot = IN_PARTS;
            side
        };
        self.sides.get_mut(side)[first..end].fill(location);
    }

    /// Forgets block `key` as far as it is at `location`.
    pub(crate) fn remove_at(&mut self, key: u32, location: Location) {
        let Some(at) = self.find(key) else { return };
        let node = *self.node(at);
        if node.slot & IN_PARTS == 0 {
            let is_own = node.segment == location.segment && node.slot & SLOT == location.slot;
            if Safeguard::ReclaimOwn.holds(is_own) {
                self.unlink(key);
            }
            return;
        }
        let parts = self.sides.get_mut(node.segment);
        for part in parts.iter_mut().filter(|part| **part == location) {
            *part = NONE;
        }
        if parts.iter().all(|part| *part == NONE) {
            self.sides.give_back(node.segment);
            self.unlink(key);
        }
    }

    /// Forgets everything that is in `segment`.
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

    fn bucket(&self, key: u32) -> usize {
        bucket(key, self.heads.len() - 1)
    }

    /// Where the heads are; they stay there as long as the index lives.
    pub(crate) fn heads(&self) -> Heads {
        Heads { at: self.heads.as_ptr().addr(), mask: self.heads.len() - 1 }
    }

    fn node(&self, at: u32) -> &Node {
        &self.slabs[at as usize / SLAB][at as usize % SLAB]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.slabs[at as usize / SLAB][at as usize % SLAB]
    }

    fn find(&self, key: u32) -> Option<u32> {
        let mut at = self.heads[self.bucket(key)];
        while at != END {
            let node = self.node(at);
            if node.key == key {
                return Some(at);
            }
            at = node.next;
        }
        None
    }

    fn find_or_insert(&mut self, key: u32) -> u32 {
        let bucket = self.bucket(key);
        let next = self.heads[bucket];
        let mut at = next;
        while at != END {
            let node = self.node(at);
            if node.key == key {
                return at;
            }
            at = node.next;
        }
        let at = self.take_free().unwrap_or_else(|| {
            self.reserve(1);
            self.used += 1;
            self.used - 1
        });
        *self.node_mut(at) = Node { key, next, slot: SLOT, segment: u32::MAX, data: NO_DATA };
        self.heads[bucket] = at;
        self.live += 1;
        at
    }

    /// A node that was given back. One in six visits the next of the chain and may have to wait for it.
    fn take_free(&mut self) -> Option<u32> {
        if self.free == END {
            return None;
        }
        if let Some(last) = self.free_noted.checked_sub(1) {
            self.free_noted = last;
            return Some(self.node(self.free).noted(last));
        }
        let at = self.free;
        self.free = self.node(at).next;
        self.free_noted = if self.free == END { 0 } else { NOTED };
        Some(at)
    }

    fn give_back(&mut self, at: u32) {
        if self.free != END && self.free_noted < NOTED {
            let place = self.free_noted;
            self.node_mut(self.free).note(place, at);
            self.free_noted += 1;
        } else {
            self.node_mut(at).next = self.free;
            (self.free, self.free_noted) = (at, 0);
        }
    }

    fn unlink(&mut self, key: u32) {
        let bucket = self.bucket(key);
        let mut at = self.heads[bucket];
        let mut before = END;
        while at != END {
            let Node { key: found, next, .. } = *self.node(at);
            if found == key {
                if before == END {
                    self.heads[bucket] = next;
                } else {
                    self.node_mut(before).next = next;
                }
                self.give_back(at);
                self.live -= 1;
                return;
            }
            before = at;
            at = next;
        }
    }
}

/// The bucket of block `key` among `mask` + 1.
const fn bucket(key: u32, mask: usize) -> usize {
    // Blocks of one chunk lie side by side, so that a large request walks through few lines; chunks are
    // scattered, so that equal strides do not meet.
    let chunk = (key >> 10).wrapping_mul(0x9e37_79b1);
    (key.wrapping_add(chunk ^ (chunk >> 15)) as usize) & mask
}

/// Where the heads of an index are, for who has no hold of it yet: only to ask for their lines.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    at: usize,
    mask: usize,
}

impl Heads {
    /// Asks for the line in which the chain of block `key` begins.
    #[inline]
    pub(crate) fn ask<E: Environment>(self, key: u32) {
        E::prefetch(core::ptr::without_provenance(self.at + bucket(key, self.mask) * size_of::<u32>()));
    }
}

impl Sides {
    fn get(&self, at: u32) -> &Parts {
        &self.slabs[at as usize / SIDE_SLAB][at as usize % SIDE_SLAB]
    }

    fn get_mut(&mut self, at: u32) -> &mut Parts {
        &mut self.slabs[at as usize / SIDE_SLAB][at as usize % SIDE_SLAB]
    }

    /// Makes room for `entries` more; what was given back is not counted.
    fn reserve(&mut self, entries: usize) {
        while self.slabs.len() * SIDE_SLAB - (self.used as usize) < entries {
            self.slabs.push(vec![[NONE; PARTS]; SIDE_SLAB].into_boxed_slice());
        }
    }

    /// An entry whose parts are all at `all`.
    fn take(&mut self, all: Location) -> u32 {
        let at = if self.free == END {
            self.reserve(1);
            // Fewer entries than blocks, and blocks are counted in 32 bits.
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

    fn give_back(&mut self, at: u32) {
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
