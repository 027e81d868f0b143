//! Opens regions by path, as the daemon does.
//!
//! Invariants: a region is opened for stores only if no loop device stands on its file: what is written through that device
//! would overwrite the region, and a store into the region would change the device. Reading such a region has a warning.
//!
//! Elsewhere: locks and permitted types (`cbd-pmem`), finding loop devices (`cbd-backing`).

use cbd_backing::refuse_file_beneath_loop_device;
use cbd_pmem::{Mapping, OpenOptions, Reader};
use cbd_types::Result;
use std::path::Path;

/// Opens a region that is to be changed.
///
/// # Errors
/// [`ErrorKind::Busy`](cbd_types::ErrorKind::Busy) while a loop device stands on its file or a daemon has it, and those of
/// [`Mapping::open`].
pub fn to_change(region: &Path) -> Result<Mapping> {
    refuse_file_beneath_loop_device(region)?;
    Mapping::open(region, &OpenOptions::default())
}

/// Opens a region that is only read, and returns a warning if a loop device stands on its file.
///
/// # Errors
/// Those of [`Reader::open`].
pub fn to_read(region: &Path) -> Result<(Reader, Option<String>)> {
    let reader = Reader::open(region)?;
    let warning = refuse_file_beneath_loop_device(region).err().map(|error| {
        format!(
            "{}; what is written through it changes the region, so this result may be wrong, and neither the daemon nor repair \
             nor rescue opens the region",
            error.line()
        )
    });
    Ok((reader, warning))
}
