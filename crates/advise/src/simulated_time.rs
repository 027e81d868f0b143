//! The environment of an engine whose time passes as the caller says, and the wakes of its background worker.
//!
//! Invariants: random numbers come from the seed, and time passes only when the clock is set, so that nothing depends on the machine.

use cbd_engine::Environment;
use cbd_pmem::Mapping;
use cbd_types::pmem::Pmem;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Wake;

/// The environment of an engine whose region is in an `M`.
#[derive(Debug)]
pub struct Surroundings<M = Mapping> {
    now_us: AtomicU64,
    random: Mutex<SmallRng>,
    memory: PhantomData<fn() -> M>,
}

impl<M> Surroundings<M> {
    /// A clock at zero, and random numbers from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let random = Mutex::new(SmallRng::seed_from_u64(seed));
        Self { now_us: AtomicU64::new(0), random, memory: PhantomData }
    }

    /// The time.
    pub fn now_us(&self) -> u64 {
        self.now_us.load(Ordering::Relaxed)
    }

    /// Sets the clock.
    pub fn set_us(&self, us: u64) {
        self.now_us.store(us, Ordering::Relaxed);
    }
}

impl<M: Pmem + 'static> Environment for Surroundings<M> {
    type Memory = M;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        self.random.lock().random()
    }

    fn wall_ms(&self) -> u64 {
        self.monotonic_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.now_us() / 1000
    }

    fn monotonic_us(&self) -> u64 {
        self.now_us()
    }
}

/// Records that the background worker was woken.
#[derive(Default, Debug)]
pub struct Wanted(AtomicBool);

impl Wanted {
    /// Whether it was woken since the last call.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for Wanted {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}
