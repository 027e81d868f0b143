//! A part of a history as the answer to a request.
//!
//! Invariants: an answer has at most [`POINTS_MAX`] points, and says whether there are more.

use super::point::{COLUMNS, LATENCIES, Point};
use super::{History, Range, minute_of, tick_of};
use serde::Serialize;
use std::collections::BTreeMap;

/// Most points of an answer.
pub const POINTS_MAX: usize = 3600;

/// Points of a backend, as columns of the same length.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct HistoryAnswer {
    /// The resolution: `hour` or `week`.
    pub range: &'static str,
    /// Seconds of a tick.
    pub step_s: u32,
    /// Ticks that the range has at most.
    pub length: u32,
    /// When tick 0 was, in milliseconds since 1970, by the present clock of the day. The point with the tick T was taken
    /// `step_s` times T later.
    pub origin_ms: u64,
    /// The tick to continue behind.
    pub next: u32,
    /// There are more points.
    pub more: bool,
    /// The number of each point; missing ones were not sampled.
    pub ticks: Vec<u32>,
    /// The values by name; null where one is not known.
    pub columns: BTreeMap<&'static str, Vec<Option<u64>>>,
}

impl History {
    /// The points of a backend behind the tick `since`; `None` if it has no history.
    #[must_use]
    pub fn answer(&self, transport: u32, uuid: &str, range: Range, since: u32) -> Option<HistoryAnswer> {
        let (points, now, last) = {
            let inner = self.0.lock();
            let series = inner.find(transport, uuid)?;
            let now_tick = inner.last_at.map_or(0, |(at, _)| tick_of(at));
            let last = match range {
                Range::Hour => now_tick,
                Range::Week => minute_of(now_tick.max(1)),
            };
            // A tick that is yet to come is one of another run.
            let since = if since > last { 0 } else { since };
            (series.ring(range).after(since, last, POINTS_MAX + 1), inner.now(), last)
        };
        let more = points.len() > POINTS_MAX;
        let points = points.get(..POINTS_MAX).unwrap_or(&points);
        let next = points.last().map_or(since.min(last), |point| point.tick);
        let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        Some(HistoryAnswer {
            range: range.name(),
            step_s: range.step_s(),
            length: match range {
                Range::Hour => super::SECONDS,
                Range::Week => super::MINUTES,
            },
            origin_ms: cbd_runtime::wall_ms().saturating_sub(now_ms),
            next,
            more,
            ticks: points.iter().map(|point| point.tick).collect(),
            columns: columns(points),
        })
    }
}

fn columns(points: &[Point]) -> BTreeMap<&'static str, Vec<Option<u64>>> {
    let numbers = COLUMNS
        .iter()
        .enumerate()
        .map(|(at, column)| (column.name, points.iter().map(|point| point.number(at)).collect()));
    let latencies = LATENCIES
        .iter()
        .enumerate()
        .map(|(at, name)| (*name, points.iter().map(|point| point.latency_ns(at)).collect()));
    let span = points.iter().map(|point| Some(point.span_ms())).collect();
    numbers.chain(latencies).chain([("span_ms", span)]).collect()
}
