//! The control socket, with a stub of a daemon behind it: paths, errors, progress, access.

use cbd_daemon::api::{
    AddPins, AttachCache, BackendGrown, BackendInfo, BackendStarted, BlkdevChange, BlkdevInfo, BlkdevStopped,
    BlkdevUser, ClearHost, CommonCheckpoint, DetachCache, DeviceMap, Done, Drain, GrowTransport, HostInfo,
    MoveBackend, NumberOrName, PinsInfo, Progress, RegisterTransport, RemovePins, RequestSample, ResizeCache,
    ScrubAction, ScrubInfo, ScrubRequest, Settings, SettingsChange, StartBackend, StartBlkdev, Status,
    StopBackend, StopBlkdev, TransportGrown, TransportInfo, TransportRegistered, VerifiedInfo, VerifyRange,
};
use cbd_daemon::client::{Client, Timeout};
use cbd_daemon::config::DaemonConfig;
use cbd_daemon::connections::CONNECTIONS_MAX;
use cbd_daemon::control::{Control, Flow, Report};
use cbd_daemon::events::Events;
use cbd_daemon::front_ends::FrontEnds;
use cbd_daemon::server::{self, Access, Peer};
use cbd_types::{Error, ErrorKind, Result};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A stub: most operations return an error of a known kind.
#[derive(Default)]
struct Fake {
    cancelled: AtomicBool,
    /// While a test holds it, a request for hosts waits.
    busy: Mutex<()>,
    events: Arc<Events>,
}

fn refused<T>(kind: ErrorKind, text: &'static str) -> Result<T> {
    Err(Error::new(kind, text))
}

fn progress(dirty_bytes: u64) -> Progress {
    Progress { backend_id: 3, dirty_bytes_at_start: 100, dirty_bytes, elapsed_ms: 5, ..Progress::default() }
}

/// The number at the end of a name such as `x8`.
fn number(object: &NumberOrName) -> Result<u32> {
    match object {
        NumberOrName::Number(number) => Ok(*number),
        NumberOrName::Name(name) => {
            match name.as_str().strip_prefix('x').and_then(|digits| digits.parse().ok()) {
                Some(number) => Ok(number),
                None => refused(ErrorKind::NotFound, "nothing has this name"),
            }
        }
    }
}

impl Control for Fake {
    fn events(&self) -> Arc<Events> {
        Arc::clone(&self.events)
    }
    fn register_transport(&self, request: &RegisterTransport) -> Result<TransportRegistered> {
        Ok(TransportRegistered { transport_id: 7, host_id: 1, warnings: vec![request.path.clone()] })
    }
    fn unregister_transport(&self, _: u32) -> Result<()> {
        Ok(())
    }
    fn transports(&self) -> Result<Vec<TransportInfo>> {
        Ok(vec![])
    }
    fn clear_host(&self, _: u32, _: u32, _: &ClearHost) -> Result<()> {
        Ok(())
    }

