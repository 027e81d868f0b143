//! Clients of the listener: good ones, bad ones and many of them.

use crate::fixture::{Answer, Served, TIMEOUT, ask_port, free_port, status, status_of, until};
use cbd_daemon::web::{CONNECTIONS_MAX, Source};
use cbd_types::{Error, ErrorKind};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SCRAPE: &str =
    "GET /metrics HTTP/1.1\nHost: localhost\nAccept: application/openmetrics-text; version=1.0.0";

fn source() -> Source {
    Arc::new(|| Ok(status()))
}

#[test]
fn metrics_are_served_in_the_format_that_the_client_accepts() {
    let served = Served::at_a_socket(status());
    let answer = served.ask("GET /metrics HTTP/1.1\nHost: cbd");
    assert_eq!(answer.code, 200, "{}", answer.head);
    assert!(answer.head.contains("content-type: text/plain; version=0.0.4"), "{}", answer.head);
    assert_eq!(answer.body, cbd_daemon::metrics::render(&status()));
    let answer = served.ask(SCRAPE);
    assert!(
        answer.head.contains("content-type: application/openmetrics-text; version=1.0.0"),
        "{}",
        answer.head
    );
    assert!(answer.body.ends_with("# EOF\n"), "{}", answer.body);
    let answer = served.ask("HEAD /metrics HTTP/1.1\nHost: cbd");
    assert_eq!((answer.code, answer.body.as_str()), (200, ""));
    let answer = served.ask("GET /metrics HTTP/1.0");
    assert_eq!(answer.code, 200, "{}", answer.head);
}

#[test]
fn nothing_but_reads_of_metrics_is_served() {
    let served = Served::at_a_socket(status());
    for (request, code) in [
        ("POST /metrics HTTP/1.1\nHost: cbd\nContent-Length: 0", 405),
        ("DELETE /metrics HTTP/1.1\nHost: cbd", 405),
        ("GET /v1/status HTTP/1.1\nHost: cbd", 404),
        ("POST /v1/transports HTTP/1.1\nHost: cbd\nContent-Length: 0", 404),
        ("GET /../etc/passwd HTTP/1.1\nHost: cbd", 404),
        ("GET /metrics HTTP/9.9", 400),
        ("\u{1}\u{2}", 400),
        (&format!("GET /metrics HTTP/1.1\nHost: cbd\nX: {}", "x".repeat(64 << 10)), 431),
        (&format!("GET /metrics HTTP/1.1\nHost: cbd\n{}X: x", "Y: y\n".repeat(200)), 431),
    ] {
        let answer = served.ask(request);
        assert_eq!(answer.code, code, "{}: {}", request.lines().next().unwrap(), answer.head);
    }
    assert_eq!(served.ask(SCRAPE).code, 200);
}

#[test]
fn an_address_that_other_hosts_reach_has_nothing_without_the_token() {
    let folder = Served::folder();
    let token = folder.path().join("token");
    std::fs::write(&token, "a token of one word\n".replace(' ', "-")).unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let port = free_port();
    let text = format!("listen = [\"0.0.0.0:{port}\"]\ntoken_file = \"DIR/token\"");
    let served = Served::start(folder, &text, None, source());
    for header in ["X: y", "Authorization: Bearer a-token-of-two-words", "Authorization: Basic YTpi"] {
        let answer = ask_port(port, &format!("{SCRAPE}\n{header}"));
        assert_eq!(answer.code, 401, "{}", answer.head);
        assert!(answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
        assert!(!answer.body.contains("cbd_") && answer.body.contains("Bearer TOKEN"), "{}", answer.body);
    }
    assert_eq!(ask_port(port, "GET /none HTTP/1.1\nHost: cbd").code, 401, "nor whether there is a path");
    assert_eq!(served.refused(), 4);
    let right = format!("{SCRAPE}\nAuthorization: Bearer a-token-of-one-word");
    assert_eq!(ask_port(port, &right).code, 200);
}

#[test]
fn a_name_that_another_site_has_is_refused_at_a_loopback_address() {
    let port = free_port();
    let served = Served::start(Served::folder(), &format!("listen = [\"127.0.0.1:{port}\"]"), None, source());
    assert_eq!(ask_port(port, "GET /metrics HTTP/1.1\nHost: evil.example.org").code, 421);
    assert_eq!(served.refused(), 1);
    for hosts in
        ["Host: localhost\nHost: evil.example.org", "Host: localhost\nHost: localhost", "Host:", "Host: "]
    {
        let answer = ask_port(port, &format!("GET /metrics HTTP/1.1\n{hosts}"));
        assert_eq!(answer.code, 400, "{hosts}: {}", answer.head);
        assert!(!answer.body.contains("cbd_") && answer.body.contains("Host"), "{}", answer.body);
    }
    assert_eq!(ask_port(port, &format!("GET /metrics HTTP/1.1\nHost: 127.0.0.1:{port}")).code, 200);
}

#[test]
fn an_address_in_use_is_a_warning_until_it_is_free() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let text = format!("listen = [\"127.0.0.1:{port}\", \"unix:DIR/metrics.sock\"]");
    let served = Served::start(Served::folder(), &text, None, source());
    let warnings = || served.front_ends.web_problems.warnings();
    until("it is reported", || !warnings().is_empty());
    let warning = warnings().concat();
    for part in [&format!("127.0.0.1:{port}"), "in use", "[web]", "tries again every"] {
        assert!(warning.contains(part), "{warning}");
    }
    until("the other address is served", || UnixStream::connect(served.socket()).is_ok());
    assert_eq!(served.ask(SCRAPE).code, 200, "the other address is served");
    drop(taken);
    assert_eq!(ask_port(port, SCRAPE).code, 200);
    assert!(warnings().is_empty(), "{:?}", warnings());
}

