//! The wire protocol of the control socket: HTTP and JSON, `/v1/...`, described by `docs/openapi.yaml`.
//!
//! Invariants: requests are served only for root, for the daemon's own user, and for members of the configured group.
//! Each request runs on a thread where it may block, and is refused if there is no thread for it. An error is
//! `{"error": {"kind", "message"}}` with the HTTP status of its kind.
//!
//! Long operations respond with a stream of JSON lines ([`ProgressLine`]); they are cancelled when the client
//! disconnects.

mod events;
mod hosts;
mod map;
mod pins;
mod sample;
mod verify;

use crate::api::{
    CommonCheckpoint, Done, Drain, ErrorAnswer, ErrorBody, NumberOrName, Progress, ProgressLine,
    SettingsChanged, StartBlkdev, Status, StopBackend,
};
use crate::control::{Control, Flow, Report};
use crate::front_ends::FrontEnds;
use axum::body::{Body, Bytes};
use axum::extract::connect_info::ConnectInfo;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Request, State};
use axum::handler::Handler;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, patch, post};
use axum::{Json, Router};
use cbd_types::{Error, ErrorKind};
use events::events;
use map::map;
use pins::{add_pins, pins, remove_pins};
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use verify::{scrub, set_scrub, verify};

/// The users that may use the control socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// The daemon's own user; root may always.
    pub user: u32,
    /// A group whose members may use it, too.
    pub group: Option<u32>,
}

/// The peer of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its user, if the system reported it.
    pub user: Option<u32>,
    /// Its groups.
    pub groups: Vec<u32>,
}

impl Access {
    /// Whether `peer` is root or the daemon's own user.
    #[must_use]
    pub fn is_own(&self, peer: &Peer) -> bool {
        peer.user.is_some_and(|user| user == 0 || user == self.user)
    }

    /// Whether `peer` may use the control socket.
    #[must_use]
    pub fn allows(&self, peer: &Peer) -> bool {
        self.is_own(peer) || self.group.is_some_and(|group| peer.groups.contains(&group))
    }
}

/// The most bytes of a request for pins: the ranges of the longest list that a cache can have, 1 MiB, in JSON. For other requests it
/// is 2 MB.
const PINS_BODY_MAX: usize = 8 << 20;

type Shared = Arc<dyn Control>;

/// Serves requests until `stop` completes and the requests in progress have responses.
pub async fn serve(
    listener: UnixListener,
    control: Shared,
    access: Access,
    front_ends: Arc<FrontEnds>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    crate::connections::serve(listener, router(control, access), access, front_ends, stop).await;
}

/// The paths. A test compares them with `docs/openapi.yaml`.
pub fn router(control: Shared, access: Access) -> Router {
    let add_pins = add_pins.layer(DefaultBodyLimit::max(PINS_BODY_MAX));
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/metrics", get(metrics))
        .route("/v1/events", get(events))
        .route("/v1/blkdev-users", get(blkdev_users))
        .route("/v1/transports", get(transports).post(register_transport))
        .route("/v1/transports/{transport}", delete(unregister_transport))
        .route("/v1/transports/{transport}/grow", post(grow_transport))
        .route("/v1/transports/{transport}/hosts", get(hosts::hosts))
        .route("/v1/transports/{transport}/hosts/{host}/clear", post(hosts::clear))
        .route("/v1/transports/{transport}/backends", get(backends).post(start_backend))
        .route("/v1/transports/{transport}/backends/{backend}/stop", post(stop_backend))
        .route("/v1/transports/{transport}/backends/{backend}/grow", post(grow_backend))
        .route("/v1/transports/{transport}/backends/{backend}/settings", patch(set))
        .route("/v1/transports/{transport}/backends/{backend}/cache/attach", post(attach_cache))
        .route("/v1/transports/{transport}/backends/{backend}/cache/detach", post(detach_cache))
        .route("/v1/transports/{transport}/backends/{backend}/move", post(hosts::move_backend))
        .route("/v1/transports/{transport}/backends/{backend}/cache/resize", post(resize_cache))
        .route("/v1/transports/{transport}/backends/{backend}/pins", get(pins).post(add_pins))
        .route("/v1/transports/{transport}/backends/{backend}/unpin", post(remove_pins))
        .route("/v1/transports/{transport}/backends/{backend}/map", get(map))
        .route("/v1/transports/{transport}/backends/{backend}/verify", post(verify))
        .route("/v1/transports/{transport}/backends/{backend}/sample", get(sample::sample))
        .route("/v1/transports/{transport}/backends/{backend}/scrub", get(scrub).post(set_scrub))
        .route("/v1/transports/{transport}/checkpoint", post(checkpoint))
        .route("/v1/transports/{transport}/checkpoint-together", post(checkpoint_together))
        .route("/v1/transports/{transport}/drain", post(drain))
        .route("/v1/transports/{transport}/blkdevs", get(blkdevs).post(start_blkdev))
        .route("/v1/transports/{transport}/blkdevs/{blkdev}/stop", post(stop_blkdev))
        .route("/v1/transports/{transport}/blkdevs/{blkdev}/settings", patch(set_blkdev))
        .fallback(async || {
            Failure::from(Error::new(ErrorKind::NotFound, "there is no such path; see docs/openapi.yaml"))
        })
        .method_not_allowed_fallback(async || Failure {
            status: StatusCode::METHOD_NOT_ALLOWED,
            error: Error::new(
                ErrorKind::Unsupported,
                "this path does not take this method; see docs/openapi.yaml",
            ),
        })
        .layer(middleware::from_fn(
            move |ConnectInfo(peer): ConnectInfo<Peer>, request: Request, next: Next| async move {
                if access.allows(&peer) {
                    next.run(request).await
                } else {
                    let user = peer.user.map_or_else(|| "?".to_owned(), |user| user.to_string());
                    let text = format!(
                        "user {user} may not use this daemon; run the command as root or as user {}, \
                         or name a group in the configuration",
                        access.user
                    );
                    Failure::from(Error::new(ErrorKind::Permission, text)).into_response()
                }
            },
        ))
        .with_state(control)
}

