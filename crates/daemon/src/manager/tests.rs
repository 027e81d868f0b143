//! Commands and the end of a daemon, interleaved at points that only a test inside the manager can choose.

use super::Manager;
use crate::api::{RegisterTransport, StartBackend, StopBackend};
use crate::config::Config;
use crate::control::{Control, Flow};
use crate::run::Options;
use crate::state::{StateDir, TransportEntry};
use cbd_backing::Decorator;
use cbd_export::BlockDevice;
use cbd_runtime::RunningBackend;
use cbd_types::{AlignedBuffer, BackendId, ByteRange, Completion, ErrorKind, Operation, Request, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// Timeout, far above the expected duration of each wait.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

/// A daemon with all its files in a folder, without transports.
fn manager(folder: &Path) -> Arc<Manager> {
    decorated(folder, None)
}

/// As [`manager`], with a decorator for its backing devices.
fn decorated(folder: &Path, decorator: Option<Decorator>) -> Arc<Manager> {
    std::fs::create_dir_all(folder.join("dev")).expect("a folder");
    let options = Options { decorator, ..Options::below(folder) };
    let state = StateDir::open(&options.paths.state_dir).expect("a state folder");
    let manager = Arc::new(Manager::new(&options, Config::default(), state).expect("a manager"));
    manager.restore().expect("nothing is to be restored");
    manager
}

/// A daemon with one registered region.
fn with_region(folder: &Path) -> Arc<Manager> {
    let manager = manager(folder);
    register(&manager, folder);
    manager
}

fn register(manager: &Manager, folder: &Path) {
    let region = RegisterTransport {
        host: "node0".to_owned(),
        path: text(folder, "region"),
        size: Some(32 * MIB),
        segment_size: None,
        format: true,
        force: false,
        shared: false,
    };
    manager.register_transport(&region).expect("a region");
}

/// A daemon with one backend, whose block device is exported by NBD.
pub(super) fn with_backend(folder: &Path) -> Arc<Manager> {
    with_decorated_backend(folder, None)
}

/// As [`with_backend`], with a decorator for the backing device.
pub(super) fn with_decorated_backend(folder: &Path, decorator: Option<Decorator>) -> Arc<Manager> {
    let manager = decorated(folder, decorator);
    register(&manager, folder);
    manager.start_backend(0, &backend(folder)).expect("a backend");
    manager
}

fn backend(folder: &Path) -> StartBackend {
    let disk = text(folder, "disk");
    std::fs::File::create(&disk).and_then(|file| file.set_len(8 * MIB)).expect("a disk");
    StartBackend {
        path: disk,
        cache_size: Some(16 * MIB),
        start_dev: true,
        export: Some(format!("nbd:unix:{}", text(folder, "nbd.sock"))),
        ..StartBackend::default()
    }
}

pub(super) fn text(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().expect("a path of the test").to_owned()
}

pub(super) fn write(run: &RunningBackend) -> Result<()> {
    execute(run, Operation::Write)
}

/// Executes `operation` on the first block.
pub(super) fn execute(run: &RunningBackend, operation: Operation) -> Result<()> {
    execute_at(run, operation, 0)
}

/// Executes `operation` on the block at `offset`.
pub(super) fn execute_at(run: &RunningBackend, operation: Operation, offset: u64) -> Result<()> {
    let mut queue = run.device().open_queue()?;
    let mut done = Vec::new();
    let range = ByteRange::at(offset, 4096);
    let buffer = AlignedBuffer::zeroed(4096);
    queue.submit(Request::unmarked(0, operation, range, false, buffer), &mut done);
    let end = Instant::now() + LIMIT;
    while done.is_empty() {
        assert!(Instant::now() < end, "the write does not complete");
        queue.poll(&mut done);
    }
    let Completion { result, .. } = done.remove(0);
    result.map(drop)
}

pub(super) fn stop(manager: &Manager, request: &StopBackend) -> Result<()> {
    manager.stop_backend(0, 0, request, &mut |_| Flow::Continue).map(drop)
}

#[test]
fn a_command_that_outlasts_the_end_does_not_change_the_list_of_transports() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_region(folder.path());
    let before = manager.fixed.state.transports().expect("the list");
    assert_eq!(before.len(), 1);
    let _ = manager.end();
    let other = TransportEntry {
        transport_id: 1,
        host_id: 0,
        host: "node0".to_owned(),
        path: text(folder.path(), "other"),
        uuid: "other".to_owned(),
    };
    let late = manager.record(1, Some(&other)).expect_err("the tables are gone");
    assert_eq!(late.kind(), ErrorKind::Stopped);
    assert!(manager.record(0, None).is_err());
    assert_eq!(manager.fixed.state.transports().expect("the list"), before);
}

