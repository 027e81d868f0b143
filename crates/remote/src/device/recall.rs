//! When a client asks the other host for requests that wait for space there.

use cbd_channel::Client;
use cbd_types::Pmem;
use std::time::{Duration, Instant};

/// How long a change is in flight before it counts as one that waits for space, if requests that need none cannot be submitted.
pub(super) const AFTER: Duration = Duration::from_millis(2);

/// How long requests that were given up are in flight before the other host is asked for them once more: those of which its disk had a
/// part may wait for space by now.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What was seen at the last look.
#[derive(Default)]
pub(super) struct Recalls {
    looked: Option<Instant>,
    /// The change that is in the way of other requests.
    oldest: Option<u64>,
    /// When it asked last.
    asked: Option<Instant>,
}

impl Recalls {
    /// Asks for what waits if the change that was in the way at the last look still is, and for what is given up.
    pub(super) fn look<M: Pmem>(&mut self, client: &mut Client<M>) {
        let after = if client.has_waiting() { AFTER } else { AGAIN_AFTER };
        let is_soon = |looked: Instant| looked.elapsed() < after;
        if !(client.has_waiting() || client.has_given_up()) || self.looked.is_some_and(is_soon) {
            return;
        }
        self.looked = Some(Instant::now());
        let oldest = client.blocked_by();
        let is_blocked = oldest.is_some() && oldest == self.oldest;
        self.oldest = oldest;
        if is_blocked
            || (client.has_given_up() && self.asked.is_none_or(|asked| asked.elapsed() >= AGAIN_AFTER))
        {
            self.asked = Some(Instant::now());
            client.recall();
        }
    }
}
