//! Memory for data in transit: aligned, so that a disk can access it without a copy.

use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// A buffer that begins at a page boundary and whose capacity is whole pages, as direct I/O requires.
///
/// The holder owns the buffer: no client can access it while the engine or a disk works on it.
#[derive(Default)]
pub struct AlignedBuffer {
    pages: Vec<Page>,
    length: usize,
}

impl AlignedBuffer {
    /// A buffer of `length` zero bytes.
    #[must_use]
    pub fn zeroed(length: usize) -> Self {
        let mut buffer = Self::default();
        buffer.resize(length);
        buffer
    }

    /// A buffer with a copy of `bytes`.
    #[must_use]
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Makes the buffer `length` bytes long. Existing capacity is kept and not cleared: newly visible bytes have their
    /// former content.
    pub fn resize(&mut self, length: usize) {
        let pages = length.div_ceil(size_of::<Page>());
        if pages > self.pages.len() {
            self.pages.resize(pages, Page::new_zeroed());
        }
        self.length = length;
    }

    /// As [`resize`](Self::resize); `None`, and nothing has changed, if there is no memory.
    fn try_resize(&mut self, length: usize) -> Option<()> {
        let pages = length.div_ceil(size_of::<Page>());
        self.pages.try_reserve_exact(pages.saturating_sub(self.pages.len())).ok()?;
        self.resize(length);
        Some(())
    }

    /// Bytes that the buffer can hold without a new allocation.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.pages.len() * size_of::<Page>()
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.pages.as_bytes()[..self.length]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_bytes()[..self.length]
    }
}

impl core::fmt::Debug for AlignedBuffer {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(out, "AlignedBuffer({} bytes)", self.length)
    }
}

/// Buffers that one thread reuses.
///
/// Invariants: the capacity of the spare buffers does not exceed the limit; the content of a buffer is not cleared.
///
/// Elsewhere: the decision to free all buffers when the thread is idle ([`trim`](Self::trim)).
#[derive(Debug)]
pub struct SpareBuffers {
    /// In order of return: the last element was returned last.
    free: Vec<AlignedBuffer>,
    /// The capacity of all free buffers in bytes, and its limit.
    held: usize,
    limit: usize,
}

impl SpareBuffers {
    /// Number of buffers that are checked for sufficient capacity; this bounds the time of a `take`.
    const CHECKED_MAX: usize = 64;

    /// No buffers; at most `limit` bytes will be held.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self { free: Vec::new(), held: 0, limit }
    }

    /// A buffer of `length` bytes with undefined content: the smallest sufficient one of the buffers that were returned
    /// last, or a new one.
    pub fn take(&mut self, length: usize) -> AlignedBuffer {
        let mut buffer = self.take_free(length);
        buffer.resize(length);
        buffer
    }

    /// As [`take`](Self::take); `None` if there is no memory for a new one.
    pub fn try_take(&mut self, length: usize) -> Option<AlignedBuffer> {
        let mut buffer = self.take_free(length);
        buffer.try_resize(length).map(|()| buffer)
    }

    /// The smallest sufficient one of the buffers that were returned last, or an empty one.
    fn take_free(&mut self, length: usize) -> AlignedBuffer {
        let mut found: Option<(usize, usize)> = None;
        for (index, buffer) in self.free.iter().enumerate().rev().take(Self::CHECKED_MAX) {
            let capacity = buffer.capacity();
            if capacity >= length && found.is_none_or(|(_, smallest)| capacity < smallest) {
                found = Some((index, capacity));
                // None is smaller.
                if capacity < length + size_of::<Page>() {
                    break;
                }
            }
        }
        let buffer = found.map_or_else(AlignedBuffer::default, |(index, _)| self.free.remove(index));
        self.held -= buffer.capacity();
        buffer
    }

    /// Returns a buffer. If the limit is exceeded, the buffers that were returned first are freed.
    pub fn give(&mut self, buffer: AlignedBuffer) {
        if buffer.capacity() == 0 || buffer.capacity() > self.limit {
            return;
        }
        self.held += buffer.capacity();
        self.free.push(buffer);
        let mut first = 0;
        while self.held > self.limit
            && let Some(oldest) = self.free.get(first)
        {
            self.held -= oldest.capacity();
            first += 1;
        }
        self.free.drain(..first);
    }

    /// Frees all buffers.
    pub fn trim(&mut self) {
        *self = Self::new(self.limit);
    }

    /// Capacity of all free buffers in bytes.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spare_buffer_is_used_again() {
        let mut spare = SpareBuffers::new(8192);
        let buffer = spare.take(5000);
        let address = buffer.as_ptr();
        spare.give(buffer);
        assert_eq!(spare.held(), 8192);
        let again = spare.take(100);
        assert_eq!((again.as_ptr(), again.len(), spare.held()), (address, 100, 0));
    }

    #[test]
    fn the_smallest_spare_buffer_that_fits_is_taken() {
        let mut spare = SpareBuffers::new(1 << 20);
        let buffers = [16_384, 4096, 8192].map(|length| spare.take(length));
        buffers.into_iter().for_each(|buffer| spare.give(buffer));
        assert_eq!(spare.take(5000).capacity(), 8192);
        assert_eq!(spare.take(5000).capacity(), 16_384);
        assert_eq!(spare.take(5000).capacity(), 8192, "a new buffer");
    }

    #[test]
    fn spare_buffers_do_not_exceed_the_limit_and_a_trim_frees_all() {
        let mut spare = SpareBuffers::new(1 << 20);
        let burst: Vec<_> = (1..=64).map(|number| spare.take(number * 4096)).collect();
        for buffer in burst {
            spare.give(buffer);
            assert!(spare.held() <= 1 << 20, "{} bytes are held", spare.held());
        }
        spare.give(AlignedBuffer::zeroed(2 << 20));
        assert!((3 << 18..=1 << 20).contains(&spare.held()), "{} bytes are held", spare.held());
        spare.trim();
        assert_eq!(spare.held(), 0);
    }

    #[test]
    fn a_steady_load_allocates_nothing() {
        let mut spare = SpareBuffers::new(65_536);
        let mut addresses = alloc::collections::BTreeSet::new();
        let mut busy: alloc::collections::VecDeque<_> = (0..8).map(|_| spare.take(65_536)).collect();
        for _ in 0..100 {
            spare.give(busy.pop_front().unwrap_or_default());
            let buffer = spare.take(65_536);
            addresses.insert(buffer.as_ptr() as usize);
            busy.push_back(buffer);
        }
        assert!(addresses.len() <= 8, "{} buffers for 8 that are in use at a time", addresses.len());
    }

    #[test]
    fn a_buffer_begins_at_a_page_boundary() {
        let buffer = AlignedBuffer::from_slice(&[7; 5000]);
        assert_eq!(buffer.as_ptr() as usize % 4096, 0);
        assert_eq!(buffer.len(), 5000);
        assert_eq!(buffer.capacity(), 8192);
        assert!(buffer.iter().all(|&byte| byte == 7));
    }
}
