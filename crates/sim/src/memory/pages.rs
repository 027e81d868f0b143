//! Bytes that copies share until one of them changes, so that a copy of a region costs microseconds.

use std::sync::Arc;

const PAGE: usize = 4096;

/// Bytes in pages; pages that were never stored are zeroes and take no memory.
#[derive(Clone)]
pub(super) struct Pages {
    pages: Vec<Option<Arc<[u8; PAGE]>>>,
    length: u64,
}

impl Pages {
    pub(super) fn zeroes(length: u64) -> Self {
        Self { pages: vec![None; (length as usize).div_ceil(PAGE)], length }
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut pages = Self::zeroes(bytes.len() as u64);
        for (number, page) in bytes.chunks(PAGE).enumerate() {
            if page.iter().any(|byte| *byte != 0) {
                pages.write((number * PAGE) as u64, page);
            }
        }
        pages
    }

    /// Adds bytes at the end, which is the end of a page.
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        assert!(self.length.is_multiple_of(PAGE as u64), "whole pages");
        let at = self.length;
        self.length += bytes.len() as u64;
        self.pages.resize((self.length as usize).div_ceil(PAGE), None);
        self.write(at, bytes);
    }

    pub(super) const fn len(&self) -> u64 {
        self.length
    }

    /// Calls `each` for each page that the `length` bytes at `at` touch, with the number of the page, the offset of the bytes in
    /// the page, and their range within the `length` bytes.
    fn walk(at: u64, length: usize, mut each: impl FnMut(usize, usize, std::ops::Range<usize>)) {
        let (mut at, mut done) = (at as usize, 0);
        while done < length {
            let within = at % PAGE;
            let count = (PAGE - within).min(length - done);
            each(at / PAGE, within, done..done + count);
            at += count;
            done += count;
        }
    }

    pub(super) fn read(&self, at: u64, into: &mut [u8]) {
        Self::walk(at, into.len(), |page, within, part| {
            let into = &mut into[part];
            match &self.pages[page] {
                Some(page) => into.copy_from_slice(&page[within..within + into.len()]),
                None => into.fill(0),
            }
        });
    }

    pub(super) fn write(&mut self, at: u64, from: &[u8]) {
        Self::walk(at, from.len(), |page, within, part| {
            let from = &from[part];
            let page = self.pages[page].get_or_insert_with(|| Arc::new([0; PAGE]));
            Arc::make_mut(page)[within..within + from.len()].copy_from_slice(from);
        });
    }

    pub(super) fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.length as usize];
        self.read(0, &mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_what_it_had_when_the_other_changes() {
        let mut pages = Pages::zeroes(3 * PAGE as u64 + 100);
        pages.write(4000, &[1; 200]);
        let copy = pages.clone();
        pages.write(4090, &[2; 20]);
        let mut bytes = [9; 30];
        copy.read(4085, &mut bytes);
        assert_eq!(bytes, [1; 30]);
        pages.read(4085, &mut bytes);
        assert_eq!(bytes[..], [[1; 5].as_slice(), &[2; 20], &[1; 5]].concat());
        assert_eq!(Pages::from_bytes(&pages.to_vec()).to_vec(), pages.to_vec());
    }
}
