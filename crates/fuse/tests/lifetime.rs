//! Start, stop, refusal to stop, force, and the state after a killed daemon.
#![allow(missing_docs)]

mod support;

use cbd_export::{BlockDevice, RequestQueue};
use cbd_fuse::{FuseLoop, StopMode, Swept, abort_connections, sweep};
use cbd_types::{AlignedBuffer, Completion, Error, ErrorKind, Geometry, Operation, Request};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::fd::RawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use support::{
    Exported, LIMIT, MIB, TestDevice, daemon_dir, in_sandbox, options, start, start_daemon, tool, until,
};

fn mounted_ext4(export: &FuseLoop, dir: &Path) -> PathBuf {
    let path = export.device_path().to_str().unwrap().to_owned();
    tool("mkfs.ext4", &["-q", &path]);
    let mount = dir.join("mnt");
    std::fs::create_dir_all(&mount).unwrap();
    tool("mount", &[&path, mount.to_str().unwrap()]);
    mount
}

/// The file of a loop device, if it belongs to these tests: another process may use the device by now.
fn bound_file(loop_path: &Path) -> Option<String> {
    let name = loop_path.file_name().unwrap().to_string_lossy().into_owned();
    let file = std::fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok();
    file.filter(|file| file.trim_end().ends_with("/cbd7"))
}

/// The FUSE devices of CBD that are mounted below `dir`.
fn mounted_below(dir: &Path) -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let is_ours = |line: &&str| line.contains("fuse.cbd") && line.contains(dir.to_str().unwrap());
    mounts.lines().filter(is_ours).map(str::to_owned).collect()
}

fn is_mounted_below(dir: &Path) -> bool {
    !mounted_below(dir).is_empty()
}

#[test]
fn a_stop_leaves_nothing_behind() {
    in_sandbox("a_stop_leaves_nothing_behind", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        for _ in 0..5 {
            let mut export = start(&device, dir);
            let loop_path = export.loop_path().to_owned();
            assert_eq!(std::fs::read_link(dir.join("cbd7")).unwrap(), loop_path);
            assert!(bound_file(&loop_path).is_some());
            assert_eq!(export.failure(), None);
            export.stop(StopMode::WhenUnused, LIMIT).unwrap();
            assert_eq!(bound_file(&loop_path), None);
            assert!(!is_mounted_below(dir));
            assert!(std::fs::symlink_metadata(dir.join("cbd7")).is_err());
            assert!(!dir.join("fuse/cbd7").exists());
            export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        }
    });
}

#[test]
fn dirty_page_cache_data_is_in_the_device_after_a_stop() {
    in_sandbox("dirty_page_cache_data_is_in_the_device_after_a_stop", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut export = start(&device, dir);
        let file = OpenOptions::new().write(true).open(export.device_path()).unwrap();
        file.write_all_at(&[0x5a; 100_000], 12_345).unwrap();
        drop(file);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert!(device.bytes.read().unwrap()[12_345..112_345].iter().all(|&byte| byte == 0x5a));
    });
}

