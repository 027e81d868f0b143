//! The shared state of the threads of one export: how many serve, how many openers the file has, the first
//! failure.
//!
//! Invariants: every change wakes all waiters; every wait has a timeout.
//!
//! Elsewhere: the reaction to a timeout.

use cbd_export::Event;
use cbd_types::{Error, Result};
use std::os::fd::RawFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The state.
#[derive(Debug, Default)]
pub struct State {
    /// Threads that have not closed their channel.
    pub serving: usize,
    /// Openers of the file: the loop device is one.
    pub open_files: usize,
    /// Why a thread ended that was not asked to.
    pub failure: Option<Error>,
}

/// The state, the wait for changes of it, and the events that threads wait for.
#[derive(Debug)]
pub struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Stays signalled once the threads must read no more messages.
    stop: Event,
    /// Stays signalled once no client waits for replies any more.
    disconnected: Event,
}

impl Shared {
    /// The state of an export without threads.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new() -> Result<Self> {
        let (stop, disconnected) = (Event::new()?, Event::new()?);
        Ok(Self { state: Mutex::default(), changed: Condvar::new(), stop, disconnected })
    }

    /// Requests all threads to read no more messages.
    pub fn stop(&self) {
        self.stop.signal();
    }

    /// Stays readable once a stop was requested.
    pub fn stop_descriptor(&self) -> RawFd {
        self.stop.descriptor()
    }

    /// Tells all threads that the connection has ended: they cancel the requests that the device has not
    /// begun.
    pub fn disconnect(&self) {
        self.disconnected.signal();
    }

    /// Stays readable once the connection has ended.
    pub fn disconnected_descriptor(&self) -> RawFd {
        self.disconnected.descriptor()
    }

    /// Locks the state. A thread that panicked with the lock held left only numbers.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all waiters.
    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `reached`; returns whether that happened within `timeout`.
    pub fn wait(&self, timeout: Duration, reached: impl Fn(&State) -> bool) -> bool {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, timeout, |state| !reached(state));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}
