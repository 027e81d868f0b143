//! Helpers of the tests of backing devices: files, loop devices that are removed automatically, and time limits.
#![allow(dead_code, unsafe_code, missing_docs)]

mod forbid;

use cbd_backing::{Backing, BackingFile, Engine, Options, PollableQueue, after_predecessor};
use cbd_types::backing::BackingDone;
use cbd_types::{AlignedBuffer, BackingOp, ByteRange, Expected, OpToken};
#[allow(unused_imports)]
pub use forbid::forbid;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// Runs `test` in a separate thread; fails if it takes longer than a minute.
pub fn in_time(test: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        // The receiver is dropped only when the test has failed.
        let _ = sender.send(());
    });
    match receiver.recv_timeout(Duration::from_secs(60)) {
        Ok(()) => thread.join().expect("the test passed"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Ok(()) => unreachable!("a test that ends well sends"),
            Err(panic) => std::panic::resume_unwind(panic),
        },
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test hangs"),
    }
}

/// A directory on a disk that supports direct I/O.
pub fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("cbd-backing-").tempdir().expect("a directory")
}

pub fn file(directory: &Path, name: &str, size: u64) -> PathBuf {
    let path = directory.join(name);
    File::create(&path).and_then(|file| file.set_len(size)).expect("a file");
    path
}

pub fn open(path: &Path) -> BackingFile {
    BackingFile::open(path, Options::default()).expect("free to be opened")
}

/// Opens a device that was closed a moment ago. A child process that a concurrent test is starting has a copy of every
/// descriptor, and with it the claim of a block device, so this waits.
pub fn open_again(path: &Path) -> BackingFile {
    after_predecessor(Duration::from_secs(20), || BackingFile::open(path, Options::default()))
        .expect("free to be opened")
}

pub fn open_synchronous(path: &Path) -> BackingFile {
    let options = Options { engine: Engine::Synchronous, ..Options::default() };
    BackingFile::open(path, options).expect("free to be opened")
}

pub fn write(offset: u64, bytes: &[u8]) -> BackingOp {
    BackingOp::Write { offset, buffer: AlignedBuffer::from_slice(bytes) }
}

pub fn read(offset: u64, length: usize) -> BackingOp {
    BackingOp::Read { offset, buffer: AlignedBuffer::zeroed(length) }
}

pub fn zero(start: u64, length: u64) -> BackingOp {
    BackingOp::WriteZeroes { range: ByteRange::at(start, length) }
}

pub fn discard(start: u64, length: u64) -> BackingOp {
    BackingOp::Discard { range: ByteRange::at(start, length) }
}

pub fn verify(start: u64, length: u64) -> BackingOp {
    BackingOp::Verify { range: ByteRange::at(start, length) }
}

pub fn compare(start: u64, bytes: &[u8]) -> BackingOp {
    let expected = Expected::Bytes(AlignedBuffer::from_slice(bytes));
    BackingOp::Compare { range: ByteRange::at(start, bytes.len() as u64), expected }
}

pub fn is_zero(start: u64, length: u64) -> BackingOp {
    BackingOp::Compare { range: ByteRange::at(start, length), expected: Expected::Zeroes }
}

/// Runs one operation to its end.
pub fn run(queue: &mut dyn PollableQueue, op: BackingOp) -> BackingDone {
    queue.submit(OpToken(4711), op);
    let mut done = Vec::new();
    queue.wait(&mut done);
    assert_eq!(done.len(), 1);
    let one = done.remove(0);
    assert_eq!(one.token, OpToken(4711));
    one
}

/// Runs one operation that must succeed, and returns the data that it read.
pub fn run_ok(queue: &mut dyn PollableQueue, op: BackingOp) -> AlignedBuffer {
    let done = run(queue, op);
    done.result.expect("done");
    match done.op {
        BackingOp::Read { buffer, .. } => buffer,
        _ => AlignedBuffer::default(),
    }
}

pub fn queue(backing: &dyn Backing, depth: usize) -> Box<dyn PollableQueue> {
    backing.open_queue(depth).expect("a queue")
}

/// Whether a descriptor is readable within some milliseconds.
pub fn readable(descriptor: RawFd, milliseconds: i32) -> bool {
    let mut entry = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: the call gets one entry and the number one.
    unsafe { libc::poll(&raw mut entry, 1, milliseconds) > 0 }
}

pub fn is_root() -> bool {
    // SAFETY: the call takes no argument and cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        eprintln!("not run: the test needs root");
    }
    root
}