/// An error as a response.
struct Failure {
    status: StatusCode,
    error: Error,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { status: http_status(error.kind()), error }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let body = ErrorAnswer { error: ErrorBody::from(&self.error) };
        (self.status, Json(body)).into_response()
    }
}

/// Timeout for the body of a request.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The HTTP status of each kind of error.
#[must_use]
pub fn http_status(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::InvalidArgument | ErrorKind::OutOfRange => StatusCode::BAD_REQUEST,
        ErrorKind::Permission => StatusCode::FORBIDDEN,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::AlreadyExists | ErrorKind::Busy | ErrorKind::ReadOnly => StatusCode::CONFLICT,
        ErrorKind::Damaged | ErrorKind::Foreign | ErrorKind::Exchanged | ErrorKind::Torn => {
            StatusCode::CONFLICT
        }
        ErrorKind::Unsupported => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::Stopped => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::Media | ErrorKind::Backing | ErrorKind::Mismatch => StatusCode::BAD_GATEWAY,
        ErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// A JSON body whose rejection is a [`Failure`]. An empty body is read as `{}`.
struct Input<T>(T);

impl<T: for<'de> Deserialize<'de>, S: Send + Sync> FromRequest<S> for Input<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let malformed = |text: String| Failure::from(Error::new(ErrorKind::InvalidArgument, text));
        let late = |_| Failure {
            status: StatusCode::REQUEST_TIMEOUT,
            error: Error::new(ErrorKind::TimedOut, "the body of the request did not arrive in time"),
        };
        let received = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state));
        let bytes = received.await.map_err(late)?.map_err(|error| Failure {
            // 413 for a body that is too long.
            status: error.status(),
            error: Error::new(ErrorKind::InvalidArgument, error.body_text()),
        })?;
        let bytes = if bytes.is_empty() { Bytes::from_static(b"{}") } else { bytes };
        // Not `Json::from_request`, which requires the header `Content-Type`.
        Json::from_bytes(&bytes).map(|Json(value)| Self(value)).map_err(|error: JsonRejection| {
            malformed(format!("the request is not understood: {}", error.body_text()))
        })
    }
}

/// Query parameters whose rejection is a [`Failure`].
struct Query<T>(T);

impl<T: for<'de> Deserialize<'de>, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut axum::http::request::Parts, state: &S) -> Result<Self, Failure> {
        axum::extract::Query::from_request_parts(parts, state).await.map(|query| Self(query.0)).map_err(
            |error: QueryRejection| Failure::from(Error::new(ErrorKind::InvalidArgument, error.body_text())),
        )
    }
}

/// Numbers in the path whose rejection is a [`Failure`].
struct Path<T>(T);

impl<T: for<'de> Deserialize<'de> + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut axum::http::request::Parts, state: &S) -> Result<Self, Failure> {
        axum::extract::Path::from_request_parts(parts, state).await.map(|path| Self(path.0)).map_err(
            |error: PathRejection| Failure::from(Error::new(ErrorKind::InvalidArgument, error.body_text())),
        )
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    #[serde(default)]
    all: bool,
}

type Answer<T> = Result<Json<T>, Failure>;