    fn hosts(&self, _: u32) -> Result<Vec<HostInfo>> {
        drop(self.busy.lock());
        let hostname = "node0".into();
        Ok(vec![HostInfo { host_id: 0, hostname, alive: true, this: true, seen_ms: None, clearing: false }])
    }
    fn start_backend(&self, _: u32, _: &StartBackend) -> Result<BackendStarted> {
        refused(ErrorKind::Exchanged, "another disk")
    }
    fn stop_backend(&self, _: u32, backend: u32, _: &StopBackend, report: Report<'_>) -> Result<Done> {
        if backend == 9 {
            return refused(ErrorKind::NotFound, "no backend 9");
        }
        report(progress(60));
        report(progress(20));
        if backend == 8 {
            return refused(ErrorKind::Backing, "the disk fails, 20 bytes are dirty");
        }
        Ok(Done { written_bytes: 100, ..Done::default() })
    }
    fn attach_cache(&self, _: u32, backend: u32, request: &AttachCache) -> Result<Done> {
        if backend == 9 {
            return refused(ErrorKind::NotFound, "no backend 9");
        }
        Ok(Done { warnings: vec![request.cache_size.to_string()], ..Done::default() })
    }
    fn move_backend(&self, _: u32, _: u32, _: &MoveBackend, _: Report<'_>) -> Result<Done> {
        refused(ErrorKind::TimedOut, "the host does not answer")
    }
    fn detach_cache(&self, _: u32, _: u32, _: &DetachCache, report: Report<'_>) -> Result<Done> {
        report(progress(60));
        refused(ErrorKind::Backing, "the disk fails")
    }
    fn resize_cache(&self, _: u32, _: u32, _: &ResizeCache, _: Report<'_>) -> Result<Done> {
        refused(ErrorKind::NoSpace, "too small")
    }
    fn pins(&self, _: u32, backend: u32) -> Result<PinsInfo> {
        Ok(PinsInfo { backend_id: backend, ..PinsInfo::default() })
    }
    fn map(&self, _: u32, _: u32, cells: Option<usize>) -> Result<DeviceMap> {
        Ok(DeviceMap { cell_bytes: cells.map_or(0, |cells| cells as u64), ..DeviceMap::default() })
    }
    fn add_pins(&self, _: u32, _: u32, _: AddPins) -> Result<PinsInfo> {
        refused(ErrorKind::NoSpace, "too much")
    }
    fn remove_pins(&self, _: u32, _: u32, _: &RemovePins) -> Result<PinsInfo> {
        refused(ErrorKind::NotFound, "nothing is pinned")
    }
    fn backends(&self, _: u32, all: bool) -> Result<Vec<BackendInfo>> {
        if all { Ok(vec![]) } else { refused(ErrorKind::Damaged, "damaged\nin two lines") }
    }
    fn set(&self, _: u32, _: u32, change: &SettingsChange) -> Result<Settings> {
        cbd_daemon::settings::check(change)?;
        refused(ErrorKind::NotFound, "no such backend")
    }
    fn checkpoint(&self, _: u32, _: &Drain, _: Report<'_>) -> Result<Done> {
        Ok(Done::default())
    }
    fn checkpoint_together(&self, _: u32, _: &CommonCheckpoint, _: Report<'_>) -> Result<Done> {
        Ok(Done::default())
    }
    fn drain(&self, _: u32, _: &Drain, report: Report<'_>) -> Result<Done> {
        for _ in 0..1000 {
            if report(progress(60)) == Flow::Cancel {
                self.cancelled.store(true, Ordering::SeqCst);
                return refused(ErrorKind::Stopped, "cancelled");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Done::default())
    }
    fn verify(&self, _: u32, _: u32, request: VerifyRange, report: Report<'_>) -> Result<Done> {
        report(progress(0));
        let verified =
            VerifiedInfo { verified_bytes: request.length.unwrap_or(7), ..VerifiedInfo::default() };
        Ok(Done { verified: Some(verified), ..Done::default() })
    }
    fn sample(&self, _: u32, backend: u32) -> Result<RequestSample> {
        Ok(RequestSample { backend_id: backend, ..RequestSample::default() })
    }
    fn scrub(&self, _: u32, backend: u32) -> Result<ScrubInfo> {
        Ok(ScrubInfo { backend_id: backend, ..ScrubInfo::default() })
    }
    fn set_scrub(&self, _: u32, backend: u32, request: &ScrubRequest, _: Report<'_>) -> Result<Done> {
        if request.action == ScrubAction::Resume {
            return refused(ErrorKind::NotFound, "there is no scrub");
        }
        let info = ScrubInfo { backend_id: backend, rate: request.rate.unwrap_or(0), ..ScrubInfo::default() };
        Ok(Done { scrub: Some(Box::new(info)), ..Done::default() })
    }
    fn start_blkdev(&self, _: u32, _: &StartBlkdev) -> Result<BlkdevInfo> {
        refused(ErrorKind::Busy, "busy")
    }
    fn grow_transport(&self, _: u32, request: GrowTransport) -> Result<TransportGrown> {
        Ok(TransportGrown {
            before: 1 << 30,
            now: request.size.unwrap_or(2 << 30),
            ..TransportGrown::default()
        })
    }

    fn grow_backend(&self, _: u32, _: u32) -> Result<BackendGrown> {
        Ok(BackendGrown { before: 1 << 20, now: 2 << 20, ..BackendGrown::default() })
    }
    fn set_blkdev(&self, _: u32, _: u32, _: &BlkdevChange) -> Result<BlkdevInfo> {
        refused(ErrorKind::NotFound, "no such block device")
    }
    fn backend_number(&self, _: u32, backend: &NumberOrName) -> Result<u32> {
        number(backend)
    }
    fn any_backend_number(&self, _: u32, backend: &NumberOrName) -> Result<u32> {
        number(backend)
    }
    fn check_object(&self, _: u32, _: Option<u32>) -> Result<()> {
        Ok(())
    }
    fn blkdev_number(&self, _: u32, blkdev: &NumberOrName) -> Result<u32> {
        number(blkdev)
    }
    fn stop_blkdev(&self, _: u32, _: u32, request: StopBlkdev) -> Result<BlkdevStopped> {
        if request.force { Ok(BlkdevStopped::default()) } else { refused(ErrorKind::Busy, "mounted on /srv") }
    }
    fn blkdevs(&self, _: u32, _: bool) -> Result<Vec<BlkdevInfo>> {
        Ok(vec![])
    }
    fn blkdev_users(&self) -> Result<Vec<BlkdevUser>> {
        Ok(vec![])
    }
    fn status(&self) -> Result<Status> {
        Ok(Status { version: "0".into(), ..Status::default() })
    }
}

struct Served {
    _folder: tempfile::TempDir,
    socket: PathBuf,
    fake: Arc<Fake>,
    front_ends: Arc<FrontEnds>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Served {
    fn start(access: Access) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let fake = Arc::new(Fake::default());
        let front_ends = Arc::new(FrontEnds::new(&DaemonConfig::default()));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::bind(&socket).unwrap()
        };
        runtime.spawn(server::serve(
            listener,
            fake.clone(),
            access,
            Arc::clone(&front_ends),
            std::future::pending(),
        ));
        Self { _folder: folder, socket, fake, front_ends, runtime: Some(runtime) }
    }

