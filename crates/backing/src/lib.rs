//! Backing devices: the slow disks and files that are cached, as queues of operations.
//!
//! [`BackingFile`] is a regular file or a block device, held exclusively, reached through io_uring with
//! `O_DIRECT` where the system allows both. [`Identity`] says which disk it is, by more than its path.
//! [`Throttle`] is a decorator of the same [`Backing`] trait, and a [`Decorator`] puts any other in front of a device.
//!
//! Always true here: a submitted operation is given back once, with its buffer, whatever happens; memory
//! that the kernel works on is owned by its queue until the kernel is done with it; bytes behind the last
//! whole sector are never touched; what a caller or a device does wrong is an error, never a panic.
//!
//! Left to others: what is written where and when, and that operations in flight never overlap (the engine);
//! what happens after an error (its writeback). `SIGXFSZ` and `PR_SET_IO_FLUSHER` are the process's.
#![deny(unsafe_code)]

mod beneath;
mod claims;
mod decorator;
pub mod file;
mod geometry;
mod hold;
pub mod identity;
mod job;
mod length;
mod mapper;
mod patient;
pub mod ring;
mod sync;
mod sys;
mod sysfs;
pub mod throttle;
mod watch;

use cbd_types::{BackingGeometry, BackingQueue, Result};
use std::os::fd::RawFd;
use std::sync::Arc;

pub use cbd_holder::Change;
pub use decorator::Decorator;
pub use file::{BackingFile, Direct, Engine, Info, Options};
pub use hold::{DISK_TIMEOUT, after_predecessor};
pub use identity::{Identity, Kind};
pub use throttle::{Throttle, ThrottleParameters};
pub use watch::Watch;

/// A queue that a thread can sleep on.
pub trait PollableQueue: BackingQueue {
    /// A descriptor that is readable while [`poll`](BackingQueue::poll) has something to do: for `poll`, `epoll`
    /// or a ring. It is constant while the queue lives, never read by the caller, and cleared by `poll`.
    /// Completions are handled in the context of the thread that submitted, so its own `epoll_wait` may end
    /// with `EINTR` when one arrives.
    fn wait_descriptor(&self) -> RawFd;
}

impl<Q: PollableQueue + ?Sized> PollableQueue for Box<Q> {
    fn wait_descriptor(&self) -> RawFd {
        (**self).wait_descriptor()
    }
}

/// A backing device: what it is, and queues to it.
pub trait Backing: Send + Sync {
    /// What the system says about it; constant while it is open.
    fn geometry(&self) -> BackingGeometry;

    /// Which disk it is.
    fn identity(&self) -> Identity;

    /// A queue of its own for one thread; `depth` is how many operations it works on at a time. The device
    /// stays held until the last queue is gone.
    ///
    /// # Errors
    /// When the system refuses what a queue needs (a ring, descriptors).
    fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>>;

    /// Path, way of access and decorators, in one line for status.
    fn describe(&self) -> String;
}

impl<B: Backing + ?Sized> Backing for Arc<B> {
    fn geometry(&self) -> BackingGeometry {
        (**self).geometry()
    }

    fn identity(&self) -> Identity {
        (**self).identity()
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>> {
        (**self).open_queue(depth)
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}
