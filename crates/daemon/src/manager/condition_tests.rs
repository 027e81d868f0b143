//! The log of conditions at the stop of a backend and at the end of the daemon.

use super::tests::{LIMIT, execute, execute_at, stop, text, with_decorated_backend, write};
use super::{Manager, Options};
use crate::api::{CacheMode, DetachCache, Drain, SettingsChange, StopBackend};
use crate::control::{Control, Flow};
use cbd_backing::Decorator;
use cbd_runtime::RunningBackend;
use cbd_testkit::{FaultHandle, FaultRule, Faulty};
use cbd_types::{BackendId, ErrorKind, Operation};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the tests of this process have logged.
static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Sink;

impl std::io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A daemon whose disk follows rules; its log is captured.
struct Daemon {
    folder: tempfile::TempDir,
    manager: Arc<Manager>,
    faults: FaultHandle,
}

impl Daemon {
    fn on(rules: &[&str]) -> Self {
        // Only the first call in this process installs the sink.
        let _ = tracing_subscriber::fmt().with_ansi(false).with_writer(|| Sink).try_init();
        let folder = tempfile::tempdir().expect("a folder");
        let rules: Vec<FaultRule> =
            rules.iter().map(|rule| FaultRule::parse(rule).expect("a rule")).collect();
        let faults: Arc<Mutex<Option<FaultHandle>>> = Arc::default();
        let made = Arc::clone(&faults);
        let decorator = Decorator::new(move |inner| {
            let faulty = Faulty::new(inner, rules.clone());
            *made.lock() = Some(faulty.handle());
            Arc::new(faulty)
        });
        let manager = with_decorated_backend(folder.path(), Some(decorator));
        let faults = faults.lock().clone().expect("the backend is decorated");
        Self { folder, manager, faults }
    }

    fn run(&self) -> Arc<RunningBackend> {
        let taken = self.manager.take_slot(0, BackendId(0), "the test has it").expect("a backend");
        let run = taken.slot.run.clone().expect("it is up");
        self.manager.put_back(taken);
        run
    }

    /// The lines of the log that name the disk and contain `text`.
    fn lines(&self, text: &str) -> Vec<String> {
        self.lines_of("disk", text)
    }

    /// The lines of the log that name the file `name` of this daemon and contain `part`.
    fn lines_of(&self, name: &str, part: &str) -> Vec<String> {
        let path = text(self.folder.path(), name);
        let log = String::from_utf8_lossy(&LOG.lock()).into_owned();
        log.lines().filter(|line| line.contains(&path) && line.contains(part)).map(str::to_owned).collect()
    }

    #[track_caller]
    fn expect_line(&self, text: &str) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(line) = self.lines(text).pop() {
                return line;
            }
            assert!(Instant::now() < end, "{text:?} is not in the log: {:#?}", self.lines(""));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Writes a block and lets a stop fail because the disk does not take it.
    fn make_writeback_fail(&self) {
        write(&self.run()).expect("the cache takes it");
        let request = StopBackend { timeout_s: Some(1), ..StopBackend::default() };
        stop(&self.manager, &request).expect_err("the disk takes nothing");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The manager waits for operations that stall.
        self.faults.clear();
    }
}

fn discarding(bytes: u64) -> StopBackend {
    StopBackend { discard_dirty: Some(bytes), timeout_s: Some(0), ..StopBackend::default() }
}

#[test]
fn a_stop_logs_an_error_that_occurred_since_the_last_pass_over_the_conditions() {
    let daemon = Daemon::on(&["op=read"]);
    // No pass of the background thread from here on.
    let recorder = daemon.manager.recorder.lock();
    execute(&daemon.run(), Operation::Read).expect_err("the disk refuses reads");
    stop(&daemon.manager, &StopBackend::default()).expect("nothing is dirty");
    assert_eq!(daemon.lines("requests of clients fail").len(), 2, "{:#?}", daemon.lines(""));
    assert_eq!(daemon.lines("after this began: requests of clients fail").len(), 1);
    drop(recorder);
}

