//! The requests about pins: ranges that stay in the cache of a backend.
//!
//! Elsewhere: what a pin does (`cbd-engine`).

use super::{Input, Path, Shared, json};
use crate::api::{AddPins, NumberOrName, RemovePins};
use axum::extract::State;
use axum::response::IntoResponse;

pub(super) async fn pins(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.backend_number(transport, &backend)?;
        control.pins(transport, backend)
    })
    .await
}

pub(super) async fn add_pins(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<AddPins>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.backend_number(transport, &backend)?;
        control.add_pins(transport, backend, request)
    })
    .await
}

pub(super) async fn remove_pins(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Input(request): Input<RemovePins>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.backend_number(transport, &backend)?;
        control.remove_pins(transport, backend, &request)
    })
    .await
}
