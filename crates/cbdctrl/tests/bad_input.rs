//! Refused input: the error is one line that names the object, the same in JSON, and nothing is changed.

mod support;

use serde_json::Value;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};
use support::sandbox::{Mounted, in_sandbox};
use support::{MIB, Place, Ran, run_for, text_of, tool};

/// The state that a refused command must not change: the lists, except counters, and the bytes of the files in `watched`.
fn everything(place: &Place, watched: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = [
        &["tp-list"][..],
        &["host-list"],
        &["backend-list", "--all"],
        &["dev-list", "--all"],
        &["set", "--backend", "0", "--json", "writeback_rate=5M"],
    ]
    .iter()
    .map(|arguments| {
        let text = place.run(arguments).stdout;
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
fn says(ran: &Ran, parts: &[&str]) {
    let line = ran.stderr.trim_end();
    assert_eq!(line.lines().count(), 1, "one line on stderr: {:?}", ran.stderr);
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in: {line}");
    }
}

/// Asserts that `cbdctrl` refuses `arguments` with a line that has all `parts`, with and without `--json`, and changes nothing.
#[track_caller]
fn refused(place: &Place, arguments: &[&str], parts: &[&str], watched: &[&str]) {
    let before = everything(place, watched);
    let ran = place.run(arguments);
    assert_eq!(ran.code, 1, "{arguments:?}: {ran:?}");
    assert_eq!(ran.stdout, "", "{arguments:?} prints nothing");
    says(&ran, parts);
    let ran = place.run(&[arguments, &["--json"]].concat());
    assert_eq!(ran.code, 1, "{arguments:?} --json: {ran:?}");
    says(&ran, parts);
    let answer: Value = serde_json::from_str(&ran.stdout).expect("an error in JSON");
    let (kind, message) = (&answer["error"]["kind"], answer["error"]["message"].as_str().unwrap_or(""));
    assert!(kind.is_string(), "{answer}");
    assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} are not in {message:?}");
    assert_eq!(everything(place, watched), before, "{arguments:?} changed something");
}

/// Asserts that wrong usage ends with exit code 2 before a request is sent.
#[track_caller]
fn wrong_usage(place: &Place, arguments: &[&str]) {
    let ran = place.run_at("/nonexistent/socket", arguments);
    assert_eq!(ran.code, 2, "{arguments:?}: {ran:?}");
    assert!(!ran.stderr.is_empty() && ran.stdout.is_empty(), "{ran:?}");
}

/// A daemon with a region, a disk of 32 MiB and backend 0 on it.
fn place_with_backend() -> (Place, String) {
    let place = Place::with_region();
    let disk = place.disk("disk", 32 * MIB);
    place.start_backend(&disk);
    (place, disk)
}

fn change(path: &str, at: u64, change: impl Fn(&mut [u8; 192])) {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("the region");
    let mut bytes = [0; 192];
    file.read_exact_at(&mut bytes, at).expect("a superblock");
    change(&mut bytes);
    file.write_all_at(&bytes, at).expect("a superblock");
}

/// A region with a transport that no daemon uses.
fn idle_region(place: &Place, name: &str) -> String {
    let path = place.in_memory(name);
    place.ok(&["tp-reg", "-p", &path, "-s", "16M", "-H", "other", "-f"]);
    let list = place.json(&["tp-list"]);
    let mine = list.as_array().expect("a list").iter().find(|it| it["path"] == path.as_str());
    let id = mine.expect("it is registered")["transport_id"].to_string();
    place.ok(&["tp-unreg", "-t", &id]);
    path
}

#[test]
fn bad_regions_are_refused() {
    let (place, _) = place_with_backend();
    let register = |path: &str, parts: &[&str]| {
        refused(&place, &["tp-reg", "-H", "node0", "-p", path], parts, &[path]);
    };
    let missing = place.in_memory("missing");
    register(&missing, &[&missing, "--format"]);
    let foreign = place.in_memory("foreign");
    std::fs::write(&foreign, "a foreign text\n".repeat(1 << 20)).expect("a file");
    register(&foreign, &[&foreign]);
    refused(&place, &["tp-reg", "-H", "n", "-p", &foreign, "-f"], &[&foreign, "--force"], &[&foreign]);
    let small = place.in_memory("small");
    refused(
        &place,
        &["tp-reg", "-H", "n", "-p", &small, "-s", "64K", "-f"],
        &[&small, "64 KiB", "10 MiB in all"],
        &[&small],
    );
    let segments = ["tp-reg", "-H", "n", "-p", &small, "-s", "64M", "-f", "--segment-size", "100K"];
    refused(&place, &segments, &[&small, "100 KiB", "64 KiB to 64 MiB"], &[&small]);
    assert!(!Path::new(&small).exists(), "a refused format makes no file");
    let cut = idle_region(&place, "cut");
    std::fs::File::options().write(true).open(&cut).and_then(|it| it.set_len(8 << 20)).expect("a file");
    register(&cut, &[&cut]);
    let folder = text_of(&place.path("state"));
    refused(&place, &["tp-reg", "-H", "node0", "-p", &folder], &[&folder], &[]);
}

#[test]
fn a_damaged_region_is_refused() {
    let (place, _) = place_with_backend();
    let damaged = idle_region(&place, "damaged");
    for at in [0, (16 << 20) - 4096] {
        change(&damaged, at, |bytes| bytes[60] ^= 0x40);
    }
    refused(&place, &["tp-reg", "-H", "n", "-p", &damaged], &[&damaged, "checksum"], &[&damaged]);
}

#[test]
fn a_region_with_one_damaged_superblock_can_be_opened() {
    let (place, _) = place_with_backend();
    let damaged = idle_region(&place, "damaged");
    change(&damaged, 0, |bytes| bytes[60] ^= 0x40);
    place.ok(&["tp-reg", "-H", "other", "-p", &damaged]);
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
    let (place, _) = place_with_backend();
    let newer = idle_region(&place, "newer");
    change_superblocks(&newer, |bytes| {
        bytes[12..16].copy_from_slice(&(cbd_format::FORMAT_VERSION + 1).to_le_bytes());
    });
    refused(&place, &["tp-reg", "-H", "n", "-p", &newer], &[&newer, "version", "newer CBD"], &[&newer]);
}

#[test]
fn a_region_with_a_feature_of_a_newer_version_is_refused() {
    let (place, _) = place_with_backend();
    let newer = idle_region(&place, "newer");
    change_superblocks(&newer, |bytes| bytes[32 + 5] = 1);
    let parts = [newer.as_str(), "newer CBD", "uses feature 40"];
    refused(&place, &["tp-reg", "-H", "n", "-p", &newer], &parts, &[&newer]);
    let ran = place.run(&["tp-reg", "-H", "n", "-p", &newer]);
    assert!(!ran.stderr.contains("force") && !ran.stderr.contains("format"), "{ran:?}");
}

#[test]
fn a_region_that_holds_a_transport_is_formatted_by_force_only() {
    let (place, _) = place_with_backend();
    let other = idle_region(&place, "other");
    let format = ["tp-reg", "-H", "other", "-p", &other, "-s", "16M", "-f"];
    refused(&place, &format, &[&other, "--force"], &[&other]);
    place.ok(&[&format[..], &["-F"]].concat());
    // A region in use is not formatted, with or without force.
    let region = place.region();
    refused(&place, &["tp-reg", "-H", "n", "-p", &region, "-f", "-F"], &[&region], &[]);
    assert_eq!(place.json(&["dev-list"])[0]["alive"], true);
}

#[test]
fn a_region_that_another_daemon_uses_is_refused() {
    let (place, _) = place_with_backend();
    let mut second = Place::new();
    second.start();
    let region = place.region();
    refused(&second, &["tp-reg", "-H", "n", "-p", &region], &[&region], &[]);
    refused(&second, &["tp-reg", "-H", "n", "-p", &region, "-f", "-F"], &[&region], &[]);
    place.client().write(0, &[1; 512], true).expect("the first goes on");
}

#[test]
fn a_cache_that_does_not_fit_is_refused_with_the_limit() {
    let (place, _) = place_with_backend();
    let disk = place.disk("second", 8 * MIB);
    let export = format!("nbd:unix:{}", place.text("second.sock"));
    let with = |size: &str, parts: &[&str]| {
        let arguments = ["backend-start", "-p", &disk, "-c", size, "-D", "-e", &export];
        refused(&place, &arguments, &[&[disk.as_str()], parts].concat(), &[&disk]);
    };
    with("1M", &["a cache of 1 MiB is too small", "9 MiB"]);
    with("1000000", &["a cache of 1000000 bytes is too small", "9 MiB"]);
    with("512G", &["a cache of 512 GiB is larger than the free space", "47 MiB"]);
    with("60M", &["a cache of 60 MiB is larger than the free space", "47 MiB"]);
}

#[test]
fn a_backend_without_a_cache_has_a_warning_unless_the_user_requested_none() {
    let place = Place::with_region();
    let (one, other) = (place.disk("one", 8 * MIB), place.disk("other", 8 * MIB));
    let ran = place.run(&["backend-start", "-p", &one]);
    assert_eq!(ran.code, 0, "{ran:?}");
    says(&ran, &["warning", "backend 0 has no cache", &one, "--cache-size"]);
    let ran = place.run(&["backend-start", "-p", &other, "-c", "0"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{ran:?}");
}

#[test]
fn with_require_kernel_an_nbd_server_is_refused() {
    let place = Place::with_region();
    let disk = place.disk("disk", 8 * MIB);
    // No link can be created there, so no kernel device has a name.
    std::fs::write(place.link(0), "no link").expect("a file");
    let start = ["backend-start", "-p", &disk, "-c", "16M", "--start-dev"];
    let required = [&start[..], &["--require-kernel"]].concat();
    refused(&place, &required, &["no kernel block device can be made"], &[&disk]);
    assert_eq!(place.json(&["backend-list"]), serde_json::json!([]), "nothing is left of it");
    place.ok(&["backend-start", "-p", &disk, "-c", "16M"]);
    refused(
        &place,
        &["dev-start", "-b", "0", "--require-kernel"],
        &["no kernel block device can be made"],
        &[],
    );
    let nbd = ["dev-start", "-b", "0", "--require-kernel", "--export", "nbd:tcp:127.0.0.1:0"];
    refused(&place, &nbd, &["nbd:tcp:127.0.0.1:0", "--require-kernel"], &[]);
    assert!(place.ok(&["dev-start", "-b", "0"]).starts_with("nbd+unix:"), "without it NBD will do");
}

#[test]
fn a_malformed_configuration_ends_the_daemon_with_the_line_of_the_error() {
    let place = Place::new();
    let config = place.text("cbd.toml");
    let start = |parts: &[&str]| {
        let ran = run_for(place.daemon_command(), Duration::from_secs(15));
        assert_eq!(ran.code, 1, "{ran:?}");
        says(&ran, &[&[config.as_str()], parts].concat());
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
    let (place, disk) = place_with_backend();
    let start = |path: &str, parts: &[&str]| {
        refused(&place, &["backend-start", "-p", path, "-c", "16M"], parts, &[]);
    };
    let missing = place.text("missing");
    start(&missing, &[&missing]);
    start("/dev/null", &["/dev/null"]);
    let folder = place.text("state");
    start(&folder, &[&folder]);
    std::fs::write(place.path("empty"), b"").expect("a file");
    start(&place.text("empty"), &[&place.text("empty")]);
    // The same disk, under this name and another one.
    std::fs::hard_link(&disk, place.path("other-name")).expect("a link");
    start(&disk, &[&disk, "backend 0"]);
    start(&place.text("other-name"), &["backend 0"]);
    let region = place.region();
    start(&region, &[&region]);
}

#[test]
fn a_backing_device_without_write_permission_is_refused() {
    // Root may write to every file: only a read-only mount prevents it.
    in_sandbox("a_backing_device_without_write_permission_is_refused", Duration::from_secs(60), |folder| {
        let mut place = Place::under(folder);
        place.start();
        place.register("64M");
        let tree = folder.join("tree");
        std::fs::create_dir(&tree).expect("a folder");
        tool("mount", &["-t", "tmpfs", "none", &text_of(&tree)]);
        let disk = text_of(&tree.join("disk"));
        std::fs::write(&disk, vec![1; 8 << 20]).expect("a disk");
        tool("mount", &["-o", "remount,ro", &text_of(&tree)]);
        refused(&place, &["backend-start", "-p", &disk, "-c", "16M"], &[&disk], &[]);
        tool("umount", &[&text_of(&tree)]);
    });
}

#[test]
fn a_file_without_permission_to_write_is_refused() {
    let place = Place::with_region();
    let disk = place.disk("disk", 8 * MIB);
    std::fs::set_permissions(&disk, std::fs::Permissions::from_mode(0o400)).expect("changed");
    if std::fs::File::options().write(true).open(&disk).is_ok() {
        return println!("not run: this user may write to every file");
    }
    refused(&place, &["backend-start", "-p", &disk, "-c", "16M"], &[&disk], &[]);
}

#[test]
fn a_mounted_backing_device_is_refused() {
    in_sandbox("a_mounted_backing_device_is_refused", Duration::from_secs(60), |folder| {
        let mut place = Place::under(folder);
        place.start();
        place.register("64M");
        let disk = place.disk("disk", 32 * MIB);
        tool("mkfs.ext4", &["-q", &disk]);
        let mounted = Mounted::new(&disk, &folder.join("mnt"), "loop");
        refused(&place, &["backend-start", "-p", &disk, "-c", "16M"], &[&disk, "loop"], &[]);
        let listed = tool("losetup", &["--noheadings", "--output", "NAME", "--associated", &disk]);
        let device = listed.trim();
        refused(&place, &["backend-start", "-p", device, "-c", "16M"], &[device], &[]);
        mounted.unmount();
        place.ok(&["backend-start", "-p", &disk, "-c", "16M"]);
        place.ok(&["backend-stop", "-b", "0"]);
    });
}

/// Stops the daemon, changes the disk, and restarts the daemon: until the disk is restored, the backend is not served, for a
/// reason that contains `parts`.
#[track_caller]
fn is_not_served(swap: impl Fn(&str, &str), parts: &[&str]) {
    let (mut place, disk) = place_with_backend();
    place.client().write(0, &[9; 65536], true).expect("written");
    place.terminate();
    let aside = place.text("aside");
    swap(&disk, &aside);
    place.start();
    let backend = place.json(&["backend-list"])[0].clone();
    let reason = backend["error"].as_str().unwrap_or_default().to_owned();
    assert_eq!(backend["alive"], false, "{backend}");
    for part in [&[disk.as_str()], parts].concat() {
        assert!(reason.contains(part), "{part:?} is not in: {reason}");
    }
    assert!(place.ok(&["status"]).contains(&reason), "the status says why");
    refused(&place, &["drain", "-b", "0"], &["backend 0"], &[]);
    refused(&place, &["backend-stop", "-b", "0"], &["backend 0", "dirty"], &[]);
    place.terminate();
    let _ = std::fs::remove_file(&disk);
    std::fs::rename(&aside, &disk).expect("the disk is back");
    let file = std::fs::File::options().write(true).open(&disk).expect("the disk");
    file.set_len(32 * MIB).expect("its size is back");
    place.start();
    let mut data = [0; 65536];
    place.client().read(0, &mut data).expect("it is served again");
    assert_eq!(data, [9; 65536]);
    place.ok(&["backend-stop", "-b", "0"]);
}

#[test]
fn an_exchanged_backing_device_is_refused_with_both_identities() {
    let swap = |disk: &str, aside: &str| {
        std::fs::rename(disk, aside).expect("renamed");
        std::fs::write(disk, vec![0; 32 << 20]).expect("another disk");
    };
    is_not_served(swap, &["recorded [file size=", "found [file size=", "inode"]);
}

#[test]
fn a_shrunk_backing_device_is_refused() {
    let swap = |disk: &str, aside: &str| {
        std::fs::rename(disk, aside).expect("renamed");
        std::fs::hard_link(aside, disk).expect("the same file");
        let file = std::fs::File::options().write(true).open(disk).expect("the disk");
        file.set_len(31 * MIB).expect("shrunk");
    };
    is_not_served(swap, &[&(32 * MIB).to_string(), &(31 * MIB).to_string()]);
}

#[test]
fn a_missing_backing_device_is_refused() {
    is_not_served(|disk, aside| std::fs::rename(disk, aside).expect("renamed"), &["does not exist"]);
}

#[test]
fn unknown_numbers_are_refused() {
    let (place, disk) = place_with_backend();
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
        refused(&place, arguments, &[part], &[]);
    }
}

#[test]
fn an_invalid_setting_is_refused() {
    let (place, _) = place_with_backend();
    for value in ["91", "-1", "", "x", "256", "1e3"] {
        refused(&place, &["set", "-b", "0", &format!("gc_percent={value}")], &["gc_percent", value], &[]);
    }
    refused(&place, &["set", "-b", "0", "consistency=maybe"], &["maybe"], &[]);
    refused(&place, &["set", "-b", "0", "writeback_rate=fast"], &["writeback_rate"], &[]);
    refused(&place, &["set", "-b", "0", "colour=red"], &["colour"], &[]);
    // All settings of a command are changed, or none.
    refused(
        &place,
        &["set", "-b", "0", "gc_percent=40", "writeback_percent=91"],
        &["writeback_percent"],
        &[],
    );
}

#[test]
fn wrong_usage_ends_with_2() {
    let place = Place::new();
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
        wrong_usage(&place, arguments);
    }
}

#[test]
fn an_open_device_is_not_stopped() {
    let (place, _) = place_with_backend();
    let mut client = place.client();
    client.write(0, &[3; 4096], false).expect("written");
    refused(&place, &["dev-stop", "-d", "0"], &["NBD client", "--force"], &[]);
    refused(&place, &["backend-stop", "-b", "0"], &["NBD client", "--force"], &[]);
    refused(&place, &["tp-unreg", "-t", "0"], &["backend 0"], &[]);
    client.write(0, &[4; 4096], false).expect("it goes on");
}

#[test]
fn a_mounted_device_is_not_stopped() {
    in_sandbox("a_mounted_device_is_not_stopped", Duration::from_secs(60), |folder| {
        let mut place = Place::under(folder);
        place.start();
        place.register("64M");
        let disk = place.disk("disk", 64 * MIB);
        let device = place.start_block_device(&disk, "16M");
        tool("mkfs.ext4", &["-q", &device]);
        let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
        let at = text_of(&folder.join("mnt"));
        refused(&place, &["dev-stop", "-d", "0"], &[&at], &[]);
        refused(&place, &["backend-stop", "-b", "0"], &[&at], &[]);
        std::fs::write(mounted.path("file"), b"it goes on").expect("written");
        mounted.unmount();
        let held = std::fs::File::open(&device).expect("opened");
        refused(&place, &["dev-stop", "-d", "0"], &["open"], &[]);
        drop(held);
        place.ok(&["dev-stop", "-d", "0"]);
        place.ok(&["backend-stop", "-b", "0"]);
        tool("e2fsck", &["-fn", &disk]);
    });
}

#[test]
fn a_second_daemon_on_the_same_socket_is_refused() {
    let (place, _) = place_with_backend();
    let before = everything(&place, &[]);
    let ran = run_for(place.daemon_command(), Duration::from_secs(15));
    assert_eq!(ran.code, 1, "{ran:?}");
    says(&ran, &[&place.socket()]);
    // With folders of its own, too.
    let other = Place::new();
    let mut command = other.daemon_command();
    command.args(["--socket", &place.socket()]);
    let ran = run_for(command, Duration::from_secs(15));
    assert_eq!(ran.code, 1, "{ran:?}");
    says(&ran, &[&place.socket()]);
    assert_eq!(everything(&place, &[]), before);
}

#[test]
fn a_socket_without_a_listener_is_named() {
    let mut place = Place::with_region();
    let missing = place.text("missing.sock");
    let ran = place.run_at(&missing, &["status"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    says(&ran, &[&missing, "cbdd"]);
    // The socket of a killed daemon.
    place.kill();
    let ran = place.run(&["status", "--json"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    says(&ran, &[&place.socket(), "cbdd"]);
    let answer: Value = serde_json::from_str(&ran.stdout).expect("an error in JSON");
    assert!(answer["error"]["message"].as_str().is_some_and(|text| text.contains(&place.socket())));
}

#[test]
fn a_command_reports_in_time_that_a_stopped_daemon_does_not_respond() {
    let (place, _) = place_with_backend();
    place.pause();
    let process = format!("(process {})", place.pid());
    let commands: [&[&str]; 4] = [
        &["status", "--timeout", "1"],
        &["backend-list", "--timeout", "1"],
        &["drain"],
        &["set", "-b", "0", "gc_percent=60"],
    ];
    for arguments in commands {
        let ran = place.run(arguments);
        assert_eq!(ran.code, 1, "{ran:?}");
        says(&ran, &[&place.socket(), &process, "does not answer"]);
    }
    place.resume();
    place.ok(&["status"]);
}

/// Backend 0 with 1 MiB of dirty data over a disk that takes no writes.
fn place_with_failing_disk() -> (Place, String, u64) {
    let mut place = Place::new();
    place.decorate = Some("fault:op=write".to_owned());
    place.start();
    place.register("64M");
    let disk = place.disk("disk", 32 * MIB);
    place.start_backend(&disk);
    place.client().write(MIB, &[8; 1 << 20], true).expect("the cache takes it");
    let dirty = place.cache()["dirty_bytes"].as_u64().expect("a number");
    assert_eq!(dirty, MIB);
    (place, disk, dirty)
}

#[test]
fn a_stop_with_a_failing_disk_ends_in_time_and_all_data_is_kept() {
    let (mut place, disk, dirty) = place_with_failing_disk();
    let began = Instant::now();
    let ran = place.run(&["backend-stop", "-b", "0", "--timeout", "3"]);
    let took = began.elapsed();
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!((Duration::from_secs(2)..Duration::from_secs(15)).contains(&took), "it took {took:?}");
    let dirty_text = dirty.to_string();
    says(&ran, &["backend 0", &dirty_text, "--discard-dirty"]);
    assert_eq!(place.cache()["dirty_bytes"], dirty);
    assert!(place.cache()["last_error"].is_string());
    let mut data = vec![0; 1 << 20];
    place.client().read(MIB, &mut data).expect("it is served as before");
    assert!(data == [8; 1 << 20]);
    // The disk is repaired, and the stop completes.
    place.terminate();
    place.decorate = None;
    place.start();
    place.ok(&["backend-stop", "-b", "0"]);
    let plain = std::fs::read(&disk).expect("the disk");
    assert!(plain[1 << 20..2 << 20] == [8; 1 << 20]);
}

#[test]
fn dirty_data_is_dropped_only_when_its_size_is_typed() {
    let (place, disk, dirty) = place_with_failing_disk();
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
        refused(&place, &arguments, &["backend 0", &dirty.to_string(), &wrong.to_string()], &[&disk]);
        assert_eq!(place.cache()["dirty_bytes"], dirty);
    }
    let arguments = stop(dirty);
    place.ok(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(place.json(&["backend-list"]), serde_json::json!([]));
    assert!(std::fs::read(&disk).expect("the disk").iter().all(|byte| *byte == 0), "nothing was written");
}
