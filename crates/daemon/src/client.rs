//! The client side of the control socket, for `cbdctrl`, the demo and tests.
//!
//! Invariants: each call ends, with the response, with the daemon's error (kind and text), or with a timeout
//! ([`Timeout`]).

use crate::api::{self, Done, ErrorAnswer, NumberOrName, Progress, ProgressLine, VerifiedInfo, VerifyRange};
use bytes::Bytes;
use cbd_types::{Error, ErrorKind, Result};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Time without data from the daemon after which the client checks whether the daemon is alive.
const CHECK_AFTER: Duration = Duration::from_secs(5);

/// Timeout of that check where a false negative would end a long operation. The response needs only the thread of the
/// control socket.
const ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of that check where it only selects the text of an error.
const ALIVE_TIMEOUT_SHORT: Duration = Duration::from_secs(2);

/// Interval of calls of the `waiting` callback.
const WAITING_INTERVAL: Duration = Duration::from_secs(1);

/// How long a client waits for a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Timeout {
    /// This time for the whole call.
    Limit(Duration),
    /// As long as the daemon is alive: an operation may take long, but a daemon that is stopped or hangs is detected
    /// within seconds.
    WhileAlive,
}

/// Most bytes of a response: the process that listens on the socket is not trusted to end it.
const ANSWER_LIMIT: usize = 64 << 20;

/// A client of one daemon.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    timeout: Timeout,
    waiting: Option<fn(Duration)>,
}

/// One call, from the connection to the last byte of the response.
#[derive(Debug)]
struct Call<'a> {
    client: &'a Client,
    /// When the client last received data from the daemon.
    last_received: Cell<Instant>,
    /// The daemon's process.
    process: Cell<Option<i32>>,
}

