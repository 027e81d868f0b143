//! The disk below a cache: udev keeps others off it, and a disk that was written without its cache is noticed.

mod support;

use cbd_testkit::loop_devices::wait_for_release;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::region::RegionFile;
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, Ran, run_for, text_of, tool, until};

const BLOCK: usize = 4096;
/// The UUID of the file system on the disks.
const UUID: &str = "11111111-2222-3333-4444-555555555555";

fn backend(fixture: &Fixture) -> Value {
    fixture.json(&["status", "--json"])["transports"][0]["backends"][0].clone()
}

/// The rules for disks in the folder of the fixture.
fn rules(fixture: &Fixture) -> Vec<PathBuf> {
    let entries = fs::read_dir(fixture.path("rules.d")).map(|entries| entries.flatten().collect());
    let paths = entries.unwrap_or_else(|_| Vec::new()).into_iter().map(|entry| entry.path());
    paths.filter(|path| text_of(path).contains("12-cbd-sealed-")).collect()
}

/// A daemon that caches `disk`, with an NBD server.
fn caching(fixture: &mut Fixture, disk: &str) {
    fixture.start();
    fixture.register("64M");
    fixture.start_backend(disk);
}

/// Asserts that the backend is not served, because the disk was written without its cache, and that a start without the
/// user's word does not change that. Returns the reason.
#[track_caller]
fn refused(fixture: &Fixture, disk: &str) -> String {
    let shown = backend(fixture);
    let error = shown["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("was written while no daemon served it"), "{shown}");
    let again = fixture.run(&["backend-start", "-p", disk]);
    assert!(again.code == 1 && again.stderr.contains("--changed-disk"), "{again:?}");
    error
}

#[track_caller]
fn served(fixture: &Fixture) {
    let shown = backend(fixture);
    assert_eq!(shown["alive"], true, "{shown}\n{}", fixture.log());
}

/// Writes a block to a disk or file as a program does that knows nothing of CBD.
fn write_block(path: &str, at: u64, value: u8) {
    let file = fs::File::options().write(true).open(path).expect("it opens");
    file.write_all_at(&[value; BLOCK], at).expect("written");
    file.sync_all().expect("synced");
}

fn block(path: &str, at: u64) -> u8 {
    let mut block = [0; BLOCK];
    fs::File::open(path).and_then(|file| file.read_exact_at(&mut block, at)).expect("read");
    assert!(block.iter().all(|byte| *byte == block[0]));
    block[0]
}

#[test]
fn a_file_that_was_written_without_its_cache_is_served_only_with_the_users_word() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    caching(&mut fixture, &disk);
    fixture.client().write(MIB, &[7; BLOCK], true).expect("written");
    fixture.terminate();
    // CBD's own writes, and reading, are no reason.
    fs::read(&disk).expect("read");
    fixture.start();
    served(&fixture);
    fixture.terminate();
    let modified = fs::metadata(&disk).and_then(|found| found.modified()).expect("a time");
    write_block(&disk, 2 * MIB, 9);
    fixture.start();
    let error = refused(&fixture, &disk);
    assert!(error.contains("its content was modified at"), "{error}");
    // It stays so over a restart, also if it does not show any more, and a start that fails accepts nothing.
    fixture.terminate();
    let file = fs::File::options().write(true).open(&disk).expect("it opens");
    file.set_modified(modified).expect("a time");
    drop(file);
    fixture.start();
    refused(&fixture, &disk);
    assert_eq!(block(&disk, 2 * MIB), 9, "nothing was written over it");
    fixture.ok(&["backend-start", "-p", &disk, "--changed-disk"]);
    served(&fixture);
    fixture.terminate();
    fixture.start();
    served(&fixture);
    assert!(rules(&fixture).is_empty(), "a file needs no rule");
}

#[test]
fn the_disk_can_win_over_its_cache() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    caching(&mut fixture, &disk);
    fixture.ok(&["set", "-b", "0", "writeback=paused:1h"]);
    fixture.client().write(MIB, &[7; BLOCK], true).expect("written");
    fixture.terminate();
    write_block(&disk, MIB, 9);
    fixture.start();
    refused(&fixture, &disk);
    until("the cache was examined", || backend(&fixture)["held"].is_object());
    refused(&fixture, &disk);
    let dirty = backend(&fixture)["held"]["dirty_bytes"].to_string();
    assert_eq!(dirty, BLOCK.to_string());
    fixture.ok(&["backend-stop", "-b", "0", "--discard-dirty", &dirty]);
    fixture.start_backend(&disk);
    let mut data = [0; BLOCK];
    fixture.client().read(MIB, &mut data).expect("read");
    assert_eq!(data, [9; BLOCK]);
}

