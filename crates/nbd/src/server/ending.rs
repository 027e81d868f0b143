//! How far the end of a connection is.

use std::time::{Duration, Instant};

/// The end of a connection.
pub(super) struct Ending {
    /// Whether replies can still be sent.
    pub(super) sending: bool,
    /// When sending is given up.
    pub(super) until: Instant,
    /// Whether the client said that it goes: what it asked for before is done.
    pub(super) in_order: bool,
    /// Whether what had not begun was given up.
    pub(super) gave_up: bool,
}

impl Ending {
    /// It begins now; replies may take until `stop` from now.
    pub(super) fn new(sending: bool, stop: Duration) -> Self {
        Self { sending, until: Instant::now() + stop, in_order: false, gave_up: false }
    }

    /// Whether the client went without a word.
    pub(super) const fn is_gone(&self) -> bool {
        !self.sending && !self.in_order
    }
}
