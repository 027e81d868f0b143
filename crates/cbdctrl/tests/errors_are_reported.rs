//! Errors are reported: in the log of the daemon, by `status` and the metrics, and by the offline tools.

mod support;

use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use support::{Fixture, MIB, until};

const BLOCK: usize = 4096;

/// Flips a bit in the only copy of this block in the region.
fn damage_block(fixture: &Fixture, value: u8) {
    let region = std::fs::read(fixture.region()).expect("the region");
    let block = [value; BLOCK];
    let at = region.windows(BLOCK).step_by(64).position(|bytes| bytes == block).expect("it is there") * 64;
    let file = std::fs::File::options().write(true).open(fixture.region()).expect("the region");
    file.write_all_at(&[value ^ 1], at as u64 + 100).expect("written");
}

fn damage_at(fixture: &Fixture, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(fixture.region()).expect("the region");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 0x41], at).expect("written");
}

/// A daemon on a disk that is decorated with `rule`.
fn daemon_on(rule: &str) -> (Fixture, String) {
    let mut fixture = Fixture::new();
    fixture.decorate = Some(format!("fault:{rule}"));
    fixture.start();
    fixture.register("32M");
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.start_backend(&disk);
    (fixture, disk)
}

/// A killed daemon, whose region has the block at 1 MiB that the disk lacks.
fn killed() -> (Fixture, String) {
    let (mut fixture, disk) = daemon_on("op=write");
    fixture.client().write(MIB, &[9; BLOCK], true).expect("written");
    fixture.kill();
    fixture.decorate = None;
    (fixture, disk)
}

/// Waits until the log has a line with all of these.
#[track_caller]
fn expect_in_log(fixture: &Fixture, parts: &[&str]) {
    let has = |log: &str| log.lines().any(|line| parts.iter().all(|part| line.contains(part)));
    until(&format!("{parts:?} in the log"), || has(&fixture.log()));
}

fn backend(fixture: &Fixture) -> Value {
    fixture.json(&["status", "--json"])["transports"][0]["backends"][0].clone()
}

/// The metrics in the format of Prometheus.
fn metrics(fixture: &Fixture) -> String {
    let mut socket = UnixStream::connect(fixture.socket()).expect("the daemon listens");
    socket.write_all(b"GET /v1/metrics HTTP/1.1\r\nHost: cbd\r\nConnection: close\r\n\r\n").expect("asked");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("answered");
    text
}

#[test]
fn the_log_reports_recovery_damage_errors_of_clients_and_their_end() {
    let (mut fixture, disk) = killed();
    damage_block(&fixture, 9);
    fixture.start();
    expect_in_log(&fixture, &[&disk, "recovered in", "1 records, 4096 bytes dirty, 0 ranges damaged"]);
    assert!(fixture.client().read(MIB, &mut [0; BLOCK]).is_err());
    expect_in_log(
        &fixture,
        &["ERROR", &disk, "data in the cache is damaged in 1 ranges: bytes 1048576..1052672"],
    );
    expect_in_log(&fixture, &["ERROR", &disk, "requests of clients fail", "bytes 1048576..1052672"]);
    expect_in_log(&fixture, &["INFO", &disk, "requests of clients no longer fail", "1 in all"]);
    fixture.client().write(MIB, &[7; BLOCK], true).expect("written");
    expect_in_log(&fixture, &["INFO", &disk, "nothing is damaged any more"]);
    let log = fixture.log();
    assert_eq!(log.matches("data in the cache is damaged").count(), 1, "once: {log}");
}

#[test]
fn the_log_reports_damaged_data_that_was_read_from_the_disk_instead() {
    let (fixture, disk) = daemon_on("times=0");
    fixture.client().write(MIB, &[9; BLOCK], true).expect("written");
    fixture.ok(&["drain"]);
    damage_block(&fixture, 9);
    let mut data = [0; BLOCK];
    fixture.client().read(MIB, &mut data).expect("the disk has it");
    assert_eq!(data, [9; BLOCK]);
    expect_in_log(
        &fixture,
        &["WARN", &disk, "failed its checksum and was read from the backing device instead"],
    );
}

