//! How long a side of a channel waits before it looks again.

use cbd_sys::event::Timer;
use cbd_types::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// The first wait: the time in which a channel usually brings an answer.
const WAIT_MIN: Duration = Duration::from_micros(20);

/// The longest wait while something is in flight, or was just now.
pub const WAIT_MAX: Duration = Duration::from_millis(1);

/// Longest waits of a side at which nothing has arrived for some time: the first request is as late as that. Each look costs up to a
/// tenth of a millisecond on virtual machines, and all of them together less than a hundredth of a processor in the end.
const WAITS_WHEN_QUIET: [(Duration, Duration); 2] =
    [(IDLE, Duration::from_millis(15)), (Duration::from_millis(100), Duration::from_millis(4))];

/// Time without requests after which a side looks least often.
pub const IDLE: Duration = Duration::from_secs(2);

/// The longest wait of a side at which nothing has arrived for this time.
pub(crate) fn wait_max(quiet: Duration) -> Duration {
    WAITS_WHEN_QUIET.into_iter().find(|(after, _)| quiet >= *after).map_or(WAIT_MAX, |(_, wait)| wait)
}

/// Waits that are doubled as long as nothing arrives, by a descriptor.
///
/// To set a timer takes microseconds, so one that ends early enough goes on, also when there is nothing to wait for any more: its
/// descriptor is readable once for nothing.
#[derive(Debug)]
pub(crate) struct Pause {
    timer: Timer,
    next: Duration,
    /// When the wait ends, if there is one.
    ends: Option<Instant>,
}

impl Pause {
    /// A pause that has not begun.
    ///
    /// # Errors
    /// The process cannot open another descriptor.
    pub(crate) fn new() -> Result<Self> {
        let timer = Timer::new().map_err(|error| failed(&error))?;
        Ok(Self { timer, next: WAIT_MIN, ends: None })
    }

    /// The descriptor: readable when it is time to look again, until the next [`begin`](Self::begin) or [`end`](Self::end).
    pub(crate) fn descriptor(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Something has arrived: the next wait is short.
    pub(crate) const fn shorten(&mut self) {
        self.next = WAIT_MIN;
    }

    /// Begins the next wait, of at most `limit`, unless a shorter one has begun.
    pub(crate) fn begin(&mut self, limit: Duration) {
        if self.start(self.next.min(limit)) {
            self.next = (self.next * 2).min(limit);
        }
    }

    /// Begins a wait of this length, unless a shorter one has begun.
    pub(crate) fn begin_long(&mut self, wait: Duration) {
        self.start(wait);
    }

    fn start(&mut self, wait: Duration) -> bool {
        let now = Instant::now();
        if self.ends.is_some_and(|ends| ends > now && ends <= now + wait) {
            return false;
        }
        // It fails only for an impossible time.
        let _ = self.timer.set(Some(wait));
        self.ends = Some(now + wait);
        true
    }

    /// Waits for nothing from the end of a wait that has begun.
    pub(crate) fn end(&mut self) {
        if self.ends.is_some_and(|ends| ends <= Instant::now()) {
            // As above.
            let _ = self.timer.set(None);
            self.ends = None;
        }
    }
}

fn failed(error: &std::io::Error) -> Error {
    let text = "cannot make a timer descriptor (the limit of open files?)";
    Error::new(ErrorKind::System, text).caused_by(cbd_sys::errors::copy_of(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_export::wait_any;

    fn is_readable_within(pause: &Pause, time: Duration) -> bool {
        wait_any(&[pause.descriptor()], Some(time)).expect("a wait").is_some()
    }

    #[test]
    fn waits_become_longer_until_something_arrives() {
        let mut pause = Pause::new().expect("a timer");
        let mut last = WAIT_MIN;
        while last < WAIT_MAX {
            pause.begin(WAIT_MAX);
            assert!(pause.next > last || pause.next == WAIT_MAX);
            last = pause.next;
            assert!(is_readable_within(&pause, Duration::from_secs(10)));
        }
        let begun = Instant::now();
        pause.begin(WAIT_MAX);
        assert!(is_readable_within(&pause, Duration::from_secs(10)) && begun.elapsed() >= WAIT_MAX);
        pause.shorten();
        assert_eq!(pause.next, WAIT_MIN);
        pause.end();
        assert!(!is_readable_within(&pause, 5 * WAIT_MAX), "there is nothing to wait for");
    }

    #[test]
    fn waits_are_longer_the_longer_nothing_has_arrived() {
        let waits =
            [0, 99, 100, 1999, 2000, 100_000].map(|ms| wait_max(Duration::from_millis(ms)).as_millis());
        assert_eq!(waits, [1, 1, 4, 4, 15, 15]);
    }

    #[test]
    fn a_wait_goes_on_unless_the_next_one_is_shorter() {
        let mut pause = Pause::new().expect("a timer");
        let long = Duration::from_secs(1000);
        pause.next = long;
        pause.begin(long);
        let ends = pause.ends;
        pause.begin(long);
        pause.end();
        assert!(ends.is_some() && pause.ends == ends);
        pause.shorten();
        pause.begin(long);
        assert!(is_readable_within(&pause, Duration::from_secs(10)), "the short one");
        // It is over, for nothing.
        pause.end();
        assert!(pause.ends.is_none() && !is_readable_within(&pause, 5 * WAIT_MAX));
    }
}
