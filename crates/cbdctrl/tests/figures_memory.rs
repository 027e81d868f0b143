//! The memory of what watches a daemon with ten devices: figures, metrics, status, maps and events.

mod support;

use serde_json::Value;
use std::process::Command;
use std::time::Duration;
use support::{Fixture, MIB, run_for};

const DEVICES: usize = 10;
const SIZE: u64 = 32 * MIB;
/// How often each watcher asks.
const ROUNDS: usize = 40;
/// What the watchers may cost beside what other tests hold: the record of events, the history of the page, the samples and the
/// counters (docs/performance.md has them all).
const WATCHED_MAX: u64 = MIB;

/// The anonymous memory of the daemon in bytes: the region and files do not count.
fn anonymous_bytes(fixture: &Fixture) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", fixture.pid())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

fn ask(fixture: &Fixture, path: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
    match path {
        "top" => command.args(["top", "--once", "-i", "0.1"]),
        "events" => command.args(["events", "--json"]),
        _ => command.args(["status", "--json"]),
    };
    command.env("CBD_SOCKET", fixture.socket());
    let ran = run_for(command, Duration::from_secs(40));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
}

#[test]
fn what_watches_ten_devices_takes_a_bounded_memory() {
    let mut fixture = Fixture::new();
    fixture.start();
    fixture.register("256M");
    let mut clients = Vec::new();
    for number in 0..DEVICES {
        let (disk, socket) = (fixture.disk(&format!("disk{number}"), SIZE), format!("nbd{number}.sock"));
        let export = format!("nbd:unix:{}", fixture.text(&socket));
        fixture.ok(&["backend-start", "-p", &disk, "-c", "16M", "--start-dev", "--export", &export]);
        let mut client = fixture.client_of(&socket);
        let mut buffer = vec![7; 64 << 10];
        for at in (0..SIZE).step_by(1 << 20) {
            client.write(at, &buffer, false).expect("written");
            client.read((at + SIZE / 2) % SIZE, &mut buffer).expect("read");
        }
        client.flush().expect("flushed");
        clients.push(client);
    }
    fixture.ok(&["drain"]);
    let before = anonymous_bytes(&fixture);
    let watch = |path: &'static str| {
        let fixture = &fixture;
        move || (0..ROUNDS).for_each(|_| ask(fixture, path))
    };
    std::thread::scope(|scope| {
        for path in ["status", "events", "top"] {
            scope.spawn(watch(path));
        }
        scope.spawn(|| {
            let client = cbd_daemon::client::Client::new(std::path::Path::new(&fixture.socket()));
            for round in 0..ROUNDS {
                let page = client.text("/v1/metrics").expect("metrics");
                assert!(page.matches("cbd_blkdev_request_seconds_count").count() >= DEVICES);
                let backend = round % DEVICES;
                let map: Value =
                    client.get(&format!("/v1/transports/0/backends/{backend}/map?cells=256")).expect("a map");
                assert_eq!(map["cells"].as_array().map(Vec::len), Some(256));
            }
        });
    });
    let after = anonymous_bytes(&fixture);
    let grown = after.saturating_sub(before);
    eprintln!("{} KiB before anything watched, {} KiB more behind it", before >> 10, grown >> 10);
    assert!(grown <= WATCHED_MAX, "{grown} bytes more than {before}; at most {WATCHED_MAX}");
}
