//! Compares the index with a map, and tests its use of memory.

use super::*;
use alloc::{collections::BTreeMap, vec::Vec};

impl Index {
    /// [`Index::set_whole`] of one block.
    pub(super) fn set_block(
        &mut self,
        key: u32,
        location: Location,
        data: impl Iterator<Item = Option<BlockData>>,
    ) {
        self.set_whole(self.start(key), key, location, false, data);
    }
}

#[test]
fn blocks_of_metadata_are_counted_while_one_record_holds_them() {
    let mut index = Index::new(64, 7);
    let blocks = |count| core::iter::repeat_n(None, count);
    let set = |index: &mut Index, key, is_metadata, count| {
        index.set_whole(index.start(key), key, at(1, key), is_metadata, blocks(count));
    };
    set(&mut index, 0, true, 6);
    assert_eq!((index.metadata(), index.live()), (6, 6));
    set(&mut index, 0, true, 1);
    set(&mut index, 8, false, 2);
    assert_eq!(index.metadata(), 6, "written again; other data");
    set(&mut index, 0, false, 1);
    assert_eq!(index.metadata(), 5, "other data in its place");
    index.set_parts(1, 0, 1, at(2, 0));
    assert_eq!(index.metadata(), 4, "in parts");
    index.remove_parts(2, 0, PARTS);
    index.remove_at(3, at(1, 0));
    assert!(!index.remove_at(4, at(9, 9)));
    assert_eq!(index.metadata(), 2);
    index.note_chance(4);
    index.note_read(4);
    assert_eq!(index.get(4), Some(Found::Whole(at(1, 0))), "the bits are apart");
    set(&mut index, 1, true, 1);
    assert_eq!(index.metadata(), 3, "whole again");
    index.remove_segment(1);
    assert_eq!((index.metadata(), index.live()), (0, 0));
    set(&mut index, 5, true, 1);
    index.clear();
    assert_eq!(index.metadata(), 0);
}

fn at(segment: u32, slot: u32) -> Location {
    Location { segment, slot }
}

#[test]
fn the_index_agrees_with_a_map_of_sectors() {
    let mut index = Index::new(64, 7);
    let mut model: BTreeMap<(u32, usize), Location> = BTreeMap::new();
    let mut whole: BTreeMap<u32, Option<(Location, BlockData)>> = BTreeMap::new();
    let mut random = 1u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for step in 0..20_000u32 {
        let key = next(200) as u32 * 1024 + next(3) as u32;
        let location = at(next(7) as u32, step);
        match next(4) {
            0 => {
                index.reserve(1);
                let data = BlockData { offset: step, sum: !step };
                let data = (step % 3 > 0).then_some(data);
                index.set_block(key, location, [data].into_iter());
                whole.insert(key, data.map(|data| (location, data)));
                model.extend((0..PARTS).map(|part| ((key, part), location)));
            }
            1 => {
                let first = next(PARTS as u64) as usize;
                let end = first + 1 + next((PARTS - first) as u64) as usize;
                index.set_parts(key, first, end, location);
                whole.remove(&key);
                model.extend((first..end).map(|part| ((key, part), location)));
            }
            _ => {
                let part = next(PARTS as u64) as usize;
                let Some(victim) = model.get(&(key, part)).copied() else { continue };
                index.remove_at(key, victim);
                if whole.get(&key).is_some_and(|known| known.is_none_or(|(at, _)| at == victim)) {
                    whole.remove(&key);
                }
                (0..PARTS).for_each(|part| {
                    if model.get(&(key, part)) == Some(&victim) {
                        model.remove(&(key, part));
                    }
                });
            }
        }
        assert_eq!(index.read_whole(key), whole.get(&key).copied().flatten(), "step {step}");
        for part in 0..PARTS {
            let found = match index.get(key) {
                None => NONE,
                Some(Found::Whole(location)) => location,
                Some(Found::Parts(parts)) => parts[part],
            };
            assert_eq!(found, model.get(&(key, part)).copied().unwrap_or(NONE), "step {step}");
        }
    }
    let blocks: alloc::collections::BTreeSet<u32> = model.keys().map(|(key, _)| *key).collect();
    assert_eq!(index.live() as usize, blocks.len());
}

