//! Refused input: the error is one line that names the object, the same in JSON, and nothing is changed.

#[path = "bad_input/exchanged_disks.rs"]
mod exchanged_disks;
mod support;

use serde_json::Value;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, Ran, run_for, text_of, tool};

/// State that a refused command must not change: the lists without counters, and the bytes of the files in `watched`.
fn observable_state(fixture: &Fixture, watched: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = [
        &["tp-list"][..],
        &["host-list"],
        &["backend-list", "--all"],
        &["dev-list", "--all"],
        &["set", "--backend", "0", "--json", "writeback_rate=5M"],
    ]
    .iter()
    .map(|arguments| {
        let text = fixture.run(arguments).stdout;
        match serde_json::from_str::<Value>(&text) {
            Ok(mut value) => {
                for each in value.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
                    for by_itself in ["retry_in_s", "dirty_bytes", "cache_used_segs", "state"] {
                        each.remove(by_itself);
                    }
                }
                value.to_string()
            }
            Err(_) => text,
        }
    })
    .collect();
    all.extend(watched.iter().map(|path| {
        let bytes = std::fs::read(path).unwrap_or_default();
        format!("{path}: {} bytes, {:#x}", bytes.len(), cbd_format::crc32c(&bytes))
    }));
    all
}

/// Asserts that the text is one line with all `parts`.
#[track_caller]
fn assert_line(ran: &Ran, parts: &[&str]) {
    let line = ran.stderr.trim_end();
    assert_eq!(line.lines().count(), 1, "one line on stderr: {:?}", ran.stderr);
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in: {line}");
    }
}

/// Asserts that `cbdctrl` refuses `arguments` with a line that has all `parts`, also with `--json`, and changes nothing.
#[track_caller]
fn refused(fixture: &Fixture, arguments: &[&str], parts: &[&str], watched: &[&str]) {
    let before = observable_state(fixture, watched);
    let ran = fixture.run(arguments);
    assert_eq!(ran.code, 1, "{arguments:?}: {ran:?}");
    assert_eq!(ran.stdout, "", "{arguments:?} prints nothing");
    assert_line(&ran, parts);
    let ran = fixture.run(&[arguments, &["--json"]].concat());
    assert_eq!(ran.code, 1, "{arguments:?} --json: {ran:?}");
    assert_line(&ran, parts);
    let answer: Value = serde_json::from_str(&ran.stdout).expect("an error in JSON");
    let (kind, message) = (&answer["error"]["kind"], answer["error"]["message"].as_str().unwrap_or(""));
    assert!(kind.is_string(), "{answer}");
    assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} are not in {message:?}");
    assert_eq!(observable_state(fixture, watched), before, "{arguments:?} changed something");
}

/// Asserts that wrong usage ends with exit code 2 before a request is sent.
#[track_caller]
fn wrong_usage(fixture: &Fixture, arguments: &[&str]) {
    let ran = fixture.run_at("/nonexistent/socket", arguments);
    assert_eq!(ran.code, 2, "{arguments:?}: {ran:?}");
    assert!(!ran.stderr.is_empty() && ran.stdout.is_empty(), "{ran:?}");
}

/// A daemon with a region, a disk of 32 MiB and backend 0 on it.
fn fixture_with_backend() -> (Fixture, String) {
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 32 * MIB);
    fixture.start_backend(&disk);
    (fixture, disk)
}

fn change(path: &str, at: u64, change: impl Fn(&mut [u8; 192])) {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("the region");
    let mut bytes = [0; 192];
    file.read_exact_at(&mut bytes, at).expect("a superblock");
    change(&mut bytes);
    file.write_all_at(&bytes, at).expect("a superblock");
}

/// A region with a transport that no daemon uses.
fn idle_region(fixture: &Fixture, name: &str) -> String {
    let path = fixture.in_memory(name);
    fixture.ok(&["tp-reg", "-p", &path, "-s", "16M", "-H", "other", "-f"]);
    let list = fixture.json(&["tp-list"]);
    let mine = list.as_array().expect("a list").iter().find(|it| it["path"] == path.as_str());
    let id = mine.expect("it is registered")["transport_id"].to_string();
    fixture.ok(&["tp-unreg", "-t", &id]);
    path
}

