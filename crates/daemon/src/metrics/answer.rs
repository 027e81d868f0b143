//! A page of metrics as the answer to a request.
//!
//! Invariants: a thread of its own makes the page, and ends when the client is gone. It is ahead of a slow client by
//! a bounded number of parts.

use super::render_to;
use super::text::Format;
use crate::api::Status;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use cbd_types::{Error, ErrorKind, Result};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// Parts of a page that wait for a slow client.
const PARTS_WAITING: usize = 2;

/// The answer to a request with these headers, as soon as its first part is there. The thread holds `held` until it
/// ends.
///
/// # Errors
/// Those of `source`, and [`ErrorKind::System`] if there is no thread.
pub(crate) async fn answer<T: Send + 'static>(
    source: impl FnOnce() -> Result<Status> + Send + 'static,
    headers: &HeaderMap,
    held: T,
) -> Result<Response> {
    let format = format_for(headers);
    let (sender, mut parts) = mpsc::channel::<Result<String>>(PARTS_WAITING);
    let make = move || {
        let _held = held;
        match source() {
            Ok(status) => render_to(&status, format, &mut |part| sender.blocking_send(Ok(part)).is_ok()),
            Err(error) => drop(sender.blocking_send(Err(error))),
        }
    };
    std::thread::Builder::new().name("cbd-metrics".to_owned()).spawn(make).map_err(|error| {
        Error::new(ErrorKind::System, format!("there is no thread for this request: {error}"))
    })?;
    let first = parts.recv().await;
    let first = first.ok_or_else(|| Error::new(ErrorKind::Stopped, "the daemon is stopping"))??;
    let body = tokio_stream::once(Ok(first)).chain(ReceiverStream::new(parts));
    let body = Body::from_stream(body.map(|part| part.map(Bytes::from)));
    let headers = [
        (header::CONTENT_TYPE, format.media_type()),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, body).into_response())
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
}