#[test]
fn a_daemon_that_is_killed_while_it_writes_raises_no_alarm() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    caching(&mut fixture, &disk);
    for round in 1..4 {
        let mut client = fixture.client();
        for at in 0..64 {
            client.write(at * BLOCK as u64, &[round; BLOCK], at % 8 == 0).expect("written");
        }
        drop(client);
        // Also between a stop and a kill.
        if round == 2 {
            fixture.terminate();
            fixture.start();
        }
        fixture.kill();
        fixture.start();
        until("it is served", || backend(&fixture)["alive"] == true);
        // What happened to the disk meanwhile is not known, and stays so until it was left by a stop.
        let why = backend(&fixture)["unchecked"].to_string();
        assert!(why.contains("was not stopped") && why.contains("cannot be told"), "{why}");
        let page = fixture.ok(&["status"]);
        assert!(page.contains("UNCHECKED") && page.contains("cannot be told"), "{page}");
        let events = fixture.ok(&["events", "-b", "0", "--severity", "warning"]);
        assert!(events.contains("disk.unchecked") && events.contains(&disk), "{events}");
    }
    let log = fixture.log();
    assert!(!log.contains("was written while"), "{log}");
    fixture.terminate();
    fixture.start();
    let shown = backend(&fixture);
    assert!(shown["alive"] == true && shown["unchecked"].is_null(), "{shown}");
    // Without a cache nothing is older than the disk.
    fixture.kill();
    fixture.start();
    until("it is served", || backend(&fixture)["alive"] == true);
    assert!(backend(&fixture)["unchecked"].is_string(), "{}", backend(&fixture));
    fixture.ok(&["cache-detach", "-b", "0"]);
    fixture.ok(&["cache-attach", "-b", "0", "-c", "16M"]);
    assert!(backend(&fixture)["unchecked"].is_null(), "{}", backend(&fixture));
}

#[test]
fn a_disk_whose_record_is_damaged_is_neither_served_nor_rescued_without_the_users_word() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let uuid = stopped_with_dirty_data(&mut fixture, &disk);
    let record = fixture.path(&format!("state/disks/{uuid}.json"));
    fs::write(&record, "{").expect("written");
    write_block(&disk, MIB, 9);
    not_rescued(&fixture, "is damaged");
    for _ in 0..2 {
        fixture.start();
        let shown = backend(&fixture);
        let error = shown["error"].as_str().unwrap_or_default();
        assert!(error.contains("is not known") && error.contains("is damaged"), "{shown}");
        let again = fixture.run(&["backend-start", "-p", &disk]);
        assert!(again.code == 1 && again.stderr.contains("--changed-disk"), "{again:?}");
        let events = fixture.ok(&["events", "-b", "0", "--severity", "error"]);
        assert!(events.contains("backend.down") && events.contains("is damaged"), "{events}");
        fixture.terminate();
    }
    assert_eq!(block(&disk, MIB), 9, "nothing was written over it");
    fixture.start();
    fixture.ok(&["backend-start", "-p", &disk, "--changed-disk"]);
    served(&fixture);
    fixture.ok(&["set", "-b", "0", "writeback=on"]);
    fixture.ok(&["drain"]);
    assert_eq!(block(&disk, MIB), 7);
    // The record is good again.
    fixture.terminate();
    fixture.start();
    served(&fixture);
    assert!(backend(&fixture)["unchecked"].is_null(), "{}", backend(&fixture));
}

#[test]
fn a_rescue_between_two_daemons_raises_no_alarm() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    caching(&mut fixture, &disk);
    fixture.ok(&["set", "-b", "0", "writeback=paused:1h"]);
    fixture.client().write(MIB, &[7; BLOCK], true).expect("written");
    fixture.terminate();
    fixture.ok(&["check", &fixture.region()]);
    fixture.ok(&["rescue", &fixture.region(), "--yes"]);
    assert_eq!(block(&disk, MIB), 7);
    fixture.start();
    served(&fixture);
}