impl Client {
    /// A client of the daemon that listens at `socket`; connects with each call, and waits as long as the daemon is
    /// alive.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), timeout: Timeout::WhileAlive, waiting: None }
    }

    /// Sets the timeout.
    #[must_use]
    pub const fn with_timeout(mut self, timeout: Timeout) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets a callback that runs every second while a call waits, with the time since the call began.
    #[must_use]
    pub const fn with_waiting_callback(mut self, waiting: fn(Duration)) -> Self {
        self.waiting = Some(waiting);
        self
    }

    /// Gets the object at `path`.
    ///
    /// # Errors
    /// The daemon's error, or [`ErrorKind::NotFound`] when no daemon listens.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(Method::GET, path, &())
    }

    /// Posts `body` to `path`.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        self.json(Method::POST, path, body)
    }

    /// Patches the object at `path`.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn patch<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        self.json(Method::PATCH, path, body)
    }

    /// Deletes the object at `path`.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn delete(&self, path: &str) -> Result<()> {
        self.json(Method::DELETE, path, &())
    }

    /// The text at `path`.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn text(&self, path: &str) -> Result<String> {
        let bytes = self.call(async |call| call.send(Method::GET, path, &()).await?.rest().await)?;
        String::from_utf8(bytes).map_err(|_| not_understood("the answer is no text"))
    }

    /// Posts `body` to `path`, whose response is a stream of lines; `progress` receives each. The operation is
    /// cancelled if the client process ends.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn post_long<B: Serialize>(
        &self,
        path: &str,
        body: &B,
        mut progress: impl FnMut(&Progress),
    ) -> Result<Done> {
        self.call(async |call| {
            let mut body = call.send(Method::POST, path, body).await?;
            while let Some(line) = body.line().await? {
                match serde_json::from_slice(&line).map_err(|error| not_understood(&error.to_string()))? {
                    ProgressLine::Progress(now) => progress(&now),
                    ProgressLine::Done(done) => return Ok(done),
                    ProgressLine::Error(error) => return Err(error.into()),
                }
            }
            Err(Error::new(
                ErrorKind::Stopped,
                "the daemon ended before the operation did; dirty data is in the region",
            ))
        })
    }

    /// Gets the stream of JSON lines at `path`; `take` receives each until it breaks. The end of the stream is no error.
    ///
    /// # Errors
    /// As [`get`](Self::get), and the error of `take`.
    pub fn lines<T: DeserializeOwned>(
        &self,
        path: &str,
        mut take: impl FnMut(T) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        self.call(async |call| {
            let mut body = call.send(Method::GET, path, &()).await?;
            while let Some(line) = body.line().await? {
                let line =
                    serde_json::from_slice(&line).map_err(|error| not_understood(&error.to_string()))?;
                if take(line)?.is_break() {
                    break;
                }
            }
            Ok(())
        })
    }

    /// Whether a daemon listens at all.
    #[must_use]
    pub fn has_daemon(&self) -> bool {
        std::os::unix::net::UnixStream::connect(&self.socket).is_ok()
    }

    fn json<B: Serialize, T: DeserializeOwned>(&self, method: Method, path: &str, body: &B) -> Result<T> {
        let bytes = self.call(async |call| call.send(method, path, body).await?.rest().await)?;
        serde_json::from_slice(&bytes).map_err(|error| not_understood(&error.to_string()))
    }

    /// Executes a call with its timeout.
    fn call<T>(&self, work: impl AsyncFnOnce(&Call<'_>) -> Result<T>) -> Result<T> {
        let began = Instant::now();
        let call = Call { client: self, last_received: Cell::new(began), process: Cell::new(None) };
        block_on(async {
            let mut work = pin!(work(&call));
            loop {
                let left = match self.timeout {
                    Timeout::Limit(limit) => limit.saturating_sub(began.elapsed()),
                    Timeout::WhileAlive => WAITING_INTERVAL,
                };
                if let Ok(result) = timeout(left.min(WAITING_INTERVAL), &mut work).await {
                    return result;
                }
                if let Some(waiting) = self.waiting {
                    waiting(began.elapsed());
                }
                match self.timeout {
                    Timeout::Limit(limit) if began.elapsed() >= limit => {
                        return Err(call.late(limit, call.is_alive(ALIVE_TIMEOUT_SHORT).await));
                    }
                    Timeout::WhileAlive if call.last_received.get().elapsed() >= CHECK_AFTER => {
                        // The response may arrive meanwhile.
                        let alive = tokio::select! {
                            biased;
                            result = &mut work => return result,
                            alive = call.is_alive(ALIVE_TIMEOUT) => alive,
                        };
                        if !alive {
                            return Err(
                                call.dead("; the operation may still be done when the daemon continues")
                            );
                        }
                        call.last_received.set(Instant::now());
                    }
                    _ => {}
                }
            }
        })
    }

    fn not_reached(&self, error: &std::io::Error) -> Error {
        let socket = self.socket.display();
        match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => Error::new(
                ErrorKind::NotFound,
                format!(
                    "no daemon listens on {socket}; start it with cbdd, or name its socket with --socket"
                ),
            ),
            std::io::ErrorKind::WouldBlock => Error::new(
                ErrorKind::TimedOut,
                format!(
                    "the daemon at {socket} accepts no connection: it hangs, or is stopped (SIGSTOP, a debugger)"
                ),
            ),
            std::io::ErrorKind::PermissionDenied => Error::new(
                ErrorKind::Permission,
                format!("the daemon's socket {socket} may not be used by this user; run the command as root"),
            ),
            _ => Error::new(ErrorKind::System, format!("the daemon's socket {socket} cannot be reached"))
                .caused_by(cbd_sys::errors::copy_of(error)),
        }
    }

    /// Verifies a range of a backend once; `progress` receives each report. The verification is cancelled if the client process
    /// ends.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn verify(
        &self,
        transport: u32,
        backend: &NumberOrName,
        request: &VerifyRange,
        progress: impl FnMut(&Progress),
    ) -> Result<VerifiedInfo> {
        let path = format!("/v1/transports/{transport}/backends/{backend}/verify");
        let done = self.post_long(&path, request, progress)?;
        done.verified.ok_or_else(|| not_understood("the answer has no result"))
    }

    /// The status.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn status(&self) -> Result<api::Status> {
        self.get("/v1/status")
    }
}

