//! The device as the guest sees it: feature bits and configuration space.
//!
//! Invariants: offered features are implemented, the reported limits are enforced, and a guest can change only
//! the cache mode.

use cbd_types::{Geometry, Operation};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use vhost::vhost_user::message::VhostUserVirtioFeatures;
use virtio_bindings::{virtio_blk as blk, virtio_config, virtio_ring};

/// The protocol's sector in bytes, whatever the device's sector size.
pub(crate) const SECTOR: u64 = 512;
/// Most data descriptors of a request (`seg_max`): a typical ring of 128 has two more for head and status.
const SEGMENTS_MAX: u32 = 126;
/// Most ranges of one discard or zeroing.
pub(crate) const RANGES_MAX: u32 = 32;
/// Most sectors of each range: 2 GiB.
const RANGE_SECTORS_MAX: u32 = 4 << 20;
/// Bytes of the configuration space that are defined.
const SIZE: usize = 60;
/// Offset of the cache mode in the configuration space.
pub(crate) const WRITE_CACHE: u32 = 32;

/// `VHOST_USER_F_PROTOCOL_FEATURES`, a vhost-user bit among the device's feature bits.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VHOST_F_LOG_ALL`: while it is set, stores to the guest's memory are logged. A front end sets it while it migrates the
/// guest; the guest never sees it.
pub(crate) const LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();
const VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;
pub(crate) const INDIRECT: u64 = 1 << virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
pub(crate) const EVENT_INDEX: u64 = 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;
const READ_ONLY: u64 = 1 << blk::VIRTIO_BLK_F_RO;
pub(crate) const FLUSH: u64 = 1 << blk::VIRTIO_BLK_F_FLUSH;
pub(crate) const CACHE_MODE: u64 = 1 << blk::VIRTIO_BLK_F_CONFIG_WCE;
const DISCARD: u64 = 1 << blk::VIRTIO_BLK_F_DISCARD;

/// Capabilities and size of a device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceConfig {
    /// But for the size.
    pub(crate) geometry: Geometry,
    /// The size in bytes, which can grow.
    pub(crate) size: Arc<AtomicU64>,
    pub(crate) read_only: bool,
    pub(crate) queues: u16,
}

impl DeviceConfig {
    /// The size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Feature bits that are offered.
    pub(crate) fn features(&self) -> u64 {
        let mut features =
            PROTOCOL_FEATURES | LOG_ALL | VERSION_1 | INDIRECT | EVENT_INDEX | FLUSH | CACHE_MODE;
        for bit in [
            blk::VIRTIO_BLK_F_SEG_MAX,
            blk::VIRTIO_BLK_F_BLK_SIZE,
            blk::VIRTIO_BLK_F_TOPOLOGY,
            blk::VIRTIO_BLK_F_MQ,
            blk::VIRTIO_BLK_F_WRITE_ZEROES,
        ] {
            features |= 1 << bit;
        }
        if self.geometry.discard {
            features |= DISCARD;
        }
        if self.read_only {
            features |= READ_ONLY;
        }
        features
    }

    /// `size` bytes of the configuration space at `offset`; bytes past its end are zero.
    pub(crate) fn read(&self, offset: u32, size: u32, write_cache: bool) -> Vec<u8> {
        let space = self.space(write_cache);
        (0..size as usize).map(|at| space.get(offset as usize + at).copied().unwrap_or(0)).collect()
    }

    fn space(&self, write_cache: bool) -> [u8; SIZE] {
        let geometry = &self.geometry;
        let mut space = [0; SIZE];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let physical = (geometry.physical_sector / geometry.sector).max(1);
        put(0, &(self.size() / SECTOR).to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        put(20, &geometry.sector.to_le_bytes());
        // A power of two of at most 4096 / 512, so all of these fit.
        put(24, &[physical.ilog2() as u8]);
        put(26, &(physical as u16).to_le_bytes());
        put(WRITE_CACHE as usize, &[u8::from(write_cache)]);
        put(34, &self.queues.to_le_bytes());
        put(36, &self.range_sectors().to_le_bytes());
        put(40, &RANGES_MAX.to_le_bytes());
        put(44, &(self.granularity() / SECTOR as u32).to_le_bytes());
        put(48, &self.range_sectors().to_le_bytes());
        put(52, &RANGES_MAX.to_le_bytes());
        put(56, &[u8::from(geometry.discard)]);
        space
    }

    /// Longest range of a discard or zeroing, in sectors of the protocol; a multiple of the device's discard
    /// granularity.
    pub(crate) fn range_sectors(&self) -> u32 {
        let unit = (self.granularity() / SECTOR as u32).max(1);
        (RANGE_SECTORS_MAX / unit).max(1) * unit
    }

    fn granularity(&self) -> u32 {
        self.geometry.discard_granularity.max(self.geometry.sector)
    }

    /// Whether writes of a guest that negotiated `features` must be durable when they complete.
    pub(crate) const fn writes_through(features: u64, write_cache: bool) -> bool {
        features & FLUSH == 0 || (features & CACHE_MODE != 0 && !write_cache)
    }

    /// Whether the device accepts `operation`.
    pub(crate) fn allows(&self, operation: Operation) -> bool {
        match operation {
            Operation::Read | Operation::Flush => true,
            Operation::Write | Operation::WriteZeroes => !self.read_only,
            Operation::Discard => !self.read_only && self.geometry.discard,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> DeviceConfig {
        let geometry = Geometry {
            size: 3 << 30,
            sector: 512,
            physical_sector: 4096,
            atomic_unit: 512,
            discard: true,
            discard_granularity: 65536,
            rotational: false,
            fast_zeroes: true,
        };
        DeviceConfig { geometry, size: Arc::new(geometry.size.into()), read_only: false, queues: 64 }
    }

    fn number(bytes: &[u8]) -> u64 {
        bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    #[test]
    fn the_configuration_space_describes_the_device() {
        let space = config().read(0, 60, true);
        let field = |at: usize, size: usize| number(&space[at..at + size]);
        assert_eq!(field(0, 8), (3 << 30) / 512);
        assert_eq!((field(20, 4), field(24, 1), field(26, 2)), (512, 3, 8));
        assert_eq!((field(32, 1), field(34, 2)), (1, 64));
        assert_eq!((field(36, 4), field(40, 4), field(44, 4)), (4 << 20, 32, 128));
        assert_eq!(field(56, 1), 1);
    }

    #[test]
    fn the_capacity_grows_with_the_device() {
        let config = config();
        config.size.store(5 << 30, Ordering::Relaxed);
        assert_eq!(number(&config.read(0, 8, true)), (5 << 30) / 512);
    }

    #[test]
    fn bytes_beyond_the_configuration_space_are_zero() {
        assert_eq!(config().read(56, 8, true), [1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(config().read(u32::MAX, 2, true), [0, 0]);
    }

    #[test]
    fn a_device_that_cannot_discard_does_not_offer_it() {
        let mut config = config();
        assert_ne!(config.features() & DISCARD, 0);
        config.geometry.discard = false;
        assert_eq!(config.features() & DISCARD, 0);
        assert!(!config.allows(Operation::Discard));
    }

    #[test]
    fn writes_are_durable_at_once_unless_flushes_are_negotiated() {
        assert!(DeviceConfig::writes_through(0, true));
        assert!(DeviceConfig::writes_through(CACHE_MODE, true));
        assert!(!DeviceConfig::writes_through(FLUSH, false));
        assert!(!DeviceConfig::writes_through(FLUSH | CACHE_MODE, true));
        assert!(DeviceConfig::writes_through(FLUSH | CACHE_MODE, false));
    }
}
