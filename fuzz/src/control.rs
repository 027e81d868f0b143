//! The control socket: HTTP and JSON as a client sends them, to the daemon's own router and a running manager.
//!
//! An input is text: lines of a method, a path and a body; or, after a `!`, bytes that go to the HTTP server unchanged.
//!
//! Invariants: whatever a request contains, the manager gets only paths below a directory of its own, exports only unix sockets
//! in that directory, and creates regions of a bounded size (`Confined`). Each request has an answer, and an error is one line of
//! JSON.

use axum::Router;
use axum::body::Body;
use axum::extract::connect_info::MockConnectInfo;
use axum::http::{Request, header};
use cbd_daemon::api::{
    AddPins, AttachCache, BackendGrown, BackendInfo, BackendStarted, BlkdevChange, BlkdevInfo, BlkdevStopped,
    BlkdevUser, ClearHost, CommonCheckpoint, DetachCache, DeviceMap, Done, Drain, ErrorAnswer, GrowTransport,
    HostInfo, MoveBackend, NumberOrName, PinsInfo, RegisterTransport, RemovePins, RequestSample, ResizeCache,
    ScrubInfo, ScrubRequest, Settings, SettingsChange, StartBackend, StartBlkdev, Status, StopBackend,
    StopBlkdev, TransportGrown, TransportInfo, TransportRegistered, VerifyRange,
};
use cbd_daemon::config::Config;
use cbd_daemon::control::{Control, Flow, Report};
use cbd_daemon::events::Events;
use cbd_daemon::exports::ExportChoice;
use cbd_daemon::manager::Manager;
use cbd_daemon::run::Options;
use cbd_daemon::server::{Access, Peer, router};
use cbd_daemon::state::StateDir;
use cbd_nbd::Listen;
use cbd_types::{Error, ErrorKind, Result};
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;
use tower::ServiceExt;

/// Maximum number of requests of one input.
const REQUESTS_MAX: usize = 24;

/// Largest region that is created, in bytes.
const REGION_MAX: u64 = 4 << 20;

/// Longest wait that a request may specify, in seconds.
const WAIT_MAX_S: u64 = 1;

/// An answer takes milliseconds, or as long as the wait that the request specifies. An answer that takes longer than this counts
/// as lost.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A daemon in a directory of its own; it stops when dropped.
struct Daemon {
    manager: Arc<Manager>,
}

impl Daemon {
    fn start(directory: &Path) -> Result<Self> {
        let options = Options::below(directory);
        let state = StateDir::open(&options.paths.state_dir)?;
        let manager = Arc::new(Manager::new(&options, Config::default(), state)?);
        manager.restore()?;
        Ok(Self { manager })
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.manager.stop();
    }
}

/// A manager that accesses only one directory.
struct Confined {
    manager: Arc<Manager>,
    jail: PathBuf,
}

impl Confined {
    /// Moves an absolute path into the directory; the manager rejects any other.
    fn path(&self, path: &str) -> String {
        if !path.starts_with('/') {
            return path.to_owned();
        }
        let inside = Path::new(path).components().filter(|part| matches!(part, Component::Normal(_)));
        self.jail.join(inside.collect::<PathBuf>()).to_string_lossy().into_owned()
    }

    /// Turns any export into a unix socket in the directory; the manager rejects text that is not an export.
    fn export(&self, export: Option<&str>) -> Result<Option<String>> {
        let export = export.unwrap_or("auto");
        if export.starts_with("nbd:tcp:") {
            // A TCP export would resolve host names and use ports.
            return Err(Error::new(ErrorKind::Unsupported, "no network here"));
        }
        Ok(Some(match export.parse() {
            Ok(ExportChoice::Nbd(Listen::Unix(path))) => {
                format!("nbd:unix:{}", self.path(&path.to_string_lossy()))
            }
            Ok(_) => format!("nbd:unix:{}", self.path("/auto.sock")),
            Err(_) => export.to_owned(),
        }))
    }

