//! Wake-up of a side of a channel that sleeps, where both hosts are processes of one kernel.
//!
//! The host that uses a device connects to a socket of the host that has the backend, and passes three descriptors: a page of numbers that
//! both map, and an eventfd for each side. Each side says in the page when it is about to sleep. The other one raises its eventfd after
//! it has stored something for it ([`asleep`]). Hosts without a common kernel, or network namespace, look for what the other one has
//! stored from time to time instead.
//!
//! Invariants: what comes from the other process is a hint: the worst that it can do is to let this one look in vain, or late: both look
//! after [`LOOK_AFTER`] in any case. A side that has ended closes the connection, which wakes the other one: from then on that looks from
//! time to time again. Nothing here waits for the other process.
//!
//! Elsewhere: what is stored (`cbd-channel`), when hosts connect (`cbd-daemon`).

mod asleep;
mod client;
mod server;
mod socket;

pub(crate) use client::{ClientWake, Found};
pub use server::ServerWake;
pub use socket::{WakeAddress, WakeListener};

use cbd_types::{Error, ErrorKind};
use std::time::Duration;

/// The longest sleep of a side that the other one wakes while requests are in flight.
pub(crate) const LOOK_AFTER: Duration = Duration::from_millis(100);

/// The same without requests.
pub(crate) const LOOK_AFTER_WHEN_IDLE: Duration = Duration::from_secs(1);

/// Numbers of the page: whether the server sleeps, whether the client does, and whether the server has the descriptors.
const SERVER: usize = 0;
const CLIENT: usize = 1;
const ATTACHED: usize = 2;

/// Numbers of descriptors in a set.
const EVENT: u64 = 0;
const CONNECTION: u64 = 1;

fn failed(error: &std::io::Error) -> Error {
    let text = "cannot make the descriptors by which another host is woken";
    Error::new(ErrorKind::System, text).caused_by(cbd_sys::errors::copy_of(error))
}