/// Gives the calling thread a mount namespace of its own, which ends with the thread.
pub fn own_mounts() {
    // SAFETY: the call takes a number, and affects this thread only.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNS) }, 0, "a mount namespace");
    let none = std::ptr::null();
    // SAFETY: the strings are C strings; the null arguments are allowed for a change of propagation.
    let result =
        unsafe { libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) };
    assert_eq!(result, 0, "private mounts");
}

/// Mounts a tmpfs of `size` bytes for the calling thread, which has its own mount namespace.
pub fn mount_tmpfs(at: &Path, size: u64) {
    let at = std::ffi::CString::new(at.to_str().expect("a name")).expect("a name");
    let options = std::ffi::CString::new(format!("size={size}")).expect("an option");
    let tmpfs = c"tmpfs".as_ptr();
    // SAFETY: all arguments are C strings that outlive the call.
    let result = unsafe { libc::mount(tmpfs, at.as_ptr(), tmpfs, 0, options.as_ptr().cast()) };
    assert_eq!(result, 0, "a tmpfs");
}

/// Mounts the ext4 file system of a block device read-only, for the calling thread, which has its own mount namespace.
pub fn mount_read_only(device: &Path, at: &Path) {
    let text = |path: &Path| std::ffi::CString::new(path.to_str().expect("a name")).expect("a name");
    let (device, at) = (text(device), text(at));
    // SAFETY: all arguments are C strings that outlive the call, or null, which is allowed here.
    let result = unsafe {
        libc::mount(device.as_ptr(), at.as_ptr(), c"ext4".as_ptr(), libc::MS_RDONLY, std::ptr::null())
    };
    assert_eq!(result, 0, "a mount: {}", std::io::Error::last_os_error());
}

/// Ends a mount of the calling thread.
pub fn unmount(at: &Path) {
    let at = std::ffi::CString::new(at.to_str().expect("a name")).expect("a name");
    // SAFETY: the argument is a C string that outlives the call.
    assert_eq!(unsafe { libc::umount(at.as_ptr()) }, 0, "{}", std::io::Error::last_os_error());
}

/// A loop device that is removed when the last descriptor is closed, so also when the test is killed.
pub struct LoopDevice {
    pub path: PathBuf,
    // Keeps the device attached.
    _descriptor: File,
    _lock: File,
}

impl LoopDevice {
    /// A loop device on `file`, with sectors of `sector` bytes.
    pub fn new(file: &Path, sector: u32, read_only: bool) -> Self {
        Self::on_part(file, sector, read_only, 0..0)
    }

    /// As [`new`](Self::new), on these bytes of `file`; an end of 0 means the end of the file.
    pub fn on_part(file: &Path, sector: u32, read_only: bool, bytes: std::ops::Range<u64>) -> Self {
        #[repr(C)]
        struct Configuration {
            file: u32,
            block_size: u32,
            // struct loop_info64; lo_flags are the upper half of the seventh word.
            info: [u64; 29],
            reserved: [u64; 8],
        }
        const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
        const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
        const READ_ONLY: u64 = 1;
        const AUTOCLEAR: u64 = 4;
        const PARTITIONS: u64 = 8;

        let control =
            OpenOptions::new().read(true).write(true).open("/dev/loop-control").expect("loop devices");
        let backing = OpenOptions::new().read(true).write(!read_only).open(file).expect("the file");
        let lock = cbd_testkit::loop_devices::with_others();
        // Another process may take the free number first.
        for _ in 0..100 {
            // SAFETY: the call takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            assert!(number >= 0, "a free loop device");
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let descriptor = OpenOptions::new().read(true).write(true).open(&path).expect("the loop device");
            let mut configuration = Configuration {
                file: backing.as_raw_fd() as u32,
                block_size: sector,
                info: [0; 29],
                reserved: [0; 8],
            };
            configuration.info[3] = bytes.start;
            configuration.info[4] = bytes.end.saturating_sub(bytes.start);
            configuration.info[6] = (AUTOCLEAR | PARTITIONS | if read_only { READ_ONLY } else { 0 }) << 32;
            // SAFETY: LOOP_CONFIGURE reads a struct loop_config, which has this layout.
            let result =
                unsafe { libc::ioctl(descriptor.as_raw_fd(), LOOP_CONFIGURE, &raw const configuration) };
            if result == 0 {
                return Self { path, _descriptor: descriptor, _lock: lock };
            }
        }
        panic!("no loop device can be configured");
    }
}
