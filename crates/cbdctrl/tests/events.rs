//! Events of a daemon as users see them: by `events`, over a restart, by a command, and in metrics.

mod support;

use serde_json::Value;
use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
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
    let metrics = fixture.json(&["status"])["events"]["counts"]["disk.failing"].as_u64();
    assert_eq!(metrics, Some(1));
    // The log has the text, and not the fields that the text says.
    let log = fixture.log();
    assert!(log.contains("started: ") && !log.contains("event="), "{log}");
    let refused = fixture.run(&["events", "-b", "nobody"]);
    assert!(refused.code == 1 && refused.stderr.contains("nobody"), "{refused:?}");
    assert_eq!(fixture.run(&["events", "--since", "yesterday"]).code, 2);
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
        let command = &fixture.json(&["status"])["events"]["command"];
        command["failed"].as_u64() == Some(2) && command["waiting"].as_u64() == Some(0)
    });
    assert!(fixture.log().contains("the command for the event daemon.started, /bin/sh, failed: exit status"));
    fixture.terminate();
    let text = std::fs::read_to_string(&received).expect("a file");
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let names: Vec<&str> = events.iter().filter_map(|event| event["name"].as_str()).collect();
    assert_eq!(names, ["daemon.started", "transport.registered", "daemon.stopping"]);
}
