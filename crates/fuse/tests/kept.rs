//! A device that outlives the process that serves it: somebody keeps its descriptors, and the next process goes on.
//!
//! The device is a file, so that each process sees what the others wrote. Processes that are to be killed hold what they are asked
//! for as long as they live, so it is certain that it was in flight; the test's own process keeps their descriptors.
#![allow(missing_docs)]

mod support;

use cbd_export::{BlockDevice, RequestQueue};
use cbd_fuse::{FuseLoop, Keep, KeptState, Options, Remains, StopMode, Swept, Way, abort_connections, sweep};
use cbd_types::{AlignedBuffer, Completion, ErrorKind, Geometry, Operation, Request, Result};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use support::{MIB, Wanted, daemon_dir, in_sandbox_by, options, start_daemon, tool};

const SOON: Duration = Duration::from_secs(10);
const SIZE: u64 = 64 * MIB;
/// What begins from here on is never answered by a process that is to be killed.
const HELD_FROM: u64 = 32 * MIB;
const DOORS: usize = 2;

fn in_sandbox(test: &str, body: impl FnOnce(&Path)) {
    in_sandbox_by(&[Wanted::Door], test, body);
}

/// A device in a file.
struct FileDevice {
    file: Arc<File>,
    size: u64,
    /// Whether what begins from [`HELD_FROM`] on is taken and never done.
    holds: bool,
}

impl FileDevice {
    fn open(dir: &Path, holds: bool) -> Arc<dyn BlockDevice> {
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

struct FileQueue {
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

/// Keeps the descriptors in this process.
#[derive(Default)]
struct Here {
    remains: Mutex<Option<Remains>>,
    /// Whether each was put, or removed.
    log: Mutex<Vec<&'static str>>,
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

fn kept_options(dir: &Path, keep: &Arc<Here>) -> Options {
    Options { keep: Some(Arc::clone(keep) as Arc<dyn Keep>), ..options(dir, DOORS) }
}

fn start_kept(dir: &Path, keep: &Arc<Here>) -> FuseLoop {
    let export = FuseLoop::start(FileDevice::open(dir, false), kept_options(dir, keep)).expect("a device");
    assert!(export.is_kept(), "{:?}", export.unkept());
    export
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "said {line}").and_then(|()| out.flush()).expect("said");
}

/// Not a test of its own: the process that others kill. It says which descriptors it has, and the test takes them.
#[test]
fn process_to_be_killed() {
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
    let waits = std::env::var_os("CBD_FUSE_TEST_ADOPTS").is_some();
    let export = if waits {
        // The descriptors are inherited, and their numbers are in the environment.
        let remains = inherited(&dir);
        let export = FuseLoop::adopt(&device, &kept_options(&dir, &keep), &remains).expect("taken over");
        drop(remains);
        export
    } else {
        let export = FuseLoop::start(device, kept_options(&dir, &keep)).expect("a device");
        let kept = keep.remains.lock().unwrap();
        let remains = kept.as_ref().expect("kept");
        let numbers: Vec<String> = remains.doors.iter().map(|door| door.as_raw_fd().to_string()).collect();
        let KeptState { connection, loop_number, .. } = remains.state;
        say(&format!("kept {connection} {loop_number} {}", numbers.join(" ")));
        drop(kept);
        export
    };
    std::thread::sleep(Duration::from_secs(50));
    drop(export);
}

fn inherited(dir: &Path) -> Remains {
    let text = std::env::var("CBD_FUSE_TEST_ADOPTS").expect("numbers");
    let mut numbers = text.split(' ').map(|number| number.parse::<u32>().expect("a number"));
    let (connection, loop_number) = (numbers.next().expect("one"), numbers.next().expect("one"));
    // SAFETY: the test's process has left them open for this one, and nobody else here knows of them.
    let doors = numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number.cast_signed()) });
    Remains::new(state(dir, connection, loop_number), doors.collect()).expect("what was kept")
}

fn state(dir: &Path, connection: u32, loop_number: u32) -> KeptState {
    KeptState {
        name: "cbd7".into(),
        mount_dir: dir.join("fuse/cbd7"),
        link: Some(dir.join("cbd7")),
        connection,
        loop_number,
        size: SIZE,
        sector: 512,
        read_only: false,
    }
}

/// A process that is to be killed, and what it says.
struct Victim {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Victim {
    fn of(mut child: Child) -> Self {
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        Self { child, lines }
    }

