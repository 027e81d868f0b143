//! How data that another host is to load is stored: through the caches, or past them.
//!
//! If the processor that loads the data shares a cache with the one that stores it, the caches are the fastest way. If not, each line that
//! is stored through the caches waits until the other processor has dropped its copy; past the caches nothing waits for that, and the
//! other processor loads from memory. Which of both it is depends on the processors that the two threads run on at the moment, so each
//! thread measures both now and then.
//!
//! Invariant: what a thread stores afterwards is visible to others later, whatever the way.
//!
//! Elsewhere: the copies (`copy`), memory that is not coherent between its hosts (`mapping`).

use crate::copy::{self, Fault};
use crate::memory::Memory;
use crate::methods::{CopyMethod, Methods, class_of};
use std::cell::Cell;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

/// Shorter data is stored through the caches.
const MEASURED_MIN: usize = 4096;
/// Stores of a thread before its first measurement, when the memory has been in use for some time.
const FIRST_AFTER: u32 = 256;
/// Stores between two measurements: those of the slower way cost less than 1 % of the time.
const NEXT_AFTER: u32 = 4096;
/// Measured stores of each way. The fastest one counts: others may have been interrupted.
const TRIALS: u32 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    ThroughCaches,
    PastCaches,
}

/// What a thread knows about the processors that load what it stores.
#[derive(Clone, Copy, Debug)]
struct Choice {
    way: Way,
    /// Stores until the next measurement, and measured stores that remain.
    unmeasured: u32,
    measured: u32,
    /// Nanoseconds of the fastest measured store of [`MEASURED_MIN`] bytes through the caches, and past them.
    best: [u64; 2],
}

impl Choice {
    const NEW: Self =
        Self { way: Way::ThroughCaches, unmeasured: FIRST_AFTER, measured: 2 * TRIALS, best: [u64::MAX; 2] };

    /// The way of the next store, and whether its duration is to be [noted](Self::note).
    const fn next(&mut self) -> (Way, bool) {
        if self.unmeasured > 0 {
            self.unmeasured -= 1;
            return (self.way, false);
        }
        self.measured -= 1;
        (if self.measured.is_multiple_of(2) { Way::PastCaches } else { Way::ThroughCaches }, true)
    }

    fn note(&mut self, way: Way, length: usize, ns: u64) {
        let best = &mut self.best[way as usize];
        *best = (*best).min(ns * MEASURED_MIN as u64 / length as u64);
        if self.measured == 0 {
            let [through, past] = self.best;
            // Stores past the caches must be clearly faster: they make the loads of the other side slower.
            let way = if past < through / 3 * 2 { Way::PastCaches } else { Way::ThroughCaches };
            *self = Self { way, unmeasured: NEXT_AFTER, ..Self::NEW };
        }
    }
}

thread_local! {
    static CHOICE: Cell<Choice> = const { Cell::new(Choice::NEW) };
}

/// Stores `from` at `at` and returns the checksum of the stored bytes; no fence makes them durable.
#[inline]
pub(crate) fn store_summed(memory: &Memory, methods: &Methods, at: u64, from: &[u8]) -> Result<u32, Fault> {
    let length = from.len();
    let is_past = methods.checksums[class_of(length)].is_some_and(|sum| sum.method != CopyMethod::WriteBack);
    if length < MEASURED_MIN || !is_past {
        return copy::share_summed(memory, methods, at, from);
    }
    let mut choice = CHOICE.get();
    let (way, is_measured) = choice.next();
    let store = || match way {
        Way::ThroughCaches => copy::share_summed(memory, methods, at, from),
        Way::PastCaches => copy::share_summed_past_caches(memory, methods, at, from),
    };
    let stored = if is_measured {
        // Stores wait in a buffer of the processor: only a fence shows how long.
        fence(Ordering::SeqCst);
        let begin = Instant::now();
        let stored = store();
        fence(Ordering::SeqCst);
        choice.note(way, length, begin.elapsed().as_nanos() as u64);
        stored
    } else {
        store()
    };
    CHOICE.set(choice);
    stored
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder;

    /// The way after a measurement with these nanoseconds through the caches and past them, and how many stores it took.
    fn measured(choice: &mut Choice, [through, past]: [u64; 2], length: usize) -> (Way, u32) {
        let mut stores = 0;
        loop {
            let (way, is_measured) = choice.next();
            stores += 1;
            if is_measured {
                // One is interrupted.
                let interrupted = if choice.measured == 3 { 1_000_000 } else { 0 };
                choice.note(way, length, interrupted + if way == Way::PastCaches { past } else { through });
                if choice.measured == 2 * TRIALS {
                    return (choice.way, stores);
                }
            }
        }
    }

    #[test]
    fn stores_go_past_the_caches_while_that_is_clearly_faster() {
        let mut choice = Choice::NEW;
        let (first, next) = (FIRST_AFTER + 2 * TRIALS, NEXT_AFTER + 2 * TRIALS);
        assert_eq!(measured(&mut choice, [300, 250], 4096), (Way::ThroughCaches, first));
        assert_eq!(measured(&mut choice, [700, 290], 4096), (Way::PastCaches, next));
        assert_eq!(measured(&mut choice, [7000, 2900], 40_960), (Way::PastCaches, next));
        assert_eq!(measured(&mut choice, [300, 290], 4096), (Way::ThroughCaches, next));
    }

    #[test]
    fn stores_past_the_caches_have_a_fence_and_leave_nothing_in_the_caches() {
        let memory = Memory::scratch(1 << 16).expect("mapped").expect("registered");
        let methods = recorder::methods(true);
        let lines = memory.base() / 64..(memory.base() + (1 << 16)) / 64;
        let data = [7; 8192];
        for way in [Way::ThroughCaches, Way::PastCaches] {
            CHOICE.set(Choice { way, ..Choice::NEW });
            for (length, is_past) in
                [(4095, false), (4096, way == Way::PastCaches), (8192, way == Way::PastCaches)]
            {
                recorder::take();
                store_summed(&memory, &methods, 4096, &data[..length]).expect("memory does not fail");
                let found = recorder::take();
                let cached = found.cached.iter().filter(|line| lines.contains(line)).count();
                let expected = if is_past { (0, true) } else { (length.div_ceil(64), false) };
                assert_eq!((cached, found.fences > 0), expected, "{length} bytes, {way:?}");
            }
        }
    }

    #[test]
    fn each_way_stores_the_same_bytes_also_while_both_are_measured() {
        let memory = Memory::scratch(1 << 16).expect("mapped").expect("registered");
        let methods = crate::methods::Available::detect().forced(CopyMethod::Sse2);
        let Ok(methods) = methods else { return };
        for number in 0..2 * NEXT_AFTER {
            let data = vec![number as u8; 4096 + number as usize % 3 * 64];
            let at = u64::from(number) % 9 * 4096 + u64::from(number) % 2 * 8;
            let sum = store_summed(&memory, &methods, at, &data).expect("memory does not fail");
            let mut loaded = vec![0; data.len()];
            let found = copy::load_summed(&memory, &methods, at, &mut loaded).expect("memory does not fail");
            assert_eq!((found, &loaded), (sum, &data), "store {number}");
        }
    }
}