#[test]
fn bad_regions_are_refused() {
    let (fixture, _) = fixture_with_backend();
    let register = |path: &str, parts: &[&str]| {
        refused(&fixture, &["tp-reg", "-H", "node0", "-p", path], parts, &[path]);
    };
    let missing = fixture.in_memory("missing");
    register(&missing, &[&missing, "--format"]);
    let foreign = fixture.in_memory("foreign");
    std::fs::write(&foreign, "a foreign text\n".repeat(1 << 20)).expect("a file");
    register(&foreign, &[&foreign]);
    refused(&fixture, &["tp-reg", "-H", "n", "-p", &foreign, "-f"], &[&foreign, "--force"], &[&foreign]);
    let small = fixture.in_memory("small");
    refused(
        &fixture,
        &["tp-reg", "-H", "n", "-p", &small, "-s", "64K", "-f"],
        &[&small, "64 KiB", "10 MiB in all"],
        &[&small],
    );
    let segments = ["tp-reg", "-H", "n", "-p", &small, "-s", "64M", "-f", "--segment-size", "100K"];
    refused(&fixture, &segments, &[&small, "100 KiB", "64 KiB to 64 MiB"], &[&small]);
    assert!(!Path::new(&small).exists(), "a refused format makes no file");
    let cut = idle_region(&fixture, "cut");
    std::fs::File::options().write(true).open(&cut).and_then(|it| it.set_len(8 << 20)).expect("a file");
    register(&cut, &[&cut]);
    let folder = text_of(&fixture.path("state"));
    refused(&fixture, &["tp-reg", "-H", "node0", "-p", &folder], &[&folder], &[]);
}

#[test]
fn a_damaged_region_is_refused() {
    let (fixture, _) = fixture_with_backend();
    let damaged = idle_region(&fixture, "damaged");
    for at in [0, (16 << 20) - 4096] {
        change(&damaged, at, |bytes| bytes[60] ^= 0x40);
    }
    refused(&fixture, &["tp-reg", "-H", "n", "-p", &damaged], &[&damaged, "checksum"], &[&damaged]);
}

#[test]
fn a_region_with_one_damaged_superblock_can_be_opened() {
    let (fixture, _) = fixture_with_backend();
    let damaged = idle_region(&fixture, "damaged");
    change(&damaged, 0, |bytes| bytes[60] ^= 0x40);
    fixture.ok(&["tp-reg", "-H", "other", "-p", &damaged]);
}

/// Changes both superblocks of a region and corrects their checksums.
fn change_superblocks(region: &str, change_one: impl Fn(&mut [u8; 192])) {
    for at in [0, (16 << 20) - 4096] {
        change(region, at, |bytes| {
            change_one(bytes);
            let sum = cbd_format::crc32c(&bytes[12..]);
            bytes[8..12].copy_from_slice(&sum.to_le_bytes());
        });
    }
}

#[test]
fn a_region_of_a_newer_version_is_refused() {
    let (fixture, _) = fixture_with_backend();
    let newer = idle_region(&fixture, "newer");
    change_superblocks(&newer, |bytes| {
        bytes[12..16].copy_from_slice(&(cbd_format::FORMAT_VERSION + 1).to_le_bytes());
    });
    refused(&fixture, &["tp-reg", "-H", "n", "-p", &newer], &[&newer, "version", "newer CBD"], &[&newer]);
}

#[test]
fn a_region_with_a_feature_of_a_newer_version_is_refused() {
    let (fixture, _) = fixture_with_backend();
    let newer = idle_region(&fixture, "newer");
    change_superblocks(&newer, |bytes| bytes[32 + 5] = 1);
    let parts = [newer.as_str(), "newer CBD", "uses feature 40"];
    refused(&fixture, &["tp-reg", "-H", "n", "-p", &newer], &parts, &[&newer]);
    let ran = fixture.run(&["tp-reg", "-H", "n", "-p", &newer]);
    assert!(!ran.stderr.contains("force") && !ran.stderr.contains("format"), "{ran:?}");
}