/// A rescue with the state folder and the rules of the fixture.
fn rescue(fixture: &Fixture, more: &[&str]) -> Ran {
    let (region, state, rules) = (fixture.region(), fixture.text("state"), fixture.text("rules.d"));
    fixture.run(&[&["rescue", &region, "--state-dir", &state, "--rules-dir", &rules][..], more].concat())
}

/// Asserts that a rescue, and its dry run, refuse the disk for a reason that contains `part`.
#[track_caller]
fn not_rescued(fixture: &Fixture, part: &str) {
    let dry = rescue(fixture, &[]);
    assert!(dry.code == 3 && dry.stdout.contains(part) && dry.stdout.contains("--changed-disk"), "{dry:?}");
    let ran = rescue(fixture, &["--yes"]);
    assert!(ran.code == 3 && ran.stderr.contains(part) && ran.stderr.contains("--changed-disk"), "{ran:?}");
    assert!(ran.stdout.contains("backend 0") && ran.stdout.contains("nothing was written"), "{ran:?}");
}

/// A stopped daemon whose region alone has a block of `disk`.
fn stopped_with_dirty_data(fixture: &mut Fixture, disk: &str) -> String {
    caching(fixture, disk);
    fixture.ok(&["set", "-b", "0", "writeback=paused:1h"]);
    fixture.client().write(MIB, &[7; BLOCK], true).expect("written");
    let uuid = backend(fixture)["uuid"].as_str().expect("a UUID").to_owned();
    fixture.terminate();
    uuid
}

#[test]
fn a_rescue_replaces_what_was_written_without_the_cache_only_with_the_users_word() {
    let mut fixture = Fixture::new();
    let (disk, other) = (fixture.disk("disk", 8 * MIB), fixture.disk("other", 8 * MIB));
    caching(&mut fixture, &disk);
    fixture.ok(&["backend-start", "-p", &other, "-c", "16M"]);
    fixture.ok(&["set", "-b", "0", "writeback=paused:1h"]);
    fixture.client().write(MIB, &[7; BLOCK], true).expect("written");
    fixture.terminate();
    write_block(&disk, MIB, 9);
    not_rescued(&fixture, "its content was modified at");
    let ran = rescue(&fixture, &["--yes"]);
    assert!(ran.stdout.contains("backend 1") && ran.stdout.contains("a daemon serves it again"), "{ran:?}");
    assert_eq!(block(&disk, MIB), 9, "nothing was written over it");
    // The change that a daemon has noticed counts as well.
    fixture.start();
    refused(&fixture, &disk);
    fixture.terminate();
    not_rescued(&fixture, "its content was modified at");
    assert_eq!(block(&disk, MIB), 9, "nothing was written over it");
    let ran = rescue(&fixture, &["--changed-disk"]);
    assert!(ran.code == 1 && ran.stdout.contains("would write 4 KiB"), "{ran:?}");
    not_rescued(&fixture, "its content was modified at");
    let ran = rescue(&fixture, &["--yes", "--changed-disk"]);
    assert!(ran.code == 0 && ran.stdout.contains("a daemon serves it again"), "{ran:?}");
    assert!(ran.stderr.contains("was written while no daemon served it"), "{ran:?}");
    assert_eq!(block(&disk, MIB), 7);
    fixture.start();
    served(&fixture);
    assert!(backend(&fixture)["unchecked"].is_null(), "nothing in the cache is older than the disk");
}

#[test]
fn the_users_word_holds_for_a_cache_that_a_rescue_could_not_empty() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    stopped_with_dirty_data(&mut fixture, &disk);
    RegionFile::open(&fixture.region()).damage_data(MIB + 1000);
    write_block(&disk, 2 * MIB, 9);
    fixture.start();
    refused(&fixture, &disk);
    fixture.terminate();
    not_rescued(&fixture, "its content was modified at");
    let ran = rescue(&fixture, &["--yes", "--changed-disk"]);
    assert!(ran.code == 2 && ran.stdout.contains("except the damaged ranges"), "{ran:?}");
    // The next daemon does not ask again, and knows nothing of what follows.
    fixture.start();
    served(&fixture);
    assert!(backend(&fixture)["unchecked"].is_string(), "{}", backend(&fixture));
}

