//! The export that provides a kernel block device where ublk is not available: a FUSE file system with a
//! single file, a loop device with direct I/O over it, and `/dev/cbdN` as a link to the loop device.
//!
//! Invariants: this process serves the file with its own threads. Each thread has its own channel to the
//! kernel, an open `/dev/fuse`, and its own queue of the device. No page cache lies between the loop device and
//! the queue. When the process dies, even by SIGKILL, the connection ends, clients see errors, and the kernel
//! releases the loop device once it is not mounted; [`sweep()`] removes the rest at the next start. If a
//! [descriptor store](session) holds the channels, clients wait instead, and the next process
//! [takes over](FuseLoop::take_over). Every wait for the device below has a timeout.
//!
//! Elsewhere: the execution of requests ([`cbd_export::BlockDevice`]), and the list of devices.
#![forbid(unsafe_code)]

mod call;
mod channel;
mod connection;
pub mod export;
mod filesystem;
pub mod flusher;
mod handshake;
mod loop_device;
mod mounts;
mod probe;
mod serve;
mod service;
pub mod session;
mod shared;
mod sweep;
mod wire;
mod worker;

pub use export::{FuseLoop, Options, StopMode, ThreadSetup};
pub use loop_device::QueueLimits;
pub use probe::probe;
pub use serve::serve_connection;
pub use session::{Session, SessionState, SessionStore};
pub use sweep::{Swept, abort_connections, sweep};