#[test]
fn a_region_that_holds_a_transport_is_formatted_by_force_only() {
    let (fixture, _) = fixture_with_backend();
    let other = idle_region(&fixture, "other");
    let format = ["tp-reg", "-H", "other", "-p", &other, "-s", "16M", "-f"];
    refused(&fixture, &format, &[&other, "--force"], &[&other]);
    fixture.ok(&[&format[..], &["-F"]].concat());
    // A region in use is not formatted, with or without force.
    let region = fixture.region();
    refused(&fixture, &["tp-reg", "-H", "n", "-p", &region, "-f", "-F"], &[&region], &[]);
    assert_eq!(fixture.json(&["dev-list"])[0]["alive"], true);
}

#[test]
fn a_region_that_another_daemon_uses_is_refused() {
    let (fixture, _) = fixture_with_backend();
    let mut second = Fixture::new();
    second.start();
    let region = fixture.region();
    refused(&second, &["tp-reg", "-H", "n", "-p", &region], &[&region], &[]);
    refused(&second, &["tp-reg", "-H", "n", "-p", &region, "-f", "-F"], &[&region], &[]);
    fixture.client().write(0, &[1; 512], true).expect("the first continues");
}

#[test]
fn a_cache_that_does_not_fit_is_refused_with_the_limit() {
    let (fixture, _) = fixture_with_backend();
    let disk = fixture.disk("second", 8 * MIB);
    let export = format!("nbd:unix:{}", fixture.text("second.sock"));
    let with = |size: &str, parts: &[&str]| {
        let arguments = ["backend-start", "-p", &disk, "-c", size, "-D", "-e", &export];
        refused(&fixture, &arguments, &[&[disk.as_str()], parts].concat(), &[&disk]);
    };
    with("1M", &["a cache of 1 MiB is too small", "9 MiB"]);
    with("1000000", &["a cache of 1000000 bytes is too small", "9 MiB"]);
    with("512G", &["a cache of 512 GiB is larger than the free space", "47 MiB"]);
    with("60M", &["a cache of 60 MiB is larger than the free space", "47 MiB"]);
}