    fn wait(request: &Drain) -> Drain {
        Drain { timeout_s: Some(request.timeout_s.unwrap_or(WAIT_MAX_S)), ..*request }
    }
}

impl Control for Confined {
    fn events(&self) -> Arc<Events> {
        let events = self.manager.events();
        // An answer that follows ends, as at the end of the daemon.
        events.end_followers();
        events
    }

    fn register_transport(&self, request: &RegisterTransport) -> Result<TransportRegistered> {
        let size = request.size.map(|size| size.min(REGION_MAX));
        self.manager.register_transport(&RegisterTransport {
            path: self.path(&request.path),
            size,
            ..request.clone()
        })
    }

    fn unregister_transport(&self, transport: u32) -> Result<()> {
        self.manager.unregister_transport(transport)
    }

    fn transports(&self) -> Result<Vec<TransportInfo>> {
        self.manager.transports()
    }

    fn clear_host(&self, transport: u32, host: u32, request: &ClearHost) -> Result<()> {
        self.manager.clear_host(transport, host, request)
    }

    fn hosts(&self, transport: u32) -> Result<Vec<HostInfo>> {
        self.manager.hosts(transport)
    }

    fn start_backend(&self, transport: u32, request: &StartBackend) -> Result<BackendStarted> {
        let export = self.export(request.export.as_deref())?;
        let path = self.path(&request.path);
        self.manager.start_backend(transport, &StartBackend { path, export, ..request.clone() })
    }

    fn pins(&self, transport: u32, backend: u32) -> Result<PinsInfo> {
        self.manager.pins(transport, backend)
    }

    fn add_pins(&self, transport: u32, backend: u32, request: AddPins) -> Result<PinsInfo> {
        self.manager.add_pins(transport, backend, request)
    }

    fn remove_pins(&self, transport: u32, backend: u32, request: &RemovePins) -> Result<PinsInfo> {
        self.manager.remove_pins(transport, backend, request)
    }

    fn stop_backend(
        &self,
        transport: u32,
        backend: u32,
        request: &StopBackend,
        report: Report<'_>,
    ) -> Result<Done> {
        self.manager.stop_backend(transport, backend, request, report)
    }

    fn attach_cache(&self, transport: u32, backend: u32, request: &AttachCache) -> Result<Done> {
        self.manager.attach_cache(transport, backend, request)
    }

    fn move_backend(
        &self,
        transport: u32,
        backend: u32,
        request: &MoveBackend,
        report: Report<'_>,
    ) -> Result<Done> {
        self.manager.move_backend(transport, backend, request, report)
    }

    fn detach_cache(
        &self,
        transport: u32,
        backend: u32,
        request: &DetachCache,
        report: Report<'_>,
    ) -> Result<Done> {
        self.manager.detach_cache(transport, backend, request, report)
    }

    fn resize_cache(
        &self,
        transport: u32,
        backend: u32,
        request: &ResizeCache,
        report: Report<'_>,
    ) -> Result<Done> {
        self.manager.resize_cache(transport, backend, request, report)
    }

    fn grow_transport(&self, transport: u32, request: GrowTransport) -> Result<TransportGrown> {
        self.manager.grow_transport(transport, request)
    }

    fn grow_backend(&self, transport: u32, backend: u32) -> Result<BackendGrown> {
        self.manager.grow_backend(transport, backend)
    }

    fn backends(&self, transport: u32, all: bool) -> Result<Vec<BackendInfo>> {
        self.manager.backends(transport, all)
    }

    fn set(&self, transport: u32, backend: u32, change: &SettingsChange) -> Result<Settings> {
        self.manager.set(transport, backend, change)
    }

    fn checkpoint(&self, transport: u32, request: &Drain, report: Report<'_>) -> Result<Done> {
        self.manager.checkpoint(transport, &Self::wait(request), report)
    }

