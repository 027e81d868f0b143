//! The demonstration, through both exports and with two hosts: it succeeds, and leaves nothing behind, however it ends.
//!
//! The tests run if `CBD_SYSTEM_TESTS=1` is set, one after the other, because a test would find the leftovers of another
//! one.

mod support;

use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use support::{system_tests, until, wait};

/// Timeout of a demonstration on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(150);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A folder for the temporary files of demonstrations.
struct DemoRun {
    folder: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
    _alone: Option<File>,
}

impl DemoRun {
    /// For a demonstration without loop devices.
    fn new() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::Builder::new().prefix("cbd-").tempdir().expect("a folder");
        Self { folder, _turn: turn, _alone: None }
    }

    /// For one with loop devices.
    fn with_loop_devices() -> Self {
        Self { _alone: Some(cbd_testkit::loop_devices::alone()), ..Self::new() }
    }

    fn start(&self, arguments: &[&str]) -> (Child, File) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        command.arg("demo").args(arguments).env("TMPDIR", self.folder.path());
        support::child::dies_with_the_test(&mut command);
        let output = tempfile::tempfile().expect("a file");
        command.stdin(Stdio::null()).stdout(output.try_clone().expect("a file"));
        (command.spawn().expect("cbdctrl"), output)
    }

    /// Runs a demonstration, which must succeed; returns its report.
    fn run(&self, arguments: &[&str]) -> Value {
        let (mut demo, mut output) = self.start(arguments);
        let Some(status) = wait(&mut demo, TIMEOUT) else {
            end(&mut demo);
            panic!("it took more than {TIMEOUT:?}: {}", text(&mut output));
        };
        let output = text(&mut output);
        assert!(status.success(), "{status}: {output}");
        serde_json::from_str(&output).expect("one JSON object")
    }

    /// Processes of demonstrations in the folder: their folder in `/proc`, and command line.
    fn processes(&self) -> Vec<(PathBuf, String)> {
        let mark = self.folder.path().to_string_lossy().into_owned();
        let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
        entries
            .filter_map(|entry| Some((entry.path(), std::fs::read(entry.path().join("cmdline")).ok()?)))
            .map(|(process, line)| (process, String::from_utf8_lossy(&line).replace('\0', " ")))
            .filter(|(_, line)| line.contains(&mark))
            .collect()
    }

    /// Loop devices over files in the folder.
    fn loop_devices(&self) -> Vec<PathBuf> {
        let mark = self.folder.path().to_string_lossy().into_owned();
        let devices = std::fs::read_dir("/sys/block").expect("/sys/block").flatten();
        devices.map(|device| device.path()).filter(|device| file_of(device).contains(&mark)).collect()
    }

    #[track_caller]
    fn expect_no_leftovers(&self) {
        until("the end of every process", || self.processes().is_empty());
        // A process that has just ended may still have one open.
        until("the end of every loop device", || self.loop_devices().is_empty());
        assert_eq!(folders_in(self.folder.path()), Vec::<PathBuf>::new());
        assert_eq!(dead_folders_in(Path::new("/dev/shm")), Vec::<PathBuf>::new());
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        assert!(!mounts.contains(&*self.folder.path().to_string_lossy()), "{mounts}");
    }
}

/// The backing file of a loop device; without its folder once that is unmounted.
fn file_of(device: &Path) -> String {
    std::fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default()
}

fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut ours: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().contains("cbd-demo-"))
        .collect();
    ours.sort();
    ours
}

/// The folders whose lock no demonstration holds.
fn dead_folders_in(folder: &Path) -> Vec<PathBuf> {
    let mut ours = folders_in(folder);
    ours.retain(|path| {
        File::open(path.join("cbd-demo.lock")).is_ok_and(|lock| lock.try_lock().is_ok()) && path.exists()
    });
    ours
}

fn text(file: &mut File) -> String {
    use std::io::Seek;
    let mut text = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut text)).expect("the output");
    text
}

fn end(process: &mut Child) {
    let _ = process.kill();
    let _ = process.wait();
}

#[track_caller]
fn above_zero(report: &Value, pointer: &str) {
    let value = report.pointer(pointer).and_then(Value::as_f64);
    assert!(value.is_some_and(|value| value > 0.0), "{pointer} is {value:?} in {report:#}");
}

