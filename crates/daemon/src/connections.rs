//! The connections of the control socket.
//!
//! Invariants: the number of connections is bounded. A connection without a request header in time is closed, and the
//! oldest connection without a request is closed for a new one. A refused client gets a response. Some connections are
//! reserved for root and the daemon's own user. If the process has no descriptor left, a spare one is used to accept a
//! client.
//!
//! Elsewhere: the requests ([`crate::server`]).

use crate::api::{ErrorAnswer, ErrorBody};
use crate::front_ends::{Counters, FrontEnds, LogRateLimit, count};
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

/// Most connections at a time.
pub const CONNECTIONS_MAX: usize = 64;
/// Most connections of users other than root and the daemon's own.
pub const CONNECTIONS_OF_OTHERS_MAX: usize = 48;
/// Timeout for the head of a request, from the time at which the connection is ready for one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Most clients that receive a refusal at the same time; further ones are disconnected without a response.
const REFUSALS_MAX: usize = 16;
/// Timeout for sending a refusal.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Delay before the next attempt after `accept` failed.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// An open connection.
struct Open {
    /// Number of its requests in progress.
    busy: Arc<AtomicUsize>,
    is_other: bool,
    task: AbortHandle,
}

/// Counts one until it is dropped.
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

/// Serves connections of `listener` by `router` until `stop` completes and the requests in progress have responses.
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
        rate_limit: LogRateLimit::default(),
        open: Vec::new(),
        refusing: Arc::default(),
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
        // Lets aborted connections end before the next client is accepted.
        tokio::task::yield_now().await;
    }
    let Acceptor { mut tasks, listener, .. } = acceptor;
    drop(listener);
    let _ = closing.send(true);
    while tasks.join_next().await.is_some() {}
}

struct Acceptor {
    listener: UnixListener,
    /// A reserved descriptor that is closed to accept a client when no other is free.
    spare: Option<File>,
    rate_limit: LogRateLimit,
    open: Vec<Open>,
    refusing: Arc<AtomicUsize>,
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

    /// Accepts the next client; none if `accept` failed.
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
                self.rate_limit.log(|more| {
                    tracing::warn!("cannot accept a client of the control socket: {error}{more}");
                });
                if self.spare.take().is_none() {
                    // The socket remains readable, and no event reports that a descriptor is free again.
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
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
            self.rate_limit.log(|more| {
                tracing::warn!(
                    "a client of the control socket (user {user}) was refused: {} connections have requests under way{more}",
                    self.open.len()
                );
            });
            if self.refusing.load(Ordering::Relaxed) < REFUSALS_MAX {
                let counted = Counted::new(&self.refusing);
                self.tasks.spawn(async move {
                    let _counted = counted;
                    let _ = tokio::time::timeout(REFUSAL_TIMEOUT, refuse(stream)).await;
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
            // An error of the connection concerns the client only.
            tokio::select! {
                _ = connection.as_mut() => return,
                _ = closes.wait_for(|closes| *closes) => connection.as_mut().graceful_shutdown(),
            }
            let _ = connection.await;
        });
        self.open.push(Open { busy, is_other, task });
    }

    /// Whether one more connection is admitted; closes the oldest connection without a request if needed.
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

/// The router for one connection, with its peer and its counter of requests.
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

/// The same response, which holds `busy` until its last part is produced. A response of known size is complete already.
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

/// Sends a refusal to a client and waits until the client closes: a client that is disconnected while it sends its
/// request would not read the response.
async fn refuse(mut stream: UnixStream) {
    let error = Error::new(
        ErrorKind::Busy,
        format!("the daemon serves {CONNECTIONS_MAX} requests already; try again"),
    );
    let body = serde_json::to_string(&ErrorAnswer { error: ErrorBody::from(&error) }).unwrap_or_default();
    let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n";
    let text = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
    // The client accepts a response only after its request.
    let mut rest = [0; 1024];
    let asked = stream.read(&mut rest).await.is_ok_and(|length| length > 0);
    if !asked || stream.write_all(text.as_bytes()).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    while stream.read(&mut rest).await.is_ok_and(|length| length > 0) {}
}
