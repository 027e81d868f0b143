//! `check`, `dump`, `repair` and `rescue` on regions of a real daemon that has ended.

mod support;

use cbd_testkit::loop_devices::LoopDevice;
use cbd_testkit::other_machine::OtherMachine;
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::child::dies_with_the_test;
use support::{Fixture, MIB, Ran};

const BLOCK: usize = 4096;

/// Runs a tool that must not need a daemon: no socket is passed to it.
fn offline(fixture: &Fixture, arguments: &[&str]) -> Ran {
    fixture.run_at("/nonexistent/socket", arguments)
}

#[track_caller]
fn offline_json(fixture: &Fixture, arguments: &[&str], code: i32) -> Value {
    let ran = offline(fixture, &[arguments, &["--json"]].concat());
    assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
    serde_json::from_str(&ran.stdout).expect("JSON")
}

/// A killed daemon's region and its disk, and the acknowledged writes.
fn killed(blocks: u64, flushes: bool) -> (Fixture, String, Vec<u8>) {
    let mut fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 32 * MIB);
    fixture.start_backend(&disk);
    let mut expected = vec![0; 32 << 20];
    let mut client = fixture.client();
    for number in 0..blocks {
        let at = number * 37 % 4096 * BLOCK as u64;
        let data = [number as u8 | 1; BLOCK];
        client.write(at, &data, false).expect("written");
        if flushes {
            client.flush().expect("flushed");
        }
        expected[at as usize..at as usize + BLOCK].copy_from_slice(&data);
    }
    drop(client);
    fixture.kill();
    (fixture, disk, expected)
}

fn damage(region: &str, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(region).expect("the region");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 0x41], at).expect("written");
}

#[test]
fn status_and_check_count_the_same_segments() {
    let mut fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 32 * MIB);
    fixture.start_backend(&disk);
    fixture.client().write(0, &vec![1; 3 << 20], true).expect("written");
    let line = fixture.ok(&["status"]).lines().find(|line| line.contains("segments used")).map(str::to_owned);
    let served = fixture.json(&["status", "--json"])["transports"][0]["backends"][0].clone();
    fixture.terminate();
    let checked = offline_json(&fixture, &["check", &fixture.region()], 0)["backends"][0].clone();
    let number = |value: &Value, name: &str| value[name].as_u64().expect("a number");
    assert_eq!(number(&served, "cache_segs"), number(&checked, "segments"), "{line:?}");
    let used = number(&served, "cache_used_segs");
    assert!(used >= 3);
    assert_eq!(used, number(&checked, "segments") - number(&checked, "free_segments"), "{line:?}");
    let text = format!("{used} of {} segments used", number(&checked, "segments"));
    assert!(line.as_ref().is_some_and(|line| line.contains(&text)), "{text}: {line:?}");
}

#[test]
fn a_region_that_a_daemon_serves_is_refused_by_every_tool() {
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.start_backend(&disk);
    let region = fixture.region();
    for arguments in [
        &["check", &region][..],
        &["dump", &region, "tables"],
        &["repair", &region, "--yes"],
        &["repair", &region, "--dry-run"],
        &["rescue", &region],
        &["rescue", &region, "--yes"],
    ] {
        let ran = offline(&fixture, arguments);
        assert_eq!(ran.code, 3, "{arguments:?}: {ran:?}");
        assert!(ran.stderr.contains("in use") && ran.stderr.lines().count() == 1, "{ran:?}");
        let answer = offline_json(&fixture, arguments, 3);
        assert_eq!(answer["error"]["kind"], "busy", "{arguments:?}");
    }
    fixture.client().write(0, &[1; BLOCK], false).expect("the daemon continues");
}

