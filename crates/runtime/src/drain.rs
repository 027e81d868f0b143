//! Waiting until writeback has reached an epoch, with progress and with an end.
//!
//! Always true here: a drain succeeds only when the backing device alone has everything up to the epoch: nothing is parked and nothing
//! is quarantined; a wait ends when the epoch is on the backing device, when nothing has moved for as long as the caller
//! allows, or when the caller says so; whatever ends it, nothing dirty is dropped.

use cbd_engine::{Cache, CacheStatus, Environment};
use cbd_types::{BackendId, ByteRange, Epoch, Error, ErrorKind};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// How often the cache is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Most ranges that an error names.
const NAMED_MAX: usize = 8;

/// How far a wait is.
#[derive(Clone, Debug)]
pub struct DrainProgress {
    /// What was dirty when the wait began.
    pub dirty_bytes_at_start: u64,
    /// What is dirty.
    pub dirty_bytes: u64,
    /// What was written to the backing device meanwhile.
    pub written_bytes: u64,
    /// Since the wait began.
    pub elapsed: Duration,
    /// What is wrong with the backing device.
    pub trouble: Option<String>,
}

/// Why a wait ended before its epoch was on the backing device.
#[derive(Debug)]
pub enum NotDrained {
    /// All is there but what the backing device refuses, which is parked, and what is damaged in the cache, which is quarantined.
    Lacks(Box<CacheStatus>),
    /// Nothing has moved for too long.
    GaveUp {
        /// How long that is.
        timeout: Duration,
        /// What is dirty still.
        dirty_bytes: u64,
        /// The same and what is quarantined.
        missing_bytes: u64,
        /// What is wrong with the backing device.
        trouble: Option<String>,
    },
    /// The caller said so.
    Ended(Error),
}

/// Waits until everything up to `epoch` is on the backing device, which somebody else's thread brings about; returns the bytes
/// that were written meanwhile. `look` is called every few milliseconds.
///
/// # Errors
/// [`NotDrained`] says what keeps it.
pub fn until_drained<E: Environment>(
    cache: &Cache<E>,
    epoch: Epoch,
    timeout: Duration,
    look: &mut dyn FnMut(&DrainProgress) -> ControlFlow<Error>,
) -> Result<u64, NotDrained> {
    let begun = Instant::now();
    let start = cache.status();
    let mut moved = begun;
    let (mut least_dirty, mut written, mut drained) =
        (start.dirty_bytes, start.written_back_bytes, start.drained_epoch);
    loop {
        // Before the status: what a batch found damaged is quarantined before the batch counts as drained.
        let is_drained = cache.is_drained(epoch);
        let status = cache.status();
        let written_bytes = status.written_back_bytes.saturating_sub(start.written_back_bytes);
        if is_drained {
            // Asking for the drain has parked ranges tried again; then that is over.
            if status.parked.is_empty() || status.parked_attempts > start.parked_attempts {
                return if status.parked.is_empty() && status.quarantined_bytes == 0 {
                    Ok(written_bytes)
                } else {
                    Err(NotDrained::Lacks(Box::new(status)))
                };
            }
        }
        // Bytes count as progress only while the disk does not fail: retries of what fails write, too.
        let writes = status.written_back_bytes > written && status.backing_trouble.is_none();
        if status.drained_epoch > drained || status.dirty_bytes < least_dirty || writes {
            moved = Instant::now();
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
        if let ControlFlow::Break(error) = look(&progress) {
            return Err(NotDrained::Ended(error));
        }
        if moved.elapsed() >= timeout {
            return Err(NotDrained::GaveUp {
                timeout,
                dirty_bytes: status.dirty_bytes,
                missing_bytes: status.missing_bytes(),
                trouble: progress.trouble,
            });
        }
        std::thread::sleep(LOOK);
    }
}

impl NotDrained {
    /// The error of backend `id`; `give_up` says how the user gives up so many bytes, where that can be done.
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
            Self::GaveUp { timeout, dirty_bytes, missing_bytes, trouble } => {
                let (kind, why) = match trouble {
                    Some(error) => (ErrorKind::Backing, format!("the backing device fails: {error}")),
                    None => (ErrorKind::TimedOut, "the backing device has not taken anything".to_owned()),
                };
                Error::new(
                    kind,
                    format!(
                        "backend {id} could not be drained: nothing moved for {} s ({why}); {dirty_bytes} bytes are dirty and stay \
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

/// What a drained backing device lacks all the same, and what to do about it.
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

/// The first of many ranges, in words.
fn first_of(ranges: &[ByteRange]) -> String {
    let named: Vec<String> = ranges.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    let more = ranges.len() - named.len();
    if more == 0 { named.join(", ") } else { format!("{} and {more} more", named.join(", ")) }
}
