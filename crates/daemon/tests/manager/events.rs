//! Events on the control socket: the kept ones, those that come, and clients that do not read or disconnect.

use crate::fixture::{Fixture, Running};
use cbd_daemon::api::{Event, EventLine, Severity};
use cbd_daemon::client::Client;
use cbd_daemon::control::Control;
use cbd_daemon::events::{EventName, Events, NewEvent};
use cbd_daemon::server::{self, Access};
use cbd_types::{ErrorKind, Result};
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Longer than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon that listens on a socket.
struct Served {
    socket: PathBuf,
    events: Arc<Events>,
    daemon: Running,
    runtime: Option<Runtime>,
    _fixture: Fixture,
}

impl Served {
    fn start() -> Self {
        let fixture = Fixture::new();
        let daemon = fixture.daemon_with_region();
        let socket = fixture.path("control");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = {
            let _in_runtime = runtime.enter();
            tokio::net::UnixListener::bind(&socket).unwrap()
        };
        let access = Access { user: cbd_daemon::system::user_id(), group: None };
        let (control, front_ends) = (Arc::clone(&daemon.manager), daemon.manager.front_ends());
        runtime.spawn(server::serve(listener, control, access, front_ends, std::future::pending()));
        let events = daemon.manager.events();
        Self { socket, events, daemon, runtime: Some(runtime), _fixture: fixture }
    }

    fn record(&self, backend: u32, severity: Severity, text: &str) {
        self.events.record(NewEvent {
            name: EventName::DiskFailing,
            severity,
            transport: Some(0),
            backend: Some(backend),
            blkdev: None,
            fields: std::collections::BTreeMap::new(),
            text: text.to_owned(),
        });
    }

    /// The lines of an answer, in words.
    fn lines(&self, query: &str) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        Client::new(&self.socket).lines(&format!("/v1/events?{query}"), |line: EventLine| {
            lines.push(match line {
                EventLine::Begin(begin) => format!("begin {}-{}", begin.oldest, begin.latest),
                EventLine::Event(Event { text, .. }) => text,
                EventLine::Gap(gap) => format!("gap {}", gap.dropped),
                EventLine::End(_) => "end".to_owned(),
            });
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(lines)
    }

    /// A connection with a request that follows, after the head of its answer.
    fn follow(&self) -> (UnixStream, String) {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(b"GET /v1/events?follow=true HTTP/1.1\r\nhost: cbd\r\n\r\n").unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        (stream, String::from_utf8_lossy(&head).into_owned())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(2));
        }
    }
}

#[test]
fn the_kept_events_are_sent_in_order_by_number_severity_and_backend() {
    let served = Served::start();
    served.record(0, Severity::Info, "1");
    served.record(1, Severity::Error, "2");
    served.record(0, Severity::Warning, "3");
    assert_eq!(served.lines("").unwrap(), ["begin 1-3", "1", "2", "3", "end"]);
    assert_eq!(served.lines("since=2").unwrap(), ["begin 1-3", "3", "end"]);
    assert_eq!(served.lines("severity=warning").unwrap(), ["begin 1-3", "2", "3", "end"]);
    assert_eq!(served.lines("backend=0").unwrap(), ["begin 1-3", "1", "3", "end"]);
    for absent in ["transport=1", "backend=7", "backend=0&transport=1"] {
        assert_eq!(served.lines(absent).unwrap_err().kind(), ErrorKind::NotFound, "{absent}");
    }
    // A request that goes on was answered before.
    assert_eq!(served.lines("transport=1&since=2&instance=another").unwrap(), ["begin 1-3", "end"]);
    assert_eq!(served.lines("since=2&instance=another").unwrap().len(), 5, "another run of the daemon");
    assert_eq!(served.lines("since_ms=99999999999999").unwrap(), ["begin 1-3", "end"]);
    for _ in 0..5000 {
        served.record(0, Severity::Info, "many");
    }
    let lines = served.lines("since=2").unwrap();
    assert_eq!(lines[..3], ["begin 908-5003", "gap 905", "many"]);
    assert_eq!((lines.len(), lines.last().map(String::as_str)), (4096 + 3, Some("end")));
}

#[test]
fn a_request_for_what_is_none_is_refused() {
    let served = Served::start();
    for query in ["severity=bad", "since=-1", "sinse=1", "backend="] {
        let error = served.lines(query).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{query}: {error}");
    }
    let error = served.lines("backend=nothing").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

#[test]
fn a_follower_gets_what_comes_and_ends_with_the_daemon() {
    let served = Served::start();
    served.record(0, Severity::Info, "before");
    std::thread::scope(|scope| {
        let follower = scope.spawn(|| served.lines("follow=true"));
        let (mut stream, _) = served.follow();
        let mut seen = Vec::new();
        served.record(0, Severity::Info, "later");
        while !String::from_utf8_lossy(&seen).contains("later") {
            let mut bytes = [0; 4096];
            let length = stream.read(&mut bytes).unwrap();
            assert!(length > 0, "{}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&bytes[..length]);
        }
        served.record(0, Severity::Info, "the last");
        served.daemon.manager.begin_stop();
        let lines = follower.join().unwrap().unwrap();
        assert_eq!(lines[1..], ["before", "later", "the last"]);
    });
}

#[test]
fn a_follower_that_disconnects_makes_room_for_another_one() {
    let served = Served::start();
    let mut followers = Vec::new();
    let refused = loop {
        let (stream, head) = served.follow();
        if head != "HTTP/1.1 200" {
            break head;
        }
        followers.push(stream);
    };
    assert_eq!((refused.as_str(), followers.len()), ("HTTP/1.1 409", 16));
    assert_eq!(served.lines("").unwrap().len(), 2, "a request that does not follow is served");
    drop(followers);
    let end = Instant::now() + LIMIT;
    while served.follow().1 != "HTTP/1.1 200" {
        assert!(Instant::now() < end, "no follower has ended");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_follower_that_does_not_read_delays_no_other_client_and_misses_events() {
    let served = Served::start();
    let (mut silent, _) = served.follow();
    for _ in 0..50_000 {
        served.record(0, Severity::Info, &"x".repeat(200));
    }
    served.record(0, Severity::Info, "the last");
    assert_eq!(served.lines("since=50000").unwrap(), ["begin 45906-50001", "the last", "end"]);
    served.events.end_followers();
    let mut text = Vec::new();
    silent.set_read_timeout(Some(LIMIT)).unwrap();
    let mut bytes = [0; 1 << 16];
    while !String::from_utf8_lossy(&text).contains("the last") {
        let length = silent.read(&mut bytes).unwrap();
        assert!(length > 0, "it ends before the last event");
        text.extend_from_slice(&bytes[..length]);
    }
    assert!(String::from_utf8_lossy(&text).contains("\"gap\":{\"dropped\":"));
}
