//! What a device's sample had before the requests that it keeps as they came.
//!
//! What a cache does depends on what it holds, and that goes back further than the last requests: a full cache records no blocks of long
//! streams, so that a loop may find it full of what nothing reads any more. So older requests are kept in less space: their blocks,
//! without times. Where space is short, first those are forgotten whose block is soon used again, which every cache would have had
//! meanwhile. Then the oldest requests become known blocks, of which only the order of their first use is kept.
//!
//! Invariants: memory is bounded ([`BYTES_MAX`]); the work for a request is constant on average.
//!
//! Elsewhere: the sample (`cbd-device`), what is made of it (`cbd-advise`).

use cbd_device::{SAMPLED_MAX, Sampled};
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

/// Requests and known blocks that are kept.
const KEPT_MAX: usize = 40 << 10;
/// Of these, known blocks.
const KNOWN_MAX: usize = 24 << 10;
/// What is left where space is short.
const KEPT: usize = KEPT_MAX / 5 * 4;
/// A request is forgotten if another one of its block is among so many that follow: far fewer than the blocks of the sample that a
/// cache of the present size holds, some 4096.
const NEAR: usize = 512;
/// The last requests, which stay where they are: a quarter less than the sample keeps, so that none is lost between two calls.
const LAST: u64 = (SAMPLED_MAX / 4 * 3) as u64;
/// The bit of a write. The others are the group; higher groups are not kept.
const WRITE: u32 = 1 << 31;

/// Bytes of memory at most.
pub const BYTES_MAX: usize = KEPT_MAX * size_of::<u32>();

/// A request of the past.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EarlierRequest {
    /// The group of blocks.
    pub group: u64,
    /// Whether it was a write.
    pub is_write: bool,
}

/// Requests of the past, oldest first.
#[derive(Clone, Default, Debug)]
pub struct Earlier {
    /// Known blocks in the order of their first use, then requests.
    kept: Vec<u32>,
    known: usize,
    /// The number of the first request of the sample that is not here yet.
    end: u64,
    one_of: u64,
    is_all: bool,
}

impl Earlier {
    /// Takes what will not be among the last requests much longer. `next`: the number of requests that the sample has had. `is_empty`:
    /// whether the cache holds hardly anything. `visit` calls its second argument with requests of the sample, and returns the blocks of
    /// a group.
    pub fn take(
        &mut self,
        next: u64,
        is_empty: bool,
        visit: impl Fn(Range<u64>, &mut dyn FnMut(Sampled)) -> u64,
    ) {
        let one_of = visit(0..0, &mut |_| {});
        if one_of != self.one_of {
            // The groups are others.
            *self = Self { end: self.end, one_of, is_all: is_empty, ..Self::default() };
        }
        let numbers = self.end..next.saturating_sub(LAST);
        if one_of == 0 || numbers.is_empty() {
            return;
        }
        self.end = numbers.end;
        let mut missing = numbers.end - numbers.start;
        visit(numbers, &mut |sampled| {
            missing -= 1;
            self.add(sampled);
        });
        self.is_all &= missing == 0;
    }

