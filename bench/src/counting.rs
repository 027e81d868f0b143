//! An allocator that can count, so that memory is measured and not estimated.
//!
//! Invariants: until [`start`] is called, the allocator counts nothing and executes no atomic read-modify-write. Speed is
//! measured before that.
//!
//! The count contains the requested bytes, without the overhead of the system's allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

static COUNTS: AtomicBool = AtomicBool::new(false);
static BYTES: AtomicI64 = AtomicI64::new(0);

/// The system's allocator with a counter.
#[derive(Debug)]
pub struct Counting;

/// Begins to count.
pub fn start() {
    COUNTS.store(true, Ordering::Relaxed);
}

/// Bytes allocated since [`start`] and not freed. Memory that was allocated before and freed since is
/// subtracted.
pub fn live_bytes() -> i64 {
    BYTES.load(Ordering::Relaxed)
}

fn count(bytes: usize, sign: i64) {
    if COUNTS.load(Ordering::Relaxed) {
        // A size never exceeds isize::MAX (guaranteed by Layout), so it fits.
        BYTES.fetch_add(sign * bytes as i64, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on unchanged to the system's allocator, which meets the contract. Counting neither allocates nor
// accesses the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's guarantees are those that this call requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: the caller's guarantees are those that this call requires.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's guarantees are those that this call requires.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(layout.size(), -1);
        count(size, 1);
        // SAFETY: the caller's guarantees are those that this call requires.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allocated_and_freed_is_counted() {
        start();
        let before = live_bytes();
        let block = Vec::<u8>::with_capacity(1 << 30);
        let held = live_bytes() - before;
        drop(std::hint::black_box(block));
        let after = live_bytes() - before;
        // Other tests allocate meanwhile: some tens of MiB.
        let of_others = 1 << 28;
        assert!((held - (1 << 30)).abs() < of_others, "{held}");
        assert!(after.abs() < of_others, "{after}");
    }
}
