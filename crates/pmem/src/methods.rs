//! The copy methods by name, and the set of methods that a mapping uses.
//!
//! Invariants: a routine is in a list only if this processor can run it; this makes calling it safe. Each list begins with
//! the method that is usually the fastest.
//!
//! Elsewhere: measuring (`calibrate`), pointers (`memory`).

#[cfg(target_arch = "x86_64")]
use crate::processor::Flush;
use crate::processor::Processor;
use crate::routines::{BackLines, ChecksumSteps, CopyBytes, StoreLines, SumBytes};
use cbd_types::{Error, ErrorKind, Result};
use core::fmt;

/// A method of copying into a region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopyMethod {
    /// 64-byte stores past the caches.
    Avx512,
    /// 32-byte stores past the caches.
    Avx2,
    /// 16-byte stores past the caches.
    Sse2,
    /// Whole lines from memory to memory, past the caches.
    Movdir64b,
    /// Stores through the caches, each line written back at once.
    WriteBack,
    /// The platform's copy of bytes; then the lines are written back, if a write-back instruction is known.
    Portable,
}

impl CopyMethod {
    /// All methods.
    pub const ALL: [Self; 6] =
        [Self::Avx512, Self::Avx2, Self::Sse2, Self::Movdir64b, Self::WriteBack, Self::Portable];

    /// The name in status, and in the environment variable `CBD_COPY`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Sse2 => "sse2",
            Self::Movdir64b => "movdir64b",
            Self::WriteBack => "clwb",
            Self::Portable => "portable",
        }
    }

    /// The method with this [`name`](Self::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name)
    }

    /// The method that the environment variable `CBD_COPY` requests, if it is set and not empty.
    ///
    /// # Errors
    /// If its value does not name a method.
    pub fn from_environment() -> Result<Option<Self>> {
        let Some(value) = std::env::var_os("CBD_COPY").filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        match value.to_str().and_then(Self::from_name) {
            Some(method) => Ok(Some(method)),
            None => Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "CBD_COPY is {value:?}; it can be {}, or not set",
                    Self::ALL.map(Self::name).join(", ")
                ),
            )),
        }
    }
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// A method of storing lines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Store {
    pub method: CopyMethod,
    pub lines: StoreLines,
    /// Whether a fence alone makes the lines durable; otherwise they must be written back first.
    pub written_back: bool,
}

/// A method of copying with a checksum in one pass; absent if checksums are computed over a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    pub method: CopyMethod,
    pub steps: ChecksumSteps,
    pub bytes: SumBytes,
}

/// The measured sizes; the lengths of a class share a method.
pub(crate) const CLASS_SIZES: [usize; 5] = [64, 512, 4096, 64 << 10, 1 << 20];
const CLASS_LIMITS: [usize; 4] = [128, 1024, 16 << 10, 256 << 10];

/// The class of a length.
#[inline]
pub(crate) const fn class_of(length: usize) -> usize {
    let mut class = 0;
    while class < CLASS_LIMITS.len() && length > CLASS_LIMITS[class] {
        class += 1;
    }
    class
}

/// The routines of a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Methods {
    pub stores: [Store; CLASS_SIZES.len()],
    pub checksums: [Option<Sum>; CLASS_SIZES.len()],
    /// Copies out of the region.
    pub load: CopyBytes,
    /// Copies out of the region with a checksum.
    pub load_sum: Option<Sum>,
    /// Copies partial or unaligned lines into the region.
    pub bytes: CopyBytes,
    pub back: BackLines,
}

/// The routines that this processor can run.
#[derive(Clone, Debug)]
pub(crate) struct Available {
    pub processor: Processor,
    pub stores: Vec<Store>,
    pub checksums: Vec<Sum>,
    pub load: CopyBytes,
    pub load_sum: Option<Sum>,
    pub bytes: CopyBytes,
    pub back: BackLines,
    pub evict: BackLines,
}

impl Available {
    /// The set that uses `method` for everything, or the nearest method if it has no routine for an operation. Only
    /// [`CopyMethod::Portable`] computes checksums over a copy on a processor that can compute them in one pass.
    ///
    /// # Errors
    /// If this processor lacks the method.
    pub fn forced(&self, method: CopyMethod) -> Result<Methods> {
        let Some(store) = self.stores.iter().find(|store| store.method == method) else {
            let names: Vec<_> = self.stores.iter().map(|store| store.method.name()).collect();
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("this processor cannot copy with {method}; it can with {}", names.join(", ")),
            ));
        };
        let nearest = match method {
            CopyMethod::Portable => None,
            CopyMethod::Avx2 | CopyMethod::Sse2 => {
                self.checksums.iter().find(|sum| sum.method == CopyMethod::Sse2).copied()
            }
            _ => self.checksums.iter().find(|sum| sum.method == method).or(self.checksums.first()).copied(),
        };
        let (load, load_sum) = match method {
            CopyMethod::Portable => (self.bytes, None),
            _ => (self.load, self.load_sum),
        };
        Ok(Methods {
            stores: [*store; CLASS_SIZES.len()],
            checksums: [nearest; CLASS_SIZES.len()],
            load,
            load_sum,
            bytes: self.bytes,
            back: self.back,
        })
    }
}

#[cfg(target_arch = "x86_64")]
impl Available {
    /// Detects the processor's features.
    pub fn detect() -> Self {
        Self::of(Processor::detect())
    }