#[test]
fn the_end_waits_for_regions_that_are_being_opened() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = manager(folder.path());
    let work = manager.begin_work().expect("it is not stopping");
    let is_done = Arc::new(AtomicBool::new(false));
    let worker = {
        let (is_done, manager) = (Arc::clone(&is_done), Arc::clone(&manager));
        std::thread::spawn(move || {
            while !manager.stopping.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(500));
            is_done.store(true, Ordering::SeqCst);
            drop(work);
        })
    };
    assert!(manager.end().sync().is_empty());
    assert!(is_done.load(Ordering::SeqCst), "the end came before the work was done");
    assert!(manager.begin_work().is_err());
    worker.join().expect("the worker ends");
}

#[test]
fn the_end_lets_the_worker_that_has_a_backend_close_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_backend(folder.path());
    let taken = manager.take_slot(0, BackendId(0), "the test has it").expect("a backend");
    let ending = {
        let manager = Arc::clone(&manager);
        std::thread::spawn(move || manager.end().sync())
    };
    let end = Instant::now() + LIMIT;
    while !manager.tables.lock().is_empty() {
        assert!(Instant::now() < end, "the end does not take the tables");
        std::thread::sleep(Duration::from_millis(1));
    }
    // If the end of the daemon closed the backend, it would do so immediately, on a thread of its own.
    std::thread::sleep(Duration::from_millis(500));
    let run = taken.slot.run.clone().expect("it is up");
    write(&run).expect("its block device is open, so its cache is");
    drop(run);
    manager.put_back(taken);
    assert_eq!(ending.join().expect("it ends"), [""; 0]);
}

#[test]
fn a_stop_that_failed_while_another_worker_had_the_backend_is_no_longer_in_progress() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_backend(folder.path());
    let id = BackendId(0);
    manager.begin_backend_stop(0, id, false).expect("no client uses it");
    let taken = manager.take_slot(0, id, "the test has it").expect("a backend");
    assert!(taken.slot.stopping);
    manager.unmark_stop(0, id);
    manager.put_back(taken);
    let taken = manager.take_slot(0, id, "the test has it").expect("a backend");
    assert!(!taken.slot.stopping, "it would be in a stop for ever");
    manager.put_back(taken);
    stop(&manager, &StopBackend::default()).expect("it can be stopped again");
}

#[test]
fn a_stop_keeps_the_rows_of_a_backend_whose_cache_another_command_uses() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_backend(folder.path());
    let handle = manager.handle(0).expect("the transport");
    let run = manager.take_slot(0, BackendId(0), "the test has it").expect("a backend");
    let cache = run.slot.run.as_ref().and_then(|run| run.cache()).expect("a cache");
    manager.put_back(run);
    let error = stop(&manager, &StopBackend::default()).expect_err("the cache is in use");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(handle.transport.blkdevs().len(), 1, "the row of its block device");
    drop(cache);
    let end = Instant::now() + LIMIT;
    while !manager.backends(0, false).expect("a list")[0].alive {
        assert!(Instant::now() < end, "it does not come back");
        std::thread::sleep(Duration::from_millis(20));
    }
    let is_open = || manager.blkdevs(0, false).expect("a list").iter().all(|blkdev| blkdev.alive);
    while !is_open() {
        assert!(Instant::now() < end, "its block device does not come back");
        std::thread::sleep(Duration::from_millis(20));
    }
    stop(&manager, &StopBackend::default()).expect("it can be stopped now");
    assert_eq!(handle.transport.blkdevs().len(), 0);
}

