//! Probes of the files and devices at paths.
//!
//! Invariants: a path on a file system that does not respond delays only the thread that probes it. The process has at
//! most one such thread for each path, however many callers probe it.
//!
//! Elsewhere: opening the file or device; the path must have responded before.

use cbd_types::{AlignedBuffer, Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Timeout of probes by the background thread; the result of a slower probe is used when it arrives.
pub const BACKGROUND_TIMEOUT: Duration = Duration::from_millis(200);
/// Timeout of probes for a command.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(3);

/// Timeout of a start for all regions and disks together; a disk that was spun down takes seconds. The background
/// thread retries those that have not responded by then.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Least timeout of each probe of a start.
const START_TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// The node at a path: device, inode, and for a device node its device number.
pub type Node = Option<(u64, u64, u64)>;

/// Whether two probes found the same file or the same device.
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

/// The node at `path`, after an attempt to open a file or block device there and to read its first bytes: a disk can
/// have a device node and block every open or read.
fn read_node(path: &str) -> Node {
    let found = std::fs::metadata(path).ok()?;
    if found.file_type().is_file() || found.file_type().is_block_device() {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty());
        let opened = opened.or_else(|_| rustix::fs::open(path, flags, Mode::empty()));
        // The start reports the error of a disk that cannot be opened or read.
        let _ = opened.map(|disk| {
            let mut first = AlignedBuffer::zeroed(4096);
            rustix::io::pread(disk, &mut first[..], 0)
        });
    }
    Some((found.dev(), found.ino(), found.rdev()))
}

/// A function that probes one path.
pub type Probe<T> = Box<dyn FnOnce() -> T + Send>;

/// The paths that a thread of this process is probing, each with whether the log names it as not responding.
static UNDER_WAY: Mutex<BTreeMap<String, bool>> = Mutex::new(BTreeMap::new());

/// Whether a thread is probing `path` and the log does not name it as not responding yet; from now on it does.
fn is_first_report(path: &str) -> bool {
    UNDER_WAY.lock().get_mut(path).is_some_and(|is_logged| !std::mem::replace(is_logged, true))
}

/// Interval of attempts to probe a path that another thread is probing.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Marks a path as being probed until it is dropped.
struct Running(String);

