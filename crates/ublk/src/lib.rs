//! The export through ublk: a block device of the kernel whose requests this process answers, and `/dev/cbdN` as a link
//! to it.
//!
//! Invariants: each queue of the device has one thread with its own io_uring and its own queue of the device below; the
//! kernel copies data to and from the buffer that the device below accesses, and a reply and the wait for the next
//! request are one system call. The device outlives its process: if the process is killed or ends, clients wait, and
//! the next process, which recognizes the device by its mark ([`Tag`]), receives the requests that were not answered. A
//! device without the project's mark is never changed.
//!
//! Elsewhere: the execution of requests ([`cbd_export::BlockDevice`]), and the list of devices.
//!
//! # Why no library
//! `libublk` generates its structures with bindgen, so a build of CBD would need libclang, and has its own executor, so
//! every request would pass through its tasks. This crate uses three structures of the interface for each request and a
//! dozen commands; they are declared in `abi`, and tests compare their sizes, offsets and numbers with the kernel's.
//!
//! # Why the kernel copies
//! With `UBLK_F_USER_COPY` each write needs another operation on the ring before the data can be accessed, and so
//! another system call for each request that arrives alone. A copy directly into the region would save one pass over
//! the data, but the kernel's copy neither uses the method that was calibrated for the region nor computes checksums,
//! and the client may change its page between the copy and the checksum. The engine reads the buffer that the kernel
//! fills while it copies with checksums in one pass, out of the processor's cache.

mod abi;
mod control;
mod device;
pub mod export;
mod parameters;
mod request;
mod ring;
mod service;
mod system;
mod tag;
mod thread_control;
mod worker;

pub use device::{LeftBehind, sweep};
pub use export::{DEPTH, Options, StopMode, Ublk};
pub use service::ThreadSetup;
pub use tag::Tag;

/// Whether the kernel permits creating such devices.
///
/// # Errors
/// The missing requirement, in one sentence.
pub fn probe() -> std::result::Result<(), String> {
    control::Control::open().map(drop).map_err(|error| error.line())
}
