//! Code that all exports share: the device that an export serves, the queues that it submits requests to, events to wait on, the
//! socket for its clients, and for block devices of the kernel the link to the device and the processes that use it.
//!
//! An export translates between its protocol and [`Request`]; [`BlockDevice`] executes requests. So the same export serves a
//! cached device, an uncached one and plain memory, and a comparison between these measures only the difference of the devices.
//!
//! Invariants: a [`RequestQueue`] belongs to one thread, which completes a request inside [`RequestQueue::submit`] or parks it
//! and continues; no call of a queue blocks.
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

use cbd_types::{
    ByteRange, Completion, Error, ErrorKind, Geometry, Request, Result, TakeBack, Verified, Verify,
};
use std::os::fd::RawFd;
use std::thread::JoinHandle;

/// Starts a thread of an export.
///
/// # Errors
/// [`ErrorKind::System`] when the system cannot create another thread.
pub fn start_thread<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map_err(|error| Error::new(ErrorKind::System, "cannot start a thread").caused_by(error))
}

/// A block device that exports serve.
pub trait BlockDevice: Send + Sync + 'static {
    /// The geometry of the device; constant while it exists, but for the size, which can grow.
    fn geometry(&self) -> Geometry;

    /// Opens a queue for the calling thread.
    ///
    /// # Errors
    /// When the system refuses a resource of the queue (a ring, a descriptor).
    fn open_queue(&self) -> Result<Box<dyn RequestQueue>>;

    /// Whether its queues [verify](RequestQueue::verify) ranges.
    fn verifies(&self) -> bool {
        false
    }

    /// The extents of `range`, in order and without holes, for block status. The default is one extent of data.
    ///
    /// # Errors
    /// The state cannot be read.
    fn extents(&self, range: ByteRange) -> Result<Vec<Extent>> {
        Ok(vec![Extent { range, state: ExtentState::default() }])
    }
}

/// A range of bytes in one state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The range.
    pub range: ByteRange,
    /// The state of the range.
    pub state: ExtentState,
}

/// State of a range of bytes; all false means "data, on the backing device".
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ExtentState {
    /// Reads as zeroes and takes no space.
    pub hole: bool,
    /// The newest data of the range is in the cache.
    pub cached: bool,
    /// The newest data of the range is not on the backing device yet.
    pub dirty: bool,
}

/// One thread's queue to a device.
pub trait RequestQueue: Send {
    /// Submits a request. If it completes at once, its completion is in `done` when this returns; otherwise it is
    /// parked, and a later [`poll`](Self::poll) completes it.
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>);

    /// As [`submit`](Self::submit), for a request after which the client has already submitted more. The queue may hold the
    /// request back until [`unplug`](Self::unplug), to execute it in a batch with those.
    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.submit(request, done);
    }

    /// Executes the requests that were held back.
    fn unplug(&mut self, done: &mut Vec<Completion>) {
        let _ = done;
    }

    /// Makes progress with parked requests and adds completed ones to `done`; does not block.
    fn poll(&mut self, done: &mut Vec<Completion>);

    /// Number of requests submitted and not completed.
    fn parked(&self) -> usize;

    /// Number of requests submitted and not completed that can still change the device.
    fn changes(&self) -> usize {
        self.parked()
    }

    /// Submits the verification of a range as request `id`; the identifiers are apart from those of [`submit`](Self::submit).
    /// It yields to requests and continues in [`poll`](Self::poll); [`take_verified`](Self::take_verified) returns its result.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the device [cannot](BlockDevice::verifies) verify; then there is no other result.
    fn verify(&mut self, id: u64, verify: Verify) -> Result<()> {
        let _ = id;
        Err(Error::new(ErrorKind::Unsupported, format!("this device cannot verify {}", verify.range)))
    }

    /// The verifications that have completed since the last call, with their identifiers. [`give_up`](Self::give_up) cancels
    /// those in progress: they complete with an error at once.
    fn take_verified(&mut self) -> Vec<(u64, Result<Verified>)> {
        Vec::new()
    }

    /// Completes with an error each request that has not begun, or that waits for space between two of its pieces: its client has
    /// disconnected, so the request need not be executed any more. [`poll`](Self::poll) still completes the operations that were
    /// submitted to the backing device.
    fn give_up(&mut self, done: &mut Vec<Completion>) {
        let _ = done;
    }

    /// Moves to `returned` requests that wait for space or for what must precede them, as if they had not been submitted: the client
    /// submits them again, or has given them up.
    fn take_back(&mut self, which: TakeBack<'_>, returned: &mut Vec<Request>) {
        let _ = (which, returned);
    }

    /// Frees memory that is kept for later requests. Called when the queue is idle.
    fn trim(&mut self) {}

    /// Descriptors, at least one of which is readable when [`poll`](Self::poll) can make progress. Constant while the
    /// queue exists; `poll` clears the readiness.
    fn wait_descriptors(&self) -> Vec<RawFd>;
}