    /// The routines for a processor with these features, which it must have.
    fn of(processor: Processor) -> Self {
        use crate::x86;
        let back_with = |flush: Flush| -> BackLines {
            match flush {
                Flush::Clwb => x86::back_clwb,
                Flush::Clflushopt => x86::back_clflushopt,
                // Every x86-64 has CLFLUSH: it came with SSE2.
                Flush::Clflush | Flush::None => x86::back_clflush,
            }
        };
        let store = |method, lines: StoreLines| Store { method, lines, written_back: true };
        let mut stores = Vec::new();
        if processor.avx512 {
            stores.push(store(CopyMethod::Avx512, x86::store_nt_zmm));
        }
        if processor.avx2 {
            stores.push(store(CopyMethod::Avx2, x86::store_nt_ymm));
        }
        stores.push(store(CopyMethod::Sse2, x86::store_nt_xmm));
        if processor.movdir64b {
            stores.push(store(CopyMethod::Movdir64b, x86::store_movdir64b));
        }
        stores.push(store(
            CopyMethod::WriteBack,
            match processor.flush {
                Flush::Clwb if processor.avx512 => x86::store_clwb_zmm,
                Flush::Clwb => x86::store_clwb_xmm,
                Flush::Clflushopt => x86::store_clflushopt_xmm,
                Flush::Clflush | Flush::None => x86::store_clflush_xmm,
            },
        ));
        stores.push(Store { method: CopyMethod::Portable, lines: x86_portable_lines, written_back: false });

        let sum = |method, steps: ChecksumSteps| Sum { method, steps, bytes: x86::sum_bytes };
        let mut checksums = Vec::new();
        if processor.fold512 {
            checksums.push(sum(CopyMethod::Avx512, x86::sum_nt_zmm));
        }
        if processor.fold128 {
            checksums.push(sum(CopyMethod::Sse2, x86::sum_nt_xmm));
            checksums.push(sum(
                CopyMethod::WriteBack,
                match processor.flush {
                    Flush::Clwb if processor.fold512 => x86::sum_clwb_zmm,
                    Flush::Clwb => x86::sum_clwb_xmm,
                    Flush::Clflushopt => x86::sum_clflushopt_xmm,
                    Flush::Clflush | Flush::None => x86::sum_clflush_xmm,
                },
            ));
        }
        let load_sum = if processor.fold512 {
            Some(sum(CopyMethod::Avx512, x86::sum_plain_zmm))
        } else if processor.fold128 {
            Some(sum(CopyMethod::Sse2, x86::sum_plain_xmm))
        } else {
            None
        };
        Self {
            stores,
            checksums,
            load: if processor.avx512 { x86::bytes_zmm } else { x86::bytes_movsb },
            load_sum,
            bytes: x86::bytes_movsb,
            back: back_with(processor.flush),
            evict: back_with(processor.evict),
            processor,
        }
    }
}

/// Stores lines with the platform's copy of bytes.
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn x86_portable_lines(
    to: *mut u8,
    from: *const u8,
    lines: usize,
) -> crate::routines::Outcome {
    // SAFETY: the caller ensures that many bytes on both sides.
    unsafe { crate::x86::bytes_movsb(to, from, lines * 64) }
}

#[cfg(not(target_arch = "x86_64"))]
impl Available {
    /// No feature of this kind of processor is known.
    pub fn detect() -> Self {
        use crate::portable;
        let store = Store { method: CopyMethod::Portable, lines: portable::store_lines, written_back: false };
        Self {
            processor: Processor::detect(),
            stores: vec![store],
            checksums: Vec::new(),
            load: portable::bytes,
            load_sum: None,
            bytes: portable::bytes,
            back: portable::back,
            evict: portable::back,
        }
    }
}

#[cfg(test)]
impl Available {
    /// The routines of this processor, and those of older ones.
    pub fn detect_all() -> Vec<Self> {
        let mut all = vec![Self::detect()];
        #[cfg(target_arch = "x86_64")]
        {
            let newest = Processor::detect();
            let without_wide = Processor { avx512: false, fold512: false, movdir64b: false, ..newest };
            let oldest = Processor { avx2: false, fold128: false, ..without_wide };
            for processor in [Processor { fold512: false, ..newest }, without_wide, oldest] {
                all.extend([newest.flush, newest.evict, Flush::Clflush].map(|flush| {
                    // An instruction that evicts a line also writes it back.
                    Self::of(Processor { flush, evict: Flush::Clflush, ..processor })
                }));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_measured_size_is_in_its_own_class() {
        for (class, &size) in CLASS_SIZES.iter().enumerate() {
            assert_eq!(class_of(size), class);
        }
    }

    #[test]
    fn a_method_is_found_by_its_name() {
        for method in CopyMethod::ALL {
            assert_eq!(CopyMethod::from_name(method.name()), Some(method));
        }
        assert_eq!(CopyMethod::from_name("fast"), None);
    }

    #[test]
    fn a_method_that_the_processor_lacks_is_refused_with_a_list_of_the_others() {
        let mut available = Available::detect();
        available.stores.retain(|store| store.method != CopyMethod::Avx512);
        let error = available.forced(CopyMethod::Avx512).expect_err("it is not in the list");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.line().contains("portable"), "{error}");
    }
}
