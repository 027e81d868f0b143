//! The tables of an index: one, and a second one while the index changes its size.
//!
//! A resize begins with an empty table of the new size, and moves the entries there in steps ([`Tables::step`]), chunk by chunk
//! in the order of their [`Start`]s. A boundary divides the chunks: those up to it are in the new table, all others in the old
//! one. So every operation uses one table, and finds it with one comparison. Without a resize the boundary is the last start.
//!
//! A step moves the chunks whose rows begin in [`SPAN`] buckets of the larger table. It visits the buckets that these rows use in
//! the old table, at most `SPAN + ROW`, with their chains, twice: to count what moves, and to move it. It then takes some tens of
//! microseconds.
//!
//! Invariants: the entries of a chunk are all in one table. Tables and nodes come from the [`Memory`] of the caller, which has not
//! locked the lane when it allocates and drops them; a step itself allocates at most a longer list of slabs. A step that lacks
//! memory moves nothing.
//!
//! Elsewhere: who takes the steps (`cache::index_size`).

use super::{
    rows::{Lines, ROW, Start},
    table::{Entry, SLAB, Slabs, Table, add_nodes},
};
use crate::Environment;
use alloc::{boxed::Box, vec::Vec};
use core::ops::RangeInclusive;

/// Buckets of the larger table in which the rows begin that a step moves.
const SPAN: u64 = 128;
/// The boundary behind all starts.
const ALL: u32 = u32::MAX;
/// Entries for which memory may be reserved: a step leaves it as it is.
pub(crate) const RESERVED_MAX: usize = 257;

/// Memory for a resize, and afterwards the memory that it has freed. Create and drop it without the lane's lock.
pub(crate) struct Memory {
    /// The table of the new size; none while a resize is on its way; then the one of the old size.
    table: AtMostOne,
    /// Nodes for the new table.
    spare: Slabs,
}

/// At most one table. It is not in [`Tables`] itself, of which each request loads the lines. An array of one, because the library
/// can allocate that fallibly.
type AtMostOne = Option<Box<[Table; 1]>>;

/// How far a resize is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stepped {
    /// Further steps are to be taken.
    More,
    /// The step has moved nothing: it needs memory for this many entries ([`Memory::add`]).
    Lacks(usize),
    /// The index has its new size, or none is being resized.
    Done,
}

pub(super) struct Tables {
    /// The table; during a resize the new one.
    table: Table,
    seed: u32,
    /// The chunks whose starts are up to it are in `table`.
    boundary: u32,
    /// During a resize the table from which entries are moved.
    old: AtMostOne,
}

/// What a step moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sweep {
    /// The boundary after it.
    end: u32,
    /// The buckets of the old table that the rows may use: the first, and how many.
    first: usize,
    count: usize,
}

impl Memory {
    /// Memory to resize an index to `blocks` blocks. `None` if an allocation fails.
    pub(crate) fn new(blocks: usize) -> Option<Self> {
        let mut table = Vec::new();
        table.try_reserve_exact(1).ok()?;
        table.push(Table::new(blocks)?);
        Some(Self { table: table.into_boxed_slice().try_into().ok(), spare: Vec::new() })
    }

    /// Memory for the steps of a resize that has begun.
    pub(crate) fn without_table() -> Self {
        Self { table: None, spare: Vec::new() }
    }

    /// Ensures that it has memory for `entries` entries that do not fit into their buckets. `None` if an allocation fails.
    pub(crate) fn add(&mut self, entries: usize) -> Option<()> {
        while self.spare.len() * SLAB < entries {
            add_nodes(&mut self.spare)?;
        }
        Some(())
    }
}

impl Tables {
    /// Tables for `entries` entries. `None` if the allocation fails.
    pub(super) fn new(entries: usize, seed: u32) -> Option<Self> {
        Some(Self { table: Table::new(entries)?, boundary: ALL, seed, old: None })
    }

    /// Removes all entries; a resize goes on. The time is proportional to the size of the tables.
    pub(super) fn clear(&mut self) {
        self.table.clear();
        if let Some([old]) = self.old.as_deref_mut() {
            old.clear();
        }
    }

    pub(super) fn live(&self) -> u32 {
        self.both().map(Table::live).sum()
    }

