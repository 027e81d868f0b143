//! The engine's environment: random numbers, clocks, and the types of its memory and locks.

use cbd_engine::Environment;
use cbd_pmem::Mapping;
use cbd_types::Pmem;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

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

    fn monotonic_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn monotonic_ns(&self) -> u64 {
        monotonic_ns()
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

/// Milliseconds since 1970, as of the kernel's last tick: up to 10 ms ago, and never ahead of the clock, so that it is a
/// valid time for everything that has completed before the call. Each FUA write reads it, and it costs a quarter of reading
/// the clock itself.
#[must_use]
pub fn wall_ms() -> u64 {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(ClockId::RealtimeCoarse);
    // A time before 1970 counts as 0.
    let (seconds, nanoseconds) = (u64::try_from(tv_sec).unwrap_or(0), u64::try_from(tv_nsec).unwrap_or(0));
    seconds.saturating_mul(1000).saturating_add(nanoseconds / 1_000_000)
}

/// Nanoseconds of the monotonic clock, by which requests are timed.
#[must_use]
pub fn monotonic_ns() -> u64 {
    nanoseconds_of(ClockId::Monotonic)
}

/// The same as of the kernel's last tick, some milliseconds ago. Reading it does not wait for the loads before it, as reading the
/// processor's counter does.
#[must_use]
pub fn coarse_ns() -> u64 {
    nanoseconds_of(ClockId::MonotonicCoarse)
}

fn nanoseconds_of(clock: ClockId) -> u64 {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(clock);
    // Both are never negative; 580 years fit.
    (tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_coarse_clock_is_the_same_clock_a_little_earlier() {
        let earlier = monotonic_ns();
        let coarse = coarse_ns();
        let later = monotonic_ns();
        assert!(coarse <= later && coarse + 1_000_000_000 > earlier, "{earlier} {coarse} {later}");
    }

    #[test]
    fn the_wall_clock_is_never_ahead_of_the_system_clock() {
        let system_ms = || {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            u64::try_from(now.unwrap().as_millis()).unwrap()
        };
        for _ in 0..10_000 {
            let before = system_ms();
            let read = wall_ms();
            assert!(read <= system_ms(), "what completes now would look older than what is dated");
            // A tick is at most 10 ms; the rest is for a machine that was interrupted.
            assert!(read + 1000 > before, "{read} is far behind {before}");
        }
    }

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
