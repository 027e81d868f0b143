//! Opens regions by path, as the daemon does.
//!
//! Invariants: a region is opened for stores only if its file is not the backing file of a loop device. Writes through
//! that device would overwrite the region, and a store into the region would change the device. If such a region is
//! opened for reading, the caller gets a warning.
//!
//! A region that a living host of another machine has, alone or with others, is opened for nothing: no lock of this kernel excludes
//! that host.
//!
//! Elsewhere: locks and permitted types (`cbd-pmem`), finding loop devices (`cbd-backing`).

use cbd_backing::refuse_file_beneath_loop_device;
use cbd_engine::owner::{NOTE_AT, NOTE_BYTES, Seen, may_announce, seen};
use cbd_pmem::{Mapping, OpenOptions, Reader};
use cbd_runtime::hosts;
use cbd_runtime::presence::{Presence, Timing, machine_name, refuse_living, refuse_living_in};
use cbd_runtime::{Bytes, PrivateMemory, ProcessEnvironment};
use cbd_types::{BootId, Error, ErrorKind, MediaError, Reach, Region, Result};
use std::path::Path;
use std::sync::Arc;

/// Opens a region that is to be changed, after [`announce`] or through [`rescue`](crate::rescue::rescue).
///
/// # Errors
/// [`ErrorKind::Busy`] while its file is the backing file of a loop device or a daemon has
/// it open, and the errors of [`Mapping::open`].
pub fn to_change(region: &Path) -> Result<Mapping> {
    refuse_file_beneath_loop_device(region)?;
    Mapping::open(region, &OpenOptions::default())
}

/// Announces this process as the host of a region that is open [to be changed](to_change): other machines leave the region alone
/// while the result lives. `None` if its first page has no valid superblock, beside which nothing is stored.
///
/// # Errors
/// [`ErrorKind::Busy`] while a host of another machine has it, and as [`Presence::begin`].
pub fn announce(region: &Arc<Region<Mapping>>, path: &Path) -> Result<Option<Presence>> {
    hosts::refuse_living(&Arc::new(ProcessEnvironment::new()), region)?;
    let (path, timing) = (path.display().to_string(), Timing::default());
    let gone = refuse_living_in(region, &path, &timing)?;
    if !may_announce(region) {
        return Ok(None);
    }
    Presence::begin(region, (&path, &machine_name()), &timing, gone).map(Some)
}

/// What the note in a region says of a host that has it.
fn look(region: &Reader) -> Seen {
    let mut note = [0; NOTE_BYTES];
    region.observe(NOTE_AT, NOTE_BYTES);
    region.load(NOTE_AT, &mut note).map_or(Seen::Free, |()| seen(&note, region.boot()))
}

/// A region as other machines have stored it, at each load.
struct Observed(Arc<Reader>);

impl Bytes for Observed {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn boot(&self) -> BootId {
        self.0.boot()
    }

    fn load(&self, at: u64, into: &mut [u8]) -> std::result::Result<(), MediaError> {
        if self.0.reach() == Reach::Machines {
            self.0.observe(at, into.len());
        }
        self.0.load(at, into)
    }
}

/// Refuses a region of several hosts of which one lives on another machine.
fn refuse_living_hosts(reader: Reader) -> Result<Reader> {
    let reader = Arc::new(reader);
    let memory = PrivateMemory::new(Arc::new(Observed(Arc::clone(&reader))));
    hosts::refuse_living(&Arc::new(ProcessEnvironment::new()), &Arc::new(Region::new(memory)))?;
    Arc::into_inner(reader).ok_or_else(|| Error::new(ErrorKind::Busy, "the region is in use in this process"))
}

/// Opens a region that is only read. Returns a warning if its file is the backing file of a loop device.
///
/// # Errors
/// The errors of [`Reader::open`]; [`ErrorKind::Busy`] also while a host of another machine has it.
pub fn to_read(region: &Path) -> Result<(Reader, Option<String>)> {
    let reader = refuse_living_hosts(Reader::open(region)?)?;
    if reader.reach() != Reach::Kernel {
        refuse_living(&region.display().to_string(), &Timing::default(), &|| look(&reader))?;
    }
    let warning = refuse_file_beneath_loop_device(region).err().map(|error| {
        format!(
            "{}; writes through it change the region, so this result may be wrong, and neither the daemon nor repair \
             nor rescue opens the region",
            error.line()
        )
    });
    Ok((reader, warning))
}