/// Runs one operation on a thread where it may block.
async fn run<T: Send + 'static>(
    control: Shared,
    operation: impl FnOnce(&dyn Control) -> cbd_types::Result<T> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(move || operation(&*control)).await {
        Ok(result) => result.map_err(Failure::from),
        Err(_) => Err(Error::new(ErrorKind::Stopped, "the daemon is stopping").into()),
    }
}

async fn json<T: Serialize + Send + 'static>(
    control: Shared,
    operation: impl FnOnce(&dyn Control) -> cbd_types::Result<T> + Send + 'static,
) -> Answer<T> {
    run(control, operation).await.map(Json)
}

async fn status(State(control): State<Shared>, Query(which): Query<StatusOf>) -> impl IntoResponse {
    json(control, move |control| status_of(control, &which)).await
}

/// The part of the status that a request asks for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusOf {
    #[serde(default)]
    transport: Option<u32>,
    #[serde(default)]
    backend: Option<NumberOrName>,
}

fn status_of(control: &dyn Control, which: &StatusOf) -> cbd_types::Result<Status> {
    let mut status = control.status()?;
    let Some(transport) = which.transport.or(which.backend.as_ref().map(|_| 0)) else { return Ok(status) };
    status.transports.retain(|it| it.info.transport_id == transport);
    if status.transports.is_empty() {
        let text = format!("there is no transport {transport}; tp-list shows which there are");
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    if let Some(backend) = &which.backend {
        let number = control.backend_number(transport, backend)?;
        status.transports[0].remote_blkdevs.clear();
        let backends = &mut status.transports[0].backends;
        backends.retain(|it| it.info.backend_id == number);
        if backends.is_empty() {
            let text = format!(
                "there is no backend {number} on transport {transport}; backend-list shows which there are"
            );
            return Err(Error::new(ErrorKind::NotFound, text));
        }
    }
    Ok(status)
}

async fn metrics(State(control): State<Shared>, headers: HeaderMap) -> Result<Response, Failure> {
    Ok(crate::metrics::answer(move || control.status(), &headers, ()).await?)
}

async fn blkdev_users(State(control): State<Shared>) -> impl IntoResponse {
    json(control, |control| control.blkdev_users()).await
}

async fn transports(State(control): State<Shared>) -> impl IntoResponse {
    json(control, |control| control.transports()).await
}

async fn register_transport(
    State(control): State<Shared>,
    Input(request): Input<crate::api::RegisterTransport>,
) -> impl IntoResponse {
    json(control, move |control| control.register_transport(&request)).await
}

async fn unregister_transport(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
) -> impl IntoResponse {
    json(control, move |control| control.unregister_transport(transport)).await
}

async fn grow_transport(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
    Input(request): Input<crate::api::GrowTransport>,
) -> impl IntoResponse {
    json(control, move |control| control.grow_transport(transport, request)).await
}

async fn backends(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
    Query(which): Query<Which>,
) -> impl IntoResponse {
    json(control, move |control| control.backends(transport, which.all)).await
}

async fn start_backend(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
    Input(request): Input<crate::api::StartBackend>,
) -> impl IntoResponse {
    json(control, move |control| control.start_backend(transport, &request)).await
}

async fn grow_backend(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.backend_number(transport, &backend)?;
        control.grow_backend(transport, backend)
    })
    .await
}

async fn set(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(change): Input<crate::api::SettingsChange>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend_id = control.backend_number(transport, &backend)?;
        let settings = control.set(transport, backend_id, &change)?;
        // The change is made: a backend that is removed meanwhile does not turn it into an error.
        let scrubs = control.scrub(transport, backend_id).map(|scrub| scrub.settings).unwrap_or_default();
        Ok(SettingsChanged { backend_id, settings, scrubs })
    })
    .await
}

async fn blkdevs(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
    Query(which): Query<Which>,
) -> impl IntoResponse {
    json(control, move |control| control.blkdevs(transport, which.all)).await
}

async fn start_blkdev(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
    Input(request): Input<StartBlkdev<NumberOrName>>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.any_backend_number(transport, &request.backend)?;
        control.start_blkdev(transport, &request.with_backend(backend))
    })
    .await
}

async fn set_blkdev(
    State(control): State<Shared>,
    Path((transport, blkdev)): Path<(u32, NumberOrName)>,
    Input(change): Input<crate::api::BlkdevChange>,
) -> impl IntoResponse {
    json(control, move |control| {
        let blkdev = control.blkdev_number(transport, &blkdev)?;
        control.set_blkdev(transport, blkdev, &change)
    })
    .await
}

