//! Shared by the tests of this crate: a sandbox with a timeout, and devices to export.
//!
//! A test that mounts runs in a process and a mount namespace of its own, so nothing of it is left when the
//! process ends. A watchdog in that process aborts its FUSE connections after a timeout, since a process that
//! waits for its own file system cannot be killed before; the parent kills it after that.
#![allow(dead_code, missing_docs)]

pub mod session;

use cbd_export::{BlockDevice, RequestQueue};
use cbd_fuse::{FuseLoop, Options};
use cbd_types::{Completion, Error, ErrorKind, Geometry, Operation, Request, Result};
use std::collections::VecDeque;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, mpsc};
use std::time::{Duration, Instant};

const CHILD_VARIABLE: &str = "CBD_FUSE_TEST_INSIDE";
/// Shows that the test was found in its process.
const RAN_FILE: &str = "ran";
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time within which an awaited state must be reached.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Runs `body` in a process and a mount namespace of its own, with a directory that is removed afterwards.
pub fn in_sandbox(test: &str, body: impl FnOnce(&Path)) {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        println!("not run: {test} mounts file systems; set CBD_SYSTEM_TESTS=1 (as root) to run it");
        return;
    }
    if let Some(dir) = std::env::var_os(CHILD_VARIABLE) {
        let dir = PathBuf::from(dir);
        std::fs::write(dir.join(RAN_FILE), "").expect("a file");
        watch(&dir);
        body(&dir);
        return;
    }
    // One after the other: a loop device that one test releases must not be reused by the next one while the
    // first still checks it.
    let _alone = cbd_testkit::loop_devices::alone();
    run_again(test);
}

