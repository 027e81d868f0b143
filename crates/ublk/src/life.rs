//! The state that the threads of a device share with their starter.
//!
//! Invariants: an order reaches every thread, and is never withdrawn; every wait has a timeout.

use cbd_export::Event;
use cbd_types::{Error, Result};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Orders to the threads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Order {
    /// Serve.
    Serve = 0,
    /// Take no more requests, answer those that the device has, and end: the next server receives the others.
    Leave = 1,
    /// Answer everything with an error, without a wait for the device.
    Fail = 2,
}

/// The shared state.
#[derive(Debug, Default)]
pub struct State {
    /// Threads that serve a queue.
    pub serving: usize,
    /// Why a thread ended that was not asked to.
    pub failure: Option<Error>,
}

/// Orders, and the state of the threads.
#[derive(Debug)]
pub struct Life {
    order: AtomicU8,
    /// Stays signalled after the first order.
    ordered: Event,
    /// Stays signalled after the last one.
    failing: Event,
    state: Mutex<State>,
    changed: Condvar,
}

impl Life {
    /// For threads that serve.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new() -> Result<Self> {
        Ok(Self {
            order: AtomicU8::new(Order::Serve as u8),
            ordered: Event::new()?,
            failing: Event::new()?,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Gives an order, unless a later one was given.
    pub fn order(&self, order: Order) {
        self.order.fetch_max(order as u8, Ordering::SeqCst);
        self.ordered.signal();
        if order == Order::Fail {
            self.failing.signal();
        }
    }

    /// The present order.
    pub fn ordered(&self) -> Order {
        match self.order.load(Ordering::SeqCst) {
            0 => Order::Serve,
            1 => Order::Leave,
            _ => Order::Fail,
        }
    }

    /// A descriptor that is readable as soon as a later order than `order` is given; `None` after the last
    /// one.
    pub fn next_order(&self, order: Order) -> Option<RawFd> {
        match order {
            Order::Serve => Some(self.ordered.descriptor()),
            Order::Leave => Some(self.failing.descriptor()),
            Order::Fail => None,
        }
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

    /// Waits until no thread serves; returns whether that happened by `end`.
    pub fn wait_until_none_serves(&self, end: Instant) -> bool {
        let mut state = self.look();
        while state.serving > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_export::wait_any;

    #[test]
    fn each_order_is_signalled_once_and_none_is_withdrawn() {
        let life = Life::new().unwrap();
        let heard = |order| {
            let descriptor = life.next_order(order)?;
            wait_any(&[descriptor], Some(Duration::ZERO)).unwrap()
        };
        assert_eq!(heard(Order::Serve), None);
        life.order(Order::Leave);
        assert_eq!((heard(Order::Serve), heard(Order::Leave)), (Some(0), None));
        life.order(Order::Fail);
        life.order(Order::Leave);
        assert_eq!(heard(Order::Leave), Some(0));
        assert_eq!(life.ordered(), Order::Fail);
        assert_eq!(life.next_order(Order::Fail), None);
    }

    #[test]
    fn a_wait_for_threads_ends_with_them_or_at_its_timeout() {
        let life = Life::new().unwrap();
        life.change(|state| state.serving = 1);
        assert!(!life.wait_until_none_serves(Instant::now() + Duration::from_millis(10)));
        std::thread::scope(|scope| {
            scope.spawn(|| life.change(|state| state.serving = 0));
            assert!(life.wait_until_none_serves(Instant::now() + Duration::from_secs(10)));
        });
    }
}
