//! Memory for data in transit: aligned, so that it can go to a disk without a copy.

use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

/// A buffer that begins on a page border and whose capacity is whole pages, as direct I/O wants it.
///
/// It belongs to whoever holds it: no client can reach it while the engine or a disk works on it.
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

    /// Makes the buffer `length` bytes long. Capacity that is there is kept and not cleared: bytes that
    /// come into view hold what they held before.
    pub fn resize(&mut self, length: usize) {
        let pages = length.div_ceil(size_of::<Page>());
        if pages > self.pages.len() {
            self.pages.resize(pages, Page::new_zeroed());
        }
        self.length = length;
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

/// Buffers that one thread uses again and again.
///
/// Always true here: no more bytes are kept than the limit says; what a buffer held before is not cleared.
///
/// Left to others: giving up all of them when there is nothing to do ([`trim`](Self::trim)).
#[derive(Debug)]
pub struct SpareBuffers {
    /// The one that was given back last is the last.
    free: Vec<AlignedBuffer>,
    /// Bytes of them, and how many there may be.
    held: usize,
    limit: usize,
}

impl SpareBuffers {
    /// So many are looked at for one that is large enough.
    const LOOKS: usize = 64;

    /// No buffers; at most `limit` bytes will be kept.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self { free: Vec::new(), held: 0, limit }
    }

    /// A buffer of `length` bytes of any content: the smallest of those that were given back last, or a new one.
    pub fn take(&mut self, length: usize) -> AlignedBuffer {
        let looked = self.free.len().saturating_sub(Self::LOOKS);
        let fits = self.free[looked..].iter().enumerate().filter(|(_, buffer)| buffer.capacity() >= length);
        let mut buffer = match fits.min_by_key(|(_, buffer)| buffer.capacity()) {
            Some((place, _)) => self.free.remove(looked + place),
            None => AlignedBuffer::default(),
        };
        self.held -= buffer.capacity();
        buffer.resize(length);
        buffer
    }

    /// Takes a buffer back. What was given back first goes where that is too much.
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

    /// Gives all of them up.
    pub fn trim(&mut self) {
        *self = Self::new(self.limit);
    }

    /// Bytes that are kept.
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
        let place = buffer.as_ptr();
        spare.give(buffer);
        assert_eq!(spare.held(), 8192);
        let again = spare.take(100);
        assert_eq!((again.as_ptr(), again.len(), spare.held()), (place, 100, 0));
    }

    #[test]
    fn the_smallest_spare_buffer_that_fits_is_taken() {
        let mut spare = SpareBuffers::new(1 << 20);
        let buffers = [16_384, 4096, 8192].map(|length| spare.take(length));
        buffers.into_iter().for_each(|buffer| spare.give(buffer));
        assert_eq!(spare.take(5000).capacity(), 8192);
        assert_eq!(spare.take(5000).capacity(), 16_384);
        assert_eq!(spare.take(5000).capacity(), 8192, "a new one");
    }

    #[test]
    fn no_more_is_kept_than_the_limit_says_and_nothing_after_a_trim() {
        let mut spare = SpareBuffers::new(1 << 20);
        let burst: Vec<_> = (1..=64).map(|number| spare.take(number * 4096)).collect();
        for buffer in burst {
            spare.give(buffer);
            assert!(spare.held() <= 1 << 20, "{} bytes are kept", spare.held());
        }
        spare.give(AlignedBuffer::zeroed(2 << 20));
        assert!((3 << 18..=1 << 20).contains(&spare.held()), "{} bytes are kept", spare.held());
        spare.trim();
        assert_eq!(spare.held(), 0);
    }

    #[test]
    fn a_steady_load_allocates_nothing() {
        let mut spare = SpareBuffers::new(65_536);
        let mut places = alloc::collections::BTreeSet::new();
        let mut busy: alloc::collections::VecDeque<_> = (0..8).map(|_| spare.take(65_536)).collect();
        for _ in 0..100 {
            spare.give(busy.pop_front().unwrap_or_default());
            let buffer = spare.take(65_536);
            places.insert(buffer.as_ptr() as usize);
            busy.push_back(buffer);
        }
        assert!(places.len() <= 8, "{} buffers for 8 that are in use at a time", places.len());
    }

    #[test]
    fn a_buffer_begins_on_a_page_border() {
        let buffer = AlignedBuffer::from_slice(&[7; 5000]);
        assert_eq!(buffer.as_ptr() as usize % 4096, 0);
        assert_eq!(buffer.len(), 5000);
        assert_eq!(buffer.capacity(), 8192);
        assert!(buffer.iter().all(|&byte| byte == 7));
    }
}