#[test]
fn a_region_that_a_living_machine_elsewhere_has_is_refused_by_every_tool() {
    let (fixture, ..) = killed(1, true);
    let file = tempfile::Builder::new().prefix("cbd-test-").tempfile_in("/dev/shm").expect("a file");
    std::fs::copy(fixture.region(), file.path()).expect("a copy of the region");
    let region = file.path().to_str().expect("a text");
    let other = OtherMachine::take(file.path()).expect("it takes the region");
    let all = [
        &["check", region][..],
        &["dump", region, "tables"],
        &["repair", region],
        &["repair", region, "--yes"],
        &["rescue", region],
        &["rescue", region, "--yes"],
    ];
    for arguments in all {
        let ran = offline(&fixture, arguments);
        assert_eq!(ran.code, 3, "{arguments:?}: {ran:?}");
        let who = "host node-elsewhere (process 4242 there) on another machine";
        assert!(ran.stderr.contains(who), "{arguments:?}: {ran:?}");
    }
    other.release().expect("it is released");
    assert_eq!(offline(&fixture, &["rescue", region, "--yes"]).code, 0);
}

#[test]
fn a_region_beneath_a_loop_device_is_read_with_a_warning_and_not_changed() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it attaches a loop device; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let (fixture, _disk, _expected) = killed(20, true);
    let region = fixture.region();
    let device = LoopDevice::over(&region);
    let name = device.path.clone();
    let before = std::fs::read(&region).expect("the region");
    for arguments in [&["repair", &region, "--yes"][..], &["rescue", &region, "--yes"]] {
        let ran = offline(&fixture, arguments);
        assert_eq!(ran.code, 3, "{arguments:?}: {ran:?}");
        let text = format!("{region} is in use: the loop device {name} stands on it");
        assert!(ran.stderr.contains(&text) && ran.stderr.lines().count() == 1, "{arguments:?}: {ran:?}");
        assert_eq!(offline_json(&fixture, arguments, 3)["error"]["kind"], "busy", "{arguments:?}");
    }
    for (arguments, code) in [
        (&["check", &region][..], 0),
        (&["repair", &region, "--dry-run"], 0),
        (&["rescue", &region], 1),
        (&["dump", &region, "tables"], 0),
    ] {
        let ran = offline(&fixture, arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
        let warning = format!("warning: {region} is in use: the loop device {name} stands on it");
        assert!(ran.stderr.contains(&warning), "{arguments:?}: {ran:?}");
        let json = offline_json(&fixture, arguments, code);
        if arguments[0] != "dump" {
            assert!(json["warnings"][0].as_str().is_some_and(|text| text.contains(&name)), "{json}");
        }
    }
    assert!(std::fs::read(&region).expect("the region") == before, "the region was changed");
    device.detach();
    let ran = offline(&fixture, &["rescue", &region, "--yes"]);
    assert!(ran.code == 0 && !ran.stderr.contains("loop device"), "{ran:?}");
}

#[test]
fn wrong_usage_of_the_tools_ends_with_64() {
    let fixture = Fixture::new();
    for arguments in [
        &["check"][..],
        &["check", "/r", "extra"],
        &["dump", "/r"],
        &["dump", "/r", "everything"],
        &["dump", "/r", "records", "--range", "1G"],
        &["dump", "/r", "records", "--kind", "read"],
        &["dump", "/r", "records", "--sequence", "9..1"],
        &["repair", "/r", "--yes", "--dry-run"],
        &["rescue", "/r", "--to", "/disk"],
        &["rescue", "/r", "-b", "0", "--other-disk"],
    ] {
        let ran = offline(&fixture, arguments);
        assert_eq!(ran.code, 64, "{arguments:?}: {ran:?}");
        assert!(ran.stdout.is_empty() && !ran.stderr.is_empty(), "{ran:?}");
    }
    assert_eq!(offline(&fixture, &["check", "--help"]).code, 0);
    assert_eq!(offline(&fixture, &["check", "/no/such/region"]).code, 3);
}

