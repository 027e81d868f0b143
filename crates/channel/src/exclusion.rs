//! Which requests of the clients of one device are executed at the same time: of those that overlap, where one changes the device, the
//! later one waits for the completion of the earlier one.
//!
//! Invariants: a request waits only for requests that began before it, also for those of them that wait. So each has its turn.
//!
//! Elsewhere: the requests of one client among each other ([`Client`](crate::Client)).

use crate::area::reserve;
use alloc::vec::Vec;
use cbd_types::{ByteRange, MutationPoint, Result};

struct Entry {
    ticket: u64,
    range: ByteRange,
    changes: bool,
    is_waiting: bool,
}

impl Entry {
    fn excludes(&self, range: ByteRange, changes: bool) -> bool {
        (self.changes || changes) && self.range.overlaps(&range)
    }
}

/// The requests in flight on a device, in the order in which they began.
#[derive(Default)]
pub struct Exclusion(Vec<Entry>);

impl Exclusion {
    /// Whether a request can be executed now. Otherwise it has to wait until an [`end`](Self::end) names its ticket, which no other
    /// request in flight has.
    ///
    /// # Errors
    /// [`ErrorKind::System`](cbd_types::ErrorKind::System) without memory: the request has not begun.
    pub fn begin(&mut self, ticket: u64, range: ByteRange, changes: bool) -> Result<bool> {
        if range.is_empty() {
            return Ok(true);
        }
        reserve(&mut self.0, 1)?;
        let is_waiting = self.0.iter().any(|earlier| earlier.excludes(range, changes))
            && MutationPoint::ChannelExclusion.is_active();
        self.0.push(Entry { ticket, range, changes, is_waiting });
        Ok(!is_waiting)
    }

    /// The completion of a request is stored. `ready` gets the tickets of requests that have waited and can be executed now.
    pub fn end(&mut self, ticket: u64, mut ready: impl FnMut(u64)) {
        let Some(place) = self.0.iter().position(|entry| entry.ticket == ticket) else { return };
        let ended = self.0.remove(place);
        for index in place..self.0.len() {
            let (earlier, later) = self.0.split_at_mut(index);
            let Some(entry) = later.first_mut() else { return };
            let has_waited = entry.is_waiting && ended.excludes(entry.range, entry.changes);
            if has_waited && !earlier.iter().any(|one| one.excludes(entry.range, entry.changes)) {
                entry.is_waiting = false;
                ready(entry.ticket);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn begin(exclusion: &mut Exclusion, ticket: u64, start: u64, length: u64, changes: bool) -> bool {
        exclusion.begin(ticket, ByteRange::at(start, length), changes).expect("there is memory")
    }

    fn end(exclusion: &mut Exclusion, ticket: u64) -> Vec<u64> {
        let mut ready = Vec::new();
        exclusion.end(ticket, |ticket| ready.push(ticket));
        ready
    }

    #[test]
    fn a_request_waits_for_all_before_it_that_overlap_it_and_for_no_others() {
        let mut exclusion = Exclusion::default();
        assert!(begin(&mut exclusion, 1, 0, 10, false));
        assert!(begin(&mut exclusion, 2, 5, 10, false), "reads go together");
        assert!(begin(&mut exclusion, 3, 15, 5, true), "it is beside them");
        assert!(!begin(&mut exclusion, 4, 9, 1, true), "a change waits for reads");
        assert!(begin(&mut exclusion, 5, 9, 0, true), "a flush has no range");
        assert_eq!(end(&mut exclusion, 1), []);
        assert_eq!(end(&mut exclusion, 2), [4]);
        assert!(!begin(&mut exclusion, 6, 0, 20, false), "a read waits for changes");
        assert_eq!(end(&mut exclusion, 3), []);
        assert_eq!(end(&mut exclusion, 5), []);
        assert_eq!(end(&mut exclusion, 4), [6]);
        assert_eq!((end(&mut exclusion, 6), end(&mut exclusion, 6)), (vec![], vec![]));
        assert!(exclusion.0.is_empty());
    }

    #[test]
    fn a_request_does_not_overtake_one_that_waits() {
        let mut exclusion = Exclusion::default();
        assert!(begin(&mut exclusion, 1, 0, 1, false));
        assert!(!begin(&mut exclusion, 2, 0, 2, true));
        assert!(!begin(&mut exclusion, 3, 0, 1, false));
        assert!(
            !begin(&mut exclusion, 4, 1, 1, false),
            "the change waits for what this one does not overlap"
        );
        assert_eq!(end(&mut exclusion, 1), [2]);
        assert_eq!(end(&mut exclusion, 2), [3, 4]);
    }
}
