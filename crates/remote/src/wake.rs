//! Wake-up of a side of a channel that sleeps, where both hosts are processes of one kernel.
//!
//! The host that uses a device connects to a socket of the host that has the backend, and passes three descriptors: a page of numbers that
//! both map, and an eventfd for each side. Each side says in the page when it is about to sleep. The other one raises its eventfd after
//! it has stored something for it ([`asleep`]). Hosts without a common kernel, or network namespace, look for what the other one has
//! stored from time to time instead.
//!
//! Invariants: what comes from the other process is a hint: it can let this one look in vain, or late. A client with requests in flight
//! looks after [`LOOK_AFTER`] in any case, a server after [`LOOK_AFTER_WHEN_IDLE`]. A side that has ended closes the connection, which wakes
//! the other one: from then on that looks from time to time again. Nothing here waits for the other process, unless that changes the
//! descriptors that it has passed: it is one of the same user, which could stop this one anyway.
//!
//! A client has several queues, and one flag. Whoever sets it looks once more, for all queues; who looks without a wait clears it first,
//! and sets it again. So at each moment with requests in flight the flag is set, or taken by the server, which raises the eventfd, or a
//! queue is about to look. Only queues with requests wait for the eventfd.
//!
//! Elsewhere: what is stored (`cbd-channel`), when hosts connect (`cbd-daemon`).

mod asleep;
mod client;
mod server;
mod socket;

pub(crate) use client::{ClientWake, Found};
pub use server::ServerWake;
pub use socket::{WakeAddress, WakeListener};

use std::time::Duration;

#[cfg(test)]
pub(crate) mod testing;

/// The longest sleep of a client that is woken, while requests are in flight.
pub(crate) const LOOK_AFTER: Duration = Duration::from_millis(100);

/// The longest sleep of a server that is woken.
pub(crate) const LOOK_AFTER_WHEN_IDLE: Duration = Duration::from_secs(1);

/// Numbers of the page: whether the server sleeps, whether the client does, and whether the server has the descriptors.
const SERVER: usize = 0;
const CLIENT: usize = 1;
const ATTACHED: usize = 2;

/// Numbers of descriptors in the set of a queue. Its own have others.
const EVENT: u64 = 0;
const CONNECTION: u64 = 1;
pub(crate) const OF_QUEUE: u64 = 2;