impl Running {
    /// None if another thread is probing the path.
    fn begin(path: &str) -> Option<Self> {
        match UNDER_WAY.lock().entry(path.to_owned()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => {
                vacant.insert(false);
                Some(Self(path.to_owned()))
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if UNDER_WAY.lock().remove(&self.0) == Some(true) {
            tracing::info!("{} answers again", self.0);
        }
    }
}

/// Probes paths, each in a thread of its own.
pub struct Probes<T = Node> {
    under_way: BTreeSet<String>,
    sender: Sender<(String, T)>,
    results: Receiver<(String, T)>,
    /// Why the last thread could not be started.
    no_thread: Option<String>,
}

impl<T> Default for Probes<T> {
    fn default() -> Self {
        let (sender, results) = channel();
        Self { under_way: BTreeSet::new(), sender, results, no_thread: None }
    }
}

impl Probes<Node> {
    /// The nodes at these paths; a path that does not respond in time has no entry.
    pub fn nodes(&mut self, paths: BTreeSet<String>, timeout: Duration) -> BTreeMap<String, Node> {
        self.each(paths, timeout, node)
    }

    /// As [`nodes`](Self::nodes), after an attempt to open and read each disk.
    fn reading(&mut self, paths: BTreeSet<String>, timeout: Duration) -> BTreeMap<String, Node> {
        self.each(paths, timeout, read_node)
    }

    fn each(
        &mut self,
        paths: BTreeSet<String>,
        timeout: Duration,
        probe: fn(&str) -> Node,
    ) -> BTreeMap<String, Node> {
        let probe = |path: String| {
            let of = path.clone();
            (path, Box::new(move || probe(&of)) as Probe<Node>)
        };
        self.run(paths.into_iter().map(probe).collect(), timeout)
    }
}

impl<T: Send + 'static> Probes<T> {
    /// Runs probes in parallel, with one timeout for all; a path that does not respond in time has no entry in the
    /// result.
    pub fn run(&mut self, probes: BTreeMap<String, Probe<T>>, timeout: Duration) -> BTreeMap<String, T> {
        let (end, mut seen) = (Instant::now() + timeout, BTreeMap::new());
        self.no_thread = None;
        // A path whose earlier probe has not returned is neither probed again nor waited for.
        let mut waiting: BTreeMap<String, Probe<T>> =
            probes.into_iter().filter(|(path, _)| !self.under_way.contains(path)).collect();
        let asked: Vec<String> = waiting.keys().cloned().collect();
        loop {
            // First all paths that no other thread is probing, so that no path waits for another one.
            for (path, probe) in std::mem::take(&mut waiting) {
                if let Some(probe) = self.begin(&path, probe) {
                    waiting.insert(path, probe);
                }
            }
            let is_open = |path: &String| self.under_way.contains(path) || waiting.contains_key(path);
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !asked.iter().any(is_open) {
                break;
            }
            let limit = if waiting.is_empty() { left } else { left.min(RETRY_INTERVAL) };
            if let Ok((path, found)) = self.results.recv_timeout(limit) {
                self.under_way.remove(&path);
                seen.insert(path, found);
            }
        }
        while let Ok((path, found)) = self.results.try_recv() {
            self.under_way.remove(&path);
            seen.insert(path, found);
        }
        for path in asked.iter().filter(|path| !seen.contains_key(*path)) {
            match self.why_not_begun(path) {
                None if is_first_report(path) => {
                    tracing::warn!("{path} does not answer: it is neither opened nor checked until it does")
                }
                None => {}
                Some(error) => tracing::warn!("no thread can be started to probe {path}: {error}"),
            }
        }
        seen
    }

    /// Starts a probe; returns it if another thread is probing the path, or if no thread can be started.
    fn begin(&mut self, path: &str, probe: Probe<T>) -> Option<Probe<T>> {
        let Some(running) = Running::begin(path) else { return Some(probe) };
        let (sender, of) = (self.sender.clone(), path.to_owned());
        // Shared, so that the probe is not lost if no thread can be started.
        let shared = Arc::new(Mutex::new(Some((probe, running))));
        let taken = Arc::clone(&shared);
        let work = move || {
            let Some((probe, running)) = taken.lock().take() else { return };
            let found = probe();
            drop(running);
            // Without a receiver the daemon is ending.
            let _ = sender.send((of, found));
        };
        match std::thread::Builder::new().name("cbd-probe".to_owned()).spawn(work) {
            Ok(_) => {
                self.under_way.insert(path.to_owned());
                self.no_thread = None;
                return None;
            }
            Err(error) => self.no_thread = Some(error.to_string()),
        }
        let left = shared.lock().take();
        left.map(|(probe, _)| probe)
    }

    /// Why no thread probes `path`, if none could be started.
    fn why_not_begun(&self, path: &str) -> Option<&str> {
        self.no_thread.as_deref().filter(|_| !self.under_way.contains(path))
    }

    /// The error of a path that the last probes did not reach in time: [`ErrorKind::TimedOut`] if the file system does
    /// not respond, [`ErrorKind::System`] if no thread could be started to probe it.
    pub fn no_answer(&self, path: &str) -> Error {
        match self.why_not_begun(path) {
            None => silent(path),
            Some(error) => {
                let text = format!("no thread can be started to probe {path}: {error}");
                Error::new(ErrorKind::System, text)
            }
        }
    }
}

/// The time that is left of [`START_TIMEOUT`].
#[derive(Debug)]
pub struct StartTime(Duration);

impl StartTime {
    /// All of it.
    #[must_use]
    pub const fn new() -> Self {
        Self(START_TIMEOUT)
    }

    /// The nodes at these paths; a disk that cannot be opened and read in time has no entry.
    pub fn reading(&mut self, probes: &mut Probes, paths: BTreeSet<String>) -> BTreeMap<String, Node> {
        let begun = Instant::now();
        let seen = probes.reading(paths, self.0.max(START_TIMEOUT_MIN));
        self.0 = self.0.saturating_sub(begun.elapsed());
        seen
    }

    /// Checks that opening and reading `path` returns in time, with success or an error; the path need not exist.
    ///
    /// # Errors
    /// [`Probes::no_answer`] if it does not respond.
    pub fn answers(&mut self, path: &str) -> Result<()> {
        let mut probes = Probes::default();
        let seen = self.reading(&mut probes, BTreeSet::from([path.to_owned()]));
        if seen.contains_key(path) { Ok(()) } else { Err(probes.no_answer(path)) }
    }
}

/// Runs one probe.
///
/// # Errors
/// [`Probes::no_answer`] if it does not return in time.
pub fn probe_path<T: Send + 'static>(path: &str, probe: Probe<T>) -> Result<T> {
    let mut probes = Probes::default();
    let found = probes.run(BTreeMap::from([(path.to_owned(), probe)]), COMMAND_TIMEOUT).remove(path);
    found.ok_or_else(|| probes.no_answer(path))
}

