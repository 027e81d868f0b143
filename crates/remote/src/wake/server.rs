//! The side of the host that has the backend.

use super::asleep::{announce, retract, take};
use super::{ATTACHED, CLIENT, SERVER};
use cbd_sys::event::Signal;
use cbd_sys::words::SharedWords;
use cbd_types::BlkdevId;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;

/// A connection from a host that uses a device.
#[derive(Debug)]
pub struct ServerWake {
    blkdev: BlkdevId,
    session: u64,
    page: SharedWords,
    /// The eventfds of both sides.
    client: Signal,
    event: Signal,
    socket: OwnedFd,
}

impl ServerWake {
    /// With descriptors of the other process: the page, its eventfd, the one of this side, and the connection.
    pub(super) fn new(
        (blkdev, session): (BlkdevId, u64),
        page: SharedWords,
        [client, event]: [Signal; 2],
        socket: OwnedFd,
    ) -> Self {
        Self { blkdev, session, page, client, event, socket }
    }

    /// The blkdev.
    #[must_use]
    pub const fn blkdev(&self) -> BlkdevId {
        self.blkdev
    }

    /// The session of the client in the channel.
    pub(crate) const fn session(&self) -> u64 {
        self.session
    }

    /// From now on this side wakes the client, which looks at once: it may have missed what was stored before.
    pub(crate) fn attach(&self) {
        self.page.word(ATTACHED).store(1, Ordering::Release);
        self.client.raise();
    }

    /// The eventfd of this side, and the connection, which is readable once the other side has ended.
    pub(crate) fn descriptors(&self) -> [RawFd; 2] {
        [self.event.as_raw_fd(), self.socket.as_raw_fd()]
    }

    /// The thread of this side is about to sleep: it looks once more.
    pub(crate) fn announce(&self) {
        announce(self.page.word(SERVER));
    }

    /// The thread is awake.
    pub(crate) fn retract(&self) {
        retract(self.page.word(SERVER));
    }

    /// Clears the eventfd of this side.
    pub(crate) fn clear(&self) {
        self.event.clear();
    }

    /// Wakes the client if it sleeps; whether it does. What it is to see is stored.
    pub(crate) fn wake_client(&self) -> bool {
        let is_asleep = take(self.page.word(CLIENT));
        if is_asleep {
            self.client.raise();
        }
        is_asleep
    }
}

impl Drop for ServerWake {
    fn drop(&mut self) {
        self.page.word(ATTACHED).store(0, Ordering::Release);
    }
}
