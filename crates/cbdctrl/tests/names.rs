//! Names instead of numbers: commands take them, refuse bad ones, and kernel block devices have links by name and by UUID.

mod support;

use serde_json::Value;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, run_for, text_of, tool};

/// Bytes of a disk.
const SIZE: u64 = 32 * MIB;

/// A daemon with a backend without a block device, whose name is `name`.
fn named(name: &str) -> Fixture {
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", SIZE);
    fixture.ok(&["backend-start", "-p", &disk, "-c", "16M", "--name", name]);
    fixture
}

fn first(fixture: &Fixture, list: &str) -> Value {
    fixture.json(&[list, "--json"])[0].clone()
}

/// Asserts that a command is refused by the daemon with a line that has all `parts`.
#[track_caller]
fn refused(fixture: &Fixture, arguments: &[&str], parts: &[&str]) {
    let ran = fixture.run(arguments);
    assert_eq!(ran.code, 1, "{arguments:?}: {ran:?}");
    assert_eq!((ran.stderr.trim_end().lines().count(), ran.stdout.as_str()), (1, ""), "{ran:?}");
    parts.iter().for_each(|part| assert!(ran.stderr.contains(part), "{part:?} is not in: {}", ran.stderr));
}

#[test]
fn every_command_takes_a_name_for_a_number() {
    let fixture = named("db-data");
    fixture.ok(&["set", "-b", "db-data", "gc_percent=70"]);
    fixture.ok(&["dev-start", "-b", "db-data", "-e", &fixture.nbd()]);
    assert_eq!(first(&fixture, "dev-list")["name"], "db-data", "a block device has the name of its backend");
    fixture.ok(&["set", "-d", "db-data", "name=db-disk"]);
    assert_eq!(first(&fixture, "dev-list")["name"], "db-disk");
    fixture.ok(&["checkpoint", "-b", "db-data", "--wait"]);
    fixture.ok(&["drain", "-b", "db-data"]);
    let status = fixture.ok(&["status", "-b", "db-data"]);
    assert!(status.contains("backend 0 (db-data)") && status.contains(", db-disk (NBD)"), "{status}");
    fixture.ok(&["dev-stop", "-d", "db-disk"]);
    let metrics = "cbd_backend_info{transport=\"0\",backend=\"0\",name=\"db-data\",uuid=\"";
    let uuid = first(&fixture, "backend-list")["uuid"].as_str().expect("a UUID").to_owned();
    let text =
        cbd_daemon::client::Client::new(Path::new(&fixture.socket())).text("/v1/metrics").expect("metrics");
    assert!(text.contains(&format!("{metrics}{uuid}\"}} 1")), "{text}");
    fixture.ok(&["backend-stop", "-b", "db-data"]);
    assert_eq!(fixture.json(&["backend-list", "--json"]), Value::Array(Vec::new()));
}

