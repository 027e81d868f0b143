//! Opens regions by path, as the daemon does.
//!
//! Invariants: a region is opened for stores only if its file is not the backing file of a loop device. Writes through
//! that device would overwrite the region, and a store into the region would change the device. If such a region is
//! opened for reading, the caller gets a warning.
//!
//! Elsewhere: locks and permitted types (`cbd-pmem`), finding loop devices (`cbd-backing`).

use cbd_backing::refuse_file_beneath_loop_device;
use cbd_pmem::{Mapping, OpenOptions, Reader};
use cbd_types::Result;
use std::path::Path;

/// Opens a region that is to be changed.
///
/// # Errors
/// [`ErrorKind::Busy`](cbd_types::ErrorKind::Busy) while its file is the backing file of a loop device or a daemon has
/// it open, and the errors of [`Mapping::open`].
pub fn to_change(region: &Path) -> Result<Mapping> {
    refuse_file_beneath_loop_device(region)?;
    Mapping::open(region, &OpenOptions::default())
}

/// Opens a region that is only read. Returns a warning if its file is the backing file of a loop device.
///
/// # Errors
/// The errors of [`Reader::open`].
pub fn to_read(region: &Path) -> Result<(Reader, Option<String>)> {
    let reader = Reader::open(region)?;
    let warning = refuse_file_beneath_loop_device(region).err().map(|error| {
        format!(
            "{}; writes through it change the region, so this result may be wrong, and neither the daemon nor repair \
             nor rescue opens the region",
            error.line()
        )
    });
    Ok((reader, warning))
}
