//! Queries of file systems that may hang: each runs on a separate thread, and the caller waits for it with a timeout.
//!
//! Invariants: at most one query with the same key runs at a time, however often it is requested; a query that exceeds
//! its timeout occupies one thread until it ends.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

static RUNNING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
static ENDED: Condvar = Condvar::new();

/// The keys of running queries. A panic cannot leave the set inconsistent, so poisoning of the lock is ignored.
fn running() -> MutexGuard<'static, BTreeSet<String>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A query and its key.
pub(crate) type Query<T> = (String, Box<dyn FnOnce() -> T + Send>);

/// The state of a query.
enum State<T> {
    Waiting(Query<T>),
    Started(Receiver<T>),
    /// No thread could be created for it.
    Failed,
}

/// Runs one query; `None` if it does not end within `limit`.
pub(crate) fn run<T: Send + 'static>(
    key: &str,
    limit: Duration,
    query: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    run_all(limit, vec![(key.to_owned(), Box::new(query))]).pop().flatten()
}

/// Runs all queries at once and returns their results in the same order; `None` for a query that does not end within
/// `limit`, which they share. A query with the key of a running one begins when that has ended.
pub(crate) fn run_all<T: Send + 'static>(limit: Duration, queries: Vec<Query<T>>) -> Vec<Option<T>> {
    let end = Instant::now() + limit;
    let mut states: Vec<State<T>> = queries.into_iter().map(State::Waiting).collect();
    let mut keys = running();
    loop {
        for state in &mut states {
            if matches!(state, State::Waiting((key, _)) if !keys.contains(key)) {
                *state = begin(std::mem::replace(state, State::Failed), &mut keys);
            }
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || !states.iter().any(|state| matches!(state, State::Waiting(_))) {
            break;
        }
        keys = ENDED.wait_timeout(keys, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    drop(keys);
    let answer = |state| match state {
        State::Started(answer) => answer.recv_timeout(end.saturating_duration_since(Instant::now())).ok(),
        State::Waiting(_) | State::Failed => None,
    };
    states.into_iter().map(answer).collect()
}

/// Starts a query on a separate thread.
fn begin<T: Send + 'static>(state: State<T>, keys: &mut BTreeSet<String>) -> State<T> {
    let State::Waiting((key, query)) = state else { return state };
    let (sender, answer) = sync_channel(1);
    keys.insert(key.clone());
    let name = key.clone();
    let work = move || {
        // Created on this thread: if the new thread cannot be created, it must not be dropped while the keys are
        // locked.
        let entry = Running(name);
        let found = query();
        drop(entry);
        // The send fails if the caller's timeout has passed.
        let _ = sender.send(found);
    };
    if std::thread::Builder::new().name("cbd-query".to_owned()).spawn(work).is_ok() {
        return State::Started(answer);
    }
    keys.remove(&key);
    State::Failed
}

/// Removes the key of a running query on drop.
struct Running(String);

impl Drop for Running {
    fn drop(&mut self) {
        running().remove(&self.0);
        ENDED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_query_that_hangs_runs_once_and_can_run_again_after_it_has_ended() {
        static HANGS: Mutex<()> = Mutex::new(());
        static RUNS: AtomicU32 = AtomicU32::new(0);
        let query = || {
            RUNS.fetch_add(1, Ordering::SeqCst);
            drop(HANGS.lock());
            7
        };
        let hang = HANGS.lock();
        for _ in 0..3 {
            assert_eq!(run("hangs", Duration::from_millis(20), query), None);
        }
        assert_eq!(RUNS.load(Ordering::SeqCst), 1);
        assert_eq!(run("another", Duration::from_secs(30), || 8), Some(8));
        drop(hang);
        assert_eq!(run("hangs", Duration::from_secs(30), query), Some(7));
    }

    #[test]
    fn queries_that_hang_share_one_timeout_and_do_not_delay_others() {
        static HANGS: Mutex<()> = Mutex::new(());
        let hang = HANGS.lock();
        let query = |number: u32, hangs: bool| -> Query<u32> {
            let work = move || {
                drop(hangs.then(|| HANGS.lock()));
                number
            };
            (format!("shared {number}"), Box::new(work))
        };
        let all = || (0..8).map(|number| query(number, number != 7)).collect();
        let begun = Instant::now();
        for _ in 0..3 {
            let answers = run_all(Duration::from_secs(2), all());
            assert_eq!(answers.iter().flatten().collect::<Vec<_>>(), [&7]);
        }
        // With separate timeouts they would have taken 2 s times 7 times 3.
        assert!(begun.elapsed() < Duration::from_secs(21), "{:?}", begun.elapsed());
        drop(hang);
    }
}
