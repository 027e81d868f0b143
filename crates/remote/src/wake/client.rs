//! The side of the host that uses the device.

use super::asleep::{announce, retract, take};
use super::socket::WakeAddress;
use super::{ATTACHED, CLIENT, CONNECTION, EVENT, SERVER};
use cbd_export::system_error;
use cbd_export::wake::is_closed_by_peer;
use cbd_sys::event::{Poller, Signal};
use cbd_sys::words::SharedWords;
use cbd_types::{BlkdevId, Result};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

/// A connection to the host that has the backend.
#[derive(Debug)]
struct Connection {
    page: SharedWords,
    /// The eventfd of the server.
    server: Signal,
    socket: OwnedFd,
}

/// By which a device learns that the server has stored something, and tells the server the same.
#[derive(Debug)]
pub(crate) struct ClientWake {
    /// The eventfd of the client.
    event: Signal,
    connection: Option<Connection>,
    /// The number of the last connection.
    number: u64,
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

/// What fails if the process cannot open another descriptor.
const FAILED: &str = "the descriptors by which another host is woken cannot be made";

impl ClientWake {
    /// Without a connection.
    ///
    /// # Errors
    /// The process cannot open another descriptor.
    pub(crate) fn new() -> Result<Self> {
        let event = Signal::new().map_err(|error| system_error(FAILED, &error))?;
        Ok(Self { event, connection: None, number: 0, is_announced: false })
    }

    /// Connects, if the other host is a process of this kernel, which has to accept that. Before, there is no connection.
    pub(crate) fn connect(&mut self, address: &WakeAddress, blkdev: BlkdevId, session: u64) -> Result<()> {
        let Some(socket) = address.connect().map_err(|error| system_error(FAILED, &error))? else {
            return Ok(());
        };
        let new = || Ok((SharedWords::new()?, Signal::new()?));
        let (page, server) = new().map_err(|error| system_error(FAILED, &error))?;
        let descriptors = [page.descriptor(), self.event.as_fd(), server.as_fd()];
        // The other host may have closed it again.
        if address.introduce(&socket, blkdev, session, &descriptors).is_ok() {
            self.connection = Some(Connection { page, server, socket });
            self.number += 1;
        }
        Ok(())
    }

    /// The number of the connection, if there is one. The server may still have to accept it.
    pub(crate) fn number(&self) -> Option<u64> {
        self.connection.as_ref().map(|_| self.number)
    }

    /// Whether the server has ended the connection.
    pub(crate) fn has_ended(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(|connection| is_closed_by_peer(connection.socket.as_raw_fd()))
    }

    /// Ends the connection: the server sees that, and looks from time to time. `pollers` are those that were [joined](Self::join).
    pub(crate) fn disconnect<'a>(&mut self, pollers: impl Iterator<Item = &'a Poller>) {
        if let Some(connection) = self.connection.take() {
            // Removed while it is open: the kernel forgets a closed descriptor only with its last duplicate.
            pollers.for_each(|poller| drop(poller.remove(connection.socket.as_raw_fd())));
        }
        self.is_announced = false;
    }

    /// Lets a poller report what the server does: it is readable when [`clear`](Self::clear) finds something. False if it cannot.
    pub(crate) fn join(&self, poller: &Poller) -> bool {
        let Some(connection) = &self.connection else { return false };
        // It may be there from a former connection.
        let _ = poller.remove(self.event.as_raw_fd());
        let added = poller.add(self.event.as_raw_fd(), EVENT, false);
        let added = added.and_then(|()| poller.add(connection.socket.as_raw_fd(), CONNECTION, false));
        if added.is_err() {
            self.leave(poller);
        }
        added.is_ok()
    }

    /// Lets a poller report that no more.
    pub(crate) fn leave(&self, poller: &Poller) {
        // What is not there need not be removed.
        let _ = poller.remove(self.event.as_raw_fd());
        if let Some(connection) = &self.connection {
            let _ = poller.remove(connection.socket.as_raw_fd());
        }
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

    /// Wakes the server if it sleeps; whether it does. What it is to see is stored.
    pub(crate) fn wake_server(&self) -> bool {
        let asleep = self.connection.as_ref().filter(|connection| take(connection.page.word(SERVER)));
        asleep.inspect(|connection| connection.server.raise()).is_some()
    }

    /// Clears what a poller reports that was [joined](Self::join). After [`Found::Ended`] the connection is to be ended.
    pub(crate) fn clear(&self, poller: &Poller) -> Found {
        let (mut is_raised, mut has_ended) = (false, false);
        let ready = |number| {
            is_raised |= number == EVENT;
            has_ended |= number == CONNECTION;
        };
        // It fails for no set that is open; then the eventfd is cleared for nothing.
        is_raised |= poller.wait(0, ready).is_err();
        if is_raised {
            self.event.clear();
        }
        match (has_ended, is_raised) {
            // The server sends nothing.
            (true, _) => Found::Ended,
            (false, true) => Found::Raised,
            (false, false) => Found::Nothing,
        }
    }
}