#[test]
fn no_insert_moves_an_entry_that_is_there() {
    const BLOCKS: u32 = 20_000;
    let mut index = Index::new(64, 7);
    let place = |index: &Index, key: u32| match index.get(key) {
        Some(Found::Parts(parts)) => core::ptr::from_ref(parts).addr(),
        other => panic!("block {key}: {other:?}"),
    };
    let mut places = Vec::new();
    for key in 0..BLOCKS {
        let before = index.bytes();
        index.reserve(1);
        index.set_parts(key, 0, 1, at(0, key));
        let grown = index.bytes() - before;
        let most = table::SLAB * size_of::<table::Node>() + SIDE_SLAB * size_of::<Parts>();
        assert!(grown <= most, "block {key}: {grown} bytes came at once");
        places.push(place(&index, key));
    }
    (0..BLOCKS).for_each(|key| assert_eq!(place(&index, key), places[key as usize], "block {key}"));
}

#[test]
fn side_entries_that_were_freed_are_used_before_new_ones_are_made() {
    let mut index = Index::new(64, 7);
    let fill = |index: &mut Index| (0..1000).for_each(|key| index.set_parts(key, 0, 1, at(0, key)));
    fill(&mut index);
    let bytes = index.bytes();
    for _ in 0..10 {
        (0..500).for_each(|key| index.set_block(key, at(1, key), [None].into_iter()));
        (500..1000).for_each(|key| assert!(!index.remove_at(key, at(0, key))));
        fill(&mut index);
    }
    assert_eq!(index.bytes(), bytes);
    index.clear();
    fill(&mut index);
    assert_eq!(index.bytes(), bytes, "what was forgotten is used again");
}

#[test]
fn what_a_segment_holds_is_forgotten_and_nothing_else() {
    let mut index = Index::new(64, 7);
    index.set_block(1, at(3, 10), [None].into_iter());
    index.set_block(2, at(4, 10), [None].into_iter());
    index.set_parts(3, 0, 4, at(3, 11));
    index.set_parts(3, 4, 8, at(4, 11));
    index.set_parts(4, 2, 3, at(3, 12));
    index.set_parts(5, 2, 3, at(4, 12));
    index.remove_segment(3);
    let mut left: Vec<u32> = index.iter().map(|(key, _)| key).collect();
    left.sort_unstable();
    assert_eq!(left, [2, 3, 5]);
    let Some(Found::Parts(parts)) = index.get(3) else { panic!("it is in parts") };
    assert_eq!(*parts, [[NONE; 4], [at(4, 11); 4]].concat()[..]);
}

#[test]
fn a_block_had_a_second_chance_until_it_is_written_again() {
    let mut index = Index::new(8, 1);
    let data = BlockData { offset: 4096, sum: 7 };
    for key in 1..=3 {
        index.reserve(1);
        index.set_block(key, at(3, 11), [Some(data)].into_iter());
        index.note_chance(key);
    }
    index.note_chance(9);
    assert_eq!(index.live(), 3);
    assert_eq!(index.get(1), Some(Found::Whole(at(3, 11))));
    assert_eq!(index.read_whole(1), Some((at(3, 11), data)));
    assert!(!index.remove_at(1, at(3, 12)), "it is elsewhere");
    assert!(index.remove_at(1, at(3, 11)));
    assert!(!index.remove_at(1, at(3, 11)), "it is gone");
    index.set_block(2, at(4, 0), [Some(data)].into_iter());
    assert!(!index.remove_at(2, at(4, 0)), "it was written again");
    index.set_parts(3, 0, 1, at(5, 0));
    index.note_chance(3);
    assert!(!index.remove_at(3, at(3, 11)) && !index.remove_at(3, at(5, 0)), "it is in parts");
    assert_eq!(index.live(), 0);
}