#[test]
fn the_end_of_the_daemon_logs_an_error_that_occurred_since_the_last_pass_over_the_conditions() {
    let daemon = Daemon::on(&["op=read"]);
    let run = daemon.run();
    // The last pass of the background thread waits for this lock, and the end of the daemon does not wait for that
    // pass.
    let recorder = daemon.manager.recorder.lock();
    execute(&run, Operation::Read).expect_err("the disk refuses reads");
    drop(run);
    let _ = daemon.manager.end();
    assert_eq!(daemon.lines("requests of clients fail").len(), 2, "{:#?}", daemon.lines(""));
    drop(recorder);
}

#[test]
fn a_condition_in_force_is_logged_when_its_backend_is_stopped() {
    let daemon = Daemon::on(&["op=write"]);
    daemon.make_writeback_fail();
    daemon.expect_line("writeback fails: ");
    stop(&daemon.manager, &discarding(4096)).expect("the user drops it");
    let lines = daemon.lines("after this began: writeback fails: ");
    assert_eq!(lines.len(), 1, "{:#?}", daemon.lines(""));
    assert!(lines[0].contains("INFO") && lines[0].contains("writeback fails: "), "{lines:?}");
}

#[test]
fn a_condition_in_force_is_logged_when_the_daemon_ends() {
    let daemon = Daemon::on(&["op=write"]);
    daemon.make_writeback_fail();
    daemon.expect_line("writeback fails: ");
    assert_eq!(daemon.manager.end().sync(), [""; 0]);
    let lines = daemon.lines("after this began: writeback fails: ");
    assert_eq!(lines.len(), 1, "{:#?}", daemon.lines(""));
}

