//! The routines for processors without a specific implementation.
//!
//! Invariants: bytes are copied by the compiler's copy. Stores survive the end of the process (they are in the page cache),
//! but not a power failure, since no instruction is known that writes a line back to memory. Failing memory ends the process,
//! since no handler is installed.
//!
//! Elsewhere: reporting this to the user (`open`).

use crate::routines::Outcome;

/// Copies whole lines.
///
/// # Safety
/// `lines * 64` bytes are readable at `from` and writable at `to`, and do not overlap.
pub unsafe extern "C" fn store_lines(to: *mut u8, from: *const u8, lines: usize) -> Outcome {
    // SAFETY: the caller ensures it.
    unsafe { bytes(to, from, lines * 64) }
}

/// Copies bytes.
///
/// # Safety
/// `length` bytes are readable at `from` and writable at `to`, and do not overlap.
pub unsafe extern "C" fn bytes(to: *mut u8, from: *const u8, length: usize) -> Outcome {
    // SAFETY: the caller ensures it.
    unsafe { core::ptr::copy_nonoverlapping(from, to, length) };
    Outcome::DONE
}

/// Does nothing: no write-back instruction is known.
///
/// # Safety
/// Always safe; it has the type of the unsafe ones.
pub unsafe extern "C" fn back(_at: *mut u8, _unused: *const u8, _lines: usize) -> Outcome {
    Outcome::DONE
}

/// Orders stores between processors.
#[inline]
pub fn fence() {
    core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}

/// Does nothing: no prefetch instruction is known.
#[inline]
pub fn prefetch(_at: *const u8) {}

/// Failures of memory are not handled.
pub mod guard {
    use cbd_types::Result;

    /// Replaces the handler's registration on other processors.
    #[derive(Debug)]
    pub struct Registration;

    /// Registers nothing.
    ///
    /// # Errors
    /// Never.
    pub fn register(_start: usize, _length: usize) -> Result<Registration> {
        Ok(Registration)
    }
}