    fn for_this_user() -> Self {
        Self::start(Access { user: cbd_daemon::system::user_id(), group: None })
    }

    fn client(&self) -> Client {
        Client::new(&self.socket)
    }

    /// Sends bytes and returns the answer until the server closes.
    fn raw(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
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
fn a_result_is_returned() {
    let served = Served::for_this_user();
    let request = RegisterTransport {
        host: "node0".into(),
        path: "/mnt/pmem/r".into(),
        size: None,
        segment_size: None,
        format: false,
        force: false,
        shared: false,
    };
    let answer: TransportRegistered = served.client().post("/v1/transports", &request).unwrap();
    assert_eq!(answer.transport_id, 7);
    assert_eq!(answer.warnings, ["/mnt/pmem/r"]);
}

#[test]
fn an_error_keeps_its_kind_and_its_text() {
    let served = Served::for_this_user();
    let error = served
        .client()
        .post::<_, BackendStarted>(
            "/v1/transports/0/backends",
            &StartBackend { path: "/d".into(), ..Default::default() },
        )
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exchanged);
    assert_eq!(error.line(), "another disk");
}

#[test]
fn an_error_is_one_line() {
    let served = Served::for_this_user();
    let error = served.client().get::<Vec<BackendInfo>>("/v1/transports/0/backends").unwrap_err();
    assert_eq!(error.line(), "damaged in two lines");
}

#[test]
fn an_error_has_a_fitting_status() {
    let served = Served::for_this_user();
    for (request, status) in [
        ("POST /v1/transports/0/backends/9/stop", "404"),
        ("POST /v1/transports/0/blkdevs/0/stop", "409"),
        ("POST /v1/transports/0/backends/x9/stop", "404"),
        ("POST /v1/transports/0/backends/x7/stop", "200"),
        ("POST /v1/transports/0/backends/other/stop", "404"),
        ("POST /v1/transports/0/backends/a%2Fb/stop", "400"),
        ("POST /v1/transports/0/backends/99999999999/stop", "400"),
        ("POST /v1/transports/0/blkdevs/x1/stop", "409"),
        ("POST /v1/transports/0/blkdevs/other/stop", "404"),
        ("PATCH /v1/transports/0/blkdevs/x1/settings", "404"),
        ("GET /v1/status?backend=a%20b", "400"),
        ("GET /v1/status?transport=0&backend=x1", "404"),
        ("GET /v1/status?backnd=1", "400"),
        ("GET /v1/nothing", "404"),
        ("PUT /v1/status", "405"),
        ("POST /v1/metrics", "405"),
        ("GET /v1/transports/x/hosts", "400"),
        ("GET /v1/status", "200"),
    ] {
        let answer = served.raw(&format!("{request} HTTP/1.1\r\nhost: cbd\r\nconnection: close\r\n\r\n"));
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request}: {answer}");
    }
}