#[test]
fn the_status_of_one_backend_shows_that_one_only() {
    let fixture = named("db-data");
    let other = fixture.disk("other", SIZE);
    fixture.ok(&["backend-start", "-p", &other, "-c", "16M", "--name", "logs"]);
    let shown = |arguments: &[&str]| {
        let status = fixture.json(&[arguments, &["--json"]].concat());
        let backends = status["transports"][0]["backends"].as_array().expect("backends").clone();
        backends.iter().map(|backend| backend["name"].as_str().unwrap_or("").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(shown(&["status"]), ["db-data", "logs"]);
    assert_eq!(shown(&["status", "-t", "0"]), ["db-data", "logs"]);
    assert_eq!(shown(&["status", "-b", "logs"]), ["logs"]);
    assert_eq!(shown(&["status", "-t", "0", "-b", "0"]), ["db-data"]);
    refused(&fixture, &["status", "-b", "log"], &["no backend with the name log", "there are db-data, logs"]);
    refused(&fixture, &["status", "-b", "7"], &["no backend 7"]);
    refused(&fixture, &["status", "-t", "3"], &["no transport 3"]);
}

#[test]
fn a_bad_name_is_refused_with_the_reason_and_changes_nothing() {
    let fixture = named("db-data");
    let disk = fixture.disk("other", SIZE);
    let long = "x".repeat(33);
    for (name, why) in [
        ("7", "taken for a number"),
        ("007", "taken for a number"),
        ("a/b", "contains '/'"),
        ("../x", "contains '/'"),
        ("a b", "contains ' '"),
        ("a\nb", "contains '\\n'"),
        ("a=b", "contains '='"),
        ("\u{fc}", "contains '\u{fc}'"),
        (".hidden", "begins with '.'"),
        ("-x", "begins with '-'"),
        (&long, "33 bytes, at most 32"),
    ] {
        refused(&fixture, &["set", "-b", "0", &format!("name={name}")], &["is no name", why]);
        // At the start it is wrong usage, which sends no request.
        let option = format!("--name={name}");
        for arguments in [&["backend-start", "-p", &disk, &option][..], &["dev-start", "-b", "0", &option]] {
            let ran = fixture.run(arguments);
            assert_eq!(ran.code, 2, "{arguments:?}: {ran:?}");
            assert!(ran.stderr.contains(why), "{ran:?}");
        }
    }
    let ran = fixture.run(&["backend-start", "-p", &disk, "--name="]);
    assert_eq!(ran.code, 2, "an empty name: {ran:?}");
    let mut not_utf8 = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
    not_utf8
        .args(["set", "-b", "0"])
        .arg(std::ffi::OsStr::from_bytes(b"name=\xff"))
        .env("CBD_SOCKET", fixture.socket());
    let ran = run_for(not_utf8, Duration::from_secs(40));
    assert!(ran.code == 2 && ran.stderr.contains("UTF-8"), "{ran:?}");
    for number in ["-1", "99999999999", "a/b", "..", ""] {
        let ran = fixture.run(&["status", &format!("--backend={number}")]);
        assert_eq!(ran.code, 2, "{number}: {ran:?}");
    }
    assert_eq!(fixture.json(&["backend-list", "--json"]).as_array().map(Vec::len), Some(1));
    assert_eq!(first(&fixture, "backend-list")["name"], "db-data");
    let ran = fixture.run(&["set", "name=x"]);
    assert_eq!(ran.code, 2, "neither a backend nor a block device: {ran:?}");
    let ran = fixture.run(&["set", "-b", "0", "-d", "0", "name=x"]);
    assert_eq!(ran.code, 2, "both: {ran:?}");
    refused(
        &fixture,
        &["set", "-d", "0", "gc_percent=70"],
        &["a block device has name and class, and no other setting"],
    );
}

#[test]
fn a_taken_name_is_refused_and_an_unknown_one_is_answered_with_those_that_exist() {
    let fixture = named("db-data");
    let disk = fixture.disk("other", SIZE);
    refused(
        &fixture,
        &["backend-start", "-p", &disk, "--name", "db-data"],
        &["backend 0", "the name db-data already"],
    );
    fixture.ok(&["backend-start", "-p", &disk, "--name", "logs"]);
    refused(&fixture, &["set", "-b", "logs", "name=db-data"], &["backend 0", "the name db-data already"]);
    for command in ["backend-stop", "drain", "checkpoint", "dev-start"] {
        refused(
            &fixture,
            &[command, "-b", "nothing"],
            &["no backend with the name nothing", "db-data, logs"],
        );
    }
    refused(
        &fixture,
        &["dev-stop", "-d", "logs"],
        &["no block device with the name logs", "none has a name"],
    );
    // The name of another transport is not looked up.
    refused(&fixture, &["drain", "-t", "5", "-b", "logs"], &["transport 5"]);
    // `name=` takes a name away.
    fixture.ok(&["set", "-b", "logs", "name="]);
    refused(
        &fixture,
        &["drain", "-b", "logs"],
        &["no backend with the name logs on transport 0: there are db-data"],
    );
}

#[test]
fn the_tools_for_regions_take_and_show_names() {
    let mut fixture = named("db-data");
    let region = fixture.region();
    fixture.terminate();
    let checked = fixture.ok(&["check", &region]);
    assert!(checked.contains("backend 0 (db-data): "), "{checked}");
    let dumped = fixture.ok(&["dump", &region, "tables"]);
    assert!(dumped.contains("name=\"db-data\""), "{dumped}");
    assert!(fixture.ok(&["dump", &region, "lanes", "-b", "db-data"]).contains("drained backend=0"));
    assert!(fixture.ok(&["rescue", &region, "-b", "db-data"]).contains("nothing is dirty"));
    for arguments in
        [&["dump", &region, "lanes", "-b", "other"][..], &["rescue", &region, "-b", "other", "--yes"]]
    {
        let ran = fixture.run(arguments);
        assert_eq!(ran.code, 3, "{ran:?}");
        assert!(ran.stderr.contains("no backend with the name other: there are db-data"), "{ran:?}");
    }
}

/// The path of a link below the folder of devices.
fn link(fixture: &Fixture, name: &str) -> PathBuf {
    fixture.path("dev/cbd").join(name)
}

/// The kernel's device to which a link leads; none if it leads nowhere.
fn leads_to(link: &Path) -> Option<PathBuf> {
    std::fs::canonicalize(link).ok()
}

/// The links by name.
fn by_name(fixture: &Fixture) -> Vec<String> {
    let entries = std::fs::read_dir(link(fixture, "by-name")).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[test]
fn links_by_name_and_uuid_lead_to_the_device_and_follow_renames_while_it_is_used() {
    let name = "links_by_name_and_uuid_lead_to_the_device_and_follow_renames_while_it_is_used";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::preserving(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", SIZE);
        fixture.start_block_device(&disk, "16M");
        assert!(by_name(&fixture).is_empty());
        let device = leads_to(&fixture.link(0)).expect("a device");
        let uuid = first(&fixture, "backend-list")["uuid"].as_str().expect("a UUID").to_owned();
        assert_eq!(leads_to(&link(&fixture, &format!("by-uuid/{uuid}"))), Some(device.clone()));
        fixture.ok(&["set", "-b", "0", "name=db"]);
        let path = link(&fixture, "by-name/db");
        assert_eq!(leads_to(&path), Some(device.clone()));
        // A file system that is mounted by that name does not notice a rename, nor that the daemon is killed.
        tool("mkfs.ext4", &["-q", &text_of(&path)]);
        let mounted = Mounted::new(&text_of(&path), &folder.join("mnt"), "rw");
        std::fs::write(mounted.path("a"), "a").expect("written");
        fixture.ok(&["set", "-b", "db", "name=db-data"]);
        assert_eq!(by_name(&fixture), ["db-data"]);
        fixture.ok(&["set", "-d", "db-data", "name=disk"]);
        assert_eq!(by_name(&fixture), ["disk"]);
        let properties = std::fs::read_to_string(fixture.path("run/udev/cbd0")).expect("properties");
        assert!(properties.contains("CBD_NAME=disk\n") && properties.contains(&format!("CBD_UUID={uuid}\n")));
        std::fs::write(mounted.path("b"), "b").expect("written");
        fixture.kill();
        assert_eq!(
            leads_to(&link(&fixture, "by-name/disk")),
            Some(device.clone()),
            "clients wait for the next daemon"
        );
        // What a crash within a rename leaves.
        symlink("../../cbd0", link(&fixture, "by-name/former")).expect("a link");
        symlink("../../cbd77", link(&fixture, "by-name/gone")).expect("a link");
        symlink("/dev/null", link(&fixture, "by-name/foreign")).expect("a link");
        fixture.start();
        assert_eq!(by_name(&fixture), ["disk", "foreign"]);
        assert_eq!(leads_to(&link(&fixture, "by-name/disk")), Some(device));
        assert_eq!(std::fs::read_to_string(mounted.path("b")).expect("read"), "b");
        // What is there already is not replaced; the command works and says so.
        let ran = fixture.run(&["set", "-d", "disk", "name=foreign"]);
        assert!(ran.code == 0 && ran.stderr.contains("by-name/foreign is no link to cbd0"), "{ran:?}");
        assert_eq!(by_name(&fixture), ["foreign"]);
        fixture.ok(&["set", "-d", "foreign", "name="]);
        assert_eq!(by_name(&fixture), ["db-data", "foreign"], "it has the name of its backend again");
        mounted.unmount();
        fixture.ok(&["dev-stop", "-d", "db-data"]);
        assert_eq!(by_name(&fixture), ["foreign"]);
        assert_eq!(std::fs::read_dir(link(&fixture, "by-uuid")).expect("a folder").count(), 0);
        assert!(!fixture.path("run/udev/cbd0").exists());
    });
}

#[test]
fn two_transports_with_the_same_name_have_links_of_their_own() {
    let name = "two_transports_with_the_same_name_have_links_of_their_own";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let second = fixture.in_memory("second");
        fixture.ok(&["tp-reg", "--path", &second, "--size", "64M", "--host", "node0", "--format"]);
        let start = |transport: &str, disk: &str| {
            let disk = fixture.disk(disk, SIZE);
            let options =
                ["-t", transport, "-p", &disk, "-c", "16M", "-D", "-e", "fuse-loop", "--name", "data"];
            fixture.ok(&[&["backend-start"][..], &options].concat())
        };
        let devices = [start("0", "disk-0"), start("1", "disk-1")].map(|path| PathBuf::from(path.trim()));
        assert_eq!(by_name(&fixture), ["1:data", "data"]);
        assert_eq!(leads_to(&link(&fixture, "by-name/data")), leads_to(&devices[0]));
        assert_eq!(leads_to(&link(&fixture, "by-name/1:data")), leads_to(&devices[1]));
        fixture.ok(&["backend-stop", "-t", "1", "-b", "data"]);
        assert_eq!(by_name(&fixture), ["data"]);
        // A daemon whose devices end with it leaves no links.
        fixture.terminate();
        assert!(by_name(&fixture).is_empty());
    });
}