#[test]
fn a_rescue_writes_to_an_unsealed_disk_only_with_the_users_word() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let uuid = stopped_with_dirty_data(&mut fixture, &disk);
    fs::create_dir_all(fixture.path("rules.d")).expect("a folder");
    let mark = fixture.path(&format!("rules.d/12-cbd-sealed-{uuid}.rules.unsealed"));
    fs::write(&mark, "77\n").expect("a file");
    not_rescued(&fixture, "cbdctrl unseal has given it to others");
    let ran = rescue(&fixture, &["--yes", "--changed-disk"]);
    assert!(ran.code == 0 && !mark.exists(), "{ran:?}");
    assert_eq!(block(&disk, MIB), 7);
    fixture.start();
    served(&fixture);
}

#[test]
fn a_record_that_cannot_be_read_is_no_permission_to_write() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let uuid = stopped_with_dirty_data(&mut fixture, &disk);
    let record = fixture.path(&format!("state/disks/{uuid}.json"));
    let text = fs::read(&record).expect("a record");
    for damaged in [&text[..text.len() / 2], b"", b"{\"version\": 9, \"state\": \"in_use\"}"] {
        fs::write(&record, damaged).expect("written");
        not_rescued(&fixture, &format!("{uuid}.json"));
        assert_eq!(block(&disk, MIB), 0);
    }
    assert_eq!(rescue(&fixture, &["--yes", "--changed-disk"]).code, 0);
    assert_eq!(block(&disk, MIB), 7);
}

#[test]
fn a_rescue_without_the_state_of_a_daemon_says_that_it_could_not_look() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    stopped_with_dirty_data(&mut fixture, &disk);
    let region = fixture.region();
    let ran = fixture.run(&["rescue", &region, "--yes", "--state-dir", &fixture.text("none")]);
    assert!(ran.code == 0 && ran.stderr.contains("does not exist here"), "{ran:?}");
    assert!(!ran.stdout.contains("a daemon serves it again"), "{ran:?}");
    assert!(!fixture.path("none").exists());
    assert_eq!(block(&disk, MIB), 7);
}

/// What udev would make of a device: the properties of an event, with the rules of this system and of the fixture. The
/// links that it makes are in a `/dev` of its own.
fn udev(fixture: &Fixture, device: &str) -> String {
    let name = Path::new(device).file_name().expect("a device").to_string_lossy().into_owned();
    let script = format!(
        "set -e; number=$(cat /sys/class/block/{name}/dev); mkdir -p /run/udev /etc/udev/rules.d; \
         mount -t tmpfs none /run/udev; mount --bind {} /etc/udev/rules.d; mount -t tmpfs none /dev; \
         mknod /dev/null c 1 3; chmod 666 /dev/null; mknod {device} b ${{number%:*}} ${{number#*:}}; \
         exec udevadm test --action=add /sys/class/block/{name}",
        fixture.text("rules.d")
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    let ran: Ran = run_for(command, Duration::from_secs(20));
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.stdout
}

#[track_caller]
fn is_out_of_reach(properties: &str) {
    for line in ["ID_FS_TYPE=cbd_member", "ID_FS_USAGE=raid", "SYSTEMD_READY=0", "UDISKS_IGNORE=1"] {
        assert!(properties.lines().any(|property| property == line), "{line}: {properties}");
    }
    for absent in [UUID, "by-label/", "by-uuid/", "by-partuuid/", "ID_FS_UUID=1", "ext4"] {
        assert!(!properties.contains(absent), "{absent}: {properties}");
    }
}

/// A loop device over a file, detached when it is dropped. The sandbox has the lock of those that bind one.
struct LoopDevice {
    path: String,
    file: String,
}

impl LoopDevice {
    fn over(file: &str) -> Self {
        let path = tool("losetup", &["--find", "--show", file]).trim().to_owned();
        Self { path, file: file.to_owned() }
    }

    fn detach(self) {
        let (path, file) = (self.path.clone(), self.file.clone());
        drop(self);
        wait_for_release(Path::new(&path), Path::new(&file));
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.path]).status();
    }
}

/// A loop device with an ext4.
fn disk_with_a_file_system(fixture: &Fixture) -> LoopDevice {
    let image = fixture.disk("image", 32 * MIB);
    tool("mkfs.ext4", &["-q", "-F", "-U", UUID, "-L", "data", &image]);
    LoopDevice::over(&image)
}

