//! The requests to verify a range, and those about scrubs.

use super::{Input, Path, Shared, json, lines};
use crate::api::{NumberOrName, ScrubRequest, VerifyRange};
use axum::extract::State;
use axum::response::{IntoResponse, Response};

pub(super) async fn verify(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<VerifyRange>,
) -> Response {
    lines(control, move |control, report| {
        let backend = control.backend_number(transport, &backend)?;
        control.verify(transport, backend, request, report)
    })
    .await
}

pub(super) async fn scrub(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.backend_number(transport, &backend)?;
        control.scrub(transport, backend)
    })
    .await
}

pub(super) async fn set_scrub(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<ScrubRequest>,
) -> Response {
    lines(control, move |control, report| {
        let backend = control.backend_number(transport, &backend)?;
        control.set_scrub(transport, backend, &request, report)
    })
    .await
}
