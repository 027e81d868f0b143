//! What the threads of one export tell each other: how many serve, how many users the file has, what failed.
//!
//! Always true here: every change wakes whoever waits for it; every wait has an end in time.
//!
//! Left to others: deciding what to do when a wait ends without what it waited for.

use cbd_export::Event;
use cbd_types::{Error, Result};
use std::io::PipeWriter;
use std::os::fd::RawFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The state that is shared.
#[derive(Debug, Default)]
pub struct State {
    /// Threads that have not let go of their connection.
    pub serving: usize,
    /// Users that have the file open: the loop device is one.
    pub open_files: usize,
    /// Why a thread ended that was not asked to.
    pub failure: Option<Error>,
    /// Answers that the kernel did not take as they were.
    pub refused_answers: u64,
}

/// The shared state and the wait for changes of it.
#[derive(Debug)]
pub struct Life {
    state: Mutex<State>,
    changed: Condvar,
    /// The threads stop when this is dropped.
    stop: Mutex<Option<PipeWriter>>,
    /// Signalled for good when nobody waits for answers any more.
    deserted: Event,
}

impl Life {
    /// Of threads that stop when the other end of `stop` is at its end.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new(stop: PipeWriter) -> Result<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Ok(Self { state, changed, stop: Mutex::new(Some(stop)), deserted: Event::new()? })
    }

    /// Tells all threads to take nothing more.
    pub fn stop(&self) {
        drop(self.stop.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Tells all threads that the connection has ended: what the device has not begun is to be given up.
    pub fn desert(&self) {
        self.deserted.signal();
    }

    /// Readable for good when the connection has ended.
    pub fn deserted(&self) -> RawFd {
        self.deserted.descriptor()
    }

    /// Looks at the state. A thread that panicked while it held the lock left only numbers.
    pub fn look(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all that wait.
    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.look());
        self.changed.notify_all();
    }

    /// Waits until `reached`; whether it was within `patience`.
    pub fn wait(&self, patience: Duration, reached: impl Fn(&State) -> bool) -> bool {
        let end = Instant::now() + patience;
        let mut state = self.look();
        while !reached(&state) {
            let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                return false;
            };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
