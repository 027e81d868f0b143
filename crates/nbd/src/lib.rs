//! NBD, the network block device: a server that exports a device.
//!
//! The [`Server`] implements the fixed newstyle handshake and both reply styles of the protocol (`doc/proto.md` in the
//! NetworkBlockDevice/nbd repository) on a unix socket or TCP, without TLS: a unix socket is accessible to its owner
//! only, TCP is for trusted networks. It translates between the wire and [`Request`](cbd_types::Request), nothing else.
//! Tests and benchmarks use the client in `cbd-testkit`.
//!
//! # What clients may rely on
//! - FLUSH and FUA are always offered. The protocol does not let a client state that it does not support them, so every
//!   client is assumed to. Its writes are durable when they complete in any case; if a client never flushes, the epochs
//!   in which its writes reach the backing device are not of its choosing.
//! - Several connections access one device: a flush on one covers the writes completed on all.
//! - Write-zeroes of a cached device is always fast, so FAST_ZERO is offered and never fails for that reason; without a
//!   cache it is not offered. Without NO_HOLE it is a discard if the device promises zeroes after one.
//! - A request is whole sectors inside the device. Past the end, writes fail with ENOSPC and others with EINVAL.
//! - Block status supports `base:allocation`, `cbd:state` (bit 0 cached, bit 1 dirty) and, if the device can verify,
//!   `cbd:verify` (bit 0 checked, bit 1 damaged, bit 2 unreadable).
//!
//! Invariants: every value from a client is checked before it is used; no client makes the server exceed its bounds or
//! wait for it.
#![forbid(unsafe_code)]

mod listen;
mod protocol;
mod server;

pub use listen::Listen;
pub use protocol::{CONTEXT_ALLOCATION, CONTEXT_STATE, CONTEXT_VERIFY, status_flag, transmission_flag};
pub use server::{MEMORY, MEMORY_MIN, Notice, Observer, Options, Server, ThreadSetup, serve_connected};