#[test]
fn a_timeout_of_a_stop_can_be_any_number() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_region(folder.path());
    for timeout_s in [0, u64::MAX] {
        let StartBackend { path, .. } = backend(folder.path());
        manager.start_backend(0, &backend(folder.path())).expect("a backend");
        let id = manager.backends(0, false).expect("a list")[0].backend_id;
        let request = StopBackend { timeout_s: Some(timeout_s), ..StopBackend::default() };
        manager.stop_backend(0, id, &request, &mut |_| Flow::Continue).expect(&path);
    }
}

#[test]
fn the_end_names_a_region_in_an_ordinary_file_whose_cache_is_still_in_use() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_backend(folder.path());
    let taken = manager.take_slot(0, BackendId(0), "the test has it").expect("a backend");
    let cache = taken.slot.run.as_ref().and_then(|run| run.cache()).expect("a cache");
    manager.put_back(taken);
    let late = manager.end().sync();
    assert!(late.len() == 1 && late[0].contains("still in use"), "{late:?}");
    drop(cache);
}

#[test]
fn a_backend_that_a_worker_has_is_counted_as_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_backend(folder.path());
    let taken = manager.take_slot(0, BackendId(0), "the test has it").expect("a backend");
    assert_eq!(super::summary(&manager.tables.lock()), "1 transports, 1 backends, 1 block devices");
    manager.put_back(taken);
}

#[test]
fn no_backend_starts_on_a_transport_that_is_being_unregistered() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_region(folder.path());
    let set_taken = |is_taken| manager.tables.lock().get_mut(&0).expect("the transport").is_taken = is_taken;
    set_taken(true);
    let error = manager.start_backend(0, &backend(folder.path())).expect_err("it is being unregistered");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    set_taken(false);
    manager.start_backend(0, &backend(folder.path())).expect("a backend");
}

/// The lines that this thread logs.
#[derive(Clone, Default)]
struct Log(Arc<parking_lot::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn changed_settings_are_logged_as_they_are_typed() {
    let folder = tempfile::tempdir().expect("a folder");
    let manager = with_backend(folder.path());
    let typed = [
        "gc_percent=50",
        "consistency=checkpoint",
        "writeback_rate=100M",
        "writeback_percent=20",
        "on_write_error=park",
        "write_error_after_s=7",
        "read_latency_target_us=900",
        "cache_mode=writethrough",
        "read_fill=all",
        "sequential_read_cutoff=8M",
        "readahead=off",
        "sequential_write_cutoff=1M",
        "when_full=around",
        "congestion_read_us=2000",
        "congestion_write_us=off",
        "pin_percent=40",
        "metadata_min_percent=15",
        "metadata_max_percent=70",
    ];
    let change = crate::settings::parse_changes(&typed.map(str::to_owned)).expect("settings");
    let log = Log::default();
    let to = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || to.clone()).with_ansi(false).finish();
    tracing::subscriber::with_default(subscriber, || {
        manager.set(0, 0, &change).expect("set");
        let automatic = crate::settings::parse_changes(&["writeback_rate=auto".to_owned()]);
        manager.set(0, 0, &automatic.expect("a setting")).expect("set");
    });
    let text = String::from_utf8(log.0.lock().clone()).expect("text");
    assert!(text.contains(&format!("settings: {}", typed.join(" "))), "{text}");
    assert!(text.contains(" writeback_rate=auto "), "{text}");
}
