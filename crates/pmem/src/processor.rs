//! The processor's features for copying and persisting.
//!
//! Invariants: a feature is reported only if the processor has it and the system permits its use.
//!
//! Elsewhere: the choice of the fastest method (`calibrate`).

use core::fmt;

/// The instruction that writes a line back from the caches to memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// CLWB: the line may stay in the cache.
    Clwb,
    /// CLFLUSHOPT: the line leaves the cache.
    Clflushopt,
    /// CLFLUSH: the line leaves the cache; these instructions are ordered with each other.
    Clflush,
    /// No instruction is known for this processor: stores survive the end of the process, but not a power failure.
    None,
}

impl Flush {
    /// The name in status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clwb => "clwb",
            Self::Clflushopt => "clflushopt",
            Self::Clflush => "clflush",
            Self::None => "none",
        }
    }
}

impl fmt::Display for Flush {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// The features that the routines need, in groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Processor {
    /// 512-bit copies with masks.
    pub avx512: bool,
    /// 256-bit copies.
    pub avx2: bool,
    /// Checksums with 512-bit carry-less multiplication.
    pub fold512: bool,
    /// Checksums with 128-bit carry-less multiplication and the crc32 instruction.
    pub fold128: bool,
    /// Direct stores of a line.
    pub movdir64b: bool,
    /// The best write-back instruction.
    pub flush: Flush,
    /// The best write-back instruction that also evicts the line, for measurements of cold memory.
    pub evict: Flush,
}

impl Processor {
    /// Detects the features.
    #[cfg(target_arch = "x86_64")]
    #[must_use]
    pub fn detect() -> Self {
        use core::arch::x86_64::{__cpuid, __cpuid_count};
        use std::arch::is_x86_feature_detected as has;
        #[allow(unused_unsafe, reason = "these became safe functions in a later version of the library")]
        // SAFETY: every x86-64 processor has the instruction; leaf 7 is queried only where it exists.
        let (basic, extended) = unsafe {
            let highest = __cpuid(0).eax;
            (__cpuid(1), if highest >= 7 { Some(__cpuid_count(7, 0)) } else { None })
        };
        let bit = |word: u32, bit: u32| word >> bit & 1 == 1;
        let (ebx, ecx) = extended.map_or((0, 0), |leaf| (leaf.ebx, leaf.ecx));
        let evict = if bit(ebx, 23) {
            Flush::Clflushopt
        } else if bit(basic.edx, 19) {
            Flush::Clflush
        } else {
            Flush::None
        };
        let avx512 = has!("avx512f") && has!("avx512bw") && has!("bmi2");
        let fold128 = has!("pclmulqdq") && has!("sse4.2");
        Self {
            avx512,
            avx2: has!("avx2"),
            fold512: avx512 && fold128 && has!("vpclmulqdq"),
            fold128,
            movdir64b: bit(ecx, 28),
            flush: if bit(ebx, 24) { Flush::Clwb } else { evict },
            evict,
        }
    }

    /// No feature of this kind of processor is known.
    #[cfg(not(target_arch = "x86_64"))]
    #[must_use]
    pub fn detect() -> Self {
        Self {
            avx512: false,
            avx2: false,
            fold512: false,
            fold128: false,
            movdir64b: false,
            flush: Flush::None,
            evict: Flush::None,
        }
    }
}
