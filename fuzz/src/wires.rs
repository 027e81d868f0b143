//! What the targets of the wires share: a small device in memory, and what it must hold.

use cbd_export::{BlockDevice, MemoryDevice};
use cbd_sim::CrashMemory;
use cbd_types::ByteRange;
use std::sync::Arc;

/// Bytes of the device: a few reads of all of it fit into a socket.
pub const SIZE: u64 = 64 << 10;

/// Bytes of its sectors.
pub const SECTOR: u32 = 512;

/// A device of zeroes.
///
/// # Panics
/// Never: the sector is one that the device takes.
pub fn device() -> Arc<dyn BlockDevice> {
    let device = MemoryDevice::new(Arc::new(CrashMemory::new(SIZE)), SECTOR);
    Arc::new(device.unwrap_or_else(|error| panic!("no device: {error}")))
}

/// What the device holds, by the replies that its clients got.
#[derive(Debug)]
pub struct Model(Vec<u8>);

impl Model {
    pub fn new() -> Self {
        Self(vec![0; SIZE as usize])
    }

    /// What stands in `range`; none if some of it is not on the device.
    pub fn get(&mut self, range: ByteRange) -> Option<&mut [u8]> {
        self.0.get_mut(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
    }
}
