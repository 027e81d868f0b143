//! Waiting until writeback has reached an epoch, with progress reports and a timeout.
//!
//! Invariants: a drain succeeds only when the backing device has all data up to the epoch: no range is parked and none is
//! quarantined. The background worker wakes the waiting thread. A wait ends when the epoch is on the backing device, when
//! there was no progress for the caller's timeout, or when the caller cancels it. No dirty data is dropped in any case.

use crate::Rounds;
use crate::size::typed_size;
use cbd_engine::{Cache, CacheStatus, Environment, REQUEST_MAX};
use cbd_types::{BackendId, ByteRange, Epoch, Error, ErrorKind};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Longest time between two calls of `report`.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// The minimum `writeback_rate` that a user can set, in bytes a second. At a lower rate the largest request takes longer than
/// half of the default timeout of a drain, so that no drain and no stop would reliably end. Regions that hold a lower rate
/// are served with it.
pub const WRITEBACK_RATE_MIN: u64 = 32 << 10;

/// Maximum number of ranges that an error lists.
const NAMED_MAX: usize = 8;

/// A drain that was requested of a cache.
#[derive(Clone, Copy, Debug)]
pub struct DrainRequest {
    epoch: Epoch,
    /// How often parked ranges had been retried before the request: the wait ends only when they were retried after it.
    parked_attempts: u64,
    /// Whether the wait ends only when a change to another mode has ended, too.
    settles: bool,
}

impl DrainRequest {
    /// Requests that `cache` writes everything that has been written to it until now to the backing device.
    #[must_use]
    pub fn new<E: Environment>(cache: &Cache<E>) -> Self {
        // Read before the request, which lets the worker retry parked ranges at once.
        let parked_attempts = cache.status().parked_attempts;
        Self { epoch: cache.request_drain(), parked_attempts, settles: false }
    }

    /// As [`new`](Self::new), and that the mode to which the cache changes is in force. Until then writes may wait for writeback, and
    /// a thread that holds the route of the device would make all other requests wait for them.
    #[must_use]
    pub fn until_settled<E: Environment>(cache: &Cache<E>) -> Self {
        Self { settles: true, ..Self::new(cache) }
    }

    /// What was requested before: that `cache` writes everything up to `epoch` to the backing device.
    #[must_use]
    pub fn of<E: Environment>(cache: &Cache<E>, epoch: Epoch) -> Self {
        Self { epoch, parked_attempts: cache.status().parked_attempts, settles: false }
    }
}

/// Progress of a wait.
#[derive(Clone, Debug)]
pub struct DrainProgress {
    /// Bytes that were dirty when the wait began.
    pub dirty_bytes_at_start: u64,
    /// Bytes that are dirty.
    pub dirty_bytes: u64,
    /// Bytes that were written to the backing device since the wait began.
    pub written_bytes: u64,
    /// Time since the wait began.
    pub elapsed: Duration,
    /// The current error of the backing device.
    pub trouble: Option<String>,
}

/// Why a wait ended before its epoch was on the backing device.
#[derive(Debug)]
pub enum NotDrained {
    /// Everything is written except ranges that the backing device refuses, which are parked, and ranges that are
    /// damaged in the cache, which are quarantined.
    Lacks(Box<CacheStatus>),
    /// There was no progress for the timeout.
    GaveUp {
        /// The timeout.
        timeout: Duration,
        /// Bytes that are still dirty.
        dirty_bytes: u64,
        /// Bytes that are still dirty or quarantined.
        missing_bytes: u64,
        /// The current error of the backing device.
        trouble: Option<String>,
        /// The operation of the backing device that has not completed for a long time.
        silence: Option<String>,
        /// The setting `writeback_rate` in bytes a second, if one request at this rate takes as long as the timeout.
        limit: Option<u64>,
    },
    /// The caller cancelled the wait.
    Ended(Error),
}