impl Call<'_> {
    /// Sends a request and returns the body of a response whose status is success.
    async fn send<B: Serialize>(&self, method: Method, path: &str, body: &B) -> Result<Body<'_>> {
        let body = if method == Method::GET || method == Method::DELETE {
            Bytes::new()
        } else {
            serde_json::to_vec(body).map_err(|error| not_understood(&error.to_string()))?.into()
        };
        let answer = self.request(method, path, body).await?;
        let status = answer.status();
        let mut body =
            Body { incoming: answer.into_body(), buffer: Vec::new(), last_received: &self.last_received };
        if status == StatusCode::OK {
            return Ok(body);
        }
        let bytes = body.rest().await?;
        Err(match serde_json::from_slice::<ErrorAnswer>(&bytes) {
            Ok(ErrorAnswer { error }) => error.into(),
            Err(_) => not_understood(&format!("status {status} and {}", String::from_utf8_lossy(&bytes))),
        })
    }

    async fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>> {
        let stream = tokio::net::UnixStream::connect(&self.client.socket).await;
        let stream = stream.map_err(|error| self.client.not_reached(&error))?;
        self.process.set(stream.peer_cred().ok().and_then(|peer| peer.pid()));
        let lost = |error: hyper::Error| {
            let socket = self.client.socket.display();
            Error::new(ErrorKind::Stopped, format!("the daemon at {socket} does not answer")).caused_by(error)
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "cbd")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|error| Error::new(ErrorKind::InvalidArgument, path.to_owned()).caused_by(error))?;
        let answer = sender.send_request(request).await.map_err(lost)?;
        self.last_received.set(Instant::now());
        Ok(answer)
    }

    /// Whether the daemon responds at all, even with an unknown path: that response takes no lock and waits for no
    /// disk.
    async fn is_alive(&self, limit: Duration) -> bool {
        let asked = timeout(limit, self.request(Method::GET, "/", Bytes::new())).await;
        asked.is_ok_and(|answer| answer.is_ok())
    }

    fn daemon(&self) -> String {
        let process = self.process.get().map_or_else(String::new, |process| format!(" (process {process})"));
        format!("the daemon at {}{process}", self.client.socket.display())
    }

    fn dead(&self, then: &str) -> Error {
        let text =
            format!("{} does not answer: it hangs, or is stopped (SIGSTOP, a debugger){then}", self.daemon());
        Error::new(ErrorKind::TimedOut, text)
    }

    fn late(&self, limit: Duration, alive: bool) -> Error {
        if !alive {
            return self.dead("");
        }
        let text = format!(
            "{} is busy with its start or with another command, and has not answered within {} s; wait longer with --timeout SECONDS",
            self.daemon(),
            limit.as_secs()
        );
        Error::new(ErrorKind::TimedOut, text)
    }
}

fn not_understood(text: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("the daemon's answer is not understood: {text}"))
}

fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::new(ErrorKind::System, "cannot wait for the daemon").caused_by(error))?
        .block_on(work)
}

/// The body of a response, read in pieces.
struct Body<'a> {
    incoming: Incoming,
    buffer: Vec<u8>,
    last_received: &'a Cell<Instant>,
}

impl Body<'_> {
    /// Reads more; false at the end.
    async fn more(&mut self) -> Result<bool> {
        loop {
            let Some(frame) = self.incoming.frame().await else { return Ok(false) };
            let frame = frame.map_err(|error| {
                let text = "the daemon ended within its answer: whether the command has succeeded the status shows once the daemon is \
                            back";
                Error::new(ErrorKind::Stopped, text).caused_by(error)
            })?;
            self.last_received.set(Instant::now());
            if let Ok(data) = frame.into_data() {
                if self.buffer.len() + data.len() > ANSWER_LIMIT {
                    return Err(not_understood("it does not end"));
                }
                self.buffer.extend_from_slice(&data);
                return Ok(true);
            }
        }
    }

    async fn rest(&mut self) -> Result<Vec<u8>> {
        while self.more().await? {}
        Ok(std::mem::take(&mut self.buffer))
    }

    async fn line(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let rest = self.buffer.split_off(end + 1);
                let line = std::mem::replace(&mut self.buffer, rest);
                return Ok(Some(line));
            }
            if !self.more().await? {
                return Ok(None);
            }
        }
    }
}
