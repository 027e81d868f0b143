//! The wait set of a connection: its socket, the server's stop event, a new client that waits for the end of the
//! connection, and the queue of the device.

use cbd_export::wake::{Interest, WaitSet};
use cbd_types::Result;
use std::os::fd::RawFd;
use std::time::Duration;

/// Indices in the wait set; those of the queue's descriptors follow.
const SOCKET: usize = 0;
const STOP: usize = 1;
const AWAITED: usize = 2;
const QUEUE: usize = 3;

/// The descriptors, and which of them were ready after the last wait.
pub(super) struct Waits {
    set: WaitSet,
    queue_descriptors: usize,
}

impl Waits {
    pub(super) fn new(socket: RawFd, stop: RawFd, awaited: RawFd, queue: &[RawFd]) -> Self {
        let mut set = WaitSet::new();
        for &descriptor in [socket, stop, awaited].iter().chain(queue) {
            set.add(descriptor, Interest::Read);
        }
        Self { set, queue_descriptors: queue.len() }
    }

    /// Waits until a descriptor is ready or the timeout has passed: the socket for received bytes if `input` is set,
    /// for room if `output` is set, and for its end if `sending` is set. The stop event is not in the set after it was
    /// signalled.
    ///
    /// # Errors
    /// When the system call fails.
    pub(super) fn wait(
        &mut self,
        input: bool,
        output: bool,
        sending: bool,
        is_stopping: bool,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let socket = match (input, output) {
            (true, true) => Interest::ReadWrite,
            (true, false) => Interest::Read,
            (false, true) => Interest::Write,
            (false, false) if sending => Interest::HangUp,
            (false, false) => Interest::Nothing,
        };
        self.set.set(SOCKET, socket);
        self.set.set(STOP, if is_stopping { Interest::Nothing } else { Interest::Read });
        self.set.wait(timeout).map(drop)
    }

    /// Whether bytes can be received.
    pub(super) fn has_bytes(&self) -> bool {
        self.set.readable(SOCKET)
    }

    /// Whether the socket is closed at its other end or broken.
    pub(super) fn is_hung_up(&self) -> bool {
        self.set.failed(SOCKET)
    }

    /// Whether the server stops.
    pub(super) fn is_stopped(&self) -> bool {
        self.set.readable(STOP)
    }

    /// Whether a new client waits.
    pub(super) fn is_awaited(&self) -> bool {
        self.set.readable(AWAITED)
    }

    /// Whether the queue must be polled.
    pub(super) fn has_queue(&self) -> bool {
        (QUEUE..QUEUE + self.queue_descriptors).any(|place| self.set.readable(place))
    }

    /// Whether the wait ended by its timeout.
    pub(super) fn none_ready(&self) -> bool {
        self.set.none_ready()
    }
}
