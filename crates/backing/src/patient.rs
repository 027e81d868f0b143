//! Questions to a file system that may not answer: asked on threads of their own, and waited for so long and no longer.
//!
//! Always true here: of each question, known by its key, at most one is under way, however often it is asked; a question that is not
//! answered in time costs one thread, which ends with the answer.
//!
//! Left to others: what no answer means.

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

static UNDER_WAY: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
static ENDED: Condvar = Condvar::new();

/// What is under way. It is a set of names, which is never half changed.
fn under_way() -> MutexGuard<'static, BTreeSet<String>> {
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A question that was asked.
pub(crate) struct Asked<T> {
    answer: Option<Receiver<T>>,
    end: Instant,
}

/// Asks; the answer counts if it comes within `limit`. A question with the same key that is under way is waited for first.
pub(crate) fn ask<T: Send + 'static>(
    key: &str,
    limit: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Asked<T> {
    let end = Instant::now() + limit;
    let mut names = under_way();
    while names.contains(key) {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Asked { answer: None, end };
        }
        names = ENDED.wait_timeout(names, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    names.insert(key.to_owned());
    drop(names);
    let (tell, answer) = sync_channel(1);
    let name = Name(key.to_owned());
    let work = move || {
        let found = question();
        drop(name);
        // Nobody waits any more where it took too long.
        let _ = tell.send(found);
    };
    match std::thread::Builder::new().name("cbd-question".to_owned()).spawn(work) {
        Ok(_) => Asked { answer: Some(answer), end },
        Err(_) => Asked { answer: None, end },
    }
}

impl<T> Asked<T> {
    /// The answer; none where there was none in time.
    pub fn answer(self) -> Option<T> {
        self.answer?.recv_timeout(self.end.saturating_duration_since(Instant::now())).ok()
    }
}

/// The key of a question that is under way, until this is dropped.
struct Name(String);

impl Drop for Name {
    fn drop(&mut self) {
        under_way().remove(&self.0);
        ENDED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_question_that_is_not_answered_is_asked_once_and_again_when_it_was() {
        static SILENT: Mutex<()> = Mutex::new(());
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let question = || {
            ASKED.fetch_add(1, Ordering::SeqCst);
            drop(SILENT.lock());
            7
        };
        let silence = SILENT.lock();
        for _ in 0..3 {
            assert_eq!(ask("silent", Duration::from_millis(20), question).answer(), None);
        }
        assert_eq!(ASKED.load(Ordering::SeqCst), 1);
        assert_eq!(ask("another", Duration::from_secs(30), || 8).answer(), Some(8));
        drop(silence);
        assert_eq!(ask("silent", Duration::from_secs(30), question).answer(), Some(7));
    }
}
