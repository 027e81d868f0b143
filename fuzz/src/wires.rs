//! The parts that the protocol targets share: a small device in memory, and a model of its content.

use cbd_export::{BlockDevice, MemoryDevice};
use cbd_sim::CrashMemory;
use cbd_types::ByteRange;
use std::sync::Arc;

/// Size in bytes of the device: a few reads of the whole device fit into a socket.
pub const SIZE: u64 = 64 << 10;

/// Bytes of a sector.
pub const SECTOR: u32 = 512;

/// Creates a device of zeroes.
///
/// # Panics
/// Never: the device accepts the sector size.
pub fn device() -> Arc<dyn BlockDevice> {
    let device = MemoryDevice::new(Arc::new(CrashMemory::new(SIZE)), SECTOR);
    Arc::new(device.unwrap_or_else(|error| panic!("no device: {error}")))
}

/// The content of the device, derived from the replies to its clients.
#[derive(Debug)]
pub struct Model(Vec<u8>);

impl Model {
    pub fn new() -> Self {
        Self(vec![0; SIZE as usize])
    }

    /// The content of `range`; `None` if a part of it is outside the device.
    pub fn get(&mut self, range: ByteRange) -> Option<&mut [u8]> {
        self.0.get_mut(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
    }
}