#[test]
fn a_killed_daemons_region_is_checked_dumped_and_rescued() {
    let (fixture, disk, expected) = killed(200, false);
    let region = fixture.region();
    let before = std::fs::read(&region).expect("the region");
    let report = offline_json(&fixture, &["check", &region, "--data"], 0);
    assert_eq!(report["outcome"], "clean");
    assert!(report["backends"][0]["dirty_records"].as_u64() > Some(0), "{report}");
    let records = offline_json(&fixture, &["dump", &region, "records", "--dirty", "--range", "0+4096"], 0);
    assert_eq!(records[0]["kind"], "write");
    assert_eq!(records[0]["offset"], 0);
    for what in ["superblock", "tables", "segments", "lanes", "records"] {
        assert!(offline(&fixture, &["dump", &region, what]).stdout.lines().count() > 1, "{what}");
    }
    let planned = offline_json(&fixture, &["rescue", &region], 1);
    assert_eq!(planned["dry_run"], true);
    assert_eq!(planned["backends"][0]["disk"], disk.as_str());
    assert_eq!(planned["backends"][0]["disk_error"], Value::Null);
    assert!(std::fs::read(&region).expect("the region") == before, "only --yes changes anything");
    let done = offline_json(&fixture, &["rescue", &region, "--yes"], 0);
    assert_eq!(done["backends"][0]["complete"], true);
    assert!(std::fs::read(&disk).expect("the disk") == expected);
    assert_eq!(offline(&fixture, &["rescue", &region]).code, 0, "nothing is dirty any more");
}

#[test]
fn a_dry_run_of_a_rescue_whose_disk_cannot_be_opened_fails() {
    let (fixture, disk, _) = killed(20, false);
    let (region, away) = (fixture.region(), fixture.text("away"));
    std::fs::rename(&disk, &away).expect("renamed");
    for arguments in [&["rescue", &region][..], &["rescue", &region, "--yes"]] {
        let ran = offline(&fixture, arguments);
        assert_eq!(ran.code, 3, "{arguments:?}: {ran:?}");
        assert!(!ran.stdout.contains("--yes writes it"), "{ran:?}");
    }
    std::fs::rename(&away, &disk).expect("renamed");
    let ran = offline(&fixture, &["rescue", &region]);
    assert!(ran.code == 1 && ran.stdout.contains("--yes writes it"), "{ran:?}");
}

#[test]
fn a_daemon_continues_with_a_region_that_was_rescued() {
    let (mut fixture, _, expected) = killed(100, true);
    assert_eq!(offline(&fixture, &["rescue", &fixture.region(), "--yes"]).code, 0);
    fixture.start();
    assert_eq!(fixture.cache()["dirty_bytes"], 0);
    let mut read = vec![0; BLOCK];
    for at in (0..expected.len()).step_by(BLOCK * 97) {
        fixture.client().read(at as u64, &mut read).expect("read");
        assert!(read == expected[at..at + BLOCK], "at {at}");
    }
}

