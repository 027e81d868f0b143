//! Threads of one simulated process that run one at a time. A seed decides which thread runs next at each lock, at
//! each number that threads share without a lock, and at each store and fence.
//!
//! Invariants: the same seed gives the same order; a thread that waits for a lock lets the other threads run.
//!
//! Elsewhere: exhaustive exploration of all schedules of a few steps (`cbd-models`).

use crate::random::Seeded;
use parking_lot::lock_api::{GuardSend, RawMutex};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Switches to other threads during one wait for a lock after which the lock counts as deadlocked.
const TURNS_MAX: u32 = 100_000;

struct Turns {
    /// The thread that runs.
    now: usize,
    done: Vec<bool>,
    random: Seeded,
    switch_permille: u64,
}

struct Table {
    turns: Mutex<Turns>,
    /// For each thread: it is its turn.
    chosen: Vec<Condvar>,
}

thread_local! {
    /// The table of this thread, and the thread's number in it.
    static SEAT: RefCell<Option<(Arc<Table>, usize)>> = const { RefCell::new(None) };
    /// The probability of a switch in this thread, if it has one of its own.
    static OWN_PERMILLE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// From now on another thread continues with a probability of `permille` in a thousand at each switch point of this one. A
/// thread that is often interrupted among others that are not is met in the middle of a few steps by many of theirs.
pub fn switch_with(permille: u64) {
    OWN_PERMILLE.set(Some(permille));
}

impl Table {
    /// Switches to another thread if one can run; returns when `me` is scheduled again.
    fn pass(&self, me: usize) {
        let mut turns = self.turns.lock();
        turns.choose(Some(me));
        let now = turns.now;
        if now != me {
            MutexGuard::unlocked(&mut turns, || self.chosen[now].notify_one());
            self.chosen[me].wait_while(&mut turns, |turns| turns.now != me);
        }
    }

    fn wait_for_turn(&self, me: usize) {
        self.chosen[me].wait_while(&mut self.turns.lock(), |turns| turns.now != me);
    }

    fn leave(&self, me: usize) {
        let mut turns = self.turns.lock();
        turns.done[me] = true;
        turns.choose(None);
        self.chosen[turns.now].notify_one();
    }
}

impl Turns {
    fn choose(&mut self, but: Option<usize>) {
        let others: Vec<usize> =
            (0..self.done.len()).filter(|number| !self.done[*number] && Some(*number) != but).collect();
        if !others.is_empty() {
            self.now = *self.random.pick(&others);
        }
    }
}

/// Runs each of `works` on a thread of its own, one at a time. At each switch point, another thread continues with a
/// probability of `switch_permille` in a thousand. The results are in the order of `works`; a panic is caught.
pub fn together<'a, T: Send>(
    seed: u64,
    switch_permille: u64,
    works: Vec<Box<dyn FnOnce() -> T + Send + 'a>>,
) -> Vec<std::thread::Result<T>> {
    let mut turns =
        Turns { now: 0, done: vec![false; works.len()], random: Seeded::new(seed), switch_permille };
    turns.choose(None);
    let chosen = works.iter().map(|_| Condvar::new()).collect();
    let table = Arc::new(Table { turns: Mutex::new(turns), chosen });
    std::thread::scope(|scope| {
        let threads: Vec<_> = works
            .into_iter()
            .enumerate()
            .map(|(me, work)| {
                let table = Arc::clone(&table);
                scope.spawn(move || {
                    table.wait_for_turn(me);
                    SEAT.set(Some((Arc::clone(&table), me)));
                    let outcome = catch_unwind(AssertUnwindSafe(work));
                    table.leave(me);
                    outcome
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().and_then(|outcome| outcome)).collect()
    })
}

/// A point at which another thread may continue.
pub(crate) fn may_switch() {
    SEAT.with_borrow(|seat| {
        if let Some((table, me)) = seat {
            let switch = {
                let mut turns = table.turns.lock();
                let permille = OWN_PERMILLE.get().unwrap_or(turns.switch_permille);
                turns.random.chance(permille)
            };
            if switch {
                table.pass(*me);
            }
        }
    });
}

/// Switches away from a thread that cannot continue. Returns false if the thread is not one of several that are
/// scheduled here.
pub(crate) fn must_switch() -> bool {
    SEAT.with_borrow(|seat| seat.as_ref().map(|(table, me)| table.pass(*me)).is_some())
}

/// A lock whose waiting threads let the other threads of their table run.
pub struct TurnLock(parking_lot::RawMutex);

impl std::fmt::Debug for TurnLock {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("TurnLock")
    }
}

// SAFETY: the inner mutex alone decides whether the lock is held: `lock` returns only after `try_lock` or
// `lock` of the inner mutex has succeeded, and `unlock` is passed on under the same contract.
#[expect(unsafe_code, reason = "the trait is unsafe to implement, and a lock of the engine is one of these")]
unsafe impl RawMutex for TurnLock {
    const INIT: Self = Self(parking_lot::RawMutex::INIT);
    type GuardMarker = GuardSend;

    fn lock(&self) {
        may_switch();
        for _ in 0..TURNS_MAX {
            if self.0.try_lock() {
                return;
            }
            if !must_switch() {
                return self.0.lock();
            }
        }
        panic!("a lock is not released while {TURNS_MAX} turns pass");
    }

    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    unsafe fn unlock(&self) {
        // SAFETY: the caller holds the lock, as the contract of this function requires.
        unsafe { self.0.unlock() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::lock_api;

    type Log = lock_api::Mutex<TurnLock, Vec<usize>>;

    fn order(seed: u64) -> Vec<usize> {
        let log = Log::new(Vec::new());
        let work = |me: usize| {
            let log = &log;
            Box::new(move || (0..20).for_each(|_| log.lock().push(me))) as Box<dyn FnOnce() + Send + '_>
        };
        let ended = together(seed, 300, vec![work(0), work(1), work(2)]);
        assert!(ended.iter().all(Result::is_ok));
        log.into_inner()
    }

    #[test]
    fn a_seed_decides_the_order() {
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
        assert_eq!(order(3).len(), 60);
    }

    #[test]
    fn a_thread_that_waits_for_a_lock_lets_its_holder_run() {
        for seed in 0..20 {
            let value = lock_api::Mutex::<TurnLock, _>::new(0);
            let work = || {
                let value = &value;
                Box::new(move || {
                    let mut held = value.lock();
                    let before = *held;
                    may_switch();
                    *held = before + 1;
                }) as Box<dyn FnOnce() + Send + '_>
            };
            together(seed, 900, vec![work(), work(), work()]);
            assert_eq!(value.into_inner(), 3, "seed {seed}");
        }
    }

    #[test]
    fn a_panic_of_one_does_not_stop_the_others() {
        let ended =
            together(1, 500, vec![Box::new(|| std::panic::resume_unwind(Box::new("ended"))), Box::new(|| 7)]);
        assert!(ended[0].is_err());
        assert!(matches!(ended[1], Ok(7)));
    }
}
