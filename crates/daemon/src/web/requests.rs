//! The requests of the listener.
//!
//! Invariants: only `GET` and `HEAD` are served. Each page is made by a thread of its own, which ends when its client
//! is gone; there are at most [`CONNECTIONS_MAX`] of them. An address that other hosts reach has nothing without the
//! token, but for the files of the page, which have nothing of this machine.

use super::{Address, CONNECTIONS_MAX, Source, Token};
use crate::front_ends::{FrontEnds, LogRateLimit, count};
use crate::metrics;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Timeout for the first part of a page: commands may hold the daemon's tables, and it may be restoring.
pub(super) const PAGE_TIMEOUT: Duration = Duration::from_secs(9);

/// The error for a request for which no thread is free.
pub(super) const BUSY: &str = "too many requests wait for the daemon";

/// What the page shows.
#[cfg(feature = "page")]
#[derive(Clone)]
pub(super) struct Page {
    pub(super) shown: super::PageSource,
    pub(super) history: Arc<crate::history::History>,
}

/// What requests need.
#[derive(Clone)]
pub(super) struct Serving {
    source: Source,
    token: Option<Token>,
    front_ends: Arc<FrontEnds>,
    pages: Arc<Semaphore>,
    #[cfg(feature = "page")]
    page: Option<Page>,
    refusals: Arc<LogRateLimit>,
}

impl Serving {
    pub(super) fn new(
        source: Source,
        #[cfg(feature = "page")] page: Option<Page>,
        token: Option<Token>,
        front_ends: Arc<FrontEnds>,
    ) -> Self {
        let (pages, refusals) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Arc::default());
        Self {
            source,
            token,
            front_ends,
            pages,
            #[cfg(feature = "page")]
            page,
            refusals,
        }
    }

    /// What the page shows; nothing where it is off.
    #[cfg(feature = "page")]
    pub(super) const fn page(&self) -> Option<&Page> {
        self.page.as_ref()
    }

    /// The permission to use a thread that may block, until `end`; `None` if there is none until then.
    pub(super) async fn permit(&self, end: tokio::time::Instant) -> Option<OwnedSemaphorePermit> {
        tokio::time::timeout_at(end, Arc::clone(&self.pages).acquire_owned()).await.ok()?.ok()
    }

    /// Why a request is refused, if it is.
    fn refusal(&self, address: &Address, path: &str, headers: &HeaderMap) -> Option<Response> {
        if address.needs_token() && is_file_of_page(path) {
            return None;
        }
        if address.needs_token() {
            let given = headers.get(header::AUTHORIZATION);
            let is_right =
                given.zip(self.token.as_ref()).is_some_and(|(given, token)| token.is_in(given.as_bytes()));
            let text = if given.is_some() { "the token is wrong" } else { "there is no token" };
            return (!is_right).then(|| {
                let text = format!("{text}: send the header \"Authorization: Bearer TOKEN\"");
                let how = [(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))];
                (StatusCode::UNAUTHORIZED, how, failure(&text)).into_response()
            });
        }
        // A page of another site can make a browser send requests to this host, by a name that it lets resolve to
        // 127.0.0.1.
        let Address::Tcp(_) = address else { return None };
        let (code, text) = match headers.get_all(header::HOST).iter().collect::<Vec<_>>().as_slice() {
            // HTTP/1.0 has none, and no browser sends that.
            [] => return None,
            [host] if is_address(host.as_bytes()) => return None,
            [host] if host.is_empty() => (StatusCode::BAD_REQUEST, "the header Host is empty"),
            [_] => (
                StatusCode::MISDIRECTED_REQUEST,
                "the header Host has a name other than localhost; ask by the address of this host",
            ),
            _ => (StatusCode::BAD_REQUEST, "there is more than one header Host"),
        };
        Some((code, failure(text)).into_response())
    }
}

/// Whether the value of the header `Host` is an IP address or `localhost`, with or without a port.
fn is_address(host: &[u8]) -> bool {
    let Ok(host) = str::from_utf8(host) else { return false };
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let name = match host.rsplit_once(':') {
        Some((name, port)) if is_port(port) && !name.ends_with(':') => name,
        _ => host,
    };
    let inner = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    inner.parse::<IpAddr>().is_ok() || name.eq_ignore_ascii_case("localhost")
}

/// The paths, for a client of `address`.
pub(super) fn router(serving: &Serving, address: &Address, peer: Option<SocketAddr>) -> Router {
    let (gate, address) = (serving.clone(), address.clone());
    let check = move |request: Request, next: Next| {
        let refusal = gate.refusal(&address, request.uri().path(), request.headers());
        if let Some(refused) = &refusal {
            count(&gate.front_ends.counters.web_refused);
            let peer = peer.map_or_else(String::new, |peer| format!(" {peer}"));
            let status = refused.status();
            gate.refusals.log(|more| {
                tracing::warn!("a client{peer} of metrics at {address} was refused: {status}{more}");
            });
        }
        async move {
            match refusal {
                Some(refused) => refused,
                None => next.run(request).await,
            }
        }
    };
    let router = Router::new().route("/metrics", get(metrics_page));
    #[cfg(feature = "page")]
    let router = super::page::routes(router);
    #[cfg(not(feature = "page"))]
    let router = router.route("/", get(async || (StatusCode::NOT_FOUND, failure(WITHOUT_PAGE))));
    router
        .fallback(async || (StatusCode::NOT_FOUND, failure("there is no such path; metrics are at /metrics")))
        .method_not_allowed_fallback(async || {
            (StatusCode::METHOD_NOT_ALLOWED, failure("this path takes GET and HEAD only"))
        })
        .layer(middleware::from_fn(check))
        .with_state(serving.clone())
}

/// What a client of the page is told by a program without it.
#[cfg(not(feature = "page"))]
const WITHOUT_PAGE: &str = "this program was built without the page (feature page); metrics are at /metrics";

/// Whether a path is that of a file of the page.
fn is_file_of_page(path: &str) -> bool {
    #[cfg(feature = "page")]
    return super::page::is_file(path);
    #[cfg(not(feature = "page"))]
    return path.len() == 1;
}

/// An error as a body.
pub(super) fn failure(text: &str) -> ([(header::HeaderName, &'static str); 2], String) {
    let headers =
        [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, format!("{text}\n"))
}

pub(super) fn unavailable(text: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, failure(text)).into_response()
}

async fn metrics_page(State(serving): State<Serving>, headers: HeaderMap) -> Response {
    let end = tokio::time::Instant::now() + PAGE_TIMEOUT;
    // Threads of clients that are gone wait for the status; there are not more of them than connections.
    let Some(permit) = serving.permit(end).await else {
        return unavailable(BUSY);
    };
    let source = Arc::clone(&serving.source);
    let answer = metrics::answer(move || source(), &headers, permit);
    match tokio::time::timeout_at(end, answer).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => unavailable(&error.line()),
        Err(_) => {
            unavailable("the daemon does not have its status yet: it is starting, or a command takes long")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_an_address_or_localhost() {
        for host in [
            "127.0.0.1",
            "127.0.0.1:9469",
            "[::1]:9469",
            "[::1]",
            "::1",
            "localhost",
            "LocalHost:80",
            "192.0.2.7:1",
        ] {
            assert!(is_address(host.as_bytes()), "{host}");
        }
        for host in [
            "",
            "example.org",
            "example.org:9469",
            "localhost.example.org",
            "127.0.0.1.example.org:80",
            "\u{e9}",
        ] {
            assert!(!is_address(host.as_bytes()), "{host}");
        }
    }
}