#[test]
fn the_log_reports_failing_stalled_and_working_writeback() {
    let (fixture, disk) = daemon_on("op=write,times=6");
    fixture.ok(&["set", "-b", "0", "write_error_after_s=0"]);
    fixture.client().write(MIB, &[9; BLOCK], true).expect("written");
    expect_in_log(&fixture, &["ERROR", &disk, "writeback fails: "]);
    expect_in_log(&fixture, &["ERROR", &disk, "STALLED"]);
    expect_in_log(&fixture, &["INFO", &disk, "no longer STALLED"]);
    expect_in_log(&fixture, &["INFO", &disk, "writeback works again"]);
    assert_eq!(fixture.log().matches("writeback fails: ").count(), 1, "once: {}", fixture.log());
}

#[test]
fn the_log_reports_parked_ranges() {
    let (fixture, disk) = daemon_on("op=write,range=1049088-1049600");
    fixture.ok(&["set", "-b", "0", "on_write_error=park", "write_error_after_s=0"]);
    fixture.client().write(MIB, &[9; BLOCK], true).expect("written");
    expect_in_log(
        &fixture,
        &["WARN", &disk, "the backing device refuses 1 ranges, 512 bytes: bytes 1049088..1049600"],
    );
    fixture.client().write(MIB, &[9; BLOCK], true).expect("written");
}

#[test]
fn the_log_reports_when_recovery_points_cannot_be_logged_and_when_they_can() {
    let (fixture, _) = daemon_on("times=0");
    let folder = fixture.path("state/recovery-points");
    // The daemon may have created it already.
    if folder.exists() {
        std::fs::remove_dir_all(&folder).expect("removed");
    }
    std::fs::write(&folder, "no folder").expect("a file");
    fixture.client().write(MIB, &[9; BLOCK], true).expect("written");
    fixture.ok(&["drain"]);
    let region = fixture.region();
    expect_in_log(&fixture, &["WARN", &region, "the recovery point cannot be logged"]);
    std::fs::remove_file(&folder).expect("removed");
    expect_in_log(&fixture, &["INFO", &region, "recovery points are logged again"]);
    until("the point is there", || folder.exists());
}

#[test]
fn the_log_reports_when_the_control_socket_is_removed_and_restored() {
    let (fixture, _) = daemon_on("times=0");
    let aside = format!("{}.aside", fixture.socket());
    std::fs::rename(fixture.socket(), &aside).expect("moved");
    expect_in_log(&fixture, &["ERROR", "control socket", &fixture.socket(), "was removed"]);
    std::fs::rename(&aside, fixture.socket()).expect("moved back");
    expect_in_log(&fixture, &["INFO", "control socket", "its file is restored"]);
}

#[test]
fn the_status_of_a_backend_that_is_not_served_has_the_contents_of_its_cache() {
    let (mut fixture, disk) = killed();
    std::fs::rename(&disk, fixture.path("elsewhere")).expect("moved");
    fixture.start();
    until("its cache is examined", || backend(&fixture)["held"].is_object());
    let shown = backend(&fixture);
    assert_eq!((&shown["alive"], &shown["held"]["dirty_bytes"]), (&Value::Bool(false), &Value::from(4096)));
    let page = fixture.ok(&["status"]);
    assert!(page.contains("4 KiB (4096 bytes)"), "{page}");
    let metrics = metrics(&fixture);
    let line = metrics.lines().find(|line| line.starts_with("cbd_cache_dirty_bytes{"));
    assert!(line.is_some_and(|line| line.ends_with(" 4096")), "{metrics}");
    expect_in_log(&fixture, &["WARN", &disk, "not served, and its cache holds 4096 bytes that are dirty"]);
    std::fs::rename(fixture.path("elsewhere"), &disk).expect("moved");
    until("it is served", || backend(&fixture)["alive"] == true);
    assert!(backend(&fixture)["held"].is_null());
}

