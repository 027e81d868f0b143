//! How much writeback has in flight to the backing device: about what the device completes in two seconds.
//!
//! What is in flight cannot be called back, so a stop waits for it, and so does a client's request behind it. The bound is that of
//! a transport protocol: it grows by what completes while the device keeps up (slow start), and falls to the measured rate when
//! more was in flight than the device completes in [`TIME_MS`]. A device for which the whole depth of the queue takes less time is
//! never limited. Bytes and requests are bounded alike: a device may be slow to move bytes, or slow to begin an operation.
//!
//! Invariants: some requests may always be in flight, however slow the device is; the bound falls only on a device that has shown
//! that it is slow. What clients move meanwhile counts as completed: a device that is busy for them is not a slow one.

use super::{Content, REQUEST_MAX, SPARE_BYTES, requests::ZERO_MAX};
use crate::{cache::Moved, worker::pace::averaged};
use cbd_types::BackingOp;

/// What is in flight completes in about this time.
const TIME_MS: u64 = 2000;
/// The bound falls in about this time.
const FALL_MS: u64 = 500;
/// The device is measured over this time, or until as much has completed as may be in flight.
const INTERVAL_MS: u64 = 100;
/// These bytes and requests may always be in flight, and no more at first.
const BYTES_LEAST: u64 = 256 << 10;
const REQUESTS_LEAST: u64 = 8;
/// The bound of requests does not grow further: no queue is that deep.
const REQUESTS_MOST: u64 = 1024;
/// The bound of zeroes does not grow further: as many requests as writeback has in flight.
const ZEROES_MOST: u64 = 64 * ZERO_MAX;
/// The bound of bytes has room for two requests, unless they would be smaller than this.
const REQUEST_LEAST: u64 = 64 << 10;

/// The bound of one quantity.
#[derive(Debug)]
struct Bound {
    least: u64,
    most: u64,
    /// The present bound.
    present: u64,
    in_flight: u64,
    /// The most that was in flight in this interval.
    peak: u64,
    /// What has completed in this interval.
    completed: u64,
}

impl Bound {
    const fn new(least: u64, most: u64) -> Self {
        Self { least, most, present: least, in_flight: 0, peak: 0, completed: 0 }
    }

    const fn has_room(&self) -> bool {
        self.in_flight < self.present
    }

    fn begin(&mut self, amount: u64) {
        self.in_flight = self.in_flight.saturating_add(amount);
        self.peak = self.peak.max(self.in_flight);
    }

    const fn end(&mut self, amount: u64) {
        self.in_flight = self.in_flight.saturating_sub(amount);
        self.completed = self.completed.saturating_add(amount);
    }

    /// Ends an interval, in which the device was busy for `ms` milliseconds and clients have moved `others`.
    fn measure(&mut self, others: u64, ms: u64) {
        let completed = self.completed.saturating_add(others);
        // What the device completes in the time; in no time it completes anything.
        let can = completed.saturating_mul(TIME_MS).checked_div(ms).unwrap_or(u64::MAX);
        let present = if can >= self.present {
            can.min(self.present.saturating_add(self.completed))
        } else if self.peak > can {
            averaged(self.present, completed.saturating_mul(TIME_MS) / 1000, ms, FALL_MS).max(can)
        } else {
            self.present
        };
        self.present = present.clamp(self.least, self.most);
        (self.peak, self.completed) = (self.in_flight, 0);
    }
}

/// What is in flight of operations of one kind.
#[derive(Debug)]
struct Window {
    bytes: Bound,
    requests: Bound,
    /// The milliseconds of this interval in which something was in flight, without the present ones.
    busy_ms: u64,
    /// Since when something is in flight and not counted there.
    since_ms: u64,
    /// What clients have moved in those milliseconds, and what they had moved at their end.
    moved: Moved,
    others: Moved,
}

impl Window {
    const fn new(bytes_most: u64) -> Self {
        Self {
            bytes: Bound::new(BYTES_LEAST, bytes_most),
            requests: Bound::new(REQUESTS_LEAST, REQUESTS_MOST),
            busy_ms: 0,
            since_ms: 0,
            moved: Moved { requests: 0, bytes: 0 },
            others: Moved { requests: 0, bytes: 0 },
        }
    }

