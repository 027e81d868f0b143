//! The engine's environment: random numbers, clocks, and the types of its memory and locks.

use cbd_engine::Environment;
use cbd_pmem::Mapping;
use cbd_types::Pmem;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The environment of an engine that runs in a process on a real machine, over memory `P`.
#[derive(Debug)]
pub struct ProcessEnvironment<P = Mapping> {
    started: Instant,
    memory: PhantomData<fn() -> P>,
}

impl<P> ProcessEnvironment<P> {
    /// An environment whose monotonic clock begins now.
    #[must_use]
    pub fn new() -> Self {
        cbd_lock::prepare();
        Self { started: Instant::now(), memory: PhantomData }
    }
}

impl<P> Default for ProcessEnvironment<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Pmem + 'static> Environment for ProcessEnvironment<P> {
    type Memory = P;
    type Lock = cbd_lock::Lock;

    // 5 to 20 us, depending on the duration of the processor's pause instruction.
    const SPINS: u32 = 500;

    fn random(&self) -> u64 {
        rand::random()
    }

    fn wall_ms(&self) -> u64 {
        wall_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    #[inline]
    fn prefetch(at: *const u8) {
        cbd_pmem::prefetch(at);
    }

    fn each(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let work_on = || {
            loop {
                match next.fetch_add(1, Ordering::Relaxed) {
                    number if number < count => work(number),
                    _ => return,
                }
            }
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 1..processors.min(count) {
                let helper = std::thread::Builder::new().name("cbd-recovery".to_owned());
                if helper.spawn_scoped(scope, work_on).is_err() {
                    // The threads that were created execute all jobs.
                    break;
                }
            }
            work_on();
        });
    }
}

/// Milliseconds since 1970.
#[must_use]
pub fn wall_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_is_called_once_for_each_number() {
        let environment = ProcessEnvironment::<Mapping>::new();
        for count in [0, 1, 2, 1000] {
            let times: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            environment.each(count, &|number| {
                times[number].fetch_add(1, Ordering::Relaxed);
            });
            assert!(times.into_iter().all(|times| times.into_inner() == 1), "{count}");
        }
    }
}
