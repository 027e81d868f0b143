//! A hash table of an index: from the number of a block to its entry.
//!
//! A bucket is one cache line with three entries. Entries that do not fit go into a chain of nodes behind it. Three consecutive
//! blocks share a bucket, and the buckets of a chunk, its row, are adjacent, so that a large request touches few lines. Chunks
//! are scattered so that neighbouring chunks share the table evenly (`rows`).
//!
//! Invariants: a chain has nodes only if its bucket is full. The buckets are allocated when the table is created, and nodes are
//! allocated in slabs, so a table never changes its size and no insert moves an entry. A removal moves entries of its own bucket,
//! and one into it.
//!
//! Elsewhere: what an entry means (`index`), and how an index gets another size (`tables`).

use super::{
    BlockData, add_slab, no_memory,
    rows::{Lines, Row, Start},
};
use crate::Environment;
use alloc::{boxed::Box, vec::Vec};
use core::ops::RangeInclusive;

const END: u32 = u32::MAX;
/// The key of an unused entry: greater than any block number of a lane
/// ([`LaneMap::device_max`](crate::lane::LaneMap::device_max)).
const EMPTY: u32 = u32::MAX;
/// Bytes of a bucket.
pub(super) const LINE: usize = 64;
/// Entries of a bucket.
pub(super) const PLACES: usize = 3;
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

/// Slabs of nodes.
pub(super) type Slabs = Vec<Box<[Node]>>;

pub(super) struct Table {
    buckets: Box<[Bucket]>,
    slabs: Slabs,
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
    /// finds its bucket full, and the memory of an entry is 28 bytes. `None` if the allocation fails.
    pub(super) fn new(entries: usize) -> Option<Self> {
        let count = Self::buckets_for(entries);
        let mut buckets = Vec::new();
        buckets.try_reserve_exact(count).ok()?;
        buckets.resize(count, NO_BUCKET);
        let buckets = buckets.into_boxed_slice();
        Some(Self { buckets, slabs: Vec::new(), used: 0, free: END, free_noted: 0, live: 0 })
    }

    /// The buckets of a table for `entries`.
    pub(super) fn buckets_for(entries: usize) -> usize {
        entries.div_ceil(PLACES).clamp(16, 1 << 30)
    }

