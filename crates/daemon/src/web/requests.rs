//! The requests of the listener.
//!
//! Invariants: only `GET` and `HEAD` are served. Each page is made by a thread of its own, which ends when its client
//! is gone; there are at most [`CONNECTIONS_MAX`] of them. An address that other hosts reach has nothing without the
//! token.

use super::{Address, CONNECTIONS_MAX, Source, Token};
use crate::front_ends::{FrontEnds, LogRateLimit, count};
use crate::metrics;
use crate::metrics::text::Format;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use cbd_types::Error;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// Timeout for the first part of a page: commands may hold the daemon's tables, and it may be restoring.
const PAGE_TIMEOUT: Duration = Duration::from_secs(9);
/// Parts of a page that wait for a slow client.
const PARTS_WAITING: usize = 2;

/// What requests need.
#[derive(Clone)]
pub(super) struct Serving {
    source: Source,
    token: Option<Token>,
    front_ends: Arc<FrontEnds>,
    pages: Arc<Semaphore>,
    refusals: Arc<LogRateLimit>,
}

impl Serving {
    pub(super) fn new(source: Source, token: Option<Token>, front_ends: Arc<FrontEnds>) -> Self {
        let (pages, refusals) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), Arc::default());
        Self { source, token, front_ends, pages, refusals }
    }

    /// Why a request is refused, if it is.
    fn refusal(&self, address: &Address, headers: &HeaderMap) -> Option<Response> {
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
        let is_known = match address {
            Address::Tcp(_) => headers.get(header::HOST).is_none_or(|host| is_address(host.as_bytes())),
            Address::Unix(_) => true,
        };
        (!is_known).then(|| {
            let text = "the header Host has a name other than localhost; ask by the address of this host";
            (StatusCode::MISDIRECTED_REQUEST, failure(text)).into_response()
        })
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
        let refusal = gate.refusal(&address, request.headers());
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
    Router::new()
        .route("/metrics", get(metrics_page))
        .fallback(async || (StatusCode::NOT_FOUND, failure("there is no such path; metrics are at /metrics")))
        .method_not_allowed_fallback(async || {
            (StatusCode::METHOD_NOT_ALLOWED, failure("this path takes GET and HEAD only"))
        })
        .layer(middleware::from_fn(check))
        .with_state(serving.clone())
}

/// An error as a body.
fn failure(text: &str) -> ([(header::HeaderName, &'static str); 2], String) {
    let headers =
        [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (headers, format!("{text}\n"))
}

fn unavailable(text: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, failure(text)).into_response()
}

async fn metrics_page(State(serving): State<Serving>, headers: HeaderMap) -> Response {
    let format = format_for(&headers);
    let end = tokio::time::Instant::now() + PAGE_TIMEOUT;
    // Threads of clients that are gone wait for the status; there are not more of them than connections.
    let Ok(Ok(permit)) = tokio::time::timeout_at(end, Arc::clone(&serving.pages).acquire_owned()).await
    else {
        return unavailable("too many requests wait for the daemon");
    };
    let (sender, mut parts) = mpsc::channel::<Result<String, Error>>(PARTS_WAITING);
    let make = move || {
        let _permit = permit;
        match (serving.source)() {
            Ok(status) => {
                let sink = &mut |part| sender.blocking_send(Ok(part)).is_ok();
                metrics::render_to(&status, format, sink);
            }
            Err(error) => drop(sender.blocking_send(Err(error))),
        }
    };
    if let Err(error) = std::thread::Builder::new().name("cbd-metrics".to_owned()).spawn(make) {
        return unavailable(&format!("there is no thread for this request: {error}"));
    }
    let first = match tokio::time::timeout_at(end, parts.recv()).await {
        Ok(Some(Ok(part))) => part,
        Ok(Some(Err(error))) => return unavailable(&error.line()),
        Ok(None) => return unavailable("the daemon is stopping"),
        Err(_) => {
            return unavailable(
                "the daemon does not have its status yet: it is starting, or a command takes long",
            );
        }
    };
    let body = tokio_stream::once(Ok(first)).chain(ReceiverStream::new(parts));
    let body = Body::from_stream(body.map(|part| part.map(Bytes::from)));
    let headers = [
        (header::CONTENT_TYPE, format.media_type()),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, body).into_response()
}

/// The format that a client prefers: `OpenMetrics` if it names it, and does not prefer the other one.
fn format_for(headers: &HeaderMap) -> Format {
    let (mut open, mut plain) = (0.0, 0.0);
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    for range in values.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let (mut weight, mut version) = (1.0_f32, "1.0.0");
        for (key, value) in parts.filter_map(|parameter| parameter.split_once('=')) {
            match key.trim() {
                "q" => weight = value.trim().parse().unwrap_or(0.0),
                "version" => version = value.trim().trim_matches('"'),
                _ => {}
            }
        }
        if name.eq_ignore_ascii_case("application/openmetrics-text") && version.starts_with("1.") {
            open = weight.max(open);
        } else if name.eq_ignore_ascii_case("text/plain") {
            plain = weight.max(plain);
        }
    }
    if open > 0.0 && open >= plain { Format::OpenMetrics } else { Format::Prometheus }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_is_the_one_that_the_client_prefers() {
        let format = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, accept.parse().unwrap());
            format_for(&headers)
        };
        for accept in [
            "application/openmetrics-text",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            // Prometheus 2.42 and 3.0.
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
             text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.5,*/*;q=0.2",
        ] {
            assert_eq!(format(accept), Format::OpenMetrics, "{accept}");
        }
        for accept in [
            "*/*",
            "text/html",
            "text/plain;version=0.0.4, application/openmetrics-text;q=0.5",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;version=0.0.1",
            "application/openmetrics-text;q=high",
            ";;=,,",
        ] {
            assert_eq!(format(accept), Format::Prometheus, "{accept}");
        }
        assert_eq!(format_for(&HeaderMap::new()), Format::Prometheus);
    }

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
