//! A listener for a status that the test makes, and clients of it.

use cbd_daemon::api::{DeviceMap, Status};
use cbd_daemon::config::DaemonConfig;
use cbd_daemon::front_ends::FrontEnds;
use cbd_daemon::web::{PageSource, Plan, Source, Web, WebConfig};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for anything that a test waits for.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// A status in which each metric has a value.
pub(crate) fn status() -> Status {
    serde_json::from_str(include_str!("status.json")).unwrap()
}

/// A status with `count` block devices, whose paths and names have 500 bytes of whatever a path can have.
pub(crate) fn status_of(count: u32) -> Status {
    let mut status = status();
    status.transports[0].remote_blkdevs.clear();
    let backend = &mut status.transports[0].backends[0];
    let blkdev = backend.info.blkdevs[0].clone();
    backend.info.blkdevs = (0..count)
        .map(|number| {
            let mut blkdev = blkdev.clone();
            blkdev.blkdev_id = number;
            let path = format!("/a \"path\",{{with}} \\ and\nlines\r\u{1b}[31m é/{number}/");
            blkdev.dev_name = format!("{path}{}", "x".repeat(500 - path.len()));
            blkdev
        })
        .collect();
    status
}

/// A listener; it ends on drop.
pub(crate) struct Served {
    pub(crate) web: Option<Web>,
    pub(crate) front_ends: Arc<FrontEnds>,
    folder: tempfile::TempDir,
}

impl Served {
    pub(crate) fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    /// Serves `source` by the configuration `text`, in which `DIR` is `folder`.
    pub(crate) fn start(folder: tempfile::TempDir, text: &str, group: Option<u32>, source: Source) -> Self {
        let text = text.replace("DIR", folder.path().to_str().unwrap());
        let config: WebConfig = toml::from_str(&text).unwrap();
        let plan = Plan::new(&config, group).unwrap().with_retry_interval(Duration::from_millis(20));
        let front_ends = Arc::new(FrontEnds::new(&DaemonConfig::default()));
        let page = PageSource {
            map: Arc::new(|_, backend_id, _| Ok(DeviceMap { backend_id, ..DeviceMap::default() })),
            events: Arc::default(),
        };
        let web = Web::start(plan, source, page, Arc::clone(&front_ends)).unwrap();
        Self { web, front_ends, folder }
    }

    /// Serves `status` at a unix socket.
    pub(crate) fn at_a_socket(status: Status) -> Self {
        let source: Source = Arc::new(move || Ok(status.clone()));
        let served = Self::start(Self::folder(), "listen = [\"unix:DIR/metrics.sock\"]", None, source);
        until("the socket is there", || UnixStream::connect(served.socket()).is_ok());
        served
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("metrics.sock")
    }

    /// The answer to a request of these lines at the unix socket.
    pub(crate) fn ask(&self, request: &str) -> Answer {
        Answer::of(UnixStream::connect(self.socket()).unwrap(), request)
    }

    pub(crate) fn refused(&self) -> u64 {
        self.front_ends.status().web_refused
    }
}

/// A port of 127.0.0.1 that nothing uses.
pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The answer at a port, once something listens there.
pub(crate) fn ask_port(port: u16, request: &str) -> Answer {
    let mut stream = None;
    until("it listens", || {
        stream = TcpStream::connect(("127.0.0.1", port)).ok();
        stream.is_some()
    });
    Answer::of(stream.unwrap(), request)
}

/// An answer of the listener.
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    fn of(mut stream: impl Read + Write, request: &str) -> Self {
        let request = format!("{}\r\n\r\n", request.replace('\n', "\r\n"));
        stream.write_all(request.as_bytes()).unwrap();
        let mut bytes = Vec::new();
        // The rest of a request that was refused may not be read any more.
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let head = head.to_ascii_lowercase();
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default();
        let body =
            if head.contains("transfer-encoding: chunked") { dechunked(body) } else { body.to_owned() };
        Self { code, head, body }
    }
}

/// A body without the lengths of its chunks.
fn dechunked(mut body: &str) -> String {
    let mut whole = String::new();
    loop {
        let (length, rest) = body.split_once("\r\n").expect("the length of a chunk");
        let length = usize::from_str_radix(length, 16).expect("a length");
        if length == 0 {
            return whole;
        }
        whole.push_str(&rest[..length]);
        body = rest[length..].strip_prefix("\r\n").expect("the end of a chunk");
    }
}

/// Waits until `reached`, or panics with `what` at the timeout.
#[track_caller]
pub(crate) fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !reached() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}
