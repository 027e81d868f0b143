//! Shared state of all front ends of the daemon: memory budgets, counters of refused clients, and a rate limit of log
//! lines that clients cause.
//!
//! Invariants: at most one line of each kind is logged per [`INTERVAL`] for a device; the next line has the number of
//! suppressed ones.

use crate::api::FrontEndStatus;
use crate::config::DaemonConfig;
use crate::web::Problems;
use cbd_export::budget::Budget;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Least time between two lines of one kind.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// Bounds and counters.
#[derive(Debug)]
pub struct FrontEnds {
    /// Bytes that virtual machines may share with the daemon together.
    pub guest_memory: Arc<Budget>,
    /// Bytes that one virtual machine may share for one device.
    pub guest_memory_max: u64,
    /// Bytes that NBD connections may allocate together.
    pub nbd_memory: Arc<Budget>,
    /// Counters of refused and failed clients.
    pub counters: Counters,
    /// Why addresses for metrics are not served.
    pub web_problems: Problems,
}

/// Counters of events since the daemon started.
#[derive(Debug, Default)]
pub struct Counters {
    /// NBD clients that were refused.
    pub nbd_refused: AtomicU64,
    /// NBD clients in the handshake that were disconnected in favour of newer ones.
    pub nbd_gave_way: AtomicU64,
    /// NBD connections that ended with an error.
    pub nbd_failed: AtomicU64,
    /// Front ends of virtual machines that were refused.
    pub vhost_refused: AtomicU64,
    /// Front ends and rings of virtual machines that violated the protocol or a bound.
    pub vhost_failed: AtomicU64,
    /// Connections to the control socket that are open.
    pub control_connections: AtomicU64,
    /// Connections to the control socket that were refused.
    pub control_refused: AtomicU64,
    /// Connections of the listener for metrics that are open.
    pub web_connections: AtomicU64,
    /// Requests for metrics that were refused, and connections that were closed for newer ones.
    pub web_refused: AtomicU64,
}

impl FrontEnds {
    /// The budgets of the configuration.
    #[must_use]
    pub fn new(config: &DaemonConfig) -> Self {
        let total = config.guest_memory_total.unwrap_or_else(guest_memory_total);
        Self {
            guest_memory: Budget::new(total),
            guest_memory_max: config.guest_memory_max.unwrap_or(cbd_vhost::GUEST_MEMORY_MAX).min(total),
            nbd_memory: Budget::new(config.nbd_memory.unwrap_or(cbd_nbd::MEMORY)),
            counters: Counters::default(),
            web_problems: Problems::default(),
        }
    }

    /// The part of `status` about front ends.
    #[must_use]
    pub fn status(&self) -> FrontEndStatus {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FrontEndStatus {
            guest_memory_bytes: self.guest_memory.used(),
            guest_memory_limit: self.guest_memory.limit(),
            guest_memory_refused: self.guest_memory.refusals(),
            nbd_memory_bytes: self.nbd_memory.used(),
            nbd_memory_limit: self.nbd_memory.limit(),
            nbd_refused: count(&self.counters.nbd_refused),
            nbd_gave_way: count(&self.counters.nbd_gave_way),
            nbd_failed: count(&self.counters.nbd_failed),
            vhost_refused: count(&self.counters.vhost_refused),
            vhost_failed: count(&self.counters.vhost_failed),
            control_connections: count(&self.counters.control_connections),
            control_refused: count(&self.counters.control_refused),
            web_connections: count(&self.counters.web_connections),
            web_refused: count(&self.counters.web_refused),
        }
    }
}

/// Half of the address space limit of the process: the rest is for regions, buffers and threads.
fn guest_memory_total() -> u64 {
    crate::system::address_space_limit()
        .map_or(cbd_vhost::GUEST_MEMORY_TOTAL, |limit| (limit / 2).min(cbd_vhost::GUEST_MEMORY_TOTAL))
}

/// Increments a counter.
pub fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The rate limit of one kind of line.
#[derive(Debug, Default)]
pub struct LogRateLimit(parking_lot::Mutex<LimitState>);

#[derive(Debug, Default)]
struct LimitState {
    last: Option<Instant>,
    suppressed: u64,
}

impl LogRateLimit {
    /// Calls `log` with a text about suppressed lines, unless a line was logged within [`INTERVAL`].
    pub fn log(&self, log: impl FnOnce(&str)) {
        if let Some(suppressed) = self.due(Instant::now()) {
            let note = if suppressed == 0 {
                String::new()
            } else {
                format!(" ({suppressed} more in the last {} s)", INTERVAL.as_secs())
            };
            log(&note);
        }
    }

    /// The number of suppressed lines, if a line is due.
    fn due(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        if state.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            state.suppressed += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_lines_one_is_logged_and_the_next_has_the_number_of_suppressed_ones() {
        let (rate_limit, begin) = (LogRateLimit::default(), Instant::now());
        assert_eq!(rate_limit.due(begin), Some(0));
        for _ in 0..3_488 {
            assert_eq!(rate_limit.due(begin + INTERVAL / 2), None);
        }
        assert_eq!(rate_limit.due(begin + INTERVAL), Some(3_488));
        assert_eq!(rate_limit.due(begin + 2 * INTERVAL), Some(0));
    }

    #[test]
    fn budgets_follow_the_configuration_and_one_machine_gets_at_most_the_total() {
        let config = DaemonConfig {
            guest_memory_total: Some(1 << 30),
            guest_memory_max: Some(1 << 40),
            nbd_memory: Some(64 << 20),
            ..DaemonConfig::default()
        };
        let front_ends = FrontEnds::new(&config);
        assert_eq!((front_ends.guest_memory.limit(), front_ends.guest_memory_max), (1 << 30, 1 << 30));
        assert_eq!(front_ends.nbd_memory.limit(), 64 << 20);
        let usual = FrontEnds::new(&DaemonConfig::default());
        assert!(usual.guest_memory.limit() <= 64 << 40);
        assert!(usual.guest_memory_max <= usual.guest_memory.limit());
    }
}
