//! The state of a connection that ends.

use std::time::{Duration, Instant};

/// The end of a connection.
pub(super) struct Ending {
    /// Whether replies can still be sent.
    pub(super) sending: bool,
    /// When unsent replies are given up.
    pub(super) until: Instant,
    /// Whether the client sent DISC: the requests before it are completed.
    pub(super) announced: bool,
    /// Whether requests that had not begun were given up.
    pub(super) gave_up: bool,
}

impl Ending {
    /// An end that begins now; replies may take until `stop` from now.
    pub(super) fn new(sending: bool, stop: Duration) -> Self {
        Self { sending, until: Instant::now() + stop, announced: false, gave_up: false }
    }

    /// Whether the client disconnected without DISC.
    pub(super) const fn is_broken(&self) -> bool {
        !self.sending && !self.announced
    }
}
