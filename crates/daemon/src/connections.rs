//! The connections of the control socket.
//!
//! Invariants: connections are bounded in number; one that does not say what it wants in time ends, and the oldest that
//! is in no request ends for a new one; a refused client gets an answer. Some places are for root and the
//! daemon's own user alone. Where the process has no descriptor left, a spare one is used to accept with.
//!
//! Elsewhere: what a request does ([`crate::server`]).

use crate::api::{ErrorAnswer, ErrorBody};
use crate::front_ends::{Counters, FrontEnds, Lines, count};
use crate::server::{Access, Peer};
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::extract::connect_info::ConnectInfo;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Extension, Router};
use cbd_types::{Error, ErrorKind};
use http_body_util::BodyExt;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::fs::File;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// Connections at a time.
pub const CONNECTIONS_MAX: usize = 64;
/// Of these, those of other users than root and the daemon's own.
pub const CONNECTIONS_OF_OTHERS_MAX: usize = 48;
/// How long the head of a request may take, from the time at which the connection accepts one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Clients that are being told that there is no place, at most; others are told nothing.
const TURNING_AWAY_MAX: usize = 16;
/// How long that may take.
const TURNING_AWAY: Duration = Duration::from_secs(1);
/// Time until the next attempt after `accept` failed.
const ACCEPT_AGAIN: Duration = Duration::from_millis(200);

/// A connection that is open.
struct Open {
    /// Requests that are being served on it.
    busy: Arc<AtomicUsize>,
    is_other: bool,
    task: AbortHandle,
}

/// Adds one for as long as it lives.
struct Counted<T: Count>(Arc<T>);

trait Count {
    fn add(&self);
    fn subtract(&self);
}

