//! The map of lanes against one that is counted chunk by chunk.

use super::*;
use alloc::{collections::BTreeSet, vec::Vec};

/// The chunks of `range` that belong to `lane`, cut to the range.
fn counted(map: LaneMap, lane: LaneId, range: ByteRange) -> Vec<ByteRange> {
    let chunks = range.split_at_multiples(CHUNK);
    chunks.filter(|chunk| map.lane_of(chunk.start) == lane).collect()
}

fn joined(parts: impl Iterator<Item = ByteRange>) -> Vec<ByteRange> {
    let mut all: Vec<ByteRange> = Vec::new();
    for part in parts {
        match all.last_mut() {
            Some(last) if last.end == part.start => last.end = part.end,
            _ => all.push(part),
        }
    }
    all
}

#[test]
fn the_parts_of_a_lane_are_its_chunks() {
    let ends = [0, 1, CHUNK - 512, CHUNK, CHUNK + 512, 7 * CHUNK, 8 * CHUNK, 23 * CHUNK + 5, 41 * CHUNK];
    for map in [1, 2, 4, 8].map(|lanes| LaneMap { lanes }) {
        for (start, end) in ends.iter().flat_map(|start| ends.iter().map(move |end| (*start, *end))) {
            if start > end {
                continue;
            }
            let range = ByteRange { start, end };
            let mut touched = Vec::new();
            for lane in (0..map.lanes).map(LaneId) {
                let expected = joined(counted(map, lane, range).into_iter());
                assert_eq!(joined(map.of_lane(lane, range)), expected, "{map:?} {lane} {range}");
                let bytes = expected.iter().map(ByteRange::len).sum::<u64>();
                assert_eq!(map.bytes_of(lane, range), bytes, "{map:?} {lane} {range}");
                if bytes > 0 {
                    touched.push(lane);
                }
            }
            assert_eq!(map.touched_by(range, 0).collect::<Vec<_>>(), touched);
            let later: Vec<_> = touched.into_iter().filter(|lane| lane.0 >= 2).collect();
            assert_eq!(map.touched_by(range, 2).collect::<Vec<_>>(), later);
        }
    }
}

#[test]
fn the_last_block_of_the_largest_device_has_a_number_below_the_greatest() {
    for map in [1, 2, 16].map(|lanes| LaneMap { lanes }) {
        let chunks = map.device_max() / CHUNK;
        assert_eq!(chunks, u64::from(map.lanes) * ((1 << 22) - 1));
        assert!(map.key(map.device_max() - 1) < u32::MAX);
    }
}

#[test]
fn rows_begin_at_many_lanes() {
    let map = LaneMap { lanes: 16 };
    let firsts: BTreeSet<_> = (0..64).map(|row| map.lane_of(row * 16 * CHUNK)).collect();
    assert!(firsts.len() > 10, "{firsts:?}");
}

#[test]
fn the_lanes_share_all_of_a_large_device() {
    let map = LaneMap { lanes: 8 };
    let range = ByteRange { start: CHUNK, end: (1 << 40) - 512 };
    let all: u64 = (0..8).map(|lane| map.bytes_of(LaneId(lane), range)).sum();
    assert_eq!(all, range.len());
}

#[test]
fn each_block_has_one_lane_and_a_number_of_its_own_there() {
    for lanes in [1, 2, 16] {
        let map = LaneMap { lanes };
        let mut seen = BTreeSet::new();
        for chunk in 0..300u64 {
            for block in [0, 1, BLOCKS_PER_CHUNK - 1] {
                let at = chunk * CHUNK + block * CHECKSUM_BLOCK;
                assert!(map.lane_of(at).0 < lanes);
                assert!(seen.insert((map.lane_of(at), map.key(at))));
                assert_eq!(map.offset_of(map.lane_of(at), map.key(at)), at);
            }
        }
    }
}

#[test]
fn the_parts_of_all_lanes_make_up_the_range() {
    let map = LaneMap { lanes: 8 };
    let range = ByteRange { start: 5 * CHUNK + 512, end: 77 * CHUNK + 1024 };
    let mut parts: Vec<_> =
        (0..8).flat_map(|lane| map.of_lane(LaneId(lane), range).collect::<Vec<_>>()).collect();
    parts.sort();
    assert_eq!(parts, range.split_at_multiples(CHUNK).collect::<Vec<_>>());
    for end in [range.start, range.start + 1, 8 * CHUNK, 9 * CHUNK, 16 * CHUNK, range.end] {
        let range = ByteRange { end, ..range };
        for lane in (0..8).map(LaneId) {
            let bytes = map.of_lane(lane, range).map(|part| part.len()).sum::<u64>();
            assert_eq!(map.bytes_of(lane, range), bytes, "{range} in lane {lane}");
        }
    }
    for lane in 0..8 {
        for part in map.of_lane(LaneId(lane), range) {
            assert_eq!(map.lane_of(part.start), LaneId(lane));
        }
    }
}