async fn stop_blkdev(
    State(control): State<Shared>,
    Path((transport, blkdev)): Path<(u32, NumberOrName)>,
    Input(request): Input<crate::api::StopBlkdev>,
) -> impl IntoResponse {
    json(control, move |control| {
        let blkdev = control.blkdev_number(transport, &blkdev)?;
        control.stop_blkdev(transport, blkdev, request)
    })
    .await
}

async fn stop_backend(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<StopBackend>,
) -> Response {
    lines(control, move |control, report| {
        let backend = control.backend_number(transport, &backend)?;
        control.stop_backend(transport, backend, &request, report)
    })
    .await
}

/// The request with the number of the backend.
fn numbered(control: &dyn Control, transport: u32, request: Drain<NumberOrName>) -> cbd_types::Result<Drain> {
    let Drain { backend, wait, timeout_s, verify } = request;
    let backend = backend.map(|backend| control.backend_number(transport, &backend)).transpose()?;
    Ok(Drain { backend, wait, timeout_s, verify })
}

async fn attach_cache(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<crate::api::AttachCache>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.backend_number(transport, &backend)?;
        control.attach_cache(transport, backend, &request)
    })
    .await
}

async fn detach_cache(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<crate::api::DetachCache>,
) -> Response {
    lines(control, move |control, report| {
        let backend = control.backend_number(transport, &backend)?;
        control.detach_cache(transport, backend, &request, report)
    })
    .await
}

async fn resize_cache(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<crate::api::ResizeCache>,
) -> Response {
    lines(control, move |control, report| {
        let backend = control.backend_number(transport, &backend)?;
        control.resize_cache(transport, backend, &request, report)
    })
    .await
}

async fn checkpoint(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
    Input(request): Input<Drain<NumberOrName>>,
) -> Response {
    lines(control, move |control, report| {
        control.checkpoint(transport, &numbered(control, transport, request)?, report)
    })
    .await
}

async fn checkpoint_together(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
    Input(request): Input<CommonCheckpoint<NumberOrName>>,
) -> Response {
    lines(control, move |control, report| {
        let CommonCheckpoint { backends, hold_s, timeout_s } = request;
        let numbers = backends.iter().map(|backend| control.backend_number(transport, backend));
        let backends = numbers.collect::<cbd_types::Result<_>>()?;
        control.checkpoint_together(transport, &CommonCheckpoint { backends, hold_s, timeout_s }, report)
    })
    .await
}

async fn drain(
    State(control): State<Shared>,
    Path(transport): Path<u32>,
    Input(request): Input<Drain<NumberOrName>>,
) -> Response {
    lines(control, move |control, report| {
        control.drain(transport, &numbered(control, transport, request)?, report)
    })
    .await
}

enum Event {
    Progress(Progress),
    End(cbd_types::Result<Done>),
}

/// Runs a long operation and responds with its progress as lines. An operation that fails before the first line
/// responds with the status of its error, as a short operation does.
async fn lines(
    control: Shared,
    operation: impl FnOnce(&dyn Control, Report<'_>) -> cbd_types::Result<Done> + Send + 'static,
) -> Response {
    let (sender, mut events) = mpsc::channel(16);
    // A thread of its own: it may take minutes, and short requests must not wait for it if no more threads can be
    // started.
    let started = std::thread::Builder::new().name("cbd-operation".to_owned()).spawn(move || {
        let result = operation(&*control, &mut |progress| match sender.try_send(Event::Progress(progress)) {
            // A client that reads slowly misses progress lines only.
            Ok(()) | Err(mpsc::error::TrySendError::Full(_)) => Flow::Continue,
            Err(mpsc::error::TrySendError::Closed(_)) => Flow::Cancel,
        });
        let _ = sender.blocking_send(Event::End(result));
    });
    if let Err(error) = started {
        let text = format!("there is no thread for this operation: {error}");
        return Failure::from(Error::new(ErrorKind::System, text)).into_response();
    }
    let stopping =
        || Error::new(ErrorKind::Stopped, "the daemon is stopping; dirty data stays in the region");
    let first = match events.recv().await {
        None => return Failure::from(stopping()).into_response(),
        Some(Event::End(Err(error))) => return Failure::from(error).into_response(),
        Some(first) => first,
    };
    let body = tokio_stream::once(first).chain(ReceiverStream::new(events)).map(|event| {
        let line = match event {
            Event::Progress(progress) => ProgressLine::Progress(progress),
            Event::End(Ok(done)) => ProgressLine::Done(done),
            Event::End(Err(error)) => ProgressLine::Error(ErrorBody::from(&error)),
        };
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        Ok::<_, Infallible>(Bytes::from(text))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response()
}