impl Count for AtomicUsize {
    fn add(&self) {
        self.fetch_add(1, Ordering::Relaxed);
    }
    fn subtract(&self) {
        self.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Count for FrontEnds {
    fn add(&self) {
        self.counters.control_connections.fetch_add(1, Ordering::Relaxed);
    }
    fn subtract(&self) {
        self.counters.control_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<T: Count> Counted<T> {
    fn new(counter: &Arc<T>) -> Self {
        counter.add();
        Self(Arc::clone(counter))
    }
}

impl<T: Count> Drop for Counted<T> {
    fn drop(&mut self) {
        self.0.subtract();
    }
}

/// Serves connections of `listener` by `router` until `stop` is done and the requests that had begun are answered.
pub(crate) async fn serve(
    listener: UnixListener,
    router: Router,
    access: Access,
    front_ends: Arc<FrontEnds>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let mut stop = pin!(stop);
    let (closing, closes) = watch::channel(false);
    let mut acceptor = Acceptor {
        listener,
        spare: File::open("/dev/null").ok(),
        lines: Lines::default(),
        open: Vec::new(),
        turning_away: Arc::default(),
        tasks: JoinSet::new(),
        router,
        access,
        front_ends,
        closes,
    };
    loop {
        tokio::select! {
            () = &mut stop => break,
            stream = acceptor.accept() => if let Some(stream) = stream { acceptor.admit(stream) },
        }
        // What was aborted for a newer one is gone before the next is accepted.
        tokio::task::yield_now().await;
    }
    let Acceptor { mut tasks, listener, .. } = acceptor;
    drop(listener);
    let _ = closing.send(true);
    while tasks.join_next().await.is_some() {}
}

struct Acceptor {
    listener: UnixListener,
    /// A descriptor to accept with when there is no other.
    spare: Option<File>,
    lines: Lines,
    open: Vec<Open>,
    turning_away: Arc<AtomicUsize>,
    tasks: JoinSet<()>,
    router: Router,
    access: Access,
    front_ends: Arc<FrontEnds>,
    closes: watch::Receiver<bool>,
}

impl Acceptor {
    fn counters(&self) -> &Counters {
        &self.front_ends.counters
    }

    /// The next client, if one can be accepted.
    async fn accept(&mut self) -> Option<UnixStream> {
        match self.listener.accept().await {
            Ok((stream, _)) => {
                if self.spare.is_none() {
                    self.spare = File::open("/dev/null").ok();
                }
                Some(stream)
            }
            Err(error) if cbd_export::socket::is_momentary(&error) => None,
            Err(error) => {
                self.lines.say(|more| {
                    tracing::warn!("cannot accept a client of the control socket: {error}{more}");
                });
                if self.spare.take().is_none() {
                    // It stays readable, and nothing says when there is a descriptor again.
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    self.spare = File::open("/dev/null").ok();
                }
                None
            }
        }
    }

    fn admit(&mut self, stream: UnixStream) {
        while self.tasks.try_join_next().is_some() {}
        self.open.retain(|open| !open.task.is_finished());
        let peer = peer_of(&stream);
        let is_other = !self.access.is_own(&peer);
        if !self.has_room(is_other) {
            count(&self.counters().control_refused);
            let user = peer.user.map_or_else(|| "?".to_owned(), |user| user.to_string());
            self.lines.say(|more| {
                tracing::warn!(
                    "a client of the control socket (user {user}) was refused: {} connections have requests under way{more}",
                    self.open.len()
                );
            });
            if self.turning_away.load(Ordering::Relaxed) < TURNING_AWAY_MAX {
                let counted = Counted::new(&self.turning_away);
                self.tasks.spawn(async move {
                    let _counted = counted;
                    let _ = tokio::time::timeout(TURNING_AWAY, turn_away(stream)).await;
                });
            }
            return;
        }
        let busy = Arc::new(AtomicUsize::new(0));
        let service = for_connection(&self.router, peer, &busy);
        let counted = Counted::new(&self.front_ends);
        let mut closes = self.closes.clone();
        let task = self.tasks.spawn(async move {
            let _counted = counted;
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
            let mut connection =
                pin!(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)));
            // How it ended is the client's affair.
            tokio::select! {
                _ = connection.as_mut() => return,
                _ = closes.wait_for(|closes| *closes) => connection.as_mut().graceful_shutdown(),
            }
            let _ = connection.await;
        });
        self.open.push(Open { busy, is_other, task });
    }

    /// Whether there is room for one more; the oldest that is in no request makes some.
    fn has_room(&mut self, is_other: bool) -> bool {
        let others = self.open.iter().filter(|open| open.is_other).count();
        let is_full = self.open.len() >= CONNECTIONS_MAX;
        let others_full = is_other && others >= CONNECTIONS_OF_OTHERS_MAX;
        if !is_full && !others_full {
            return true;
        }
        let idle = |open: &Open| open.busy.load(Ordering::Relaxed) == 0 && (!others_full || open.is_other);
        let Some(oldest) = self.open.iter().position(idle) else { return false };
        self.open.remove(oldest).task.abort();
        true
    }
}

/// The peer of the connection.
fn peer_of(stream: &UnixStream) -> Peer {
    let credentials = stream.peer_cred().ok();
    let mut groups = crate::system::peer_groups(stream.as_fd());
    groups.extend(credentials.map(|peer| peer.gid()));
    Peer { user: credentials.map(|peer| peer.uid()), groups }
}

/// The paths as one connection sees them.
fn for_connection(router: &Router, peer: Peer, busy: &Arc<AtomicUsize>) -> Router {
    let busy = Arc::clone(busy);
    router
        .clone()
        .layer(middleware::from_fn(move |request: Request, next: Next| {
            let busy = Counted::new(&busy);
            async move { until_sent(next.run(request).await, busy) }
        }))
        .layer(Extension(ConnectInfo(peer)))
}

/// The same answer; it holds `busy` until its last part is produced. An answer of known size is complete already.
fn until_sent(answer: Response, busy: Counted<AtomicUsize>) -> Response {
    if answer.body().size_hint().exact().is_some() {
        return answer;
    }
    answer.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _still = &busy;
            frame
        }))
    })
}

/// Tells a client that there is no place for it, and waits until it has heard that: one that is cut off while it sends its
/// request would not read the answer.
async fn turn_away(mut stream: UnixStream) {
    let error = Error::new(
        ErrorKind::Busy,
        format!("the daemon serves {CONNECTIONS_MAX} requests already; try again"),
    );
    let body = serde_json::to_string(&ErrorAnswer { error: ErrorBody::from(&error) }).unwrap_or_default();
    let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let text = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    // An answer before its request would not be understood.
    let mut rest = [0; 1024];
    let asked = stream.read(&mut rest).await.is_ok_and(|length| length > 0);
    if !asked || stream.write_all(text.as_bytes()).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    while stream.read(&mut rest).await.is_ok_and(|length| length > 0) {}
}
