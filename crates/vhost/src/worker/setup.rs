//! What a ring is told before it runs, and the order to pause.

use crate::config::DeviceConfig;
use crate::request::{self, IDENTITY};
use crate::server::Options;
use cbd_export::{BlockDevice, Event};
use cbd_types::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vm_memory::GuestAddress;

/// The order to pause, for good.
#[derive(Debug)]
pub(crate) struct Halt {
    ordered: AtomicBool,
    pub(super) event: Event,
}

impl Halt {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { ordered: AtomicBool::new(false), event: Event::new()? })
    }

    pub(crate) fn order(&self) {
        self.ordered.store(true, Ordering::Release);
        self.event.signal();
    }

    pub(super) fn is_ordered(&self) -> bool {
        self.ordered.load(Ordering::Acquire)
    }
}

/// How a front end set up a ring.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) index: usize,
    pub(crate) size: u16,
    /// Descriptor table, available ring, used ring.
    pub(crate) places: [GuestAddress; 3],
    /// Requests before this were taken already.
    pub(crate) base: u16,
    pub(crate) features: u64,
}

/// What all rings of a device have in common.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) config: DeviceConfig,
    /// Whether the guest wants a volatile cache; it can say so at any time.
    pub(crate) write_cache: Arc<AtomicBool>,
    pub(crate) identity: [u8; IDENTITY],
    pub(crate) spin_max: Duration,
    pub(crate) bytes_max: usize,
}

impl Common {
    pub(crate) fn of(device: &dyn BlockDevice, options: &Options) -> Self {
        let config = DeviceConfig {
            geometry: device.geometry(),
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
