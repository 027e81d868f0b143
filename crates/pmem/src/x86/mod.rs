//! The routines of this processor family, as Rust declarations.
//!
//! Invariants: the declarations agree with `guarded.s`, where every routine is described.
//!
//! Elsewhere: which routine may be called on this processor (`methods`), bounds (`memory`).

pub mod guard;

use crate::keys::Keys;
use crate::routines::Outcome;

core::arch::global_asm!(include_str!("guarded.s"), options(raw));

macro_rules! routines {
    ($($name:ident = $symbol:literal ($($argument:ident: $kind:ty),*);)*) => {
        unsafe extern "C" {
            $(#[link_name = $symbol] pub fn $name($($argument: $kind),*) -> Outcome;)*
        }
    };
}

routines! {
    store_nt_zmm = "cbd_pmem_store_nt_zmm" (to: *mut u8, from: *const u8, lines: usize);
    store_nt_ymm = "cbd_pmem_store_nt_ymm" (to: *mut u8, from: *const u8, lines: usize);
    store_nt_xmm = "cbd_pmem_store_nt_xmm" (to: *mut u8, from: *const u8, lines: usize);
    store_clwb_zmm = "cbd_pmem_store_clwb_zmm" (to: *mut u8, from: *const u8, lines: usize);
    store_clwb_xmm = "cbd_pmem_store_clwb_xmm" (to: *mut u8, from: *const u8, lines: usize);
    store_clflushopt_xmm = "cbd_pmem_store_clflushopt_xmm" (to: *mut u8, from: *const u8, lines: usize);
    store_clflush_xmm = "cbd_pmem_store_clflush_xmm" (to: *mut u8, from: *const u8, lines: usize);
    store_movdir64b = "cbd_pmem_store_movdir64b" (to: *mut u8, from: *const u8, lines: usize);
    sum_nt_zmm = "cbd_pmem_sum_nt_zmm"
        (to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys);
    sum_clwb_zmm = "cbd_pmem_sum_clwb_zmm"
        (to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys);
    sum_plain_zmm = "cbd_pmem_sum_plain_zmm"
        (to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys);
    sum_nt_xmm = "cbd_pmem_sum_nt_xmm"
        (to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys);
    sum_clwb_xmm = "cbd_pmem_sum_clwb_xmm"
        (to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys);
    sum_clflushopt_xmm = "cbd_pmem_sum_clflushopt_xmm"
        (to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys);
    sum_clflush_xmm = "cbd_pmem_sum_clflush_xmm"
        (to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys);
    sum_plain_xmm = "cbd_pmem_sum_plain_xmm"
        (to: *mut u8, from: *const u8, steps: usize, seed: u64, keys: *const Keys);
    bytes_zmm = "cbd_pmem_bytes_zmm" (to: *mut u8, from: *const u8, length: usize);
    bytes_movsb = "cbd_pmem_bytes_movsb" (to: *mut u8, from: *const u8, length: usize);
    sum_bytes = "cbd_pmem_sum_bytes" (to: *mut u8, from: *const u8, length: usize, seed: u64);
    back_clwb = "cbd_pmem_back_clwb" (at: *mut u8, unused: *const u8, lines: usize);
    back_clflushopt = "cbd_pmem_back_clflushopt" (at: *mut u8, unused: *const u8, lines: usize);
    back_clflush = "cbd_pmem_back_clflush" (at: *mut u8, unused: *const u8, lines: usize);
}

/// When this returns, everything that the calling thread stored past the caches or wrote back is in the persistence domain.
#[inline]
pub fn fence() {
    // SAFETY: the instruction is part of every x86-64 and touches neither memory nor registers.
    // It is not marked `nomem`, so the compiler moves no access across it.
    unsafe { core::arch::asm!("sfence", options(nostack, preserves_flags)) };
}

/// Hints that the line at `at` will be used soon.
#[inline]
pub fn prefetch(at: *const u8) {
    // SAFETY: a prefetch does not fault at any address.
    unsafe { core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast()) };
}

#[cfg(test)]
mod code;