#[test]
fn udev_keeps_the_disk_from_others_from_the_start_of_its_cache_to_its_end() {
    in_sandbox("udev_keeps_the_disk_from_others_from_the_start_of_its_cache_to_its_end", LIMIT, |folder| {
        let mut fixture = Fixture::under(folder);
        let disk = disk_with_a_file_system(&fixture);
        fixture.start();
        fixture.register("64M");
        fs::create_dir_all(fixture.path("rules.d")).expect("a folder");
        let before = udev(&fixture, &disk.path);
        assert!(
            before.contains(&format!("/dev/disk/by-uuid/{UUID}")) && before.contains("ID_FS_TYPE=ext4"),
            "{before}"
        );
        fixture.start_backend(&disk.path);
        is_out_of_reach(&udev(&fixture, &disk.path));
        // The rules of md and device mapper look at a disk whatever was set before.
        let probe = fixture.path("rules.d/62-looks-anyway.rules");
        let looks = "SUBSYSTEM==\"block\", IMPORT{builtin}=\"blkid\", SYMLINK+=\"disk/by-uuid/$env{ID_FS_UUID_ENC}\"\n";
        fs::write(&probe, looks).expect("a rule");
        is_out_of_reach(&udev(&fixture, &disk.path));
        fs::remove_file(&probe).expect("removed");
        // Without a daemon, too, and the next one leaves the rule as it is.
        let written = |file: &Path| fs::metadata(file).expect("a rule").modified().expect("a time");
        let (file, at) = (rules(&fixture)[0].clone(), written(&rules(&fixture)[0]));
        fixture.kill();
        is_out_of_reach(&udev(&fixture, &disk.path));
        fixture.start();
        until("it is served", || backend(&fixture)["alive"] == true);
        assert_eq!((rules(&fixture), written(&file)), (vec![file], at));
        // A cache that goes takes the seal with it, and one that comes brings it.
        fixture.ok(&["cache-detach", "-b", "0"]);
        assert_eq!(rules(&fixture), Vec::<PathBuf>::new());
        fixture.ok(&["cache-attach", "-b", "0", "-c", "16M"]);
        is_out_of_reach(&udev(&fixture, &disk.path));
        fixture.ok(&["backend-stop", "-b", "0"]);
        let after = udev(&fixture, &disk.path);
        assert!(after.contains(&format!("/dev/disk/by-uuid/{UUID}")), "{after}");
        assert_eq!(fs::read_dir(fixture.path("rules.d")).expect("the folder").count(), 0);
    });
}

#[test]
fn a_rule_that_cannot_be_written_is_a_warning() {
    in_sandbox("a_rule_that_cannot_be_written_is_a_warning", LIMIT, |folder| {
        let mut fixture = Fixture::under(folder);
        let disk = disk_with_a_file_system(&fixture);
        // Something else is at the path of the folder.
        fs::write(fixture.path("rules.d"), "").expect("a file");
        caching(&mut fixture, &disk.path);
        let shown = backend(&fixture);
        let warnings = shown["warnings"].to_string();
        assert!(shown["alive"] == true && warnings.contains("is not sealed"), "{shown}");
        assert!(fixture.log().contains("is not sealed"), "{}", fixture.log());
    });
}

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn a_disk_that_was_written_without_its_cache_is_noticed_by_counters_and_by_what_is_on_it() {
    let test = "a_disk_that_was_written_without_its_cache_is_noticed_by_counters_and_by_what_is_on_it";
    in_sandbox(test, LIMIT, |folder| {
        let mut fixture = Fixture::under(folder);
        let disk = disk_with_a_file_system(&fixture);
        let path = disk.path.clone();
        caching(&mut fixture, &path);
        fixture.client().write(MIB, &[7; BLOCK], true).expect("written");
        fixture.terminate();
        fs::read(&path).expect("read");
        fixture.start();
        served(&fixture);
        // Within a boot the kernel counts, wherever it was.
        fixture.terminate();
        write_block(&path, 20 * MIB, 9);
        // The rule of the disk says where its daemon has recorded it.
        let folder = fixture.text("rules.d");
        let ran = fixture.run(&["rescue", &fixture.region(), "--rules-dir", &folder]);
        assert!(ran.code == 3 && ran.stdout.contains("8 sectors"), "{ran:?}");
        fixture.start();
        let error = refused(&fixture, &path);
        assert!(error.contains("8 sectors"), "{error}");
        assert_eq!(block(&path, 20 * MIB), 9, "nothing was written over it");
        fixture.ok(&["backend-start", "-p", &path, "--changed-disk"]);
        served(&fixture);
        // A disk that comes back has new counters. A file system counts its mounts.
        let image = fixture.text("image");
        fixture.terminate();
        disk.detach();
        let disk = LoopDevice::over(&image);
        fixture.start();
        fixture.run(&["backend-start", "-p", &disk.path]);
        served(&fixture);
        fixture.terminate();
        disk.detach();
        tool("tune2fs", &["-C", "5", &image]);
        let disk = LoopDevice::over(&image);
        fixture.start();
        let error = fixture.run(&["backend-start", "-p", &disk.path]).stderr;
        assert!(error.contains("its bytes 0 to 1048576 have other content"), "{error}");
        fixture.kill();
    });
}

