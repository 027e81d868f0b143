//! Backends that a rescue has moved to another disk.
//!
//! Invariants: before the other disk can receive data that the former one lacks, the row durably names the other disk. So the
//! former disk is never served as if it were complete, at whatever point a crash occurs. The other disk is not served before
//! the user confirms it: it may have been used without its cache since. The region records each disk that the backend had
//! until the backend is removed, or the user declares that the disk is gone: a move without space for one more record is
//! refused.
//!
//! Elsewhere: identifying the disk, and the decision to move a backend (the tools).

use super::{Transport, backends::DiskTexts, rows::active_row};
use crate::{Environment, slots::TwoSlots};
use alloc::{format, string::String, vec::Vec};
use cbd_format::{
    BackendEntry as BackendRow, FormerDisk as FormerDiskSlot, SlotContent, StateShape,
    tables::{MODE_MOVED, MODE_WRITEBACK, STATE_ACTIVE, decode_text},
};
use cbd_types::{BackendId, Error, ErrorKind, MutationPoint, Result, SegmentId, heap_sort_by_key};

/// A disk that a backend had before it was moved.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FormerDisk {
    /// Its path at that time.
    pub path: String,
    /// Its identity besides its path.
    pub identity: String,
    /// When the backend was moved, in milliseconds since 1970 UTC.
    pub moved_ms: u64,
    /// Incremented with every move: the largest number is that of the last move.
    number: u64,
}