    /// The number of buckets.
    pub(super) fn count(&self) -> usize {
        self.buckets.len()
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
    #[inline]
    pub(super) fn reserve(&mut self, entries: usize) -> Option<()> {
        while self.unused() < entries {
            add_nodes(&mut self.slabs)?;
        }
        Some(())
    }

    /// Nodes that were never allocated. Nodes that were freed are not counted: they only make the reserve larger than needed.
    #[inline]
    pub(super) fn unused(&self) -> usize {
        self.slabs.len() * SLAB - self.used as usize
    }

    /// As [`reserve`](Self::reserve), with slabs from `spare`. `None` if there are too few; those that were taken stay.
    pub(super) fn reserve_from(&mut self, spare: &mut Slabs, entries: usize) -> Option<()> {
        while self.unused() < entries {
            self.slabs.try_reserve(1).ok()?;
            self.slabs.push(spare.pop()?);
        }
        Some(())
    }

    /// Returns slabs to `spare` that are not needed for `entries` more, as far as it has room for them.
    pub(super) fn return_unused(&mut self, spare: &mut Slabs, entries: usize) {
        while self.unused() >= entries + SLAB && spare.try_reserve(1).is_ok() {
            spare.extend(self.slabs.pop());
        }
    }

    /// Prefetches the buckets of `keys`, which lie in the chunk at `start`.
    #[inline]
    pub(super) fn prefetch<E: Environment>(&self, start: Start, keys: RangeInclusive<u32>) {
        self.lines(0).prefetch_at::<E>(start, keys);
    }

    /// Prefetches what commits of `keys`, which lie in the chunk at `start`, will visit after their buckets
    /// ([`Lines::prefetch`]), once those have arrived: the first node of each chain, and a free node for each full bucket.
    #[inline]
    pub(super) fn prefetch_further<E: Environment>(&self, start: Start, keys: RangeInclusive<u32>) {
        let mut full = 0;
        for bucket in self.row(start).buckets(keys) {
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

    /// The entry of `key`, if it is in its bucket. As everywhere, `start` is that of the key's chunk.
    #[inline]
    pub(super) fn peek(&self, start: Start, key: u32) -> Option<&Entry> {
        let bucket = &self.buckets[self.bucket(start, key)];
        bucket.place_of(key).map(|place| &bucket.entries[place])
    }

    /// Loads the bucket of `key`. Returns a value that depends on it.
    pub(super) fn touch(&self, start: Start, key: u32) -> u32 {
        self.buckets[self.bucket(start, key)].next
    }

    /// Loads the first node behind the bucket of `key`. Returns a value that depends on it.
    pub(super) fn touch_further(&self, start: Start, key: u32) -> u32 {
        let next = self.touch(start, key);
        if next == END { 0 } else { self.node(next).next }
    }

    #[inline]
    pub(super) fn get(&self, start: Start, key: u32) -> Option<&Entry> {
        let bucket = &self.buckets[self.bucket(start, key)];
        match bucket.place_of(key) {
            Some(place) => Some(&bucket.entries[place]),
            None => self.behind(bucket, key).map(|at| &self.node(at).entry),
        }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, start: Start, key: u32) -> Option<&mut Entry> {
        let number = self.bucket(start, key);
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
    pub(super) fn get_or_insert(&mut self, start: Start, fresh: Entry) -> &mut Entry {
        self.get_or_insert_in(self.bucket(start, fresh.key), fresh)
    }

    /// As [`get_or_insert`](Self::get_or_insert) for each of `entries`, which lie in the chunk at `start`. Calls `set` with the
    /// entry in the table and the given one.
    #[inline]
    pub(super) fn get_or_insert_all(
        &mut self,
        start: Start,
        entries: impl Iterator<Item = Entry>,
        mut set: impl FnMut(&mut Entry, Entry),
    ) {
        let row = self.row(start);
        for entry in entries {
            set(self.get_or_insert_in(row.at(Row::offset(entry.key)), entry), entry);
        }
    }

    /// Inserts `entry`, whose key is not in the table.
    pub(super) fn insert(&mut self, start: Start, entry: Entry) {
        let number = self.bucket(start, entry.key);
        match self.buckets[number].place_of(EMPTY) {
            Some(place) => {
                self.buckets[number].entries[place] = entry;
                self.live += 1;
            }
            None => {
                self.insert_behind(number, entry);
            }
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
        match self.behind(&self.buckets[number], fresh.key) {
            Some(at) => &mut self.node_mut(at).entry,
            None => self.insert_behind(number, fresh),
        }
    }

    /// Inserts `fresh`, whose key is not in the table, into the chain behind its full bucket.
    #[inline]
    fn insert_behind(&mut self, number: usize, fresh: Entry) -> &mut Entry {
        let at = self.take_free().unwrap_or_else(|| {
            self.reserve(1).unwrap_or_else(no_memory::<Node, _>);
            self.used += 1;
            self.used - 1
        });
        let next = core::mem::replace(&mut self.buckets[number].next, at);
        self.live += 1;
        let node = self.node_mut(at);
        *node = Node { entry: fresh, next };
        &mut node.entry
    }

    /// Removes `key`, which is in the table. If it is in its bucket, the first entry of the chain moves there in its stead.
    pub(super) fn remove(&mut self, start: Start, key: u32) {
        let number = self.bucket(start, key);
        if let Some(place) = self.buckets[number].place_of(key) {
            return self.vacate(number, place);
        }
        let (mut before, mut at) = (END, self.buckets[number].next);
        while at != END {
            let Node { entry, next } = *self.node(at);
            if entry.key == key {
                return self.unlink(number, before, at);
            }
            (before, at) = (at, next);
        }
    }

    /// Removes the entry at index `place` of a bucket.
    fn vacate(&mut self, number: usize, place: usize) {
        let bucket = &mut self.buckets[number];
        let first = bucket.next;
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
    }

    /// Removes node `at`, which follows node `before`, or the bucket itself.
    fn unlink(&mut self, number: usize, before: u32, at: u32) {
        let next = self.node(at).next;
        if before == END {
            self.buckets[number].next = next;
        } else {
            self.node_mut(before).next = next;
        }
        self.release(at);
        self.live -= 1;
    }

    /// The number of entries of a bucket and of its chain that `leaves` selects by their keys.
    pub(super) fn count_leaving(&self, number: usize, leaves: impl Fn(u32) -> bool) -> usize {
        self.of_bucket(&self.buckets[number]).filter(|entry| leaves(entry.key)).count()
    }

    /// Removes the entries of a bucket and of its chain that `leaves` selects by their keys, and calls `take` with each.
    pub(super) fn drain(&mut self, number: usize, leaves: impl Fn(u32) -> bool, mut take: impl FnMut(Entry)) {
        // The chain first: what is left of it moves into the bucket.
        let (mut before, mut at) = (END, self.buckets[number].next);
        while at != END {
            let Node { entry, next } = *self.node(at);
            if leaves(entry.key) {
                take(entry);
                self.unlink(number, before, at);
            } else {
                before = at;
            }
            at = next;
        }
        // The last one first: a removal moves those behind it.
        for place in (0..PLACES).rev() {
            let entry = self.buckets[number].entries[place];
            if entry.key != EMPTY && leaves(entry.key) {
                take(entry);
                self.vacate(number, place);
            }
        }
    }

    /// All entries, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.buckets.iter().flat_map(move |bucket| self.of_bucket(bucket))
    }

    /// The entries of bucket `number` and of its chain.
    pub(super) fn entries_of(&self, number: usize) -> impl Iterator<Item = &Entry> {
        self.buckets.get(number).into_iter().flat_map(move |bucket| self.of_bucket(bucket))
    }

    /// The entries of a bucket and of its chain.
    fn of_bucket<'a>(&'a self, bucket: &'a Bucket) -> impl Iterator<Item = &'a Entry> {
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
    }

    fn bucket(&self, start: Start, key: u32) -> usize {
        self.row(start).at(Row::offset(key))
    }

    #[inline]
    fn row(&self, start: Start) -> Row {
        Row::new(start, self.buckets.len())
    }

    /// Addresses of the buckets; they stay valid as long as the table lives. `seed` is that of the starts.
    pub(super) fn lines(&self, seed: u32) -> Lines {
        Lines::new(self.buckets.as_ptr().addr(), self.buckets.len(), seed)
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

/// Adds a slab of nodes to `slabs`. `None` if the allocation fails.
pub(super) fn add_nodes(slabs: &mut Slabs) -> Option<()> {
    add_slab(slabs, Node { entry: NO_ENTRY, next: END }, SLAB)
}

#[cfg(test)]
pub(super) mod tests;