#[test]
fn a_device_in_use_is_not_stopped_and_stays_available() {
    in_sandbox("a_device_in_use_is_not_stopped_and_stays_available", |dir| {
        let device = Arc::new(TestDevice::new(64 * MIB, 512));
        let mut export = start(&device, dir);
        let loop_path = export.loop_path().to_owned();
        let mount = mounted_ext4(&export, dir);
        let error = export.stop(StopMode::WhenUnused, LIMIT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.line().contains(&format!("mounted at {}", mount.display())), "{error}");
        std::fs::write(mount.join("file"), "still there").unwrap();
        tool("umount", &[mount.to_str().unwrap()]);

        let file = File::open(export.device_path()).unwrap();
        let error = export.stop(StopMode::WhenUnused, Duration::from_millis(200)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        let us = format!("process {}", std::process::id());
        assert!(error.line().contains(&us), "{error}");
        drop(file);

        let file = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(export.loop_path()).unwrap();
        let error = export.stop(StopMode::WhenUnused, LIMIT).unwrap_err();
        assert!(error.line().contains("exclusively") && error.line().contains(&us), "{error}");
        drop(file);

        let file = File::open(export.file_path()).unwrap();
        let error = export.stop(StopMode::WhenUnused, LIMIT).unwrap_err();
        assert!(error.line().contains(&us), "{error}");
        drop(file);

        assert_eq!(std::fs::read_link(dir.join("cbd7")).unwrap(), export.loop_path());
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        assert_eq!(bound_file(&loop_path), None);
    });
}

#[test]
fn a_forced_stop_ends_in_time_and_users_see_errors() {
    in_sandbox("a_forced_stop_ends_in_time_and_users_see_errors", |dir| {
        let mut device = TestDevice::new(64 * MIB, 512);
        device.delay = Duration::from_millis(1);
        let device = Arc::new(device);
        let mut export = start(&device, dir);
        let mount = mounted_ext4(&export, dir);
        let loop_path = export.loop_path().to_owned();
        let writer = {
            let path = mount.join("file");
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .custom_flags(libc::O_DIRECT)
                .open(path)
                .unwrap();
            std::thread::spawn(move || {
                let buffer = AlignedBuffer::zeroed(65536);
                (0..).find_map(|turn: u64| file.write_at(&buffer, turn % 100 * 65536).err())
            })
        };
        std::thread::sleep(Duration::from_millis(200));
        let began = Instant::now();
        export.stop(StopMode::Force, Duration::from_secs(5)).unwrap();
        println!("forced stop of a mounted device under load: {:?}", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(5));
        assert!(writer.join().unwrap().is_some());
        assert!(!is_mounted_below(dir));
        assert!(std::fs::symlink_metadata(dir.join("cbd7")).is_err());
        let _ = std::process::Command::new("umount").arg(&mount).status();
        assert_eq!(bound_file(&loop_path), None, "the kernel unbinds it at the unmount");
    });
}

#[test]
fn a_hanging_device_below_does_not_delay_a_forced_stop() {
    in_sandbox("a_hanging_device_below_does_not_delay_a_forced_stop", |dir| {
        let device = Arc::new(TestDevice { parks: true, ..TestDevice::new(64 * MIB, 512) });
        let mut export = start(&device, dir);
        device.stuck.store(true, Ordering::Relaxed);
        let path = export.device_path().to_owned();
        let reader = std::thread::spawn(move || {
            let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
            file.read_at(&mut AlignedBuffer::zeroed(4096), 0)
        });
        std::thread::sleep(Duration::from_millis(100));
        let began = Instant::now();
        let error = export.stop(StopMode::Force, Duration::from_secs(2)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
        assert!(reader.join().unwrap().is_err());
        device.stuck.store(false, Ordering::Relaxed);
    });
}

/// A device whose writes wait for space while there is none, and can be cancelled.
struct Full {
    inner: Exported,
    has_space: Arc<AtomicBool>,
    waiting: Arc<AtomicUsize>,
}

struct FullQueue {
    inner: Box<dyn RequestQueue>,
    has_space: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
    waiting: Vec<Request>,
}

impl BlockDevice for Full {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self) -> cbd_types::Result<Box<dyn RequestQueue>> {
        let (has_space, count) = (Arc::clone(&self.has_space), Arc::clone(&self.waiting));
        Ok(Box::new(FullQueue { inner: self.inner.open_queue()?, has_space, count, waiting: Vec::new() }))
    }
}

impl RequestQueue for FullQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        if request.operation == Operation::Write && !self.has_space.load(Ordering::SeqCst) {
            self.waiting.push(request);
            self.count.fetch_add(1, Ordering::SeqCst);
        } else {
            self.inner.submit(request, done);
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        if self.has_space.load(Ordering::SeqCst) {
            self.waiting.drain(..).for_each(|request| self.inner.submit(request, done));
        }
        self.inner.poll(done);
    }

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        done.extend(self.waiting.drain(..).map(|request| {
            let result = Err(Error::new(ErrorKind::Stopped, "given up"));
            Completion { id: request.id, result, buffer: request.buffer }
        }));
    }

    fn parked(&self) -> usize {
        self.waiting.len() + self.inner.parked()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        self.inner.wait_descriptors()
    }
}

