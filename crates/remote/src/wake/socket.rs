//! How two hosts find each other: an abstract unix socket with the name of the region and of the host that has the backend.
//!
//! Invariants: only processes of the same user are heard, and get something. Nothing here waits, and a connection that says nothing does not
//! keep others from being accepted.

use super::server::ServerWake;
use cbd_sys::event::Signal;
use cbd_sys::passing::{self, is_of_own_user};
use cbd_sys::words::SharedWords;
use cbd_types::{BlkdevId, HostId};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Connections that are accepted and have not said what they are for, at most.
const PENDING_MAX: usize = 64;

/// The name under which a host can be reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WakeAddress {
    /// UUID of the region.
    pub region: [u8; 16],
    /// The host.
    pub host: HostId,
}

impl WakeAddress {
    fn name(&self) -> io::Result<SocketAddrUnix> {
        let text = format!("cbd-wake-{}-{}", cbd_types::uuid_text(self.region), self.host.0);
        Ok(SocketAddrUnix::new_abstract_name(text.as_bytes())?)
    }

    /// A connection; `None` if the host is no process of this kernel, or cannot accept one now.
    pub(super) fn connect(&self) -> io::Result<Option<OwnedFd>> {
        let socket = new_socket()?;
        match rustix::net::connect(&socket, &self.name()?) {
            Ok(()) if is_of_own_user(&socket) => Ok(Some(socket)),
            // Another user has taken the name.
            Ok(()) | Err(Errno::CONNREFUSED | Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Says what a connection is for.
    pub(super) fn introduce(
        &self,
        socket: &OwnedFd,
        blkdev: BlkdevId,
        session: u64,
        descriptors: &[BorrowedFd<'_>; 3],
    ) -> io::Result<()> {
        passing::send(socket, None, &format!("wake {} {session}", blkdev.0), descriptors)
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Accepts connections of other hosts.
#[derive(Debug)]
pub struct WakeListener {
    socket: OwnedFd,
    pending: Vec<OwnedFd>,
}

impl WakeListener {
    /// Listens at the address of this host.
    ///
    /// # Errors
    /// The system error; [`io::ErrorKind::AddrInUse`] if another process has it.
    pub fn bind(address: &WakeAddress) -> io::Result<Self> {
        let socket = new_socket()?;
        rustix::net::bind(&socket, &address.name()?)?;
        rustix::net::listen(&socket, PENDING_MAX as i32)?;
        Ok(Self { socket, pending: Vec::new() })
    }

    /// The connections that have said what they are for. Does not wait.
    pub fn accept(&mut self) -> Vec<ServerWake> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Those that say nothing make room for others in the end.
        for _ in 0..PENDING_MAX {
            let Ok(socket) = rustix::net::accept_with(&self.socket, flags) else { break };
            if is_of_own_user(&socket) {
                self.pending.push(socket);
            }
        }
        let excess = self.pending.len().saturating_sub(PENDING_MAX);
        self.pending.drain(..excess);
        let (mut found, mut pending) = (Vec::new(), Vec::new());
        for socket in self.pending.drain(..) {
            match passing::receive(&socket) {
                Ok(Some((text, descriptors))) => found.extend(read(&text, descriptors, socket)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => pending.push(socket),
                // It has ended, or is of another version.
                Ok(None) | Err(_) => {}
            }
        }
        self.pending = pending;
        found
    }
}

/// What a connection says; `None` for what this version does not understand.
fn read(text: &str, descriptors: Vec<OwnedFd>, socket: OwnedFd) -> Option<ServerWake> {
    let mut words = text.split(' ');
    let (Some("wake"), Some(blkdev), Some(session), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return None;
    };
    let named = (BlkdevId(blkdev.parse().ok()?), session.parse().ok()?);
    let [page, client, server]: [OwnedFd; 3] = descriptors.try_into().ok()?;
    let page = SharedWords::from_descriptor(page).ok()?;
    let signals = [Signal::from_descriptor(client).ok()?, Signal::from_descriptor(server).ok()?];
    Some(ServerWake::new(named, page, signals, socket))
}