#[track_caller]
fn check_report(report: &Value) {
    assert_eq!(report["ok"], true);
    assert_eq!(report["error"], Value::Null);
    assert_eq!(report["backing_verified"], true);
    assert_eq!(report["kill"]["lost"], 0);
    assert_eq!(report["kill"]["verified"], report["kill"]["acknowledged"]);
    for device in ["uncached", "cached", "memory"] {
        for kind in ["write", "read"] {
            for figure in ["iops", "p50_us", "p99_us", "p999_us", "count"] {
                above_zero(report, &format!("/results/{device}/{kind}/{figure}"));
            }
        }
    }
    for pointer in [
        "/kill/acknowledged",
        "/kill/in_flight",
        "/kill/dirty_bytes",
        "/kill/dirty_bytes_recovered",
        "/kill/acknowledged_after",
        "/drain/written_bytes",
        "/backing/verified",
        "/working_set_bytes",
        "/cache_bytes",
        "/samples",
        "/throttle/seek_ms",
        "/throttle/rpm",
        "/duration_s",
    ] {
        above_zero(report, pointer);
    }
    // Otherwise the disk was measured.
    assert_eq!(report["results"]["cached"]["read_missed_bytes"], 0, "{report:#}");
    let median = |device: &str| report["results"][device]["write"]["p50_us"].as_f64().expect("a number");
    assert!(median("cached") * 5.0 < median("uncached"), "a cache that is not faster: {report:#}");
}

#[test]
fn the_demonstration_succeeds_by_nbd_and_leaves_nothing() {
    if !system_tests("the_demonstration_succeeds_by_nbd_and_leaves_nothing") {
        return;
    }
    let demo_run = DemoRun::new();
    let report = demo_run.run(&["--quick", "--json", "--path", "nbd"]);
    check_report(&report);
    assert_eq!(report["path"], "nbd");
    assert!(report["fallback_reason"].is_string());
    demo_run.expect_no_leftovers();
}

#[test]
fn the_demonstration_succeeds_on_a_file_system_and_leaves_nothing() {
    if !system_tests("the_demonstration_succeeds_on_a_file_system_and_leaves_nothing") {
        return;
    }
    let demo_run = DemoRun::with_loop_devices();
    let report = demo_run.run(&["--quick", "--json", "--path", "fuse-loop"]);
    check_report(&report);
    assert_eq!(report["path"], "fuse-loop");
    assert_eq!(report["fallback_reason"], Value::Null);
    assert_eq!(report["backing"]["file_system_checked"], true);
    demo_run.expect_no_leftovers();
}

#[track_caller]
fn check_hosts_report(report: &Value) {
    assert_eq!(report["ok"], true);
    assert_eq!(report["error"], Value::Null);
    assert_eq!(report["backing_verified"], true);
    for (index, name) in ["a", "b"].into_iter().enumerate() {
        assert_eq!(report["hosts"][index]["host"], name);
        for (number, host) in ["a", "b"].into_iter().enumerate() {
            let seen = &report["hosts"][index]["hosts"][number];
            assert_eq!((&seen["hostname"], &seen["alive"]), (&host.into(), &true.into()), "{report:#}");
            assert_eq!(seen["this"], host == name, "{report:#}");
        }
    }
    for device in ["disk", "host_a", "host_b"] {
        for kind in ["write", "read"] {
            for figure in ["iops", "p50_us", "p99_us", "p999_us", "count"] {
                above_zero(report, &format!("/results/{device}/{kind}/{figure}"));
            }
        }
    }
    let median = |device: &str| report["results"][device]["write"]["p50_us"].as_f64().expect("a number");
    assert!(median("host_b") * 5.0 < median("disk"), "a channel that is not faster: {report:#}");
    let figures = [
        ("kills_of_a", 1, &["dirty_bytes", "down_ms", "back_ms", "pause_ms"][..]),
        ("kills_of_b", 1, &["down_ms", "back_ms", "reconnected_clients", "completed_on_a_while_down"]),
        ("moves", 2, &["pause_ms", "duration_ms", "slowest_on_a_ms", "slowest_on_b_ms", "dirty_bytes"]),
    ];
    let compared = |pointer: &str| {
        above_zero(report, &format!("{pointer}/acknowledged"));
        let field = |name: &str| report.pointer(&format!("{pointer}/{name}"));
        assert_eq!((field("lost"), field("verified")), (Some(&0.into()), field("acknowledged")), "{pointer}");
    };
    compared("/verified_through_both");
    for (step, count, fields) in figures {
        assert_eq!(report[step].as_array().map(Vec::len), Some(count), "{report:#}");
        for index in 0..count {
            fields.iter().for_each(|field| above_zero(report, &format!("/{step}/{index}/{field}")));
            compared(&format!("/{step}/{index}"));
        }
    }
    let kill = &report["kills_of_a"][0];
    assert!(kill["pause_ms"].as_f64() >= kill["down_ms"].as_f64(), "no client waited: {report:#}");
    let ends = |index: usize| (&report["moves"][index]["from"], &report["moves"][index]["to"]);
    assert_eq!((ends(0), ends(1)), ((&"a".into(), &"b".into()), (&"b".into(), &"a".into())));
    // The file has all writes, also those after the last move.
    let last = report["moves"][1]["acknowledged"].as_u64();
    assert!(report["backing"]["verified"].as_u64() >= last, "{report:#}");
    assert_eq!(report["backing"]["bytes"], report["working_set_bytes"]);
}

