//! NBD, the network block device: a server that exports a device.
//!
//! The [`Server`] speaks the fixed newstyle handshake and both reply styles of the protocol
//! (`doc/proto.md` in the NetworkBlockDevice/nbd repository) on a unix socket or TCP, without TLS: a unix socket
//! is reachable by its owner only, TCP is for trusted networks. It knows wire and
//! [`Request`](cbd_types::Request), nothing else. The clients are those of others; tests and
//! benchmarks use the one in `cbd-testkit`.
//!
//! # What clients may rely on
//! - FLUSH and FUA are always offered. The protocol has no way for a client to say that it does not know them: one that
//!   finished its handshake has been told and is taken to know. Its writes are durable when they complete in any
//!   case; what a client that never flushes gives up is only that its writes reach the backing device in epochs
//!   of its own choosing.
//! - Several connections are one device: a flush on one covers the writes completed on all.
//! - Write-zeroes of a cached device is always fast, so FAST_ZERO is offered and never fails for that reason; without a
//!   cache it is not offered. Without NO_HOLE it is a discard where the device promises zeroes from one.
//! - A request is whole sectors inside the device. Beyond the end, writes answer ENOSPC and the rest EINVAL.
//! - Block status knows `base:allocation` and `cbd:state` (bit 0 cached, bit 1 dirty).
//!
//! Invariants: no byte of a client is believed unchecked, no client makes the server hold more than its bounds
//! or wait for it, and nothing here is `unsafe`.
#![forbid(unsafe_code)]

mod listen;
mod protocol;
mod server;

pub use listen::Listen;
pub use protocol::{CONTEXT_ALLOCATION, CONTEXT_STATE, DEFAULT_PORT, status_flag, transmission_flag};
pub use server::{MEMORY, MEMORY_MIN, Notice, Observer, Options, Server, ThreadSetup, serve_connected};
