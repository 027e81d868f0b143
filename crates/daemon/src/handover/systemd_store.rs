//! systemd's descriptor store, `sd_notify(3)` and `sd_listen_fds(3)`: the next run of a service receives the
//! descriptors that this one stored.
//!
//! Invariants: the store is used only if the unit declares its capacity, since systemd does not report descriptors that
//! it drops. For the same reason the descriptors in it are counted, and `put` refuses an entry that does not fit.

use super::{DescriptorStore, Entry, NAME_BYTES_MAX, is_name};
use cbd_sys::passing;
use cbd_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// Timeout for systemd to accept a message.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The environment variable that a unit sets instead of `FDSTORE` for a systemd before version 254.
pub const CAPACITY_VARIABLE: &str = "CBD_DESCRIPTOR_STORE";

/// Capacity of a unit that sets [`CAPACITY_VARIABLE`], as the one in `packaging/` does.
const UNIT_CAPACITY: usize = 4096;

/// systemd's store.
#[derive(Debug)]
pub struct SystemdStore {
    socket: OwnedFd,
    address: SocketAddrUnix,
    /// Capacity in descriptors.
    capacity: usize,
    /// Number of descriptors that it holds under each name.
    held: Mutex<BTreeMap<String, usize>>,
}

/// Capacity of the store in descriptors, from the environment.
///
/// # Errors
/// The reason if the unit declares no capacity.
pub fn capacity(fdstore: Option<&str>, mark: Option<&str>) -> std::result::Result<usize, String> {
    let marked = if mark == Some("systemd") { UNIT_CAPACITY } else { 0 };
    let capacity = fdstore.and_then(|text| text.parse().ok()).unwrap_or(marked);
    if capacity > 0 {
        return Ok(capacity);
    }
    Err("the unit does not let it: FileDescriptorStoreMax= is missing (see packaging/cbdd.service)"
        .to_owned())
}

impl SystemdStore {
    /// The store of the service manager that listens at `notify_socket`, with a capacity of `capacity` descriptors and
    /// with `entries` in it.
    ///
    /// # Errors
    /// When `notify_socket` is not a valid address.
    pub fn new(notify_socket: &OsStr, capacity: usize, entries: &[Entry]) -> Result<Self> {
        let failed = |error: rustix::io::Errno| {
            Error::new(ErrorKind::System, "NOTIFY_SOCKET cannot be used").caused_by(error)
        };
        let address = match notify_socket.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddrUnix::new_abstract_name(name),
            None => SocketAddrUnix::new(notify_socket),
        };
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
        set_socket_timeout(&socket, Timeout::Send, Some(TIMEOUT)).map_err(failed)?;
        let held = entries.iter().map(|entry| (entry.name.clone(), entry.descriptors.len())).collect();
        Ok(Self { socket, address: address.map_err(failed)?, capacity, held: Mutex::new(held) })
    }

    fn send(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        passing::send(&self.socket, Some(&self.address), text, descriptors)
    }
}

impl DescriptorStore for SystemdStore {
    fn put(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        if !is_name(name) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{name:?} is no name for a descriptor store"),
            ));
        }
        let mut held = self.held.lock();
        let others: usize = held.iter().filter(|(other, _)| *other != name).map(|(_, count)| count).sum();
        if others + descriptors.len() > self.capacity {
            let text = format!(
                "the unit's store has a capacity of {} descriptors, other entries have {others} of them, and {} more are needed: raise \
                 FileDescriptorStoreMax=",
                self.capacity,
                descriptors.len()
            );
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        held.remove(name);
        self.release(name);
        // Without polling by systemd: each request of a connection would wake systemd.
        self.send(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), descriptors).map_err(|error| {
            Error::new(ErrorKind::System, format!("systemd does not take the descriptors of {name}"))
                .caused_by(error)
        })?;
        held.insert(name.to_owned(), descriptors.len());
        Ok(())
    }

    fn remove(&self, name: &str) {
        self.held.lock().remove(name);
        self.release(name);
    }

    fn store_name(&self) -> &'static str {
        "systemd"
    }
}

impl SystemdStore {
    fn release(&self, name: &str) {
        if let Err(error) = self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]) {
            tracing::warn!("systemd does not release the descriptors of {name}: {error}");
        }
    }
}

/// The entries that the previous run of the service stored, out of all descriptors that systemd passed.
#[must_use]
pub fn entries(handed_over: Vec<(String, OwnedFd)>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for (name, descriptor) in handed_over.into_iter().filter(|(name, _)| is_name(name)) {
        match entries.iter_mut().find(|entry| entry.name == name) {
            Some(entry) => entry.descriptors.push(descriptor),
            None => entries.push(Entry { name, descriptors: vec![descriptor] }),
        }
    }
    entries
}

