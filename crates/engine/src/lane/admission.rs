//! Admission: which of the blocks that are read from the backing device a full cache records.
//!
//! Recording all of them is best if blocks are soon read again. But a scan, or a loop that is larger than the cache, then
//! evicts needed blocks and gets no hits itself. Recording only blocks that are missed a second time prevents this, at the cost
//! of one more miss for each block of a new working set. Neither policy is always best, so each lane tries both on a sample of
//! its blocks, in two small models of itself, and uses the one that had more hits lately.
//!
//! A lane that gets another size gets the admission of that size ([`Admission::begin_resize`]). It keeps the lead of the better
//! model, scaled, and the names of blocks that were missed; these follow in steps, as the entries of the index do. The models
//! start empty: they are samples, and record everything until they are full.
//!
//! Invariants: a hit costs a multiplication and a comparison, and for a block of the sample a search of the two models; nothing
//! is allocated after an admission is created; only speed depends on admission.
//!
//! Elsewhere: whether the cache is full (`cache`), and what is evicted (`reclaim`).

use alloc::{boxed::Box, vec, vec::Vec};

/// Names kept for each block that the lane can hold.
const NAMES_PER_BLOCK: usize = 2;
/// Blocks of the device whose names are adjacent: one cache line.
const GROUP: u32 = 64;
/// Minimum number of blocks in a model, if the lane has as many.
const MODEL_BLOCKS: usize = 128;
/// At least one block in this many is in the sample.
const SAMPLE_MAX: u32 = 64;
/// Blocks of a set, among which a model selects the one to evict.
const WAYS: usize = 8;
/// No block: no device is so large that a lane has a block of this number.
const NO_BLOCK: u32 = u32::MAX;

