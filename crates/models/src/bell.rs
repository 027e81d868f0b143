//! The object on which a thread sleeps until it is woken. No clock ends the sleep, so a lost wakeup is a deadlock.

use shuttle::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::sync::Arc;
use std::task::{Wake, Waker};

#[derive(Clone, Copy, Default, Debug)]
struct State {
    rung: bool,
    /// Whether the thread waits for the bell.
    awaited: bool,
}

/// The bell of one thread; it stays rung until the thread has consumed it.
#[derive(Debug)]
pub struct Bell {
    state: Mutex<State>,
    heard: Condvar,
}

impl Bell {
    /// A bell that has not been rung.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::default()), heard: Condvar::new() })
    }

    /// The waker that rings it.
    #[must_use]
    pub fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until it rings.
    pub fn wait(&self) {
        let mut state = self.state();
        state.awaited = true;
        while !state.rung {
            state = self.heard.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        *state = State::default();
    }

    /// Whether its thread sleeps, and stays asleep until the bell is rung.
    #[must_use]
    pub fn sleeps(&self) -> bool {
        let state = self.state();
        state.awaited && !state.rung
    }

    /// Whether it was rung; resets it.
    #[must_use]
    pub fn take(&self) -> bool {
        std::mem::take(&mut self.state().rung)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.state().rung = true;
        self.heard.notify_all();
    }
}
