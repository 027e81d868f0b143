//! Requests about the hosts of a transport.
//!
//! Invariants: a host is cleared on a thread where it may block.
//!
//! Elsewhere: what the answers say (`crate::manager`).

use super::{Input, NumberOrName, Path, Shared, json, lines};
use crate::api::{ClearHost, MoveBackend};
use axum::extract::State;
use axum::response::{IntoResponse, Response};

pub(super) async fn hosts(State(control): State<Shared>, Path(transport): Path<u32>) -> impl IntoResponse {
    json(control, move |control| control.hosts(transport)).await
}

pub(super) async fn clear(
    State(control): State<Shared>,
    Path((transport, host)): Path<(u32, u32)>,
    Input(request): Input<ClearHost>,
) -> impl IntoResponse {
    json(control, move |control| control.clear_host(transport, host, &request)).await
}

pub(super) async fn move_backend(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<MoveBackend>,
) -> Response {
    lines(control, move |control, report| {
        let backend = control.any_backend_number(transport, &backend)?;
        control.move_backend(transport, backend, &request, report)
    })
    .await
}
