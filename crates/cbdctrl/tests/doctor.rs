//! `doctor` on the machine of the test: it ends in time whatever hangs, and its output can be read by programs.

#[allow(dead_code)]
#[path = "../../daemon/tests/manager/silent.rs"]
mod silent;
mod support;

use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, Ran, run_for, text_of};

/// A time within which it ends, however slow the machine is.
const LIMIT: Duration = Duration::from_secs(30);

fn doctor(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
    command.args(["doctor", "--json", "--socket", "/nonexistent/socket"]).args(arguments);
    command
}

/// The report, whose verdict has to agree with the exit code.
#[track_caller]
fn report(ran: &Ran) -> Value {
    let report: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    let is_problem = report["verdict"] == "problem";
    assert_eq!(ran.code, i32::from(is_problem), "{}\n{}", ran.stdout, ran.stderr);
    for finding in report["findings"].as_array().expect("findings") {
        assert!(finding["verdict"] == "ok" || finding["why"].is_string(), "{finding}");
    }
    report
}

/// The findings of a check.
fn findings<'a>(report: &'a Value, check: &str) -> Vec<&'a Value> {
    let all = report["findings"].as_array().expect("findings").iter();
    all.filter(|finding| finding["check"] == check).collect()
}

#[test]
fn it_works_without_a_daemon_and_says_what_it_could_not_see() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let region = folder.path().join("cbd-region");
    std::fs::write(&region, vec![0; 1 << 20]).expect("a file");
    let missing = text_of(&folder.path().join("missing"));
    let report = report(&run_for(doctor(&[&text_of(&region), &missing]), LIMIT));
    for check in
        ["kernel.version", "kernel.ublk", "kernel.fuse", "kernel.io-uring", "cpu.flush", "daemon.running"]
    {
        assert_eq!(findings(&report, check).len(), 1, "{check}: {report}");
    }
    let regions = findings(&report, "memory.region");
    assert_eq!((&regions[0]["verdict"], &regions[1]["verdict"]), (&"warning".into(), &"problem".into()));
    assert!(regions[0]["found"].as_str().expect("text").starts_with("process-crash (tmpfs"), "{report}");
    assert!(report["unseen"].to_string().contains("no daemon runs"), "{report}");
    assert_eq!(std::fs::read(&region).expect("the file"), vec![0; 1 << 20]);
    assert!(!std::path::Path::new(&missing).exists());
}

#[test]
fn it_works_for_a_user_who_may_not_read_disks() {
    if !support::system_tests("it_works_for_a_user_who_may_not_read_disks") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("cbdctrl");
    std::fs::copy(env!("CARGO_BIN_EXE_cbdctrl"), &program).expect("a copy");
    support::tool("chmod", &["a+rx", &text_of(folder.path()), &text_of(&program)]);
    let mut command = Command::new(&program);
    command.args(["doctor", "--json"]).env("CBD_SOCKET", "/nonexistent/socket").uid(65_534).gid(65_534);
    let report = report(&run_for(command, LIMIT));
    assert_eq!(findings(&report, "kernel.version").len(), 1, "{report}");
    assert!(findings(&report, "disks.other-cache").is_empty(), "{report}");
}

#[test]
fn it_shows_the_daemon_and_its_limits() {
    let fixture = Fixture::with_region();
    fixture.start_backend(&fixture.disk("disk", 64 * MIB));
    let report = report(&fixture.run(&["doctor", "--json", &fixture.region()]));
    assert_eq!(findings(&report, "daemon.running")[0]["verdict"], "ok", "{report}");
    assert_eq!(findings(&report, "daemon.version")[0]["verdict"], "ok", "{report}");
    let limits = findings(&report, "limits.descriptors");
    assert_eq!(limits[0]["subject"], format!("daemon, process {}", fixture.pid()), "{report}");
    // The region is in use, and is looked at all the same.
    assert_eq!(findings(&report, "memory.region")[0]["verdict"], "warning", "{report}");
    let page = fixture.run(&["doctor", "-t", "7"]);
    assert!(page.code == 1 && page.stderr.contains("no transport 7"), "{}", page.stderr);
}

#[test]
fn a_daemon_that_is_stopped_is_a_problem() {
    let fixture = Fixture::with_region();
    fixture.pause();
    let ran = fixture.run(&["doctor", "--json"]);
    fixture.resume();
    assert_eq!(findings(&report(&ran), "daemon.running")[0]["verdict"], "problem", "{}", ran.stdout);
}

