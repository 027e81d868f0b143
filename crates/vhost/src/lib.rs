//! vhost-user-blk: a block device for virtual machines, and for programs that speak virtio, through shared memory.
//!
//! A front end (QEMU, Cloud Hypervisor, libblkio) connects to the [`Server`]'s socket and hands over the guest's memory
//! and its rings; from then on requests are transferred through shared memory only. Each ring has a thread with its own
//! request queue, which polls the ring for a short time before it sleeps ([`Options::spin_max`]).
//!
//! # What a guest may rely on
//! - Flush is offered. If a guest did not negotiate it, or turned the write cache off, each of its writes, discards and
//!   zeroings is durable and in order when it completes (FUA).
//! - The data of a write is loaded from the guest's memory once: the bytes that are stored and checksummed are those
//!   loaded then, whatever the guest does to its memory meanwhile. A request of the device owns its buffer, so the data
//!   is loaded into that buffer; a read's data is copied from it into the guest's memory after its checksums were
//!   verified.
//! - Requests in flight are recorded in memory that the front end preserves (`INFLIGHT_SHMFD`): a server that was
//!   killed and is started again at the same path executes all of them, in the order in which the guest submitted them.
//! - Requests of any length are executed, in pieces of 1 MiB.
//!
//! Invariants: every value of a guest or a front end is loaded once and checked before it is used. A ring that violates
//! the protocol is stopped with a reason, and other rings continue; a front end that violates it is disconnected.
//! Memory that disappears (a truncated file) has the same effect; the process continues.
//!
//! Not provided: packed rings.

mod back_channel;
mod chain;
mod config;
mod dirty_log;
mod inflight;
mod mapped;
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
    GUEST_MEMORY_MAX, GUEST_MEMORY_MIN, GUEST_MEMORY_TOTAL, Notice, Observer, Options, Server, ThreadSetup,
    serve_connected,
};

use cbd_types::{Error, ErrorKind};

/// An error for a violation of the protocol by a guest or its front end.
fn malformed(text: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