#[test]
fn a_killed_rescue_continues_when_it_is_repeated() {
    // Each write is an epoch, and each epoch is a flush of the disk, so the rescue takes a while.
    let (fixture, disk, expected) = killed(1500, true);
    let region = fixture.region();
    let untouched = std::fs::read(&disk).expect("the disk");
    let mut kills = 0;
    for _ in 0..20 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        command
            .args(["rescue", &region, "--yes"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        dies_with_the_test(&mut command);
        let now = std::fs::read(&disk).expect("the disk");
        let mut rescue = command.spawn().expect("a rescue");
        let end = Instant::now() + Duration::from_secs(60);
        // As soon as new data is on the disk.
        while std::fs::read(&disk).expect("the disk") == now && rescue.try_wait().expect("ours").is_none() {
            assert!(Instant::now() < end, "a rescue writes nothing");
        }
        let _ = rescue.kill();
        kills += u32::from(rescue.wait().expect("ours").signal() == Some(9));
        if kills >= 3 {
            break;
        }
    }
    assert!(kills > 0, "it was never cut off");
    let on_disk = std::fs::read(&disk).expect("the disk");
    assert!(on_disk != untouched);
    let left = offline_json(&fixture, &["check", &region, "--data"], 0);
    assert_eq!(left["outcome"], "clean");
    let ran = offline(&fixture, &["rescue", &region, "--yes"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(std::fs::read(&disk).expect("the disk") == expected);
}

#[test]
fn a_damaged_region_is_repaired_as_far_as_it_is_safe_and_rescued_except_for_lost_data() {
    let (fixture, disk, mut expected) = killed(60, false);
    let region = fixture.region();
    let records = offline_json(&fixture, &["dump", &region, "records", "--kind", "write"], 0);
    let first = records.as_array().expect("a list").iter().find(|it| it["offset"] == 0).expect("it is dirty");
    damage(&region, 60);
    damage(&region, first["at"].as_u64().expect("a number") + 20);
    assert_eq!(offline(&fixture, &["check", &region]).code, 1);
    let refused = offline(&fixture, &["repair", &region]);
    assert_eq!(refused.code, 1, "there is no terminal to ask at: {refused:?}");
    assert!(refused.stdout.contains("--yes"), "{refused:?}");
    let repaired = offline_json(&fixture, &["repair", &region, "--yes"], 0);
    assert_eq!((&repaired["done"], &repaired["after"]), (&Value::Bool(true), &Value::from("clean")));
    assert_eq!(offline(&fixture, &["check", &region, "--data"]).code, 0);
    // Data of a write that only the cache has.
    damage(&region, first["data_at"].as_u64().expect("a number") + 99);
    let report = offline_json(&fixture, &["check", &region, "--data"], 2);
    assert_eq!(report["backends"][0]["damaged"][0]["offset"], 0);
    assert_eq!(offline(&fixture, &["rescue", &region]).code, 2);
    let done = offline_json(&fixture, &["rescue", &region, "--yes"], 2);
    assert_eq!(done["backends"][0]["damaged"][0]["bytes"], BLOCK);
    expected[..BLOCK].fill(0);
    assert!(std::fs::read(&disk).expect("the disk") == expected);
}

#[test]
fn a_daemon_that_cannot_open_a_region_says_which_tools_can_help() {
    let (mut fixture, _, _) = killed(10, false);
    let region = fixture.region();
    let last = std::fs::metadata(&region).expect("the region").len() - 4096;
    damage(&region, 60);
    damage(&region, last + 60);
    fixture.start();
    let list = fixture.json(&["tp-list"]);
    let error = list[0]["error"].as_str().expect("it is not up");
    assert!(error.contains(&format!("cbdctrl check {region}")) && error.contains("rescue"), "{error}");
    // The daemon does not lock the region, so the tools can open it.
    assert_eq!(offline(&fixture, &["check", &region]).code, 3);
}

#[test]
fn a_result_that_cannot_be_printed_is_an_error() {
    let (fixture, _, _) = killed(3, false);
    let region = fixture.region();
    let into_full = |arguments: &[&str]| {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a full disk");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        command.args(arguments).stdout(full).stdin(Stdio::null());
        let ended = command.output().expect("it runs");
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        let errors: Vec<&str> = said.lines().filter(|line| !line.starts_with("cbdctrl: warning: ")).collect();
        assert!(errors.len() == 1 && errors[0].contains("cannot be printed: No space left"), "{said}");
        ended.status.code()
    };
    assert_eq!(into_full(&["check", &region]), Some(74));
    assert_eq!(into_full(&["dump", &region, "tables"]), Some(74));
    assert_eq!(into_full(&["rescue", &region]), Some(1), "the exit code for dirty data takes precedence");
    assert_eq!(into_full(&["rescue", &region, "--yes"]), Some(74));
    assert_eq!(into_full(&["completions", "bash"]), Some(1));
}

#[test]
fn missing_objects_are_named() {
    let (fixture, _, _) = killed(3, false);
    let region = fixture.region();
    for arguments in [
        &["dump", &region, "records", "-b", "40"][..],
        &["dump", &region, "lanes", "-b", "40"],
        &["rescue", &region, "-b", "40"],
    ] {
        let ran = offline(&fixture, arguments);
        assert_eq!((ran.code, ran.stdout.as_str()), (3, ""), "{arguments:?}: {ran:?}");
        assert!(ran.stderr.contains("no backend 40"), "{ran:?}");
    }
    // The dirty bytes of a backend whose disk was not found are not known, and are not reported as zero.
    let away = fixture.text("away");
    let nowhere = offline_json(&fixture, &["rescue", &region, "-b", "0", "--to", &away, "--yes"], 3);
    assert_eq!(nowhere["backends"][0]["dirty_bytes"], Value::Null, "{nowhere}");
    let small = fixture.text("small");
    std::fs::write(&small, "hello").expect("a file");
    let refused = offline(&fixture, &["check", &small]);
    assert!(refused.stderr.contains(&format!("{small} has 5 bytes")), "{refused:?}");
    let length = std::fs::metadata(&region).expect("the region").len();
    std::fs::File::options()
        .write(true)
        .open(&region)
        .and_then(|file| file.set_len(length / 2))
        .expect("cut");
    for arguments in [
        &["repair", &region, "--yes"][..],
        &["rescue", &region],
        &["rescue", &region, "--yes"],
        &["dump", &region, "tables"],
    ] {
        let ran = offline(&fixture, arguments);
        assert_eq!(ran.code, 3, "{arguments:?}: {ran:?}");
        for part in [&region, "cut short", "cbdctrl check"] {
            assert!(ran.stderr.contains(part), "no {part}: {ran:?}");
        }
    }
}

/// The procedure of docs/operations.md, "When both superblocks are gone".
#[test]
fn a_region_without_superblocks_is_not_formatted_and_is_rescued_by_the_superblock_of_another() {
    let (mut fixture, disk, expected) = killed(40, false);
    let region = fixture.region();
    let length = std::fs::metadata(&region).expect("the region").len();
    let file = std::fs::File::options().write(true).open(&region).expect("the region");
    for at in [0, length - 4096] {
        file.write_all_at(&[0; 4096], at).expect("wiped");
    }
    let wiped = std::fs::read(&region).expect("the region");
    fixture.start();
    let error = fixture.json(&["tp-list"])[0]["error"].as_str().expect("it is not up").to_owned();
    for part in ["both superblocks are gone", &format!("cbdctrl check {region}"), "rescue", "do not format"] {
        assert!(error.contains(part), "no {part}: {error}");
    }
    let format = ["tp-reg", "--path", &region, "--host", "node0", "--format"];
    let refused = fixture.run(&format);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(
        refused.stderr.contains("superblocks are gone")
            && refused.stderr.contains("registered with this daemon"),
        "{refused:?}"
    );
    let report = offline(&fixture, &["check", &region]);
    assert_eq!(report.code, 3);
    assert!(report.stdout.contains("When both superblocks are gone"), "{report:?}");
    assert_eq!(offline(&fixture, &["rescue", &region, "--yes"]).code, 3);
    assert!(std::fs::read(&region).expect("the region") == wiped, "nothing of it was changed");
    // The documented procedure.
    let (blank, copy) = (fixture.in_memory("blank"), fixture.text("copy"));
    let size = length.to_string();
    let made = fixture.json(&["tp-reg", "-p", &blank, "-s", &size, "-H", "any", "--format", "--json"]);
    fixture.ok(&["tp-unreg", "-t", &made["transport_id"].to_string()]);
    std::fs::copy(&region, &copy).expect("a copy");
    let page = &std::fs::read(&blank).expect("the blank")[..4096];
    std::fs::File::options()
        .write(true)
        .open(&copy)
        .and_then(|copy| copy.write_all_at(page, 0))
        .expect("put");
    fixture.kill();
    assert_eq!(
        offline(&fixture, &["check", &copy]).code,
        1,
        "the second superblock is to be repaired, and no more"
    );
    assert_eq!(offline(&fixture, &["rescue", &copy, "--yes"]).code, 0);
    assert!(std::fs::read(&disk).expect("the disk") == expected);
}

#[test]
fn every_tool_ends_with_a_result_on_a_hostile_region() {
    let fixture = Fixture::new();
    let path = fixture.in_memory("hostile");
    for content in [vec![], vec![0; 100], vec![0xff; 1 << 20], b"CBDtrans".repeat(1 << 15)] {
        std::fs::write(&path, &content).expect("a file");
        for arguments in [
            &["check", &path][..],
            &["dump", &path, "records"],
            &["repair", &path, "--yes"],
            &["rescue", &path, "--yes"],
        ] {
            let ran = offline(&fixture, arguments);
            assert_eq!(ran.code, 3, "{arguments:?}: {ran:?}");
        }
        assert!(std::fs::read(&path).expect("the file") == content, "it is left as it is");
    }
}