#[test]
fn a_malformed_request_is_refused_with_a_reason() {
    let served = Served::for_this_user();
    for body in ["", "{", "[]", "{\"host\": 3}", "{\"host\": \"a\", \"path\": \"/r\", \"fromat\": true}"] {
        let answer = served.raw(&format!(
            "POST /v1/transports HTTP/1.1\r\nhost: cbd\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ));
        assert!(answer.starts_with("HTTP/1.1 400"), "{body}: {answer}");
        assert!(answer.contains("\"kind\":\"invalid_argument\""), "{body}: {answer}");
    }
}

#[test]
fn the_ranges_of_the_longest_list_of_pins_fit_into_a_request() {
    let served = Served::for_this_user();
    // 1 MiB of ranges of 16 bytes.
    let range = |number: u64| format!("{{\"start\":{0},\"end\":{0}}}", (1 << 49) + number);
    let ranges: Vec<String> = (0..1 << 16).map(range).collect();
    let body =
        format!("{{\"pins\":[{{\"kind\":\"file\",\"name\":\"x\",\"ranges\":[{}]}}]}}", ranges.join(","));
    let length = body.len();
    let head = format!(
        "POST /v1/transports/0/backends/0/pins HTTP/1.1\r\nhost: cbd\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    let answer = served.raw(&(head + &body));
    assert!(answer.contains("too much"), "{answer}");
}

#[test]
fn a_body_that_is_too_long_is_refused_as_too_long() {
    let served = Served::for_this_user();
    let body = format!("{{\"host\": \"{}\"}}", "a".repeat(3 << 20));
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    let head = format!("POST /v1/transports HTTP/1.1\r\nhost: cbd\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    // It may be refused before all of it is sent.
    let _ = stream.write_all(body.as_bytes());
    let mut begin = [0; 12];
    stream.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"HTTP/1.1 413");
}

#[test]
fn silent_connections_exclude_no_client_and_are_counted() {
    let served = Served::for_this_user();
    let silent: Vec<_> = (0..300).map(|_| UnixStream::connect(&served.socket).unwrap()).collect();
    served.client().status().unwrap();
    let bounded = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(2));
        served.front_ends.status().control_connections <= CONNECTIONS_MAX as u64
    });
    assert!(bounded, "{} are open", served.front_ends.status().control_connections);
    drop(silent);
}

