//! S3-FIFO, as in Yang et al., "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023), algorithm
//! 1.

use super::Policy;
use lru::LruCache;
use std::collections::{HashMap, VecDeque};

/// More uses than this are not counted.
const USES_MAX: u8 = 3;

/// A small queue for new blocks, a main queue for blocks that were used again, and the names of the blocks that were evicted from
/// the small queue.
pub struct S3Fifo {
    capacity: usize,
    small_capacity: usize,
    /// Uses of each held block since it entered its queue.
    uses: HashMap<u32, u8>,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    /// Entries are only added and removed, and never touched, so the cache acts as a queue.
    gone: LruCache<u32, ()>,
}

impl S3Fifo {
    /// Holds `capacity` blocks, a tenth of them in the small queue.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            small_capacity: (capacity / 10).max(1),
            uses: HashMap::new(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            gone: LruCache::unbounded(),
        }
    }

    const fn main_capacity(&self) -> usize {
        self.capacity - self.small_capacity
    }

    fn evict(&mut self) {
        if self.small.len() >= self.small_capacity {
            self.evict_small();
        } else {
            self.evict_main();
        }
    }

    fn evict_small(&mut self) {
        while let Some(block) = self.small.pop_front() {
            if self.uses.get(&block).is_none_or(|uses| *uses <= 1) {
                self.uses.remove(&block);
                // The queue of names is as long as the main queue.
                self.gone.put(block, ());
                if self.gone.len() > self.main_capacity() {
                    self.gone.pop_lru();
                }
                return;
            }
            self.uses.insert(block, 0);
            self.main.push_back(block);
            if self.main.len() > self.main_capacity() {
                self.evict_main();
            }
        }
    }

    fn evict_main(&mut self) {
        while let Some(block) = self.main.pop_front() {
            match self.uses.get_mut(&block) {
                Some(uses) if *uses > 0 => {
                    *uses -= 1;
                    self.main.push_back(block);
                }
                _ => {
                    self.uses.remove(&block);
                    return;
                }
            }
        }
    }
}

impl Policy for S3Fifo {
    fn access(&mut self, block: u32) -> bool {
        if let Some(uses) = self.uses.get_mut(&block) {
            *uses = (*uses + 1).min(USES_MAX);
            return true;
        }
        while self.uses.len() >= self.capacity {
            self.evict();
        }
        self.uses.insert(block, 0);
        if self.gone.pop(&block).is_some() {
            self.main.push_back(block);
        } else {
            self.small.push_back(block);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::outcomes;
    use super::*;

    #[test]
    fn new_blocks_without_another_use_are_evicted_first() {
        // The small queue has one slot. 1 was used twice more and moves to the main queue; 2 to 5 pass.
        let mut queues = S3Fifo::new(3);
        for block in [1, 1, 1, 2, 3, 4, 5] {
            queues.access(block);
        }
        assert_eq!((queues.main, queues.small), (VecDeque::from([1]), VecDeque::from([4, 5])));
        assert!(queues.gone.contains(&2) && queues.gone.contains(&3));
    }

    #[test]
    fn one_more_use_in_the_small_queue_is_not_enough() {
        assert_eq!(outcomes(S3Fifo::new(2), &[1, 1, 2, 3, 4, 1]), "-h----");
        assert_eq!(outcomes(S3Fifo::new(2), &[1, 1, 1, 2, 3, 4, 1]), "-hh---h");
    }

    #[test]
    fn a_block_that_returns_enters_the_main_queue() {
        let mut queues = S3Fifo::new(3);
        for block in [1, 2, 3, 4, 1] {
            queues.access(block);
        }
        assert_eq!((queues.main, queues.small), (VecDeque::from([1]), VecDeque::from([3, 4])));
    }

    #[test]
    fn a_block_in_the_main_queue_stays_one_turn_for_each_use() {
        let mut queues = S3Fifo::new(3);
        // 1 and 2 return and fill the main queue; 1 is used.
        for block in [1, 2, 3, 4, 1, 2, 1] {
            queues.access(block);
        }
        queues.evict_main();
        assert_eq!(queues.main, VecDeque::from([1]));
        assert_eq!(queues.uses[&1], 0);
        queues.evict_main();
        assert!(queues.main.is_empty());
    }
}