    /// The number of the first request of the sample that is not among these.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.end
    }

    /// Whether nothing that fills caches is missing: the sample began with a cache that held hardly anything, and no block was forgotten.
    #[must_use]
    pub const fn is_all(&self) -> bool {
        self.is_all
    }

    /// The requests.
    pub fn requests(&self) -> impl ExactSizeIterator<Item = EarlierRequest> + '_ {
        let request =
            |kept: &u32| EarlierRequest { group: u64::from(kept & !WRITE), is_write: kept & WRITE != 0 };
        self.kept.iter().map(request)
    }

    fn add(&mut self, sampled: Sampled) {
        if sampled.group >= u64::from(WRITE) {
            self.is_all = false;
            return;
        }
        if self.kept.len() == KEPT_MAX {
            self.forget_near();
            self.forget_oldest();
        }
        if self.kept.capacity() < KEPT_MAX && self.kept.try_reserve_exact(KEPT_MAX - self.kept.len()).is_err()
        {
            self.is_all = false;
            return;
        }
        self.kept.push(sampled.group as u32 | if sampled.is_write { WRITE } else { 0 });
    }

    /// Forgets the requests whose block is soon used again.
    fn forget_near(&mut self) {
        // The blocks of the requests that follow, each with the nearest of these.
        let (mut near, mut following) = (HashMap::new(), VecDeque::with_capacity(NEAR));
        let mut place = self.kept.len();
        for number in (self.known..self.kept.len()).rev() {
            let (kept, block) = (self.kept[number], self.kept[number] & !WRITE);
            if following.len() == NEAR
                && let Some((far, far_number)) = following.pop_back()
                && near.get(&far) == Some(&far_number)
            {
                near.remove(&far);
            }
            following.push_front((block, number));
            if near.insert(block, number).is_none() {
                place -= 1;
                self.kept[place] = kept;
            }
        }
        self.kept.drain(self.known..place);
    }

    /// Makes known blocks of the oldest requests, and forgets the oldest of these, until there is space.
    fn forget_oldest(&mut self) {
        if self.kept.len() <= KEPT {
            return;
        }
        let mut known: HashSet<u32> = self.kept[..self.known].iter().map(|kept| kept & !WRITE).collect();
        // In front of `first` are blocks that are forgotten, from `place` to `at` is what is known already.
        let (mut first, mut place, mut at) = (0, self.known, self.known);
        while place - first + self.kept.len() - at > KEPT && at < self.kept.len() {
            let kept = self.kept[at];
            at += 1;
            if known.insert(kept & !WRITE) {
                self.kept[place] = kept;
                place += 1;
                if place - first > KNOWN_MAX {
                    known.remove(&(self.kept[first] & !WRITE));
                    first += 1;
                    self.is_all = false;
                }
            }
        }
        self.kept.drain(place..at);
        self.kept.drain(..first);
        self.known = place - first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sample of one block of 8 that has had these groups; it keeps the last ones.
    fn visit(groups: &[u64], numbers: Range<u64>, visit: &mut dyn FnMut(Sampled)) -> u64 {
        let kept = (groups.len().saturating_sub(SAMPLED_MAX) as u64).max(numbers.start);
        (kept..numbers.end)
            .for_each(|number| visit(Sampled { ms: 0, is_write: false, group: groups[number as usize] }));
        8
    }

    fn earlier(groups: &[u64]) -> Earlier {
        let mut earlier = Earlier::default();
        for next in (0..=groups.len()).step_by(1000) {
            earlier.take(next as u64, true, |numbers, each| visit(&groups[..next], numbers, each));
            assert!(earlier.kept.len() <= KEPT_MAX && earlier.kept.capacity() <= KEPT_MAX);
        }
        earlier
    }

    fn groups(earlier: &Earlier) -> Vec<u64> {
        earlier.requests().map(|request| request.group).collect()
    }

    #[test]
    fn requests_before_the_last_ones_are_kept_in_order() {
        let all: Vec<u64> = (0..40_000).map(|number| number % 7000).collect();
        let earlier = earlier(&all);
        assert_eq!(earlier.end(), 40_000 - LAST);
        assert_eq!(groups(&earlier), all[..earlier.end() as usize]);
        assert!(earlier.is_all());
    }

    #[test]
    fn of_many_requests_the_first_use_of_each_block_is_known() {
        // A loop that no longer runs, a hot set beside a second one.
        let first = (0..8000).chain(0..8000);
        let second = (0..200_000)
            .map(|number| if number % 2 == 0 { number % 100 + 20_000 } else { number % 9000 + 40_000 });
        let earlier = earlier(&first.chain(second).collect::<Vec<u64>>());
        let found = groups(&earlier);
        assert_eq!(found[..8000], (0..8000).collect::<Vec<_>>());
        assert!(earlier.is_all(), "no block was forgotten");
        let hot = found.iter().filter(|group| (20_000..20_100).contains(*group)).count();
        assert!((50..6000).contains(&hot), "the hot set takes little space: {hot}");
        let second: HashSet<u64> = found.into_iter().filter(|group| *group >= 40_000).collect();
        assert_eq!(second.len(), 4500);
    }

    #[test]
    fn the_oldest_blocks_are_forgotten_first_and_that_is_known() {
        let earlier = earlier(&(0..200_000).collect::<Vec<u64>>());
        assert!(!earlier.is_all());
        let found = groups(&earlier);
        let end = earlier.end();
        assert!(found.len() >= KEPT - 1000, "{}", found.len());
        assert_eq!(found, (end - found.len() as u64..end).collect::<Vec<_>>());
    }

    #[test]
    fn a_sample_of_other_groups_begins_again_and_a_gap_is_noted() {
        let all: Vec<u64> = (0..100_000).collect();
        let mut earlier = Earlier::default();
        earlier.take(1000, true, |numbers, each| visit(&all[..1000], numbers, each));
        earlier.take(100_000, true, |numbers, each| visit(&all, numbers, each));
        assert!(!earlier.is_all(), "the first requests were not seen");
        assert!(!groups(&earlier).is_empty());
        earlier.take(100_000, false, |_, _| 16);
        assert_eq!((groups(&earlier).len(), earlier.is_all()), (0, false));
    }
}
