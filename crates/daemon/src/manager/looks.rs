//! Looks at what stands at paths.
//!
//! Invariants: a path on a file system that does not answer delays only the thread that looks there. The process has at
//! most one such thread for each path, however often and from wherever it is looked at.
//!
//! Elsewhere: opening the file or device; the path must have answered before.

use cbd_types::{AlignedBuffer, Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// How long a look of the daemon's own may take, in the background; a slower one counts when it is over.
pub const LOOK: Duration = Duration::from_millis(200);
/// How long a look is waited for that a command needs.
pub const COMMAND: Duration = Duration::from_secs(3);

/// How long a start waits for regions and disks that do not answer, together; a disk that was spun down takes seconds. What has not
/// answered by then is tried again in the background.
const START: Duration = Duration::from_secs(10);
/// The least that each look of a start has of that time.
const START_LEAST: Duration = Duration::from_secs(1);

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

/// The same, when a file or a block device that stands there has been opened and its first bytes have been read, or could not be: a
/// disk can have a name and keep whoever opens or reads it waiting.
fn read_node(path: &str) -> Node {
    let found = std::fs::metadata(path).ok()?;
    if found.file_type().is_file() || found.file_type().is_block_device() {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty());
        let opened = opened.or_else(|_| rustix::fs::open(path, flags, Mode::empty()));
        // The start finds out what is wrong with it.
        let _ = opened.map(|disk| {
            let mut first = AlignedBuffer::zeroed(4096);
            rustix::io::pread(disk, &mut first[..], 0)
        });
    }
    Some((found.dev(), found.ino(), found.rdev()))
}

/// A look at one thing.
pub type Look<T> = Box<dyn FnOnce() -> T + Send>;

/// The paths at which a thread of this process looks.
static UNDER_WAY: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// How often it is tried again to look at a path at which another one looks.
const AGAIN: Duration = Duration::from_millis(10);

/// That a thread looks at a path, until this is dropped.
struct Looking(String);

impl Looking {
    /// None where another thread looks there.
    fn begin(path: &str) -> Option<Self> {
        UNDER_WAY.lock().insert(path.to_owned()).then(|| Self(path.to_owned()))
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        UNDER_WAY.lock().remove(&self.0);
    }
}

/// Looks at what stands at paths, each in a thread of its own.
pub struct Looks<T = Node> {
    under_way: BTreeSet<String>,
    tell: Sender<(String, T)>,
    told: Receiver<(String, T)>,
    /// Why the last thread could not be started.
    no_thread: Option<String>,
}

impl<T> Default for Looks<T> {
    fn default() -> Self {
        let (tell, told) = channel();
        Self { under_way: BTreeSet::new(), tell, told, no_thread: None }
    }
}

impl Looks<Node> {
    /// What stands at these paths, as far as the system says so in time.
    pub fn at(&mut self, paths: BTreeSet<String>, timeout: Duration) -> BTreeMap<String, Node> {
        self.each(paths, timeout, node)
    }

    /// The same of disks, as far as they can be opened and read in time.
    fn reading(&mut self, paths: BTreeSet<String>, timeout: Duration) -> BTreeMap<String, Node> {
        self.each(paths, timeout, read_node)
    }

    fn each(
        &mut self,
        paths: BTreeSet<String>,
        timeout: Duration,
        look: fn(&str) -> Node,
    ) -> BTreeMap<String, Node> {
        let look = |path: String| {
            let of = path.clone();
            (path, Box::new(move || look(&of)) as Look<Node>)
        };
        self.by(paths.into_iter().map(look).collect(), timeout)
    }
}