    fn checkpoint_together(
        &self,
        transport: u32,
        request: &CommonCheckpoint,
        report: Report<'_>,
    ) -> Result<Done> {
        let timeout_s = Some(request.timeout_s.unwrap_or(WAIT_MAX_S));
        let request = CommonCheckpoint { timeout_s, ..request.clone() };
        self.manager.checkpoint_together(transport, &request, report)
    }

    fn drain(&self, transport: u32, request: &Drain, report: Report<'_>) -> Result<Done> {
        self.manager.drain(transport, &Self::wait(request), report)
    }

    fn start_blkdev(&self, transport: u32, request: &StartBlkdev) -> Result<BlkdevInfo> {
        let export = self.export(request.export.as_deref())?;
        self.manager.start_blkdev(transport, &StartBlkdev { export, ..request.clone() })
    }

    fn set_blkdev(&self, transport: u32, blkdev: u32, change: &BlkdevChange) -> Result<BlkdevInfo> {
        self.manager.set_blkdev(transport, blkdev, change)
    }

    fn backend_number(&self, transport: u32, backend: &NumberOrName) -> Result<u32> {
        self.manager.backend_number(transport, backend)
    }

    fn any_backend_number(&self, transport: u32, backend: &NumberOrName) -> Result<u32> {
        self.manager.any_backend_number(transport, backend)
    }

    fn blkdev_number(&self, transport: u32, blkdev: &NumberOrName) -> Result<u32> {
        self.manager.blkdev_number(transport, blkdev)
    }

    fn stop_blkdev(&self, transport: u32, blkdev: u32, request: StopBlkdev) -> Result<BlkdevStopped> {
        self.manager.stop_blkdev(transport, blkdev, request)
    }

    fn blkdevs(&self, transport: u32, all: bool) -> Result<Vec<BlkdevInfo>> {
        self.manager.blkdevs(transport, all)
    }

    fn verify(&self, transport: u32, backend: u32, request: VerifyRange, report: Report<'_>) -> Result<Done> {
        self.manager.verify(transport, backend, request, report)
    }

    fn map(&self, transport: u32, backend: u32, cells: Option<usize>) -> Result<DeviceMap> {
        self.manager.map(transport, backend, cells)
    }

    fn check_object(&self, transport: u32, backend: Option<u32>) -> Result<()> {
        self.manager.check_object(transport, backend)
    }

    fn sample(&self, transport: u32, backend: u32) -> Result<RequestSample> {
        self.manager.sample(transport, backend)
    }

    fn scrub(&self, transport: u32, backend: u32) -> Result<ScrubInfo> {
        self.manager.scrub(transport, backend)
    }

    fn set_scrub(&self, transport: u32, backend: u32, request: &ScrubRequest, _: Report<'_>) -> Result<Done> {
        // Without a wait: a pass at a low rate has no end within the time of a run.
        let request = ScrubRequest { wait: false, ..*request };
        self.manager.set_scrub(transport, backend, &request, &mut |_| Flow::Continue)
    }

    fn blkdev_users(&self) -> Result<Vec<BlkdevUser>> {
        self.manager.blkdev_users()
    }

    fn status(&self) -> Result<Status> {
        self.manager.status()
    }
}

/// Number of panics so far, on any thread: to a client, a panic of a control thread looks like a daemon that stops.
fn panics() -> u64 {
    static PANICS: AtomicU64 = AtomicU64::new(0);
    static WATCH: OnceLock<()> = OnceLock::new();
    WATCH.get_or_init(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            before(info);
        }));
    });
    PANICS.load(Ordering::SeqCst)
}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_time()
            .build()
            .unwrap_or_else(|error| panic!("no runtime: {error}"))
    })
}