#[test]
fn connections_with_requests_in_progress_are_bounded_and_one_more_gets_an_error() {
    let served = Served::for_this_user();
    let drain = b"POST /v1/transports/0/drain HTTP/1.1\r\nhost: cbd\r\ncontent-length: 0\r\n\r\n";
    let busy: Vec<_> = (0..CONNECTIONS_MAX)
        .map(|_| {
            let mut stream = UnixStream::connect(&served.socket).unwrap();
            stream.write_all(drain).unwrap();
            stream.read_exact(&mut [0; 15]).unwrap();
            stream
        })
        .collect();
    let error = served.client().status().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(served.front_ends.status().control_refused, 1);
    drop(busy);
    let served_again = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        served.client().status().is_ok()
    });
    assert!(served_again);
}

#[test]
fn a_malformed_number_in_the_path_is_refused_with_an_error_in_json() {
    let served = Served::for_this_user();
    for path in
        ["-1/hosts", "4294967296/hosts", "x/backends/0/stop", "0/backends/%ff/stop", "0/blkdevs/+/stop"]
    {
        let method = if path.ends_with("stop") { "POST" } else { "GET" };
        let answer = served.raw(&format!(
            "{method} /v1/transports/{path} HTTP/1.1\r\nhost: cbd\r\nconnection: close\r\n\r\n"
        ));
        assert!(answer.starts_with("HTTP/1.1 400"), "{path}: {answer}");
        assert!(answer.contains("{\"error\":{\"kind\":\"invalid_argument\""), "{path}: {answer}");
    }
}

#[test]
fn a_value_out_of_its_limits_is_refused_by_the_daemon_too() {
    let served = Served::for_this_user();
    let change = SettingsChange { gc_percent: Some(256), ..SettingsChange::default() };
    let error =
        served.client().patch::<_, Settings>("/v1/transports/0/backends/0/settings", &change).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn progress_comes_before_the_result() {
    let served = Served::for_this_user();
    let mut seen = vec![];
    let done = served
        .client()
        .post_long("/v1/transports/0/backends/3/stop", &StopBackend::default(), |now| {
            seen.push(now.dirty_bytes)
        })
        .unwrap();
    assert_eq!(seen, [60, 20]);
    assert_eq!(done.written_bytes, 100);
}

#[test]
fn a_range_is_verified_with_progress_and_a_result() {
    let served = Served::for_this_user();
    let mut seen = 0;
    let request = VerifyRange { length: Some(4096), ..VerifyRange::default() };
    let verified = served.client().verify(0, &NumberOrName::Number(3), &request, |_| seen += 1).unwrap();
    assert_eq!((verified.verified_bytes, seen), (4096, 1));
}

#[test]
fn a_scrub_is_changed_and_shown() {
    let served = Served::for_this_user();
    let path = "/v1/transports/0/backends/3/scrub";
    let start = ScrubRequest { rate: Some(1 << 20), ..ScrubRequest::default() };
    let done = served.client().post_long(path, &start, |_| ()).unwrap();
    assert_eq!(done.scrub.unwrap().rate, 1 << 20);
    let resume = ScrubRequest { action: ScrubAction::Resume, ..ScrubRequest::default() };
    assert_eq!(served.client().post_long(path, &resume, |_| ()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(served.client().get::<ScrubInfo>(path).unwrap().backend_id, 3);
}

#[test]
fn a_failure_after_progress_is_an_error() {
    let served = Served::for_this_user();
    let error = served
        .client()
        .post_long("/v1/transports/0/backends/8/stop", &StopBackend::default(), |_| {})
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backing);
    assert!(error.line().contains("20 bytes are dirty"));
}

#[test]
fn a_client_that_disconnects_cancels_its_long_operation() {
    let served = Served::for_this_user();
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    stream
        .write_all(b"POST /v1/transports/0/drain HTTP/1.1\r\nhost: cbd\r\ncontent-length: 0\r\n\r\n")
        .unwrap();
    let mut begin = [0; 15];
    stream.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200 OK");
    drop(stream);
    let cancelled = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        served.fake.cancelled.load(Ordering::SeqCst)
    });
    assert!(cancelled);
}

