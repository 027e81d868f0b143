//! Records the calls of the routines, for tests. A program cannot observe whether a line reaches memory, but this module
//! records whether the line was written back and fenced.
//!
//! Invariants: this module is compiled for tests only.

use crate::methods::{CopyMethod, Methods, Store, Sum};
use crate::routines::{Outcome, processor};
use std::cell::RefCell;
use std::collections::BTreeSet;

const LINE: usize = 64;

/// Lines, by their number from address 0.
#[derive(Default, Debug)]
pub(crate) struct Record {
    /// Lines that were stored through the caches and not written back since.
    pub(crate) cached: BTreeSet<usize>,
    /// Lines in flight to memory: they need only a fence.
    pub(crate) on_the_way: BTreeSet<usize>,
    pub(crate) fences: usize,
}

thread_local! {
    static RECORD: RefCell<Record> = RefCell::default();
}

/// The record of this thread since the last call.
pub(crate) fn take() -> Record {
    RECORD.take()
}

pub(crate) fn note_fence() {
    RECORD.with_borrow_mut(|record| record.fences += 1);
}

fn lines_of(at: *mut u8, length: usize) -> impl Iterator<Item = usize> {
    let start = at as usize;
    let end = if length == 0 { 0 } else { (start + length).div_ceil(LINE) };
    start / LINE..end
}

fn note_cached(at: *mut u8, length: usize) {
    RECORD.with_borrow_mut(|record| {
        for line in lines_of(at, length) {
            record.on_the_way.remove(&line);
            record.cached.insert(line);
        }
    });
}

fn note_on_the_way(at: *mut u8, length: usize) {
    RECORD.with_borrow_mut(|record| record.on_the_way.extend(lines_of(at, length)));
}

unsafe extern "C" fn store_past(to: *mut u8, from: *const u8, lines: usize) -> Outcome {
    note_on_the_way(to, lines * LINE);
    // SAFETY: the caller ensures that many bytes on both sides.
    unsafe { plain(to, from, lines * LINE) }
}

unsafe extern "C" fn store_through(to: *mut u8, from: *const u8, lines: usize) -> Outcome {
    note_cached(to, lines * LINE);
    // SAFETY: as above.
    unsafe { plain(to, from, lines * LINE) }
}

unsafe extern "C" fn bytes(to: *mut u8, from: *const u8, length: usize) -> Outcome {
    note_cached(to, length);
    // SAFETY: as above.
    unsafe { plain(to, from, length) }
}

unsafe extern "C" fn sum_steps(
    to: *mut u8,
    from: *const u8,
    steps: usize,
    _seed: u64,
    _keys: *const crate::keys::Keys,
) -> Outcome {
    note_on_the_way(to, steps * 4 * LINE);
    // SAFETY: as above.
    unsafe { plain(to, from, steps * 4 * LINE) }
}

unsafe extern "C" fn sum_bytes(to: *mut u8, from: *const u8, length: usize, _seed: u64) -> Outcome {
    note_cached(to, length);
    // SAFETY: as above.
    unsafe { plain(to, from, length) }
}

unsafe extern "C" fn back(at: *mut u8, _unused: *const u8, lines: usize) -> Outcome {
    assert!((at as usize).is_multiple_of(LINE) || lines > 0, "a write-back begins with a line");
    RECORD.with_borrow_mut(|record| {
        for line in (at as usize / LINE)..(at as usize / LINE + lines) {
            record.cached.remove(&line);
            record.on_the_way.insert(line);
        }
    });
    // SAFETY: a copy of no byte.
    unsafe { plain(at, at, 0) }
}

/// # Safety
/// `length` bytes are readable at `from` and writable at `to`.
unsafe fn plain(to: *mut u8, from: *const u8, length: usize) -> Outcome {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's.
    unsafe {
        processor::bytes_movsb(to, from, length)
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's.
    unsafe {
        processor::bytes(to, from, length)
    }
}

/// Methods that record their calls; lines are stored past the caches, or through them.
pub(crate) fn methods(past_caches: bool) -> Methods {
    let lines = if past_caches { store_past } else { store_through };
    let store = Store { method: CopyMethod::Portable, lines, written_back: past_caches };
    let sum = Sum { method: CopyMethod::Portable, steps: sum_steps, bytes: sum_bytes };
    Methods {
        stores: [store; _],
        checksums: [past_caches.then_some(sum); _],
        load: bytes,
        load_sum: None,
        bytes,
        back,
    }
}
