//! What the threads of a device and whoever started them tell each other.
//!
//! Always true here: an order is heard by every thread, and never taken back; every wait has an end in time.

use cbd_export::Event;
use cbd_types::{Error, Result};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What threads are to do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Order {
    /// Serve.
    Serve = 0,
    /// Take nothing more, answer what the device has, and end: the next server is asked for the rest.
    Leave = 1,
    /// Answer everything with an error, without a wait for the device.
    Fail = 2,
}

/// The state that is shared.
#[derive(Debug, Default)]
pub struct State {
    /// Threads that serve a queue.
    pub serving: usize,
    /// Why a thread ended that was not asked to.
    pub failure: Option<Error>,
}

/// Orders, and what became of them.
#[derive(Debug)]
pub struct Life {
    order: AtomicU8,
    /// Signalled, for good, by the first order.
    ordered: Event,
    /// Signalled, for good, by the last one.
    failing: Event,
    state: Mutex<State>,
    changed: Condvar,
}

impl Life {
    /// Of threads that serve.
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

    /// The order that holds.
    pub fn ordered(&self) -> Order {
        match self.order.load(Ordering::SeqCst) {
            0 => Order::Serve,
            1 => Order::Leave,
            _ => Order::Fail,
        }
    }

    /// What is readable as soon as another order holds than `order`; none where that cannot be.
    pub fn next_order(&self, order: Order) -> Option<RawFd> {
        match order {
            Order::Serve => Some(self.ordered.descriptor()),
            Order::Leave => Some(self.failing.descriptor()),
            Order::Fail => None,
        }
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

    /// Waits until no thread serves; whether that was by `end`.
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
    fn each_order_is_heard_once_and_none_is_taken_back() {
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
    fn a_wait_for_threads_ends_when_they_do_and_in_time() {
        let life = Life::new().unwrap();
        life.change(|state| state.serving = 1);
        assert!(!life.wait_until_none_serves(Instant::now() + Duration::from_millis(10)));
        std::thread::scope(|scope| {
            scope.spawn(|| life.change(|state| state.serving = 0));
            assert!(life.wait_until_none_serves(Instant::now() + Duration::from_secs(10)));
        });
    }
}