#[test]
fn a_forced_stop_cancels_writes_that_wait_for_space_for_good() {
    in_sandbox("a_forced_stop_cancels_writes_that_wait_for_space_for_good", |dir| {
        let device = Arc::new(TestDevice::new(64 * MIB, 512));
        let (has_space, waiting) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let full = Full {
            inner: Exported(Arc::clone(&device)),
            has_space: Arc::clone(&has_space),
            waiting: Arc::clone(&waiting),
        };
        let mut export = FuseLoop::start(Arc::new(full), options(dir, 2)).expect("a device");
        let path = export.device_path().to_owned();
        let writer = std::thread::spawn(move || {
            let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
            let mut block = AlignedBuffer::zeroed(4096);
            block.fill(7);
            file.write_at(&block, 0)
        });
        let end = Instant::now() + Duration::from_secs(10);
        while waiting.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < end, "the write does not arrive");
            std::thread::sleep(Duration::from_millis(2));
        }
        export.stop(StopMode::Force, Duration::from_millis(500)).expect("no thread waits for space");
        assert!(writer.join().unwrap().is_err());
        has_space.store(true, Ordering::SeqCst);
        assert_eq!(device.bytes.read().unwrap()[..4096], [0; 4096]);
    });
}

#[test]
fn a_panic_of_a_thread_fails_its_requests_and_leaves_no_client_waiting() {
    in_sandbox("a_panic_of_a_thread_fails_its_requests_and_leaves_no_client_waiting", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut export = start(&device, dir);
        device.panics_at.store(MIB, Ordering::Relaxed);
        let file =
            OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(export.file_path()).unwrap();
        let mut buffer = AlignedBuffer::zeroed(4096);
        assert!(file.read_at(&mut buffer, MIB).is_err());
        // The thread closes its connection first, and reports the failure then.
        let end = Instant::now() + LIMIT;
        while export.failure().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(export.failure().unwrap().contains("panicked"));
        // The other thread still serves its channel, until it panics too.
        file.read_exact_at(&mut buffer, 0).unwrap();
        assert!(file.read_at(&mut buffer, MIB).is_err());
        assert!(file.read_at(&mut buffer, 0).is_err());
        drop(file);
        export.stop(StopMode::Force, LIMIT).unwrap();
        assert!(!is_mounted_below(dir));
    });
}

#[test]
fn an_externally_aborted_connection_is_a_failure_and_leaves_no_client_waiting() {
    in_sandbox("an_externally_aborted_connection_is_a_failure_and_leaves_no_client_waiting", |dir| {
        let device = Arc::new(TestDevice { parks: true, ..TestDevice::new(8 * MIB, 512) });
        let mut export = start(&device, dir);
        device.stuck.store(true, Ordering::Relaxed);
        let (path, before) = (export.file_path(), device.submitted.load(Ordering::Relaxed));
        let reader = std::thread::spawn(move || {
            let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
            file.read_at(&mut AlignedBuffer::zeroed(4096), 0)
        });
        until("the read", || device.submitted.load(Ordering::Relaxed) > before);
        assert_eq!(abort_connections(dir).unwrap(), 1);
        assert!(reader.join().unwrap().is_err());
        device.stuck.store(false, Ordering::Relaxed);
        until("the failure", || export.failure().is_some());
        assert!(export.failure().unwrap().contains("ended from outside"));
        export.stop(StopMode::Force, LIMIT).unwrap();
    });
}

/// Address space and resident memory.
fn memory_kib() -> [u64; 2] {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    ["VmData:", "VmRSS:"].map(|name| field(name).trim().trim_end_matches(" kB").parse().unwrap())
}