#[test]
fn what_hangs_is_named_and_delays_it_by_seconds_only() {
    in_sandbox("what_hangs_is_named_and_delays_it_by_seconds_only", Duration::from_secs(60), |folder| {
        let mounted = folder.join("silent");
        std::fs::create_dir(&mounted).expect("a folder");
        let silent = silent::Silent::over(&mounted);
        let began = Instant::now();
        let names = ["one", "two"].map(|name| text_of(&mounted.join(name)));
        let ran = run_for(doctor(&[&names[0], &names[1], "/dev/null"]), LIMIT);
        let took = began.elapsed();
        drop(silent);
        let report = report(&ran);
        let regions = findings(&report, "memory.region");
        for region in &regions[..2] {
            assert!(region["found"].as_str().expect("text").contains("does not answer"), "{region}");
        }
        assert!(regions[2]["found"].as_str().expect("text").contains("/dev/null"), "{report}");
        // Two seconds for each of the two; the disks of the machine may need some, too.
        assert!(took < Duration::from_secs(20), "{took:?}");
    });
}

#[test]
fn what_another_cache_left_on_a_disk_is_found() {
    in_sandbox("what_another_cache_left_on_a_disk_is_found", Duration::from_secs(60), |folder| {
        let file = folder.join("disk");
        let mut image = vec![0; 1 << 20];
        // The superblock of dm-writecache: its magic and version.
        image[..8].copy_from_slice(&[0x21, 0x93, 0x48, 0x23, 1, 0, 0, 0]);
        std::fs::write(&file, &image).expect("a file");
        let device = support::tool("losetup", &["--find", "--show", "--read-only", &text_of(&file)]);
        let device = device.trim();
        let ran = run_for(doctor(&[device]), LIMIT);
        support::tool("losetup", &["--detach", device]);
        let report = report(&ran);
        let found = findings(&report, "disks.other-cache");
        let of_device: Vec<_> = found.iter().filter(|finding| finding["subject"] == device).collect();
        assert!(of_device[0]["found"].as_str().expect("text").contains("dm-writecache"), "{report}");
        assert!(of_device[0]["fix"][0].as_str().expect("text").contains("lvconvert"), "{report}");
        assert_eq!(std::fs::read(&file).expect("the file"), image);
    });
}

#[test]
fn a_cached_disk_in_fstab_is_a_problem_and_the_device_over_it_is_not() {
    const TEST: &str = "a_cached_disk_in_fstab_is_a_problem_and_the_device_over_it_is_not";
    in_sandbox(TEST, Duration::from_secs(90), |folder| {
        let mut fixture = Fixture::under(folder);
        let image = fixture.disk("image", 64 * MIB);
        support::tool("mkfs.ext4", &["-q", "-L", "cbd-doctor", &image]);
        let device = support::tool("losetup", &["--find", "--show", &image]);
        let device = device.trim();
        fixture.start();
        fixture.register("64M");
        fixture.start_backend(device);
        // The mounts of the sandbox are its own.
        let table = text_of(&folder.join("fstab"));
        std::fs::write(&table, "LABEL=cbd-doctor /srv ext4 defaults 0 2\n").expect("a file");
        support::tool("mount", &["--bind", &table, "/etc/fstab"]);
        let raw = fixture.run(&["doctor", "--json"]);
        std::fs::write(&table, "/dev/cbd0 /srv ext4 _netdev,nofail 0 0\n").expect("a file");
        let cached = fixture.run(&["doctor", "--json"]);
        fixture.ok(&["backend-stop", "-b", "0"]);
        support::tool("losetup", &["--detach", device]);
        let (raw, cached) = (report(&raw), report(&cached));
        let found = findings(&raw, "boot.fstab");
        assert_eq!(
            (&found[0]["verdict"], &found[0]["subject"]),
            (&"problem".into(), &device.into()),
            "{raw}"
        );
        assert!(found[0]["found"].as_str().expect("text").contains("LABEL=cbd-doctor"), "{raw}");
        assert!(found[0]["fix"][0].as_str().expect("text").contains("_netdev"), "{raw}");
        assert!(findings(&cached, "boot.fstab").is_empty(), "{cached}");
        assert_eq!(findings(&cached, "boot")[0]["verdict"], "ok", "{cached}");
    });
}
