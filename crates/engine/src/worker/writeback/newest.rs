//! Reduces the records of a part to the newest version of each byte.
//!
//! Invariants: the returned ranges do not overlap and are sorted by address.
//!
//! Elsewhere: which records are in a part (`collect`).

use super::{Content, Piece};
use crate::rangemap::RangeMap;
use alloc::vec::Vec;
use cbd_types::{ByteRange, heap_sort_by_key};

/// The ranges of a part's records, each with its number in log order: of two overlapping ranges the one with the higher number is
/// newer.
#[derive(Default)]
pub(super) struct Found(Vec<(ByteRange, u32, Content)>);

impl Found {
    pub(super) fn add(&mut self, range: ByteRange, content: Content) {
        self.0.push((range, self.0.len() as u32, content));
    }

    /// The newest version of each byte, by address. Nearly all ranges are blocks that overlap no other or were overwritten as a
    /// whole: for these a sort suffices, without a map.
    pub(super) fn newest(self) -> Vec<Piece> {
        let Self(mut all) = self;
        heap_sort_by_key(&mut all, |(range, number, _)| (range.start, *number));
        let mut newest = Vec::with_capacity(all.len());
        let mut rest = &mut all[..];
        while let Some((first, _, content)) = rest.first().copied() {
            let mut end = first.end;
            let mut are_same = true;
            let meets = |(range, _, _): &&(ByteRange, u32, Content)| {
                let meets = range.start < end;
                if meets {
                    end = end.max(range.end);
                    are_same &= *range == first;
                }
                meets
            };
            let count = 1 + rest[1..].iter().take_while(meets).count();
            let (these, others) = rest.split_at_mut(count);
            rest = others;
            match these {
                [_] => newest.push((first, content)),
                [.., (_, _, last)] if are_same => {
                    newest.push((first, *last));
                }
                _ => newest_of_overlapping(these, &mut newest),
            }
        }
        newest
    }
}

fn newest_of_overlapping(these: &mut [(ByteRange, u32, Content)], newest: &mut Vec<Piece>) {
    heap_sort_by_key(these, |(_, number, _)| *number);
    let mut map: RangeMap<Content> = RangeMap::default();
    for (range, _, content) in these {
        map.insert(*range, *content, |_| false);
    }
    newest.extend(map.iter());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::Location;
    use cbd_types::LaneId;

    #[test]
    fn of_what_overlaps_the_newest_is_kept_and_all_comes_by_address() {
        let mut random = 7_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for round in 0..2000 {
            let mut found = Found::default();
            let mut newest = [None; 64];
            for number in 0..next(40) {
                let start = next(64);
                // Single blocks, the same blocks repeatedly, and long ranges that cover many.
                let length = if round % 2 == 0 { 1 } else { 1 + next(64 - start) };
                let location = Location { segment: 0, slot: number as u32 };
                let content = match next(4) {
                    0 => Content::Zeroes,
                    1 => Content::Discard,
                    _ => Content::Data { location, lane: LaneId(0), sequence: number },
                };
                found.add(ByteRange::at(start, length), content);
                newest[start as usize..(start + length) as usize].fill(Some(content));
            }
            let pieces = found.newest();
            assert!(pieces.is_sorted_by(|(a, _), (b, _)| a.end <= b.start), "{pieces:?}");
            let mut seen = [None; 64];
            for (range, content) in pieces {
                seen[range.start as usize..range.end as usize].fill(Some(content));
            }
            assert_eq!(seen, newest, "round {round}");
        }
    }
}