#[test]
fn a_region_restored_from_an_old_copy_is_refused_until_the_user_accepts_it() {
    let (mut fixture, disk) = daemon_on("times=0");
    fixture.client().write(MIB, &[9; BLOCK], true).expect("written");
    fixture.kill();
    let copy = std::fs::read(fixture.region()).expect("the region");
    fixture.start();
    until("it is served", || backend(&fixture)["alive"] == true);
    fixture.client().write(MIB, &[7; BLOCK], true).expect("written");
    fixture.ok(&["drain"]);
    let epoch = backend(&fixture)["cache"]["drained_epoch"].as_u64().expect("a number");
    let logged = || {
        let folder = fixture.path("state/recovery-points");
        let files =
            std::fs::read_dir(folder).map(|files| files.flatten().collect()).unwrap_or_else(|_| Vec::new());
        let texts = files.iter().filter_map(|file| std::fs::read_to_string(file.path()).ok());
        texts.collect::<String>().contains(&format!("\"drained_epoch\":{epoch}"))
    };
    until("the recovery point is logged", logged);
    fixture.terminate();
    std::fs::write(fixture.region(), copy).expect("put back");
    fixture.start();
    let shown = backend(&fixture);
    let error = shown["error"].as_str().expect("it is not served");
    assert!(error.contains("is older than") && error.contains("--older-region"), "{error}");
    assert_eq!(std::fs::read(&disk).expect("the disk")[1 << 20], 7, "nothing was written over it");
    assert_ne!(fixture.run(&["backend-start", "-p", &disk]).code, 0);
    // A start that fails does not accept the older region.
    let away = fixture.text("away");
    std::fs::rename(&disk, &away).expect("renamed");
    assert_ne!(fixture.run(&["backend-start", "-p", &disk, "--older-region"]).code, 0);
    std::fs::rename(&away, &disk).expect("renamed");
    assert!(!fixture.log().contains("the user serves a region"), "{}", fixture.log());
    let refused = fixture.run(&["backend-start", "-p", &disk]);
    assert!(refused.code == 1 && refused.stderr.contains("--older-region"), "{refused:?}");
    fixture.ok(&["backend-start", "-p", &disk, "--older-region"]);
    assert_eq!(backend(&fixture)["alive"], true);
    // The region remains accepted.
    fixture.terminate();
    fixture.start();
    until("it is served", || backend(&fixture)["alive"] == true);
    // With an unreadable log the age of the region is not known, and a warning reports that.
    fixture.terminate();
    for file in std::fs::read_dir(fixture.path("state/recovery-points")).expect("a folder").flatten() {
        std::fs::write(file.path(), [0xff; 64]).expect("damaged");
    }
    fixture.start();
    until("it is served", || backend(&fixture)["alive"] == true);
    let warnings = backend(&fixture)["warnings"].to_string();
    assert!(warnings.contains("cannot be read completely"), "{warnings}");
    expect_in_log(&fixture, &["WARN", "the log of recovery points cannot be read completely", &disk]);
}

#[test]
fn after_a_rescue_to_another_disk_the_former_one_is_refused_and_the_other_served_when_it_is_named() {
    let (mut fixture, disk) = killed();
    let copy = fixture.text("copy");
    std::fs::copy(&disk, &copy).expect("copied");
    let region = fixture.region();
    let rescued = fixture.ok(&["rescue", &region, "-b", "0", "--to", &copy, "--other-disk", "--yes"]);
    assert!(rescued.contains(&format!("moved: {disk} lacks data from now on")), "{rescued}");
    assert!(fixture.ok(&["check", &region]).contains(&format!("moved here by a rescue from {disk}")));
    assert!(fixture.ok(&["dump", &region, "lanes"]).contains("former_disk"));
    fixture.start();
    let shown = backend(&fixture);
    assert_eq!((&shown["alive"], &shown["moved_from"]), (&Value::Bool(false), &Value::from(disk.as_str())));
    assert!(fixture.ok(&["status"]).contains("MOVED"));
    let refused = fixture.run(&["backend-start", "-p", &disk, "-c", "12M"]);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("lacks data") && refused.stderr.contains(&copy), "{refused:?}");
    // A restart does not change this.
    fixture.kill();
    fixture.start();
    assert_eq!(backend(&fixture)["alive"], false);
    fixture.ok(&["backend-start", "-p", &copy]);
    let mut data = [0; BLOCK];
    fixture.client().read(MIB, &mut data).expect("served");
    assert_eq!(data, [9; BLOCK]);
    fixture.kill();
    fixture.start();
    until("it is served at its new path", || backend(&fixture)["alive"] == true);
    assert!(backend(&fixture)["moved_from"].is_null());
}

