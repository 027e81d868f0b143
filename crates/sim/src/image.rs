//! The contents of a simulated disk. Only the blocks that differ from a fresh disk take memory, because a run makes
//! and checks thousands of worlds. Copies share the blocks that neither has changed since.

use crate::pattern::Content;
use cbd_types::ByteRange;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Size in bytes of a block that is stored.
const BLOCK: u64 = 16 << 10;

/// The contents of a disk: those of a fresh disk, except for the blocks that were changed.
#[derive(Clone)]
pub struct DiskImage {
    fresh: Arc<[u8]>,
    changed: BTreeMap<u64, Arc<[u8]>>,
}

impl DiskImage {
    /// The contents of a fresh disk of `size` bytes.
    #[must_use]
    pub fn fresh(size: u64, sector_size: usize) -> Self {
        Self { fresh: Content::fresh_disk(size, sector_size), changed: BTreeMap::new() }
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.fresh.len() as u64
    }

    fn block(&self, number: u64) -> &[u8] {
        let start = (number * BLOCK) as usize;
        let end = (start + BLOCK as usize).min(self.fresh.len());
        self.changed.get(&number).map_or(&self.fresh[start..end], |bytes| bytes)
    }

    fn block_mut(&mut self, number: u64) -> &mut [u8] {
        let start = (number * BLOCK) as usize;
        let end = (start + BLOCK as usize).min(self.fresh.len());
        Arc::make_mut(self.changed.entry(number).or_insert_with(|| self.fresh[start..end].into()))
    }

    /// Copies the bytes at offset `at`.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        for piece in ByteRange::at(at, into.len() as u64).split_at_multiples(BLOCK) {
            let within = (piece.start % BLOCK) as usize;
            let out = &mut into[(piece.start - at) as usize..(piece.end - at) as usize];
            out.copy_from_slice(&self.block(piece.start / BLOCK)[within..within + out.len()]);
        }
    }

    /// Changes `range` to `bytes`, or to zeroes.
    pub fn write(&mut self, range: ByteRange, bytes: Option<&[u8]>) {
        for piece in range.split_at_multiples(BLOCK) {
            let within = (piece.start % BLOCK) as usize;
            let place = &mut self.block_mut(piece.start / BLOCK)[within..within + piece.len() as usize];
            match bytes {
                Some(bytes) => place.copy_from_slice(
                    &bytes[(piece.start - range.start) as usize..(piece.end - range.start) as usize],
                ),
                None => place.fill(0),
            }
        }
    }

    /// The bytes of one sector; a sector never crosses a block.
    #[must_use]
    pub fn sector(&self, sector: u64, sector_size: u64) -> &[u8] {
        let at = sector * sector_size;
        let within = (at % BLOCK) as usize;
        &self.block(at / BLOCK)[within..within + sector_size as usize]
    }

    /// The sectors of blocks that were changed, in order; all others are as on a fresh disk.
    pub fn sectors_perhaps_changed(&self, sector_size: u64) -> impl Iterator<Item = u64> {
        let size = self.size();
        self.changed.keys().flat_map(move |number| {
            number * BLOCK / sector_size..((number + 1) * BLOCK).min(size) / sector_size
        })
    }
}

impl std::fmt::Debug for DiskImage {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "DiskImage({} bytes, {} blocks changed)", self.size(), self.changed.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_agrees_with_an_array() {
        let size = 3 * BLOCK + 512;
        let mut image = DiskImage::fresh(size, 512);
        let mut array = Content::fresh_disk(size, 512).to_vec();
        let mut random = crate::Seeded::new(5);
        for step in 0..200_u32 {
            let start = random.below(size / 512) * 512;
            let range = ByteRange { start, end: random.between(start / 512 + 1, size / 512) * 512 };
            let bytes = vec![step as u8; range.len() as usize];
            let bytes = random.chance(700).then_some(&bytes[..]);
            image.write(range, bytes);
            let place = &mut array[range.start as usize..range.end as usize];
            match bytes {
                Some(bytes) => place.copy_from_slice(bytes),
                None => place.fill(0),
            }
            let mut all = vec![1; size as usize];
            image.read(0, &mut all);
            assert!(all == array, "step {step}");
        }
        assert_eq!(image.sector(6, 512), &array[3072..3584]);
        assert_eq!(image.sectors_perhaps_changed(512).count() as u64, size / 512);
    }
}