fn run_again(test: &str) {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let mut child = start_again(test, dir.path());
    let end = Instant::now() + TIMEOUT + Duration::from_secs(10);
    let status = loop {
        match child.try_wait().expect("the test's process") {
            Some(status) => break status,
            None if Instant::now() > end => {
                let _ = child.kill();
                panic!("{test} took too long and was killed");
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success(), "{test} failed in its process: {status}");
    // A process without a test of that name succeeds, too.
    assert!(dir.path().join(RAN_FILE).exists(), "there is no test of the name {test}: it was not run");
}

/// Runs the given test of this binary in a child process and a namespace of its own; the child dies with this
/// process.
fn start_again(test: &str, dir: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["--exact", test, "--nocapture"]).env(CHILD_VARIABLE, dir).stdin(Stdio::null());
    // SAFETY: between fork and exec only system calls are made, no memory is allocated.
    unsafe {
        command.pre_exec(|| {
            let none = c"none".as_ptr();
            let flags = libc::MS_REC | libc::MS_PRIVATE;
            let done = libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0
                && libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(none, c"/".as_ptr(), none, flags, std::ptr::null()) == 0;
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    command.spawn().expect("the test's process")
}

/// Runs a test of this binary as a daemon that will be killed, in this namespace.
pub fn start_daemon(test: &str, dir: &Path) -> Child {
    Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", test, "--nocapture"])
        .env("CBD_FUSE_TEST_DAEMON", dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a daemon")
}

/// The directory of a daemon, in its process.
pub fn daemon_dir() -> Option<PathBuf> {
    std::env::var_os("CBD_FUSE_TEST_DAEMON").map(PathBuf::from)
}

fn watch(dir: &Path) {
    let dir = dir.to_owned();
    std::thread::spawn(move || {
        std::thread::sleep(TIMEOUT);
        eprintln!(
            "the test takes too long; its FUSE connections are aborted: {:?}",
            cbd_fuse::abort_connections(&dir)
        );
        std::process::abort();
    });
}

/// A device in memory.
pub struct TestDevice {
    pub geometry: Geometry,
    pub bytes: RwLock<Vec<u8>>,
    /// How long each request is parked; zero: not at all.
    pub delay: Duration,
    /// Whether requests are parked, even without a delay.
    pub parks: bool,
    /// With `parks`: requests before this offset are not parked.
    pub parks_from: u64,
    /// Parked requests wait until this is false.
    pub stuck: AtomicBool,
    /// Requests that were submitted.
    pub submitted: AtomicU64,
    pub flushes: AtomicU64,
    pub discards: AtomicU64,
    pub zeroings: AtomicU64,
    pub fua_writes: AtomicU64,
    /// Lengths of the first writes.
    pub writes: Mutex<Vec<u64>>,
    /// A request at this offset panics.
    pub panics_at: AtomicU64,
    /// Requests beyond this offset fail.
    pub fails_from: AtomicU64,
}

pub const MIB: u64 = 1 << 20;

impl TestDevice {
    pub fn new(size: u64, sector: u32) -> Self {
        let geometry = Geometry {
            size,
            sector,
            physical_sector: 4096,
            atomic_unit: 1 << 20,
            discard: true,
            discard_granularity: sector,
            rotational: false,
            fast_zeroes: true,
        };
        Self {
            geometry,
            bytes: RwLock::new(vec![0; size as usize]),
            delay: Duration::ZERO,
            parks: false,
            parks_from: 0,
            submitted: AtomicU64::new(0),
            stuck: AtomicBool::new(false),
            flushes: AtomicU64::new(0),
            discards: AtomicU64::new(0),
            zeroings: AtomicU64::new(0),
            fua_writes: AtomicU64::new(0),
            writes: Mutex::new(Vec::new()),
            panics_at: AtomicU64::new(u64::MAX),
            fails_from: AtomicU64::new(u64::MAX),
        }
    }

    fn run(&self, request: Request) -> Completion {
        let Request { id, operation, range, fua, mut buffer, .. } = request;
        let bytes = range.start as usize..range.end as usize;
        assert_ne!(range.start, self.panics_at.load(Ordering::Relaxed), "this request panics in the test");
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        if range.end > self.fails_from.load(Ordering::Relaxed) {
            let result = Err(Error::new(ErrorKind::Media, "this request fails in the test"));
            return Completion { id, result, buffer };
        }
        if fua {
            count(&self.fua_writes);
        }
        match operation {
            Operation::Read => buffer.copy_from_slice(&self.bytes.read().unwrap()[bytes]),
            Operation::Write => {
                let mut writes = self.writes.lock().unwrap();
                if writes.len() < 16 {
                    writes.push(buffer.len() as u64);
                }
                drop(writes);
                self.bytes.write().unwrap()[bytes].copy_from_slice(&buffer);
            }
            Operation::Flush => {
                count(&self.flushes);
            }
            Operation::Discard | Operation::WriteZeroes => {
                count(if operation == Operation::Discard { &self.discards } else { &self.zeroings });
                self.bytes.write().unwrap()[bytes].fill(0);
            }
        }
        Completion { id, result: Ok(()), buffer }
    }
}

/// The device as exports see it.
pub struct Exported(pub Arc<TestDevice>);

impl BlockDevice for Exported {
    fn geometry(&self) -> Geometry {
        self.0.geometry
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let (reader, writer) = std::io::pipe().unwrap();
        let device = Arc::clone(&self.0);
        let (sender, receiver) = mpsc::channel();
        let parked = Arc::new(Mutex::new(VecDeque::new()));
        let parks = device.parks || !device.delay.is_zero();
        if parks {
            let (device, parked) = (Arc::clone(&device), Arc::clone(&parked));
            std::thread::spawn(move || serve_parked(&device, &parked, writer, &receiver));
        }
        Ok(Box::new(TestQueue { device, parks, sender, parked, reader, count: 0, plugged: Vec::new() }))
    }
}

/// Completes the parked requests, each after the delay, the newest one first.
fn serve_parked(
    device: &TestDevice,
    parked: &Mutex<VecDeque<Completion>>,
    mut wake: PipeWriter,
    requests: &mpsc::Receiver<Request>,
) {
    while let Ok(first) = requests.recv() {
        std::thread::sleep(device.delay);
        while device.stuck.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut batch = vec![first];
        batch.extend(requests.try_iter());
        for request in batch.into_iter().rev() {
            parked.lock().unwrap().push_back(device.run(request));
        }
        if wake.write_all(&[1]).is_err() {
            return;
        }
    }
}

struct TestQueue {
    device: Arc<TestDevice>,
    parks: bool,
    sender: mpsc::Sender<Request>,
    parked: Arc<Mutex<VecDeque<Completion>>>,
    reader: PipeReader,
    count: usize,
    /// Completed, and held back until the unplug.
    plugged: Vec<Completion>,
}

impl RequestQueue for TestQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.submit_plugged(request, done);
        self.unplug(done);
    }

    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        if request.operation != Operation::Write {
            self.unplug(done);
        }
        self.device.submitted.fetch_add(1, Ordering::Relaxed);
        if self.parks && request.range.start >= self.device.parks_from {
            self.count += 1;
            self.sender.send(request).unwrap();
        } else {
            self.plugged.push(self.device.run(request));
        }
    }

    fn unplug(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.plugged);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.unplug(done);
        let mut wakes = [0; 1];
        let _ = self.reader.read(&mut wakes);
        let mut parked = self.parked.lock().unwrap();
        self.count -= parked.len();
        done.extend(parked.drain(..));
    }

    fn parked(&self) -> usize {
        self.count + self.plugged.len()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        if self.parks { vec![self.reader.as_raw_fd()] } else { Vec::new() }
    }
}

pub fn options(dir: &Path, queues: usize) -> Options {
    Options {
        name: "cbd7".into(),
        mount_dir: dir.join("fuse/cbd7"),
        link: Some(dir.join("cbd7")),
        queues,
        thread_setup: None,
        read_only: false,
        store: None,
    }
}

pub fn start(device: &Arc<TestDevice>, dir: &Path) -> FuseLoop {
    start_with(device, options(dir, 2))
}

pub fn start_with(device: &Arc<TestDevice>, options: Options) -> FuseLoop {
    FuseLoop::start(Arc::new(Exported(Arc::clone(device))), options).expect("a device")
}

/// Waits until `reached`.
pub fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !reached() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a system tool and asserts its success.
pub fn tool(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(name).args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| panic!("{name} is needed for this test: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{name} {arguments:?}: {}\n{}\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}
