//! Sectors that identify the write that produced them. Each write has a number, and every byte of a sector follows
//! from that number and the position of the sector. An image thus shows for each sector the write that it holds; a
//! torn or misplaced sector matches no write.

use crate::random::mix;
use parking_lot::Mutex;
use std::sync::Arc;

/// The write that a sector shows: 0 is zeroes, any other value is the number of a write.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Content(pub u64);

/// Set in contents that a client has changed during the copy.
const CHANGED: u64 = 1 << 63;

impl Content {
    /// A sector of zeroes.
    pub const ZEROES: Self = Self(0);
    /// The content of a fresh simulated disk.
    pub const INITIAL: Self = Self(1);

    /// The variant of a write in a sector whose client changed the buffer during the copy. [`of`](Self::of)
    /// recognises it as the same write.
    #[must_use]
    pub const fn changed(self) -> Self {
        Self(self.0 | CHANGED)
    }

    /// Fills one sector, number `sector` of the device.
    pub fn fill(self, sector: u64, bytes: &mut [u8]) {
        if self == Self::ZEROES {
            bytes.fill(0);
            return;
        }
        for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&self.word(sector, at as u64).to_le_bytes());
        }
    }

    /// Fills consecutive sectors, beginning with number `first`.
    pub fn fill_range(self, first: u64, sector_size: usize, bytes: &mut [u8]) {
        for (sector, bytes) in (first..).zip(bytes.chunks_exact_mut(sector_size)) {
            self.fill(sector, bytes);
        }
    }

    /// The contents of a fresh simulated disk of `size` bytes.
    #[must_use]
    pub fn fresh_disk(size: u64, sector_size: usize) -> Arc<[u8]> {
        // Tests make thousands of disks of the same few sizes.
        static KNOWN: Mutex<Vec<(usize, Arc<[u8]>)>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock();
        let found = known.iter().find(|(sector, image)| *sector == sector_size && image.len() as u64 == size);
        if let Some((_, image)) = found {
            return Arc::clone(image);
        }
        let mut image = vec![0; size as usize];
        Self::INITIAL.fill_range(0, sector_size, &mut image);
        let image: Arc<[u8]> = image.into();
        known.push((sector_size, Arc::clone(&image)));
        image
    }

    /// The write that `bytes` holds as sector number `sector`; `None` if the sector is torn, misplaced or foreign.
    #[must_use]
    pub fn of(sector: u64, bytes: &[u8]) -> Option<Self> {
        let words = || bytes.chunks_exact(8).map(word_of);
        let content = Self(words().next()?);
        let shown = if content == Self::ZEROES {
            words().all(|word| word == 0)
        } else {
            words().enumerate().all(|(at, word)| word == content.word(sector, at as u64))
        };
        shown.then_some(Self(content.0 & !CHANGED))
    }

    const fn word(self, sector: u64, at: u64) -> u64 {
        match at {
            0 => self.0,
            1 => sector,
            _ => mix(self.0 ^ (sector << 32) ^ (at << 56)),
        }
    }
}

fn word_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_tells_its_write_and_a_torn_or_moved_one_tells_none() {
        let mut sector = [0; 512];
        assert_eq!(Content::of(9, &sector), Some(Content::ZEROES));
        Content(77).fill(9, &mut sector);
        assert_eq!(Content::of(9, &sector), Some(Content(77)));
        assert_eq!(Content::of(8, &sector), None);
        Content(77).changed().fill(9, &mut sector);
        assert_eq!(Content::of(9, &sector), Some(Content(77)));
        sector[511] ^= 1;
        assert_eq!(Content::of(9, &sector), None);
    }
}
