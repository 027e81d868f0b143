//! The shared state of the threads of one export: how many serve, how many openers the file has, the first
//! failure.
//!
//! Invariants: every change wakes all waiters; every wait has a timeout.
//!
//! Elsewhere: the reaction to a timeout.

use cbd_export::Event;
use cbd_types::{Error, Result};
use std::io::PipeWriter;
use std::os::fd::RawFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The shared state.
#[derive(Debug, Default)]
pub struct State {
    /// Threads that have not closed their connection.
    pub serving: usize,
    /// Openers of the file: the loop device is one.
    pub open_files: usize,
    /// Why a thread ended that was not asked to.
    pub failure: Option<Error>,
    /// Replies that the kernel has refused.
    pub refused_answers: u64,
}

/// The shared state and the wait for changes of it.
#[derive(Debug)]
pub struct Life {
    state: Mutex<State>,
    changed: Condvar,
    /// The threads stop when this is dropped.
    stop: Mutex<Option<PipeWriter>>,
    /// Stays signalled once no client waits for replies any more.
    deserted: Event,
}

impl Life {
    /// For threads that stop when the read end of `stop` reports the end of the pipe.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new(stop: PipeWriter) -> Result<Self> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Ok(Self { state, changed, stop: Mutex::new(Some(stop)), deserted: Event::new()? })
    }

    /// Requests all threads to read no more messages.
    pub fn stop(&self) {
        drop(self.stop.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Tells all threads that the connection has ended: they cancel the requests that the device has not
    /// begun.
    pub fn desert(&self) {
        self.deserted.signal();
    }

    /// Stays readable once the connection has ended.
    pub fn deserted(&self) -> RawFd {
        self.deserted.descriptor()
    }

    /// Locks the state. A thread that panicked with the lock held left only numbers.
    pub fn look(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all waiters.
    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.look());
        self.changed.notify_all();
    }

    /// Waits until `reached`; returns whether that happened within `patience`.
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
