//! Threads that are pinned to processors and begin at the same moment.

use cbd_types::{Error, ErrorKind, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A thread that does not arrive within this time has failed.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The processors that the calling thread may use.
pub struct Processors {
    allowed: CpuSet,
    numbers: Vec<usize>,
}

impl Processors {
    /// Queries the system.
    ///
    /// # Errors
    /// When the system returns an error.
    pub fn new() -> Result<Self> {
        let allowed = sched_getaffinity(None).map_err(refused)?;
        let numbers = (0..CpuSet::MAX_CPU).filter(|&number| allowed.is_set(number)).collect();
        Ok(Self { allowed, numbers })
    }

    /// The number of processors.
    pub fn count(&self) -> usize {
        self.numbers.len()
    }

    /// Pins the calling thread to one of the processors.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn pin(&self, index: usize) -> Result<()> {
        let mut only = CpuSet::new();
        only.set(self.numbers[index % self.numbers.len().max(1)]);
        sched_setaffinity(None, &only).map_err(refused)
    }

    /// Allows the calling thread to run on all of the processors.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn unpin(&self) -> Result<()> {
        sched_setaffinity(None, &self.allowed).map_err(refused)
    }
}

fn refused(error: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::System, format!("the processors of a thread: {error}"))
}

/// A barrier at which two threads, each on a processor of its own, begin at the same moment. It spins: a wakeup would take a
/// tenth of a turn.
#[derive(Debug, Default)]
pub struct Gate(AtomicUsize);

impl Gate {
    /// Waits for the other thread.
    ///
    /// # Errors
    /// When it does not arrive in time.
    pub fn meet(&self) -> Result<()> {
        let before = self.0.fetch_add(1, Ordering::AcqRel);
        let both = (before / 2 + 1) * 2;
        let begun = Instant::now();
        while self.0.load(Ordering::Acquire) < both {
            if begun.elapsed() > TIMEOUT {
                return Err(Error::new(ErrorKind::TimedOut, "the other thread of a turn did not arrive"));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_thread_passes_a_gate_alone() {
        let gate = Gate::default();
        let passed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for round in 0..1000 {
                        // Both threads have passed all earlier rounds, or are between this count and their gate.
                        let seen = passed.load(Ordering::SeqCst);
                        assert!((2 * round..=2 * round + 1).contains(&seen), "{round} {seen}");
                        gate.meet().expect("the other one arrives");
                        passed.fetch_add(1, Ordering::SeqCst);
                        gate.meet().expect("the other one arrives");
                    }
                });
            }
        });
        assert_eq!(passed.into_inner(), 2000);
    }
}
