//! Backends that a rescue has moved to another disk: messages for the user, and the disks to refuse.
//!
//! Invariants: the disk to which a backend was moved is not served before the user confirms it; a former disk of
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

/// Refuses a moved backend until the user has confirmed that it is to be served from its new disk.
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

/// Refuses a disk from which a rescue has moved a backend, even if the backend was moved again since or is being served
/// already: the disk lacks data that only the new one has received.
///
/// # Errors
/// [`ErrorKind::Exchanged`].
pub fn refuse_former<P: Pmem + 'static>(transport: &Tables<P>, found: &Disk, path: &str) -> Result<()> {
    refuse_former_but(transport, found, path, None)
}

/// As [`refuse_former`], but accepts the former disk with the path or identity `forgotten`, which according to the user is
/// gone or is used as another disk.
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

/// Refuses `found`, at `path`, as the disk to which a rescue moves `entry` if it is a region, the disk of another backend, or
/// a disk from which a rescue has moved a backend. The former disk with the path or identity `forgotten` is accepted.
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

/// Whether `found` is a disk that a backend had before it was moved, or shares bytes with it.
fn is_former(former: &FormerDisk, found: &Disk) -> bool {
    Identity::parse(&former.identity)
        .is_ok_and(|former| former.same_disk(&found.identity).is_ok() || former.overlaps(&found.identity))
}

/// Confirms the disk at `path`, which the user named: if `entry` was moved there, its moved mode is cleared.
///
/// # Errors
/// [`ErrorKind::Exchanged`] if `path` is another disk, and those of [`Disk::inspect`] and [`Transport::settle_backend`].
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

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_engine::{BackendSpec, FormatOptions, Settings};
    use cbd_types::{BackendId, HostId, Region};
    use std::sync::Arc;

    const SIZE: u64 = 1 << 20;

    /// A transport with a backend for each of these identities, the first with a cache.
    fn transport(identities: &[&str]) -> Arc<Tables> {
        let region = Region::new(Mapping::anonymous(8 << 20).unwrap());
        let options = FormatOptions { segment_size: Some(64 << 10), ..FormatOptions::default() };
        let transport = Transport::format(Arc::new(ProcessEnvironment::new()), region, &options).unwrap();
        transport.register_host("host", None).unwrap();
        for (number, identity) in identities.iter().enumerate() {
            let spec = BackendSpec {
                host: HostId(0),
                path: format!("/disk{number}"),
                identity: (*identity).to_owned(),
                size: SIZE,
                sector: 512,
                cache_bytes: (number == 0).then_some(1 << 20),
                lanes_max: 1,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            };
            transport.create_backend(&spec).unwrap();
        }
        transport
    }

    fn disk(identity: &str) -> Disk {
        Disk { identity: Identity::parse(identity).unwrap(), size: SIZE, sector: 512, is_region: false }
    }

    #[test]
    fn a_rescue_moves_to_no_disk_that_shows_bytes_of_another_one_of_the_region() {
        let transport = transport(&["block;size=1048576;wwid=naa.1", "file;size=1048576;inode=12;born=1.5"]);
        let entry = transport.backend(BackendId(0)).unwrap();
        let refused = |found: &Disk, forgotten: Option<&str>| {
            refuse_target(&*transport, &entry, found, "/given", forgotten).map_err(|error| error.line())
        };
        let expect = |identity: &str, words: &str| {
            let error = refused(&disk(identity), None).expect_err(identity);
            assert!(error.contains(words), "{identity}: {error}");
        };
        // A loop device and a partition over it; no row has their identity.
        expect("block;size=1048576;inode=12;born=1.5;boot=x;seq=1", "is the disk of backend 1");
        expect("block;size=4096;inode=12;born=1.5;slice=1@8", "is the disk of backend 1");
        assert_eq!(refused(&disk("file;size=1048576;inode=13;born=1.5"), None), Ok(()));
        let region = Disk { is_region: true, ..disk("file;size=1048576;inode=14;born=1.5") };
        assert!(refused(&region, None).unwrap_err().contains("holds a CBD transport"));
        // The backend's own disk is not a target of a move, whatever else shares its bytes.
        assert_eq!(refused(&Disk { is_region: true, ..disk("block;size=1048576;wwid=naa.1") }, None), Ok(()));

        transport.move_backend(BackendId(0), "/copy", "block;size=1048576;wwid=naa.2").unwrap();
        let entry = transport.backend(BackendId(0)).unwrap();
        let refused = |identity: &str, forgotten: Option<&str>| {
            refuse_target(&*transport, &entry, &disk(identity), "/given", forgotten)
                .map_err(|error| error.line())
        };
        for former in ["block;size=1048576;wwid=naa.1", "block;size=4096;slice=1@8;wwid=naa.1"] {
            assert!(refused(former, None).unwrap_err().contains("lacks data"), "{former}");
            assert_eq!(refused(former, Some("/disk0")), Ok(()), "{former}");
            assert!(refused(former, Some("/disk1")).is_err(), "{former}: another one is forgotten");
        }
    }
}