#[test]
fn memory_is_freed_after_every_kind_of_stop() {
    in_sandbox("memory_is_freed_after_every_kind_of_stop", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let mut sizes = Vec::new();
        for turn in 0..12 {
            let mut export = start(&device, dir);
            let file = OpenOptions::new().write(true).open(export.device_path()).unwrap();
            // As many large buffers as the threads keep.
            file.write_all_at(&[1; 8 << 20], 0).unwrap();
            file.sync_all().unwrap();
            let used = (turn % 2 == 1).then_some(file);
            let mode = if used.is_some() { StopMode::Force } else { StopMode::WhenUnused };
            export.stop(mode, LIMIT).unwrap();
            drop((used, export));
            sizes.push(memory_kib());
        }
        println!("{sizes:?}");
        assert!(sizes[11][0] <= sizes[1][0] + 8 * 1024, "{sizes:?}");
        assert!(sizes.iter().all(|[_, memory]| *memory <= sizes[0][1] + 8 * 1024), "{sizes:?}");
    });
}

#[test]
fn a_dropped_export_leaves_nothing_behind() {
    in_sandbox("a_dropped_export_leaves_nothing_behind", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let export = start(&device, dir);
        let loop_path = export.loop_path().to_owned();
        drop(export);
        assert_eq!(bound_file(&loop_path), None);
        assert!(!is_mounted_below(dir));
        assert!(std::fs::symlink_metadata(dir.join("cbd7")).is_err());
    });
}

