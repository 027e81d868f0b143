//! Shared by the tests of a device that outlives the process that serves it.
//!
//! The device is a file, so that each process sees the writes of the others. Processes that will be killed
//! answer none of the requests that they receive, so these are certainly in flight; the test's own process
//! holds their descriptors. Such a process runs a test of the same binary, `process_to_be_killed`, which
//! calls [`be_killed`].

use super::{MIB, Wanted, daemon_dir, in_sandbox_by, options, start_daemon};
use cbd_export::{BlockDevice, RequestQueue};
use cbd_fuse::{FuseLoop, Keep, KeptState, Options, Remains, Way};
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

pub const SOON: Duration = Duration::from_secs(10);
pub const SIZE: u64 = 64 * MIB;
/// Requests from this offset on are never answered by a process that will be killed.
pub const HELD_FROM: u64 = 32 * MIB;
pub const DOORS: usize = 2;

pub fn in_sandbox(test: &str, body: impl FnOnce(&Path)) {
    in_sandbox_by(&[Wanted::Door], test, body);
}

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
pub struct Here {
    pub remains: Mutex<Option<Remains>>,
    /// Each put and removal.
    pub log: Mutex<Vec<&'static str>>,
}

impl Keep for Here {
    fn put(&self, remains: &Remains) -> Result<()> {
        *self.remains.lock().unwrap() = Some(remains.another()?);
        self.log.lock().unwrap().push("put");
        Ok(())
    }

    fn remove(&self) {
        *self.remains.lock().unwrap() = None;
        self.log.lock().unwrap().push("removed");
    }
}

pub fn kept_options(dir: &Path, keep: &Arc<Here>) -> Options {
    Options { keep: Some(Arc::clone(keep) as Arc<dyn Keep>), ..options(dir, DOORS) }
}

pub fn start_kept(dir: &Path, keep: &Arc<Here>) -> FuseLoop {
    let export = FuseLoop::start(FileDevice::open(dir, false), kept_options(dir, keep)).expect("a device");
    assert!(export.is_kept(), "{:?}", export.unkept());
    export
}

pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "said {line}").and_then(|()| out.flush()).expect("said");
}

/// The work of a process that a test kills. It prints its descriptors, and the test takes copies of them.
pub fn be_killed() {
    let Some(dir) = daemon_dir() else { return };
    let keep = Arc::new(Here::default());
    let device = FileDevice::open(&dir, true);
    if std::env::var_os("CBD_FUSE_TEST_UNKEPT").is_some() {
        let export = FuseLoop::start(FileDevice::open(&dir, true), options(&dir, DOORS)).expect("a device");
        say(&format!("way {}", matches!(export.way(), Way::Ring { .. })));
        let is_fuse = |number: &u32| {
            std::fs::read_link(format!("/proc/self/fd/{number}"))
                .is_ok_and(|path| path == Path::new("/dev/fuse"))
        };
        let numbers: Vec<String> = (0..256).filter(is_fuse).map(|number| number.to_string()).collect();
        say(&format!("has {}", numbers.join(" ")));
        std::thread::sleep(Duration::from_secs(50));
    }
    if std::env::var_os("CBD_FUSE_TEST_PUT_HANGS").is_some() {
        let keep: Arc<dyn Keep> = Arc::new(Hanging);
        let _ = FuseLoop::start(device, Options { keep: Some(keep), ..options(&dir, DOORS) });
        return;
    }
    let waits = std::env::var_os("CBD_FUSE_TEST_ADOPTS").is_some();
    let export = if waits {
        // The descriptors are inherited, and their numbers are in the environment.
        let remains = inherited(&dir);
        let export = FuseLoop::adopt(&device, &kept_options(&dir, &keep), &remains).expect("taken over");
        drop(remains);
        export
    } else {
        let export = FuseLoop::start(device, kept_options(&dir, &keep)).expect("a device");
        say_kept(keep.remains.lock().unwrap().as_ref().expect("kept"));
        export
    };
    std::thread::sleep(Duration::from_secs(50));
    drop(export);
}

