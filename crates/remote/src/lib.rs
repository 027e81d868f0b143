//! A block device that another host of a shared region serves: both ends of its channel, with threads and descriptors.
//!
//! A [`RemoteDevice`] is what exports of the host that uses the device see. A [`Service`] is a thread of the host that has the backend:
//! it executes the requests that arrive in the channel with a queue of the device.
//!
//! Hosts that are processes of one kernel wake each other ([`WakeAddress`]). Others look for what the other one has stored: there is no
//! interrupt between hosts. Whoever waits looks again after a time that begins with some microseconds and is doubled up to [`WAIT_MAX`];
//! on the host that has the backend further, when nothing has arrived for some time, least often after [`IDLE`].
//!
//! Invariants: the queues of a device share one channel, whose client orders all its requests. A request completes once; while the
//! other host is away it waits, and continues when that is back.
//!
//! A process that is its host no more stores nothing in its area from then on: requests fail.
//!
//! Elsewhere: the protocol (`cbd-channel`), where the areas of a channel are (`cbd-engine`, `transport/channels.rs`), which devices there
//! are (`cbd-daemon`).
#![forbid(unsafe_code)]

mod device;
mod ended;
mod figures;
mod pause;
mod service;
mod shared;
mod switch;
mod wake;

pub use device::RemoteDevice;
pub use ended::EndedDevice;
pub use figures::OperationFigures;
pub use pause::{IDLE, WAIT_MAX};
pub use service::{Service, ServiceOptions};
pub use shared::{Changes, SharedDevice};
pub use switch::SwitchDevice;
pub use wake::{ServerWake, WakeAddress, WakeListener};

use cbd_channel::Areas;
use cbd_format::ChannelShape;
use cbd_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a data place of a channel.
const PLACE_BYTES: u32 = 64 << 10;
/// Requests in flight in a channel, at most.
const PLACES_MAX: u32 = 64;

/// The channel of a device, as one side uses it.
#[derive(Clone, Debug)]
pub struct ChannelUse {
    /// The areas of the channel.
    pub areas: Areas,
    /// Bytes of each area.
    pub area_bytes: u64,
    /// A random number that was never used before.
    pub session: u64,
    /// Set when this process may store in its area no more: another one is this host, or the host was cleared.
    pub is_lost: Arc<AtomicBool>,
}

impl ChannelUse {
    fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::SeqCst)
    }

    fn refuse_lost(&self) -> Result<()> {
        if !self.is_lost() {
            return Ok(());
        }
        let text = "this process is its host no more, and stores nothing for other hosts";
        Err(Error::new(ErrorKind::Stopped, text))
    }
}

/// The shape of a channel in areas of `area_bytes` bytes each.
///
/// # Errors
/// [`ErrorKind::NoSpace`] if not even one request fits into it.
pub fn shape_for(area_bytes: u64) -> Result<ChannelShape> {
    let shapes = (1..=PLACES_MAX).rev().filter_map(|places| ChannelShape::new(places, PLACE_BYTES));
    shapes.into_iter().find(|shape| shape.bytes() <= area_bytes).ok_or_else(|| {
        Error::new(ErrorKind::NoSpace, format!("an area of {area_bytes} bytes is too small for a channel"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_uses_its_area() {
        for (bytes, places) in [(1 << 20, 15), (4 << 20, 63), (16 << 20, 64), (128 << 10, 1)] {
            let shape = shape_for(bytes).expect("there is one");
            assert_eq!(shape.places(), places, "{bytes}");
            assert!(shape.bytes() <= bytes);
        }
        assert_eq!(shape_for(64 << 10).map_err(|error| error.kind()), Err(ErrorKind::NoSpace));
    }
}
