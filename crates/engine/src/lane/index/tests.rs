//! Compares the index with a map, and tests its use of memory.

use super::*;
use alloc::collections::BTreeMap;

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
                index.set_whole(key, location, [data].into_iter());
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
fn side_entries_that_were_given_back_are_used_before_new_ones_are_made() {
    let mut index = Index::new(64, 7);
    let fill = |index: &mut Index| (0..1000).for_each(|key| index.set_parts(key, 0, 1, at(0, key)));
    fill(&mut index);
    let bytes = index.bytes();
    for _ in 0..10 {
        (0..500).for_each(|key| index.set_whole(key, at(1, key), [None].into_iter()));
        (500..1000).for_each(|key| index.remove_at(key, at(0, key)));
        fill(&mut index);
    }
    assert_eq!(index.bytes(), bytes);
    index.clear();
    fill(&mut index);
    assert_eq!(index.bytes(), bytes, "what was forgotten is used again");
}
