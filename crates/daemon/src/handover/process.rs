//! The store process: a small process that holds descriptors for successive daemons where no service manager does.
//!
//! Invariants: it holds descriptors until the daemon removes them or until their FUSE connection has ended. It serves
//! one daemon at a time, which must run as its own user, while the connection to that daemon is open. It exits when it
//! holds no descriptors and no daemon is connected. It never reads from the descriptors, and it does not poll them
//! while a daemon is connected: each request of a FUSE connection wakes every thread that polls it.
//!
//! Elsewhere: what the descriptors are ([`super::sessions`]).

use super::{Entry, is_name};
use cbd_sys::passing::{self, Message, is_of_own_user};
use cbd_types::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketFlags;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// How often the process checks whether the connections that it holds have ended, while no daemon is connected.
const CHECK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Runs a store process on the listening socket that is its standard input, until it holds nothing and no daemon is
/// connected.
///
/// # Errors
/// When standard input is not a listening socket.
pub fn run() -> Result<()> {
    // A user who runs it by hand gets an error: a standard input that is always ready would make the loop spin.
    if !matches!(rustix::net::sockopt::socket_acceptconn(rustix::stdio::stdin()), Ok(true)) {
        let text = "its standard input is no socket that listens: the daemon starts this command; it is not meant to be run by hand";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    // The end of a terminal's session must not end this process. `setsid` fails only if the process leads a session
    // already.
    let _ = rustix::process::setsid();
    let mut process = StoreProcess { held: BTreeMap::new(), daemon: None };
    let listener = rustix::stdio::stdin();
    while process.run_once(listener).map_err(|error| {
        Error::new(ErrorKind::System, "the store process's standard input is not the socket it needs")
            .caused_by(error)
    })? {}
    Ok(())
}

struct StoreProcess {
    held: BTreeMap<String, Vec<OwnedFd>>,
    daemon: Option<OwnedFd>,
}

impl StoreProcess {
    /// Waits for one event and handles it; false if the process must exit.
    fn run_once(&mut self, listener: BorrowedFd<'_>) -> io::Result<bool> {
        let (connects, has_message) = self.wait(listener)?;
        if has_message {
            self.handle_message();
        }
        if connects {
            self.accept_daemon(listener);
        } else if self.daemon.is_none() {
            self.held.retain(|_, descriptors| !descriptors.iter().any(has_ended));
            return Ok(has_message || !self.held.is_empty());
        }
        Ok(true)
    }

    /// Waits; returns whether a daemon connects, and whether the connected one has sent a message.
    fn wait(&self, listener: BorrowedFd<'_>) -> io::Result<(bool, bool)> {
        let mut waited = vec![PollFd::from_borrowed_fd(listener, PollFlags::IN)];
        waited.extend(self.daemon.iter().map(|daemon| PollFd::new(daemon, PollFlags::IN)));
        let timeout = if self.daemon.is_some() { None } else { Some(&CHECK_INTERVAL) };
        match poll(&mut waited, timeout) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok((false, true)),
            Err(error) => return Err(error.into()),
        }
        let is_ready = |at: usize| waited.get(at).is_some_and(|one| !one.revents().is_empty());
        if is_ready(0) && waited.first().is_some_and(|one| !one.revents().contains(PollFlags::IN)) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        Ok((is_ready(0), is_ready(1)))
    }

    fn accept_daemon(&mut self, listener: BorrowedFd<'_>) {
        let Ok(daemon) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else { return };
        if !is_of_own_user(&daemon) {
            return;
        }
        match self.daemon {
            Some(_) => {
                let _ = passing::send(&daemon, None, "busy", &[]);
            }
            None if passing::send(&daemon, None, "welcome", &[]).is_ok() => self.daemon = Some(daemon),
            None => {}
        }
    }

    /// Executes a command of the daemon. A daemon that has disconnected or sent an invalid message is dropped.
    fn handle_message(&mut self) {
        let Some(daemon) = &self.daemon else { return };
        let received = passing::receive(daemon).ok().flatten();
        let executed = received.and_then(|message| execute(&mut self.held, daemon, message));
        if executed.is_none() {
            self.daemon = None;
        }
    }
}

fn execute(held: &mut BTreeMap<String, Vec<OwnedFd>>, daemon: &OwnedFd, message: Message) -> Option<()> {
    let (text, descriptors) = message;
    match text.split_once(' ') {
        Some(("put", name)) if is_name(name) && !descriptors.is_empty() => {
            held.insert(name.to_owned(), descriptors);
        }
        Some(("remove", name)) => drop(held.remove(name)),
        None if text == "list" => {
            for (name, descriptors) in held.iter() {
                let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                passing::send(daemon, None, &format!("entry {name}"), &descriptors).ok()?;
            }
        }
        _ => return None,
    }
    passing::send(daemon, None, "done", &[]).ok()
}

/// Whether the FUSE connection of a descriptor has ended, as by an unmount or an abort.
fn has_ended(descriptor: &OwnedFd) -> bool {
    conditions_of(descriptor).contains(PollFlags::ERR)
}

/// The conditions that the kernel always reports for a descriptor: an error, a disconnected peer, a closed descriptor.
pub fn conditions_of(descriptor: &OwnedFd) -> PollFlags {
    let mut entry = [PollFd::new(descriptor, PollFlags::empty())];
    match poll(&mut entry, Some(&Timespec::default())) {
        Ok(_) => entry[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}

/// One entry of a list, or none at its end.
pub fn listed(message: Message) -> Option<Option<Entry>> {
    let (text, descriptors) = message;
    match text.split_once(' ') {
        Some(("entry", name)) if is_name(name) => Some(Some(Entry { name: name.to_owned(), descriptors })),
        None if text == "done" => Some(None),
        _ => None,
    }
}
