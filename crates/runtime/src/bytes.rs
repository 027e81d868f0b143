//! Access to the bytes of a region, whatever its storage.

use cbd_pmem::Reader;
use cbd_types::{BootId, MediaError, Pmem, Region};

/// Read-only bytes.
pub trait Bytes: Send + Sync {
    /// The number of bytes.
    fn len(&self) -> u64;

    /// Whether the length is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The boot identifier of the machine on which the bytes are read, if it matters.
    fn boot(&self) -> BootId {
        BootId::UNKNOWN
    }

    /// Copies `into.len()` bytes from `at`.
    ///
    /// # Errors
    /// The offset at which the memory cannot be read, or which is outside.
    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError>;

    /// As [`load`](Self::load), with the CRC32C of the copied bytes.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        self.load(at, into)?;
        Ok(cbd_format::crc32c(into))
    }
}

impl Bytes for Reader {
    fn len(&self) -> u64 {
        Self::len(self)
    }

    fn boot(&self) -> BootId {
        Self::boot(self)
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        Self::load(self, at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        Self::load_summed(self, at, into)
    }
}

/// A region that a tool holds for a repair.
impl<P: Pmem> Bytes for Region<P> {
    fn len(&self) -> u64 {
        self.size()
    }

    fn boot(&self) -> BootId {
        self.memory().boot()
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.memory().load(at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        self.memory().load_summed(at, into)
    }
}

/// An image in memory.
impl Bytes for Vec<u8> {
    fn len(&self) -> u64 {
        self.as_slice().len() as u64
    }

    // This process has read the image.
    fn boot(&self) -> BootId {
        cbd_pmem::this_boot()
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        let from = usize::try_from(at).ok().and_then(|start| self.get(start..start.checked_add(into.len())?));
        into.copy_from_slice(from.ok_or(MediaError { at })?);
        Ok(())
    }
}