#[test]
fn the_end_of_a_silence_that_outlasts_a_stop_is_logged_with_its_whole_duration() {
    let daemon = Daemon::on(&["op=write,how=stall"]);
    daemon.make_writeback_fail();
    daemon.expect_line("the backing device does not answer: a write has had no answer for ");
    let error = stop(&daemon.manager, &discarding(4096)).expect_err("the disk does not answer");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(daemon.lines("answers again").len(), 0);
    daemon.faults.clear();
    let line = daemon.expect_line("the backing device answers again (it lasted ");
    let seconds =
        line.rsplit_once("lasted ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<u64>().ok());
    // 10 s until it was reported, and 5 s until the stop gave up.
    assert!(seconds >= Some(15), "{line}");
}

#[test]
fn errors_are_logged_before_a_stop_that_a_disk_delays() {
    let daemon = Daemon::on(&["op=read", "op=write,how=stall"]);
    daemon.make_writeback_fail();
    // No pass of the background thread from here on.
    let recorder = daemon.manager.recorder.lock();
    execute_at(&daemon.run(), Operation::Read, 1 << 20).expect_err("the disk refuses reads");
    let error = stop(&daemon.manager, &discarding(4096)).expect_err("the disk does not answer");
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(daemon.lines("requests of clients fail").len(), 1, "{:#?}", daemon.lines(""));
    drop(recorder);
}

#[test]
fn errors_are_logged_before_the_end_of_a_daemon_that_a_disk_delays() {
    let daemon = Daemon::on(&["op=read", "op=write,how=stall"]);
    daemon.make_writeback_fail();
    // No pass of the background thread from here on.
    let recorder = daemon.manager.recorder.lock();
    execute_at(&daemon.run(), Operation::Read, 1 << 20).expect_err("the disk refuses reads");
    let _ended = daemon.manager.end();
    // Its beginning, and that it was in force when the daemon ended before the stop of the backend.
    assert_eq!(daemon.lines("requests of clients fail").len(), 2, "{:#?}", daemon.lines(""));
    assert_eq!(daemon.lines("after this began: requests of clients fail").len(), 1);
    drop(recorder);
}

#[test]
fn a_condition_of_a_backend_that_hangs_is_logged_when_the_daemon_ends() {
    let daemon = Daemon::on(&["op=write,how=stall"]);
    daemon.make_writeback_fail();
    daemon.expect_line("the backing device does not answer: a write has had no answer for ");
    stop(&daemon.manager, &discarding(4096)).expect_err("the disk does not answer");
    let _ended = daemon.manager.end();
    let in_force = "after this began: the backing device does not answer";
    assert_eq!(daemon.lines(in_force).len(), 1, "{:#?}", daemon.lines(""));
    // The process ends now. A thread that goes on has nothing more to log.
    daemon.faults.clear();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(daemon.lines("answers again").len(), 0, "{:#?}", daemon.lines(""));
}

#[test]
fn a_change_of_the_mode_is_logged_when_it_begins_and_when_it_is_in_force() {
    let daemon = Daemon::on(&["op=write"]);
    write(&daemon.run()).expect("the cache takes it");
    let change = |change: &SettingsChange| daemon.manager.set(0, 0, change).expect("it is set");
    change(&SettingsChange { cache_mode: Some(CacheMode::Writethrough), ..SettingsChange::default() });
    let begun = "cache_mode=writethrough is not in force until the backing device has everything; 4096 bytes";
    assert!(daemon.expect_line(begun).contains("WARN"));
    assert_eq!(daemon.lines("the cache mode is in force"), [""; 0]);
    daemon.faults.clear();
    daemon.expect_line("the cache mode is in force (it lasted ");
}

#[test]
fn a_detach_is_logged_when_it_begins_and_when_it_ends_or_is_given_up() {
    let daemon = Daemon::on(&["op=write"]);
    write(&daemon.run()).expect("the cache takes it");
    let detach = |timeout_s| {
        let request = DetachCache { timeout_s: Some(timeout_s) };
        Control::detach_cache(&*daemon.manager, 0, 0, &request, &mut |_| Flow::Continue)
    };
    let (begun, stays) =
        ("its cache is being detached when the backing device has everything", "its cache stays: ");
    detach(1).expect_err("the disk takes nothing");
    assert!(daemon.expect_line(begun).contains("4096 bytes are dirty"));
    assert!(daemon.expect_line(stays).contains("WARN"));
    daemon.faults.clear();
    detach(60).expect("the disk takes it");
    daemon.expect_line("its cache was detached");
    detach(60).expect_err("there is none");
    assert_eq!((daemon.lines(begun).len(), daemon.lines(stays).len()), (2, 1), "a refusal begins nothing");
}

#[test]
fn a_pause_of_writeback_is_logged_when_it_begins_and_when_it_ends() {
    let daemon = Daemon::on(&[]);
    write(&daemon.run()).expect("the cache takes it");
    let pause = |seconds| {
        let change = SettingsChange { writeback_pause_s: Some(seconds), ..SettingsChange::default() };
        daemon.manager.set(0, 0, &change).expect("it is set");
    };
    pause(600);
    assert!(daemon.expect_line("writeback is paused").contains("WARN"));
    pause(0);
    daemon.expect_line("writeback is no longer paused (it lasted ");
}

#[test]
fn a_condition_of_a_region_that_is_in_force_is_logged_when_the_daemon_ends() {
    let daemon = Daemon::on(&[]);
    // At the path of the folder of the recovery points.
    let points = Options::below(daemon.folder.path()).paths.state_dir.join("recovery-points");
    std::fs::write(&points, "in the way").expect("a file");
    write(&daemon.run()).expect("the cache takes it");
    let wait = Drain { wait: true, ..Drain::default() };
    Control::drain(&*daemon.manager, 0, &wait, &mut |_| Flow::Continue).expect("drained");
    let (begun, end) = ("the recovery point cannot be logged", Instant::now() + LIMIT);
    while daemon.lines_of("region", begun).is_empty() {
        assert!(Instant::now() < end, "nothing of it in the log");
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ended = daemon.manager.end();
    let lines = daemon.lines_of("region", "after this began: the recovery point cannot be logged");
    assert_eq!(lines.len(), 1, "{:#?}", daemon.lines_of("region", ""));
}
