//! Prometheus reads the metrics of a daemon, and its alert rules fire.

mod support;

use serde_json::Value;
use std::fs::Permissions;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use support::prometheus::{Prometheus, ask, free_port, packaged};
use support::{Fixture, MIB, system_tests, tool, try_tool, until};

const TOKEN: &str = "a-token-of-the-test";

/// A daemon that serves metrics at a unix socket, and with a token at `port` of all addresses, before it is started.
fn fixture(port: u16) -> Fixture {
    let fixture = Fixture::new();
    let token = fixture.path("token");
    std::fs::write(&token, TOKEN).expect("a token");
    std::fs::set_permissions(&token, Permissions::from_mode(0o600)).expect("ours");
    let (socket, token) = (fixture.text("metrics.sock"), fixture.text("token"));
    let web = format!("[web]\nlisten = [\"0.0.0.0:{port}\", \"unix:{socket}\"]\ntoken_file = \"{token}\"\n");
    std::fs::write(fixture.path("cbd.toml"), format!("[daemon]\npreserve_fuse = false\n{web}"))
        .expect("a file");
    fixture
}

/// The page at the unix socket, once it is served.
fn page(fixture: &Fixture) -> String {
    let mut stream = None;
    until("metrics are served", || {
        stream = UnixStream::connect(fixture.path("metrics.sock")).ok();
        stream.is_some()
    });
    // HTTP/1.0 has no chunks.
    let text = ask(stream.expect("a stream"), "GET /metrics HTTP/1.0");
    text.split_once("\r\n\r\n").expect("a body").1.to_owned()
}

#[test]
fn the_alert_rules_are_valid_and_each_fires_when_it_is_to() {
    if !system_tests("the_alert_rules_are_valid_and_each_fires_when_it_is_to") {
        return;
    }
    tool("promtool", &["check", "rules", &packaged("cbd.rules.yml")]);
    tool("promtool", &["test", "rules", &packaged("cbd.rules.test.yml")]);
    let text = |name| std::fs::read_to_string(packaged(name)).expect("a file");
    let (rules, tests) = (text("cbd.rules.yml"), text("cbd.rules.test.yml"));
    let alerts: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() >= 14, "{alerts:?}");
    for alert in alerts {
        let fires = format!("- labels: 'ALERTS{{alertname=\"{alert}\",alertstate=\"firing\"");
        assert!(tests.contains(&fires), "no test lets {alert} fire");
    }
}

#[test]
fn the_page_of_a_daemon_follows_the_conventions_of_prometheus() {
    if !system_tests("the_page_of_a_daemon_follows_the_conventions_of_prometheus") {
        return;
    }
    let mut fixture = fixture(free_port());
    fixture.start();
    fixture.register("32M");
    let disk = fixture.disk("a \"disk\" \\ with a name", 8 * MIB);
    fixture.start_backend(&disk);
    fixture.client().write(MIB, &[9; 4096], true).expect("written");
    std::fs::write(fixture.path("page"), page(&fixture)).expect("a file");
    let ran = try_tool("sh", &["-c", &format!("promtool check metrics < '{}'", fixture.text("page"))]);
    // 3: it is valid, and there is advice.
    assert!([0, 3].contains(&ran.code), "{}\n{}", ran.stdout, ran.stderr);
    for advice in (ran.stdout + &ran.stderr).lines() {
        let older = ["cbd_backend_oldest_operation_ms ", "cbd_cache_recovery_point_ms "];
        assert!(older.iter().any(|name| advice.starts_with(name)), "{advice}");
    }
    let control = UnixStream::connect(fixture.socket()).expect("a connection");
    let answer = ask(control, "GET /v1/metrics HTTP/1.0\nAccept: application/openmetrics-text");
    assert!(answer.contains("application/openmetrics-text; version=1.0.0"), "{answer}");
    assert!(answer.contains("cbd_backend_up{") && answer.ends_with("# EOF\n"), "{answer}");
}

#[test]
fn prometheus_reads_a_daemon_whose_disk_fails_and_the_alert_fires() {
    if !system_tests("prometheus_reads_a_daemon_whose_disk_fails_and_the_alert_fires") {
        return;
    }
    let port = free_port();
    let mut fixture = fixture(port);
    fixture.decorate = Some("fault:op=write".to_owned());
    fixture.start();
    fixture.register("32M");
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.start_backend(&disk);
    fixture.ok(&["set", "-b", "0", "write_error_after_s=0"]);
    let prometheus = Prometheus::start(&fixture, port, "200ms");
    let target = || Some(prometheus.get("/api/v1/targets")?["activeTargets"][0].clone());
    until("the daemon is read", || target().is_some_and(|target| target["health"] == "up"));
    assert!(prometheus.alerts("CbdStalled").is_empty());
    fixture.client().write(MIB, &[9; 4096], true).expect("written");
    let is_firing = |alert: &Value| alert["state"] == "firing" && alert["labels"]["path"] == disk;
    until("the alert fires", || prometheus.alerts("CbdStalled").iter().any(is_firing));
    // This one waits for 5 minutes before it fires.
    until("the disk is seen to fail", || {
        prometheus.alerts("CbdDiskFails").iter().any(|alert| alert["state"] == "pending")
    });
    // Clients that never read delay neither the control socket nor Prometheus.
    let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n");
    let never_read: Vec<_> = (0..40)
        .map(|_| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
            let _ = stream.write_all(request.as_bytes());
            stream
        })
        .collect();
    fixture.ok(&["status"]);
    let last = |target: Option<Value>| target.map(|target| target["lastScrape"].to_string());
    let seen = last(target());
    until("it is read again", || {
        let now = target();
        now.as_ref().is_some_and(|target| target["health"] == "up") && last(now) != seen
    });
    drop(never_read);
    fixture.terminate();
    until("it is away", || {
        prometheus.alerts("CbdDaemonAway").iter().any(|alert| alert["state"] == "pending")
    });
}

#[test]
fn a_daemon_with_a_port_in_use_serves_and_warns_and_one_with_a_bad_token_does_not_start() {
    let taken = TcpListener::bind("0.0.0.0:0").expect("a port");
    let port = taken.local_addr().expect("a port").port();
    let mut fixture = fixture(port);
    fixture.start();
    assert!(page(&fixture).contains("cbd_build_info"), "the other address is served");
    let warning = format!("metrics are not served at 0.0.0.0:{port}: Address already in use");
    until("status warns", || fixture.ok(&["status"]).contains(&warning));
    assert!(fixture.log().contains(&warning), "{}", fixture.log());
    fixture.terminate();
    assert!(!fixture.path("metrics.sock").exists(), "the socket is removed at the end");
    std::fs::set_permissions(fixture.path("token"), Permissions::from_mode(0o644)).expect("ours");
    let ran = support::run_for(fixture.daemon_command(), Duration::from_secs(60));
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("can be used by other users (mode 644)"), "{}", ran.stderr);
}
