//! The types of the routines that access a region, for all processors.
//!
//! Invariants: a routine completes all of its work, or reports that memory failed and at which address.
//!
//! Elsewhere: the routines (`x86`, `portable`), their selection (`methods`).

use crate::keys::Keys;

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use crate::portable as processor;
#[cfg(target_arch = "x86_64")]
pub(crate) use crate::x86 as processor;

/// Orders the stores past the caches of this thread, and makes what was written back durable. Tests count the fences.
#[inline]
pub(crate) fn fence() {
    #[cfg(test)]
    crate::recorder::note_fence();
    processor::fence();
}

/// The result of a routine; it is returned in two registers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    failed: usize,
    value: usize,
}

impl Outcome {
    /// The routine has completed.
    #[cfg(not(target_arch = "x86_64"))]
    pub const DONE: Self = Self { failed: 0, value: 0 };

    /// The checksum, if the routine computes one; the failure if memory failed.
    #[inline]
    pub const fn result(self) -> Result<u32, Failure> {
        if self.failed == 0 { Ok(self.value as u32) } else { Err(Failure { address: self.value }) }
    }
}

/// A failure of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The address that could not be accessed; 0 if the system does not report it.
    pub address: usize,
}

/// Stores `lines` lines of 64 bytes at an aligned address. Durable after a fence, if the method's
/// `written_back` is set.
pub type StoreLines = unsafe extern "C" fn(to: *mut u8, from: *const u8, lines: usize) -> Outcome;

/// Copies `steps` times 256 bytes, at least one step, and continues the checksum `seed` (inverted neither at the beginning
/// nor at the end).
pub type ChecksumSteps =
    unsafe extern "C" fn(to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys) -> Outcome;

/// Copies bytes at any alignment through the caches and continues the checksum `seed`.
pub type SumBytes = unsafe extern "C" fn(to: *mut u8, from: *const u8, length: usize, seed: u64) -> Outcome;

/// Copies bytes at any alignment through the caches.
pub type CopyBytes = unsafe extern "C" fn(to: *mut u8, from: *const u8, length: usize) -> Outcome;

/// Writes `lines` lines back, at least one.
pub type BackLines = unsafe extern "C" fn(at: *mut u8, unused: *const u8, lines: usize) -> Outcome;
