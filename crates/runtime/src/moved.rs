//! Backends that a rescue has moved to another disk: messages for the user, and refused disks.
//!
//! Always true here: the disk to which a backend was moved is not served before the user confirms it; a former disk of
//! the backend lacks data, and is refused as long as the region has the backend.

use crate::disk::Disk;
use crate::{ProcessEnvironment, disk};
use cbd_backing::Identity;
use cbd_engine::{BackendEntry, FormerDisk, Transport};
use cbd_pmem::Mapping;
use cbd_types::{Error, ErrorKind, Pmem, Result};

type Tables<P = Mapping> = Transport<ProcessEnvironment<P>>;

/// A text that names the former and the current disk of a moved backend.
#[must_use]
pub fn where_it_went(transport: &Tables, entry: &BackendEntry) -> String {
    let former = transport.former_disk(entry.id);
    moved_from(entry, &former.map_or_else(|| "its former disk".to_owned(), |former| former.path))
}

fn moved_from(entry: &BackendEntry, former: &str) -> String {
    format!("a rescue has moved backend {} from {former} to {}", entry.id, entry.path)
}

/// Refuses a moved backend if the user has not confirmed yet that it is to be served from its new disk.
///
/// # Errors
/// [`ErrorKind::Exchanged`].
pub fn refuse_moved(transport: &Tables, entry: &BackendEntry) -> Result<()> {
    if !entry.is_moved {
        return Ok(());
    }
    let (id, path) = (entry.id, &entry.path);
    Err(Error::new(
        ErrorKind::Exchanged,
        format!(
            "{}, and only that has all the data; unless {path} was written without its cache since, backend-start -p {path} \
             serves it again; backend-stop -b {id} takes the backend off the region, and {path} is a plain disk then",
            where_it_went(transport, entry)
        ),
    ))
}

/// Refuses a disk from which a rescue has moved a backend, even if the backend was moved again since or is served
/// already: the disk lacks data that only the new one received.
///
/// # Errors
/// [`ErrorKind::Exchanged`].
pub fn refuse_former<P: Pmem + 'static>(transport: &Tables<P>, found: &Disk, path: &str) -> Result<()> {
    refuse_former_but(transport, found, path, None)
}

/// As [`refuse_former`], but for the former disk that the user says is gone or is used as another disk, by its path or
/// its identity.
fn refuse_former_but<P: Pmem + 'static>(
    transport: &Tables<P>,
    found: &Disk,
    path: &str,
    forgotten: Option<&str>,
) -> Result<()> {
    for entry in disk::entries(transport).0.iter().filter(|entry| !found.is_of(entry)) {
        let formers = transport.former_disks(entry.id);
        let is_forgotten = |former: &FormerDisk| {
            forgotten.is_some_and(|name| former.path == name || former.identity == name)
        };
        let refused = |former: &&FormerDisk| is_former(former, found) && !is_forgotten(former);
        if let Some(former) = formers.iter().find(refused) {
            let (id, now) = (entry.id, &entry.path);
            let instead = match entry.is_moved {
                true => format!("start {now} instead (backend-start -p {now})"),
                false => format!("use {now} instead"),
            };
            return Err(Error::new(
                ErrorKind::Exchanged,
                format!(
                    "{path} lacks data: {}, and only that has all the data; {instead}, or take the backend off the region \
                     (backend-stop -b {id}), which makes {path} a disk like any other",
                    moved_from(entry, &former.path),
                ),
            ));
        }
    }
    Ok(())
}

/// Refuses `found`, at `path`, as the disk to which a rescue moves `entry`: a region, the disk of another backend, and a
/// disk from which a rescue has moved a backend, except `forgotten`, by its path or identity.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a region, [`ErrorKind::Exchanged`] for another disk that has its own data.
pub fn refuse_target<P: Pmem + 'static>(
    transport: &Tables<P>,
    entry: &BackendEntry,
    found: &Disk,
    path: &str,
    forgotten: Option<&str>,
) -> Result<()> {
    if found.is_of(entry) {
        return Ok(());
    }
    if found.is_region {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "{path} holds a CBD transport: it is a region, or a copy of one, and no disk; give another path"
            ),
        ));
    }
    let owner = disk::entries(transport).0.into_iter().find(|other| {
        other.id != entry.id
            && Identity::parse(&other.identity).is_ok_and(|recorded| {
                recorded.same_disk(&found.identity).is_ok() || recorded.overlaps(&found.identity)
            })
    });
    if let Some(owner) = owner {
        return Err(Error::new(
            ErrorKind::Exchanged,
            format!(
                "{path} is the disk of backend {} ({}), and no copy of the disk of backend {}: writing to it would destroy \
                 its data; give the path of the copy",
                owner.id, owner.path, entry.id
            ),
        ));
    }
    refuse_former_but(transport, found, path, forgotten)
}

/// Whether `found` is a disk that a backend had before it was moved, or shows bytes of it.
fn is_former(former: &FormerDisk, found: &Disk) -> bool {
    Identity::parse(&former.identity)
        .is_ok_and(|former| former.same_disk(&found.identity).is_ok() || former.overlaps(&found.identity))
}

/// Confirms the disk at `path`, which the user named: if `entry` was moved there, its mark as moved is cleared.
///
/// # Errors
/// [`ErrorKind::Exchanged`] when `path` is another disk, and those of [`Disk::inspect`] and [`Transport::settle_backend`].
pub fn settle(transport: &Tables, entry: &mut BackendEntry, path: &str) -> Result<()> {
    if !entry.is_moved {
        return Ok(());
    }
    let found = Disk::inspect(path)?;
    if !found.is_of(entry) {
        refuse_former(transport, &found, path)?;
        return refuse_moved(transport, entry);
    }
    transport.settle_backend(entry.id)?;
    entry.is_moved = false;
    Ok(())
}
