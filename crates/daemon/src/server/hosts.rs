//! Requests about the hosts of a transport.
//!
//! Invariants: a host is cleared on a thread where it may block.
//!
//! Elsewhere: what the answers say (`crate::manager`).

use super::{Input, Path, Shared, json};
use crate::api::ClearHost;
use axum::extract::State;
use axum::response::IntoResponse;

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