    const fn has_room(&self) -> bool {
        self.bytes.has_room() && self.requests.has_room()
    }

    fn begin(&mut self, bytes: u64, others: Moved, now_ms: u64) {
        if self.requests.in_flight == 0 {
            (self.since_ms, self.others) = (now_ms, others);
        }
        self.bytes.begin(bytes);
        self.requests.begin(1);
    }

    fn end(&mut self, bytes: u64) {
        self.bytes.end(bytes);
        self.requests.end(1);
    }

    /// Ends the interval if it is over. What has completed at one time is measured at once.
    fn measure(&mut self, others: Moved, now_ms: u64) {
        if self.requests.completed == 0 {
            return;
        }
        self.busy_ms = self.busy_ms.saturating_add(now_ms.saturating_sub(self.since_ms));
        self.moved.requests += others.requests.saturating_sub(self.others.requests);
        self.moved.bytes += others.bytes.saturating_sub(self.others.bytes);
        (self.since_ms, self.others) = (now_ms, others);
        let is_over = self.busy_ms >= INTERVAL_MS
            || self.bytes.completed >= self.bytes.present
            || self.requests.completed >= self.requests.present;
        if is_over {
            self.requests.measure(self.moved.requests, self.busy_ms);
            self.bytes.measure(self.moved.bytes, self.busy_ms);
            (self.busy_ms, self.moved) = (0, Moved::default());
        }
    }
}

/// What writeback has in flight, and how much it may be. Data and zeroes have bounds of their own: the one is moved, the other
/// mostly not.
#[derive(Debug)]
pub(super) struct InFlight {
    data: Window,
    zeroes: Window,
}

impl InFlight {
    /// Nothing is in flight.
    pub(super) const fn new() -> Self {
        Self { data: Window::new(SPARE_BYTES as u64), zeroes: Window::new(ZEROES_MOST) }
    }

    #[cfg(test)]
    pub(super) fn assume_a_fast_disk(&mut self) {
        for window in [&mut self.data, &mut self.zeroes] {
            window.bytes.present = window.bytes.most;
            window.requests.present = window.requests.most;
        }
    }

    /// Whether a request with this content, or one of any content, may be submitted.
    pub(super) const fn has_room(&self, content: Option<&Content>) -> bool {
        match content {
            Some(Content::Data { .. }) => self.data.has_room(),
            Some(Content::Zeroes | Content::Discard) => self.zeroes.has_room(),
            None => self.data.has_room() && self.zeroes.has_room(),
        }
    }

    /// The most bytes of the next request with this content.
    pub(super) fn request_max(&self, content: &Content) -> u64 {
        let (window, most) = match content {
            Content::Data { .. } => (&self.data, REQUEST_MAX),
            Content::Zeroes | Content::Discard => (&self.zeroes, ZERO_MAX),
        };
        (window.bytes.present / 2).clamp(REQUEST_LEAST, most)
    }

    /// A request is submitted. `others`: what clients have moved so far.
    pub(super) fn begin(&mut self, op: &BackingOp, others: Moved, now_ms: u64) {
        if let Some((window, bytes)) = self.window_of(op) {
            window.begin(bytes, others, now_ms);
        }
    }

    /// A request has completed, whether it succeeded or not.
    pub(super) fn end(&mut self, op: &BackingOp) {
        if let Some((window, bytes)) = self.window_of(op) {
            window.end(bytes);
        }
    }

    /// Adapts the bounds, after the requests that have completed by now have ended. `others`: what clients have moved so far.
    pub(super) fn measure(&mut self, others: Moved, now_ms: u64) {
        self.data.measure(others, now_ms);
        self.zeroes.measure(others, now_ms);
    }

    /// The window of an operation, and its bytes; none for what is not bounded.
    fn window_of(&mut self, op: &BackingOp) -> Option<(&mut Window, u64)> {
        match op {
            BackingOp::Write { buffer, .. } => Some((&mut self.data, buffer.len() as u64)),
            BackingOp::WriteZeroes { range } | BackingOp::Discard { range } => {
                Some((&mut self.zeroes, range.len()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