#[test]
fn a_disk_is_unsealed_only_with_the_number_of_bytes_that_it_lacks() {
    in_sandbox("a_disk_is_unsealed_only_with_the_number_of_bytes_that_it_lacks", LIMIT, |folder| {
        let mut fixture = Fixture::under(folder);
        let disk = disk_with_a_file_system(&fixture);
        caching(&mut fixture, &disk.path);
        fixture.ok(&["set", "-b", "0", "writeback=paused:1h"]);
        fixture.client().write(8 * MIB, &[7; BLOCK], true).expect("written");
        let folder = fixture.text("rules.d");
        let unseal = |more: &[&str]| fixture.run(&[&["unseal", "--rules-dir", &folder][..], more].concat());
        let listed: Value = serde_json::from_str(&unseal(&["--json"]).stdout).expect("JSON");
        assert_eq!(
            (listed.as_array().map(Vec::len), &listed[0]["disk"]),
            (Some(1), &Value::from(disk.path.clone()))
        );
        let busy = unseal(&[&disk.path, "--discard-dirty", "4096"]);
        assert!(busy.code == 1 && busy.stderr.contains("backend-stop -b 0"), "{busy:?}");
        fixture.terminate();
        let unseal = |more: &[&str]| fixture.run(&[&["unseal", "--rules-dir", &folder][..], more].concat());
        for (arguments, part) in [
            (&[disk.path.as_str()][..], "--discard-dirty 4096"),
            (&[&disk.path, "--discard-dirty", "4095"], "(4096 bytes)"),
            (&[&disk.path, "--discard-dirty", "unknown"], "recovery point"),
            (&["-b", "0"], "cbdctrl rescue"),
            (&["/dev/null", "--discard-dirty", "4096"], "not sealed"),
            (&["-b", "7"], "not sealed"),
        ] {
            let ran = unseal(arguments);
            assert!(ran.code == 1 && ran.stderr.contains(part), "{arguments:?}: {ran:?}");
            assert_eq!(rules(&fixture).len(), 1, "{arguments:?}");
        }
        let done = unseal(&["-b", "0", "--discard-dirty", "4096"]);
        assert_eq!(done.code, 0, "{done:?}");
        let seen = udev(&fixture, &disk.path);
        assert!(seen.contains(&format!("/dev/disk/by-uuid/{UUID}")), "{seen}");
        assert_eq!(unseal(&[&disk.path, "--discard-dirty", "4096"]).code, 1, "it is not sealed any more");
        not_rescued(&fixture, "cbdctrl unseal has given it to others");
        // The next daemon seals it again, and waits for the user's word.
        fixture.start();
        assert!(refused(&fixture, &disk.path).contains("cbdctrl unseal"));
        is_out_of_reach(&udev(&fixture, &disk.path));
        fixture.ok(&["backend-start", "-p", &disk.path, "--changed-disk"]);
        served(&fixture);
        fixture.terminate();
        fixture.start();
        served(&fixture);
        // A disk that has everything is unsealed without a word about bytes.
        fixture.terminate();
        fixture.ok(&["rescue", &fixture.region(), "--yes"]);
        fixture.ok(&["unseal", "--rules-dir", &folder, &disk.path]);
        let seen = udev(&fixture, &disk.path);
        assert!(seen.contains(&format!("/dev/disk/by-uuid/{UUID}")), "{seen}");
    });
}