#[test]
fn the_demonstration_with_hosts_succeeds_and_leaves_nothing() {
    if !system_tests("the_demonstration_with_hosts_succeeds_and_leaves_nothing") {
        return;
    }
    let demo_run = DemoRun::new();
    check_hosts_report(&demo_run.run(&["--hosts", "--quick", "--json"]));
    demo_run.expect_no_leftovers();
}

#[test]
fn a_demonstration_whose_host_dies_fails_and_leaves_nothing() {
    if !system_tests("a_demonstration_whose_host_dies_fails_and_leaves_nothing") {
        return;
    }
    let demo_run = DemoRun::new();
    let (mut demo, mut output) = demo_run.start(&["--hosts", "--json"]);
    until_daemons_work(&demo_run, 2);
    // The demonstration does not kill it before its fifth step.
    let is_of_b = |(_, line): &&(PathBuf, String)| line.contains("/b/run/control.sock");
    let (process, _) = demo_run.processes().iter().find(is_of_b).cloned().expect("the daemon of host b");
    support::child::signal(&process.file_name().expect("its number").to_string_lossy(), libc::SIGKILL);
    assert_eq!(wait(&mut demo, TIMEOUT).and_then(|status| status.code()), Some(1));
    let report: Value = serde_json::from_str(&text(&mut output)).expect("one JSON object");
    assert_eq!((&report["ok"], &report["backing_verified"]), (&false.into(), &false.into()));
    assert!(report["error"]["message"].is_string(), "{report:#}");
    demo_run.expect_no_leftovers();
}

#[test]
fn a_path_that_hosts_do_not_have_is_refused() {
    let demo_run = DemoRun::new();
    let (mut demo, mut output) = demo_run.start(&["--hosts", "--json", "--path", "fuse-loop"]);
    assert_eq!(wait(&mut demo, TIMEOUT).and_then(|status| status.code()), Some(1));
    let report: Value = serde_json::from_str(&text(&mut output)).expect("one JSON object");
    let message = report["error"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("--path fuse-loop: with --hosts"), "{report:#}");
    demo_run.expect_no_leftovers();
}

#[test]
fn the_report_has_the_reason_for_nbd_without_privileges() {
    if !system_tests("the_report_has_the_reason_for_nbd_without_privileges") {
        return;
    }
    let demo_run = DemoRun::new();
    // The program is copied to a folder that other users can read.
    let folder = demo_run.folder.path();
    std::fs::copy(env!("CARGO_BIN_EXE_cbdctrl"), folder.join("cbdctrl")).expect("a copy");
    let open = |path: &Path| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("rights");
    };
    open(folder);
    open(&folder.join("cbdctrl"));
    let mut command = Command::new(folder.join("cbdctrl"));
    command.args(["demo", "--quick", "--json"]).env("TMPDIR", folder);
    std::os::unix::process::CommandExt::uid(&mut command, 65534);
    std::os::unix::process::CommandExt::gid(&mut command, 65534);
    let ran = support::run_for(command, TIMEOUT);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let report: Value = serde_json::from_str(&ran.stdout).expect("one JSON object");
    check_report(&report);
    assert_eq!(report["path"], "nbd");
    assert!(report["fallback_reason"].as_str().is_some_and(|reason| reason.len() > 10), "{report:#}");
    demo_run.expect_no_leftovers();
}

/// Waits until so many daemons run and the demonstration has begun its work.
#[track_caller]
fn until_daemons_work(demo_run: &DemoRun, count: usize) {
    until("the daemons", || {
        let processes = demo_run.processes();
        processes.iter().filter(|(_, line)| line.contains(" daemon ")).count() == count
    });
    std::thread::sleep(Duration::from_millis(1500));
}

#[track_caller]
fn interrupted_with(arguments: &[&str], signal: i32) {
    let has_loop_devices = arguments.contains(&"fuse-loop");
    let demo_run = if has_loop_devices { DemoRun::with_loop_devices() } else { DemoRun::new() };
    let (mut demo, mut output) = demo_run.start(&[&["--json"], arguments].concat());
    until_daemons_work(&demo_run, if arguments.contains(&"--hosts") { 2 } else { 1 });
    support::child::signal(&demo.id().to_string(), signal);
    let status = wait(&mut demo, Duration::from_secs(30));
    if status.is_none() {
        end(&mut demo);
    }
    assert_eq!(status.and_then(|status| status.code()), Some(130));
    let report: Value = serde_json::from_str(&text(&mut output)).expect("one JSON object");
    assert_eq!(report["ok"], false);
    demo_run.expect_no_leftovers();
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    if system_tests("ctrl_c_leaves_nothing_behind") {
        interrupted_with(&["--path", "nbd"], libc::SIGINT);
    }
}

