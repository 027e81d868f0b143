//! What each backend did: an hour by seconds and a week by minutes, for the page with plots ([`crate::web`]).
//!
//! Invariants: the memory is bounded: at most [`SERIES_MAX`] backends, [`BYTES_PER_SERIES`] for each, taken as the time
//! passes. Intervals come from a clock that never jumps; the clock of the day is only a label. A count is the difference
//! of two figures of the status, so the sum over a range is what the status and the metrics counted meanwhile; where the
//! counters have begun again it is absent.
//!
//! Elsewhere: the figures ([`crate::api`]), the thread that takes samples ([`crate::web`]).

mod answer;
mod interval;
mod point;
mod ring;
#[cfg(test)]
mod tests;

pub use answer::{HistoryAnswer, POINTS_MAX};
pub use point::{COLUMNS, LATENCIES, Values};

use crate::api::{BackendStatus, Status};
use interval::{Interval, Seen};
use parking_lot::Mutex;
use point::Point;
use ring::Ring;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Seconds that are kept one by one.
pub const SECONDS: u32 = 3600;
/// Minutes that are kept one by one.
pub const MINUTES: u32 = 7 * 24 * 60;
/// Seconds of a minute.
const MINUTE: u32 = 60;
/// Most backends whose history is kept.
pub const SERIES_MAX: usize = 32;
/// Most bytes of the points of a backend.
pub const BYTES_PER_SERIES: usize = (SECONDS + MINUTES) as usize * size_of::<Point>();
/// Time for which the history of a backend is kept that has disappeared.
pub const ABSENT_MAX: Duration = Duration::from_secs(3600);

/// A resolution.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Range {
    /// The last hour, by seconds.
    Hour,
    /// The last week, by minutes.
    Week,
}

impl Range {
    /// Its word in requests and answers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Week => "week",
        }
    }

    /// Seconds of a point.
    #[must_use]
    pub const fn step_s(self) -> u32 {
        match self {
            Self::Hour => 1,
            Self::Week => MINUTE,
        }
    }
}

/// The history of one run of the daemon.
#[derive(Debug, Default)]
pub struct History(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// When the last sample was taken: by the clock of the samples, and by that of the system.
    last_at: Option<(Duration, Instant)>,
    last: Option<Arc<Status>>,
    series: Vec<Series>,
}

/// The history of a backend.
#[derive(Debug)]
struct Series {
    /// Number of the transport, and UUID of the backend.
    key: (u32, String),
    /// When it was last in a status.
    seen_at: Duration,
    seen: Seen,
    /// The last second.
    latest: Option<Point>,
    seconds: Ring,
    minutes: Ring,
    /// The number of the minute that has not ended, and what it has had so far.
    minute: (u32, Option<Interval>),
}

impl Series {
    fn new(transport: u32, backend: &BackendStatus, at: Duration) -> Self {
        Self {
            key: (transport, backend.info.uuid.clone()),
            seen_at: at,
            seen: Seen::default(),
            latest: None,
            seconds: Ring::new(SECONDS),
            minutes: Ring::new(MINUTES),
            minute: (minute_of(tick_of(at)), None),
        }
    }

    /// Ends the minute if the second `tick` is not part of it.
    fn end_minute(&mut self, tick: u32) {
        let number = minute_of(tick);
        if self.minute.0 == number {
            return;
        }
        if let Some(interval) = self.minute.1.take() {
            self.minutes.put(interval.point(self.minute.0));
        }
        self.minute.0 = number;
    }

    fn sample(&mut self, backend: &BackendStatus, at: Duration, span: Duration) {
        let (tick, now) = (tick_of(at), Seen::from(backend));
        let interval = Interval::between(&self.seen, &now, backend, span);
        (self.seen, self.seen_at) = (now, at);
        let point = interval.point(tick);
        self.latest = Some(point);
        self.seconds.put(point);
        match &mut self.minute.1 {
            Some(minute) => minute.add(&interval),
            empty => *empty = Some(interval),
        }
    }

    const fn ring(&self, range: Range) -> &Ring {
        match range {
            Range::Hour => &self.seconds,
            Range::Week => &self.minutes,
        }
    }
}

/// The number of the second that ends at or after `at`, from 1 on.
fn tick_of(at: Duration) -> u32 {
    u32::try_from(at.as_secs()).unwrap_or(u32::MAX).saturating_add(1)
}

/// The number of the minute of a second, from 1 on.
const fn minute_of(tick: u32) -> u32 {
    (tick - 1) / MINUTE + 1
}

impl History {
    /// The time of this moment by the clock of the samples.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.0.lock().now()
    }

    /// Takes a sample in: the status `at` this time. Times that do not increase are left out.
    pub fn sample(&self, status: Arc<Status>, at: Duration) {
        let mut inner = self.0.lock();
        let before = inner.last_at.map(|(before, _)| before);
        if before.is_some_and(|before| tick_of(before) >= tick_of(at)) {
            return;
        }
        let span = before.map_or(Duration::ZERO, |before| at - before);
        inner.last_at = Some((at, Instant::now()));
        for series in &mut inner.series {
            series.end_minute(tick_of(at));
        }
        for transport in &status.transports {
            for backend in &transport.backends {
                let Some(series) = inner.series_of(transport.info.transport_id, backend, at) else {
                    continue;
                };
                series.sample(backend, at, span);
            }
        }
        inner.series.retain(|series| at.saturating_sub(series.seen_at) <= ABSENT_MAX);
        inner.last = Some(status);
    }

    /// The status of the last sample, and how long ago it was taken.
    #[must_use]
    pub fn last(&self) -> Option<(Arc<Status>, Duration)> {
        let inner = self.0.lock();
        Some((Arc::clone(inner.last.as_ref()?), inner.last_at?.1.elapsed()))
    }

    /// What a backend did in the last second; `None` if its history is not kept, or it was not in the last sample.
    #[must_use]
    pub fn latest(&self, transport: u32, uuid: &str) -> Option<Values> {
        let inner = self.0.lock();
        let at = inner.last_at?.0;
        let series = inner.find(transport, uuid).filter(|series| series.seen_at == at)?;
        series.latest.map(|point| point.values())
    }

    /// Bytes of the points of all backends.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.lock().series.iter().map(|series| series.seconds.bytes() + series.minutes.bytes()).sum()
    }
}

impl Inner {
    fn now(&self) -> Duration {
        self.last_at.map_or(Duration::ZERO, |(at, instant)| at + instant.elapsed())
    }

    fn find(&self, transport: u32, uuid: &str) -> Option<&Series> {
        self.series.iter().find(|series| series.key.0 == transport && series.key.1 == uuid)
    }

    /// The series of a backend. A new one takes the place of the one that has been absent for longest, if there are as many
    /// as may be.
    fn series_of(&mut self, transport: u32, backend: &BackendStatus, at: Duration) -> Option<&mut Series> {
        let is_it = |series: &Series| series.key.0 == transport && series.key.1 == backend.info.uuid;
        if let Some(index) = self.series.iter().position(is_it) {
            return self.series.get_mut(index);
        }
        if self.series.len() >= SERIES_MAX {
            let oldest = self.series.iter().enumerate().min_by_key(|(_, series)| series.seen_at)?.0;
            let absent = at.saturating_sub(self.series.get(oldest)?.seen_at);
            // One that was in the last sample has not disappeared: it may come later in this one.
            if absent <= Duration::from_secs(u64::from(MINUTE)) {
                return None;
            }
            self.series.swap_remove(oldest);
        }
        self.series.push(Series::new(transport, backend, at));
        self.series.last_mut()
    }
}
