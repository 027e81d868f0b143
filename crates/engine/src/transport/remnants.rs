//! Checks whether a region without a superblock was a transport.
//!
//! Invariants: nothing is changed, and nothing is guessed. The first tables of every transport begin at the second page, and
//! a row is valid only with its own checksum, kind and place.
//!
//! Elsewhere: using the result; without a superblock the offsets of the caches are unknown.

use super::{FormatOptions, read_table};
use cbd_format::{BackendEntry, BlkdevEntry, HostEntry, Layout, SlotContent, layout::SEGMENT_SIZE_MIN};
use cbd_types::{Error, ErrorKind, Pmem, Region};

/// The error for a region in which no superblock was found.
pub(super) fn without_superblock<P: Pmem>(region: &Region<P>) -> Error {
    if holds_rows(region) {
        return Error::new(
            ErrorKind::Damaged,
            "both superblocks are gone (the first and the last page of the region), and tables of a CBD transport stand \
             between them: its data may still be there; do not format it, and keep a copy",
        );
    }
    Error::new(
        ErrorKind::Foreign,
        "the region does not hold a CBD transport: there is no superblock in its first and its last page, and no table \
         behind the first",
    )
}

/// Whether there are rows of hosts, backends or blkdevs at the offsets that the tools use, whatever the size of the region
/// was.
pub(super) fn holds_rows<P: Pmem>(region: &Region<P>) -> bool {
    let rows = FormatOptions::default();
    let layout =
        Layout::new(region.size(), SEGMENT_SIZE_MIN, rows.host_rows, rows.backend_rows, rows.blkdev_rows);
    layout.is_ok_and(|layout| {
        holds::<P, HostEntry>(region, layout.host_area, layout.host_rows)
            || holds::<P, BackendEntry>(region, layout.backend_area, layout.backend_rows)
            || holds::<P, BlkdevEntry>(region, layout.blkdev_area, layout.blkdev_rows)
    })
}

fn holds<P: Pmem, T: SlotContent>(region: &Region<P>, area: u64, rows: u32) -> bool {
    read_table::<P, T>(region, area, rows).iter().any(|row| row.content().is_some())
}
