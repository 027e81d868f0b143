//! Repairs second copies, for `cbdctrl repair`.
//!
//! Invariants: a repair stores the bytes of the good copy, so a crash leaves the damaged copy damaged or repaired.
//!
//! Elsewhere: which copy is good (`cbd-inspect`), objects in two slots ([`TwoSlots`](crate::TwoSlots)).

use alloc::vec;
use cbd_types::{MutationPoint, Pmem, Region, Result};

/// Copies the `length` bytes at `from` to `to`, durably.
///
/// # Errors
/// [`ErrorKind::Media`](cbd_types::ErrorKind::Media) if the good copy cannot be read.
pub fn copy_over<P: Pmem>(region: &Region<P>, from: u64, to: u64, length: usize) -> Result<()> {
    let mut good = vec![0; length];
    region.load(from, &mut good)?;
    let stored = region.store(to, &good);
    region.fence(MutationPoint::RepairCopyFence, stored);
    Ok(())
}
