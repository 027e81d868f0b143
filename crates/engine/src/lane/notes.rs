//! Notes damage in many pieces with few records.
//!
//! Invariants: all damage is noted as damage. Pieces that lie in one chunk share a record with a map of their sectors, so that
//! a chunk takes at most one record and its lines, however many pieces there are. Only if even this exceeds the space that is
//! kept back for it, the smallest healed gaps are noted as damaged again: reads of them succeed until they are reclaimed and
//! the cache is opened again, and then fail until they are overwritten once more.
//!
//! Elsewhere: what is damaged (`damage`).

use alloc::{vec, vec::Vec};
use cbd_format::record::map_lines;
use cbd_types::{ByteRange, CHUNK, SECTOR, heap_sort_by_key};

/// The content of one quarantine record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Note {
    pub range: ByteRange,
    /// A bit for each sector of the range, set if it is damaged. Empty if all of the range is damaged.
    pub map: Vec<u32>,
}

impl Note {
    const fn all_of(range: ByteRange) -> Self {
        Self { range, map: Vec::new() }
    }

    /// Slots that its record takes.
    pub(crate) fn slots(&self) -> u32 {
        if self.map.is_empty() { 1 } else { 1 + map_lines(self.range) }
    }
}

/// The notes of `parts`, which are in order and do not overlap, in at most `slots` slots.
pub(crate) fn of(parts: &[ByteRange], slots: u32) -> Vec<Note> {
    let notes: Vec<Note> = parts.chunk_by(is_in_one_chunk).flat_map(of_chunk).collect();
    if notes.iter().map(Note::slots).sum::<u32>() <= slots {
        return notes;
    }
    let spans = notes.into_iter().map(|note| note.range).collect();
    closed(spans, slots as usize).into_iter().map(Note::all_of).collect()
}

/// The parts of `range` that a map marks.
pub(crate) fn parts_of(range: ByteRange, map: &[u32]) -> Vec<ByteRange> {
    let mut parts: Vec<ByteRange> = Vec::new();
    let sectors = range.len().div_ceil(SECTOR);
    for sector in (0..sectors)
        .filter(|sector| map.get((*sector / 32) as usize).is_some_and(|word| word >> (*sector % 32) & 1 == 1))
    {
        let start = range.start + sector * SECTOR;
        let part = ByteRange { start, end: (start + SECTOR).min(range.end) };
        match parts.last_mut() {
            Some(last) if last.end == part.start => last.end = part.end,
            _ => parts.push(part),
        }
    }
    parts
}

fn is_in_one_chunk(a: &ByteRange, b: &ByteRange) -> bool {
    a.start / CHUNK == (b.end - 1) / CHUNK
}

/// The notes of parts that all lie in one chunk, or of a single part.
fn of_chunk(parts: &[ByteRange]) -> Vec<Note> {
    let [first, .., last] = parts else {
        return parts.iter().copied().map(Note::all_of).collect();
    };
    let range = ByteRange { start: first.start, end: last.end };
    if parts.len() <= 1 + map_lines(range) as usize {
        return parts.iter().copied().map(Note::all_of).collect();
    }
    let mut map = vec![0; range.len().div_ceil(SECTOR).div_ceil(32) as usize];
    for part in parts {
        for sector in (part.start - range.start) / SECTOR..(part.end - range.start).div_ceil(SECTOR) {
            map[(sector / 32) as usize] |= 1 << (sector % 32);
        }
    }
    vec![Note { range, map }]
}