#[test]
fn a_backend_without_a_cache_has_a_warning_unless_the_user_requested_none() {
    let fixture = Fixture::with_region();
    let (one, other) = (fixture.disk("one", 8 * MIB), fixture.disk("other", 8 * MIB));
    let ran = fixture.run(&["backend-start", "-p", &one]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_line(&ran, &["warning", "backend 0 has no cache", &one, "--cache-size"]);
    let ran = fixture.run(&["backend-start", "-p", &other, "-c", "0"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{ran:?}");
}

#[test]
fn with_require_kernel_an_nbd_server_is_refused() {
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    // No link can be created there, so no kernel device has a name.
    std::fs::write(fixture.link(0), "no link").expect("a file");
    let start = ["backend-start", "-p", &disk, "-c", "16M", "--start-dev"];
    let required = [&start[..], &["--require-kernel"]].concat();
    refused(&fixture, &required, &["no kernel block device can be made"], &[&disk]);
    assert_eq!(fixture.json(&["backend-list"]), serde_json::json!([]), "nothing is left of it");
    fixture.ok(&["backend-start", "-p", &disk, "-c", "16M"]);
    refused(
        &fixture,
        &["dev-start", "-b", "0", "--require-kernel"],
        &["no kernel block device can be made"],
        &[],
    );
    let nbd = ["dev-start", "-b", "0", "--require-kernel", "--export", "nbd:tcp:127.0.0.1:0"];
    refused(&fixture, &nbd, &["nbd:tcp:127.0.0.1:0", "--require-kernel"], &[]);
    assert!(fixture.ok(&["dev-start", "-b", "0"]).starts_with("nbd+unix:"), "without it NBD will do");
}

#[test]
fn a_malformed_configuration_ends_the_daemon_with_the_line_of_the_error() {
    let fixture = Fixture::new();
    let config = fixture.text("cbd.toml");
    let start = |parts: &[&str]| {
        let ran = run_for(fixture.daemon_command(), Duration::from_secs(15));
        assert_eq!(ran.code, 1, "{ran:?}");
        assert_line(&ran, &[&[config.as_str()], parts].concat());
    };
    for (line, part) in [("handlers = 900", "1 to 128, not 900"), ("export = \"nbd\"", "is no export")] {
        std::fs::write(&config, format!("[defaults]\n{line}\n")).expect("a file");
        start(&["line 2", part]);
    }
    std::fs::remove_file(&config).expect("removed");
    start(&["does not exist", "--config"]);
}

#[test]
fn bad_backing_devices_are_refused() {
    let (fixture, disk) = fixture_with_backend();
    let start = |path: &str, parts: &[&str]| {
        refused(&fixture, &["backend-start", "-p", path, "-c", "16M"], parts, &[]);
    };
    let missing = fixture.text("missing");
    start(&missing, &[&missing]);
    start("/dev/null", &["/dev/null"]);
    let folder = fixture.text("state");
    start(&folder, &[&folder]);
    std::fs::write(fixture.path("empty"), b"").expect("a file");
    start(&fixture.text("empty"), &[&fixture.text("empty")]);
    // The same disk, under this name and another one.
    std::fs::hard_link(&disk, fixture.path("other-name")).expect("a link");
    start(&disk, &[&disk, "backend 0"]);
    start(&fixture.text("other-name"), &["backend 0"]);
    let region = fixture.region();
    start(&region, &[&region]);
}

#[test]
fn a_backing_device_without_write_permission_is_refused() {
    // Root may write to every file: only a read-only mount prevents it.
    in_sandbox("a_backing_device_without_write_permission_is_refused", Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let tree = folder.join("tree");
        std::fs::create_dir(&tree).expect("a folder");
        tool("mount", &["-t", "tmpfs", "none", &text_of(&tree)]);
        let disk = text_of(&tree.join("disk"));
        std::fs::write(&disk, vec![1; 8 << 20]).expect("a disk");
        tool("mount", &["-o", "remount,ro", &text_of(&tree)]);
        refused(&fixture, &["backend-start", "-p", &disk, "-c", "16M"], &[&disk], &[]);
        tool("umount", &[&text_of(&tree)]);
    });
}

#[test]
fn a_file_without_permission_to_write_is_refused() {
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    std::fs::set_permissions(&disk, std::fs::Permissions::from_mode(0o400)).expect("changed");
    if std::fs::File::options().write(true).open(&disk).is_ok() {
        return println!("not run: this user may write to every file");
    }
    refused(&fixture, &["backend-start", "-p", &disk, "-c", "16M"], &[&disk], &[]);
}

#[test]
fn a_mounted_backing_device_is_refused() {
    in_sandbox("a_mounted_backing_device_is_refused", Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", 32 * MIB);
        tool("mkfs.ext4", &["-q", &disk]);
        let mounted = Mounted::new(&disk, &folder.join("mnt"), "loop");
        refused(&fixture, &["backend-start", "-p", &disk, "-c", "16M"], &[&disk, "loop"], &[]);
        let listed = tool("losetup", &["--noheadings", "--output", "NAME", "--associated", &disk]);
        let device = listed.trim();
        refused(&fixture, &["backend-start", "-p", device, "-c", "16M"], &[device], &[]);
        mounted.unmount();
        fixture.ok(&["backend-start", "-p", &disk, "-c", "16M"]);
        fixture.ok(&["backend-stop", "-b", "0"]);
    });
}

#[test]
fn unknown_numbers_are_refused() {
    let (fixture, disk) = fixture_with_backend();
    let cases: [(&[&str], &str); 12] = [
        (&["host-list", "-t", "7"], "transport 7"),
        (&["backend-list", "-t", "7"], "transport 7"),
        (&["dev-list", "-t", "7"], "transport 7"),
        (&["tp-unreg", "-t", "7"], "transport 7"),
        (&["backend-start", "-t", "7", "-p", &disk], "transport 7"),
        (&["backend-stop", "-b", "9"], "backend 9"),
        (&["dev-start", "-b", "9"], "backend 9"),
        (&["dev-stop", "-d", "9"], "device 9"),
        (&["set", "-b", "9", "gc_percent=50"], "backend 9"),
        (&["checkpoint", "-b", "9"], "backend 9"),
        (&["drain", "-b", "9"], "backend 9"),
        (&["backend-stop", "-t", "7", "-b", "0"], "transport 7"),
    ];
    for (arguments, part) in cases {
        refused(&fixture, arguments, &[part], &[]);
    }
}

#[test]
fn an_invalid_setting_is_refused() {
    let (fixture, _) = fixture_with_backend();
    for value in ["99", "-1", "", "x", "256", "1e3"] {
        refused(&fixture, &["set", "-b", "0", &format!("gc_percent={value}")], &["gc_percent", value], &[]);
    }
    refused(&fixture, &["set", "-b", "0", "consistency=maybe"], &["maybe"], &[]);
    refused(&fixture, &["set", "-b", "0", "writeback_rate=fast"], &["writeback_rate"], &[]);
    refused(&fixture, &["set", "-b", "0", "colour=red"], &["colour"], &[]);
    // All settings of a command are changed, or none.
    refused(
        &fixture,
        &["set", "-b", "0", "gc_percent=40", "writeback_percent=91"],
        &["writeback_percent"],
        &[],
    );
}

#[test]
fn wrong_usage_ends_with_2() {
    let fixture = Fixture::new();
    let cases: [&[&str]; 10] = [
        &[],
        &["tp"],
        &["frobnicate"],
        &["tp-reg", "-H", "n"],
        &["tp-reg", "-H", "n", "-p", "/r", "-F"],
        &["tp-unreg", "-t", "-1"],
        &["backend-start", "-p", "/d", "-c", "lots"],
        &["backend-start", "-p", "/d", "-n", "129"],
        &["backend-stop", "-b", "0", "--discard-dirty"],
        &["set", "-b", "0"],
    ];
    for arguments in cases {
        wrong_usage(&fixture, arguments);
    }
}

#[test]
fn an_open_device_is_not_stopped() {
    let (fixture, _) = fixture_with_backend();
    let mut client = fixture.client();
    client.write(0, &[3; 4096], false).expect("written");
    refused(&fixture, &["dev-stop", "-d", "0"], &["NBD client", "--force"], &[]);
    refused(&fixture, &["backend-stop", "-b", "0"], &["NBD client", "--force"], &[]);
    refused(&fixture, &["tp-unreg", "-t", "0"], &["backend 0"], &[]);
    client.write(0, &[4; 4096], false).expect("it continues");
}

#[test]
fn a_mounted_device_is_not_stopped() {
    in_sandbox("a_mounted_device_is_not_stopped", Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", 64 * MIB);
        let device = fixture.start_block_device(&disk, "16M");
        tool("mkfs.ext4", &["-q", &device]);
        let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
        let at = text_of(&folder.join("mnt"));
        refused(&fixture, &["dev-stop", "-d", "0"], &[&at], &[]);
        refused(&fixture, &["backend-stop", "-b", "0"], &[&at], &[]);
        std::fs::write(mounted.path("file"), b"it continues").expect("written");
        mounted.unmount();
        let held = std::fs::File::open(&device).expect("opened");
        refused(&fixture, &["dev-stop", "-d", "0"], &["open"], &[]);
        drop(held);
        fixture.ok(&["dev-stop", "-d", "0"]);
        fixture.ok(&["backend-stop", "-b", "0"]);
        tool("e2fsck", &["-fn", &disk]);
    });
}

