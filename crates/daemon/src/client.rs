//! The other end of the control socket, for `cbdctrl`, the demo and tests.
//!
//! Always true here: calls block until they are answered; an error of the daemon comes back as the same kind and text.

use crate::api::{self, Done, ErrorAnswer, Progress, ProgressLine};
use bytes::Bytes;
use cbd_types::{Error, ErrorKind, Result};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};

/// The most that an answer may hold: what listens on the socket is not trusted to end.
const ANSWER_LIMIT: usize = 64 << 20;

/// A client of one daemon.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the daemon that listens at `socket`; connects with each call.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned() }
    }

    /// Asks for what is at `path`.
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

    /// Patches what is at `path`.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn patch<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T> {
        self.json(Method::PATCH, path, body)
    }

    /// Deletes what is at `path`.
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
        let bytes = block_on(async {
            let mut body = Body::new(self.send(Method::GET, path, &()).await?);
            body.rest().await
        })?;
        String::from_utf8(bytes).map_err(|_| not_understood("the answer is no text"))
    }

    /// Posts `body` to `path`, whose answer comes in lines; `progress` sees each. Giving up (the process ends) cancels
    /// the operation.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn post_long<B: Serialize>(
        &self,
        path: &str,
        body: &B,
        mut progress: impl FnMut(&Progress),
    ) -> Result<Done> {
        block_on(async {
            let mut body = Body::new(self.send(Method::POST, path, body).await?);
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

    fn json<B: Serialize, T: DeserializeOwned>(&self, method: Method, path: &str, body: &B) -> Result<T> {
        let bytes = block_on(async {
            let mut body = Body::new(self.send(method, path, body).await?);
            body.rest().await
        })?;
        serde_json::from_slice(&bytes).map_err(|error| not_understood(&error.to_string()))
    }

    /// Sends a request; the answer's head says that it went well.
    async fn send<B: Serialize>(&self, method: Method, path: &str, body: &B) -> Result<Response<Incoming>> {
        let stream =
            tokio::net::UnixStream::connect(&self.socket).await.map_err(|error| self.not_reached(&error))?;
        let lost = |error: hyper::Error| {
            Error::new(
                ErrorKind::Stopped,
                format!("the daemon at {} does not answer: {error}", self.socket.display()),
            )
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        tokio::spawn(connection);
        let body = if method == Method::GET || method == Method::DELETE {
            Bytes::new()
        } else {
            serde_json::to_vec(body).map_err(|error| not_understood(&error.to_string()))?.into()
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "cbd")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|error| Error::new(ErrorKind::InvalidArgument, format!("{path}: {error}")))?;
        let answer = sender.send_request(request).await.map_err(lost)?;
        if answer.status() == StatusCode::OK {
            return Ok(answer);
        }
        let status = answer.status();
        let bytes = Body::new(answer).rest().await?;
        Err(match serde_json::from_slice::<ErrorAnswer>(&bytes) {
            Ok(ErrorAnswer { error }) => error.into(),
            Err(_) => not_understood(&format!("status {status} and {}", String::from_utf8_lossy(&bytes))),
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
            std::io::ErrorKind::PermissionDenied => Error::new(
                ErrorKind::Permission,
                format!("the daemon's socket {socket} may not be used by this user; run the command as root"),
            ),
            _ => Error::new(
                ErrorKind::System,
                format!("the daemon's socket {socket} cannot be reached: {error}"),
            ),
        }
    }

    /// The status.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn status(&self) -> Result<api::Status> {
        self.get("/v1/status")
    }
}

fn not_understood(text: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("the daemon's answer is not understood: {text}"))
}

fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(|error| Error::new(ErrorKind::System, format!("cannot wait for the daemon: {error}")))?
        .block_on(work)
}

/// The body of an answer, piece by piece.
struct Body {
    incoming: Incoming,
    buffer: Vec<u8>,
}

impl Body {
    fn new(answer: Response<Incoming>) -> Self {
        Self { incoming: answer.into_body(), buffer: Vec::new() }
    }

    /// Reads more; false at the end.
    async fn more(&mut self) -> Result<bool> {
        loop {
            let Some(frame) = self.incoming.frame().await else { return Ok(false) };
            let frame = frame.map_err(|error| {
                Error::new(ErrorKind::Stopped, format!("the daemon ended within its answer: {error}"))
            })?;
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