/// The paths that respond, `path` included; none of them need exist.
///
/// # Errors
/// [`Probes::no_answer`] if `path` does not respond.
pub fn answering(path: &str, others: BTreeSet<String>) -> Result<BTreeSet<String>> {
    Ok(nodes(path, others)?.into_keys().collect())
}

/// The nodes at `path` and at those of `others` that respond.
///
/// # Errors
/// [`Probes::no_answer`] if `path` does not respond.
pub fn nodes(path: &str, mut others: BTreeSet<String>) -> Result<BTreeMap<String, Node>> {
    others.insert(path.to_owned());
    let mut probes = Probes::default();
    let seen = probes.nodes(others, COMMAND_TIMEOUT);
    if seen.contains_key(path) {
        return Ok(seen);
    }
    Err(probes.no_answer(path))
}

/// The error of a path that does not respond.
fn silent(path: &str) -> Error {
    let text =
        format!("{path} is on a file system or a disk that does not answer; repair that, and try again");
    Error::new(ErrorKind::TimedOut, text)
}

/// Checks that `path` responds; it need not exist.
///
/// # Errors
/// [`Probes::no_answer`] if it does not respond.
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
    fn a_path_that_does_not_respond_is_probed_once_and_its_result_is_used_when_it_arrives() {
        static SILENT: parking_lot::RwLock<()> = parking_lot::RwLock::new(());
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let mut probes = Probes::default();
        let both = || {
            let probe = |path: &'static str| {
                let probe = move || {
                    let _answers = (path == "silent").then(|| {
                        ASKED.fetch_add(1, Ordering::SeqCst);
                        SILENT.read()
                    });
                    Some((1_u64, path.len() as u64, 0_u64))
                };
                (path.to_owned(), Box::new(probe) as Probe<Node>)
            };
            BTreeMap::from([probe("silent"), probe("b")])
        };
        let of = |seen: &BTreeMap<String, Node>| seen.keys().cloned().collect::<Vec<_>>();
        let silence = SILENT.write();
        for _ in 0..3 {
            assert_eq!(of(&probes.run(both(), BACKGROUND_TIMEOUT)), ["b"]);
        }
        assert_eq!(ASKED.load(Ordering::SeqCst), 1);
        drop(silence);
        let end = Instant::now() + Duration::from_secs(10);
        while !probes.run(both(), BACKGROUND_TIMEOUT).contains_key("silent") {
            assert!(Instant::now() < end, "{:?}", probes.under_way);
        }
    }

    #[test]
    fn a_path_that_does_not_respond_has_one_thread_however_many_callers_probe_it() {
        static SILENT: parking_lot::RwLock<()> = parking_lot::RwLock::new(());
        static ASKED: AtomicU32 = AtomicU32::new(0);
        let probe = || -> Probe<()> {
            Box::new(|| {
                ASKED.fetch_add(1, Ordering::SeqCst);
                drop(SILENT.read());
            })
        };
        let probes = || BTreeMap::from([("one that hangs".to_owned(), probe())]);
        let silence = SILENT.write();
        for _ in 0..3 {
            assert!(Probes::default().run(probes(), BACKGROUND_TIMEOUT).is_empty());
        }
        assert_eq!(ASKED.load(Ordering::SeqCst), 1);
        drop(silence);
        // The second caller waits for the first probe, then probes again.
        assert_eq!(Probes::default().run(probes(), Duration::from_secs(60)).len(), 1);
        assert_eq!(ASKED.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn the_log_names_a_path_that_does_not_respond_once_and_again_when_it_responds() {
        static SERVER: parking_lot::RwLock<()> = parking_lot::RwLock::new(());
        let path = "a disk whose open hangs";
        let probes = || BTreeMap::from([(path.to_owned(), Box::new(|| drop(SERVER.read())) as Probe<()>)]);
        for _ in 0..2 {
            let hangs = SERVER.write();
            // The probe of a start hangs; those of a retry find it under way.
            let (mut start, mut retry) = (Probes::default(), Probes::default());
            assert!(start.run(probes(), BACKGROUND_TIMEOUT).is_empty());
            assert!(!is_first_report(path), "the start has logged it");
            assert!(retry.run(probes(), BACKGROUND_TIMEOUT).is_empty());
            drop(hangs);
            assert_eq!(retry.run(probes(), Duration::from_secs(60)).len(), 1);
            assert_eq!(UNDER_WAY.lock().get(path), None, "a path that answers is forgotten");
        }
    }
}