#[test]
fn a_second_daemon_on_the_same_socket_is_refused() {
    let (fixture, _) = fixture_with_backend();
    let before = observable_state(&fixture, &[]);
    let ran = run_for(fixture.daemon_command(), Duration::from_secs(15));
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_line(&ran, &[&fixture.socket()]);
    // With folders of its own, too.
    let other = Fixture::new();
    let mut command = other.daemon_command();
    command.args(["--socket", &fixture.socket()]);
    let ran = run_for(command, Duration::from_secs(15));
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_line(&ran, &[&fixture.socket()]);
    assert_eq!(observable_state(&fixture, &[]), before);
}

#[test]
fn a_socket_without_a_listener_is_named() {
    let mut fixture = Fixture::with_region();
    let missing = fixture.text("missing.sock");
    let ran = fixture.run_at(&missing, &["status"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_line(&ran, &[&missing, "cbdd"]);
    // The socket of a killed daemon.
    fixture.kill();
    let ran = fixture.run(&["status", "--json"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_line(&ran, &[&fixture.socket(), "cbdd"]);
    let answer: Value = serde_json::from_str(&ran.stdout).expect("an error in JSON");
    assert!(answer["error"]["message"].as_str().is_some_and(|text| text.contains(&fixture.socket())));
}

#[test]
fn a_command_reports_in_time_that_a_stopped_daemon_does_not_respond() {
    let (fixture, _) = fixture_with_backend();
    fixture.pause();
    let process = format!("(process {})", fixture.pid());
    let commands: [&[&str]; 4] = [
        &["status", "--timeout", "1"],
        &["backend-list", "--timeout", "1"],
        &["drain"],
        &["set", "-b", "0", "gc_percent=60"],
    ];
    for arguments in commands {
        let ran = fixture.run(arguments);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert_line(&ran, &[&fixture.socket(), &process, "does not answer"]);
    }
    fixture.resume();
    fixture.ok(&["status"]);
}

/// Backend 0 with 1 MiB of dirty data over a disk that takes no writes.
fn fixture_with_failing_disk() -> (Fixture, String, u64) {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 32 * MIB);
    fixture.start_backend(&disk);
    fixture.client().write(MIB, &[8; 1 << 20], true).expect("the cache takes it");
    let dirty = fixture.cache()["dirty_bytes"].as_u64().expect("a number");
    assert_eq!(dirty, MIB);
    (fixture, disk, dirty)
}

#[test]
fn a_stop_with_a_failing_disk_ends_in_time_and_all_data_is_kept() {
    let (mut fixture, disk, dirty) = fixture_with_failing_disk();
    let began = Instant::now();
    let ran = fixture.run(&["backend-stop", "-b", "0", "--timeout", "3"]);
    let took = began.elapsed();
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!((Duration::from_secs(2)..Duration::from_secs(15)).contains(&took), "it took {took:?}");
    let dirty_text = dirty.to_string();
    assert_line(&ran, &["backend 0", &dirty_text, "--discard-dirty"]);
    assert_eq!(fixture.cache()["dirty_bytes"], dirty);
    assert!(fixture.cache()["last_error"].is_string());
    let mut data = vec![0; 1 << 20];
    fixture.client().read(MIB, &mut data).expect("it is served as before");
    assert!(data == [8; 1 << 20]);
    // The disk is repaired, and the stop completes.
    fixture.terminate();
    fixture.decorate = None;
    fixture.start();
    fixture.ok(&["backend-stop", "-b", "0"]);
    let plain = std::fs::read(&disk).expect("the disk");
    assert!(plain[1 << 20..2 << 20] == [8; 1 << 20]);
}

#[test]
fn dirty_data_is_dropped_only_when_its_size_is_typed() {
    let (fixture, disk, dirty) = fixture_with_failing_disk();
    let stop = |bytes: u64| -> Vec<String> {
        ["backend-stop", "-b", "0", "--discard-dirty"]
            .map(str::to_owned)
            .into_iter()
            .chain([bytes.to_string()])
            .collect()
    };
    for wrong in [0, dirty - 1, dirty + 512, u64::MAX] {
        let arguments = stop(wrong);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        refused(&fixture, &arguments, &["backend 0", &dirty.to_string(), &wrong.to_string()], &[&disk]);
        assert_eq!(fixture.cache()["dirty_bytes"], dirty);
    }
    let arguments = stop(dirty);
    fixture.ok(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(fixture.json(&["backend-list"]), serde_json::json!([]));
    assert!(std::fs::read(&disk).expect("the disk").iter().all(|byte| *byte == 0), "nothing was written");
}