#[test]
fn an_address_of_another_host_and_a_socket_that_cannot_be_made_are_warnings() {
    let folder = Served::folder();
    let token = folder.path().join("token");
    std::fs::write(&token, "0123456789abcdef").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let port = free_port();
    // An address for documentation, which no host has.
    let text = format!(
        "listen = [\"192.0.2.1:9469\", \"unix:DIR/none/m.sock\", \"unix:DIR/token\", \"127.0.0.1:{port}\"]\n\
         token_file = \"DIR/token\""
    );
    let served = Served::start(folder, &text, None, source());
    until("they are reported", || served.front_ends.web_problems.warnings().len() == 3);
    let warnings = served.front_ends.web_problems.warnings().join("\n");
    for part in ["192.0.2.1:9469: ", "none/m.sock", "is no socket"] {
        assert!(warnings.contains(part), "{warnings}");
    }
    assert_eq!(ask_port(port, SCRAPE).code, 200);
}

#[test]
fn a_socket_is_for_its_owner_or_the_group_and_goes_with_the_listener() {
    let mode = |served: &Served| std::fs::metadata(served.socket()).unwrap().permissions().mode() & 0o777;
    let mut served = Served::at_a_socket(status());
    assert_eq!(mode(&served), 0o600);
    let socket = served.socket();
    drop(served.web.take());
    assert!(!socket.exists());
    let group = std::fs::metadata(socket.parent().unwrap()).unwrap().gid();
    let served =
        Served::start(Served::folder(), "listen = [\"unix:DIR/metrics.sock\"]", Some(group), source());
    until("the socket is there", || UnixStream::connect(served.socket()).is_ok());
    until("the group has it", || mode(&served) == 0o660);
    assert_eq!(std::fs::metadata(served.socket()).unwrap().gid(), group);
}

#[test]
fn ten_thousand_devices_with_any_path_are_served_whole() {
    let count = 10_000;
    let served = Served::at_a_socket(status_of(count));
    let Answer { code, body, head } = served.ask(SCRAPE);
    assert_eq!(code, 200, "{head}");
    assert!(body.ends_with("# EOF\n"));
    let lines: Vec<&str> = body.lines().filter(|line| line.starts_with("cbd_blkdev_up{")).collect();
    assert_eq!(lines.len(), count as usize);
    let part = "device=\"/a \\\"path\\\",{with} \\\\ and\\nlines\\\\x0d\\\\x1b[31m é/9999/";
    assert!(lines[9999].contains(part), "{}", lines[9999]);
}

#[test]
fn clients_that_are_silent_or_never_read_are_bounded_and_exclude_no_other() {
    let served = Served::at_a_socket(status_of(10_000));
    let connect = |request: &str| {
        let mut stream = UnixStream::connect(served.socket()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    };
    let request = format!("{}\r\n\r\n", SCRAPE.replace('\n', "\r\n"));
    // Each never reads its page of more than 5 MB, or has sent a part of its request.
    let never_read: Vec<_> = (0..40).map(|_| connect(&request)).collect();
    let silent: Vec<_> = (0..300).map(|number| connect(["", "GET /met"][number % 2])).collect();
    for _ in 0..3 {
        let answer = served.ask(SCRAPE);
        assert!(answer.code == 200 && answer.body.ends_with("# EOF\n"), "{}", answer.head);
    }
    let open = served.front_ends.status().web_connections;
    assert!(open <= CONNECTIONS_MAX as u64, "{open} are open");
    assert!(served.refused() >= (340 - CONNECTIONS_MAX) as u64, "{}", served.refused());
    drop((never_read, silent));
    until("their connections end", || served.front_ends.status().web_connections == 0);
}

#[test]
fn an_error_of_the_daemon_and_a_status_that_comes_late_are_answers() {
    let (release, held) = channel::<()>();
    let held = Mutex::new(held);
    let source: Source = Arc::new(move || {
        let _ = held.lock().unwrap().recv_timeout(TIMEOUT);
        Err(Error::new(ErrorKind::Stopped, "the daemon is stopping"))
    });
    // Samples for the page would ask, too.
    let text = "listen = [\"unix:DIR/metrics.sock\"]\npage = false";
    let served = Served::start(Served::folder(), text, None, source);
    until("the socket is there", || UnixStream::connect(served.socket()).is_ok());
    let mut stream = UnixStream::connect(served.socket()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: cbd\r\n\r\n").unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(stream.read(&mut [0; 16]).is_err(), "it waits for the status");
    // Other requests do not wait for it.
    assert_eq!(served.ask("GET /else HTTP/1.1\nHost: cbd").code, 404);
    release.send(()).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("the daemon is stopping"), "{answer}");
}
