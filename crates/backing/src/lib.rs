//! Backing devices: access to the cached disks and files through queues of operations.
//!
//! [`BackingFile`] is a regular file or a block device, locked exclusively, accessed through io_uring with `O_DIRECT`
//! where the system allows both. [`Identity`] identifies the disk by more than its path. [`Throttle`] and
//! [`Outstanding`] are decorators of the same [`Backing`] trait, and a [`Decorator`] puts any other in front of a
//! device.
//!
//! Invariants: a submitted operation is returned once, with its buffer, whatever its result; memory that the kernel
//! accesses is owned by its queue until the kernel has finished; bytes after the last whole sector are never accessed;
//! an invalid call or a fault of the device is an error, never a panic.
//!
//! Elsewhere: the choice of operations, and that operations in flight never overlap (the engine); the reaction to an
//! error (writeback). The process sets `SIGXFSZ` and `PR_SET_IO_FLUSHER`.
#![deny(unsafe_code)]

mod beneath;
mod claims;
mod commands;
mod decorator;
mod examined;
pub mod file;
mod footprint;
mod geometry;
mod hold;
pub mod identity;
mod job;
mod lasting;
mod length;
mod mapper;
mod outstanding;
mod query;
pub mod ring;
mod sync;
mod sys;
mod sysfs;
mod threads;
pub mod throttle;
mod watch;

use cbd_types::{BackingGeometry, BackingQueue, Result};
use std::os::fd::RawFd;
use std::sync::Arc;

pub use cbd_holder::Change;
pub use commands::Offload;
pub use decorator::Decorator;
pub use examined::{Examined, check_writable, identity_of};
pub use file::{BackingFile, Direct, Engine, Growth, Info, Options};
pub use footprint::{Area, Footprint, Written};
pub use hold::{DISK_TIMEOUT, after_predecessor, refuse_file_beneath_loop_device};
pub use identity::{Identity, Kind};
pub use lasting::{Lasting, Partition};
pub use outstanding::{Ended, OfOrigin, Oldest, Outstanding};
pub use throttle::{Throttle, ThrottleParameters};
pub use watch::Watch;

/// A queue that a thread can sleep on.
pub trait PollableQueue: BackingQueue {
    /// A descriptor that is readable while [`poll`](BackingQueue::poll) can make progress: for `poll`, `epoll` or a
    /// ring. It is constant while the queue exists, never read by the caller, and cleared by `poll`. The kernel handles
    /// completions in the context of the thread that submitted, so `epoll_wait` in that thread may end with `EINTR`
    /// when one arrives.
    fn wait_descriptor(&self) -> RawFd;
}

impl<Q: PollableQueue + ?Sized> PollableQueue for Box<Q> {
    fn wait_descriptor(&self) -> RawFd {
        (**self).wait_descriptor()
    }
}

/// A backing device: its properties, and queues to it.
pub trait Backing: Send + Sync {
    /// Its geometry; constant while it is open, but for the size, which can [grow](BackingFile::grow).
    fn geometry(&self) -> BackingGeometry;

    /// Its identity.
    fn identity(&self) -> Identity;

    /// Opens a queue for one thread with at most `depth` operations in flight. The device stays locked until the last
    /// queue is dropped.
    ///
    /// # Errors
    /// The system refuses a resource of the queue (a ring, descriptors).
    fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>>;

    /// Path, access method and decorators, in one line for status.
    fn describe(&self) -> String;

    /// How verifications and comparisons are executed, and why not better, in one line for status.
    fn verify_method(&self) -> String {
        String::from("reads")
    }
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

    fn verify_method(&self) -> String {
        (**self).verify_method()
    }
}