    /// The next line that begins with `word`, without it.
    fn said(&mut self, word: &str) -> String {
        let found = self.lines.by_ref().map_while(std::result::Result::ok).find_map(|line| {
            let said = line.split_once("said ")?.1.to_owned();
            said.strip_prefix(word).map(|rest| rest.trim().to_owned())
        });
        found.unwrap_or_else(|| panic!("it ended and never said {word}"))
    }

    fn kill(mut self) {
        let began = Instant::now();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        assert!(began.elapsed() < SOON, "it took {:?} to die", began.elapsed());
    }

    /// Takes a copy of what it has to keep.
    fn remains(&mut self, dir: &Path) -> Remains {
        let line = self.said("kept");
        let mut numbers = line.split(' ').map(|number| number.parse::<u32>().expect("a number"));
        let (connection, loop_number) = (numbers.next().expect("one"), numbers.next().expect("one"));
        let process = self.child.id();
        let doors = numbers.map(|number| descriptor_of(process, number)).collect();
        Remains::new(state(dir, connection, loop_number), doors).expect("what was kept")
    }
}

/// A copy of a descriptor of another process.
fn descriptor_of(process: u32, number: u32) -> OwnedFd {
    // SAFETY: takes no pointer; the result is a new descriptor, or an error.
    let process = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    assert!(process >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new and nobody else's.
    let process = unsafe { OwnedFd::from_raw_fd(process as RawFd) };
    // SAFETY: as above.
    let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
    assert!(copy >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: as above.
    unsafe { OwnedFd::from_raw_fd(copy as RawFd) }
}

/// Writes a block of `value` past every page cache.
fn write_block(path: &Path, at: u64, value: u8) -> JoinHandle<std::io::Result<()>> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path)?;
        let mut buffer = AlignedBuffer::zeroed(4096);
        buffer.fill(value);
        file.write_all_at(&buffer, at)
    })
}

fn read_block(path: &Path, at: u64) -> JoinHandle<std::io::Result<u8>> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
        let mut buffer = AlignedBuffer::zeroed(4096);
        file.read_exact_at(&mut buffer, at)?;
        assert!(buffer.iter().all(|&byte| byte == buffer[0]));
        Ok(buffer[0])
    })
}

fn on_disk(dir: &Path, at: u64) -> u8 {
    let mut byte = [0];
    File::open(dir.join("disk")).unwrap().read_exact_at(&mut byte, at).unwrap();
    byte[0]
}

fn in_time<T>(thread: JoinHandle<T>) -> T {
    let end = Instant::now() + SOON;
    while !thread.is_finished() {
        assert!(Instant::now() < end, "somebody still waits");
        std::thread::sleep(Duration::from_millis(5));
    }
    thread.join().unwrap()
}

