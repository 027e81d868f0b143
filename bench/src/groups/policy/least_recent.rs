//! LRU.

use super::Policy;
use lru::LruCache;

/// Blocks in the order of their last use.
pub struct LeastRecent {
    capacity: usize,
    blocks: LruCache<u32, ()>,
}

impl LeastRecent {
    /// Holds so many blocks.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, blocks: LruCache::unbounded() }
    }
}

impl Policy for LeastRecent {
    fn access(&mut self, block: u32) -> bool {
        let hit = self.blocks.put(block, ()).is_some();
        if self.blocks.len() > self.capacity {
            self.blocks.pop_lru();
        }
        hit
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::outcomes;
    use super::*;

    #[test]
    fn what_was_used_longest_ago_goes() {
        // 3 pushes out 2, for 1 was used since; 2 pushes out 1.
        assert_eq!(outcomes(LeastRecent::new(2), &[1, 2, 1, 3, 1, 3, 2, 1]), "--h-hh--");
    }
}
