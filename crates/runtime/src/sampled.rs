//! The moments of a device's sample of requests: what clients had read when the sample had so many requests.
//!
//! What the sample has kept begins with a cache that is not known. So what came before ([`earlier`]) and its first half only fill the
//! simulated caches, and the hits count from its middle on; how much clients have read since then is in no sample, and comes from here.
//!
//! Invariants: the number of moments is bounded; they are about equally far apart.
//!
//! Elsewhere: the sample (`cbd-device`), who notes moments (`cbd-daemon`).

pub mod earlier;

use cbd_device::SAMPLED_MAX;
use std::collections::VecDeque;

/// Moments that are kept.
const MOMENTS: usize = 256;
/// Bytes of memory that they take at most.
pub const MOMENTS_BYTES: usize = MOMENTS * size_of::<Moment>();

/// A moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Moment {
    /// Requests that the sample had had.
    pub sampled: u64,
    /// Bytes that clients had read.
    pub read_bytes: u64,
    /// Bytes of these that the cache had.
    pub hit_bytes: u64,
}

impl Moment {
    /// What came after `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self {
            sampled: self.sampled.saturating_sub(earlier.sampled),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            hit_bytes: self.hit_bytes.saturating_sub(earlier.hit_bytes),
        }
    }
}

/// Moments, oldest first.
#[derive(Clone, Default, Debug)]
pub struct Moments(VecDeque<Moment>);

impl Moments {
    /// Notes the present one, unless the sample has had no request since.
    pub fn note(&mut self, now: Moment) {
        match self.0.back() {
            Some(last) if last.sampled == now.sampled => return,
            // A counter that falls is of another cache.
            Some(last) if last.read_bytes > now.read_bytes || last.hit_bytes > now.hit_bytes => {
                self.0.clear();
            }
            _ => {}
        }
        let oldest = now.sampled.saturating_sub(SAMPLED_MAX as u64);
        while self.0.front().is_some_and(|moment| moment.sampled < oldest) {
            self.0.pop_front();
        }
        if self.0.len() == MOMENTS {
            // The one whose neighbours are the nearest to each other is missed least.
            let between = |place: &usize| self.0[place + 1].sampled - self.0[place - 1].sampled;
            if let Some(place) = (1..MOMENTS - 1).min_by_key(between) {
                self.0.remove(place);
            }
        }
        self.0.push_back(now);
    }

    /// The first moment behind the middle of the requests from number `first` to number `end`.
    #[must_use]
    pub fn behind_middle(&self, first: u64, end: u64) -> Option<Moment> {
        let middle = u64::midpoint(first, end);
        self.0.iter().find(|moment| (middle..=end).contains(&moment.sampled)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(sampled: u64) -> Moment {
        Moment { sampled, read_bytes: sampled * 100, hit_bytes: sampled * 50 }
    }

    #[test]
    fn the_moment_behind_the_middle_is_found_in_a_bounded_number_of_them() {
        let mut moments = Moments::default();
        (0..200_000).step_by(10).for_each(|sampled| moments.note(moment(sampled)));
        assert!(moments.0.len() <= MOMENTS);
        let found = moments.behind_middle(167_232, 200_000).expect("a moment");
        assert!((183_616..184_200).contains(&found.sampled), "{found:?}");
        let since = moment(200_000).since(found);
        assert_eq!((since.read_bytes, since.hit_bytes), (since.sampled * 100, since.sampled * 50));
        assert_eq!(moments.behind_middle(300_000, 400_000), None);
    }

    #[test]
    fn the_moments_of_another_cache_are_forgotten() {
        let mut moments = Moments::default();
        moments.note(moment(100));
        moments.note(Moment { sampled: 110, read_bytes: 7, hit_bytes: 3 });
        assert_eq!(moments.behind_middle(0, 200), Some(Moment { sampled: 110, read_bytes: 7, hit_bytes: 3 }));
    }
}
