//! Looks at what stands at paths.
//!
//! Always true here: a path on a file system that does not answer holds up nobody but the thread that looks there.
//!
//! Left to others: whoever opens what stands there; it is to have answered before.

use cbd_types::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How long a look is waited for that nobody has asked for; one that takes longer counts when it is over.
pub const LOOK: Duration = Duration::from_millis(200);
/// How long a look is waited for that a command needs.
const COMMAND: Duration = Duration::from_secs(3);

/// What stands at a path: device, inode, and of a device its number.
pub type Node = Option<(u64, u64, u64)>;

/// Whether two looks found the same file or the same device.
pub fn is_same(one: Node, other: Node) -> bool {
    match (one, other) {
        // The same device may have several nodes.
        (Some((.., one)), Some((.., other))) if one != 0 || other != 0 => one == other,
        (Some(one), Some(other)) => one == other,
        _ => false,
    }
}

fn node(path: &str) -> Node {
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino(), found.rdev()))
}

/// A look at one thing.
pub type Look<T> = Box<dyn FnOnce() -> T + Send>;

/// Looks at what stands at paths, each in a thread of its own, of which a path has one at most.
pub struct Looks<T = Node> {
    under_way: BTreeSet<String>,
    tell: Sender<(String, T)>,
    told: Receiver<(String, T)>,
}

impl<T> Default for Looks<T> {
    fn default() -> Self {
        let (tell, told) = channel();
        Self { under_way: BTreeSet::new(), tell, told }
    }
}

impl Looks<Node> {
    /// What stands at these paths, as far as the system says so in time.
    pub fn at(&mut self, paths: BTreeSet<String>, patience: Duration) -> BTreeMap<String, Node> {
        let look = |path: String| {
            let of = path.clone();
            (path, Box::new(move || node(&of)) as Look<Node>)
        };
        self.by(paths.into_iter().map(look).collect(), patience)
    }
}

impl<T: Send + 'static> Looks<T> {
    /// What these looks find, each at its path, as far as the system says so in time.
    pub fn by(&mut self, looks: BTreeMap<String, Look<T>>, patience: Duration) -> BTreeMap<String, T> {
        let begun: Vec<String> =
            looks.into_iter().filter_map(|(path, look)| self.begin(&path, look).then_some(path)).collect();
        let (end, mut seen) = (Instant::now() + patience, BTreeMap::new());
        // Not for those that have not answered before.
        while begun.iter().any(|path| self.under_way.contains(path))
            && let Ok((path, found)) = self.told.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            self.under_way.remove(&path);
            seen.insert(path, found);
        }
        for path in begun.iter().filter(|path| self.under_way.contains(*path)) {
            tracing::warn!("{path} does not say what stands there: it is left alone until it does");
        }
        while let Ok((path, found)) = self.told.try_recv() {
            self.under_way.remove(&path);
            seen.insert(path, found);
        }
        seen
    }

    /// Whether a look at the path was begun: one that is under way is enough.
    fn begin(&mut self, path: &str, look: Look<T>) -> bool {
        let (tell, of) = (self.tell.clone(), path.to_owned());
        let work = move || {
            let found = look();
            // Where nobody wants to know any more the daemon ends.
            let _ = tell.send((of, found));
        };
        let begins = !self.under_way.contains(path)
            && std::thread::Builder::new().name("cbd-look".to_owned()).spawn(work).is_ok();
        begins && self.under_way.insert(path.to_owned())
    }
}

/// What a look finds, where it ends in time.
pub fn one<T: Send + 'static>(path: &str, look: Look<T>) -> Option<T> {
    Looks::default().by(BTreeMap::from([(path.to_owned(), look)]), COMMAND).remove(path)
}

/// Which of `others` answer, where `path` does; nothing need stand there.
///
/// # Errors
/// [`ErrorKind::TimedOut`] where `path` does not.
pub fn answering(path: &str, others: BTreeSet<String>) -> Result<BTreeSet<String>> {
    Ok(nodes(path, others)?.into_keys().collect())
}

/// What stands at `path`, and at those of `others` that answer.
///
/// # Errors
/// [`ErrorKind::TimedOut`] where `path` does not answer.
pub fn nodes(path: &str, mut others: BTreeSet<String>) -> Result<BTreeMap<String, Node>> {
    others.insert(path.to_owned());
    let seen = Looks::default().at(others, COMMAND);
    if seen.contains_key(path) {
        return Ok(seen);
    }
    Err(silent(path))
}

/// The error of a path that does not answer.
pub fn silent(path: &str) -> Error {
    let text = format!(
        "{path} is on a file system that does not say what stands there; put that right, and try again"
    );
    Error::new(ErrorKind::TimedOut, text)
}

/// Those of `paths` that answer; nothing need stand there.
pub fn which_answer(paths: BTreeSet<String>) -> BTreeSet<String> {
    Looks::default().at(paths, COMMAND).into_keys().collect()
}

/// That `path` answers; nothing need stand there.
///
/// # Errors
/// [`ErrorKind::TimedOut`] where it does not.
pub fn answers(path: &str) -> Result<()> {
    answering(path, BTreeSet::new()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_device_is_the_same_at_another_node_and_a_file_under_another_name() {
        let (device, its_other_node) = (Some((5, 100, 2049)), Some((6, 7, 2049)));
        assert!(is_same(device, its_other_node) && !is_same(device, Some((5, 100, 2050))));
        let file = Some((5, 100, 0));
        assert!(is_same(file, file) && !is_same(file, Some((5, 101, 0))) && !is_same(file, device));
        assert!(!is_same(None, None) && !is_same(file, None));
    }

    #[test]
    fn a_path_that_does_not_answer_is_looked_at_once_and_counts_when_it_does() {
        static SILENT: parking_lot::RwLock<()> = parking_lot::RwLock::new(());
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let mut looks = Looks::default();
        let both = || {
            let look = |path: &'static str| {
                let look = move || {
                    let _answers = (path == "silent").then(|| {
                        ASKED.fetch_add(1, Ordering::SeqCst);
                        SILENT.read()
                    });
                    Some((1_u64, path.len() as u64, 0_u64))
                };
                (path.to_owned(), Box::new(look) as Look<Node>)
            };
            BTreeMap::from([look("silent"), look("b")])
        };
        let of = |seen: &BTreeMap<String, Node>| seen.keys().cloned().collect::<Vec<_>>();
        let silence = SILENT.write();
        for _ in 0..3 {
            assert_eq!(of(&looks.by(both(), LOOK)), ["b"]);
        }
        assert_eq!(ASKED.load(Ordering::SeqCst), 1);
        drop(silence);
        let end = Instant::now() + Duration::from_secs(10);
        while !looks.by(both(), LOOK).contains_key("silent") {
            assert!(Instant::now() < end, "{:?}", looks.under_way);
        }
    }
}
