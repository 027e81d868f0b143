//! The page with plots: its files, and the data that they ask for.
//!
//! Invariants: the files have nothing of this machine, so they are served without the token, and are all that the page
//! loads; a browser that keeps to the policy in [`POLICY`] runs no other script and asks no other host. Answers are
//! bounded. What is shown is a sample that is there already: a browser that asks often costs no further status.
//!
//! Elsewhere: who may ask ([`super::requests`]), the samples ([`super::sampler`], [`crate::history`]), what a browser makes
//! of them (the folder `page` beside this file).

use super::requests::{BUSY, PAGE_TIMEOUT, Serving, failure, unavailable};
use crate::api::{Event, Status};
use crate::history::{Range, Values};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use cbd_types::ErrorKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a browser may do with the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Events that the page shows.
const EVENTS: u64 = 50;

/// A file of the page.
struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// The files of the page.
static FILES: [File; 6] = [
    File { path: "/", kind: HTML, text: include_str!("page/index.html") },
    File { path: "/page/page.js", kind: SCRIPT, text: include_str!("page/page.js") },
    File { path: "/page/plots.js", kind: SCRIPT, text: include_str!("page/plots.js") },
    File { path: "/page/style.css", kind: STYLE, text: include_str!("page/style.css") },
    File { path: "/page/uPlot.iife.min.js", kind: SCRIPT, text: include_str!("page/uPlot.iife.min.js") },
    File { path: "/page/uPlot.min.css", kind: STYLE, text: include_str!("page/uPlot.min.css") },
];

/// Whether a path is that of a file of the page, which has nothing of this machine.
pub(super) fn is_file(path: &str) -> bool {
    FILES.iter().any(|file| file.path == path)
}

/// The paths of the page.
pub(super) fn routes(router: Router<Serving>) -> Router<Serving> {
    let router = FILES.iter().fold(router, |router, file| {
        router.route(file.path, get(async |State(serving): State<Serving>| served(&serving, file)))
    });
    router
        .route("/page/status", get(status))
        .route("/page/history", get(history))
        .route("/page/map", get(map))
}

fn served(serving: &Serving, file: &'static File) -> Response {
    if serving.page().is_none() {
        return not_found(OFF);
    }
    let fixed = HeaderValue::from_static;
    let headers = [
        (header::CONTENT_TYPE, fixed(file.kind)),
        (header::CONTENT_SECURITY_POLICY, fixed(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, fixed("nosniff")),
        (header::REFERRER_POLICY, fixed("no-referrer")),
        // Those of another version of the daemon do not fit its data.
        (header::CACHE_CONTROL, fixed("no-cache")),
    ];
    (headers, file.text).into_response()
}

fn answer(body: &impl Serialize) -> Response {
    let fixed = HeaderValue::from_static;
    let headers =
        [(header::X_CONTENT_TYPE_OPTIONS, fixed("nosniff")), (header::CACHE_CONTROL, fixed("no-store"))];
    (headers, Json(body)).into_response()
}

fn not_found(text: &str) -> Response {
    (StatusCode::NOT_FOUND, failure(text)).into_response()
}

/// The last sample.
#[derive(Serialize)]
struct Sample<'a> {
    /// The run of the daemon.
    instance: &'a str,
    version: &'a str,
    uptime_s: u64,
    /// How long ago the sample was taken, in milliseconds.
    sampled_ms_ago: u64,
    status: &'a Status,
    /// What each backend did in the second before the sample, by transport and UUID.
    latest: BTreeMap<String, Values>,
    /// The last events, the latest last.
    events: Vec<&'a Event>,
}

async fn status(State(serving): State<Serving>) -> Response {
    let Some(page) = serving.page() else { return not_found(OFF) };
    let Some((status, age)) = page.history.last() else { return unavailable(NOT_YET) };
    let backends = status.transports.iter().flat_map(|transport| {
        let id = transport.info.transport_id;
        transport.backends.iter().map(move |backend| (id, backend.info.uuid.as_str()))
    });
    let latest = backends
        .filter_map(|(transport, uuid)| {
            let values = page.history.latest(transport, uuid)?;
            Some((format!("{transport}/{uuid}"), values))
        })
        .collect();
    let newest = page.shown.events.extent().latest;
    let events = page.shown.events.after(newest.saturating_sub(EVENTS), EVENTS as usize).events;
    let events = events.iter().map(|event| &**event).collect();
    answer(&Sample {
        instance: page.shown.events.instance(),
        version: &status.version,
        uptime_s: status.uptime_s,
        sampled_ms_ago: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        status: &status,
        latest,
        events,
    })
}

/// What the page is told where it is off.
pub(super) const OFF: &str =
    "the page is turned off (page of [web] in the configuration); metrics are at /metrics";
const NOT_YET: &str = "the daemon does not have its status yet: it is starting, or a command takes long";

/// A part of the history of a backend.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    transport: u32,
    backend: String,
    range: Wanted,
    #[serde(default)]
    since: u32,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Wanted {
    Hour,
    Week,
}

async fn history(State(serving): State<Serving>, part: Result<Query<Part>, QueryRejection>) -> Response {
    let Some(page) = serving.page() else { return not_found(OFF) };
    let Query(part) = match part {
        Ok(part) => part,
        Err(refused) => return bad_query(&refused),
    };
    let range = match part.range {
        Wanted::Hour => Range::Hour,
        Wanted::Week => Range::Week,
    };
    match page.history.answer(part.transport, &part.backend, range, part.since) {
        Some(found) => answer(&found),
        None => not_found("there is no history of that backend"),
    }
}

/// How fine the map of a backend is to be.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cells {
    transport: u32,
    backend: String,
    #[serde(default)]
    cells: Option<usize>,
}

async fn map(State(serving): State<Serving>, which: Result<Query<Cells>, QueryRejection>) -> Response {
    let Some(page) = serving.page() else { return not_found(OFF) };
    let Query(Cells { transport, backend, cells }) = match which {
        Ok(which) => which,
        Err(refused) => return bad_query(&refused),
    };
    let Some((status, _)) = page.history.last() else { return unavailable(NOT_YET) };
    let of_transport = status.transports.iter().find(|found| found.info.transport_id == transport);
    let known = of_transport.and_then(|found| found.backends.iter().find(|found| found.info.uuid == backend));
    let Some(number) = known.map(|found| found.info.backend_id) else {
        return not_found("there is no such backend");
    };
    let end = tokio::time::Instant::now() + PAGE_TIMEOUT;
    let Some(permit) = serving.permit(end).await else { return unavailable(BUSY) };
    let maps = Arc::clone(&page.shown.map);
    let made = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        maps(transport, number, cells)
    });
    match tokio::time::timeout_at(end, made).await {
        Ok(Ok(Ok(found))) => answer(&found),
        Ok(Ok(Err(error))) if error.kind() == ErrorKind::InvalidArgument => {
            (StatusCode::BAD_REQUEST, failure(&error.line())).into_response()
        }
        Ok(Ok(Err(error))) => unavailable(&error.line()),
        Ok(Err(_)) => unavailable("the map could not be made"),
        Err(_) => unavailable(NOT_YET),
    }
}

/// The answer to a query that is none of this path.
fn bad_query(refused: &QueryRejection) -> Response {
    (StatusCode::BAD_REQUEST, failure(&refused.body_text())).into_response()
}
