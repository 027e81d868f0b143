//! The side of the host that uses the device.

use super::asleep::{announce, retract, take};
use super::socket::WakeAddress;
use super::{ATTACHED, CLIENT, CONNECTION, EVENT, SERVER, failed};
use cbd_sys::event::{Poller, Signal};
use cbd_sys::words::SharedWords;
use cbd_types::{BlkdevId, Result};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;

/// A connection to the host that has the backend.
#[derive(Debug)]
struct Connection {
    page: SharedWords,
    /// The eventfd of the server.
    server: Signal,
    socket: OwnedFd,
}

/// By which a device learns that the server has stored something, and tells the server the same. Its descriptor stays the same when
/// connections begin and end.
#[derive(Debug)]
pub(crate) struct ClientWake {
    poller: Poller,
    /// The eventfd of the client.
    event: Signal,
    connection: Option<Connection>,
    /// Whether the page says that the client sleeps, unless the server has taken that.
    is_announced: bool,
}

/// What [`ClientWake::clear`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    Nothing,
    /// The server has stored something.
    Raised,
    /// The server has ended: it wakes no one any more.
    Ended,
}

impl ClientWake {
    /// Without a connection.
    ///
    /// # Errors
    /// The process cannot open another descriptor.
    pub(crate) fn new() -> Result<Self> {
        let new = || {
            let (poller, event) = (Poller::new()?, Signal::new()?);
            poller.add(event.as_raw_fd(), EVENT, false)?;
            Ok(Self { poller, event, connection: None, is_announced: false })
        };
        new().map_err(|error| failed(&error))
    }

    /// Readable when [`clear`](Self::clear) finds something.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.poller.as_raw_fd()
    }

    /// Connects, if the other host is a process of this kernel, which has to accept that.
    pub(crate) fn connect(&mut self, address: &WakeAddress, blkdev: BlkdevId, session: u64) -> Result<()> {
        self.disconnect();
        let Some(socket) = address.connect().map_err(|error| failed(&error))? else { return Ok(()) };
        let connect = || {
            let (page, server) = (SharedWords::new()?, Signal::new()?);
            let descriptors = [page.descriptor(), self.event.as_fd(), server.as_fd()];
            address.introduce(&socket, blkdev, session, &descriptors)?;
            self.poller.add(socket.as_raw_fd(), CONNECTION, false)?;
            Ok(Connection { page, server, socket })
        };
        self.connection = Some(connect().map_err(|error| failed(&error))?);
        Ok(())
    }

    /// Ends the connection: the server sees that, and looks from time to time.
    pub(crate) fn disconnect(&mut self) {
        if let Some(connection) = self.connection.take() {
            // Removed while it is open: the kernel forgets a closed descriptor only with its last duplicate.
            let _ = self.poller.remove(connection.socket.as_raw_fd());
        }
        self.is_announced = false;
    }

    /// Whether there is a connection, which the server may still have to accept.
    pub(crate) const fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Whether the server wakes this side.
    pub(crate) fn is_attached(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(|connection| connection.page.word(ATTACHED).load(Ordering::Acquire) != 0)
    }

    /// Whether the server has raised the eventfd since the last [`announce`](Self::announce), or is about to.
    pub(crate) fn is_taken(&self) -> bool {
        let connection = self.connection.as_ref().filter(|_| self.is_announced);
        connection.is_some_and(|connection| connection.page.word(CLIENT).load(Ordering::Relaxed) == 0)
    }

    /// Whether the server raises the eventfd once it stores something.
    pub(crate) fn is_announced(&self) -> bool {
        self.is_announced && !self.is_taken()
    }

    /// The threads of this side are about to sleep: one looks once more.
    pub(crate) fn announce(&mut self) {
        if let Some(connection) = &self.connection {
            self.is_announced = true;
            announce(connection.page.word(CLIENT));
        }
    }

    /// A thread of this side looks until the next [`announce`](Self::announce).
    pub(crate) fn retract(&mut self) {
        if let Some(connection) = self.connection.as_ref().filter(|_| self.is_announced) {
            self.is_announced = false;
            retract(connection.page.word(CLIENT));
        }
    }

    /// Wakes the server if it sleeps. What it is to see is stored.
    pub(crate) fn wake_server(&self) {
        if let Some(connection) = &self.connection
            && take(connection.page.word(SERVER))
        {
            connection.server.raise();
        }
    }

    /// Clears the descriptor.
    pub(crate) fn clear(&mut self) -> Found {
        let (mut is_raised, mut has_ended) = (false, false);
        let ready = |number| {
            is_raised |= number == EVENT;
            has_ended |= number == CONNECTION;
        };
        // It fails for no set that is open; then the eventfd is cleared for nothing.
        is_raised |= self.poller.wait(0, ready).is_err();
        if is_raised {
            self.event.clear();
        }
        if has_ended {
            // The server sends nothing.
            self.disconnect();
            return Found::Ended;
        }
        if is_raised { Found::Raised } else { Found::Nothing }
    }
}