/// Closes the smallest gaps between the parts until at most `count` parts are left.
fn closed(parts: Vec<ByteRange>, count: usize) -> Vec<ByteRange> {
    let mut gaps: Vec<u64> = parts.windows(2).map(|pair| pair[1].start - pair[0].end).collect();
    heap_sort_by_key(&mut gaps, |gap| core::cmp::Reverse(*gap));
    // Wider gaps than this stay open; of the gaps of this width, the first ones.
    let stay = count.saturating_sub(1);
    let limit = gaps.get(stay).copied().unwrap_or(0);
    let mut equal = stay - gaps.iter().take(stay).filter(|gap| **gap > limit).count();
    let mut result: Vec<ByteRange> = Vec::new();
    for part in parts {
        match result.last_mut() {
            Some(last) if part.start - last.end < limit => last.end = part.end,
            Some(last) if part.start - last.end == limit => {
                if equal == 0 {
                    last.end = part.end;
                } else {
                    equal -= 1;
                    result.push(part);
                }
            }
            _ => result.push(part),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_other(chunk: u64, count: u64) -> Vec<ByteRange> {
        (0..count).map(|number| ByteRange::at(chunk * CHUNK + number * 2 * SECTOR, SECTOR)).collect()
    }

    fn parts(notes: &[Note]) -> Vec<ByteRange> {
        notes
            .iter()
            .flat_map(|note| match note.map.is_empty() {
                true => vec![note.range],
                false => parts_of(note.range, &note.map),
            })
            .collect()
    }

    fn slots(notes: &[Note]) -> u32 {
        notes.iter().map(Note::slots).sum()
    }

    #[test]
    fn notes_say_just_what_is_damaged_while_there_is_room() {
        let all = ByteRange { start: 0, end: 64 * CHUNK };
        let crossing = ByteRange { start: CHUNK - SECTOR, end: 3 * CHUNK };
        let behind = every_other(5, 4096);
        let mixed: Vec<_> =
            every_other(0, 3).into_iter().chain([crossing]).chain(behind.iter().copied()).collect();
        for damaged in [vec![], vec![all], every_other(0, 2), behind, mixed] {
            let notes = of(&damaged, 112);
            assert_eq!(parts(&notes), damaged);
            assert!(slots(&notes) <= 1 + 3 + 23);
        }
    }

    #[test]
    fn notes_never_take_more_room_than_there_is_and_cover_all_damage() {
        let damaged: Vec<_> = (0..40).flat_map(|chunk| every_other(chunk, 100 + chunk)).collect();
        for room in [1, 2, 3, 39, 40, 41, 100] {
            let notes = of(&damaged, room);
            assert!(slots(&notes) <= room, "{} of {room}", slots(&notes));
            let noted = parts(&notes);
            assert!(damaged.iter().all(|part| noted.iter().any(|wide| wide.contains(part))));
            assert!(noted.is_sorted_by(|a, b| a.end < b.start));
        }
    }

    #[test]
    fn the_smallest_gaps_are_closed() {
        let damaged =
            [(0, 1), (2, 3), (10, 11), (12, 13), (30, 31)].map(|(start, end)| ByteRange { start, end });
        let expected = [(0, 3), (10, 13), (30, 31)].map(|(start, end)| ByteRange { start, end });
        assert_eq!(closed(damaged.to_vec(), 3), expected);
        assert_eq!(closed(damaged.to_vec(), 1), [ByteRange { start: 0, end: 31 }]);
        assert_eq!(closed(damaged.to_vec(), 9), damaged);
    }

    #[test]
    fn a_map_is_made_only_where_records_would_take_more_slots() {
        for (count, maps, taken) in [(1, 0, 1), (2, 0, 2), (3, 1, 2), (100, 1, 2), (193, 1, 3)] {
            let notes = of(&every_other(7, count), 112);
            let with_map = notes.iter().filter(|note| !note.map.is_empty()).count();
            assert_eq!((with_map, slots(&notes)), (maps, taken), "{count} parts");
        }
        // As many records as the map and its lines take are no more.
        let apart = [0, 500 * SECTOR, 900 * SECTOR].map(|at| ByteRange::at(at, SECTOR));
        assert_eq!(of(&apart, 112).len(), 3);
    }

    #[test]
    fn parts_share_a_map_up_to_the_last_byte_of_their_chunk() {
        let last = ByteRange { start: 3 * CHUNK - SECTOR, end: 3 * CHUNK };
        let mut damaged = every_other(2, 30);
        damaged.push(last);
        damaged.extend(every_other(3, 30));
        let notes = of(&damaged, 112);
        assert_eq!(notes.iter().filter(|note| !note.map.is_empty()).count(), 2, "{notes:?}");
        assert_eq!(parts(&notes), damaged);
        assert!(is_in_one_chunk(&ByteRange::at(2 * CHUNK, 1), &last));
        assert!(!is_in_one_chunk(&last, &ByteRange::at(3 * CHUNK, SECTOR)));
        let far = 5000 * CHUNK;
        assert!(is_in_one_chunk(&ByteRange::at(far, 1), &ByteRange::at(far + SECTOR, SECTOR)));
        assert!(!is_in_one_chunk(&ByteRange::at(far - SECTOR, SECTOR), &ByteRange::at(far, SECTOR)));
    }

    #[test]
    fn of_gaps_that_are_equally_wide_the_first_ones_stay() {
        let damaged: Vec<_> = (0..6).map(|number| ByteRange::at(number * 10, 5)).collect();
        for count in 1..6_u64 {
            let mut expected: Vec<_> = damaged[..count as usize].to_vec();
            expected[count as usize - 1].end = 55;
            assert_eq!(closed(damaged.clone(), count as usize), expected);
        }
        assert_eq!(closed(damaged.clone(), 6), damaged);
        assert_eq!(closed(damaged.clone(), 0), [ByteRange { start: 0, end: 55 }]);
        assert_eq!(closed(vec![], 3), []);
        // A wider gap and one of three that are alike.
        let mixed = [(0, 1), (3, 4), (6, 7), (20, 21), (23, 24)].map(|(start, end)| ByteRange { start, end });
        let expected = [(0, 1), (3, 7), (20, 24)].map(|(start, end)| ByteRange { start, end });
        assert_eq!(closed(mixed.to_vec(), 3), expected);
    }

    #[test]
    fn the_parts_of_a_map_end_with_its_range() {
        let range = ByteRange { start: 4 * SECTOR, end: 6 * SECTOR + 100 };
        let parts = |map: &[u32]| parts_of(range, map);
        assert_eq!(parts(&[0b111]), [range]);
        assert_eq!(parts(&[0b101]), [ByteRange::at(4 * SECTOR, SECTOR), ByteRange::at(6 * SECTOR, 100)]);
        assert_eq!(parts(&[u32::MAX]), [range], "what stands behind it is no part");
        assert_eq!(parts(&[]), []);
        let long = ByteRange::at(0, 40 * SECTOR);
        assert_eq!(parts_of(long, &[1 << 31, 1]), [ByteRange::at(31 * SECTOR, 2 * SECTOR)]);
    }
}
