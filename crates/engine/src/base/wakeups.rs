//! Wakeups of the background worker.
//!
//! Invariants: a worker that has announced its sleep is woken by the next record that touches a lane; the announcement ends with
//! the first of them, so that one sleep costs one wakeup.

use crate::{Environment, Mutex, sync::SharedBool};
use core::sync::atomic::Ordering;
use core::task::Waker;

/// How the background worker is woken.
pub(crate) struct Wakeups<E: Environment> {
    /// The background worker sleeps until something is written.
    is_asleep: SharedBool<E>,
    waker: Mutex<E, Option<Waker>>,
}

impl<E: Environment> Wakeups<E> {
    /// Wakes nothing until a waker is set.
    pub(crate) fn new() -> Self {
        Self { is_asleep: SharedBool::new(false), waker: Mutex::<E, _>::new(None) }
    }

    /// Sets the waker that is called when the background worker has work.
    pub(crate) fn set_waker(&self, waker: Waker) {
        *self.waker.lock() = Some(waker);
    }

    /// Wakes the background worker.
    pub(crate) fn wake(&self) {
        let waker = self.waker.lock().clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The background worker announces that it sleeps until something is written. It checks for work again afterwards.
    pub(crate) fn announce_sleep(&self) {
        self.is_asleep.store(true, Ordering::SeqCst);
    }

    /// Wakes the background worker if it has announced its sleep.
    #[inline]
    pub(crate) fn wake_if_asleep(&self) {
        if self.is_asleep.load(Ordering::SeqCst) && self.is_asleep.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Whether the background worker has announced its sleep and was not woken since.
    #[cfg(test)]
    pub(crate) fn is_asleep(&self) -> bool {
        self.is_asleep.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests;