/// A hash of the key.
#[inline]
pub(super) fn scatter(key: u32) -> u64 {
    let product = u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// `hash`, scaled to a number below `count`.
pub(super) const fn scaled(hash: u64, count: usize) -> usize {
    (((hash & 0xffff_ffff) * count as u64) >> 32) as usize
}

/// `length` times `value`. `None` if the allocation fails.
fn filled<T: Clone>(value: T, length: usize) -> Option<Box<[T]>> {
    let mut all = Vec::new();
    all.try_reserve_exact(length).ok()?;
    all.resize(length, value);
    Some(all.into_boxed_slice())
}

/// Names of blocks that were missed: one-byte hashes. Each name has one slot, in which the next name with the same slot
/// replaces it; so a name is forgotten after about as many other names as there are slots. One name in 255 is mistaken for that
/// of another block.
#[derive(Default)]
struct Names(Box<[u8]>);

impl Names {
    fn new(blocks: usize) -> Option<Self> {
        Some(Self(filled(0, Self::length(blocks))?))
    }

    /// As [`new`](Self::new), of memory that the system provides when it is used. For a cache that is being opened: it cannot be
    /// opened without this memory.
    fn at_open(blocks: usize) -> Self {
        Self(vec![0; Self::length(blocks)].into_boxed_slice())
    }

    fn length(blocks: usize) -> usize {
        (blocks * NAMES_PER_BLOCK).max(1).next_multiple_of(GROUP as usize)
    }

    /// Lines of names.
    fn lines(&self) -> usize {
        self.0.len() / GROUP as usize
    }

    /// The slot of `key`, and its name.
    fn slot(&mut self, key: u32) -> Option<(&mut u8, u8)> {
        let hash = scatter(key / GROUP);
        let line = scaled(hash, self.lines());
        let place = self.0.get_mut(line * GROUP as usize + (key % GROUP) as usize)?;
        Some((place, ((hash >> 56) as u8).max(1)))
    }

    /// Returns whether `key` is present, and removes it if it was, or inserts it if it was not.
    fn exchange(&mut self, key: u32) -> bool {
        let Some((place, name)) = self.slot(key) else { return false };
        let is_there = *place == name;
        *place = if is_there { 0 } else { name };
        is_there
    }

    fn insert(&mut self, key: u32) {
        if let Some((place, name)) = self.slot(key) {
            *place = name;
        }
    }
}

/// The names that a resize has not moved yet. The hash of a line is its position as a fraction, so lines are in the same order at
/// any size, and move in this order.
struct Left {
    names: Names,
    /// Blocks whose hash is at least this have their names here.
    first: u64,
}

impl Left {
    /// Moves the names up to the hash `end` to `to`. A new line gets the names of all old ones that it replaces; those that do not
    /// belong there are soon replaced themselves.
    fn move_to(&mut self, to: &mut Names, end: u64) {
        let counts = [self.names.lines(), to.lines()];
        while self.first < end {
            let [from_at, to_at] = counts.map(|count| scaled(self.first, count) * GROUP as usize);
            let (Some(from), Some(to)) = (self.names.0.get(from_at..), to.0.get_mut(to_at..)) else { break };
            for (new, old) in to.iter_mut().zip(from).take(GROUP as usize).filter(|(new, _)| **new == 0) {
                *new = *old;
            }
            // Up to where the next line begins in one of the two.
            let [from, to] = counts.map(|count| {
                let count = count as u64;
                ((((self.first * count) >> 32) + 1) << 32).div_ceil(count)
            });
            self.first = from.min(to).min(end);
        }
        self.first = self.first.max(end);
    }
}

/// The blocks that a lane would hold if it read only a sample of the blocks: in sets, the block that was read last in front.
struct Model {
    blocks: Box<[u32]>,
    /// The blocks that were missed once, if a single miss is not enough.
    names: Option<Names>,
}

impl Model {
    fn new(blocks: usize, is_strict: bool) -> Option<Self> {
        let blocks = blocks.next_multiple_of(WAYS);
        let names = if is_strict { Some(Names::new(blocks)?) } else { None };
        Some(Self { blocks: filled(NO_BLOCK, blocks)?, names })
    }

    /// Reads `key`; returns whether it was a hit.
    fn read(&mut self, key: u32, hash: u64) -> bool {
        let set = scaled(hash >> 16, self.blocks.len() / WAYS) * WAYS;
        let Some(set) = self.blocks.get_mut(set..set + WAYS) else { return false };
        let (is_hit, place) = match set.iter().position(|known| *known == key) {
            Some(place) => (true, place),
            None => (false, WAYS - 1),
        };
        // While the set has room, everything is recorded.
        if is_hit || set[place] == NO_BLOCK || self.names.as_mut().is_none_or(|names| names.exchange(key)) {
            set[..=place].rotate_right(1);
            set[0] = key;
        }
        is_hit
    }
}

/// Names that a resize has replaced, if it is done.
#[derive(Default)]
pub(crate) struct FormerNames(Option<Box<[Left; 1]>>);

impl FormerNames {
    pub(crate) const fn is_none(&self) -> bool {
        self.0.is_none()
    }
}

/// The state of a lane's admission.
pub(crate) struct Admission {
    /// Bits of a block's hash that are zero if it is in the sample.
    sample: u64,
    /// The open model records every block that is missed, the strict one blocks that are missed a second time. Behind a pointer,
    /// because lanes are moved as values when a cache is opened.
    models: Box<[Model; 2]>,
    /// The number of hits by which the strict model is ahead.
    lead: i32,
    lead_max: i32,
    missed: Names,
    /// The names of the former size, while a resize is on its way. Before it begins the admission of the new size has the room.
    left: Option<Box<[Left; 1]>>,
}

impl Admission {
    /// The admission of a lane that can hold `blocks` blocks, of a cache that is being opened. `None` if an allocation fails.
    pub(crate) fn new(blocks: usize) -> Option<Self> {
        Self::with(blocks, Names::at_open(blocks))
    }

    fn with(blocks: usize, missed: Names) -> Option<Self> {
        let one_of = ((blocks / MODEL_BLOCKS).max(1).ilog2()).min(SAMPLE_MAX.ilog2());
        // Space that is kept free, or is not full yet, holds no blocks.
        let held = (blocks - blocks / 8) >> one_of;
        let mut models = Vec::new();
        models.try_reserve_exact(2).ok()?;
        models.push(Model::new(held, false)?);
        models.push(Model::new(held, true)?);
        Some(Self {
            sample: (1 << one_of) - 1,
            models: models.into_boxed_slice().try_into().ok()?,
            lead: 0,
            lead_max: i32::try_from(held).unwrap_or(i32::MAX).max(1),
            missed,
            left: None,
        })
    }

    /// As [`new`](Self::new), for [`begin_resize`](Self::begin_resize).
    pub(crate) fn for_resize(blocks: usize) -> Option<Self> {
        let mut left = Vec::new();
        left.try_reserve_exact(1).ok()?;
        left.push(Left { names: Names::default(), first: 0 });
        Some(Self {
            left: left.into_boxed_slice().try_into().ok(),
            ..Self::with(blocks, Names::new(blocks)?)?
        })
    }

    /// Changes to the size of `fresh`, which was made [`for_resize`](Self::for_resize) and then has what is to be dropped. Steps of
    /// [`resize_step`](Self::resize_step) follow. None may be on its way.
    pub(crate) fn begin_resize(&mut self, fresh: &mut Self) {
        core::mem::swap(self, fresh);
        let lead = i64::from(fresh.lead) * i64::from(self.lead_max) / i64::from(fresh.lead_max);
        self.lead = lead as i32;
        if let Some([left]) = self.left.as_deref_mut() {
            core::mem::swap(&mut left.names, &mut fresh.missed);
        }
    }

    /// Follows a resize of the index to `resized`, from 0 to 2^32. Returns what is to be dropped: at the end the old names.
    pub(crate) fn resize_step(&mut self, resized: u64) -> FormerNames {
        if let Some([left]) = self.left.as_deref_mut() {
            left.move_to(&mut self.missed, resized);
        }
        FormerNames(self.left.take_if(|_| resized == 1 << 32))
    }

    /// The names among which is that of `key`.
    fn names(&mut self, key: u32) -> &mut Names {
        match self.left.as_deref_mut() {
            Some([left]) if scatter(key / GROUP) & 0xffff_ffff >= left.first => &mut left.names,
            _ => &mut self.missed,
        }
    }

    /// Notes that a client reads block `key`.
    #[inline]
    pub(crate) fn note_read(&mut self, key: u32) {
        let hash = scatter(key);
        if hash & self.sample == 0 {
            self.try_both(key, hash);
        }
    }

    #[cold]
    #[inline(never)]
    fn try_both(&mut self, key: u32, hash: u64) {
        let [open, strict] = &mut *self.models;
        let ahead = i32::from(strict.read(key, hash)) - i32::from(open.read(key, hash));
        self.lead = (self.lead + ahead).clamp(-self.lead_max, self.lead_max);
    }

    /// Whether to record block `key`, which a full lane does not hold and has just read from the backing device.
    pub(crate) fn is_worth(&mut self, key: u32) -> bool {
        self.lead < 0 || self.names(key).exchange(key)
    }

    /// Notes that reclaim dropped block `key`, which had got a second chance: it counts as missed once.
    pub(crate) fn note_eviction(&mut self, key: u32) {
        self.names(key).insert(key);
    }

    /// Memory of the admission in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let names = |names: &Names| names.0.len();
        let model = |model: &Model| model.blocks.len() * 4 + model.names.as_ref().map_or(0, names);
        let left = self.left.as_ref().map_or(0, |left| names(&left[0].names));
        self.models.iter().map(model).sum::<usize>() + names(&self.missed) + left
    }
}

#[cfg(test)]
mod tests;