/// Waits until the background worker with these `rounds` has written everything up to `request` to the backing device; returns
/// the bytes that were written meanwhile. `silence` names an operation of the disk that has not completed for a long time.
/// `report` is called after each round, and at least every 200 ms.
///
/// # Errors
/// [`NotDrained`] with the reason.
pub fn until_drained<E: Environment>(
    cache: &Cache<E>,
    rounds: &Rounds,
    request: DrainRequest,
    timeout: Duration,
    silence: &dyn Fn() -> Option<String>,
    report: &mut dyn FnMut(&DrainProgress) -> ControlFlow<Error>,
) -> Result<u64, NotDrained> {
    let begun = Instant::now();
    let rounds = rounds.watch();
    let start = cache.status();
    let mut progressed = begun;
    let (mut least_dirty, mut written, mut drained) =
        (start.dirty_bytes, start.written_back_bytes, start.drained_epoch);
    loop {
        let round = rounds.ended();
        // Read before the status: a batch quarantines the ranges that it found damaged before it counts as drained.
        let is_drained = cache.is_drained(request.epoch) && !(request.settles && cache.is_changing_mode());
        let status = cache.status();
        let written_bytes = status.written_back_bytes.saturating_sub(start.written_back_bytes);
        if is_drained {
            // The drain request makes the worker retry parked ranges; here the retry has ended.
            if status.parked.is_empty() || status.parked_attempts > request.parked_attempts {
                return if status.parked.is_empty() && status.quarantined_bytes == 0 {
                    Ok(written_bytes)
                } else {
                    Err(NotDrained::Lacks(Box::new(status)))
                };
            }
        }
        // Written bytes count as progress only while writes to the disk succeed, since retries of failing writes count as
        // written too.
        let writes = status.written_back_bytes > written && status.backing_trouble.is_none();
        if status.drained_epoch > drained || status.dirty_bytes < least_dirty || writes {
            progressed = Instant::now();
        }
        (drained, written) = (status.drained_epoch, status.written_back_bytes);
        least_dirty = least_dirty.min(status.dirty_bytes);
        let progress = DrainProgress {
            dirty_bytes_at_start: start.dirty_bytes,
            dirty_bytes: status.dirty_bytes,
            written_bytes,
            elapsed: begun.elapsed(),
            trouble: status.backing_trouble.as_ref().map(|trouble| trouble.error.clone()),
        };
        if let ControlFlow::Break(error) = report(&progress) {
            return Err(NotDrained::Ended(error));
        }
        if progressed.elapsed() >= timeout {
            return Err(NotDrained::GaveUp {
                timeout,
                dirty_bytes: status.dirty_bytes,
                missing_bytes: status.missing_bytes(),
                trouble: progress.trouble,
                silence: silence(),
                limit: limit_that_delays(cache.settings().writeback_rate, timeout, status.dirty_bytes),
            });
        }
        rounds.wait_for_next(round, timeout.saturating_sub(progressed.elapsed()).min(REPORT_INTERVAL));
    }
}

/// The limit `rate` of writeback (0 for none), if it can cause a timeout without progress: a request waits until the rate
/// permits all bytes of the previous one.
fn limit_that_delays(rate: u64, timeout: Duration, dirty_bytes: u64) -> Option<u64> {
    let allowed = u128::from(rate) * timeout.as_millis() / 1000;
    (rate > 0 && allowed <= u128::from(REQUEST_MAX) && dirty_bytes > 0).then_some(rate)
}

/// Refuses a limit of writeback with which no drain could end; 0 means no limit.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`], with the value and the minimum.
pub fn check_writeback_rate(rate: u64) -> Result<(), Error> {
    if rate == 0 || rate >= WRITEBACK_RATE_MIN {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidArgument,
        format!(
            "writeback_rate is {} (bytes a second), and {} is the least: a drain would end by its timeout; give that or more, or \
             auto for no limit",
            typed_size(rate),
            typed_size(WRITEBACK_RATE_MIN)
        ),
    ))
}

impl NotDrained {
    /// The error of backend `id`; `give_up` describes how the user can discard this many bytes, if that is possible.
    pub fn into_error(self, id: BackendId, give_up: impl FnOnce(u64) -> String) -> Error {
        match self {
            Self::Ended(error) => error,
            Self::Lacks(status) => {
                let kind = if status.parked.is_empty() { ErrorKind::Media } else { ErrorKind::Backing };
                Error::new(
                    kind,
                    format!(
                        "backend {id} could not be drained: {}; all else is on the backing device. Repeat when that is done; status \
                         lists the ranges{}",
                        lacking(&status).join("; and "),
                        give_up(status.missing_bytes())
                    ),
                )
            }
            Self::GaveUp {
                timeout, dirty_bytes, trouble: None, silence: None, limit: Some(rate), ..
            } => Error::new(
                ErrorKind::TimedOut,
                format!(
                    "backend {id} could not be drained: nothing progressed for {} s, because the setting writeback_rate limits \
                     writeback to {rate} bytes a second; {dirty_bytes} bytes are dirty and stay in the cache, and the backend goes on. \
                     Lift the limit (cbdctrl set -b {id} writeback_rate=auto) and repeat, or repeat with a longer timeout",
                    timeout.as_secs()
                ),
            ),
            Self::GaveUp { timeout, dirty_bytes, missing_bytes, trouble, silence, .. } => {
                let (kind, why) = match (trouble, silence) {
                    (Some(error), _) => (ErrorKind::Backing, format!("the backing device fails: {error}")),
                    (None, Some(silence)) => {
                        (ErrorKind::TimedOut, format!("the backing device does not answer: {silence}"))
                    }
                    (None, None) => {
                        (ErrorKind::TimedOut, "the backing device has not taken anything".to_owned())
                    }
                };
                Error::new(
                    kind,
                    format!(
                        "backend {id} could not be drained: nothing progressed for {} s ({why}); {dirty_bytes} bytes are dirty and stay \
                         in the cache, and the backend goes on. Put the disk right and repeat, with a longer timeout if it is only \
                         slow{}",
                        timeout.as_secs(),
                        give_up(missing_bytes)
                    ),
                )
            }
        }
    }
}

