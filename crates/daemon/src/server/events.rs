//! The request for events: those that are kept, and as a stream those that come.
//!
//! Invariants: a client that does not read gets a gap and delays no other client. A stream that follows ends when its
//! client disconnects, or has not read for [`READ_LIMIT`], and with the daemon.

use super::{Failure, Query, Shared, run};
use crate::api::{Event, EventLine, EventsEnd, EventsGap, NumberOrName, Severity};
use crate::events::{Batch, Events, Follower};
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{self, Sender};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// Events that are taken from the record at a time.
const BATCH: usize = 64;
/// Lines that wait for a client to read them, besides what the socket holds.
const LINES: usize = 16;
/// How long a client may leave these lines unread.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// Which events.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsOf {
    /// Those behind this number.
    #[serde(default)]
    since: Option<u64>,
    /// The run of the daemon to which `since` belongs; all events of this one, if it is another one.
    #[serde(default)]
    instance: Option<String>,
    /// Those from this time on, in milliseconds since 1970 UTC.
    #[serde(default)]
    since_ms: Option<u64>,
    /// Also those that come.
    #[serde(default)]
    follow: bool,
    /// The transport of `backend`; without that, those of this transport.
    #[serde(default)]
    transport: Option<u32>,
    /// Those of this backend.
    #[serde(default)]
    backend: Option<NumberOrName>,
    /// Those that are not milder than this.
    #[serde(default)]
    severity: Severity,
}

/// The events that a client wants.
struct Wanted {
    transport: Option<u32>,
    backend: Option<u32>,
    severity: Severity,
}

impl Wanted {
    fn has(&self, event: &Event) -> bool {
        event.severity >= self.severity
            && self.transport.is_none_or(|transport| event.transport == Some(transport))
            && self.backend.is_none_or(|backend| event.backend == Some(backend))
    }
}

pub(super) async fn events(State(control): State<Shared>, Query(which): Query<EventsOf>) -> Response {
    let events = control.events();
    let EventsOf { since, instance, since_ms, follow, transport, backend, severity } = which;
    // A request that goes on was answered before, maybe by a daemon that had the object.
    let goes_on = instance.is_some();
    let found = run(control, move |control| {
        let Some(on) = transport.or(backend.as_ref().map(|_| 0)) else { return Ok((None, None)) };
        let number = backend.map(|backend| control.backend_number(on, &backend)).transpose()?;
        if !goes_on && !control.events().has_of(on, number) {
            control.check_object(on, number)?;
        }
        Ok((Some(on), number))
    });
    let wanted = match found.await {
        Ok((transport, backend)) => Wanted { transport, backend, severity },
        Err(failure) => return failure.into_response(),
    };
    let follower = match follow.then(|| events.follow()).transpose() {
        Ok(follower) => follower,
        Err(error) => return Failure::from(error).into_response(),
    };
    let is_other = instance.is_some_and(|instance| instance != events.instance());
    // What is no longer kept when a request names no place is not missed.
    let cursor = match (since, since_ms) {
        (Some(since), _) if !is_other => since,
        (_, Some(time_ms)) => events.before(time_ms),
        _ => events.extent().oldest - 1,
    };
    let (sender, lines) = mpsc::channel(LINES);
    tokio::spawn(send(events, sender, cursor, wanted, follower));
    let body = ReceiverStream::new(lines).map(Ok::<Bytes, Infallible>);
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(body)).into_response()
}

/// Sends the events behind `cursor`; with a follower also those that come.
async fn send(
    events: Arc<Events>,
    sender: Sender<Bytes>,
    mut cursor: u64,
    wanted: Wanted,
    follower: Option<Follower>,
) {
    let line = async |line: EventLine| {
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        matches!(tokio::time::timeout(READ_LIMIT, sender.send(text.into())).await, Ok(Ok(())))
    };
    let mut latest = events.subscribe();
    if !line(EventLine::Begin(events.extent())).await {
        return;
    }
    loop {
        let is_ending = events.is_ending();
        latest.mark_unchanged();
        let Batch { dropped, events: batch, cursor: behind } = events.after(cursor, BATCH);
        cursor = behind;
        if dropped > 0 && !line(EventLine::Gap(EventsGap { dropped })).await {
            return;
        }
        let is_empty = batch.is_empty();
        for event in batch.into_iter().filter(|event| wanted.has(event)) {
            if !line(EventLine::Event(Event::clone(&event))).await {
                return;
            }
        }
        if !is_empty {
            continue;
        }
        if follower.is_none() {
            line(EventLine::End(EventsEnd {})).await;
            return;
        }
        if is_ending {
            return;
        }
        tokio::select! {
            changed = latest.changed() => if changed.is_err() { return },
            () = sender.closed() => return,
        }
    }
}
