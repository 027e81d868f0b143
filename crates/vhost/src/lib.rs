//! vhost-user-blk: a block device for virtual machines, and for programs that speak virtio, through shared memory.
//!
//! A front end (QEMU, Cloud Hypervisor, libblkio) connects to the [`Server`]'s socket, hands over the guest's memory and
//! its rings, and from then on requests go through memory alone: each ring has a thread with a request queue of its
//! own, which looks for requests for a short while before it sleeps ([`Options::spin_max`]).
//!
//! # What a guest may rely on
//! - Flush is offered. A guest that did not negotiate it, or that turned the write cache off, has every write, discard and
//!   zeroing durable and in order when it completes (FUA).
//! - A write is loaded from the guest's memory once: what is stored, and what is summed, is what was loaded then, whatever
//!   the guest does to its memory meanwhile. The device's requests own their buffers, so that load goes into one; a read's
//!   data goes from one into the guest's memory once it is verified.
//! - Requests in flight are noted in memory that the front end keeps (`INFLIGHT_SHMFD`): a server that was killed and is
//!   started again at the same path goes on with all of them, in the order in which they came.
//! - A request of any length is served, in pieces of 1 MiB.
//!
//! Always true here: nothing that a guest or a front end gives is believed unchecked, and it is looked at once. A ring that
//! breaks the rules is stopped, with a reason, and others go on; a front end that does is let go. Memory that is taken
//! away under us (a file cut short) does the same; the process goes on.
//!
//! Left to others: what requests do (the device), live migration with dirty logging, and packed rings, which are not offered.

mod chain;
mod config;
mod inflight;
mod memory;
mod messages;
mod request;
mod ring;
mod server;
mod session;
mod spin;
mod system;
mod threads;
mod worker;

pub use ring::{GuestPiece, GuestRing, serve_ring};
pub use server::{
    GUEST_MEMORY_MAX, GUEST_MEMORY_TOTAL, Notice, Observer, Options, Server, ThreadSetup, serve_connected,
};

use cbd_types::{Error, ErrorKind};

/// What a guest or its front end did against the rules.
fn malformed(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
