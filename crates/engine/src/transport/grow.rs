//! Backing devices that become larger while their backends are in use.
//!
//! The row of a backend says how large its backing device is, and recovery accepts no record beyond that. So the row is the commit
//! point: it has the new size, durably, before the cache accepts a request beyond the former one. A crash before it leaves the former
//! size, and nothing is stored beyond it; a crash behind it leaves the new size.
//!
//! Invariants: the size in a row never falls; the size of an open cache is at most that of its row.
//!
//! Elsewhere: the size of the device itself (`cbd-backing`), and when clients see the new size (`Device::grow` in `cbd-device`).

use super::{Transport, backends::backend_entry, rows::no_such};
use crate::{Environment, lane_map::LaneMap};
use alloc::format;
use cbd_format::FieldText;
use cbd_types::{BackendId, Error, ErrorKind, Result, Size};

impl<E: Environment> Transport<E> {
    /// Records that the backing device of a backend has `size` bytes now, and with this `identity`, which contains its size. Then
    /// the backend's cache, if it is open, accepts requests up to there. The backing device is so large already. If this fails, it
    /// can be repeated; the size in the row may be the former or the new one meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InvalidArgument`] for a size that is smaller than the present one, not whole sectors, or
    /// more than the lanes of the cache reach, and for an identity that is too long; [`ErrorKind::Exchanged`] for a backend that a
    /// rescue has moved and that was not confirmed; [`ErrorKind::Media`] if stores to the region have failed; system errors of a
    /// sync.
    pub fn grow_backend(&self, id: BackendId, size: u64, identity: &str) -> Result<()> {
        let identity = FieldText::new("identity of the backing device", identity)?;
        let refused = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
        let mut tables = self.tables.lock();
        let row = tables.backends.get(id.index()).and_then(|row| row.content());
        let entry = backend_entry(id.0, row.ok_or_else(|| no_such("backend", id.index()))?)?;
        if entry.is_moved {
            return Err(Error::new(
                ErrorKind::Exchanged,
                format!(
                    "a rescue has moved backend {id} to another disk: start it with that disk before it grows"
                ),
            ));
        }
        if size < entry.size {
            return refused(format!(
                "backend {id} has {}, and cannot shrink to {}",
                Size(entry.size),
                Size(size)
            ));
        }
        if !size.is_multiple_of(u64::from(entry.sector)) {
            return refused(format!("{size} bytes are not whole sectors of {}", entry.sector));
        }
        let reached = LaneMap { lanes: entry.lanes }.device_max();
        if entry.cache_segments > 0 && size > reached {
            return refused(format!(
                "a backing device of {} is too large for a cache of {} lanes, which reaches {}: stop the backend and start it with \
                 a larger cache",
                Size(size),
                entry.lanes,
                Size(reached)
            ));
        }
        // 1. The row, durably. From here on recovery accepts records up to there.
        self.update_row(&mut tables, id, |row| {
            row.size = size.into();
            identity.write(&mut row.identity_length, &mut row.identity);
        })?;
        // 2. The cache accepts requests up to there.
        tables.open_caches(id).for_each(|cache| cache.grow(size));
        Ok(())
    }
}
