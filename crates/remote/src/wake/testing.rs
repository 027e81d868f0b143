//! Addresses that no other test has.

use super::{WakeAddress, WakeListener};
use cbd_types::HostId;
use std::sync::atomic::{AtomicU8, Ordering};

/// An address, and what listens there.
pub(crate) fn listener() -> (WakeAddress, WakeListener) {
    static NUMBER: AtomicU8 = AtomicU8::new(0);
    let mut region = [0xff; 16];
    region[..4].copy_from_slice(&std::process::id().to_ne_bytes());
    region[4] = NUMBER.fetch_add(1, Ordering::Relaxed);
    let address = WakeAddress { region, host: HostId(0) };
    (address, WakeListener::bind(&address).expect("a socket"))
}
