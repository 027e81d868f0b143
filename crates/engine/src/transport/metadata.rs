//! Verification of the metadata of a region in use: superblocks, rows of tables, and what a cache has stored of itself.
//!
//! Each step holds the lock of the tables. So no row changes meanwhile, and no segment of an open cache goes to another one: a cache is
//! detached, shrunk and removed under that lock. Where the content is in memory, damaged copies get it from there, as with any store of
//! the structure.
//!
//! Invariants: a superblock that is valid and differs is not touched: a change of its features has not ended.
//!
//! Elsewhere: objects in two slots (`slots::whole`), the structures of an open cache (`cache::metadata`), regions that are not in use
//! (`cbd-inspect`).

use super::{Tables, Transport};
use crate::{
    Environment,
    metadata::{Area, MetadataPlace},
    slots::{Object, SLOT_BYTES_MAX, TwoSlots},
};
use alloc::vec::Vec;
use cbd_format::{BackendEntry as BackendRow, SlotContent};
use cbd_types::{BackendId, Error, ErrorKind, Pmem, Region, Result, SegmentId, Structure, VerifiedMetadata};

impl<E: Environment> Transport<E> {
    /// One step of a verification of all metadata of the transport that has two copies, and of that of the open cache of a backend, if
    /// it has one: looks at both copies of a number of structures, and makes damaged ones whole again. Clients go on meanwhile. It is
    /// called until the place [is at its end](MetadataPlace::is_at_end).
    ///
    /// # Errors
    /// [`ErrorKind::Stopped`] if the backend has a cache that is not open or was stopped; [`ErrorKind::System`] without memory.
    pub fn verify_metadata(
        &self,
        id: BackendId,
        place: &mut MetadataPlace,
        found: &mut VerifiedMetadata,
    ) -> Result<()> {
        let mut scratch = Vec::new();
        scratch.try_reserve_exact(SLOT_BYTES_MAX).map_err(|_| no_memory())?;
        scratch.resize(SLOT_BYTES_MAX, 0);
        let (region, scratch) = (&*self.region, &mut scratch[..]);
        let mut guard = self.tables.lock();
        let tables = &mut *guard;
        match place.area() {
            Area::Superblocks => {
                tables.superblocks.verify(region, found);
                place.end_area();
            }
            Area::Hosts => {
                verify_rows(&mut tables.hosts, Structure::HostRow, place, region, scratch, found);
            }
            Area::Backends => {
                verify_rows(&mut tables.backends, Structure::BackendRow, place, region, scratch, found);
            }
            Area::Blkdevs => {
                verify_rows(&mut tables.blkdevs, Structure::BlkdevRow, place, region, scratch, found);
            }
            Area::Segments => {
                verify_rows(&mut tables.segments, Structure::SegmentRow, place, region, scratch, found);
            }
            Area::End => {}
            Area::State | Area::Tails | Area::Marks | Area::Logs => {
                return self.verify_cache(tables, id, place, scratch, found);
            }
        }
        Ok(())
    }

    fn verify_cache(
        &self,
        tables: &Tables<E>,
        id: BackendId,
        place: &mut MetadataPlace,
        scratch: &mut [u8],
        found: &mut VerifiedMetadata,
    ) -> Result<()> {
        let row = tables.backends.get(id.index()).and_then(TwoSlots::content);
        let Some(row) = row.filter(|row| row.cache_id.get() != 0) else {
            place.end_area();
            return Ok(());
        };
        let Some(cache) = tables.open_caches(id).find(|cache| cache.is_running()) else {
            return Err(Error::new(ErrorKind::Stopped, "the cache was stopped"));
        };
        if place.area() == Area::State {
            self.verify_former_disks(row, scratch, found);
            self.verify_pins(row, found);
        }
        cache.verify_metadata(SegmentId(row.state_segment.get()), place, scratch, found);
        Ok(())
    }

    fn verify_former_disks(&self, row: &BackendRow, scratch: &mut [u8], found: &mut VerifiedMetadata) {
        for (number, at) in (0..).zip(self.former_places(row)) {
            let mut slots = self.read_former(row, at);
            // Slots of an earlier cache do not count: they are no damage.
            if slots.content().is_some() {
                let object = Object { structure: Structure::FormerDisk, number, is_synced: true };
                slots.verify(&self.region, object, scratch, found);
            }
        }
    }
}

/// Looks at the next rows of a table.
#[inline(never)]
fn verify_rows<P: Pmem, T: SlotContent>(
    table: &mut [TwoSlots<T>],
    structure: Structure,
    place: &mut MetadataPlace,
    region: &Region<P>,
    scratch: &mut [u8],
    found: &mut VerifiedMetadata,
) {
    for row in place.take(table.len() as u64) {
        let object = Object { structure, number: row as u64, is_synced: true };
        table[row].verify(region, object, scratch, found);
    }
}

#[cold]
fn no_memory() -> Error {
    Error::new(ErrorKind::System, "there is no memory to verify the metadata")
}
