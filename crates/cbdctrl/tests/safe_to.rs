//! `safe-to`, which packages ask before they remove, restart or replace the program.

mod support;

use support::{Fixture, MIB, Ran};

/// Asks about the files of the fixture, with or without its daemon.
fn ask(fixture: &Fixture, arguments: &[&str]) -> Ran {
    ask_in(fixture, &fixture.text("state"), arguments)
}

/// Asks about another state folder than that of the daemon of the fixture.
fn ask_in(fixture: &Fixture, state: &str, arguments: &[&str]) -> Ran {
    let (run, rules) = (fixture.text("run"), fixture.text("rules.d"));
    let folders = ["--state-dir", state, "--run-dir", &run, "--rules-dir", &rules];
    fixture.run(&[&["safe-to"][..], arguments, &folders].concat())
}

#[track_caller]
fn yes(fixture: &Fixture, arguments: &[&str]) {
    let ran = ask(fixture, arguments);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "yes\n"), "{arguments:?}: {ran:?}");
}

/// The answer, which has one reason that contains all of `parts`.
#[track_caller]
fn no(fixture: &Fixture, arguments: &[&str], parts: &[&str]) {
    let ran = ask(fixture, arguments);
    assert_eq!(ran.code, 1, "{arguments:?}: {ran:?}");
    let is_the_reason = |line: &str| line.starts_with("no: ") && parts.iter().all(|part| line.contains(part));
    assert!(ran.stdout.lines().any(is_the_reason), "{arguments:?} {parts:?}: {ran:?}");
}

#[test]
fn dirty_data_and_clients_are_reasons_against_a_removal_with_and_without_a_daemon() {
    let mut fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 32 * MIB);
    fixture.start_backend(&disk);
    yes(&fixture, &["remove"]);
    no(&fixture, &["remove", "--stopped"], &["a daemon still runs", &fixture.pid().to_string()]);

    fixture.ok(&["set", "-b", "0", "writeback=paused:1h"]);
    let mut client = fixture.client();
    client.write(0, &[7; 8192], false).expect("written");
    no(&fixture, &["remove"], &["8 KiB dirty (8192 bytes)", &disk, "backend-stop -t 0 -b 0"]);
    no(&fixture, &["remove"], &["NBD client is connected"]);
    no(&fixture, &["restart"], &["would see errors", "NBD client is connected"]);
    drop(client);

    fixture.kill();
    for arguments in [&["remove"][..], &["remove", "--stopped"]] {
        no(&fixture, arguments, &["8 KiB dirty (8192 bytes)", &disk, "rescue"]);
    }
    yes(&fixture, &["restart"]);

    fixture.start();
    fixture.ok(&["set", "-b", "0", "writeback=on"]);
    fixture.ok(&["drain"]);
    yes(&fixture, &["remove"]);
    fixture.terminate();
    yes(&fixture, &["remove", "--stopped"]);

    let (region, hidden) = (fixture.region(), format!("{}.hidden", fixture.region()));
    std::fs::rename(&region, &hidden).expect("renamed");
    no(&fixture, &["remove"], &[&region, "is not known"]);
    fixture.start();
    no(&fixture, &["remove"], &["transport 0", "is not up", "is not known"]);
}

/// A stopped daemon whose region has a block that the disk lacks. Returns the path of the disk and its UUID.
fn stopped_with_dirty_data(fixture: &mut Fixture) -> (String, String) {
    let disk = fixture.disk("disk", 32 * MIB);
    fixture.start_backend(&disk);
    fixture.ok(&["set", "-b", "0", "writeback=paused:1h"]);
    fixture.client().write(0, &[7; 8192], false).expect("written");
    let status = fixture.json(&["status", "--json"]);
    let backend = &status["transports"][0]["backends"][0];
    let uuid = backend["uuid"].as_str().expect("a UUID").to_owned();
    fixture.terminate();
    (disk, uuid)
}

#[test]
fn a_list_of_regions_that_was_lost_is_no_empty_one() {
    let mut fixture = Fixture::with_region();
    let (_, uuid) = stopped_with_dirty_data(&mut fixture);
    std::fs::remove_file(fixture.path("state/transports.json")).expect("removed");
    let record = fixture.path(&format!("state/disks/{uuid}.json"));
    let parts = [record.to_str().expect("a path"), "not registered", "tp-reg"];
    no(&fixture, &["remove", "--stopped"], &parts);
    fixture.start();
    no(&fixture, &["remove"], &parts);
    fixture.terminate();
    std::fs::remove_file(record).expect("removed");
    yes(&fixture, &["remove", "--stopped"]);
}

