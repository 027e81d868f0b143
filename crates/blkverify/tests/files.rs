//! The program over regular files.

mod support;

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use support::{MIB, Place};

#[test]
fn a_file_that_can_be_read_is_all_right() {
    let place = Place::new();
    // An odd end.
    let file = place.file("file", &vec![7; 3 * MIB + 777]);
    let ran = place.run(&[&file]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{ran:?}");
    assert!(ran.stdout.contains("all readable"), "{ran:?}");
    let report = place.json(&[&file], 0);
    assert_eq!((report["complete"].as_bool(), report["found"].as_u64()), (Some(true), Some(0)));
    assert_eq!(report["done_bytes"], 3 * MIB + 777);
}

#[test]
fn a_range_is_looked_at_alone() {
    let place = Place::new();
    let file = place.file("file", &vec![0; 4 * MIB]);
    File::options().write(true).open(&file).unwrap().write_all_at(&[1], 3 * MIB as u64).unwrap();
    assert_eq!(place.run(&[&file, "--zero", "--length", "3M"]).code, 0);
    let report = place.json(&[&file, "--zero", "--offset", "2M"], 2);
    assert_eq!(report["findings"][0]["start"], 3 * MIB);
    assert_eq!(report["findings"][0]["what"], "not_zero");
    assert_eq!(report["findings"][0]["repaired"], false);
    assert_eq!((report["offset"].as_u64(), report["length"].as_u64()), (Some(2 << 20), Some(2 << 20)));
}

#[test]
fn a_file_is_compared_with_an_image_its_holes_too() {
    let place = Place::new();
    let file = place.path("file");
    let mut sparse = File::create(&file).unwrap();
    sparse.write_all(&[3; 8192]).unwrap();
    sparse.seek(SeekFrom::Start(2 * MIB as u64)).unwrap();
    sparse.write_all(&[4; 5000]).unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let image = place.file("image", &bytes);
    let report = place.json(&[&file, "--compare", &image], 0);
    assert_eq!(report["done_bytes"], 2 * MIB + 5000);
    for at in [100, MIB + 5, 2 * MIB + 4999] {
        bytes[at] ^= 1;
    }
    fs::write(&image, &bytes).unwrap();
    let report = place.json(&[&file, "--compare", &image], 2);
    let findings = report["findings"].as_array().unwrap();
    let starts: Vec<usize> = findings.iter().map(|one| one["start"].as_u64().unwrap() as usize).collect();
    assert_eq!(starts, [0, MIB, 2 * MIB + 4096], "{report}");
    assert!(findings.iter().all(|one| one["what"] == "differs"));
    assert_eq!(findings[2]["length"], 5000 - 4096);
}

#[test]
fn what_cannot_be_verified_is_refused_with_the_reason_and_the_remedy() {
    let place = Place::new();
    let file = place.file("file", &vec![0; MIB]);
    let empty = place.file("empty", &[]);
    let short = place.file("short", &[0; 10_000]);
    let long = place.file("long", &vec![0; 2 * MIB]);
    let pipe = place.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let folder = place.path("");
    for (arguments, reason) in [
        (&["/no/such/file"][..], "cannot be opened; check the name"),
        (&[&folder], "is a directory: name a file in it"),
        (&[&pipe], "is a pipe"),
        (&["/dev/null"], "is a character device"),
        (&[&empty], "is empty"),
        (&[&file, "--offset", "1M"], "past the end"),
        (&[&file, "--length", "2M"], "--length is 1048576 at most"),
        (&[&file, "--offset", "100"], "0 and 4096 are"),
        (&[&file, "--length", "5000"], "4096 and 8192 are"),
        (&[&file, "--compare", &short], "--length 8192"),
        (&[&file, "--compare", &long], "--length 1048576"),
        (&[&file, "--compare", &pipe], "is no file and no block device"),
        (&[&file, "--compare", "/no/such/image"], "cannot be opened"),
        (&[&file, "--repair"], "leave out --repair"),
    ] {
        let ran = place.run(arguments);
        assert_eq!((ran.code, ran.stdout.as_str()), (3, ""), "{arguments:?} {ran:?}");
        assert!(ran.stderr.contains(reason), "{arguments:?} {ran:?}");
        assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
        let answer = place.json(arguments, 3);
        assert!(answer["error"]["message"].as_str().is_some_and(|text| text.contains(reason)), "{answer}");
    }
    assert_eq!(place.run(&[&file, "--compare", &short, "--length", "8192"]).code, 0);
    assert_eq!(place.run(&[&file, "--compare", &long, "--length", "1M"]).code, 0);
}

#[test]
fn wrong_usage_has_its_own_code() {
    let place = Place::new();
    for arguments in [&["x", "--bad"][..], &["x", "--zero", "--all"], &["x", "--length", "much"], &[]] {
        assert_eq!(place.run(arguments).code, 64, "{arguments:?}");
    }
    let help = place.run(&["--help"]);
    assert!(help.code == 0 && help.stdout.contains("Exit codes"), "{help:?}");
}

#[test]
fn one_copy_has_no_levels() {
    let place = Place::new();
    let file = place.file("file", &[1; 4096]);
    let report = place.json(&[&file, "--all"], 0);
    let notes = report["notes"].as_array().unwrap();
    assert!(notes.iter().any(|note| note.as_str().unwrap().contains("one copy")), "{report}");
}

#[test]
fn a_signal_ends_it_cleanly_and_it_says_how_far_it_came() {
    let place = Place::new();
    let (file, image) = (place.path("file"), place.path("image"));
    // Large enough for seconds, and without any space: an image of holes is read.
    for path in [&file, &image] {
        File::create(path).unwrap().set_len(1 << 40).unwrap();
    }
    let mut child = place.command(&[&file, "--compare", &image, "--json"]).spawn().unwrap();
    // It blocks the signal before it opens anything.
    support::wait_for_open(child.id(), &image);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    let ran = support::Ran::of(child.wait_with_output().unwrap());
    assert!(ran.stderr.contains("ended by a signal when") && ran.stderr.contains("of 1 TiB"), "{ran:?}");
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((report["complete"].as_bool(), report["found"].as_u64()), (Some(false), Some(0)));
}