/// Descriptions of the data that a drained backing device lacks, and the actions that the user can take.
#[must_use]
pub fn lacking(status: &CacheStatus) -> Vec<String> {
    let mut lacking = Vec::new();
    if !status.parked.is_empty() {
        let error = status.parked_error.as_deref().unwrap_or("not tried yet");
        lacking.push(format!(
            "the backing device refuses {} ranges, {} bytes: {} ({error}); they are parked in the cache, which keeps them: put the \
             disk right or overwrite them",
            status.parked.len(),
            status.parked_bytes,
            first_of(&status.parked)
        ));
    }
    if status.quarantined_bytes > 0 {
        let ranges: Vec<ByteRange> = status.damaged.iter().map(|damaged| damaged.range).collect();
        lacking.push(format!(
            "{} ranges, {} bytes, are quarantined because their data in the cache is damaged: {}; reads of them fail, and the \
             backing device has older data there: overwrite them",
            ranges.len(),
            status.quarantined_bytes,
            first_of(&ranges)
        ));
    }
    lacking
}

/// A text that names the first of many ranges.
fn first_of(ranges: &[ByteRange]) -> String {
    let named: Vec<String> = ranges.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    let more = ranges.len() - named.len();
    if more == 0 { named.join(", ") } else { format!("{} and {more} more", named.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProcessEnvironment;
    use crate::worker::tests::cache;
    use cbd_engine::{CacheMode, Settings};
    use std::sync::Arc;

    #[test]
    fn a_wait_for_a_mode_ends_only_when_it_is_in_force() {
        let settings = Settings { cache_mode: CacheMode::Writethrough, ..Settings::default() };
        // No background worker runs, so the mode is never in force.
        let cache = cache(&Arc::new(ProcessEnvironment::new()), settings);
        let (rounds, timeout) = (Rounds::default(), Duration::from_millis(20));
        let wait = |request| {
            until_drained(&cache, &rounds, request, timeout, &|| None, &mut |_| ControlFlow::Continue(()))
        };
        let drained = DrainRequest::of(&cache, Epoch(0));
        wait(drained).expect("nothing is dirty");
        let error = wait(DrainRequest { settles: true, ..drained }).expect_err("the mode is not in force");
        assert!(matches!(error, NotDrained::GaveUp { dirty_bytes: 0, .. }), "{error:?}");
        assert!(DrainRequest::until_settled(&cache).settles && !DrainRequest::new(&cache).settles);
    }

    #[test]
    fn a_limit_explains_a_timeout_only_if_a_request_takes_as_long_at_its_rate() {
        let eight = Duration::from_secs(8);
        assert_eq!(limit_that_delays(2048, eight, 1 << 20), Some(2048));
        assert_eq!(limit_that_delays(0, eight, 1 << 20), None, "no limit");
        assert_eq!(limit_that_delays(1 << 20, eight, 1 << 30), None, "eight requests had time");
        assert_eq!(limit_that_delays(2048, eight, 0), None, "nothing waits for it");
    }

    #[test]
    fn the_least_rate_lets_a_drain_progress_within_its_default_timeout() {
        assert_eq!(limit_that_delays(WRITEBACK_RATE_MIN, Duration::from_secs(60), 1 << 30), None);
        assert!(check_writeback_rate(WRITEBACK_RATE_MIN).is_ok() && check_writeback_rate(0).is_ok());
        for rate in [1, WRITEBACK_RATE_MIN - 1] {
            assert_eq!(
                check_writeback_rate(rate).map_err(|error| error.kind()),
                Err(ErrorKind::InvalidArgument)
            );
        }
    }
}
