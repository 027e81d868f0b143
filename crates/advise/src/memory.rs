//! The memory of a simulated cache: only pages that are not zeroes are kept.
//!
//! The data of a simulated cache is zeroes, so that its region takes memory for headers and records alone: some 4 % of its size.
//!
//! Invariants: a load returns what was stored last; a page of zeroes takes no memory, also if it had another content before.

use cbd_format::crc32c;
use cbd_types::pmem::{Durability, MediaError, Pmem};
use cbd_types::{ByteRange, CHECKSUM_BLOCK};
use parking_lot::Mutex;

const PAGE: usize = CHECKSUM_BLOCK as usize;
const ZEROES: [u8; PAGE] = [0; PAGE];

type Page = [u8; PAGE];

/// The memory.
pub struct SimulatedMemory {
    pages: Mutex<Vec<Option<Box<Page>>>>,
    length: u64,
    /// The checksum of a page of zeroes.
    zeroes_sum: u32,
}

impl SimulatedMemory {
    /// `length` bytes of zeroes.
    pub fn new(length: u64) -> Self {
        let mut pages = Vec::new();
        pages.resize_with((length as usize).div_ceil(PAGE), || None);
        Self { pages: Mutex::new(pages), length, zeroes_sum: crc32c(&ZEROES) }
    }

    /// Bytes of the pages that are kept, and of their table.
    pub fn kept_bytes(&self) -> u64 {
        let pages = self.pages.lock();
        let kept = pages.iter().flatten().count() * PAGE;
        (kept + pages.len() * size_of::<Option<Box<Page>>>()) as u64
    }

    fn sum(&self, bytes: &[u8]) -> u32 {
        if bytes.len() == PAGE && is_zero(bytes) { self.zeroes_sum } else { crc32c(bytes) }
    }
}

/// Whether `bytes`, a page at most, are zeroes.
fn is_zero(bytes: &[u8]) -> bool {
    bytes == &ZEROES[..bytes.len()]
}

/// The pages of `length` bytes at `at`: the number of each, the first byte in it, and the part of the bytes.
fn parts(at: u64, length: usize) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>)> {
    ByteRange::at(at, length as u64).split_at_multiples(PAGE as u64).map(move |part| {
        let first = (part.start - at) as usize;
        let number = (part.start / PAGE as u64) as usize;
        (number, (part.start % PAGE as u64) as usize, first..first + part.len() as usize)
    })
}

impl Pmem for SimulatedMemory {
    fn len(&self) -> u64 {
        self.length
    }

    fn durability(&self) -> Durability {
        Durability::ProcessCrash
    }

    fn store(&self, at: u64, from: &[u8]) {
        let mut pages = self.pages.lock();
        for (number, within, part) in parts(at, from.len()) {
            let (place, from) = (&mut pages[number], &from[part]);
            if (place.is_none() || from.len() == PAGE) && is_zero(from) {
                *place = None;
                continue;
            }
            let page = place.get_or_insert_with(|| Box::new(ZEROES));
            page[within..within + from.len()].copy_from_slice(from);
        }
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        let (head, rest) = from.split_at(first.min(from.len()));
        let blocks = std::iter::once(head).chain(rest.chunks(PAGE));
        checksums.iter_mut().zip(blocks).for_each(|(sum, block)| *sum = self.sum(block));
        self.store(at, from);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.store(at, line);
    }

    fn fence(&self) {}

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        let end = at.checked_add(into.len() as u64).filter(|end| *end <= self.length);
        end.ok_or(MediaError { at })?;
        let pages = self.pages.lock();
        for (number, within, part) in parts(at, into.len()) {
            let into = &mut into[part];
            match &pages[number] {
                Some(page) => into.copy_from_slice(&page[within..within + into.len()]),
                None => into.fill(0),
            }
        }
        Ok(())
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        self.load(at, into)?;
        Ok(self.sum(into))
    }

    fn write_back(&self, _at: u64, _length: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_take_no_memory_and_everything_else_is_kept() {
        let memory = SimulatedMemory::new(1 << 20);
        let empty = memory.kept_bytes();
        memory.store(4096, &[0; 8192]);
        assert_eq!(memory.kept_bytes(), empty);
        let mut checksums = [0; 3];
        let bytes: Vec<u8> = (0..9000).map(|number| (number % 251) as u8).collect();
        memory.store_summed(5000, &bytes, 3192, &mut checksums);
        assert_eq!(checksums, [crc32c(&bytes[..3192]), crc32c(&bytes[3192..7288]), crc32c(&bytes[7288..])]);
        let mut read = vec![1; 9002];
        let sum = memory.load_summed(4999, &mut read).expect("inside");
        assert_eq!((read[0], &read[1..9001], read[9001], sum), (0, &*bytes, 0, crc32c(&read)));
        assert_eq!(memory.kept_bytes(), empty + 3 * 4096);
        memory.store(4096, &[0; 3 * 4096]);
        assert_eq!(memory.kept_bytes(), empty);
        let mut page = [1; 4096];
        assert_eq!(memory.load_summed(8192, &mut page), Ok(crc32c(&[0; 4096])));
        assert_eq!(memory.load(1 << 20, &mut page), Err(MediaError { at: 1 << 20 }));
    }
}
