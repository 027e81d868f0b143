//! The environment of a small cache: a clock that can run other operations when it is read, and a waker that
//! remembers its calls.

use cbd_engine::Environment;
use cbd_sim::{CrashMemory, SimEnvironment};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

type Hook = (u32, Box<dyn FnOnce() + Send>);

/// The simulated environment, in which other operations can run when the clock is read.
pub struct RigEnvironment {
    inner: SimEnvironment,
    hook: Mutex<Option<Hook>>,
    wall_hook: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl RigEnvironment {
    pub fn new() -> Self {
        Self { inner: SimEnvironment::new(5, 0), hook: Mutex::new(None), wall_hook: Mutex::new(None) }
    }

    /// Runs `work` before the next read of the wall clock.
    pub fn at_wall_reading(&self, work: impl FnOnce() + Send + 'static) {
        *self.wall_hook.lock() = Some(Box::new(work));
    }

    /// Sets the wall clock back.
    pub fn set_wall_back(&self, ms: i64) {
        self.inner.set_wall_back(ms);
    }

    pub fn clock_ms(&self) -> u64 {
        self.inner.clock_ms()
    }

    pub fn advance(&self, ms: u64) {
        self.inner.advance(ms);
    }

    /// Runs `work` before the `count`-th read of the clock from now.
    pub fn at_clock_reading(&self, count: u32, work: impl FnOnce() + Send + 'static) {
        *self.hook.lock() = Some((count, Box::new(work)));
    }

    pub fn is_hook_done(&self) -> bool {
        self.hook.lock().is_none()
    }
}

impl Environment for RigEnvironment {
    type Memory = CrashMemory;
    type Lock = <SimEnvironment as Environment>::Lock;

    fn random(&self) -> u64 {
        self.inner.random()
    }

    fn wall_ms(&self) -> u64 {
        let work = self.wall_hook.lock().take();
        if let Some(work) = work {
            work();
        }
        self.inner.wall_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        let due = {
            let mut hook = self.hook.lock();
            match hook.as_mut() {
                Some((count, _)) if *count > 1 => {
                    *count -= 1;
                    None
                }
                _ => hook.take(),
            }
        };
        if let Some((_, work)) = due {
            work();
        }
        self.inner.monotonic_ms()
    }
}

/// A waker that remembers its calls.
#[derive(Default)]
pub struct Alarm(AtomicBool);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Alarm {
    /// Whether it was called since the last call of this function.
    pub fn rang(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}
