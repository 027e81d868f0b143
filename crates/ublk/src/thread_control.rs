//! Orders to the threads of a device, and the state that they share with their starter.
//!
//! Invariants: an order reaches every thread, and is never withdrawn; every wait has a timeout.

use cbd_export::Event;
use cbd_types::{Error, Result};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Orders to the threads.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Order {
    /// Serve.
    Serve = 0,
    /// Take no more requests, answer those that the device executes, and end: the next server receives the others.
    Leave = 1,
    /// Answer all requests with an error, without waiting for the device.
    Fail = 2,
}

/// The shared state.
#[derive(Debug, Default)]
pub struct State {
    /// Threads that serve a queue.
    pub serving: usize,
    /// The error of a thread that ended without an order.
    pub failure: Option<Error>,
}

/// Orders, and the state of the threads.
#[derive(Debug)]
pub struct ThreadControl {
    order: AtomicU8,
    /// The size of the device in bytes, if it has grown since the threads started; otherwise 0.
    grown: AtomicU64,
    /// Signalled from the first order on.
    ordered: Event,
    /// Signalled from the last possible order on.
    failing: Event,
    state: Mutex<State>,
    changed: Condvar,
}

impl ThreadControl {
    /// The control of threads that serve.
    ///
    /// # Errors
    /// When the process may not open another descriptor.
    pub fn new() -> Result<Self> {
        Ok(Self {
            order: AtomicU8::new(Order::Serve as u8),
            grown: AtomicU64::new(0),
            ordered: Event::new()?,
            failing: Event::new()?,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Lets requests reach to `size`, as the device does already.
    pub fn grow(&self, size: u64) {
        self.grown.fetch_max(size, Ordering::AcqRel);
    }

    /// The size of the device in bytes, if it was `before` when the threads started.
    pub fn size(&self, before: u64) -> u64 {
        self.grown.load(Ordering::Acquire).max(before)
    }

    /// Gives an order, unless a later one was given.
    pub fn order(&self, order: Order) {
        self.order.fetch_max(order as u8, Ordering::SeqCst);
        self.ordered.signal();
        if order == Order::Fail {
            self.failing.signal();
        }
    }

    /// The latest order.
    pub fn ordered(&self) -> Order {
        match self.order.load(Ordering::SeqCst) {
            0 => Order::Serve,
            1 => Order::Leave,
            _ => Order::Fail,
        }
    }

    /// A descriptor that is readable as soon as a later order than `order` is given; `None` after the last order.
    pub fn later_order(&self, order: Order) -> Option<RawFd> {
        match order {
            Order::Serve => Some(self.ordered.descriptor()),
            Order::Leave => Some(self.failing.descriptor()),
            Order::Fail => None,
        }
    }

    /// Locks the state. It is consistent even if a thread panicked with the lock held, so poisoning is ignored.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all waiters.
    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until no thread serves; returns whether that happened by `end`.
    pub fn wait_until_none_serves(&self, end: Instant) -> bool {
        let mut state = self.lock();
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
        let thread_control = ThreadControl::new().unwrap();
        let heard = |order| {
            let descriptor = thread_control.later_order(order)?;
            wait_any(&[descriptor], Some(Duration::ZERO)).unwrap()
        };
        assert_eq!(heard(Order::Serve), None);
        thread_control.order(Order::Leave);
        assert_eq!((heard(Order::Serve), heard(Order::Leave)), (Some(0), None));
        thread_control.order(Order::Fail);
        thread_control.order(Order::Leave);
        assert_eq!(heard(Order::Leave), Some(0));
        assert_eq!(thread_control.ordered(), Order::Fail);
        assert_eq!(thread_control.later_order(Order::Fail), None);
    }

    #[test]
    fn a_wait_for_threads_ends_with_them_or_at_its_timeout() {
        let thread_control = ThreadControl::new().unwrap();
        thread_control.change(|state| state.serving = 1);
        assert!(!thread_control.wait_until_none_serves(Instant::now() + Duration::from_millis(10)));
        std::thread::scope(|scope| {
            scope.spawn(|| thread_control.change(|state| state.serving = 0));
            assert!(thread_control.wait_until_none_serves(Instant::now() + Duration::from_secs(10)));
        });
    }
}
