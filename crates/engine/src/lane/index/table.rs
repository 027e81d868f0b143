//! The hash table of an index: from the number of a block to its entry.
//!
//! A bucket is one cache line with three entries. Entries that do not fit go into a chain of nodes behind it. Three consecutive
//! blocks share a bucket, and the buckets of a chunk are adjacent, so that a large request touches few lines. Chunks are
//! scattered so that neighbouring chunks share the table evenly.
//!
//! Invariants: a chain has nodes only if its bucket is full. The buckets are allocated when the table is created, and nodes are
//! allocated in slabs, so nothing is ever rehashed and no insert moves an entry. A removal moves entries of its own bucket, and
//! one into it.
//!
//! Elsewhere: what an entry means (`index`).

use super::{BlockData, add_slab, no_memory};
use crate::Environment;
use alloc::{boxed::Box, vec, vec::Vec};
use cbd_types::{CHECKSUM_BLOCK, CHUNK};
use core::ops::RangeInclusive;

const END: u32 = u32::MAX;
/// The key of an unused entry: greater than any block number of a lane
/// ([`LaneMap::device_max`](crate::lane::LaneMap::device_max)).
const EMPTY: u32 = u32::MAX;
const LINE: usize = 64;
const PLACES: usize = 3;
const BLOCKS_PER_CHUNK: u32 = (CHUNK / CHECKSUM_BLOCK) as u32;
/// Consecutive chunks that share the table evenly.
const NEIGHBOURS: u32 = 64;
/// Nodes in a slab.
pub(super) const SLAB: usize = 1024;

/// The entry of a block; `index` defines `slot` and `segment`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Entry {
    pub key: u32,
    pub slot: u32,
    pub segment: u32,
    pub data: BlockData,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    entries: [Entry; PLACES],
    next: u32,
}
const _: () = assert!(size_of::<Bucket>() == LINE);

/// An entry whose bucket was full, or a free node, which has the numbers of other free nodes in place of the entry.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Node {
    entry: Entry,
    next: u32,
}

const NO_ENTRY: Entry = Entry { key: EMPTY, slot: 0, segment: 0, data: BlockData { offset: 0, sum: 0 } };
const NO_BUCKET: Bucket = Bucket { entries: [NO_ENTRY; PLACES], next: END };

/// Most numbers of other free nodes that a free node holds.
const NOTED: u32 = 5;

impl Node {
    /// The number at index `place` of those that a free node holds.
    const fn noted(&self, place: u32) -> u32 {
        match place {
            0 => self.entry.key,
            1 => self.entry.slot,
            2 => self.entry.segment,
            3 => self.entry.data.offset,
            _ => self.entry.data.sum,
        }
    }

    const fn note(&mut self, place: u32, at: u32) {
        let number = match place {
            0 => &mut self.entry.key,
            1 => &mut self.entry.slot,
            2 => &mut self.entry.segment,
            3 => &mut self.entry.data.offset,
            _ => &mut self.entry.data.sum,
        };
        *number = at;
    }
}

impl Bucket {
    fn place_of(&self, key: u32) -> Option<usize> {
        self.entries.iter().position(|entry| entry.key == key)
    }
}

pub(super) struct Table {
    seed: u32,
    buckets: Box<[Bucket]>,
    slabs: Vec<Box<[Node]>>,
    /// Nodes that were allocated at least once.
    used: u32,
    /// Free list of nodes, each with the numbers of further free nodes.
    free: u32,
    /// How many numbers the first node of the free list holds; the nodes after it hold as many as they can.
    free_noted: u32,
    live: u32,
}

impl Table {
    /// A table with as many entries in buckets as it is expected to hold blocks. Blocks collide by chance, so one entry in five
    /// finds its bucket full, and the memory of an entry is 28 bytes. `seed` determines which blocks collide, so that a client
    /// that does not know the seed cannot choose blocks that do.
    pub(super) fn new(entries: usize, seed: u32) -> Self {
        let buckets = entries.div_ceil(PLACES).clamp(16, 1 << 30);
        Self {
            seed,
            buckets: vec![NO_BUCKET; buckets].into_boxed_slice(),
            slabs: Vec::new(),
            used: 0,
            free: END,
            free_noted: 0,
            live: 0,
        }
    }

    /// Removes all entries.
    pub(super) fn clear(&mut self) {
        // A table without entries has no chains either. The time of a fill is proportional to the size of the table.
        if self.live > 0 {
            self.buckets.fill(NO_BUCKET);
        }
        (self.used, self.free, self.free_noted, self.live) = (0, END, 0, 0);
    }

    pub(super) const fn live(&self) -> u32 {
        self.live
    }