#[test]
fn without_a_daemon_the_error_names_the_command_to_start_one() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock");
    let never_there = Client::new(&socket).status().unwrap_err().line();
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let without_a_listener = Client::new(&socket).status().unwrap_err().line();
    for line in [never_there, without_a_listener] {
        assert!(line.starts_with("no daemon listens on"), "{line}");
        assert!(line.contains("start it with cbdd"), "{line}");
    }
}

#[test]
fn a_daemon_that_does_not_respond_is_detected_within_the_timeout_of_the_caller() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock");
    // Connections are established and not accepted, as with a process that is stopped.
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let began = Instant::now();
    let client = Client::new(&socket).with_timeout(Timeout::Limit(Duration::from_millis(300)));
    let error = client.status().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    let process = format!("(process {})", std::process::id());
    for part in [&*socket.to_string_lossy(), "does not answer", "stopped", &process] {
        assert!(error.line().contains(part), "{part:?} is not in: {error}");
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn a_daemon_that_is_stopped_during_an_operation_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let peer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // A response before the request would end the client's operation immediately.
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).unwrap() > 0);
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
        (listener, stream)
    });
    let error = Client::new(&socket)
        .post_long("/v1/transports/0/drain", &Drain::<u32>::default(), |_| ())
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(error.line().contains("may still be done"), "{error}");
    drop(peer.join());
}

#[test]
fn a_daemon_that_is_busy_is_distinguished_from_one_that_hangs() {
    let served = Served::for_this_user();
    let busy = served.fake.busy.lock().unwrap();
    let client = served.client().with_timeout(Timeout::Limit(Duration::from_millis(300)));
    let error = client.get::<Vec<HostInfo>>("/v1/transports/0/hosts").unwrap_err();
    drop(busy);
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(error.line().contains("is busy") && error.line().contains("--timeout"), "{error}");
}

#[test]
fn a_client_waits_for_a_long_operation_while_the_daemon_is_alive() {
    static WAITED_S: AtomicU64 = AtomicU64::new(0);
    let served = Served::for_this_user();
    let busy = served.fake.busy.lock().unwrap();
    let client =
        served.client().with_waiting_callback(|waited| WAITED_S.store(waited.as_secs(), Ordering::SeqCst));
    let asking = std::thread::spawn(move || client.get::<Vec<HostInfo>>("/v1/transports/0/hosts"));
    // Longer than the time after which the client checks whether the daemon is alive.
    let end = Instant::now() + Duration::from_secs(60);
    while WAITED_S.load(Ordering::SeqCst) < 7 {
        assert!(!asking.is_finished() && Instant::now() < end);
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(busy);
    assert_eq!(asking.join().unwrap().unwrap().len(), 1);
}

#[test]
fn a_peer_that_is_not_a_daemon_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let peer = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 hello, this is no HTTP\r\n").unwrap();
    });
    assert!(Client::new(&socket).status().is_err());
    peer.join().unwrap();
}

#[test]
fn only_root_the_own_user_and_the_group_have_access() {
    let access = Access { user: 1000, group: Some(77) };
    let peer = |user, groups: &[u32]| Peer { user: Some(user), groups: groups.to_vec() };
    assert!(access.allows(&peer(0, &[])));
    assert!(access.allows(&peer(1000, &[5])));
    assert!(access.allows(&peer(1001, &[5, 77])));
    assert!(!access.allows(&peer(1001, &[5])));
    assert!(!access.allows(&Peer { user: None, groups: vec![] }));
    assert!(!Access { user: 1000, group: None }.allows(&peer(1001, &[77])));
}
