//! Events of a daemon as users see them: by `events`, over a restart, by a command, and in metrics.

mod support;

use serde_json::Value;
use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Fixture, until};

/// `cbdctrl events --follow`, with its output in files.
struct Follower {
    child: Child,
    name: &'static str,
}

impl Follower {
    fn start(fixture: &Fixture, name: &'static str, options: &[&str]) -> Self {
        let file = |kind: &str| File::create(fixture.path(&format!("{name}.{kind}"))).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        command.args(["events", "--follow"]).args(options).env("CBD_SOCKET", fixture.socket());
        command.stdin(Stdio::null()).stdout(file("out")).stderr(file("err"));
        support::child::dies_with_the_test(&mut command);
        Self { child: command.spawn().expect("cbdctrl"), name }
    }

    fn read(&self, fixture: &Fixture, kind: &str) -> String {
        std::fs::read_to_string(fixture.path(&format!("{}.{kind}", self.name))).expect("its output")
    }

    /// Waits until the output contains `part`.
    #[track_caller]
    fn expect(&self, fixture: &Fixture, kind: &str, part: &str) {
        until(part, || self.read(fixture, kind).contains(part));
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn names(fixture: &Fixture, options: &[&str]) -> Vec<String> {
    let arguments = [&["events", "--json"], options].concat();
    let lines = fixture.ok(&arguments);
    let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    events.map(|event| event["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn the_life_of_a_backend_and_the_failure_of_its_disk_are_events() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".to_owned());
    fixture.start();
    fixture.register("64M");
    let (disk, export) = (fixture.disk("disk", 8 << 20), fixture.nbd());
    fixture.ok(&["backend-start", "-p", &disk, "-c", "16M", "--name", "db", "-D", "-e", &export]);
    fixture.client().write(0, &[7; 4096], true).expect("the cache takes it");
    fixture.run(&["drain", "-b", "db", "--timeout", "1"]);
    until("disk.failing", || names(&fixture, &["-b", "db"]).contains(&"disk.failing".to_owned()));
    fixture.ok(&["set", "-b", "0", "cache_mode=writethrough", "--no-wait"]);
    let all = names(&fixture, &[]);
    for name in [
        "daemon.started",
        "transport.registered",
        "backend.started",
        "blkdev.started",
        "drain.started",
        "drain.ended",
        "settings.changed",
        "mode.changing",
    ] {
        assert!(all.iter().any(|known| known == name), "{name}: {all:?}");
    }
    let of_backend = names(&fixture, &["-b", "0", "--severity", "warning"]);
    assert!(of_backend.contains(&"drain.ended".to_owned()), "{of_backend:?}");
    assert!(!of_backend.contains(&"backend.started".to_owned()), "{of_backend:?}");
    let text = fixture.ok(&["events", "-b", "0"]);
    assert!(text.lines().any(|line| line.contains(" UTC ")
        && line.contains("disk.failing")
        && line.contains("backend 0: ")
        && line.contains("writeback fails")));
    let metrics = fixture.json(&["status", "--json"])["events"]["counts"]["disk.failing"].as_u64();
    assert_eq!(metrics, Some(1));
    // The log has the text, and not the fields that the text says.
    let log = fixture.log();
    assert!(log.contains("started: ") && !log.contains("event="), "{log}");
    let refused = fixture.run(&["events", "-b", "nothing"]);
    assert!(refused.code == 1 && refused.stderr.contains("nothing"), "{refused:?}");
    assert_eq!(fixture.run(&["events", "--since", "yesterday"]).code, 2);
    for (arguments, part) in [
        (&["events", "-b", "99"][..], "no backend 99"),
        (&["events", "-t", "99"], "no transport 99"),
        (&["events", "-f", "-t", "99", "-b", "0"], "no transport 99"),
    ] {
        let refused = fixture.run(arguments);
        assert!(refused.code == 1 && refused.stderr.contains(part), "{arguments:?}: {refused:?}");
    }
    // One that is gone has events.
    fixture.ok(&["backend-stop", "-b", "0", "--discard-dirty", "4096"]);
    assert!(names(&fixture, &["-b", "0"]).contains(&"backend.removed".to_owned()));
}

#[test]
fn a_follower_goes_on_over_a_daemon_that_is_killed_and_one_that_ends() {
    let mut fixture = Fixture::with_region();
    let follower = Follower::start(&fixture, "follower", &[]);
    follower.expect(&fixture, "out", "transport.registered");
    fixture.kill();
    follower.expect(&fixture, "err", "waiting for it");
    fixture.start();
    follower.expect(&fixture, "err", "the daemon is there, restarted");
    until("daemon.started", || follower.read(&fixture, "out").matches("daemon.started").count() == 2);
    let took = fixture.terminate();
    assert!(took < Duration::from_secs(10), "the follower holds the daemon up: {took:?}");
    follower.expect(&fixture, "out", "daemon.stopping");
    let early = Follower::start(&fixture, "early", &["--json", "--severity", "info"]);
    early.expect(&fixture, "err", "no daemon listens");
    fixture.start();
    early.expect(&fixture, "out", "\"name\":\"daemon.started\"");
}

#[test]
fn the_command_of_the_configuration_gets_the_events_the_end_of_the_daemon_included() {
    let mut fixture = Fixture::new();
    let received = fixture.text("received");
    let config = format!(
        "[daemon]\npreserve_fuse = false\n[events]\ncommand = [\"/bin/sh\", \"-c\", \"cat >> {received}; exit $CBD_SEQUENCE\"]\n\
         names = [\"daemon.started\", \"daemon.stopping\", \"transport.registered\"]\n"
    );
    std::fs::write(fixture.path("cbd.toml"), config).expect("a file");
    fixture.start();
    fixture.register("64M");
    until("two events", || std::fs::read_to_string(&received).is_ok_and(|text| text.lines().count() == 2));
    until("its failures", || {
        let command = &fixture.json(&["status", "--json"])["events"]["command"];
        command["failed"].as_u64() == Some(2) && command["waiting"].as_u64() == Some(0)
    });
    assert!(fixture.log().contains("the command for the event daemon.started, /bin/sh, failed: exit status"));
    fixture.terminate();
    let text = std::fs::read_to_string(&received).expect("a file");
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let names: Vec<&str> = events.iter().filter_map(|event| event["name"].as_str()).collect();
    assert_eq!(names, ["daemon.started", "transport.registered", "daemon.stopping"]);
}

/// A daemon whose disk does not take writes if `fails`, with a cache whose recovery point has a maximum age.
fn promising(fails: bool, max_age: &str) -> Fixture {
    let mut fixture = Fixture::new();
    fixture.decorate = fails.then(|| "fault:op=write".to_owned());
    fixture.start();
    fixture.register("64M");
    // In memory, so that no flush waits for what others write to a disk.
    let (disk, export) = (fixture.in_memory("disk"), fixture.nbd());
    File::create(&disk).and_then(|file| file.set_len(8 << 20)).expect("a disk");
    let arguments = ["backend-start", "-p", &disk, "-c", "16M", "-D", "-e", &export];
    fixture.ok(&[&arguments[..], &["--consistency", "checkpoint", "--recovery-point-max-age", max_age]].concat());
    fixture
}

fn backend(fixture: &Fixture) -> Value {
    fixture.json(&["status", "--json"])["transports"][0]["backends"][0].clone()
}

fn cache(fixture: &Fixture) -> Value {
    backend(fixture)["cache"].clone()
}

#[test]
fn the_recovery_point_stays_younger_than_promised_while_clients_write_and_has_no_age_afterwards() {
    let fixture = promising(false, "3s");
    let mut client = fixture.client();
    let (mut oldest, end) = (0, Instant::now() + Duration::from_secs(6));
    let mut number: u64 = 0;
    while Instant::now() < end {
        client.write(number * 37 % 2000 * 4096, &[number as u8; 4096], false).expect("written");
        number += 1;
        if number.is_multiple_of(64) {
            client.flush().expect("flushed");
            oldest = oldest.max(backend(&fixture)["recovery_point_age_ms"].as_u64().expect("an age"));
        }
    }
    assert!(oldest < 3000, "{oldest} ms, with {number} writes");
    until("everything is on the disk", || {
        let backend = backend(&fixture);
        backend["cache"]["dirty_bytes"] == 0 && backend["recovery_point_age_ms"] == 0
    });
    let events = names(&fixture, &[]);
    assert!(!events.contains(&"recovery_point.late".to_owned()), "{events:?}");
    let page = fixture.ok(&["status"]);
    assert!(page.contains("0.0 s old, at most 3 s as promised"), "{page}");
}

#[test]
fn a_disk_that_fails_makes_the_recovery_point_late_and_one_that_works_again_ends_that() {
    let mut fixture = promising(true, "1s");
    fixture.client().write(0, &[7; 4096], true).expect("the cache takes it");
    until("recovery_point.late", || names(&fixture, &[]).contains(&"recovery_point.late".to_owned()));
    let page = fixture.ok(&["status"]);
    assert!(page.contains("LATE") && page.contains("and 1 s are promised"), "{page}");
    let text = fixture.ok(&["events", "--severity", "warning"]);
    assert!(text.contains("s older than recovery_point_max_age=1s"), "{text}");
    // The promise is kept over a restart, and with it that the recovery point is late.
    fixture.terminate();
    fixture.start();
    until("it is late again", || names(&fixture, &[]).contains(&"recovery_point.late".to_owned()));
    fixture.terminate();
    fixture.decorate = None;
    fixture.start();
    until("the disk has it", || cache(&fixture)["dirty_bytes"] == 0);
    assert_eq!(backend(&fixture)["recovery_point_age_ms"], 0);
    assert_eq!(cache(&fixture)["recovery_point_max_age_s"], 1);
}

#[test]
fn a_pause_makes_the_recovery_point_late_and_its_end_is_an_event() {
    let fixture = promising(false, "1s");
    fixture.ok(&["set", "-b", "0", "writeback=paused:1h"]);
    fixture.client().write(0, &[7; 4096], true).expect("the cache takes it");
    until("recovery_point.late", || names(&fixture, &[]).contains(&"recovery_point.late".to_owned()));
    assert!(backend(&fixture)["time_to_empty_s"].is_null(), "nothing is written back");
    fixture.ok(&["set", "-b", "0", "writeback=on"]);
    until("recovery_point.kept", || names(&fixture, &[]).contains(&"recovery_point.kept".to_owned()));
}

#[test]
fn a_promise_without_a_meaning_is_refused_with_what_to_do() {
    let fixture = promising(false, "10m");
    for (changes, part) in [
        (&["recovery_point_max_age=0.5"][..], "1s to 7d"),
        (&["recovery_point_max_age=500ms"], "1s to 7d"),
        (&["recovery_point_max_age=30"], "with its unit"),
        (&["recovery_point_max_age=0"], "recovery_point_max_age is none"),
        (&["consistency=none"], "recovery_point_max_age=none"),
        (&["consistency=none", "recovery_point_max_age=5s"], "consistency=strict or checkpoint"),
    ] {
        let ran = fixture.run(&[&["set", "-b", "0"], changes].concat());
        assert!(ran.code == 1 && ran.stderr.contains(part), "{changes:?}: {ran:?}");
    }
    assert_eq!(cache(&fixture)["recovery_point_max_age_s"], 600, "nothing was changed");
    fixture.ok(&["set", "-b", "0", "consistency=none", "recovery_point_max_age=none"]);
    assert_eq!(cache(&fixture)["recovery_point_max_age_s"], 0);
    let plain = fixture.disk("plain", 8 << 20);
    // It ends with the cache.
    fixture.ok(&["set", "-b", "0", "consistency=checkpoint", "recovery_point_max_age=30s"]);
    let promised =
        || fixture.json(&["scrub", "-b", "0", "--status", "--json"])["recovery_point_max_age_s"].clone();
    assert_eq!(promised(), 30);
    fixture.ok(&["cache-detach", "-b", "0"]);
    assert_eq!(promised(), 0);
    fixture.ok(&["cache-attach", "-b", "0", "-c", "16M"]);
    assert_eq!((promised(), cache(&fixture)["recovery_point_max_age_s"].clone()), (0.into(), 0.into()));
    let ran = fixture.run(&["backend-start", "-p", &plain, "-c", "0", "--recovery-point-max-age", "5s"]);
    assert!(ran.code == 1 && ran.stderr.contains("leave it out"), "{ran:?}");
}
