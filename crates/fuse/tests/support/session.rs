//! Shared by the tests of a device that outlives the process that serves it.
//!
//! The device is a file, so that each process sees the writes of the others. Processes that will be killed
//! answer none of the requests that they receive, so these are certainly in flight; the test's own process
//! holds their descriptors. Such a process runs a test of the same binary, `process_to_be_killed`, which
//! calls [`run_until_killed`].

use super::{LIMIT, MIB, daemon_dir, options, start_daemon};
use cbd_export::{BlockDevice, RequestQueue};
use cbd_fuse::{FuseLoop, Options, Session, SessionState, SessionStore};
use cbd_types::{AlignedBuffer, Completion, Geometry, Operation, Request, Result};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, ChildStdout};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const SIZE: u64 = 64 * MIB;
/// Requests from this offset on are never answered by a process that will be killed.
pub const HELD_FROM: u64 = 32 * MIB;
pub const CHANNELS: usize = 2;

/// A device in a file.
pub struct FileDevice {
    pub file: Arc<File>,
    pub size: u64,
    /// Whether requests from [`HELD_FROM`] on are accepted and never completed.
    pub holds: bool,
}

impl FileDevice {
    pub fn open(dir: &Path, holds: bool) -> Arc<dyn BlockDevice> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(dir.join("disk")).expect("the disk");
        if file.metadata().expect("the disk").len() == 0 {
            file.set_len(SIZE).expect("the disk");
        }
        Arc::new(Self { file: Arc::new(file), size: SIZE, holds })
    }
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            sector: 512,
            physical_sector: 4096,
            atomic_unit: 1 << 20,
            discard: true,
            discard_granularity: 4096,
            rotational: false,
            fast_zeroes: true,
        }
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        Ok(Box::new(FileQueue { file: Arc::clone(&self.file), holds: self.holds, held: Vec::new() }))
    }
}

pub struct FileQueue {
    file: Arc<File>,
    holds: bool,
    held: Vec<Request>,
}

impl RequestQueue for FileQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        if self.holds && request.operation != Operation::Flush && request.range.start >= HELD_FROM {
            say(&format!("held {} at {}", request.operation as u32, request.range.start));
            self.held.push(request);
            return;
        }
        let Request { id, operation, range, mut buffer, .. } = request;
        match operation {
            Operation::Read => self.file.read_exact_at(&mut buffer, range.start).expect("read"),
            Operation::Write => self.file.write_all_at(&buffer, range.start).expect("written"),
            Operation::Flush => {}
            Operation::Discard | Operation::WriteZeroes => {
                let zeroes = vec![0; range.len() as usize];
                self.file.write_all_at(&zeroes, range.start).expect("written");
            }
        }
        done.push(Completion { id, result: Ok(()), buffer });
    }

    fn poll(&mut self, _: &mut Vec<Completion>) {}

    fn parked(&self) -> usize {
        self.held.len()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }
}

/// A descriptor store in this process.
#[derive(Default)]
pub struct LocalStore {
    pub session: Mutex<Option<Session>>,
    /// Each put and removal.
    pub log: Mutex<Vec<&'static str>>,
}

impl SessionStore for LocalStore {
    fn put(&self, session: &Session) -> Result<()> {
        *self.session.lock().unwrap() = Some(session.try_clone()?);
        self.log.lock().unwrap().push("put");
        Ok(())
    }

    fn remove(&self) {
        *self.session.lock().unwrap() = None;
        self.log.lock().unwrap().push("removed");
    }
}

pub fn preserved_options(dir: &Path, store: &Arc<LocalStore>) -> Options {
    Options { store: Some(Arc::clone(store) as Arc<dyn SessionStore>), ..options(dir, CHANNELS) }
}

pub fn start_preserved(dir: &Path, store: &Arc<LocalStore>) -> FuseLoop {
    let export =
        FuseLoop::start(FileDevice::open(dir, false), preserved_options(dir, store)).expect("a device");
    assert!(export.is_preserved(), "{:?}", export.not_preserved());
    export
}

pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "said {line}").and_then(|()| out.flush()).expect("said");
}

/// The work of a process that a test kills. It prints its descriptors, and the test takes copies of them.
pub fn run_until_killed() {
    let Some(dir) = daemon_dir() else { return };
    let store = Arc::new(LocalStore::default());
    let device = FileDevice::open(&dir, true);
    if std::env::var_os("CBD_FUSE_TEST_PUT_HANGS").is_some() {
        let store: Arc<dyn SessionStore> = Arc::new(Hanging);
        let _ = FuseLoop::start(device, Options { store: Some(store), ..options(&dir, CHANNELS) });
        return;
    }
    let takes_over = std::env::var_os("CBD_FUSE_TEST_TAKES_OVER").is_some();
    let export = if takes_over {
        // The descriptors are inherited, and their numbers are in the environment.
        let session = inherited(&dir);
        let export =
            FuseLoop::take_over(&device, &preserved_options(&dir, &store), &session).expect("taken over");
        drop(session);
        export
    } else {
        let export = FuseLoop::start(device, preserved_options(&dir, &store)).expect("a device");
        say_stored(store.session.lock().unwrap().as_ref().expect("stored"));
        export
    };
    std::thread::sleep(Duration::from_secs(50));
    drop(export);
}

fn say_stored(session: &Session) {
    let numbers: Vec<String> =
        session.channels.iter().map(|channel| channel.as_raw_fd().to_string()).collect();
    let SessionState { connection, loop_number, .. } = session.state;
    say(&format!("stored {connection} {loop_number} {}", numbers.join(" ")));
}

/// A store that receives the descriptors and never confirms it.
struct Hanging;

impl SessionStore for Hanging {
    fn put(&self, session: &Session) -> Result<()> {
        say_stored(session);
        std::thread::sleep(Duration::from_secs(50));
        Ok(())
    }

    fn remove(&self) {}
}

pub fn inherited(dir: &Path) -> Session {
    let text = std::env::var("CBD_FUSE_TEST_TAKES_OVER").expect("numbers");
    let mut numbers = text.split(' ').map(|number| number.parse::<u32>().expect("a number"));
    let (connection, loop_number) = (numbers.next().expect("one"), numbers.next().expect("one"));
    // SAFETY: the test's process has left them open for this one, and no other code here uses them.
    let channels = numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number.cast_signed()) });
    Session::new(state(dir, connection, loop_number), channels.collect()).expect("a session")
}

pub fn state(dir: &Path, connection: u32, loop_number: u32) -> SessionState {
    SessionState {
        name: "cbd7".into(),
        mount_dir: dir.join("fuse/cbd7"),
        link: Some(dir.join("cbd7")),
        connection,
        loop_number,
        size: SIZE,
        ..SessionState::example()
    }
}

/// A process that will be killed, and its output.
pub struct Victim {
    pub child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Victim {
    pub fn of(mut child: Child) -> Self {
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        Self { child, lines }
    }

    /// The rest of the next line that begins with `word`.
    pub fn line_after(&mut self, word: &str) -> String {
        let found = self.lines.by_ref().map_while(std::result::Result::ok).find_map(|line| {
            let line_after = line.split_once("said ")?.1.to_owned();
            line_after.strip_prefix(word).map(|rest| rest.trim().to_owned())
        });
        found.unwrap_or_else(|| panic!("it ended and never said {word}"))
    }

    pub fn kill(mut self) {
        let began = Instant::now();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        assert!(began.elapsed() < LIMIT, "it took {:?} to die", began.elapsed());
    }

    /// Copies the descriptors that the process has put into its store.
    pub fn session(&mut self, dir: &Path) -> Session {
        let line = self.line_after("stored");
        let mut numbers = line.split(' ').map(|number| number.parse::<u32>().expect("a number"));
        let (connection, loop_number) = (numbers.next().expect("one"), numbers.next().expect("one"));
        let process = self.child.id();
        let channels = numbers.map(|number| descriptor_of(process, number)).collect();
        Session::new(state(dir, connection, loop_number), channels).expect("a session")
    }
}

/// A copy of a descriptor of another process.
pub fn descriptor_of(process: u32, number: u32) -> OwnedFd {
    // SAFETY: takes no pointer; the result is a new descriptor, or an error.
    let process = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    assert!(process >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new and has no other owner.
    let process = unsafe { OwnedFd::from_raw_fd(process as RawFd) };
    // SAFETY: as above.
    let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
    assert!(copy >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: as above.
    unsafe { OwnedFd::from_raw_fd(copy as RawFd) }
}

/// Writes a block of `value` with direct I/O.
pub fn write_block(path: &Path, at: u64, value: u8) -> JoinHandle<std::io::Result<()>> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path)?;
        let mut buffer = AlignedBuffer::zeroed(4096);
        buffer.fill(value);
        file.write_all_at(&buffer, at)
    })
}