    /// Memory of the table in bytes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets) + self.slabs.len() * SLAB * size_of::<Node>()
    }

    /// Reserves memory for `entries` more, so that no insert has to allocate. `None` if an allocation fails.
    pub(super) fn reserve(&mut self, entries: usize) -> Option<()> {
        // Nodes that were freed are not counted: they only make the reserve larger than needed.
        while self.slabs.len() * SLAB - (self.used as usize) < entries {
            add_slab(&mut self.slabs, Node { entry: NO_ENTRY, next: END }, SLAB)?;
        }
        Some(())
    }

    /// Prefetches what commits of `keys`, which lie in one chunk, will visit after their buckets ([`Lines::prefetch`]), once
    /// those have arrived: the first node of each chain, and a free node for each full bucket.
    #[inline]
    pub(super) fn prefetch_further<E: Environment>(&self, keys: RangeInclusive<u32>) {
        let mut full = 0;
        for bucket in self.lines().buckets(keys) {
            let bucket = &self.buckets[bucket];
            full += u32::from(bucket.entries[PLACES - 1].key != EMPTY);
            self.prefetch_node::<E>(bucket.next);
        }
        if full > 0 && self.free != END {
            let free = self.node(self.free);
            for place in self.free_noted.saturating_sub(full)..self.free_noted {
                self.prefetch_node::<E>(free.noted(place));
            }
            if full > self.free_noted {
                self.prefetch_node::<E>(free.next);
            }
        }
    }

    #[inline]
    fn prefetch_node<E: Environment>(&self, at: u32) {
        if at != END {
            E::prefetch(core::ptr::from_ref(self.node(at)).cast());
        }
    }

    /// The entry of `key`, if it is in its bucket.
    #[inline]
    pub(super) fn peek(&self, key: u32) -> Option<&Entry> {
        let bucket = &self.buckets[self.bucket(key)];
        bucket.place_of(key).map(|place| &bucket.entries[place])
    }

    /// Loads the lines that operations on `keys` will touch, so that these do not wait for them later; no load waits for
    /// another. Returns a value that depends on all loads, so that the compiler does not remove them.
    pub(super) fn touch_all(&self, keys: impl Iterator<Item = u32> + Clone) -> u32 {
        let all = keys.clone().fold(0, |all, key| all ^ self.buckets[self.bucket(key)].next);
        keys.fold(all, |all, key| {
            let bucket = &self.buckets[self.bucket(key)];
            if bucket.next == END { all } else { all ^ self.node(bucket.next).next }
        })
    }

    pub(super) fn get(&self, key: u32) -> Option<&Entry> {
        let bucket = &self.buckets[self.bucket(key)];
        match bucket.place_of(key) {
            Some(place) => Some(&bucket.entries[place]),
            None => self.behind(bucket, key).map(|at| &self.node(at).entry),
        }
    }

    pub(super) fn get_mut(&mut self, key: u32) -> Option<&mut Entry> {
        let number = self.bucket(key);
        let bucket = &self.buckets[number];
        match bucket.place_of(key) {
            Some(place) => Some(&mut self.buckets[number].entries[place]),
            None => self.behind(bucket, key).map(|at| &mut self.node_mut(at).entry),
        }
    }

    /// The node of `key` in the chain behind `bucket`.
    fn behind(&self, bucket: &Bucket, key: u32) -> Option<u32> {
        let mut at = bucket.next;
        while at != END {
            let node = self.node(at);
            if node.entry.key == key {
                return Some(at);
            }
            at = node.next;
        }
        None
    }

    /// The entry with the key of `fresh`; inserts `fresh` if there is none.
    pub(super) fn get_or_insert(&mut self, fresh: Entry) -> &mut Entry {
        self.get_or_insert_in(self.bucket(fresh.key), fresh)
    }

    /// As [`get_or_insert`](Self::get_or_insert) for each of `entries`, which lie in one chunk. Calls `set` with the entry in
    /// the table and the given one.
    #[inline]
    pub(super) fn get_or_insert_all(
        &mut self,
        entries: impl Iterator<Item = Entry>,
        mut set: impl FnMut(&mut Entry, Entry),
    ) {
        let mut row = None;
        for entry in entries {
            let row = *row.get_or_insert_with(|| self.lines().row(entry.key));
            debug_assert_eq!(row, self.lines().row(entry.key), "one chunk");
            set(self.get_or_insert_in(row.at(Row::place(entry.key)), entry), entry);
        }
    }

    #[inline]
    fn get_or_insert_in(&mut self, number: usize, fresh: Entry) -> &mut Entry {
        let bucket = &self.buckets[number];
        // Only a full bucket has a chain, so an unused entry ends the search.
        match bucket.entries.iter().position(|entry| entry.key == fresh.key || entry.key == EMPTY) {
            Some(place) => {
                let entry = &mut self.buckets[number].entries[place];
                if entry.key == EMPTY {
                    *entry = fresh;
                    self.live += 1;
                }
                entry
            }
            None => self.get_or_insert_behind(number, fresh),
        }
    }

    /// The entry with the key of `fresh` in the chain behind its bucket; inserts `fresh` if there is none.
    fn get_or_insert_behind(&mut self, number: usize, fresh: Entry) -> &mut Entry {
        let bucket = &self.buckets[number];
        let next = bucket.next;
        if let Some(at) = self.behind(bucket, fresh.key) {
            return &mut self.node_mut(at).entry;
        }
        let at = self.take_free().unwrap_or_else(|| {
            self.reserve(1).unwrap_or_else(no_memory::<Node>);
            self.used += 1;
            self.used - 1
        });
        self.buckets[number].next = at;
        self.live += 1;
        let node = self.node_mut(at);
        *node = Node { entry: fresh, next };
        &mut node.entry
    }

    /// Removes `key`, which is in the table. If it is in its bucket, the first entry of the chain moves there in its stead.
    pub(super) fn remove(&mut self, key: u32) {
        let number = self.bucket(key);
        let bucket = &mut self.buckets[number];
        let first = bucket.next;
        if let Some(place) = bucket.place_of(key) {
            bucket.entries[place] = NO_ENTRY;
            if first == END {
                // A bucket's entries are used from the first one on.
                bucket.entries[place..].rotate_left(1);
            } else {
                let Node { entry, next } = *self.node(first);
                let bucket = &mut self.buckets[number];
                (bucket.entries[place], bucket.next) = (entry, next);
                self.release(first);
            }
            self.live -= 1;
            return;
        }
        let (mut before, mut at) = (END, first);
        while at != END {
            let Node { entry, next } = *self.node(at);
            if entry.key == key {
                if before == END {
                    self.buckets[number].next = next;
                } else {
                    self.node_mut(before).next = next;
                }
                self.release(at);
                self.live -= 1;
                return;
            }
            (before, at) = (at, next);
        }
    }

    /// All entries, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.buckets.iter().flat_map(move |bucket| {
            let mut at = bucket.next;
            let behind = core::iter::from_fn(move || {
                if at == END {
                    return None;
                }
                let node = self.node(at);
                at = node.next;
                Some(&node.entry)
            });
            bucket.entries.iter().filter(|entry| entry.key != EMPTY).chain(behind)
        })
    }

    fn bucket(&self, key: u32) -> usize {
        self.lines().row(key).at(Row::place(key))
    }

    /// Addresses of the buckets; they stay valid as long as the table lives.
    pub(super) fn lines(&self) -> Lines {
        Lines { at: self.buckets.as_ptr().addr(), count: self.buckets.len(), seed: self.seed }
    }

    fn node(&self, at: u32) -> &Node {
        &self.slabs[at as usize / SLAB][at as usize % SLAB]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.slabs[at as usize / SLAB][at as usize % SLAB]
    }

    /// Takes a node from the free list. One call in six visits the next node of the list and may have to wait for its line.
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

    fn release(&mut self, at: u32) {
        if self.free != END && self.free_noted < NOTED {
            let place = self.free_noted;
            self.node_mut(self.free).note(place, at);
            self.free_noted += 1;
        } else {
            self.node_mut(at).next = self.free;
            (self.free, self.free_noted) = (at, 0);
        }
    }
}

