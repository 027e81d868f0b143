//! The export through ublk: a block device of the kernel whose requests this process answers, and `/dev/cbdN` as a link to it.
//!
//! Always true here: each queue of the device has one thread with its own io_uring and its own queue of the device below; the kernel
//! copies data to and from the buffer on which the device below works, and an answer and the wait for the next request are one system
//! call. The device outlives its process: killed or ended, its clients wait, and what was not answered is asked of the next
//! process, which knows the device by its mark ([`Tag`]). A device that carries no mark of ours is never touched.
//!
//! Left to others: what a request does ([`cbd_export::BlockDevice`]), and which devices there are.
//!
//! # Why no library
//! `libublk` has its structures made by bindgen, so that whoever builds CBD would need libclang, and brings an executor of its own, so that
//! a request would pass through its tasks. What is used of the interface is three structures for each request and a dozen
//! commands; they are written down in `abi`, and tests hold their sizes, places and numbers to the kernel's.
//!
//! # Why the kernel copies
//! With `UBLK_F_USER_COPY` each write needs another operation on the ring before the data can be looked at, and so another entry into the
//! kernel for each request that comes alone; copying straight into the region would take one pass less over the data, but the kernel's copy is
//! neither the one that was calibrated for the region nor one that sums what it stores, and the client may change its page between
//! the two. The buffer that the kernel fills is the one that the engine reads while it copies and sums in one pass, out of the
//! processor's cache.

mod abi;
mod control;
mod device;
pub mod export;
mod life;
mod parameters;
mod request;
mod ring;
mod service;
mod system;
mod tag;
mod worker;

pub use device::{LeftBehind, sweep};
pub use export::{DEPTH, Options, StopMode, Ublk};
pub use service::ThreadSetup;
pub use tag::Tag;

/// Whether the kernel makes such devices for us.
///
/// # Errors
/// What is missing, in one sentence.
pub fn probe() -> std::result::Result<(), String> {
    control::Control::open().map(drop).map_err(|error| error.line())
}
