//! Backends that a rescue has moved to another disk: what is said of them, and who is refused.
//!
//! Always true here: neither the former disk nor the one to which the backend was moved is served before the user has said that the
//! latter is to be.

use crate::disk::Disk;
use crate::{ProcessEnvironment, disk};
use cbd_backing::Identity;
use cbd_engine::{BackendEntry, Transport};
use cbd_types::{Error, ErrorKind, Result};

type Tables = Transport<ProcessEnvironment>;

/// Where a moved backend was and is, in words.
#[must_use]
pub fn where_it_went(transport: &Tables, entry: &BackendEntry) -> String {
    let former = transport.former_disk(entry.id);
    let former = former.map_or_else(|| "its former disk".to_owned(), |former| former.path);
    format!("a rescue has moved backend {} from {former} to {}", entry.id, entry.path)
}

/// Refuses a backend that was moved and of which nobody has said yet that it is to be served where it is.
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

/// Refuses a disk from which a rescue has moved a backend away: it lacks what only the other one got.
///
/// # Errors
/// [`ErrorKind::Exchanged`].
pub fn refuse_former(transport: &Tables, found: &Disk, path: &str) -> Result<()> {
    for entry in disk::entries(transport).0.iter().filter(|entry| entry.is_moved && !found.is_of(entry)) {
        if is_former(transport, entry, found) {
            return Err(Error::new(
                ErrorKind::Exchanged,
                format!(
                    "{path} lacks data: {}, and only that has all the data; start {} instead (backend-start -p {}), or take the \
                     backend off the region (backend-stop -b {}), which makes {path} a disk like any other",
                    where_it_went(transport, entry),
                    entry.path,
                    entry.path,
                    entry.id
                ),
            ));
        }
    }
    Ok(())
}

/// Whether `found` is the disk that a backend had before it was moved.
fn is_former(transport: &Tables, entry: &BackendEntry, found: &Disk) -> bool {
    let former = transport.former_disk(entry.id).and_then(|former| Identity::parse(&former.identity).ok());
    former.is_some_and(|former| former.same_disk(&found.identity).is_ok())
}

/// The user names the disk at `path` to be served: if `entry` was moved there, it is settled there, and is not moved any more.
///
/// # Errors
/// [`ErrorKind::Exchanged`] when another disk stands at `path`, and those of [`Disk::look`] and [`Transport::settle_backend`].
pub fn settle(transport: &Tables, entry: &mut BackendEntry, path: &str) -> Result<()> {
    if !entry.is_moved {
        return Ok(());
    }
    let found = Disk::look(path)?;
    if !found.is_of(entry) {
        refuse_former(transport, &found, path)?;
        return refuse_moved(transport, entry);
    }
    transport.settle_backend(entry.id)?;
    entry.is_moved = false;
    Ok(())
}