#[test]
fn a_disk_that_another_daemon_has_sealed_is_looked_at() {
    let mut fixture = Fixture::with_region();
    let (disk, uuid) = stopped_with_dirty_data(&mut fixture);
    let (region, none) = (fixture.region(), fixture.text("none"));
    let report = fixture.json(&["check", &region, "--json"]);
    let subject = serde_json::json!({
        "backend": uuid, "number": 0, "transport": report["transport"]["uuid"], "region": region, "disk": disk,
        "state_dir": fixture.text("state"),
    });
    std::fs::create_dir(fixture.path("rules.d")).expect("a folder");
    let rule = fixture.path(&format!("rules.d/12-cbd-sealed-{uuid}.rules"));
    let rule_of = |subject: &serde_json::Value| {
        std::fs::write(&rule, format!("# cbd-sealed: {subject}\n")).expect("a file");
    };
    rule_of(&subject);
    let ran = ask_in(&fixture, &none, &["remove"]);
    assert!(ran.code == 1 && ran.stdout.contains("8 KiB dirty"), "{ran:?}");
    let mut elsewhere = subject.clone();
    elsewhere["region"] = fixture.text("none").into();
    rule_of(&elsewhere);
    let ran = ask_in(&fixture, &none, &["remove"]);
    assert!(ran.code == 1 && ran.stdout.contains("is not known") && ran.stdout.contains("unseal"), "{ran:?}");
    std::fs::write(&rule, "").expect("a file");
    let ran = ask_in(&fixture, &none, &["remove"]);
    assert!(ran.code == 1 && ran.stdout.contains("cannot be read"), "{ran:?}");
    rule_of(&subject);
    let state = fixture.text("state");
    fixture.ok(&["rescue", &region, "--yes", "--state-dir", &state, "--rules-dir", &fixture.text("rules.d")]);
    let ran = ask_in(&fixture, &none, &["remove"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "yes\n"), "{ran:?}");
    yes(&fixture, &["remove"]);
}

#[test]
fn the_advice_for_a_disk_that_was_written_without_its_cache_is_what_helps() {
    let mut fixture = Fixture::with_region();
    let (disk, _) = stopped_with_dirty_data(&mut fixture);
    no(&fixture, &["remove"], &["8 KiB dirty", "start the daemon and cbdctrl backend-stop it"]);
    std::fs::write(&disk, vec![9; 32 << 20]).expect("written");
    fixture.start();
    support::until("the cache was examined", || ask(&fixture, &["remove"]).stdout.contains("8 KiB dirty"));
    let parts =
        ["it is not served", "written while no daemon served it", "--discard-dirty", "--changed-disk"];
    no(&fixture, &["remove"], &parts);
    fixture.terminate();
    no(&fixture, &["remove"], &["8 KiB dirty", "rescue --changed-disk", "backend-stop --discard-dirty"]);
}

#[test]
fn a_daemon_that_does_not_answer_is_a_reason_against_everything() {
    let fixture = Fixture::with_region();
    fixture.pause();
    // Its answer takes as long as the time limit of a question.
    no(&fixture, &["remove"], &["does not say what it holds"]);
    fixture.resume();
    yes(&fixture, &["remove"]);
}

#[test]
fn a_version_that_knows_the_features_of_the_regions_may_follow() {
    let mut fixture = Fixture::with_region();
    for _ in 0..2 {
        yes(&fixture, &["downgrade", env!("CARGO_PKG_VERSION")]);
        yes(&fixture, &["downgrade", "0.1.0~git20260101.abc-1"]);
        // The folder of the region may be a tmpfs, whose regions have no feature.
        let flags = features(&fixture);
        match flags {
            0 => yes(&fixture, &["downgrade", "0.0.9"]),
            _ => no(&fixture, &["downgrade", "0.0.9"], &["0.0.9 would refuse", &fixture.region()]),
        }
        if fixture.is_running() {
            fixture.terminate();
        }
    }
    for wrong in
        [&["downgrade"][..], &["downgrade", "new"], &["upgrade"], &["remove", "0.1.0"], &["restart", "0.1.0"]]
    {
        let ran = ask(&fixture, wrong);
        assert_eq!(ran.code, 2, "{wrong:?}: {ran:?}");
    }
}

fn features(fixture: &Fixture) -> u64 {
    if fixture.is_running() {
        let list = fixture.json(&["tp-list", "--json"]);
        let flags = list[0]["flags"].as_str().expect("flags");
        return u64::from_str_radix(flags.trim_start_matches("0x"), 16).expect("a number");
    }
    let report = fixture.json(&["check", &fixture.region(), "--json"]);
    report["transport"]["features"].as_u64().expect("features")
}
