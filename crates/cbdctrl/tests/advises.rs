//! `advise` foretells the hit ratio that a cache has: fio records its requests while it uses a block device, and the status of the
//! device is what advise is compared with. And its errors.

mod support;

use serde_json::Value;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, run_for, text_of, wait};

const TIMEOUT: Duration = Duration::from_secs(90);
/// The largest difference. What is served by several requests at a time is not in the order of the trace.
const ERROR_MAX: f64 = 0.02;
/// The same for what the daemon has noted. Some 2500 reads of the sample count, whose standard deviation is about 0.01.
const SAMPLE_ERROR_MAX: f64 = 0.04;

/// Runs `cbdctrl advise` without a daemon.
fn advise(arguments: &[&str]) -> support::Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
    command.arg("advise").args(arguments);
    run_for(command, Duration::from_secs(40))
}

#[test]
fn the_hit_ratio_of_a_device_is_what_advise_says_from_the_iolog_of_fio() {
    in_sandbox("the_hit_ratio_of_a_device_is_what_advise_says_from_the_iolog_of_fio", TIMEOUT, |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", 256 * MIB);
        let export = fixture.nbd();
        fixture.ok(&["backend-start", "-p", &disk, "-c", "16M", "--handlers", "1", "-D", "-e", &export]);
        let log = text_of(&fixture.path("iolog"));
        fio(
            &fixture,
            folder,
            &["--rw=randrw", "--rwmixread=80", "--size=64m", "--random_distribution=zipf:0.9"],
            &["--number_ios=30000", &format!("--write_iolog={log}")],
        );
        let status: Value = serde_json::from_str(&fixture.ok(&["status", "--json"])).expect("JSON");
        let real =
            status["transports"][0]["backends"][0]["cache"]["read_hit_ratio"].as_f64().expect("a ratio");

        let of_backend = fixture.run(&["advise", "-b", "0", "--trace", &log, "--sizes", "16M,32M", "--json"]);
        assert_eq!(of_backend.code, 0, "{of_backend:?}");
        let advice: Value = serde_json::from_str(&of_backend.stdout).expect("JSON");
        let foretold = advice["sizes"][0]["read_hit_ratio"].as_f64().expect("a ratio");
        println!("the device has {real:.4}, advise says {foretold:.4}");
        assert!((foretold - real).abs() <= ERROR_MAX, "{real} {advice:#}");
        let larger = advice["sizes"][1]["read_hit_ratio"].as_f64().expect("a ratio");
        assert!(larger > foretold, "{advice:#}");
        assert!(advice["advice"].as_str().is_some_and(|text| text.contains("twice the cache")), "{advice:#}");
    });
}

#[test]
fn what_the_daemon_has_noted_foretells_the_hit_ratio_that_the_cache_has() {
    in_sandbox("what_the_daemon_has_noted_foretells_the_hit_ratio_that_the_cache_has", TIMEOUT, |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("128M");
        let disk = fixture.disk("disk", 256 * MIB);
        let export = fixture.nbd();
        fixture.ok(&["backend-start", "-p", &disk, "-c", "64M", "--handlers", "1", "-D", "-e", &export]);
        // The daemon begins to note requests within a second; nothing is foretold from none.
        let began = Instant::now();
        loop {
            let ran = fixture.run(&["advise", "-b", "0"]);
            assert_eq!((ran.code, &*ran.stdout, ran.stderr.lines().count()), (1, "", 1), "{ran:?}");
            if ran.stderr.contains("too little was seen: 0 of") {
                break;
            }
            assert!(ran.stderr.contains("ask again later"), "{ran:?}");
            assert!(began.elapsed() < Duration::from_secs(30), "{ran:?}");
        }
        fio(
            &fixture,
            folder,
            &["--rw=randrw", "--rwmixread=85", "--size=224m", "--random_distribution=zipf:0.8"],
            &["--io_size=240m", "--rate_iops=7000,1200"],
        );
        let ran = fixture.run(&["advise", "-b", "0", "--json"]);
        assert_eq!((ran.code, &*ran.stderr), (0, ""), "{ran:?}");
        let advice: Value = serde_json::from_str(&ran.stdout).expect("JSON");
        let seconds = advice["seen"]["seconds"].as_f64().expect("seconds");
        assert!((1.0..began.elapsed().as_secs_f64()).contains(&seconds), "{seconds} s");
        let sizes: Vec<u64> = advice["sizes"].as_array().into_iter().flatten().filter_map(size_of).collect();
        assert_eq!(sizes, [16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB]);
        let ratio = |number: usize| advice["sizes"][number]["read_hit_ratio"].as_f64().expect("a ratio");
        let real = advice["seen"]["read_hit_ratio"].as_f64().expect("a ratio");
        println!("the cache had {real:.4}, advise says {:.4}", ratio(2));
        assert!((ratio(2) - real).abs() <= SAMPLE_ERROR_MAX, "{advice:#}");
        assert!(ratio(0) + 0.02 < ratio(2) && ratio(2) <= ratio(4) + 0.005, "{advice:#}");
        let table = fixture.ok(&["advise", "-b", "0", "--disk-rate", "1M"]);
        for part in
            ["64 MiB (now)", "the second half counts", "FULL AFTER", "1 of 8 blocks", "twice the cache"]
        {
            assert!(table.contains(part), "{part} is not in:\n{table}");
        }
        let small = fixture.run(&["advise", "-b", "0", "--sizes", "9M"]);
        assert!(small.code == 1 && small.stderr.contains("too small for the sample"), "{small:?}");
    });
}

