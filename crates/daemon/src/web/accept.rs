//! The sockets and connections of the listener.
//!
//! Invariants: a connection serves one request, and lasts at most [`CONNECTION_LIMIT`], whatever its client does.
//! There are at most [`CONNECTIONS_MAX`]; the oldest one is closed for a new one.
//!
//! Elsewhere: the requests ([`super::requests`]).

use super::requests::{Serving, router};
use super::{Address, Plan, Problems};
use crate::front_ends::{FrontEnds, LogRateLimit, count};
use cbd_export::descriptors::check_reserve;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// Most connections at a time, of all addresses together.
pub const CONNECTIONS_MAX: usize = 16;
/// Longest time that a connection lasts.
pub const CONNECTION_LIMIT: Duration = Duration::from_secs(30);
/// Timeout for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Most bytes of the head of a request.
const HEAD_MAX: usize = 16 << 10;
/// Time after which an address that cannot be used is tried again.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Delay before the next attempt after `accept` failed.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(200);

/// What all addresses share.
struct Shared {
    plan: Plan,
    serving: Serving,
    front_ends: Arc<FrontEnds>,
    /// The open connections, the oldest first.
    open: Mutex<VecDeque<AbortHandle>>,
    accept_errors: LogRateLimit,
}

/// Counts an open connection.
struct Counted(Arc<FrontEnds>);

impl Counted {
    fn new(front_ends: &Arc<FrontEnds>) -> Self {
        count(&front_ends.counters.web_connections);
        Self(Arc::clone(front_ends))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.counters.web_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Serves the addresses of `plan` until `stopped`.
pub(super) async fn serve(
    plan: Plan,
    serving: Serving,
    front_ends: Arc<FrontEnds>,
    mut stopped: watch::Receiver<bool>,
) {
    let addresses = plan.addresses.clone();
    let (open, accept_errors) = (Mutex::default(), LogRateLimit::default());
    let shared = Arc::new(Shared { plan, serving, front_ends, open, accept_errors });
    let mut tasks = JoinSet::new();
    for address in addresses {
        tasks.spawn(serve_address(address, Arc::clone(&shared)));
    }
    let _ = stopped.wait_for(|stopped| *stopped).await;
    // Their sockets are closed, and the files of unix sockets are removed, before the thread ends.
    tasks.shutdown().await;
}

/// Serves one address as soon as it can be used.
async fn serve_address(address: Address, shared: Arc<Shared>) {
    loop {
        let problems = &shared.front_ends.web_problems;
        let bound = match &address {
            Address::Tcp(at) => TcpListener::bind(at).await.map(Bound::Tcp),
            Address::Unix(path) => bind_unix(path, shared.plan.group).map(Box::new).map(Bound::Unix),
        };
        match bound {
            Ok(bound) => {
                problems.set(&address, None);
                tracing::info!("metrics are served at {}", bound.uri(&address));
                accept(&bound, &address, &shared).await;
            }
            Err(error) => refuse(problems, &address, &error),
        }
        tokio::time::sleep(shared.plan.retry_interval).await;
    }
}

fn refuse(problems: &Problems, address: &Address, error: &io::Error) {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => "end what uses it",
        io::ErrorKind::AddrNotAvailable => "give this host that address",
        _ => "put that right",
    };
    let text = format!(
        "metrics are not served at {address}: {error}; {advice}, or change listen of [web] in the configuration and restart. \
         The daemon tries again every {} s",
        RETRY_INTERVAL.as_secs()
    );
    if problems.set(address, Some(text.clone())) {
        tracing::warn!("{text}");
    }
}

enum Bound {
    Tcp(TcpListener),
    Unix(Box<(UnixListener, cbd_export::socket::SocketFile)>),
}

impl Bound {
    /// Where clients find the metrics. A port that the system chose is in it.
    fn uri(&self, address: &Address) -> String {
        match self {
            Self::Tcp(listener) => match listener.local_addr() {
                Ok(at) => format!("http://{at}/metrics"),
                Err(_) => address.to_string(),
            },
            Self::Unix(_) => address.to_string(),
        }
    }
}

fn bind_unix(
    path: &std::path::Path,
    group: Option<u32>,
) -> io::Result<(UnixListener, cbd_export::socket::SocketFile)> {
    let other = |error: cbd_types::Error| io::Error::other(error.line());
    let (socket, file) = cbd_export::socket::listen(path, "metrics").map_err(other)?;
    if let Some(group) = group {
        crate::system::set_group(path, group).map_err(other)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    }
    Ok((UnixListener::from_std(socket.into())?, file))
}

/// Accepts clients until the socket fails for good.
async fn accept(bound: &Bound, address: &Address, shared: &Arc<Shared>) {
    loop {
        let accepted = match bound {
            Bound::Tcp(listener) => listener.accept().await.map(|(stream, peer)| {
                let _ = stream.set_nodelay(true);
                admit(stream, Some(peer), address, shared);
            }),
            Bound::Unix(socket) => {
                socket.0.accept().await.map(|(stream, _)| admit(stream, None, address, shared))
            }
        };
        match accepted {
            Ok(()) => {}
            Err(error) if cbd_export::socket::is_momentary(&error) => {}
            Err(error) => {
                shared.accept_errors.log(|more| {
                    tracing::warn!("cannot accept a client of metrics at {address}: {error}{more}");
                });
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
        // Lets closed connections end before the next client is accepted.
        tokio::task::yield_now().await;
    }
}

/// Serves one request of a client.
fn admit<S: AsyncRead + AsyncWrite + AsFd + Unpin + Send + 'static>(
    stream: S,
    peer: Option<std::net::SocketAddr>,
    address: &Address,
    shared: &Arc<Shared>,
) {
    if check_reserve(&stream).is_err() {
        return count(&shared.front_ends.counters.web_refused);
    }
    let mut open = shared.open.lock();
    open.retain(|connection| !connection.is_finished());
    while open.len() >= CONNECTIONS_MAX {
        if let Some(oldest) = open.pop_front() {
            count(&shared.front_ends.counters.web_refused);
            oldest.abort();
        }
    }
    let router = router(&shared.serving, address, peer);
    let counted = Counted::new(&shared.front_ends);
    let task = tokio::spawn(async move {
        let _counted = counted;
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        http.keep_alive(false).max_buf_size(HEAD_MAX);
        let serving = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
        // An error of the connection concerns the client only.
        let _ = tokio::time::timeout(CONNECTION_LIMIT, serving).await;
    });
    open.push_back(task.abort_handle());
}
