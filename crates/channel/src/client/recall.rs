//! Requests that the client takes back from the server.
//!
//! Changes that wait for space on the server keep their places and their entries, until there are none for requests that need no space.
//! The client then asks for them, and submits a few of them at a time.
//!
//! Invariant: what is sent back is submitted before all that must not overtake it.

use super::{Client, Part};
use alloc::vec::Vec;
use cbd_types::{Completion, Error, ErrorKind, MutationPoint, Pmem};

impl<M: Pmem> Client<M> {
    /// Lets a part that was in flight wait again, before what must not overtake it. There is memory.
    pub(super) fn wait_again(&mut self, part: Part, done: &mut Vec<Completion>) {
        if self.is_given_up(&part) {
            return self.end_part(&part, Err(given_up()), done);
        }
        self.returned += usize::from(part.is_returned);
        let is_before = |other: &Part| MutationPoint::ChannelOrder.holds(other.order < part.order);
        self.waiting.insert(self.waiting.partition_point(is_before), part);
    }

    /// Whether something waits until it can be submitted.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The number of the oldest change in flight, if a request that changes nothing waits for a place or an entry. If that change still is
    /// in flight a moment later, it probably waits for space, and the user [recalls](Self::recall) it.
    #[must_use]
    pub fn blocked_by(&self) -> Option<u64> {
        if !self.has_waiting() || !self.is_blocked_by_changes() {
            return None;
        }
        let changes = self.places.iter().filter(|(_, part)| part.changes());
        let oldest = changes.map(|(_, part)| part.sequence).min()?;
        let mut waiting = self.waiting.iter().enumerate();
        waiting.any(|(index, part)| !part.changes() && !self.has_to_wait(part, index)).then_some(oldest)
    }

    /// Whether a change has the entry of the next submission, or changes have more places than they have while some of them were sent
    /// back.
    fn is_blocked_by_changes(&self) -> bool {
        if !self.is_entry_free() {
            return self.places.replaced_by(self.submitted).is_some_and(Part::changes);
        }
        self.places.free().is_none() && self.changes_in_flight() > self.changes_max()
    }

    /// Asks the server to send back the requests of which nothing was done yet, because they wait for space or for another request.
    /// Requests that need no space are submitted before all of them are again.
    pub fn recall(&mut self) {
        self.recalls = self.recalls.wrapping_add(1).max(1);
        self.recalled = self.submitted;
        let given_up = self.places.iter().filter(|(_, part)| self.is_given_up(part));
        // Later places have no bit: what has begun there is not cancelled.
        self.given_up =
            given_up.fold(0, |bits, (place, _)| bits | 1_u64.checked_shl(place as u32).unwrap_or(0));
        self.stores += 1;
        self.store_header(self.is_closed);
    }

    /// Completes with an error the requests for whose identifiers `is_meant`: at once what waits here, later what the server
    /// [sends back](Self::recall). Others complete as usual.
    pub fn give_up(&mut self, is_meant: impl Fn(u64) -> bool, done: &mut Vec<Completion>) {
        let others = self.wholes.iter_mut().flatten().filter(|whole| !whole.is_given_up);
        for whole in others.filter(|whole| is_meant(whole.request.id)) {
            whole.is_given_up = true;
            self.given_up_left += 1;
        }
        for _ in 0..self.waiting.len() {
            let Some(part) = self.waiting.pop_front() else { break };
            if self.is_given_up(&part) {
                self.returned -= usize::from(part.is_returned);
                self.end_part(&part, Err(given_up()), done);
            } else {
                self.waiting.push_back(part);
            }
        }
        if self.has_given_up() {
            self.recall();
        }
        self.send_waiting();
    }

    /// Whether requests that were given up are not complete.
    #[must_use]
    pub const fn has_given_up(&self) -> bool {
        self.given_up_left > 0
    }

    fn is_given_up(&self, part: &Part) -> bool {
        self.wholes.get(part.whole).and_then(Option::as_ref).is_some_and(|whole| whole.is_given_up)
    }
}

fn given_up() -> Error {
    Error::new(ErrorKind::Stopped, "the request was given up: its client is gone")
}