pub fn read_block(path: &Path, at: u64) -> JoinHandle<std::io::Result<u8>> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
        let mut buffer = AlignedBuffer::zeroed(4096);
        file.read_exact_at(&mut buffer, at)?;
        assert!(buffer.iter().all(|&byte| byte == buffer[0]));
        Ok(buffer[0])
    })
}

pub fn on_disk(dir: &Path, at: u64) -> u8 {
    let mut byte = [0];
    File::open(dir.join("disk")).unwrap().read_exact_at(&mut byte, at).unwrap();
    byte[0]
}

pub fn in_time<T>(thread: JoinHandle<T>) -> T {
    let end = Instant::now() + LIMIT;
    while !thread.is_finished() {
        assert!(Instant::now() < end, "the thread still waits");
        std::thread::sleep(Duration::from_millis(5));
    }
    thread.join().unwrap()
}

pub fn loop_setting(session: &SessionState, name: &str) -> String {
    let path = format!("/sys/block/loop{}/loop/{name}", session.loop_number);
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

pub fn state_of(store: &LocalStore) -> SessionState {
    store.session.lock().unwrap().as_ref().expect("stored").state.clone()
}

/// Requests that the kernel has in flight to the loop device.
pub fn in_flight(state: &SessionState) -> u64 {
    let text = std::fs::read_to_string(format!("/sys/block/loop{}/inflight", state.loop_number)).unwrap();
    text.split_whitespace().map(|count| count.parse::<u64>().unwrap()).sum()
}

/// Writes a MiB at [`HELD_FROM`] through the page cache, and closes the device: the last closer waits until
/// the pages are written.
pub fn write_and_close(path: &Path) -> JoinHandle<()> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[7; MIB as usize], HELD_FROM).unwrap();
    })
}

/// Whether a FUSE device of CBD is mounted below `dir`.
pub fn is_mounted_below(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().any(|line| line.contains("fuse.cbd") && line.contains(dir.to_str().unwrap()))
}

/// Starts a process that will be killed.
pub fn start_victim(dir: &Path) -> Victim {
    Victim::of(start_daemon("process_to_be_killed", dir))
}

/// Starts a process that takes the device over, and answers none of the resent requests.
pub fn start_successor(dir: &Path, session: &Session) -> Victim {
    // SAFETY: takes no pointer; the copies stay open over an exec, and are closed when the process has
    // started.
    let copies: Vec<OwnedFd> = session
        .channels
        .iter()
        .map(|channel| unsafe { OwnedFd::from_raw_fd(libc::fcntl(channel.as_raw_fd(), libc::F_DUPFD, 100)) })
        .collect();
    let numbers: Vec<String> = copies.iter().map(|copy| copy.as_raw_fd().to_string()).collect();
    let SessionState { connection, loop_number, .. } = session.state;
    let text = format!("{connection} {loop_number} {}", numbers.join(" "));
    // SAFETY: of the threads of this process, which wait for a device, none accesses the environment.
    unsafe { std::env::set_var("CBD_FUSE_TEST_TAKES_OVER", text) };
    start_victim(dir)
}