    /// Memory of the tables in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.both().map(Table::bytes).sum()
    }

    /// Whether a table for `entries` entries has the size of the present one, or of that to which it is being resized.
    pub(super) fn is_sized_for(&self, entries: usize) -> bool {
        self.table.count() == Table::buckets_for(entries)
    }

    /// Reserves memory for `entries` more, whatever their chunks, also if a step comes before their inserts and they are at most
    /// [`RESERVED_MAX`]. `None` if an allocation fails.
    #[inline]
    pub(super) fn reserve(&mut self, entries: usize) -> Option<()> {
        self.table.reserve(entries)?;
        if self.boundary == ALL { Some(()) } else { self.old().reserve(entries) }
    }

    /// The table with the chunk at `start`.
    #[inline]
    fn of(&self, start: Start) -> &Table {
        if start.is_up_to(self.boundary) { &self.table } else { self.old_ref() }
    }

    #[inline]
    fn of_mut(&mut self, start: Start) -> &mut Table {
        if start.is_up_to(self.boundary) { &mut self.table } else { self.old() }
    }

    /// The old table. A call, so that the processor predicts the comparison that leads here instead of waiting for it.
    #[cold]
    #[inline(never)]
    fn old(&mut self) -> &mut Table {
        match self.old.as_deref_mut() {
            Some([old]) => old,
            None => &mut self.table,
        }
    }

    #[cold]
    #[inline(never)]
    fn old_ref(&self) -> &Table {
        match self.old.as_deref() {
            Some([old]) => old,
            None => &self.table,
        }
    }

    fn both(&self) -> impl Iterator<Item = &Table> {
        core::iter::once(&self.table).chain(self.old.as_deref().into_iter().flatten())
    }

    /// The begin of the row of the chunk of `key`.
    #[inline]
    pub(super) const fn start(&self, key: u32) -> Start {
        Start::new(key, self.seed)
    }

    /// Prefetches the buckets of `keys`, which lie in the chunk at `start`.
    #[inline]
    pub(super) fn prefetch<E: Environment>(&self, start: Start, keys: RangeInclusive<u32>) {
        self.of(start).prefetch::<E>(start, keys);
    }

    /// See [`Table::prefetch_further`].
    #[inline]
    pub(super) fn prefetch_further<E: Environment>(&self, start: Start, keys: RangeInclusive<u32>) {
        self.of(start).prefetch_further::<E>(start, keys);
    }

    /// Addresses of the buckets of the table that has most of the chunks.
    pub(super) fn lines(&self) -> Lines {
        if self.boundary >= ALL / 2 { self.table.lines(self.seed) } else { self.old_ref().lines(self.seed) }
    }

    /// See [`Table::peek`].
    #[inline]
    pub(super) fn peek(&self, start: Start, key: u32) -> Option<&Entry> {
        self.of(start).peek(start, key)
    }

    /// Loads the lines that operations on `keys` will touch, so that these do not wait for them later; no load waits for
    /// another. Returns a value that depends on all loads, so that the compiler does not remove them.
    pub(super) fn touch_all(&self, keys: impl Iterator<Item = u32> + Clone) -> u32 {
        let placed = keys.map(|key| (self.start(key), key));
        let all = placed.clone().fold(0, |all, (start, key)| all ^ self.of(start).touch(start, key));
        placed.fold(all, |all, (start, key)| all ^ self.of(start).touch_further(start, key))
    }

    #[inline]
    pub(super) fn get(&self, key: u32) -> Option<&Entry> {
        let start = self.start(key);
        self.of(start).get(start, key)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, key: u32) -> Option<&mut Entry> {
        let start = self.start(key);
        self.of_mut(start).get_mut(start, key)
    }

    /// See [`Table::get_or_insert`].
    pub(super) fn get_or_insert(&mut self, fresh: Entry) -> &mut Entry {
        let start = self.start(fresh.key);
        self.of_mut(start).get_or_insert(start, fresh)
    }

    /// As [`get_or_insert`](Self::get_or_insert) for each of `entries`, which lie in the chunk at `start`. Calls `set` with the
    /// entry in the table and the given one.
    #[inline]
    pub(super) fn get_or_insert_all(
        &mut self,
        start: Start,
        entries: impl Iterator<Item = Entry>,
        set: impl FnMut(&mut Entry, Entry),
    ) {
        self.of_mut(start).get_or_insert_all(start, entries, set);
    }

    /// See [`Table::remove`].
    pub(super) fn remove(&mut self, key: u32) {
        let start = self.start(key);
        self.of_mut(start).remove(start, key);
    }

    /// All entries, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.both().flat_map(Table::iter)
    }

    /// The number of buckets.
    pub(super) fn buckets(&self) -> usize {
        self.both().map(Table::count).sum()
    }

    /// The entries of a bucket and of its chain. The buckets of the old table are behind those of the new one.
    pub(super) fn entries_of(&self, bucket: usize) -> impl Iterator<Item = &Entry> {
        let behind = bucket.checked_sub(self.table.count());
        let old = behind.zip(self.old.as_deref()).into_iter();
        self.table.entries_of(bucket).chain(old.flat_map(|(bucket, [old])| old.entries_of(bucket)))
    }

    /// Begins a resize to the table in `memory`. `false` if one is on its way, or if there is none in `memory`; nothing has changed
    /// then.
    pub(super) fn begin_resize(&mut self, memory: &mut Memory) -> bool {
        match memory.table.as_deref_mut() {
            Some([new]) if self.boundary == ALL => core::mem::swap(&mut self.table, new),
            _ => return false,
        }
        self.old = memory.table.take();
        self.boundary = 0;
        true
    }

    /// The progress of a resize, from 0 to 2^32; without one 2^32.
    pub(super) const fn resized(&self) -> u64 {
        first_behind(self.boundary)
    }

    /// Takes a step of a resize. When it is done, `memory` has the old table; it must not have another one yet.
    pub(super) fn step(&mut self, memory: &mut Memory) -> Stepped {
        let Some([old]) = self.old.as_deref() else { return Stepped::Done };
        // 1. Reserve the nodes, on top of what a commit may have reserved.
        let sweep = self.sweep(old.count());
        let leaves = |key| self.start(key).is_up_to(sweep.end);
        let moving: usize = sweep.buckets(old.count()).map(|at| old.count_leaving(at, leaves)).sum();
        let needed = moving + self.table.unused().min(RESERVED_MAX);
        if self.table.reserve_from(&mut memory.spare, needed).is_none() {
            return Stepped::Lacks(needed);
        }
        // 2. Move the entries, then the boundary.
        let Self { table, old, seed, .. } = self;
        let Some([old]) = old.as_deref_mut() else { return Stepped::Done };
        for at in sweep.buckets(old.count()) {
            let leaves = |key| Start::new(key, *seed).is_up_to(sweep.end);
            old.drain(at, leaves, |entry| table.insert(Start::new(entry.key, *seed), entry));
        }
        self.boundary = sweep.end;
        if self.boundary < ALL {
            return Stepped::More;
        }
        debug_assert!(memory.table.is_none(), "a table would be dropped under the lock");
        memory.table = self.old.take();
        self.table.return_unused(&mut memory.spare, RESERVED_MAX);
        Stepped::Done
    }

    /// What the next step moves from an old table of `old` buckets. The boundary is a multiple of a step, or 0.
    fn sweep(&self, old: usize) -> Sweep {
        let (old, larger) = (old as u64, old.max(self.table.count()) as u64);
        let begin = first_behind(self.boundary);
        // The first bucket of the larger table in which no row begins that is moved now, and the first start of such a row.
        let behind = ((begin * larger) >> 32) + SPAN;
        let end = (behind << 32).div_ceil(larger).min(first_behind(ALL));
        let first = (begin * old) >> 32;
        let last = ((end - 1) * old) >> 32;
        Sweep { end: (end - 1) as u32, first: first as usize, count: (last - first) as usize + ROW }
    }
}

/// The first start behind a boundary. No start is 0.
const fn first_behind(boundary: u32) -> u64 {
    if boundary == 0 { 0 } else { boundary as u64 + 1 }
}

impl Sweep {
    /// Its buckets in a table of `count`, each once.
    fn buckets(self, count: usize) -> impl Iterator<Item = usize> {
        (self.first..self.first + self.count.min(count)).map(move |at| at % count)
    }
}

#[cfg(test)]
mod tests;