/// Runs one daemon from its start to its end, and a second one on its state.
pub fn run(data: &[u8]) {
    let before = panics();
    let directory = tempfile::tempdir().unwrap_or_else(|error| panic!("no directory: {error}"));
    let jail = directory.path().join("jail");
    furnish(&jail).unwrap_or_else(|error| panic!("no files: {error}"));
    {
        let daemon = Daemon::start(directory.path()).unwrap_or_else(|error| panic!("no daemon: {error}"));
        let confined = Confined { manager: Arc::clone(&daemon.manager), jail };
        let access = Access { user: 1, group: None };
        let peer = Peer { user: Some(1), groups: Vec::new() };
        let router = router(Arc::new(confined), access).layer(MockConnectInfo(peer));
        let talk = async {
            match data.split_first() {
                Some((b'!', bytes)) => talk_bytes(router, bytes).await,
                _ => talk_requests(router, data).await,
            }
        };
        runtime()
            .block_on(async { tokio::time::timeout(TIMEOUT, talk).await })
            .unwrap_or_else(|_| panic!("no answer within {TIMEOUT:?}"));
    }
    // The second daemon restores every object that was created, or an error gives the reason.
    if directory.path().join("state").join("transports.json").exists() {
        let again =
            Daemon::start(directory.path()).unwrap_or_else(|error| panic!("no second daemon: {error}"));
        let status = again.manager.status().unwrap_or_else(|error| panic!("no status: {error}"));
        let _ = cbd_daemon::metrics::render(&status);
    }
    assert_eq!(panics(), before, "a thread panicked");
}

/// Creates the files that requests can name.
fn furnish(jail: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(jail.join("folder"))?;
    std::fs::create_dir_all(jail.with_file_name("dev"))?;
    for (name, size) in [("disk", 8 << 20), ("other", (1 << 20) + 512), ("odd", 1000), ("empty", 0)] {
        std::fs::File::create(jail.join(name))?.set_len(size)?;
    }
    std::os::unix::fs::symlink("disk", jail.join("link"))
}

/// Sends lines of a method, a path and a body; each is answered before the next is sent.
async fn talk_requests(router: Router, data: &[u8]) {
    for line in data.split(|&byte| byte == b'\n').take(REQUESTS_MAX) {
        let mut parts = line.splitn(3, |&byte| byte == b' ');
        let (method, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let body = parts.next().unwrap_or_default().to_vec();
        let Ok(request) = Request::builder().method(method).uri(path).body(Body::from(body)) else {
            continue;
        };
        let Ok(response) = router.clone().oneshot(request).await;
        let (head, body) = response.into_parts();
        let body =
            body.collect().await.unwrap_or_else(|error| panic!("an answer ends early: {error}")).to_bytes();
        if !head.status.is_success() && !body.is_empty() {
            let kind = head.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
            assert_eq!(kind, Some("application/json"), "an error that is not JSON: {}", head.status);
            let error: ErrorAnswer = serde_json::from_slice(&body)
                .unwrap_or_else(|error| panic!("an error without a message: {error}"));
            assert!(!error.error.message.contains('\n'), "{}", error.error.message);
        }
    }
}

/// Sends bytes to the server as a client's socket would carry them.
async fn talk_bytes(router: Router, bytes: &[u8]) {
    let (mut ours, theirs) = tokio::io::duplex(64 << 10);
    let service = TowerToHyperService::new(router);
    let serving = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), service);
    let server = tokio::spawn(async move {
        // A client that sends invalid data gets an error, or the server disconnects it.
        let _ = serving.await;
    });
    let _ = ours.write_all(bytes).await;
    let _ = ours.shutdown().await;
    let mut heard = Vec::new();
    let _ = ours.read_to_end(&mut heard).await;
    assert!(heard.is_empty() || heard.starts_with(b"HTTP/1."), "an answer that is not HTTP");
    assert!(server.await.is_ok(), "the server panicked");
}

