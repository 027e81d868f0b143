//! Measures the fastest copy method for each size.
//!
//! Invariants: measurements overwrite only bytes that hold no data; every figure is that of a durable copy with its fence, to
//! memory that is in no cache.
//!
//! Elsewhere: reporting the figures (`mapping`).

use crate::copy;
use crate::memory::Memory;
use crate::methods::{Available, CLASS_SIZES, CopyMethod, Methods};
use crate::routines::processor::fence;
use cbd_types::CHECKSUM_BLOCK;
use cbd_types::pmem::blocks_of;
use std::time::{Duration, Instant};

/// The result of the measurement.
#[derive(Clone, Debug)]
pub(crate) struct Calibration {
    pub methods: Methods,
    /// For each class, nanoseconds of the fastest store, and of the fastest store with a checksum.
    pub figures: [Figures; CLASS_SIZES.len()],
}

/// Nanoseconds for one durable copy.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(crate) struct Figures {
    pub store_ns: f64,
    pub store_summed_ns: f64,
}

/// Copies for each size and round: together about a third of a millisecond.
const COPIES: [usize; CLASS_SIZES.len()] = [160, 128, 96, 10, 1];
/// Rounds, so that each method has several chances of an undisturbed measurement.
const ROUNDS: usize = 4;
/// After this time each remaining method is measured only once.
const ENOUGH: Duration = Duration::from_millis(25);
/// A later method must be better by this factor: noise must not decide. Also, scratch memory, which is smaller than a region
/// and nearer in the page tables, favours stores through the caches (by a quarter for a single line).
const CLEARLY: f64 = 0.8;

/// Measures all methods on the bytes of `memory` from `start`, which are overwritten. Memory that fails, or that is smaller
/// than 2 MiB, is not measured: the caller then uses the methods that are usually the fastest.
pub(crate) fn calibrate(
    available: &Available,
    memory: &Memory,
    start: u64,
    length: u64,
) -> Option<Calibration> {
    let begin = Instant::now();
    let largest = CLASS_SIZES[CLASS_SIZES.len() - 1] as u64;
    if length < 2 * largest {
        return None;
    }
    let source: Vec<u8> = (0..largest).map(|index| ((index * 31) >> 3) as u8).collect();
    let mut places = Places { state: 0x9E37_79B9_7F4A_7C15, start, length };
    let first = available.stores.first()?;
    let mut methods = available.forced(first.method).ok()?;
    let usual = methods;
    let mut figures = [Figures::default(); CLASS_SIZES.len()];
    for (class, &size) in CLASS_SIZES.iter().enumerate() {
        let from = &source[..size];
        let mut bench =
            Bench { available, memory, source: &source, usual, places: &mut places, class, begin };

        // The portable method is the write-back method with a slower copy. If it is the only one, it is already chosen.
        let candidates: Vec<_> =
            available.stores.iter().filter(|store| store.method != CopyMethod::Portable).collect();
        let fastest = bench.fastest(candidates.len(), size, |candidate, memory, at| {
            let mut methods = methods;
            methods.stores[class] = *candidates[candidate];
            copy::store(memory, &methods, at, from).is_ok()
        })?;
        if let Some((candidate, ns)) = fastest {
            methods.stores[class] = *candidates[candidate];
            figures[class].store_ns = ns;
        }

        let first = from.len().min(CHECKSUM_BLOCK as usize);
        let mut checksums = vec![0; blocks_of(from.len(), first)];
        let fastest = bench.fastest(available.checksums.len(), size, |candidate, memory, at| {
            let mut methods = methods;
            methods.checksums[class] = Some(available.checksums[candidate]);
            copy::store_summed(memory, &methods, at, from, first, &mut checksums).is_ok()
        })?;
        if let Some((candidate, ns)) = fastest {
            methods.checksums[class] = Some(available.checksums[candidate]);
            figures[class].store_summed_ns = ns;
        }
    }
    Some(Calibration { methods, figures })
}

struct Bench<'a> {
    available: &'a Available,
    memory: &'a Memory,
    source: &'a [u8],
    /// The method of copies that are not measured.
    usual: Methods,
    places: &'a mut Places,
    class: usize,
    begin: Instant,
}

impl Bench<'_> {
    /// The candidate whose copies of `size` bytes take the least time, and the nanoseconds of one copy with its fence:
    /// `Some(None)` without candidates, `None` if memory failed. The candidates take turns, so that a disturbance affects all
    /// of them equally.
    #[allow(clippy::option_option, reason = "failing memory is not the same as having no candidate")]
    fn fastest(
        &mut self,
        candidates: usize,
        size: usize,
        mut copy_to: impl FnMut(usize, &Memory, u64) -> bool,
    ) -> Option<Option<(usize, f64)>> {
        let mut best = vec![f64::INFINITY; candidates];
        let copies = COPIES[self.class];
        for round in 0..ROUNDS {
            if round > 0 && self.begin.elapsed() > ENOUGH {
                break;
            }
            let places: Vec<Vec<_>> =
                best.iter().map(|_| (0..copies).map(|_| self.places.next(size)).collect()).collect();
            self.evict(places.iter().flatten(), size)?;
            for ((candidate, best), places) in best.iter_mut().enumerate().zip(&places) {
                let begin = Instant::now();
                for &at in places {
                    if !copy_to(candidate, self.memory, at) {
                        return None;
                    }
                    fence();
                }
                *best = best.min(begin.elapsed().as_nanos() as f64 / copies as f64);
            }
        }
        Some(
            best.into_iter()
                .enumerate()
                .reduce(|fastest, next| if next.1 < fastest.1 * CLEARLY { next } else { fastest }),
        )
    }

    /// Evicts the target lines from the caches. Then it writes another range: a line that is still in flight to memory would
    /// be loaded faster than one from memory.
    fn evict<'p>(&mut self, places: impl Iterator<Item = &'p u64>, size: usize) -> Option<()> {
        for &at in places {
            copy::evict(self.memory, self.available, at, size).ok()?;
        }
        let at = self.places.next(self.source.len());
        copy::store(self.memory, &self.usual, at, self.source).ok()?;
        fence();
        Some(())
    }
}

/// Offsets all over the memory, the same in each process.
struct Places {
    state: u64,
    start: u64,
    length: u64,
}

impl Places {
    fn next(&mut self, size: usize) -> u64 {
        // xorshift64: any sequence that a prefetcher cannot predict suffices.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let size = size as u64;
        let first = self.start.next_multiple_of(4096);
        let count = (self.start + self.length - first) / size;
        first + self.state % count * size
    }
}