impl<E: Environment> Transport<E> {
    /// Moves a backend to another disk: from now on `path` and `identity` name its disk, and the present disk is its former
    /// disk. The caller calls this before it writes anything to the other disk.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InvalidArgument`] for a backend without a cache, which holds nothing to move,
    /// and for texts that are too long; [`ErrorKind::NoSpace`] if there is no space for one more former disk;
    /// [`ErrorKind::Media`] if stores to the region have failed.
    pub fn move_backend(&self, id: BackendId, path: &str, identity: &str) -> Result<()> {
        let texts = DiskTexts::new(path, identity)?;
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        let has_cache = |row: &BackendRow| !self.former_places(row).is_empty();
        let Some(row) = row.content().filter(|row| has_cache(row)) else {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("backend {id} has no cache to move")));
        };
        // 1. The present disk is recorded as a former one, durably, before the row names the other disk.
        self.keep_former(id, row)?;
        // 2. The row, in one update.
        self.update_row(&mut tables, id, |row| {
            row.cache_mode = MODE_MOVED.into();
            texts.write(row);
        })
    }

    /// Records the disk that the row names durably as a former disk, in a slot pair that no other former disk occupies.
    fn keep_former(&self, id: BackendId, row: &BackendRow) -> Result<()> {
        let places = self.former_places(row);
        let mut known: Vec<_> = places.iter().map(|at| self.read_former(row, *at)).collect();
        let is_same = |slots: &TwoSlots<FormerDiskSlot>| {
            slots.content().is_some_and(|former| former.identity == row.identity)
        };
        let is_free = |slots: &TwoSlots<FormerDiskSlot>| slots.content().is_none();
        let index = known.iter().position(is_same).or_else(|| known.iter().position(is_free));
        let Some(index) = index else {
            return Err(no_room(id, &self.former_disks_of(row)));
        };
        let last = known.iter().filter_map(|slots| slots.content()).map(|former| former.number.get()).max();
        let moved_ms = self.environment.wall_ms();
        let describe = |former: &mut FormerDiskSlot| {
            former.clear();
            former.path_length = row.path_length;
            former.path = row.path;
            former.identity_length = row.identity_length;
            former.identity = row.identity;
            former.moved_ms = moved_ms.into();
            former.number = (last.unwrap_or(0) + 1).into();
        };
        let former = &mut known[index];
        let stored = if is_same(former) {
            // One of the two slots stays unchanged until the other one is durable.
            former.change(&self.region, describe)
        } else {
            *former = TwoSlots::empty(places[index], row.cache_id.get());
            former.fill(&self.region, MutationPoint::MovedFormerSecond, describe)
        };
        self.region.fence(MutationPoint::MovedFormerFence, stored);
        for slot in places[index] {
            self.region.sync(MutationPoint::MovedFormerSync, slot, size_of::<FormerDiskSlot>() as u64)?;
        }
        Ok(())
    }

    /// Reverts [`move_backend`](Self::move_backend): the other disk has received no data that the former one lacks. `entry`
    /// is the backend's entry before the move. The disk in `entry` stays recorded: it counts as a former disk only if the
    /// backend has another disk.
    ///
    /// # Errors
    /// As [`move_backend`](Self::move_backend).
    pub fn move_backend_back(&self, entry: &super::BackendEntry) -> Result<()> {
        let texts = DiskTexts::new(&entry.path, &entry.identity)?;
        self.update_backend(entry.id, |row| {
            row.cache_mode = if entry.is_moved { MODE_MOVED } else { MODE_WRITEBACK }.into();
            texts.write(row);
        })
    }

    /// Confirms, at the user's request, that the disk to which a backend was moved is served, together with the content of
    /// its cache.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Media`].
    pub fn settle_backend(&self, id: BackendId) -> Result<()> {
        self.update_backend(id, |row| row.cache_mode = MODE_WRITEBACK.into())
    }

    /// Empties the cache of a backend, which is not open and holds nothing dirty or damaged: from now on its disk can be
    /// written without the cache. If this process fails or crashes while the cache is partly emptied, the backend is not
    /// served: the row records it as moved.
    ///
    /// # Errors
    /// As [`open_cache`](Self::open_cache); [`ErrorKind::Media`] if stores to the region have failed.
    pub fn empty_backend(&self, id: BackendId) -> Result<()> {
        let entry = self.backend(id)?;
        let has_former = !self.former_disks(id).is_empty();
        let mut tables = self.tables.lock();
        let found = self.find_cache(&mut tables, id, &entry)?;
        // 1. Durable before any part of the log is erased; the state that a crash of the machine can restore is refused.
        self.note_opening(&mut tables, id)?;
        self.update_row(&mut tables, id, |row| row.cache_mode = MODE_MOVED.into())?;
        // 2. After a crash from here on the operation can be repeated.
        self.empty_found(&found);
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        // 3. The backend can be served, unless it was moved to another disk. If there is no former disk, a process that
        //    crashed before this step has set the moved mode in step 1.
        let is_moved = entry.is_moved && has_former;
        let mode = if is_moved { MODE_MOVED } else { MODE_WRITEBACK };
        self.update_row(&mut tables, id, |row| row.cache_mode = mode.into())
    }

    /// The disk that a backend had before its last move, if there was a move and the record can be read.
    pub fn former_disk(&self, id: BackendId) -> Option<FormerDisk> {
        self.former_disks(id).into_iter().next()
    }

    /// All disks that a backend had before it was moved, and that may lack data, in order from the last move. The present
    /// disk is left out, even if it was a former one.
    pub fn former_disks(&self, id: BackendId) -> Vec<FormerDisk> {
        let tables = self.tables.lock();
        let row = tables.backends.get(id.index()).and_then(|row| row.content());
        let row = row.filter(|row| row.state.get() == STATE_ACTIVE);
        row.map_or_else(Vec::new, |row| self.former_disks_of(row))
    }

    /// Removes the record of a former disk of a backend, because the user declares that the disk is gone or will be used for
    /// something else: from now on it is accepted as any other disk. `name` is its path or its identity.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if no former disk had this path or has this identity; [`ErrorKind::InvalidArgument`] if
    /// several had this path, with the identity of each; [`ErrorKind::Media`] if stores to the region have failed.
    pub fn forget_former_disk(&self, id: BackendId, name: &str) -> Result<()> {
        let mut tables = self.tables.lock();
        let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
        let no_such =
            || Error::new(ErrorKind::NotFound, format!("no rescue has moved backend {id} away from {name}"));
        let row = row.content().ok_or_else(no_such)?;
        let mut known: Vec<_> = self.former_slots_of(row);
        known.retain(|(_, former)| former.path == name || former.identity == name);
        let [(at, _)] = known.as_slice() else {
            return Err(if known.is_empty() { no_such() } else { ambiguous(id, name, &known) });
        };
        let stored = self.read_former(row, *at).clear(&self.region);
        self.region.fence(MutationPoint::MovedForgetFence, stored);
        for slot in at {
            self.region.sync(MutationPoint::MovedForgetSync, *slot, size_of::<FormerDiskSlot>() as u64)?;
        }
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }

    fn former_disks_of(&self, row: &BackendRow) -> Vec<FormerDisk> {
        let mut slots = self.former_slots_of(row);
        heap_sort_by_key(&mut slots, |(at, former)| (core::cmp::Reverse(former.number), *at));
        slots.into_iter().map(|(_, former)| former).collect()
    }

    /// The former disks, each with its two slots. The present disk is left out, even if it was a former one.
    fn former_slots_of(&self, row: &BackendRow) -> Vec<([u64; 2], FormerDisk)> {
        let places = self.former_places(row).into_iter();
        places
            .filter_map(|at| {
                let slots = self.read_former(row, at);
                let former =
                    slots.content().filter(|former| former.identity != row.identity).and_then(decoded)?;
                Some((at, former))
            })
            .collect()
    }

    pub(super) fn read_former(&self, row: &BackendRow, at: [u64; 2]) -> TwoSlots<FormerDiskSlot> {
        TwoSlots::read(&self.region, at, row.cache_id.get())
    }

    /// The offsets of the records of former disks, in the state block of the cache; empty for a backend without a cache.
    pub(super) fn former_places(&self, row: &BackendRow) -> Vec<[u64; 2]> {
        let segment = row.state_segment.get();
        if row.cache_id.get() == 0 || segment >= self.segment_count() {
            return Vec::new();
        }
        let base = self.segment_base(SegmentId(segment));
        let shape = StateShape { lanes: row.lanes.get() };
        (0..StateShape::FORMER_DISKS).map(|index| shape.former(index).map(|at| base + at)).collect()
    }
}

fn decoded(former: &FormerDiskSlot) -> Option<FormerDisk> {
    Some(FormerDisk {
        path: decode_text("path", former.path_length, &former.path).ok()?,
        identity: decode_text("identity", former.identity_length, &former.identity).ok()?,
        moved_ms: former.moved_ms.get(),
        number: former.number.get(),
    })
}

fn ambiguous(id: BackendId, path: &str, known: &[([u64; 2], FormerDisk)]) -> Error {
    let identities: Vec<&str> = known.iter().map(|(_, former)| former.identity.as_str()).collect();
    Error::new(
        ErrorKind::InvalidArgument,
        format!(
            "backend {id} was moved away from {} disks that had the path {path}: name one of them by its identity: {}",
            known.len(),
            identities.join(", ")
        ),
    )
}

fn no_room(id: BackendId, known: &[FormerDisk]) -> Error {
    let paths: Vec<&str> = known.iter().map(|former| former.path.as_str()).collect();
    Error::new(
        ErrorKind::NoSpace,
        format!(
            "backend {id} was moved before, and the region has no room to remember one more disk that lacks data besides {}: name one of \
             them that is gone or that will never be started as it is, with --forget-disk PATH, and it is not refused any more",
            paths.join(", ")
        ),
    )
}