// The longest name is within systemd's limit.
const _: () = assert!(NAME_BYTES_MAX <= 255);

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::bind;
    use std::fs::File;
    use std::os::fd::AsFd;

    fn manager(path: &std::path::Path) -> OwnedFd {
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT)).unwrap();
        socket
    }

    #[test]
    fn put_sends_descriptors_with_their_name_after_the_removal_of_earlier_ones() {
        let dir = tempfile::tempdir().unwrap();
        let manager = manager(&dir.path().join("notify"));
        let store = SystemdStore::new(dir.path().join("notify").as_os_str(), 8, &[]).unwrap();
        let file = tempfile::tempfile().unwrap();
        store.put("cbd-1", &[file.as_fd(), file.as_fd()]).unwrap();
        store.remove("cbd-1");
        let received: Vec<(String, usize)> = (0..3)
            .map(|_| passing::receive(&manager).unwrap().unwrap())
            .map(|(text, descriptors)| (text, descriptors.len()))
            .collect();
        assert_eq!(
            received,
            [
                ("FDSTOREREMOVE=1\nFDNAME=cbd-1".to_owned(), 0),
                ("FDSTORE=1\nFDNAME=cbd-1\nFDPOLL=0".to_owned(), 2),
                ("FDSTOREREMOVE=1\nFDNAME=cbd-1".to_owned(), 0),
            ]
        );
    }

    #[test]
    fn an_entry_that_does_not_fit_is_refused_and_nothing_is_sent_or_lost() {
        let dir = tempfile::tempdir().unwrap();
        let manager = manager(&dir.path().join("notify"));
        let file = tempfile::tempfile().unwrap();
        let left =
            |name: &str| Entry { name: name.to_owned(), descriptors: vec![file.try_clone().unwrap().into()] };
        let store =
            SystemdStore::new(dir.path().join("notify").as_os_str(), 4, &[left("cbd-1"), left("other")])
                .unwrap();
        let descriptor = file.as_fd();
        let refused = |count: usize| {
            let error = store.put("cbd-2", &vec![descriptor; count]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            assert!(error.line().contains("FileDescriptorStoreMax="), "{error}");
        };
        refused(3);
        // Replaces the earlier descriptors.
        store.put("cbd-1", &[descriptor; 3]).unwrap();
        refused(1);
        store.remove("cbd-1");
        store.put("cbd-2", &[descriptor; 3]).unwrap();
        let stored = |(text, descriptors): passing::Message| {
            text.starts_with("FDSTORE=1").then_some(descriptors.len())
        };
        let received: Vec<_> = (0..5).map(|_| stored(passing::receive(&manager).unwrap().unwrap())).collect();
        assert_eq!(received, [None, Some(3), None, None, Some(3)]);
    }

    #[test]
    fn a_name_that_would_add_a_line_to_the_message_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _manager = manager(&dir.path().join("notify"));
        let store = SystemdStore::new(dir.path().join("notify").as_os_str(), 8, &[]).unwrap();
        let file = tempfile::tempfile().unwrap();
        for name in ["", "a\nMAINPID=1", "a:b", "a b", &"x".repeat(NAME_BYTES_MAX + 1)] {
            assert!(store.put(name, &[file.as_fd()]).is_err(), "{name}");
        }
    }

    #[test]
    fn put_fails_if_the_service_manager_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let store = SystemdStore::new(dir.path().join("none").as_os_str(), 8, &[]).unwrap();
        let file = tempfile::tempfile().unwrap();
        assert!(store.put("cbd-1", &[file.as_fd()]).is_err());
    }

    #[test]
    fn a_store_without_room_is_not_offered() {
        assert_eq!(capacity(Some("512"), None), Ok(512));
        assert_eq!(capacity(None, Some("systemd")), Ok(4096));
        assert_eq!(capacity(Some("3"), Some("systemd")), Ok(3));
        for (fdstore, mark) in
            [(None, None), (Some("0"), None), (Some("0"), Some("systemd")), (Some("x"), None)]
        {
            assert!(capacity(fdstore, mark).is_err(), "{fdstore:?} {mark:?}");
        }
    }

    #[test]
    fn descriptors_are_grouped_by_their_names() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let names = ["cbd-1", "stored", "cbd-2", "cbd-1", "a b"];
        let entries = entries(names.map(|name| (name.to_owned(), null())).into_iter().collect());
        let found: Vec<_> =
            entries.iter().map(|entry| (entry.name.as_str(), entry.descriptors.len())).collect();
        assert_eq!(found, [("cbd-1", 2), ("stored", 1), ("cbd-2", 1)]);
    }
}
