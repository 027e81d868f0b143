//! What every export shares: the device it serves, the queues it puts requests into, something to wait on, the
//! socket where its clients come, and for devices of the kernel the link to one and who uses it.
//!
//! An export knows its wire and [`Request`]; what a request does is behind [`BlockDevice`]. So the same
//! export serves a cached device, an uncached one and plain memory, and a comparison between them compares
//! nothing else.
//!
//! Always true here: a [`RequestQueue`] belongs to one thread, which runs a request to completion inside
//! [`RequestQueue::submit`] or parks it and goes on; nothing waits inside a queue.
#![forbid(unsafe_code)]

pub mod budget;
pub mod buffers;
pub mod clients;
pub mod descriptors;
mod errors;
pub mod folders;
pub mod link;
pub mod memory;
pub mod mounts;
pub mod socket;
pub mod users;
pub mod wake;

pub use clients::{Client, Clients};
pub use errors::system_error;
pub use memory::MemoryDevice;
pub use wake::{Event, Waker, wait_any};

use cbd_types::{ByteRange, Completion, Error, ErrorKind, Geometry, Request, Result};
use std::os::fd::RawFd;
use std::thread::JoinHandle;

/// Starts a thread of an export.
///
/// # Errors
/// [`ErrorKind::System`] when there can be no more threads.
pub fn start_thread<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map_err(|error| Error::new(ErrorKind::System, format!("cannot start a thread: {error}")))
}

/// A block device that exports serve.
pub trait BlockDevice: Send + Sync + 'static {
    /// What the device is; constant while it lives.
    fn geometry(&self) -> Geometry;

    /// A queue for the calling thread.
    ///
    /// # Errors
    /// When the system refuses what a queue needs (a ring, a descriptor).
    fn open_queue(&self) -> Result<Box<dyn RequestQueue>>;

    /// What is known of `range`, in order and without holes, for block status. A device that knows nothing says
    /// that all of it is data.
    ///
    /// # Errors
    /// When what is asked cannot be read.
    fn extents(&self, range: ByteRange) -> Result<Vec<Extent>> {
        Ok(vec![Extent { range, state: ExtentState::default() }])
    }
}

/// A run of bytes in one state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Which bytes.
    pub range: ByteRange,
    /// What is known of them.
    pub state: ExtentState,
}

/// What is known of a run of bytes; all false means "data, on the backing device".
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ExtentState {
    /// Reads as zeroes and takes no space.
    pub hole: bool,
    /// Its newest bytes are in the cache.
    pub cached: bool,
    /// They are not on the backing device yet.
    pub dirty: bool,
}

/// One thread's queue to a device.
pub trait RequestQueue: Send {
    /// Takes a request. What can be done at once is in `done` when this returns; the rest is parked, and a
    /// later [`poll`](Self::poll) completes it.
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>);

    /// As [`submit`](Self::submit) for a request behind which the client has submitted more; until [`unplug`](Self::unplug) it may
    /// be kept back, to be done together with those.
    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.submit(request, done);
    }

    /// No more come for now: takes what was kept back.
    fn unplug(&mut self, done: &mut Vec<Completion>) {
        let _ = done;
    }

    /// Moves parked requests forward and adds to `done` what has completed; does not wait.
    fn poll(&mut self, done: &mut Vec<Completion>);

    /// Number of requests taken and not completed.
    fn parked(&self) -> usize;

    /// Number of requests taken and not completed that can still change the device.
    fn changes(&self) -> usize {
        self.parked()
    }

    /// Completes with an error each request that need not happen any more because it has not begun, or waits for space between two of its
    /// pieces: its client is gone. What has begun and cannot be taken back is completed by [`poll`](Self::poll).
    fn give_up(&mut self, done: &mut Vec<Completion>) {
        let _ = done;
    }

    /// Gives up memory that is kept for the next requests: none come for a while.
    fn trim(&mut self) {}

    /// Descriptors one of which is readable when [`poll`](Self::poll) has something to do. Constant while the
    /// queue lives; readiness is cleared by `poll`.
    fn wait_descriptors(&self) -> Vec<RawFd>;
}
