//! The setup of a ring before it runs, and the event that pauses it.

use crate::config::DeviceConfig;
use crate::request::{self, IDENTITY};
use crate::server::Options;
use cbd_export::{BlockDevice, Event};
use cbd_types::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vm_memory::GuestAddress;

/// The event that pauses a ring's thread; it is never cleared.
#[derive(Debug)]
pub(crate) struct PauseEvent {
    signalled: AtomicBool,
    pub(super) event: Event,
}

impl PauseEvent {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { signalled: AtomicBool::new(false), event: Event::new()? })
    }

    pub(crate) fn signal(&self) {
        self.signalled.store(true, Ordering::Release);
        self.event.signal();
    }

    pub(super) fn is_signalled(&self) -> bool {
        self.signalled.load(Ordering::Acquire)
    }
}

/// A ring's setup by the front end.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) index: usize,
    pub(crate) size: u16,
    /// Descriptor table, available ring, used ring.
    pub(crate) addresses: [GuestAddress; 3],
    /// Index of the next available request.
    pub(crate) base: u16,
    pub(crate) features: u64,
}

/// State that all rings of a device share.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) config: DeviceConfig,
    /// Whether the guest uses a volatile write cache; it can change this at any time.
    pub(crate) write_cache: Arc<AtomicBool>,
    pub(crate) identity: [u8; IDENTITY],
    pub(crate) spin_max: Duration,
    pub(crate) bytes_max: usize,
}

impl Common {
    /// `size` is the size of the device in bytes, which can grow.
    pub(crate) fn of(device: &dyn BlockDevice, options: &Options, size: Arc<AtomicU64>) -> Self {
        let config = DeviceConfig {
            geometry: device.geometry(),
            size,
            read_only: options.read_only,
            queues: options.queues_max,
        };
        Self {
            config,
            write_cache: Arc::new(AtomicBool::new(true)),
            identity: request::identity(&options.name),
            spin_max: options.spin_max,
            bytes_max: options.bytes_max,
        }
    }
}
