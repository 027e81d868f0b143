//! `safe-to`, which packages ask before they remove, restart or replace the program.

mod support;

use support::{Fixture, MIB, Ran};

/// Asks about the files of the fixture, with or without its daemon.
fn ask(fixture: &Fixture, arguments: &[&str]) -> Ran {
    let (state, run) = (fixture.text("state"), fixture.text("run"));
    fixture.run(&[&["safe-to"][..], arguments, &["--state-dir", &state, "--run-dir", &run]].concat())
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
    for wrong in [&["downgrade"][..], &["downgrade", "new"], &["upgrade"]] {
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
