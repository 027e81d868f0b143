//! A counter of existing objects, for a thread that waits until none is left.
//!
//! Invariants: a [`Counted`] is counted from its creation to its drop; a thread that waits for none is woken when the last
//! one is dropped.

use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

#[derive(Default)]
struct State {
    existing: Mutex<usize>,
    none: Condvar,
}

/// The number of its [`Counted`] objects. Clones share the number.
#[derive(Clone, Default)]
pub struct Count(Arc<State>);

impl Count {
    /// Adds an object.
    #[must_use]
    pub fn add(&self) -> Counted {
        *self.0.existing.lock() += 1;
        Counted(Arc::clone(&self.0))
    }

    /// The current number of objects.
    #[must_use]
    pub fn get(&self) -> usize {
        *self.0.existing.lock()
    }

    /// Waits until no object exists, without a limit if `end` is `None`; false if some still exist at `end`.
    pub fn wait_for_none(&self, end: Option<Instant>) -> bool {
        let mut existing = self.0.existing.lock();
        let exist = |existing: &mut usize| *existing > 0;
        match end {
            Some(end) => !self.0.none.wait_while_until(&mut existing, exist, end).timed_out(),
            None => {
                self.0.none.wait_while(&mut existing, exist);
                true
            }
        }
    }
}

impl fmt::Debug for Count {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Count({})", self.get())
    }
}

/// An object that a [`Count`] counts.
pub struct Counted(Arc<State>);

impl fmt::Debug for Counted {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Counted")
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut existing = self.0.existing.lock();
        *existing -= 1;
        if *existing == 0 {
            self.0.none.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn a_wait_ends_when_the_last_one_is_dropped_and_not_before() {
        let count = Count::default();
        assert!(count.wait_for_none(None));
        let (first, second) = (count.add(), count.add());
        let (said, heard) = mpsc::channel();
        let waiting = count.clone();
        let thread = std::thread::spawn(move || {
            waiting.wait_for_none(None);
            said.send(waiting.get()).unwrap();
        });
        drop(first);
        assert!(!count.wait_for_none(Some(Instant::now() + Duration::from_millis(20))));
        assert!(heard.try_recv().is_err(), "one still exists");
        drop(second);
        assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Ok(0));
        thread.join().unwrap();
    }
}
