//! The ranges of the device that the dirty keys cover: the newest key of each byte, in a window of the device that is
//! as large as memory permits.
//!
//! Invariants: pieces never overlap; a later key covers an earlier one, damaged or not; there are never more than the
//! limit plus two.
//!
//! Elsewhere: the order of keys (`log`), the validity of the data (`scan`).

use crate::report::Reason;
use cbd_types::ByteRange;
use std::collections::BTreeMap;

/// The location of a piece's data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Data {
    /// From this byte of the image on.
    At(u64),
    /// Not available.
    Lost(Reason),
}

/// A part of the device, and the key with its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    /// One past its last byte.
    pub end: u64,
    /// The offset of its key in the image.
    pub key: u64,
    pub data: Data,
}

impl Piece {
    /// The part of a piece behind its first `skip` bytes.
    fn behind(self, skip: u64) -> Self {
        let data = match self.data {
            Data::At(at) => Data::At(at + skip),
            lost @ Data::Lost(_) => lost,
        };
        Self { data, ..self }
    }
}

/// The pieces of a window.
#[derive(Debug)]
pub(crate) struct Pieces {
    window: ByteRange,
    max: usize,
    by_start: BTreeMap<u64, Piece>,
}

impl Pieces {
    /// A window of the device from `from` on, to its end or as far as `max` pieces suffice.
    pub fn new(from: u64, max: usize) -> Self {
        Self { window: ByteRange { start: from, end: u64::MAX }, max: max.max(4), by_start: BTreeMap::new() }
    }

    /// The end of the window. It only shrinks while pieces are added.
    pub const fn end(&self) -> u64 {
        self.window.end
    }

    /// Covers a range with the data of a key that begin there.
    pub fn cover(&mut self, range: ByteRange, key: u64, data: Data) {
        let start = range.start.max(self.window.start);
        let end = range.end.min(self.window.end);
        if start >= end {
            return;
        }
        self.remove_range(start, end);
        let piece = Piece { end: range.end, key, data }.behind(start - range.start);
        self.by_start.insert(start, Piece { end, ..piece });
        if self.by_start.len() > self.max {
            self.shrink();
        }
    }

    /// Removes a range from the pieces that overlap it.
    fn remove_range(&mut self, start: u64, end: u64) {
        if let Some((&begin, piece)) = self.by_start.range_mut(..start).next_back()
            && piece.end > start
        {
            let whole = *piece;
            piece.end = start;
            if whole.end > end {
                self.by_start.insert(end, whole.behind(end - begin));
            }
        }
        while let Some((&begin, &piece)) = self.by_start.range(start..end).next() {
            self.by_start.remove(&begin);
            if piece.end > end {
                self.by_start.insert(end, piece.behind(end - begin));
            }
        }
    }

    /// Drops the upper half, which a later window covers.
    fn shrink(&mut self) {
        if let Some((&middle, _)) = self.by_start.iter().nth(self.max / 2) {
            self.by_start.split_off(&middle);
            self.window.end = middle;
        }
    }

    /// All of them, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (ByteRange, &Piece)> {
        self.by_start.iter().map(|(&start, piece)| (ByteRange { start, end: piece.end }, piece))
    }

    /// The offsets of the keys whose data is needed, each once, in ascending order.
    pub fn keys(&self) -> Vec<u64> {
        let with_data = self.by_start.values().filter(|piece| matches!(piece.data, Data::At(_)));
        let mut keys: Vec<u64> = with_data.map(|piece| piece.key).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covered(keys: &[(u64, u64)], max: usize) -> Vec<(u64, u64, u64, u64)> {
        let mut all = Vec::new();
        let mut from = 0;
        while from != u64::MAX {
            let mut pieces = Pieces::new(from, max);
            for (number, &(start, end)) in keys.iter().enumerate() {
                let number = number as u64;
                pieces.cover(ByteRange { start, end }, number, Data::At(number * 1000));
            }
            all.extend(pieces.iter().map(|(range, piece)| {
                let Data::At(at) = piece.data else { panic!("all have data") };
                (range.start, range.end, piece.key, at)
            }));
            from = pieces.end();
        }
        all
    }

    #[test]
    fn a_later_key_covers_an_earlier_one() {
        assert_eq!(covered(&[(0, 10), (2, 4)], 99), [(0, 2, 0, 0), (2, 4, 1, 1000), (4, 10, 0, 4)]);
        assert_eq!(covered(&[(2, 4), (0, 10)], 99), [(0, 10, 1, 1000)]);
        assert_eq!(covered(&[(0, 10), (5, 15)], 99), [(0, 5, 0, 0), (5, 15, 1, 1000)]);
        assert_eq!(covered(&[(5, 15), (0, 10)], 99), [(0, 10, 1, 1000), (10, 15, 0, 5)]);
        assert_eq!(covered(&[(0, 10), (0, 10)], 99), [(0, 10, 1, 1000)]);
    }

    #[test]
    fn windows_together_show_what_one_large_window_shows() {
        let mut number = 1_u64;
        let mut random = |below: u64| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (number >> 33) % below
        };
        for _ in 0..200 {
            let keys: Vec<_> = (0..60)
                .map(|_| {
                    let start = random(300);
                    (start, start + 1 + random(40))
                })
                .collect();
            let bytes = |pieces: Vec<(u64, u64, u64, u64)>| -> Vec<(u64, u64, u64)> {
                let each = pieces.into_iter().flat_map(|(start, end, key, at)| {
                    (start..end).map(move |byte| (byte, key, at + byte - start))
                });
                each.collect()
            };
            // The model: byte by byte, the last key is valid.
            let mut model = vec![None; 400];
            for (key, &(start, end)) in keys.iter().enumerate() {
                for byte in start..end {
                    model[byte as usize] = Some((byte, key as u64, key as u64 * 1000 + byte - start));
                }
            }
            let model: Vec<_> = model.into_iter().flatten().collect();
            assert_eq!(bytes(covered(&keys, 1000)), model);
            assert_eq!(bytes(covered(&keys, 4)), model);
            assert_eq!(bytes(covered(&keys, 13)), model);
        }
    }
}
