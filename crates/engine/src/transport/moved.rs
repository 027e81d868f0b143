//! Backends that a rescue has moved to another disk.
//!
//! Always true here: from the moment at which the other disk may have got anything that the former one lacks, the row names the other disk,
//! durably; so the former one is never served as if it were complete, whatever is cut off. Until the user has said so the other one is
//! not served either: somebody may have used it without its cache since.
//!
//! Left to others: which disk it is, and when a backend is moved (the tools).

use super::{Transport, rows::active_row};
use crate::{Environment, slots::TwoSlots};
use alloc::string::String;
use cbd_format::{
    BackendEntry as BackendRow, FormerDisk as FormerDiskSlot, StateShape,
    tables::{MODE_MOVED, MODE_WRITEBACK, STATE_ACTIVE, decode_text, encode_text},
};
use cbd_types::{BackendId, Error, ErrorKind, Result, Safeguard, SegmentId};

/// The disk that a backend had before it was moved.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FormerDisk {
    /// Its path then.
    pub path: String,
    /// What it is known by besides its path.
    pub identity: String,
    /// When the backend was moved, in milliseconds since 1970 UTC.
    pub moved_ms: u64,
}

impl<E: Environment> Transport<E> {
    /// Moves a backend to another disk: from now on `path` and `identity` are its disk, and the present one is its former disk. It
    /// is to be called before anything is written to the other one.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InvalidArgument`] for a backend without a cache, which holds nothing that could be moved, and
    /// for texts that are too long; [`ErrorKind::Media`] when the region takes no stores.
    pub fn move_backend(&self, id: BackendId, path: &str, identity: &str) -> Result<()> {
        let (path_length, path) = encode_text("path", path)?;
        let (identity_length, identity) = encode_text("identity of the backing device", identity)?;
        {
            let mut tables = self.tables.lock();
            let row = active_row(&mut tables.backends, id.index(), |row| row.state.get(), "backend")?;
            let at = row.content().and_then(|row| self.former_at(row));
            let (Some(row), Some(at)) = (row.content().copied(), at) else {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    alloc::format!("backend {id} has no cache to move"),
                ));
            };
            // 1. Where it was: durable before the row says that it is there no longer.
            let mut former = TwoSlots::<FormerDiskSlot>::empty(at, row.cache_id.get());
            let stored = former.fill(
                &self.region,
                Safeguard::MovedFormerSecond,
                FormerDiskSlot {
                    path_length: row.path_length,
                    identity_length: row.identity_length,
                    moved_ms: self.environment.wall_ms().into(),
                    path: row.path,
                    identity: row.identity,
                    reserved: [0; 224],
                },
            );
            self.region.fence(Safeguard::MovedFormerFence, stored);
            for slot in at {
                self.region.sync(Safeguard::MovedFormerSync, slot, size_of::<FormerDiskSlot>() as u64)?;
            }
        }
        // 2. The row, all at once.
        self.update_backend(id, |row| {
            row.cache_mode = MODE_MOVED.into();
            row.path_length = path_length;
            row.path = path;
            row.identity_length = identity_length;
            row.identity = identity;
        })
    }

    /// Takes back [`move_backend`](Self::move_backend): nothing has reached the other disk that the former one lacks. `entry` is what
    /// the table had before.
    ///
    /// # Errors
    /// As [`move_backend`](Self::move_backend).
    pub fn move_backend_back(&self, entry: &super::BackendEntry) -> Result<()> {
        let (path_length, path) = encode_text("path", &entry.path)?;
        let (identity_length, identity) = encode_text("identity of the backing device", &entry.identity)?;
        self.update_backend(entry.id, |row| {
            row.cache_mode = if entry.is_moved { MODE_MOVED } else { MODE_WRITEBACK }.into();
            row.path_length = path_length;
            row.path = path;
            row.identity_length = identity_length;
            row.identity = identity;
        })
    }

    /// The user says that the disk to which a backend was moved is to be served, with what the cache holds of it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Media`].
    pub fn settle_backend(&self, id: BackendId) -> Result<()> {
        self.update_backend(id, |row| row.cache_mode = MODE_WRITEBACK.into())
    }

    /// The disk that a backend had before it was moved, if it was and if that can be read.
    pub fn former_disk(&self, id: BackendId) -> Option<FormerDisk> {
        let tables = self.tables.lock();
        let row = tables.backends.get(id.index())?.content()?;
        let at =
            Some(row).filter(|row| row.state.get() == STATE_ACTIVE).and_then(|row| self.former_at(row))?;
        let slots = TwoSlots::<FormerDiskSlot>::read(&self.region, at, row.cache_id.get());
        let former = slots.content()?;
        Some(FormerDisk {
            path: decode_text("path", former.path_length, &former.path).ok()?,
            identity: decode_text("identity", former.identity_length, &former.identity).ok()?,
            moved_ms: former.moved_ms.get(),
        })
    }

    /// Where the former disk stands, in the state block of the cache.
    fn former_at(&self, row: &BackendRow) -> Option<[u64; 2]> {
        let segment = row.state_segment.get();
        if row.cache_id.get() == 0 || segment >= self.layout.segment_count {
            return None;
        }
        let base = self.layout.segment_base(SegmentId(segment));
        Some((StateShape { lanes: row.lanes.get() }).former().map(|at| base + at))
    }
}
