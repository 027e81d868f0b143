//! ARC, as in Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), figure 4.

use super::Policy;
use lru::LruCache;

type List = LruCache<u32, ()>;

/// Two lists of held blocks: those seen once recently, and those seen more often. For each list also the names of the blocks that
/// were evicted from it.
pub struct Arc {
    capacity: usize,
    /// The target number of held blocks that were seen once.
    target: f64,
    once: List,
    often: List,
    once_gone: List,
    often_gone: List,
}

impl Arc {
    /// Holds `capacity` blocks.
    pub fn new(capacity: usize) -> Self {
        let list = List::unbounded;
        Self { capacity, target: 0.0, once: list(), often: list(), once_gone: list(), often_gone: list() }
    }

    /// REPLACE of the paper.
    fn replace(&mut self, was_often: bool) {
        let once = self.once.len() as f64;
        let from_once = !self.once.is_empty() && (once > self.target || (was_often && once == self.target));
        let (held, gone) = if from_once {
            (&mut self.once, &mut self.once_gone)
        } else {
            (&mut self.often, &mut self.often_gone)
        };
        if let Some((block, ())) = held.pop_lru() {
            gone.put(block, ());
        }
    }
}

impl Policy for Arc {
    fn access(&mut self, block: u32) -> bool {
        // Case I.
        if self.once.pop(&block).is_some() || self.often.contains(&block) {
            self.often.put(block, ());
            return true;
        }
        let gone = (self.once_gone.len() as f64, self.often_gone.len() as f64);
        if self.once_gone.contains(&block) {
            // Case II.
            self.target = (self.target + (gone.1 / gone.0).max(1.0)).min(self.capacity as f64);
            self.replace(false);
            self.once_gone.pop(&block);
            self.often.put(block, ());
        } else if self.often_gone.contains(&block) {
            // Case III.
            self.target = (self.target - (gone.0 / gone.1).max(1.0)).max(0.0);
            self.replace(true);
            self.often_gone.pop(&block);
            self.often.put(block, ());
        } else {
            // Case IV.
            let of_once = self.once.len() + self.once_gone.len();
            let all = of_once + self.often.len() + self.often_gone.len();
            if of_once == self.capacity {
                if self.once.len() < self.capacity {
                    self.once_gone.pop_lru();
                    self.replace(false);
                } else {
                    self.once.pop_lru();
                }
            } else if all >= self.capacity {
                if all == 2 * self.capacity {
                    self.often_gone.pop_lru();
                }
                self.replace(false);
            }
            self.once.put(block, ());
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::outcomes;
    use super::*;

    #[test]
    fn a_block_that_was_used_twice_outlives_a_scan() {
        // 1 is held as frequently used while 2 to 9 pass through the other half.
        assert_eq!(outcomes(Arc::new(2), &[1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]), "-h--------h");
    }

    #[test]
    fn a_block_that_was_evicted_too_early_gives_its_list_more_space() {
        let mut arc = Arc::new(2);
        // 1 is used often; 3 evicts 2 from the blocks seen once; 2 returns, so their target rises by one.
        for block in [1, 1, 2, 3] {
            arc.access(block);
        }
        assert!(arc.once_gone.contains(&2) && arc.target == 0.0);
        assert!(!arc.access(2));
        assert_eq!(arc.target, 1.0);
        // 3 was the only block seen once, and their number did not exceed the target then: 1 was evicted.
        assert!(arc.often.contains(&2) && arc.once.contains(&3) && arc.often_gone.contains(&1));
        // 1 returns, so the target falls by one.
        assert!(!arc.access(1));
        assert_eq!(arc.target, 0.0);
        assert!(arc.often.contains(&1) && arc.often.contains(&2) && arc.once_gone.contains(&3));
    }

    #[test]
    fn no_more_is_held_and_remembered_than_the_paper_allows() {
        let mut arc = Arc::new(8);
        let mut random = 1_u32;
        for _ in 0..10_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            arc.access((random >> 16) % 23);
            assert!(arc.once.len() + arc.often.len() <= 8);
            assert!(arc.once.len() + arc.once_gone.len() <= 8);
            assert!(arc.once.len() + arc.once_gone.len() + arc.often.len() + arc.often_gone.len() <= 16);
        }
    }
}
