//! The environment of a simulated engine: random numbers and clocks that a seed and a test control.

use crate::baton::{self, TurnLock};
use crate::memory::CrashMemory;
use crate::random::Seeded;
use cbd_engine::Environment;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// An arbitrary day in 2026.
const BEGIN_MS: i64 = 1_780_000_000_000;

/// Random numbers from a seed, and a clock that only [`advance`](Self::advance) moves. The wall clock
/// advances by a millisecond at each read, so that no two events have the same time. It can be set back.
#[derive(Debug)]
pub struct SimEnvironment {
    random: Mutex<Seeded>,
    clock_ms: AtomicU64,
    /// The difference of the wall clock from the sum of `BEGIN_MS` and the other clock.
    ahead_ms: AtomicI64,
    /// Microseconds that pass at each look at the clock of microseconds, and those that have passed so.
    look_us: AtomicU64,
    looked_us: AtomicU64,
}

impl SimEnvironment {
    /// The environment of one simulated process.
    #[must_use]
    pub const fn new(seed: u64, clock_ms: u64) -> Self {
        Self {
            random: Mutex::new(Seeded::new(seed)),
            clock_ms: AtomicU64::new(clock_ms),
            ahead_ms: AtomicI64::new(0),
            look_us: AtomicU64::new(0),
            looked_us: AtomicU64::new(0),
        }
    }

    /// From now on so many microseconds pass at each look at the clock of microseconds: whatever is measured is slow.
    pub fn pass_at_each_look(&self, us: u64) {
        self.look_us.store(us, Ordering::Relaxed);
    }

    /// The environment of the next process: its clocks continue from these.
    #[must_use]
    pub fn successor(&self, seed: u64) -> Self {
        let next = Self::new(seed, self.clock_ms());
        next.ahead_ms.store(self.ahead_ms.load(Ordering::Relaxed), Ordering::Relaxed);
        next.look_us.store(self.look_us.load(Ordering::Relaxed), Ordering::Relaxed);
        next
    }

    /// Sets the wall clock back by `ms`, or forward if `ms` is negative.
    pub fn set_wall_back(&self, ms: i64) {
        self.ahead_ms.fetch_sub(ms, Ordering::Relaxed);
    }

    /// Advances the clock.
    pub fn advance(&self, ms: u64) {
        self.clock_ms.fetch_add(ms, Ordering::Relaxed);
    }

    /// The time in milliseconds.
    pub fn clock_ms(&self) -> u64 {
        self.clock_ms.load(Ordering::Relaxed)
    }
}

impl Environment for SimEnvironment {
    type Memory = CrashMemory;
    type Lock = TurnLock;

    fn random(&self) -> u64 {
        self.random.lock().next()
    }

    fn wall_ms(&self) -> u64 {
        let ahead = self.ahead_ms.fetch_add(1, Ordering::Relaxed);
        (BEGIN_MS + ahead).saturating_add_unsigned(self.clock_ms()).unsigned_abs()
    }

    fn monotonic_ms(&self) -> u64 {
        self.clock_ms()
    }

    fn monotonic_us(&self) -> u64 {
        let looked = self.looked_us.fetch_add(self.look_us.load(Ordering::Relaxed), Ordering::Relaxed);
        self.clock_ms() * 1000 + looked
    }

    fn before_shared_access() {
        baton::may_switch();
    }
}
