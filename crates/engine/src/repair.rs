//! Repairs second copies, for `cbdctrl repair`.
//!
//! Always true here: what is stored is what the good copy holds, byte for byte, so a crash leaves the damaged copy damaged or
//! whole.
//!
//! Left to others: which copy is good (`cbd-inspect`), objects in two slots ([`TwoSlots`](crate::TwoSlots)).

use alloc::vec;
use cbd_types::{MutationPoint, Pmem, Region, Result};

/// Stores the `length` bytes at `from` over those at `to`, durably.
///
/// # Errors
/// [`ErrorKind::Media`](cbd_types::ErrorKind::Media) when the good copy cannot be read.
pub fn copy_over<P: Pmem>(region: &Region<P>, from: u64, to: u64, length: usize) -> Result<()> {
    let mut good = vec![0; length];
    region.load(from, &mut good)?;
    let stored = region.store(to, &good);
    region.fence(MutationPoint::RepairCopyFence, stored);
    Ok(())
}