/// Addresses of the buckets of a table, for a thread that has not locked the lane yet: only for prefetches.
#[derive(Clone, Copy)]
pub(crate) struct Lines {
    at: usize,
    count: usize,
    seed: u32,
}

/// The buckets of one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Row {
    first: usize,
    count: usize,
}

impl Lines {
    /// Prefetches the buckets of `keys`, which lie in one chunk. No instruction waits for a prefetch.
    #[inline]
    pub(crate) fn prefetch<E: Environment>(self, keys: RangeInclusive<u32>) {
        for bucket in self.buckets(keys) {
            E::prefetch(core::ptr::without_provenance(self.at + bucket * LINE));
        }
    }

    /// Each bucket of `keys`, which lie in one chunk.
    #[inline]
    fn buckets(self, keys: RangeInclusive<u32>) -> impl Iterator<Item = usize> {
        let row = self.row(*keys.start());
        debug_assert_eq!(row, self.row(*keys.end()), "one chunk");
        (Row::place(*keys.start())..=Row::place(*keys.end())).map(move |place| row.at(place))
    }

    #[inline]
    const fn row(self, key: u32) -> Row {
        let chunk = key / BLOCKS_PER_CHUNK;
        // A multiplication by the golden ratio spaces any number of neighbouring chunks evenly. Some strides are bad for it, so
        // each group of `NEIGHBOURS` chunks starts at a pseudo-random bucket of its own.
        let mut turn = ((chunk / NEIGHBOURS) ^ self.seed).wrapping_mul(0x85eb_ca6b);
        turn = (turn ^ turn >> 15).wrapping_add(self.seed).wrapping_mul(0xc2b2_ae35);
        turn ^= turn >> 13;
        let place = chunk.wrapping_mul(0x9e37_79b1).wrapping_add(turn);
        Row { first: ((place as u64 * self.count as u64) >> 32) as usize, count: self.count }
    }
}

impl Row {
    /// The index of the bucket of block `key` among those of its chunk.
    const fn place(key: u32) -> usize {
        (key % BLOCKS_PER_CHUNK) as usize / PLACES
    }

    const fn at(self, place: usize) -> usize {
        let at = self.first + place;
        if at < self.count { at } else { at % self.count }
    }
}

#[cfg(test)]
mod tests;
