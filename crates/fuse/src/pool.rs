//! Buffers for data in transit, kept for the next request.
//!
//! Always true here: a thread keeps at most a few large buffers and some small ones, so what it holds when idle is
//! bounded; a buffer given out has the length asked for.
//!
//! Left to others: bounding how many are out.

use crate::filesystem::TRANSFER_BYTES_MAX;
use cbd_types::AlignedBuffer;

/// Large buffers kept: one to receive into, others for requests that complete at once.
const LARGE_KEPT: usize = 4;
/// Small buffers kept.
const SMALL_KEPT: usize = 64;
/// What is small.
pub const SMALL_BYTES_MAX: usize = 128 << 10;

/// The buffers of one thread.
#[derive(Default)]
pub struct Pool {
    large: Vec<AlignedBuffer>,
    small: Vec<AlignedBuffer>,
}

impl Pool {
    /// A buffer that holds whatever message comes.
    pub fn take_large(&mut self) -> AlignedBuffer {
        let mut buffer = self.large.pop().unwrap_or_default();
        buffer.resize(TRANSFER_BYTES_MAX);
        buffer
    }

    /// A buffer of `length` bytes, whatever they are. One that may be out for long is no larger than it must be.
    pub fn take(&mut self, length: usize, for_long: bool) -> AlignedBuffer {
        let small = for_long && length <= SMALL_BYTES_MAX;
        let kept = if small { self.small.pop() } else { self.large.pop().or_else(|| self.small.pop()) };
        let mut buffer = kept.unwrap_or_default();
        buffer.resize(length);
        buffer
    }

    /// Takes a buffer back.
    pub fn give(&mut self, buffer: AlignedBuffer) {
        let (list, kept) = if buffer.capacity() > SMALL_BYTES_MAX {
            (&mut self.large, LARGE_KEPT)
        } else {
            (&mut self.small, SMALL_KEPT)
        };
        if buffer.capacity() > 0 && list.len() < kept {
            list.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_bounded() {
        let mut pool = Pool::default();
        for _ in 0..200 {
            pool.give(AlignedBuffer::zeroed(TRANSFER_BYTES_MAX));
            pool.give(AlignedBuffer::zeroed(4096));
            pool.give(AlignedBuffer::default());
        }
        assert_eq!((pool.large.len(), pool.small.len()), (LARGE_KEPT, SMALL_KEPT));
    }

    #[test]
    fn a_small_buffer_for_long_is_not_a_large_one() {
        let mut pool = Pool::default();
        let large = pool.take_large();
        pool.give(large);
        let buffer = pool.take(5000, true);
        assert_eq!((buffer.len(), buffer.capacity()), (5000, 8192));
        assert_eq!(pool.take(5000, false).capacity(), TRANSFER_BYTES_MAX);
    }
}