fn loop_setting(remains: &KeptState, name: &str) -> String {
    let path = format!("/sys/block/loop{}/loop/{name}", remains.loop_number);
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn state_of(keep: &Here) -> KeptState {
    keep.remains.lock().unwrap().as_ref().expect("kept").state.clone()
}

fn mounts() -> String {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap()
}

#[test]
fn what_was_in_flight_when_the_process_was_killed_is_done_by_the_next() {
    in_sandbox("what_was_in_flight_when_the_process_was_killed_is_done_by_the_next", |dir| {
        let mut victim = Victim::of(start_daemon("process_to_be_killed", dir));
        let remains = victim.remains(dir);
        let link = dir.join("cbd7");
        let device = std::fs::read_link(&link).unwrap();
        in_time(write_block(&device, 0, 1)).unwrap();
        File::options()
            .write(true)
            .open(dir.join("disk"))
            .unwrap()
            .write_all_at(&[9; 4096], SIZE - 4096)
            .unwrap();
        let writes: Vec<_> =
            (0..8).map(|number| write_block(&device, HELD_FROM + number * 4096, 10 + number as u8)).collect();
        let read = read_block(&device, SIZE - 4096);
        for _ in 0..9 {
            victim.said("held");
        }
        victim.kill();
        assert!(writes.iter().all(|write| !write.is_finished()) && !read.is_finished());
        assert_eq!(on_disk(dir, HELD_FROM), 0);

        let keep = Arc::new(Here::default());
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        drop(remains);
        writes.into_iter().for_each(|write| in_time(write).unwrap());
        assert_eq!(in_time(read).unwrap(), 9);
        for number in 0..8 {
            assert_eq!(on_disk(dir, HELD_FROM + number * 4096), 10 + number as u8);
        }
        assert!(export.is_taken_over() && export.is_kept());
        assert_eq!(std::fs::read_link(&link).unwrap(), device);
        in_time(write_block(&device, 4096, 2)).unwrap();
        assert_eq!(in_time(read_block(&device, 0)).unwrap(), 1);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
        assert!(!mounts().contains("fuse.cbd"));
        assert!(std::fs::symlink_metadata(&link).is_err());
        assert_eq!(*keep.log.lock().unwrap(), ["removed"]);
    });
}

#[test]
fn a_request_that_was_sent_again_is_sent_again_to_the_one_after() {
    in_sandbox("a_request_that_was_sent_again_is_sent_again_to_the_one_after", |dir| {
        let mut victim = Victim::of(start_daemon("process_to_be_killed", dir));
        let remains = victim.remains(dir);
        let device = std::fs::read_link(dir.join("cbd7")).unwrap();
        let write = write_block(&device, HELD_FROM, 5);
        victim.said("held");
        victim.kill();
        for _ in 0..2 {
            let mut victim = Victim::of(start_heir(dir, &remains));
            assert_eq!(victim.said("held"), format!("{} at {HELD_FROM}", Operation::Write as u32));
            victim.kill();
            assert!(!write.is_finished());
        }
        let keep = Arc::new(Here::default());
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        in_time(write).unwrap();
        assert_eq!(on_disk(dir, HELD_FROM), 5);
        drop(remains);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

/// Starts a process that takes the device over, and holds what comes again.
fn start_heir(dir: &Path, remains: &Remains) -> Child {
    // SAFETY: takes no pointer; the copies stay open over an exec, and are closed when the process has started.
    let copies: Vec<OwnedFd> = remains
        .doors
        .iter()
        .map(|door| unsafe { OwnedFd::from_raw_fd(libc::fcntl(door.as_raw_fd(), libc::F_DUPFD, 100)) })
        .collect();
    let numbers: Vec<String> = copies.iter().map(|copy| copy.as_raw_fd().to_string()).collect();
    let KeptState { connection, loop_number, .. } = remains.state;
    let text = format!("{connection} {loop_number} {}", numbers.join(" "));
    // SAFETY: of the threads of this process, which wait for a device, none looks at the environment.
    unsafe { std::env::set_var("CBD_FUSE_TEST_ADOPTS", text) };
    start_daemon("process_to_be_killed", dir)
}

#[test]
fn a_device_that_was_left_waits_and_the_next_goes_on_under_an_ext4() {
    in_sandbox("a_device_that_was_left_waits_and_the_next_goes_on_under_an_ext4", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let device = export.device_path().to_str().unwrap().to_owned();
        tool("mkfs.ext4", &["-q", &device]);
        let mount = dir.join("mnt");
        std::fs::create_dir(&mount).unwrap();
        tool("mount", &[&device, mount.to_str().unwrap()]);
        for round in 0..3_u8 {
            std::fs::write(mount.join("before"), [round; 100_000]).unwrap();
            export.leave(SOON).unwrap();
            drop(export);
            let remains = keep.remains.lock().unwrap().as_ref().unwrap().another().unwrap();
            assert!(remains.user().unwrap().expect("used").contains("mounted at"));
            let file = mount.join("meanwhile");
            let write = std::thread::spawn(move || {
                let mut file = File::create(file)?;
                file.write_all(&[round; 300_000])?;
                file.sync_all()
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(!write.is_finished());
            export =
                FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
            in_time(write).unwrap();
            assert!(std::fs::read(mount.join("before")).unwrap() == [round; 100_000]);
        }
        let error = export.stop(StopMode::WhenUnused, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        tool("umount", &[mount.to_str().unwrap()]);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
        assert!(!mounts().contains("fuse.cbd"));
        tool("e2fsck", &["-fn", dir.join("disk").to_str().unwrap()]);
    });
}

#[test]
fn remains_that_nobody_wants_end_with_errors_for_those_who_wait() {
    in_sandbox("remains_that_nobody_wants_end_with_errors_for_those_who_wait", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let (device, state) = (export.loop_path().to_owned(), state_of(&keep));
        let file = File::open(&device).unwrap();
        export.leave(SOON).unwrap();
        drop(export);
        let write = write_block(&device, 0, 1);
        std::thread::sleep(Duration::from_millis(100));
        assert!(!write.is_finished());
        // Another daemon's start leaves it alone, and does not wait for it either.
        let began = Instant::now();
        let swept = sweep(dir, dir, std::slice::from_ref(&state.mount_dir)).unwrap();
        assert_eq!(swept, Swept { alive: vec![state.mount_dir.clone()], ..Swept::default() });
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        let remains = keep.remains.lock().unwrap().take().unwrap();
        assert!(remains.is_usable());
        remains.end();
        assert!(in_time(write).is_err());
        assert!(!mounts().contains("fuse.cbd"));
        assert!(std::fs::symlink_metadata(dir.join("cbd7")).is_err());
        assert!(!dir.join("fuse/cbd7").exists());
        drop(file);
        assert_eq!(loop_setting(&state, "backing_file"), "");
    });
}

#[test]
fn a_kept_device_that_is_stopped_leaves_nothing_and_is_not_kept() {
    in_sandbox("a_kept_device_that_is_stopped_leaves_nothing_and_is_not_kept", |dir| {
        for mode in [StopMode::WhenUnused, StopMode::Force] {
            let keep = Arc::new(Here::default());
            let mut export = start_kept(dir, &keep);
            let state = state_of(&keep);
            export.stop(mode, SOON).unwrap();
            assert_eq!(*keep.log.lock().unwrap(), ["put", "removed"]);
            assert_eq!(loop_setting(&state, "backing_file"), "");
            assert!(!mounts().contains("fuse.cbd"));
            assert!(std::fs::symlink_metadata(dir.join("cbd7")).is_err());
        }
    });
}

#[test]
fn a_stop_by_force_of_a_kept_device_gives_its_users_errors() {
    in_sandbox("a_stop_by_force_of_a_kept_device_gives_its_users_errors", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let state = state_of(&keep);
        let file =
            OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(export.loop_path()).unwrap();
        export.stop(StopMode::Force, SOON).unwrap();
        assert!(file.write_at(&AlignedBuffer::zeroed(4096), 0).is_err());
        assert!(keep.remains.lock().unwrap().is_none());
        drop(file);
        assert_eq!(loop_setting(&state, "backing_file"), "", "it goes with its last user");
    });
}

#[test]
fn a_stop_that_is_refused_leaves_the_device_entrusted_to_the_kernel() {
    in_sandbox("a_stop_that_is_refused_leaves_the_device_entrusted_to_the_kernel", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let state = state_of(&keep);
        let entrusted = || (loop_setting(&state, "autoclear"), loop_setting(&state, "dio"));
        assert_eq!(entrusted(), ("0".into(), "1".into()));
        let file = File::open(export.loop_path()).unwrap();
        for _ in 0..2 {
            let error = export.stop(StopMode::WhenUnused, Duration::from_millis(100)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert_eq!(entrusted(), ("0".into(), "1".into()));
        }
        drop(file);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
        assert_eq!(loop_setting(&state, "backing_file"), "");
    });
}

#[test]
fn dirty_pages_of_a_device_that_nobody_has_open_hold_no_killed_process_up() {
    in_sandbox("dirty_pages_of_a_device_that_nobody_has_open_hold_no_killed_process_up", |dir| {
        let mut victim = Victim::of(start_daemon("process_to_be_killed", dir));
        let remains = victim.remains(dir);
        let device = PathBuf::from(format!("/dev/loop{}", remains.state.loop_number));
        // Its close writes them out, and waits for a process that holds what it takes.
        let close = std::thread::spawn(move || {
            let file = OpenOptions::new().write(true).open(device).unwrap();
            file.write_all_at(&[7; 1 << 20], HELD_FROM).unwrap();
        });
        victim.said("held");
        victim.kill();
        let keep = Arc::new(Here::default());
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        in_time(close);
        assert_eq!(on_disk(dir, HELD_FROM + MIB - 1), 7);
        drop(remains);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn a_device_that_has_become_another_is_not_served_and_its_clients_wait_on() {
    in_sandbox("a_device_that_has_become_another_is_not_served_and_its_clients_wait_on", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let device = export.loop_path().to_owned();
        export.leave(SOON).unwrap();
        drop(export);
        let write = write_block(&device, 0, 3);
        let remains = keep.remains.lock().unwrap().as_ref().unwrap().another().unwrap();
        let file = Arc::new(File::options().read(true).write(true).open(dir.join("disk")).unwrap());
        let other: Arc<dyn BlockDevice> = Arc::new(FileDevice { file, size: SIZE / 2, holds: false });
        let error = FuseLoop::adopt(&other, &kept_options(dir, &keep), &remains).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exchanged, "{error}");
        assert!(error.line().contains("waits for its daemon"), "{error}");
        std::thread::sleep(Duration::from_millis(50));
        assert!(!write.is_finished() && on_disk(dir, 0) == 0);
        let mut export =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        in_time(write).unwrap();
        drop(remains);
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn remains_of_a_loop_device_that_has_another_file_are_not_usable() {
    in_sandbox("remains_of_a_loop_device_that_has_another_file_are_not_usable", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let mut remains = keep.remains.lock().unwrap().as_ref().unwrap().another().unwrap();
        assert!(remains.is_usable());
        let number = std::mem::replace(&mut remains.state.loop_number, 1_048_001);
        assert!(!remains.is_usable());
        let error = FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::NotFound);
        remains.state.loop_number = number;
        export.stop(StopMode::WhenUnused, SOON).unwrap();
        assert!(!remains.is_usable(), "the connection has ended");
    });
}

#[test]
fn what_is_kept_is_served_through_the_device_even_where_io_uring_is_offered() {
    let ways = [Wanted::Ring];
    in_sandbox_by(&ways, "what_is_kept_is_served_through_the_device_even_where_io_uring_is_offered", |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        assert!(
            matches!(export.way(), Way::Door { reason } if reason.contains("outlive")),
            "{}",
            export.way()
        );
        export.stop(StopMode::WhenUnused, SOON).unwrap();
    });
}

#[test]
fn a_loop_device_whose_connection_was_ended_from_outside_is_swept_and_one_that_waits_is_not() {
    let name = "a_loop_device_whose_connection_was_ended_from_outside_is_swept_and_one_that_waits_is_not";
    in_sandbox(name, |dir| {
        let keep = Arc::new(Here::default());
        let mut export = start_kept(dir, &keep);
        let state = state_of(&keep);
        let loop_path = export.loop_path().to_owned();
        export.leave(SOON).unwrap();
        drop(export);
        // Out of sight, as after an unmount by hand, but somebody may serve it yet.
        tool("umount", &["-l", state.mount_dir.to_str().unwrap()]);
        assert_eq!(sweep(dir, dir, &[]).unwrap(), Swept::default());
        assert_ne!(loop_setting(&state, "backing_file"), "");
        *keep.remains.lock().unwrap() = None;
        let swept = sweep(dir, dir, &[]).unwrap();
        assert_eq!(swept.loops, [loop_path]);
        assert_eq!(swept.links, [dir.join("cbd7")]);
        assert_eq!(loop_setting(&state, "backing_file"), "");
        assert_eq!(abort_connections(dir).unwrap(), 0);
    });
}

/// Why a device that is to outlive its process is not served by io_uring: what the kernel has handed to a ring is not sent again, and
/// what comes later goes to the ring that is gone. All of it waits until the connection ends.
#[test]
fn what_came_by_io_uring_cannot_be_taken_over_although_somebody_holds_the_connection() {
    let name = "what_came_by_io_uring_cannot_be_taken_over_although_somebody_holds_the_connection";
    in_sandbox_by(&[Wanted::Ring], name, |dir| {
        // SAFETY: no other thread of this process looks at the environment now.
        unsafe { std::env::set_var("CBD_FUSE_TEST_UNKEPT", "1") };
        let mut victim = Victim::of(start_daemon("process_to_be_killed", dir));
        if victim.said("way") != "true" {
            println!("not run: this kernel has no FUSE over io_uring");
            return;
        }
        let line = victim.said("has");
        let process = victim.child.id();
        let copies: Vec<OwnedFd> =
            line.split(' ').map(|number| descriptor_of(process, number.parse().expect("a number"))).collect();
        assert!(!copies.is_empty());
        let device = std::fs::read_link(dir.join("cbd7")).unwrap();
        // So that the loop device does not go with the process.
        let held = File::open(&device).unwrap();
        let write = write_block(&device, HELD_FROM, 5);
        victim.said("held");
        victim.kill();
        let connection = cbd_export::mounts::at(&dir.join("fuse/cbd7")).unwrap().expect("a mount").device.1;
        let number = device.to_str().unwrap().strip_prefix("/dev/loop").unwrap().parse().unwrap();
        let remains = Remains::new(state(dir, connection, number), copies).unwrap();
        let keep = Arc::new(Here::default());
        let heir =
            FuseLoop::adopt(&FileDevice::open(dir, false), &kept_options(dir, &keep), &remains).unwrap();
        let later = write_block(&device, 0, 5);
        std::thread::sleep(Duration::from_millis(500));
        assert!(!write.is_finished() && !later.is_finished());
        drop((remains, heir));
        assert!(in_time(write).is_err() && in_time(later).is_err());
        drop(held);
    });
}
