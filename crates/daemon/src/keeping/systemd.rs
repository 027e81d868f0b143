//! systemd's store of descriptors, `sd_notify(3)` and `sd_listen_fds(3)`: what a service puts there its next run finds again.
//!
//! Always true here: without a unit that says that its store has room, it is not used, since systemd tells nobody that it dropped what it was
//! given.

use super::passing;
use super::{DescriptorStore, Entry, NAME_BYTES_MAX, is_name};
use cbd_types::{Error, ErrorKind, Result};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// How long systemd may take to have room for a message.
const PATIENCE: Duration = Duration::from_secs(5);
/// What a unit for a systemd that does not set `FDSTORE` (before version 254) says instead.
pub const MARK: &str = "CBD_DESCRIPTOR_STORE";

/// systemd's store.
#[derive(Debug)]
pub struct SystemdStore {
    socket: OwnedFd,
    address: SocketAddrUnix,
}

/// Whether the environment says that there is a store with room.
///
/// # Errors
/// Why not, where systemd has started this process.
pub fn is_offered(fdstore: Option<&str>, mark: Option<&str>) -> std::result::Result<(), String> {
    let room = fdstore.and_then(|text| text.parse::<u64>().ok());
    if room.map_or(mark == Some("systemd"), |room| room > 0) {
        return Ok(());
    }
    Err("the unit does not let it: FileDescriptorStoreMax= is missing (see packaging/cbdd.service)"
        .to_owned())
}

impl SystemdStore {
    /// The store of the service manager that listens at `notify_socket`.
    ///
    /// # Errors
    /// When the address is none.
    pub fn new(notify_socket: &OsStr) -> Result<Self> {
        let failed = |error: rustix::io::Errno| {
            Error::new(ErrorKind::System, format!("NOTIFY_SOCKET cannot be used: {error}"))
        };
        let address = match notify_socket.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddrUnix::new_abstract_name(name),
            None => SocketAddrUnix::new(notify_socket),
        };
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(failed)?;
        set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE)).map_err(failed)?;
        Ok(Self { socket, address: address.map_err(failed)? })
    }

    fn tell(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        passing::send(&self.socket, Some(&self.address), text, descriptors)
    }
}

impl DescriptorStore for SystemdStore {
    fn put(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        if !is_name(name) {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("{name:?} cannot be kept")));
        }
        self.remove(name);
        // Not watched: each request of a connection would wake whoever watches it.
        self.tell(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), descriptors).map_err(|error| {
            Error::new(ErrorKind::System, format!("systemd does not take the descriptors of {name}: {error}"))
        })
    }

    fn remove(&self, name: &str) {
        if let Err(error) = self.tell(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[]) {
            tracing::warn!("systemd does not let go of the descriptors of {name}: {error}");
        }
    }

    fn who(&self) -> &'static str {
        "systemd"
    }
}

/// What the service's last run has put there, of all that it hands over.
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

// A name of ours fits into what systemd takes.
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
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).unwrap();
        socket
    }

    #[test]
    fn what_is_put_is_sent_with_its_name_after_what_was_there_was_removed() {
        let dir = tempfile::tempdir().unwrap();
        let manager = manager(&dir.path().join("notify"));
        let store = SystemdStore::new(dir.path().join("notify").as_os_str()).unwrap();
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
    fn a_name_that_would_be_another_line_of_the_message_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _manager = manager(&dir.path().join("notify"));
        let store = SystemdStore::new(dir.path().join("notify").as_os_str()).unwrap();
        let file = tempfile::tempfile().unwrap();
        for name in ["", "a\nMAINPID=1", "a:b", "a b", &"x".repeat(NAME_BYTES_MAX + 1)] {
            assert!(store.put(name, &[file.as_fd()]).is_err(), "{name}");
        }
    }

    #[test]
    fn a_manager_that_is_gone_is_an_error_of_a_put() {
        let dir = tempfile::tempdir().unwrap();
        let store = SystemdStore::new(dir.path().join("none").as_os_str()).unwrap();
        let file = tempfile::tempfile().unwrap();
        assert!(store.put("cbd-1", &[file.as_fd()]).is_err());
    }

    #[test]
    fn a_store_without_room_is_not_offered() {
        assert!(is_offered(Some("512"), None).is_ok());
        assert!(is_offered(None, Some("systemd")).is_ok());
        for (fdstore, mark) in
            [(None, None), (Some("0"), None), (Some("0"), Some("systemd")), (Some("x"), None)]
        {
            assert!(is_offered(fdstore, mark).is_err(), "{fdstore:?} {mark:?}");
        }
    }

    #[test]
    fn descriptors_come_together_by_their_names() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let names = ["cbd-1", "stored", "cbd-2", "cbd-1", "a b"];
        let entries = entries(names.map(|name| (name.to_owned(), null())).into_iter().collect());
        let found: Vec<_> =
            entries.iter().map(|entry| (entry.name.as_str(), entry.descriptors.len())).collect();
        assert_eq!(found, [("cbd-1", 2), ("stored", 1), ("cbd-2", 1)]);
    }
}