impl<T: Send + 'static> Looks<T> {
    /// What these looks find, each at its path, as far as the system says so in time. They have the time together.
    pub fn by(&mut self, looks: BTreeMap<String, Look<T>>, timeout: Duration) -> BTreeMap<String, T> {
        let (end, mut seen) = (Instant::now() + timeout, BTreeMap::new());
        self.no_thread = None;
        // One that has not answered before is not looked at again, and not waited for.
        let mut waiting: BTreeMap<String, Look<T>> =
            looks.into_iter().filter(|(path, _)| !self.under_way.contains(path)).collect();
        let asked: Vec<String> = waiting.keys().cloned().collect();
        loop {
            // First all paths at which no other thread looks, so that no path waits for another one.
            for (path, look) in std::mem::take(&mut waiting) {
                if let Some(look) = self.begin(&path, look) {
                    waiting.insert(path, look);
                }
            }
            let is_open = |path: &String| self.under_way.contains(path) || waiting.contains_key(path);
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !asked.iter().any(is_open) {
                break;
            }
            let limit = if waiting.is_empty() { left } else { left.min(AGAIN) };
            if let Ok((path, found)) = self.told.recv_timeout(limit) {
                self.under_way.remove(&path);
                seen.insert(path, found);
            }
        }
        while let Ok((path, found)) = self.told.try_recv() {
            self.under_way.remove(&path);
            seen.insert(path, found);
        }
        for path in asked.iter().filter(|path| !seen.contains_key(*path)) {
            match self.why_not_begun(path) {
                None => {
                    tracing::warn!("{path} does not answer: it is not used until it does")
                }
                Some(error) => tracing::warn!("no thread can be started to look at {path}: {error}"),
            }
        }
        seen
    }

    /// Begins a look; returns it if another thread looks there, or no thread can be started.
    fn begin(&mut self, path: &str, look: Look<T>) -> Option<Look<T>> {
        let Some(looking) = Looking::begin(path) else { return Some(look) };
        let (tell, of) = (self.tell.clone(), path.to_owned());
        // Shared, so that it is there yet where no thread can be started.
        let shared = Arc::new(Mutex::new(Some((look, looking))));
        let taken = Arc::clone(&shared);
        let work = move || {
            let Some((look, looking)) = taken.lock().take() else { return };
            let found = look();
            drop(looking);
            // Without a receiver the daemon is ending.
            let _ = tell.send((of, found));
        };
        match std::thread::Builder::new().name("cbd-look".to_owned()).spawn(work) {
            Ok(_) => {
                self.under_way.insert(path.to_owned());
                self.no_thread = None;
                return None;
            }
            Err(error) => self.no_thread = Some(error.to_string()),
        }
        let left = shared.lock().take();
        left.map(|(look, _)| look)
    }

    /// Why no thread looks at `path`, where none could be started.
    fn why_not_begun(&self, path: &str) -> Option<&str> {
        self.no_thread.as_deref().filter(|_| !self.under_way.contains(path))
    }

    /// The error of a path at which the last looks found nothing in time: [`ErrorKind::TimedOut`] where the file system does not
    /// answer, [`ErrorKind::System`] where no thread could be started to look there.
    pub fn no_answer(&self, path: &str) -> Error {
        match self.why_not_begun(path) {
            None => silent(path),
            Some(error) => {
                let text = format!("no thread can be started to look at {path}: {error}");
                Error::new(ErrorKind::System, text)
            }
        }
    }
}

/// The time that is left of [`START`].
#[derive(Debug)]
pub struct StartTime(Duration);

impl StartTime {
    /// All of it.
    #[must_use]
    pub const fn new() -> Self {
        Self(START)
    }

    /// What stands at these paths, as far as it can be opened and read in time.
    pub fn reading(&mut self, looks: &mut Looks, paths: BTreeSet<String>) -> BTreeMap<String, Node> {
        let begun = Instant::now();
        let seen = looks.reading(paths, self.0.max(START_LEAST));
        self.0 = self.0.saturating_sub(begun.elapsed());
        seen
    }

    /// That what stands at `path` can be opened and read, or is refused at once; nothing need stand there.
    ///
    /// # Errors
    /// [`Looks::no_answer`] where it does not answer.
    pub fn answers(&mut self, path: &str) -> Result<()> {
        let mut looks = Looks::default();
        let seen = self.reading(&mut looks, BTreeSet::from([path.to_owned()]));
        if seen.contains_key(path) { Ok(()) } else { Err(looks.no_answer(path)) }
    }
}

/// What a look finds.
///
/// # Errors
/// [`Looks::no_answer`] where it does not end in time.
pub fn one<T: Send + 'static>(path: &str, look: Look<T>) -> Result<T> {
    let mut looks = Looks::default();
    let found = looks.by(BTreeMap::from([(path.to_owned(), look)]), COMMAND).remove(path);
    found.ok_or_else(|| looks.no_answer(path))
}

/// Which of `others` answer, where `path` does; nothing need stand there.
///
/// # Errors
/// [`Looks::no_answer`] where `path` does not.
pub fn answering(path: &str, others: BTreeSet<String>) -> Result<BTreeSet<String>> {
    Ok(nodes(path, others)?.into_keys().collect())
}

/// What stands at `path`, and at those of `others` that answer.
///
/// # Errors
/// [`Looks::no_answer`] where `path` does not answer.
pub fn nodes(path: &str, mut others: BTreeSet<String>) -> Result<BTreeMap<String, Node>> {
    others.insert(path.to_owned());
    let mut looks = Looks::default();
    let seen = looks.at(others, COMMAND);
    if seen.contains_key(path) {
        return Ok(seen);
    }
    Err(looks.no_answer(path))
}

/// The error of a path that does not answer.
fn silent(path: &str) -> Error {
    let text =
        format!("{path} is on a file system or a disk that does not answer; repair that, and try again");
    Error::new(ErrorKind::TimedOut, text)
}

/// That `path` answers; nothing need stand there.
///
/// # Errors
/// [`Looks::no_answer`] where it does not.
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

    #[test]
    fn a_path_that_does_not_answer_has_one_thread_however_many_look_there() {
        static SILENT: parking_lot::RwLock<()> = parking_lot::RwLock::new(());
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let look = || -> Look<()> {
            Box::new(|| {
                ASKED.fetch_add(1, Ordering::SeqCst);
                drop(SILENT.read());
            })
        };
        let looks = || BTreeMap::from([("one that hangs".to_owned(), look())]);
        let silence = SILENT.write();
        for _ in 0..3 {
            assert!(Looks::default().by(looks(), LOOK).is_empty());
        }
        assert_eq!(ASKED.load(Ordering::SeqCst), 1);
        drop(silence);
        // It is waited for, and then looked at again.
        assert_eq!(Looks::default().by(looks(), Duration::from_secs(60)).len(), 1);
        assert_eq!(ASKED.load(Ordering::SeqCst), 2);
    }
}