#[test]
fn a_backend_that_a_rescue_has_moved_can_be_removed_from_the_region() {
    let (mut fixture, disk) = killed();
    let copy = fixture.text("copy");
    std::fs::copy(&disk, &copy).expect("copied");
    fixture.ok(&["rescue", &fixture.region(), "-b", "0", "--to", &copy, "--other-disk", "--yes"]);
    fixture.start();
    fixture.ok(&["backend-stop", "-b", "0"]);
    assert_eq!(fixture.json(&["backend-list"]), Value::Array(Vec::new()));
    assert_eq!(std::fs::read(&copy).expect("a disk")[1 << 20], 9);
    // Now the disk is an ordinary one.
    fixture.ok(&["backend-start", "-p", &disk, "-c", "12M"]);
}

#[test]
fn a_check_without_data_finds_damaged_data_that_the_disk_lacks() {
    let (fixture, _) = killed();
    let region = fixture.region();
    assert_eq!(fixture.run(&["check", &region]).code, 0);
    damage_block(&fixture, 9);
    let checked = fixture.run(&["check", &region]);
    assert_eq!(checked.code, 2, "{checked:?}");
    assert!(checked.stdout.contains("device bytes 1048576..1052672"), "{checked:?}");
}

#[test]
fn a_repair_that_can_repair_nothing_has_an_exit_code_of_its_own() {
    let (fixture, _) = killed();
    damage_block(&fixture, 9);
    let region = fixture.region();
    let repaired = fixture.run(&["repair", &region, "--yes"]);
    assert_eq!(repaired.code, 4, "{repaired:?}");
    assert!(repaired.stdout.contains("NOTHING could be repaired: 1 findings"), "{repaired:?}");
}

#[test]
fn damage_in_unused_rows_of_tables_is_not_fatal_and_causes_no_warning() {
    let (mut fixture, _) = killed();
    let region = fixture.region();
    let dumped = fixture.json(&["dump", &region, "superblock", "--json"]);
    let number = |name: &str| dumped[0][name].as_u64().expect("a number");
    // Both slots of the last row of the backends, the block devices, and the segments.
    let page = |bytes: u64| bytes.next_multiple_of(4096);
    let tables = [
        (number("backend_area"), number("backend_rows"), 1024),
        (number("blkdev_area"), number("blkdev_rows"), 512),
        (number("segment_table"), number("segment_count"), 64),
    ];
    for (area, rows, slot) in tables {
        for first in [area, area + page(rows * slot)] {
            damage_at(&fixture, first + (rows - 1) * slot + 20);
        }
    }
    let checked = fixture.run(&["check", &region]);
    assert_eq!(checked.code, 1, "{checked:?}");
    fixture.start();
    let transport = fixture.json(&["tp-list"])[0].clone();
    let warnings = transport["warnings"].to_string();
    assert!(!warnings.contains("backend 63") && !warnings.contains("damaged"), "{warnings}");
    until("it is served", || backend(&fixture)["alive"] == true);
}

#[test]
fn the_log_status_and_metrics_say_that_the_disk_does_not_answer() {
    let (fixture, disk) = daemon_on("op=write,how=stall");
    fixture.client().write(MIB, &[9; BLOCK], true).expect("written");
    assert_eq!(fixture.run(&["drain", "--timeout", "1"]).code, 1);
    let silent = "the backing device does not answer: a write has had no answer for ";
    expect_in_log(&fixture, &["WARN", &disk, silent]);
    let found = backend(&fixture);
    assert!(found["silent"].as_str().is_some_and(|text| text.starts_with(silent)), "{found}");
    assert!(found["oldest_operation_ms"].as_u64() >= Some(10_000), "{found}");
    let page = fixture.ok(&["status"]);
    assert!(page.contains("SILENT"), "{page}");
    let text = metrics(&fixture);
    let name = "cbd_backend_oldest_operation_ms{";
    let line = text.lines().find(|line| line.starts_with(name)).expect("the metric");
    assert!(line.rsplit(' ').next().and_then(|ms| ms.parse::<u64>().ok()) >= Some(10_000), "{line}");
    let condition = format!("{disk}: {silent}");
    assert_eq!(fixture.log().matches(&condition).count(), 1, "once: {}", fixture.log());
}
