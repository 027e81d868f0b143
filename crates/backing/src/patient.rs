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

/// A question and its key.
pub(crate) type Question<T> = (String, Box<dyn FnOnce() -> T + Send>);

/// A question, or the answer that comes to it.
enum Asked<T> {
    NotYet(Question<T>),
    Answer(Receiver<T>),
    /// No thread could be started for it.
    Never,
}

/// Asks one question; the answer counts if it comes within `limit`.
pub(crate) fn ask<T: Send + 'static>(
    key: &str,
    limit: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    ask_all(limit, vec![(key.to_owned(), Box::new(question))]).pop().flatten()
}

/// Asks all questions at once; the answers that come within `limit`, which they have together, in the order of the questions. A question
/// with the key of one that is under way is asked when that has ended.
pub(crate) fn ask_all<T: Send + 'static>(limit: Duration, questions: Vec<Question<T>>) -> Vec<Option<T>> {
    let end = Instant::now() + limit;
    let mut asked: Vec<Asked<T>> = questions.into_iter().map(Asked::NotYet).collect();
    let mut names = under_way();
    loop {
        for one in &mut asked {
            if matches!(one, Asked::NotYet((key, _)) if !names.contains(key)) {
                *one = begin(std::mem::replace(one, Asked::Never), &mut names);
            }
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || !asked.iter().any(|one| matches!(one, Asked::NotYet(_))) {
            break;
        }
        names = ENDED.wait_timeout(names, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    drop(names);
    let answer = |one| match one {
        Asked::Answer(answer) => answer.recv_timeout(end.saturating_duration_since(Instant::now())).ok(),
        Asked::NotYet(_) | Asked::Never => None,
    };
    asked.into_iter().map(answer).collect()
}

/// Asks on a thread of its own.
fn begin<T: Send + 'static>(asked: Asked<T>, names: &mut BTreeSet<String>) -> Asked<T> {
    let Asked::NotYet((key, question)) = asked else { return asked };
    let (tell, answer) = sync_channel(1);
    names.insert(key.clone());
    let of = key.clone();
    let work = move || {
        // Made here: where no thread can be started it is not dropped while the names are locked.
        let name = Name(of);
        let found = question();
        drop(name);
        // Nobody waits any more where it took too long.
        let _ = tell.send(found);
    };
    if std::thread::Builder::new().name("cbd-question".to_owned()).spawn(work).is_ok() {
        return Asked::Answer(answer);
    }
    names.remove(&key);
    Asked::Never
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
            assert_eq!(ask("silent", Duration::from_millis(20), question), None);
        }
        assert_eq!(ASKED.load(Ordering::SeqCst), 1);
        assert_eq!(ask("another", Duration::from_secs(30), || 8), Some(8));
        drop(silence);
        assert_eq!(ask("silent", Duration::from_secs(30), question), Some(7));
    }

    #[test]
    fn questions_that_are_not_answered_share_their_time_and_take_none_of_the_others() {
        static SILENT: Mutex<()> = Mutex::new(());
        let silence = SILENT.lock();
        let question = |number: u32, hangs: bool| -> Question<u32> {
            let work = move || {
                drop(hangs.then(|| SILENT.lock()));
                number
            };
            (format!("shared {number}"), Box::new(work))
        };
        let all = || (0..8).map(|number| question(number, number != 7)).collect();
        let begun = Instant::now();
        for _ in 0..3 {
            let answers = ask_all(Duration::from_secs(2), all());
            assert_eq!(answers.iter().flatten().collect::<Vec<_>>(), [&7]);
        }
        // Each for itself they would have taken 2 s times 7 times 3.
        assert!(begun.elapsed() < Duration::from_secs(21), "{:?}", begun.elapsed());
        drop(silence);
    }
}