/// The requests of a daemon's whole run, step by step, and requests that the daemon rejects.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    const REGISTER: &str = r#"POST /v1/transports {"host":"n","path":"/region","size":2097152,"segment_size":65536,"format":true}"#;
    const BACKEND: &str = r#"POST /v1/transports/0/backends {"path":"/disk","cache_size":1048576,"handlers":1,"start_dev":true}"#;
    let lives: [&[&str]; 14] = [
        &["GET /v1/status", "GET /v1/metrics", "GET /v1/transports", "GET /v1/nothing", "PUT /v1/status"],
        &[REGISTER, "GET /v1/transports", "GET /v1/transports/0/hosts", "DELETE /v1/transports/0"],
        &[
            REGISTER,
            BACKEND,
            "GET /v1/transports/0/backends?all=true",
            "GET /v1/transports/0/blkdevs?all=false",
        ],
        &[
            REGISTER,
            BACKEND,
            "GET /v1/status",
            "GET /v1/metrics",
            r#"POST /v1/transports/0/drain {"wait":true}"#,
        ],
        &[
            REGISTER,
            BACKEND,
            r#"POST /v1/transports/0/backends/0/stop {"timeout_s":1}"#,
            "DELETE /v1/transports/0",
        ],
        &[REGISTER, BACKEND, r#"POST /v1/transports/0/backends/0/stop {"discard_dirty":0,"force":true}"#],
        &[
            REGISTER,
            BACKEND,
            r#"POST /v1/transports/0/blkdevs/0/stop {"force":true}"#,
            r#"POST /v1/transports/0/blkdevs {"backend":0,"export":"nbd:unix:/s"}"#,
        ],
        &[
            REGISTER,
            BACKEND,
            r#"PATCH /v1/transports/0/backends/0/settings {"gc_percent":50,"consistency":"checkpoint","writeback_rate":1,"writeback_percent":9}"#,
        ],
        &[
            REGISTER,
            r#"POST /v1/transports/0/backends {"path":"/other","data_crc":false,"consistency":"none"}"#,
            r#"POST /v1/transports/0/checkpoint {"backend":0,"wait":true,"timeout_s":0}"#,
            r#"POST /v1/transports/0/checkpoint-together {"backends":[0,1],"hold_s":1,"timeout_s":0}"#,
        ],
        &[
            REGISTER,
            REGISTER,
            r#"POST /v1/transports {"host":"m","path":"/region","format":true,"force":true}"#,
            r#"POST /v1/transports {"host":"m","path":"/disk"}"#,
        ],
        &[
            REGISTER,
            r#"POST /v1/transports/0/backends {"path":"/odd"}"#,
            r#"POST /v1/transports/0/backends {"path":"/link","cache_size":18446744073709551615}"#,
        ],
        &[
            r#"POST /v1/transports {"host":"","path":"x"}"#,
            r#"POST /v1/transports {"host":"n","path":"/disk","size":0}"#,
            r#"POST /v1/transports {"#,
        ],
        &[
            "POST /v1/transports/4294967295/drain",
            "POST /v1/transports/-1/drain",
            "GET /v1/transports/0/backends?all=2",
            "GET /v1/transports/0/backends?none",
        ],
        &[
            REGISTER,
            BACKEND,
            r#"POST /v1/transports/0/drain {"backend":0,"wait":true,"timeout_s":18446744073709551615}"#,
        ],
    ];
    let mut seeds: Vec<Vec<u8>> = lives.iter().map(|lines| lines.join("\n").into_bytes()).collect();
    seeds.push(b"!GET /v1/status HTTP/1.1\r\nHost: cbd\r\n\r\nGET /v1/metrics HTTP/1.0\r\n\r\n".to_vec());
    seeds.push(b"!POST /v1/transports HTTP/1.1\r\nHost: cbd\r\nContent-Length: 2\r\n\r\n{}".to_vec());
    let chunked = b"!POST /v1/transports/0/drain HTTP/1.1\r\nHost: c\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    seeds.push(chunked.to_vec());
    seeds
}
