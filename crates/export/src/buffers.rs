//! Buffers of one connection or queue that are reused, so that a steady load allocates no memory.
//!
//! Invariants: capacities are powers of two of at least a page. The previous contents of a buffer never reach a client (a failed
//! read sends no data), so buffers are not cleared.

use cbd_types::AlignedBuffer;

const SMALLEST: usize = 4096;
/// Number of powers of two from [`SMALLEST`]; more than the longest request needs.
const CLASSES: usize = 20;

/// Free buffers by capacity.
#[derive(Default, Debug)]
pub struct Buffers {
    free: [Vec<AlignedBuffer>; CLASSES],
    held: usize,
}

impl Buffers {
    /// A buffer of `length` bytes with any contents.
    #[must_use]
    pub fn take(&mut self, length: usize) -> AlignedBuffer {
        let capacity = length.max(SMALLEST).next_power_of_two();
        let mut buffer = match self.free.get_mut(class(capacity)).and_then(Vec::pop) {
            Some(buffer) => {
                self.held -= buffer.capacity();
                buffer
            }
            None => AlignedBuffer::zeroed(capacity),
        };
        buffer.resize(length);
        buffer
    }

    /// Adds a buffer to the free ones.
    pub fn give(&mut self, buffer: AlignedBuffer) {
        let capacity = buffer.capacity();
        if capacity >= SMALLEST
            && capacity.is_power_of_two()
            && let Some(free) = self.free.get_mut(class(capacity))
        {
            self.held += capacity;
            free.push(buffer);
        }
    }

    /// Whether there is a free buffer of `length` bytes, so that [`take`](Self::take) allocates none.
    #[must_use]
    pub fn has(&self, length: usize) -> bool {
        let capacity = length.max(SMALLEST).next_power_of_two();
        self.free.get(class(capacity)).is_some_and(|free| !free.is_empty())
    }

    /// Frees all free buffers.
    pub fn trim(&mut self) {
        *self = Self::default();
    }

    /// Bytes in free buffers.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.held
    }
}

const fn class(capacity: usize) -> usize {
    (capacity / SMALLEST).trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returned_buffer_is_reused() {
        let mut buffers = Buffers::default();
        let buffer = buffers.take(5000);
        let place = buffer.as_ptr();
        buffers.give(buffer);
        assert_eq!(buffers.held(), 8192);
        let again = buffers.take(8192);
        assert_eq!((again.as_ptr(), again.len()), (place, 8192));
        assert_eq!(buffers.held(), 0);
    }

    #[test]
    fn a_buffer_that_is_too_small_is_not_used() {
        let mut buffers = Buffers::default();
        buffers.give(AlignedBuffer::zeroed(4096));
        assert_eq!(buffers.take(4097).len(), 4097);
        assert_eq!(buffers.held(), 4096);
        buffers.trim();
        assert_eq!(buffers.held(), 0);
    }

    #[test]
    fn an_empty_buffer_is_not_kept() {
        let mut buffers = Buffers::default();
        buffers.give(AlignedBuffer::default());
        assert_eq!(buffers.held(), 0);
    }
}