#[test]
fn ctrl_c_leaves_no_mount_behind() {
    if system_tests("ctrl_c_leaves_no_mount_behind") {
        interrupted_with(&["--path", "fuse-loop"], libc::SIGINT);
    }
}

#[test]
fn ctrl_c_leaves_no_host_behind() {
    if system_tests("ctrl_c_leaves_no_host_behind") {
        interrupted_with(&["--hosts"], libc::SIGINT);
    }
}

#[test]
fn a_panic_leaves_nothing_behind() {
    if !system_tests("a_panic_leaves_nothing_behind") {
        return;
    }
    let demo_run = DemoRun::with_loop_devices();
    for arguments in [&["--path", "nbd"][..], &["--path", "fuse-loop"], &["--hosts"]] {
        let (mut demo, _) = demo_run.start(&[&["--quick", "--json", "--panic"], arguments].concat());
        let status = wait(&mut demo, TIMEOUT);
        if status.is_none() {
            end(&mut demo);
        }
        assert_eq!(status.and_then(|status| status.code()), Some(101), "{arguments:?}");
        demo_run.expect_no_leftovers();
    }
}

/// Whether the process with this folder in `/proc` has ended. It remains a zombie until the process that adopted it
/// waits for it.
fn has_ended(process: &Path) -> bool {
    std::fs::read_to_string(process.join("status"))
        .map_or(true, |status| status.lines().any(|line| line.starts_with("State:") && line.contains('Z')))
}

#[test]
fn the_leftovers_of_a_killed_demonstration_are_removed_by_the_next() {
    if !system_tests("the_leftovers_of_a_killed_demonstration_are_removed_by_the_next") {
        return;
    }
    let demo_run = DemoRun::with_loop_devices();
    let (mut demo, _) = demo_run.start(&["--json", "--path", "fuse-loop"]);
    until_daemons_work(&demo_run, 1);
    until("its loop devices", || !demo_run.loop_devices().is_empty());
    let (processes, devices) = (demo_run.processes(), demo_run.loop_devices());
    assert!(!processes.is_empty());
    end(&mut demo);
    // Its children end with it. A process that is about to end has no command line, so their state is checked. The
    // folders remain.
    until("the end of every process", || processes.iter().all(|(process, _)| has_ended(process)));
    until("the end of every loop device", || {
        !devices.iter().any(|device| file_of(device).trim() == "/cbd0") && demo_run.loop_devices().is_empty()
    });
    assert!(!folders_in(demo_run.folder.path()).is_empty());
    let report = demo_run.run(&["--quick", "--json", "--path", "nbd"]);
    assert!(report["swept"].as_array().is_some_and(|swept| swept.len() >= 2), "{report:#}");
    demo_run.expect_no_leftovers();
}

#[test]
fn the_hosts_of_a_killed_demonstration_end_with_it_and_the_next_removes_their_region() {
    let name = "the_hosts_of_a_killed_demonstration_end_with_it_and_the_next_removes_their_region";
    if !system_tests(name) {
        return;
    }
    let demo_run = DemoRun::new();
    let (mut demo, _) = demo_run.start(&["--hosts", "--json"]);
    until_daemons_work(&demo_run, 2);
    let processes = demo_run.processes();
    end(&mut demo);
    until("the end of every process", || processes.iter().all(|(process, _)| has_ended(process)));
    assert_eq!(
        (folders_in(demo_run.folder.path()).len(), dead_folders_in(Path::new("/dev/shm")).len()),
        (1, 1)
    );
    // Whichever demonstration is started next removes both.
    let (mut next, mut output) = demo_run.start(&["--hosts", "--quick", "--json"]);
    until("the folders are removed", || dead_folders_in(Path::new("/dev/shm")).is_empty());
    until_daemons_work(&demo_run, 2);
    support::child::signal(&next.id().to_string(), libc::SIGINT);
    assert_eq!(wait(&mut next, TIMEOUT).and_then(|status| status.code()), Some(130));
    let report: Value = serde_json::from_str(&text(&mut output)).expect("one JSON object");
    assert_eq!(report["swept"].as_array().map(Vec::len), Some(2), "{report:#}");
    demo_run.expect_no_leftovers();
}