#[test]
fn a_block_was_read_if_it_was_since_it_was_written() {
    let mut index = Index::new(64, 7);
    let data = BlockData { offset: 4096, sum: 5 };
    index.set_block(1, at(3, 11), [Some(data)].into_iter());
    index.set_block(2, at(3, 12), [None].into_iter());
    assert!(!index.was_read(1) && !index.was_read(9));
    assert_eq!(index.read_whole(1), Some((at(3, 11), data)));
    assert_eq!(index.read_whole(2), None, "where its data are is not known");
    assert!(index.was_read(1) && !index.was_read(2));
    index.note_read(2);
    index.note_read(9);
    assert!(index.was_read(2) && index.live() == 2);
    assert_eq!((index.get(1), index.get(2)), (Some(Found::Whole(at(3, 11))), Some(Found::Whole(at(3, 12)))));
    index.set_block(1, at(4, 1), [Some(data)].into_iter());
    assert!(!index.was_read(1));
    index.note_read(1);
    index.set_parts(1, 0, 1, at(5, 1));
    assert!(!index.was_read(1) && index.read_whole(1).is_none());
    let Some(Found::Parts(parts)) = index.get(1) else { panic!("it is in parts") };
    assert_eq!((parts[0], parts[1], parts[7]), (at(5, 1), at(4, 1), at(4, 1)));
}

#[test]
fn its_memory_is_that_of_buckets_and_slabs() {
    let (page, nodes) = (SIDE_SLAB * size_of::<Parts>(), table::SLAB * size_of::<table::Node>());
    assert_eq!((page, nodes), (4096, 24 << 10));
    let mut index = Index::new(300, 7);
    assert_eq!(index.bytes(), 100 * 64);
    assert_eq!([0, 48, 49, 51].map(|blocks| Index::new(blocks, 7).bytes()), [16, 16, 17, 17].map(|n| n * 64));
    index.reserve(1);
    let reserved = index.bytes();
    assert_eq!(reserved, 100 * 64 + page + nodes);
    // The reserve is for what is to come: 62 blocks in parts leave room for two more.
    (0..62).for_each(|key| index.set_parts(key, 0, 1, at(0, key)));
    index.reserve(1);
    assert_eq!(index.bytes(), reserved);
    index.set_parts(62, 0, 1, at(0, 62));
    index.reserve(1);
    assert_eq!(index.bytes(), reserved + page);
    index.reserve(table::SLAB + 1);
    assert!(index.bytes() >= reserved + page + nodes);
}

#[test]
fn thousands_of_blocks_in_chains_and_in_parts_are_found() {
    let mut index = Index::new(1, 7);
    for key in 0..3000_u32 {
        index.set_parts(key, (key % 8) as usize, 8, at(key % 5, key));
    }
    for key in 0..3000_u32 {
        let Some(Found::Parts(parts)) = index.get(key) else { panic!("block {key} is in parts") };
        let first = (key % 8) as usize;
        assert!(parts[first..].iter().all(|part| *part == at(key % 5, key)));
        assert!(parts[..first].iter().all(|part| *part == NONE));
    }
    assert_eq!((index.live(), index.iter().count()), (3000, 3000));
}

#[test]
fn blocks_are_cut_at_their_borders_and_numbered_in_sectors() {
    let cut = |start: u64, end: u64| -> Vec<_> { blocks(ByteRange { start, end }).collect() };
    assert_eq!(cut(0, 4096), [(0, 0, 8)]);
    assert_eq!(cut(4096 + 512, 3 * 4096 + 1024), [(1, 1, 8), (2, 0, 8), (3, 0, 2)]);
    assert_eq!(cut(3584, 4608), [(0, 7, 8), (1, 0, 1)]);
}