fn say_kept(remains: &Remains) {
    let numbers: Vec<String> = remains.doors.iter().map(|door| door.as_raw_fd().to_string()).collect();
    let KeptState { connection, loop_number, .. } = remains.state;
    say(&format!("kept {connection} {loop_number} {}", numbers.join(" ")));
}

/// A store that receives the descriptors and never confirms it.
struct Hanging;

impl Keep for Hanging {
    fn put(&self, remains: &Remains) -> Result<()> {
        say_kept(remains);
        std::thread::sleep(Duration::from_secs(50));
        Ok(())
    }

    fn remove(&self) {}
}

pub fn inherited(dir: &Path) -> Remains {
    let text = std::env::var("CBD_FUSE_TEST_ADOPTS").expect("numbers");
    let mut numbers = text.split(' ').map(|number| number.parse::<u32>().expect("a number"));
    let (connection, loop_number) = (numbers.next().expect("one"), numbers.next().expect("one"));
    // SAFETY: the test's process has left them open for this one, and no other code here uses them.
    let doors = numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number.cast_signed()) });
    Remains::new(state(dir, connection, loop_number), doors.collect()).expect("what was kept")
}

pub fn state(dir: &Path, connection: u32, loop_number: u32) -> KeptState {
    KeptState {
        name: "cbd7".into(),
        mount_dir: dir.join("fuse/cbd7"),
        link: Some(dir.join("cbd7")),
        connection,
        loop_number,
        size: SIZE,
        ..KeptState::example()
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
    pub fn said(&mut self, word: &str) -> String {
        let found = self.lines.by_ref().map_while(std::result::Result::ok).find_map(|line| {
            let said = line.split_once("said ")?.1.to_owned();
            said.strip_prefix(word).map(|rest| rest.trim().to_owned())
        });
        found.unwrap_or_else(|| panic!("it ended and never said {word}"))
    }

    pub fn kill(mut self) {
        let began = Instant::now();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        assert!(began.elapsed() < SOON, "it took {:?} to die", began.elapsed());
    }

    /// Copies the descriptors that the process has put into its store.
    pub fn remains(&mut self, dir: &Path) -> Remains {
        let line = self.said("kept");
        let mut numbers = line.split(' ').map(|number| number.parse::<u32>().expect("a number"));
        let (connection, loop_number) = (numbers.next().expect("one"), numbers.next().expect("one"));
        let process = self.child.id();
        let doors = numbers.map(|number| descriptor_of(process, number)).collect();
        Remains::new(state(dir, connection, loop_number), doors).expect("what was kept")
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
    let end = Instant::now() + SOON;
    while !thread.is_finished() {
        assert!(Instant::now() < end, "the thread still waits");
        std::thread::sleep(Duration::from_millis(5));
    }
    thread.join().unwrap()
}

pub fn loop_setting(remains: &KeptState, name: &str) -> String {
    let path = format!("/sys/block/loop{}/loop/{name}", remains.loop_number);
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

pub fn state_of(keep: &Here) -> KeptState {
    keep.remains.lock().unwrap().as_ref().expect("kept").state.clone()
}

/// Requests that the kernel has in flight to the loop device.
pub fn in_flight(state: &KeptState) -> u64 {
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

/// Waits until `reached`.
pub fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !reached() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
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
pub fn start_heir(dir: &Path, remains: &Remains) -> Victim {
    // SAFETY: takes no pointer; the copies stay open over an exec, and are closed when the process has
    // started.
    let copies: Vec<OwnedFd> = remains
        .doors
        .iter()
        .map(|door| unsafe { OwnedFd::from_raw_fd(libc::fcntl(door.as_raw_fd(), libc::F_DUPFD, 100)) })
        .collect();
    let numbers: Vec<String> = copies.iter().map(|copy| copy.as_raw_fd().to_string()).collect();
    let KeptState { connection, loop_number, .. } = remains.state;
    let text = format!("{connection} {loop_number} {}", numbers.join(" "));
    // SAFETY: of the threads of this process, which wait for a device, none accesses the environment.
    unsafe { std::env::set_var("CBD_FUSE_TEST_ADOPTS", text) };
    start_victim(dir)
}
