//! The page: who gets its files, and what they get of the daemon.

use crate::fixture::{Answer, Served, ask_port, free_port, until};
use cbd_daemon::api::Status;
use cbd_daemon::web::Source;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

fn status() -> Status {
    serde_json::from_str(include_str!("status.json")).unwrap()
}

fn get(served: &Served, path: &str) -> Answer {
    served.ask(&format!("GET {path} HTTP/1.1\nHost: cbd"))
}

/// The answer in JSON to a request that succeeds.
#[track_caller]
fn found(served: &Served, path: &str) -> Value {
    let answer = get(served, path);
    assert_eq!(answer.code, 200, "{}: {}", answer.head, answer.body);
    assert!(answer.head.contains("cache-control: no-store"), "{}", answer.head);
    serde_json::from_str(&answer.body).unwrap()
}

fn sampled(served: &Served) {
    until("a sample is there", || get(served, "/page/status").code == 200);
}

#[test]
fn the_files_of_the_page_load_nothing_from_elsewhere() {
    let served = Served::at_a_socket(status());
    let page = get(&served, "/");
    assert_eq!(page.code, 200);
    let mut files = vec!["/".to_owned()];
    for part in page.body.split('"').filter(|part| part.starts_with("page/")) {
        files.push(format!("/{part}"));
    }
    assert!(files.len() > 3, "{files:?}");
    for file in files {
        let answer = get(&served, &file);
        assert_eq!(answer.code, 200, "{file}");
        let policy = "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';";
        assert!(answer.head.contains(policy), "{file}: {}", answer.head);
        assert!(answer.head.contains("x-content-type-options: nosniff"), "{file}: {}", answer.head);
        assert!(!answer.body.contains("<script>"), "{file}");
        let head = served.ask(&format!("HEAD {file} HTTP/1.1\nHost: cbd"));
        assert_eq!((head.code, head.body.as_str()), (200, ""), "{file}");
        assert_eq!(served.ask(&format!("POST {file} HTTP/1.1\nHost: cbd")).code, 405, "{file}");
    }
}

#[test]
fn the_page_has_the_status_that_metrics_and_commands_have() {
    let status = status();
    let served = Served::at_a_socket(status.clone());
    sampled(&served);
    let page = found(&served, "/page/status");
    assert_eq!(page["status"], serde_json::to_value(&status).unwrap());
    assert!(page["instance"].is_string() && page["events"].is_array(), "{page}");
    assert!(page["sampled_ms_ago"].as_u64() < Some(60_000), "{page}");
    let (transport, backend) = (&status.transports[0], &status.transports[0].backends[0]);
    let key = format!("{}/{}", transport.info.transport_id, backend.info.uuid);
    let latest = &page["latest"][&key];
    assert_eq!(latest["dirty_bytes"].as_u64(), backend.cache.as_ref().map(|cache| cache.dirty_bytes));
}

#[test]
fn the_history_goes_on_where_the_last_answer_ended() {
    let served = Served::at_a_socket(status());
    sampled(&served);
    let uuid = status().transports[0].backends[0].info.uuid.clone();
    let path = |range: &str, since: u64| {
        format!("/page/history?transport=0&backend={uuid}&range={range}&since={since}")
    };
    let first = found(&served, &path("hour", 0));
    let next = first["next"].as_u64().unwrap();
    assert!(next >= 1 && first["ticks"].as_array().unwrap().len() as u64 <= next, "{first}");
    until("there is another second", || {
        let more = found(&served, &path("hour", next));
        more["ticks"].as_array().unwrap().iter().any(|tick| tick.as_u64() > Some(next))
    });
    assert_eq!(found(&served, &path("week", 0))["step_s"], 60);
    for (path, code) in [
        ("/page/history?transport=0&backend=none&range=hour".to_owned(), 404),
        (format!("/page/history?transport=7&backend={uuid}&range=hour"), 404),
        (format!("/page/history?transport=0&backend={uuid}&range=year"), 400),
        (format!("/page/history?transport=0&backend={uuid}&range=hour&since=-1"), 400),
        (format!("/page/history?transport=0&backend={uuid}&range=hour&more=1"), 400),
        ("/page/history".to_owned(), 400),
        ("/page/map?transport=0&backend=none".to_owned(), 404),
        ("/page/map?transport=0".to_owned(), 400),
        ("/page/none".to_owned(), 404),
    ] {
        let answer = get(&served, &path);
        assert_eq!(answer.code, code, "{path}: {}", answer.body);
        assert!(answer.head.contains("content-type: text/plain"), "{path}: {}", answer.head);
    }
    let map = found(&served, &format!("/page/map?transport=0&backend={uuid}&cells=4"));
    assert_eq!(
        map["backend_id"].as_u64(),
        Some(u64::from(status().transports[0].backends[0].info.backend_id))
    );
}

#[test]
fn the_files_need_no_token_and_all_that_is_of_this_machine_does() {
    let folder = Served::folder();
    let token = folder.path().join("token");
    std::fs::write(&token, "a-token-of-one-word\n").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let port = free_port();
    let text = format!("listen = [\"0.0.0.0:{port}\"]\ntoken_file = \"DIR/token\"");
    let source: Source = Arc::new(|| Ok(status()));
    let _served = Served::start(folder, &text, None, source);
    for file in ["/", "/page/page.js"] {
        assert_eq!(ask_port(port, &format!("GET {file} HTTP/1.1\nHost: cbd")).code, 200, "{file}");
    }
    for path in ["/page/status", "/page/history", "/page/map", "/page/page.js/", "//", "/page/none"] {
        let answer = ask_port(port, &format!("GET {path} HTTP/1.1\nHost: cbd"));
        assert_eq!(answer.code, 401, "{path}: {}", answer.body);
    }
    let right = "GET /page/status HTTP/1.1\nHost: cbd\nAuthorization: Bearer a-token-of-one-word";
    until("it is served", || ask_port(port, right).code == 200);
}

#[test]
fn a_page_that_is_off_takes_no_samples() {
    let asked = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&asked);
    let source: Source = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(status())
    });
    let text = "listen = [\"unix:DIR/metrics.sock\"]\npage = false";
    let served = Served::start(Served::folder(), text, None, source);
    until("the socket is there", || std::os::unix::net::UnixStream::connect(served.socket()).is_ok());
    for path in ["/", "/page/status"] {
        let answer = get(&served, path);
        assert!(answer.code == 404 && answer.body.contains("turned off"), "{path}: {}", answer.body);
    }
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    assert_eq!(get(&served, "/metrics").code, 200);
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}

#[test]
fn a_daemon_without_a_status_is_not_there_yet() {
    let is_there = Arc::new(AtomicBool::new(false));
    let there = Arc::clone(&is_there);
    let source: Source = Arc::new(move || {
        let missing = || cbd_types::Error::new(cbd_types::ErrorKind::Busy, "it starts");
        there.load(Ordering::Relaxed).then(status).ok_or_else(missing)
    });
    let served = Served::start(Served::folder(), "listen = [\"unix:DIR/metrics.sock\"]", None, source);
    until("the socket is there", || std::os::unix::net::UnixStream::connect(served.socket()).is_ok());
    let answer = get(&served, "/page/status");
    assert!(answer.code == 503 && answer.body.contains("starting"), "{}", answer.body);
    is_there.store(true, Ordering::Relaxed);
    sampled(&served);
}
