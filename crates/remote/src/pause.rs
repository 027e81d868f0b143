//! How long a side of a channel waits before it looks again.

use cbd_sys::event::Timer;
use cbd_types::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// The first wait: the time in which a channel usually brings an answer.
const WAIT_MIN: Duration = Duration::from_micros(20);

/// The longest wait while something is in flight, or was within [`QUIET`].
pub const WAIT_MAX: Duration = Duration::from_millis(1);

/// The longest wait of a side at which nothing has arrived for [`QUIET`]: each look costs some microseconds, and together less than a
/// hundredth of a processor.
pub const QUIET_WAIT_MAX: Duration = Duration::from_millis(4);

/// Time without requests after which a side looks less often.
pub const QUIET: Duration = Duration::from_millis(100);

/// Waits that are doubled as long as nothing arrives, by a descriptor.
#[derive(Debug)]
pub(crate) struct Pause {
    timer: Timer,
    next: Duration,
}

impl Pause {
    /// A pause that has not begun.
    ///
    /// # Errors
    /// The process cannot open another descriptor.
    pub(crate) fn new() -> Result<Self> {
        let timer = Timer::new().map_err(|error| failed(&error))?;
        Ok(Self { timer, next: WAIT_MIN })
    }

    /// The descriptor: readable when it is time to look again, until the next call.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.timer.as_raw_fd()
    }

    /// Something has arrived: the next wait is short.
    pub(crate) const fn shorten(&mut self) {
        self.next = WAIT_MIN;
    }

    /// Begins the next wait, of at most `limit`.
    pub(crate) fn begin(&mut self, limit: Duration) {
        // It fails only for an impossible time.
        let _ = self.timer.set(Some(self.next.min(limit)));
        self.next = (self.next * 2).min(limit);
    }

    /// Waits for nothing.
    pub(crate) fn end(&self) {
        // As above.
        let _ = self.timer.set(None);
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
    use std::time::Instant;

    #[test]
    fn waits_become_longer_until_something_arrives() {
        let mut pause = Pause::new().expect("a timer");
        for _ in 0..10 {
            pause.begin(WAIT_MAX);
        }
        assert_eq!(pause.next, WAIT_MAX);
        let begun = Instant::now();
        pause.begin(WAIT_MAX);
        assert_eq!(wait_any(&[pause.descriptor()], None).expect("a wait"), Some(0));
        assert!(begun.elapsed() >= WAIT_MAX);
        pause.shorten();
        assert_eq!(pause.next, WAIT_MIN);
        pause.end();
        let nothing = wait_any(&[pause.descriptor()], Some(5 * WAIT_MAX)).expect("a wait");
        assert_eq!(nothing, None);
    }
}
