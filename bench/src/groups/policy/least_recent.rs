//! LRU.

use super::Policy;
use lru::LruCache;

/// Blocks in the order of their last use.
pub struct LeastRecent {
    capacity: usize,
    blocks: LruCache<u32, ()>,
}

impl LeastRecent {
    /// Holds `capacity` blocks.
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
    fn the_least_recently_used_block_is_evicted() {
        // 3 evicts 2, since 1 was used after it; 2 evicts 1.
        assert_eq!(outcomes(LeastRecent::new(2), &[1, 2, 1, 3, 1, 3, 2, 1]), "--h-hh--");
    }
}
