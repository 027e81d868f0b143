//! Answers to requests for the map of a device.
//!
//! Invariants: a map is made on a thread where it may block.
//!
//! Elsewhere: what it shows (`crate::manager`).

use super::{Path, Query, Shared, json};
use crate::api::NumberOrName;
use axum::extract::State;
use axum::response::IntoResponse;
use serde::Deserialize;

/// How fine a map is to be.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Cells {
    #[serde(default)]
    cells: Option<usize>,
}

pub(super) async fn map(
    State(control): State<Shared>,
    Path((transport, backend)): Path<(u32, NumberOrName)>,
    Query(which): Query<Cells>,
) -> impl IntoResponse {
    json(control, move |control| {
        let backend = control.backend_number(transport, &backend)?;
        control.map(transport, backend, which.cells)
    })
    .await
}