#[test]
fn a_failed_start_leaves_nothing_behind() {
    in_sandbox("a_failed_start_leaves_nothing_behind", |dir| {
        let device = Arc::new(TestDevice::new(8 * MIB, 512));
        let exported = || Arc::new(Exported(Arc::clone(&device)));
        std::fs::write(dir.join("cbd7"), "another owner's").unwrap();
        let error = FuseLoop::start(exported(), options(dir, 2)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        std::fs::remove_file(dir.join("cbd7")).unwrap();
        let mut export = FuseLoop::start(exported(), options(dir, 2)).unwrap();
        let error = FuseLoop::start(exported(), options(dir, 2)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        let elsewhere = cbd_fuse::Options { mount_dir: dir.join("fuse/other"), ..options(dir, 2) };
        let error = FuseLoop::start(exported(), elsewhere).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        for invalid in ["", "a/b", "..", "a b"] {
            let how = cbd_fuse::Options { name: invalid.into(), ..options(dir, 2) };
            assert_eq!(FuseLoop::start(exported(), how).unwrap_err().kind(), ErrorKind::InvalidArgument);
        }
        for queues in [0, 129] {
            let error = FuseLoop::start(exported(), options(dir, queues)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        assert_eq!(mounted_below(dir).len(), 1);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
    });
}

#[test]
fn the_probe_succeeds_on_a_capable_machine() {
    in_sandbox("the_probe_succeeds_on_a_capable_machine", |_| {
        let before = mounted_below(Path::new("/"));
        assert_eq!(cbd_fuse::probe(), Ok(()));
        assert_eq!(mounted_below(Path::new("/")), before);
        if let Err(missing) = cbd_fuse::flusher::become_io_flusher() {
            assert!(missing.contains("CAP_SYS_RESOURCE"), "{missing}");
        }
    });
}

/// Not a test of its own: the daemon that other tests kill.
#[test]
fn daemon_to_be_killed() {
    let Some(dir) = daemon_dir() else { return };
    let device = Arc::new(TestDevice::new(64 * MIB, 512));
    let export = start(&device, &dir);
    println!("ready {}", export.loop_path().display());
    std::thread::sleep(Duration::from_secs(50));
}

/// Starts a daemon and waits until its device is available.
fn daemon(dir: &Path) -> (std::process::Child, PathBuf) {
    let mut child = start_daemon("daemon_to_be_killed", dir);
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let ready =
        lines.map_while(Result::ok).find_map(|line| Some(PathBuf::from(line.split_once("ready ")?.1)));
    (child, ready.expect("the daemon starts"))
}

fn kill(mut child: std::process::Child) {
    let began = Instant::now();
    child.kill().unwrap();
    child.wait().unwrap();
    println!("a killed daemon is gone after {:?}", began.elapsed());
}

#[test]
fn a_killed_daemon_releases_the_loop_device_and_a_new_one_starts_after_a_sweep() {
    in_sandbox("a_killed_daemon_releases_the_loop_device_and_a_new_one_starts_after_a_sweep", |dir| {
        for _ in 0..5 {
            let (child, loop_path) = daemon(dir);
            // Dirty pages that are not written when the daemon dies: closing the loop device has to write
            // them.
            let file = OpenOptions::new().write(true).open(&loop_path).unwrap();
            file.write_all_at(&[1; 1 << 20], 0).unwrap();
            drop(file);
            kill(child);
            assert_eq!(bound_file(&loop_path), None);
            let swept = sweep(dir, dir, &[]).unwrap();
            assert_eq!(swept.mounts, [dir.join("fuse/cbd7")]);
            assert_eq!(swept.links, [dir.join("cbd7")]);
            assert!(swept.alive.is_empty());
            assert!(!is_mounted_below(dir));
            let mut export = start(&Arc::new(TestDevice::new(8 * MIB, 512)), dir);
            assert_eq!(sweep(dir, dir, &[]).unwrap(), Swept { alive: swept.mounts, ..Swept::default() });
            export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        }
    });
}

#[test]
fn a_daemon_killed_under_a_mount_is_swept_and_its_device_unbound_later() {
    in_sandbox("a_daemon_killed_under_a_mount_is_swept_and_its_device_unbound_later", |dir| {
        let (child, loop_path) = daemon(dir);
        let text = loop_path.to_str().unwrap();
        tool("mkfs.ext4", &["-q", text]);
        let mount = dir.join("mnt");
        std::fs::create_dir(&mount).unwrap();
        tool("mount", &[text, mount.to_str().unwrap()]);
        let writer = {
            let path = mount.join("file");
            std::thread::spawn(move || {
                (0..100_000).find_map(|_| std::fs::write(&path, vec![7; 300_000]).err())
            })
        };
        std::thread::sleep(Duration::from_millis(200));
        kill(child);
        let swept = sweep(dir, dir, &[]).unwrap();
        assert_eq!(swept.loops, std::slice::from_ref(&loop_path));
        assert_eq!(swept.links, [dir.join("cbd7")]);
        assert!(bound_file(&loop_path).is_some(), "it is still mounted");
        // Beside the old one, which its users have not closed yet.
        let mut export = start(&Arc::new(TestDevice::new(8 * MIB, 512)), dir);
        assert_ne!(export.loop_path(), loop_path);
        export.stop(StopMode::WhenUnused, LIMIT).unwrap();
        let _ = writer.join();
        let _ = std::process::Command::new("umount").arg(&mount).status();
        assert_eq!(bound_file(&loop_path), None);
    });
}

#[test]
fn a_daemon_killed_under_load_leaves_no_client_waiting_and_is_swept() {
    in_sandbox("a_daemon_killed_under_load_leaves_no_client_waiting_and_is_swept", |dir| {
        for turn in 0..5 {
            let (child, loop_path) = daemon(dir);
            let clients: Vec<_> = (0..8_u64)
                .map(|client| {
                    let path = if client % 2 == 0 { loop_path.clone() } else { dir.join("fuse/cbd7/cbd7") };
                    std::thread::spawn(move || {
                        // On a slow machine the daemon may be gone before this open.
                        let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path);
                        let buffer = AlignedBuffer::zeroed([4096, 1 << 20][client as usize / 4]);
                        file.map_or_else(Some, |file| {
                            (0..).find_map(|turn| file.write_at(&buffer, turn % 32 * MIB).err())
                        })
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(50 + 30 * turn));
            kill(child);
            let end = Instant::now() + LIMIT;
            while !clients.iter().all(std::thread::JoinHandle::is_finished) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(clients.iter().all(std::thread::JoinHandle::is_finished), "a client still waits");
            assert!(clients.into_iter().all(|client| client.join().unwrap().is_some()));
            let swept = sweep(dir, dir, &[]).unwrap();
            assert_eq!(swept.mounts, [dir.join("fuse/cbd7")]);
            assert!(!is_mounted_below(dir));
            assert_eq!(bound_file(&loop_path), None);
        }
    });
}
