//! The request for the sample of the requests of a backend.
//!
//! Elsewhere: the sample itself (`cbd-device`).

use super::{Path, Shared, json};
use crate::api::NumberOrName;
use axum::extract::State;
use axum::response::IntoResponse;

/// `sample`
pub(super) async fn sample(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.backend_number(transport, &backend)?;
        control.sample(transport, backend)
    })
    .await
}
