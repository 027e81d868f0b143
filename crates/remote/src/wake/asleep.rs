//! Whether a side sleeps.
//!
//! The only hazard is a lost wake-up: one side stores something and reads that the other one is awake, while that reads that there is
//! nothing and sleeps. Each of the two stores and then loads what the other one stores:
//!
//! ```text
//! sleep                          store
//!   flag = 1                       entry = ...
//!   full barrier                   full barrier
//!   entry there? flag = 0, done    flag == 1? flag = 0, raise the eventfd
//!   sleep, until it is raised
//! ```
//!
//! With a full barrier on both sides, at least one of them reads the other's store. Whoever changes the flag from 1 to 0 raises the
//! eventfd once, so it is raised once for each sleep, or not at all.

/// The flag, which both sides share.
pub(super) trait Flag {
    fn load(&self) -> u32;
    fn store(&self, value: u32);
    fn swap(&self, value: u32) -> u32;
    /// A barrier between all accesses before it and all behind it, of the side that is about to sleep.
    fn barrier_of_sleeper();
    /// The same of the other side.
    fn barrier_of_waker();
}

impl Flag for std::sync::atomic::AtomicU32 {
    fn load(&self) -> u32 {
        self.load(std::sync::atomic::Ordering::Relaxed)
    }

    fn store(&self, value: u32) {
        self.store(value, std::sync::atomic::Ordering::Relaxed);
    }

    fn swap(&self, value: u32) -> u32 {
        self.swap(value, std::sync::atomic::Ordering::Relaxed)
    }

    fn barrier_of_sleeper() {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    fn barrier_of_waker() {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

/// The caller is about to sleep: it looks once more, and then waits for its eventfd.
pub(super) fn announce<F: Flag>(flag: &F) {
    flag.store(1);
    F::barrier_of_sleeper();
}

/// The caller is awake, and looks until the next [`announce`].
pub(super) fn retract<F: Flag>(flag: &F) {
    flag.store(0);
}

/// Whether the other side is to be woken, by this call's caller. What it is to see is stored.
pub(super) fn take<F: Flag>(flag: &F) -> bool {
    F::barrier_of_waker();
    flag.load() != 0 && flag.swap(0) != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::atomic::{AtomicU32, Ordering, fence};
    use loom::sync::{Condvar, Mutex};
    use std::sync::Arc;

    /// A flag whose barriers have an effect or not.
    struct Modelled<const SLEEPER: bool, const WAKER: bool>(AtomicU32);

    impl<const SLEEPER: bool, const WAKER: bool> Flag for Modelled<SLEEPER, WAKER> {
        fn load(&self) -> u32 {
            self.0.load(Ordering::Relaxed)
        }

        /// As a swap: the model knows no order between a store and a swap of another thread that read what was before, and would
        /// let the swap come last.
        fn store(&self, value: u32) {
            self.0.swap(value, Ordering::Relaxed);
        }

        fn swap(&self, value: u32) -> u32 {
            self.0.swap(value, Ordering::Relaxed)
        }

        fn barrier_of_sleeper() {
            if SLEEPER {
                fence(Ordering::SeqCst);
            }
        }

        fn barrier_of_waker() {
            if WAKER {
                fence(Ordering::SeqCst);
            }
        }
    }

    /// One direction of a channel: a number of entries, a flag and an eventfd.
    struct Direction<const SLEEPER: bool, const WAKER: bool> {
        entries: AtomicU32,
        flag: Modelled<SLEEPER, WAKER>,
        event: Mutex<bool>,
        raised: Condvar,
    }

    impl<const SLEEPER: bool, const WAKER: bool> Direction<SLEEPER, WAKER> {
        fn new() -> Self {
            let (entries, flag) = (AtomicU32::new(0), Modelled(AtomicU32::new(0)));
            Self { entries, flag, event: Mutex::new(false), raised: Condvar::new() }
        }

        fn put(&self, entry: u32) {
            self.entries.store(entry, Ordering::Release);
            if take(&self.flag) {
                *self.event.lock().unwrap() = true;
                self.raised.notify_one();
            }
        }

        fn has(&self, entry: u32) -> bool {
            self.entries.load(Ordering::Acquire) >= entry
        }

        /// Returns once the entry is there; a sleep that does not end is a deadlock, which fails the execution.
        fn wait_for(&self, entry: u32) {
            while !self.has(entry) {
                announce(&self.flag);
                if self.has(entry) {
                    break;
                }
                let mut event = self.event.lock().unwrap();
                while !*event {
                    event = self.raised.wait(event).unwrap();
                }
                *event = false;
            }
            retract(&self.flag);
        }
    }

    /// Two entries in one direction, or one there and one back.
    fn in_all_executions<const SLEEPER: bool, const WAKER: bool>(
        side: fn(&Both<SLEEPER, WAKER>),
        other: fn(&Both<SLEEPER, WAKER>),
    ) {
        loom::model(move || {
            let both = Arc::new([0; 2].map(|_| Direction::<SLEEPER, WAKER>::new()));
            let of_other = Arc::clone(&both);
            let thread = loom::thread::spawn(move || other(&of_other));
            side(&both);
            thread.join().unwrap();
        });
    }

    type Both<const SLEEPER: bool, const WAKER: bool> = [Direction<SLEEPER, WAKER>; 2];

    fn put_two<const SLEEPER: bool, const WAKER: bool>([there, _]: &Both<SLEEPER, WAKER>) {
        there.put(1);
        there.put(2);
    }

    fn wait_for_two<const SLEEPER: bool, const WAKER: bool>([there, _]: &Both<SLEEPER, WAKER>) {
        there.wait_for(1);
        there.wait_for(2);
    }

    #[test]
    fn no_wake_up_of_two_is_lost() {
        in_all_executions::<true, true>(wait_for_two, put_two);
    }

    #[test]
    fn no_wake_up_is_lost_there_and_back() {
        in_all_executions::<true, true>(
            |[there, back]| {
                there.put(1);
                back.wait_for(1);
            },
            |[there, back]| {
                there.wait_for(1);
                back.put(1);
            },
        );
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn without_the_barrier_of_the_sleeper_one_is_lost() {
        in_all_executions::<false, true>(wait_for_two, put_two);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn without_the_barrier_of_the_waker_one_is_lost() {
        in_all_executions::<true, false>(wait_for_two, put_two);
    }
}