fn size_of(size: &Value) -> Option<u64> {
    size["size"].as_u64()
}

/// Lets fio use the device, in blocks of 4 KiB.
fn fio(fixture: &Fixture, folder: &Path, load: &[&str], more: &[&str]) {
    let mut command = Command::new("fio");
    command.args(["--name=load", "--thread", "--ioengine=nbd", &format!("--uri={}", fixture.uri())]);
    command.args(["--bs=4k", "--iodepth=4", "--norandommap", "--randseed=1"]).args(load).args(more);
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir(folder);
    support::child::dies_with_the_test(&mut command);
    let output = File::create(fixture.path("fio.out")).expect("a file");
    let error = output.try_clone().expect("a descriptor");
    let mut fio = command.stdin(Stdio::null()).stdout(output).stderr(error).spawn().expect("fio");
    let ended = wait(&mut fio, Duration::from_secs(60)).expect("fio ends");
    let said = std::fs::read_to_string(fixture.path("fio.out")).unwrap_or_default();
    assert!(ended.success(), "{said}");
}

#[test]
fn advise_prints_a_table_and_one_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("trace");
    let mut text = "fio version 3 iolog\n1 /disk add\n2 /disk open\n".to_owned();
    for number in 0..20_000_u64 {
        let action = if number % 4 == 0 { "write" } else { "read" };
        text += &format!("{} /disk {action} {} 4096\n", number * 500, number * 7919 % 8192 * 4096);
    }
    std::fs::write(&trace, text).expect("a trace");
    let trace = text_of(&trace);
    let ran = advise(&["--trace", &trace, "--sizes", "16M,64M", "--disk-rate", "1M"]);
    assert_eq!((ran.code, &*ran.stderr), (0, ""), "{ran:?}");
    for part in ["20000 requests", "CACHE", "HITS", "DIRTY AT MOST", "FULL AFTER", "16 MiB", "64 MiB has"] {
        assert!(ran.stdout.contains(part), "{part} is not in:\n{}", ran.stdout);
    }
    let json = advise(&["--trace", &trace, "--size", "64M", "--json"]);
    let advice: Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(advice["trace"]["used_bytes"], 32 * MIB);
    assert_eq!(advice["sizes"].as_array().map(Vec::len), Some(6));
}

#[test]
fn what_advise_cannot_use_is_refused_in_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("a file");
        text_of(&path)
    };
    let trace = path("trace", b"fio version 3 iolog\n1 /disk read 0 4096\n");
    let missing = text_of(&folder.path().join("missing"));
    for (arguments, parts) in [
        (&["--trace", &missing][..], &["missing", "cannot be read", "No such file"][..]),
        (&["--trace", &path("empty", b"")], &["is empty"]),
        (&["--trace", &path("packed", b"\x1f\x8b\x08")], &["gunzip"]),
        (&["--trace", &path("binary", b"\x07tae\0\0\0\0")], &["blkparse -i"]),
        (&["--trace", &trace, "--device", "/dev/sdz"], &["another device", "/disk"]),
        (&["--trace", &trace, "--format", "blkparse"], &["is not the text of blkparse"]),
        (&["--trace", &trace, "--sizes", "1M"], &["too small", "9 MiB"]),
        (&["--trace", &trace, "--size", "1G", "--segment-size", "3M"], &["segment size of 3 MiB"]),
        (&["--trace", &trace, "--memory", "1M"], &["at least 8 MiB"]),
    ] {
        let ran = advise(arguments);
        assert_eq!(
            (ran.code, &*ran.stdout, ran.stderr.lines().count()),
            (1, "", 1),
            "{arguments:?}: {ran:?}"
        );
        for part in parts {
            assert!(ran.stderr.contains(part), "{part:?} is not in: {}", ran.stderr);
        }
    }
    let cut = path("cut", b"fio version 3 iolog\n1 /disk read 0 4096\n2 /disk read 4096 40");
    let ran = advise(&["--trace", &cut]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.stderr.contains("warning") && ran.stderr.contains("was cut"), "{ran:?}");
}
