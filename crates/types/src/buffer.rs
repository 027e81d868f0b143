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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_begins_on_a_page_border() {
        let buffer = AlignedBuffer::from_slice(&[7; 5000]);
        assert_eq!(buffer.as_ptr() as usize % 4096, 0);
        assert_eq!(buffer.len(), 5000);
        assert_eq!(buffer.capacity(), 8192);
        assert!(buffer.iter().all(|&byte| byte == 7));
    }
}
