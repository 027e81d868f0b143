//! A service manager for one daemon, as far as systemd's protocol of stored descriptors goes.

use super::child;
use cbd_sys::passing;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Receives the daemon's messages, and holds the descriptors that it stores.
#[derive(Debug)]
pub struct Manager {
    /// The capacity of the store that it announces, as systemd 254 does.
    capacity: Option<u32>,
    socket: PathBuf,
    stored: Arc<Mutex<BTreeMap<String, Vec<OwnedFd>>>>,
}

impl Manager {
    pub fn new(folder: &Path) -> Self {
        let path = folder.join("notify");
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        let socket = socket.expect("a socket");
        bind(&socket, &SocketAddrUnix::new(&path).expect("a path")).expect("a socket");
        let stored = Arc::new(Mutex::new(BTreeMap::new()));
        let held = Arc::clone(&stored);
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            while let Ok(Some((text, descriptors))) = passing::receive(&socket) {
                let mut lines = text.lines().filter_map(|line| line.split_once('='));
                let name = lines.clone().find(|(key, _)| *key == "FDNAME").map(|(_, name)| name.to_owned());
                let mut held = held.lock().expect("held");
                match (lines.next(), name) {
                    (Some(("FDSTORE", "1")), Some(name)) => {
                        held.entry(name).or_insert_with(Vec::new).extend(descriptors);
                    }
                    (Some(("FDSTOREREMOVE", "1")), Some(name)) => drop(held.remove(&name)),
                    _ => {}
                }
            }
        });
        Self { capacity: None, socket: path, stored }
    }

    /// A manager that announces the capacity of its store.
    pub fn with_capacity(folder: &Path, capacity: u32) -> Self {
        Self { capacity: Some(capacity), ..Self::new(folder) }
    }

    /// The names of entries, and the number of their descriptors.
    pub fn stored(&self) -> Vec<(String, usize)> {
        let stored = self.stored.lock().expect("stored");
        stored.iter().map(|(name, descriptors)| (name.clone(), descriptors.len())).collect()
    }

    /// Runs the command as a service of this manager, with its stored descriptors in another order.
    pub fn launch(&self, command: &Command) -> Command {
        let (mut names, mut descriptors) = (Vec::new(), Vec::new());
        for (name, stored) in &*self.stored.lock().expect("stored") {
            for descriptor in stored.iter().rev() {
                names.push(name.clone());
                descriptors.push(descriptor.try_clone().expect("a copy"));
            }
        }
        let mut service = Command::new("sh");
        // Only the child process knows its process ID.
        service.args(["-c", "export LISTEN_PID=$$; exec \"$@\"", "service"]);
        service.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            service.env(name, value.expect("a value"));
        }
        service.env("NOTIFY_SOCKET", &self.socket).env("CBD_DESCRIPTOR_STORE", "systemd");
        if let Some(capacity) = self.capacity {
            service.env("FDSTORE", capacity.to_string());
        }
        service.env("LISTEN_FDS", descriptors.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        child::hands_over(&mut service, &descriptors);
        service
    }
}
