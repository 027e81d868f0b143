//! Compares the table with a map, and tests its use of memory.

use super::*;
use alloc::collections::BTreeMap;

fn entry(key: u32, slot: u32) -> Entry {
    Entry { key, slot, segment: slot % 7, data: BlockData { offset: slot, sum: !slot } }
}

fn start(key: u32) -> Start {
    Start::new(key, 7)
}

/// Checks the invariants of a table.
pub(in super::super) fn check(table: &Table) {
    let mut entries = 0;
    for bucket in &table.buckets {
        let taken = bucket.entries.iter().filter(|entry| entry.key != EMPTY).count();
        assert!(
            bucket.entries[..taken].iter().all(|entry| entry.key != EMPTY),
            "places are taken from the first on"
        );
        assert!(taken == PLACES || bucket.next == END, "a chain begins behind a full bucket");
        entries += taken;
        let mut at = bucket.next;
        while at != END {
            entries += 1;
            at = table.node(at).next;
        }
    }
    assert_eq!(entries, table.live() as usize);
    assert_eq!(table.iter().count(), entries);
}

#[test]
fn the_table_agrees_with_a_map() {
    let mut random = 1u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    // From a mostly empty table to chains of a dozen nodes.
    for keys in [10, 40, 200, 700] {
        let mut table = Table::new(1).unwrap();
        let mut model = BTreeMap::new();
        for step in 0..20_000u32 {
            let key = next(keys) as u32 / 2 * 1024 + next(2) as u32;
            if next(2) == 0 {
                let found = table.get_or_insert(start(key), entry(key, step));
                assert_eq!(found.slot, *model.entry(key).or_insert(step), "step {step}");
            } else if model.remove(&key).is_some() {
                table.remove(start(key), key);
            }
            assert_eq!(
                table.get(start(key), key).map(|entry| entry.slot),
                model.get(&key).copied(),
                "step {step}"
            );
            assert_eq!(
                table.get_mut(start(key), key).map(|entry| entry.slot),
                model.get(&key).copied(),
                "step {step}"
            );
            if step % 64 == 0 {
                check(&table);
                let mut all: Vec<_> = table.iter().map(|entry| (entry.key, entry.slot)).collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(model.iter().map(|(key, slot)| (*key, *slot))), "step {step}");
            }
        }
    }
}

#[test]
fn nodes_that_were_freed_are_used_again_before_new_ones() {
    let mut table = Table::new(1).unwrap();
    // All in one bucket.
    let at = table.bucket(start(0), 0);
    let keys: Vec<_> = (0..).filter(|key| table.bucket(start(*key), *key) == at).take(60).collect();
    for count in [PLACES, 4, 5, 9, 10, 15, 16, 60] {
        for round in 0..3u32 {
            let used = table.used;
            keys[..count].iter().for_each(|key| {
                table.get_or_insert(start(*key), entry(*key, 1));
            });
            let wanted = (count - PLACES) as u32;
            assert_eq!(table.used, used.max(wanted), "{count} entries, round {round}");
            check(&table);
            keys[..count].iter().for_each(|key| table.remove(start(*key), *key));
            assert_eq!(table.live(), 0);
            check(&table);
        }
    }
}

/// Bytes of a table for each of `keys`, and the share of them that is in chains.
fn weight(places: usize, seed: u32, keys: impl Iterator<Item = u32>) -> (f64, f64) {
    let mut table = Table::new(places).unwrap();
    let mut live = 0.0;
    for key in keys {
        table.get_or_insert(Start::new(key, seed), entry(key, 1));
        live += 1.0;
    }
    (table.bytes() as f64 / live, f64::from(table.used) / live)
}

#[test]
fn a_full_table_weighs_what_is_promised_however_its_blocks_lie() {
    for seed in [0, 1, 7, 0x9e37_79b9] {
        weigh_all(seed);
    }
}

fn weigh_all(seed: u32) {
    const PLACES: usize = 63_550;
    const LIVE: u32 = 58_491;
    // Each key its own pseudo-random block.
    let scattered = (0..LIVE).map(|number| number.wrapping_mul(0x9e37_79b9) ^ (number << 7) ^ (number >> 5));
    let (bytes, chained) = weight(PLACES, seed, scattered);
    assert!(bytes < 28.5 && chained < 0.22, "scattered: {bytes} bytes, {chained} in chains");
    let (bytes, chained) = weight(PLACES, seed, 0..LIVE);
    assert!(bytes < 26.0 && chained < 0.1, "side by side: {bytes} bytes, {chained} in chains");
    // Whole chunks, and the first blocks of each 64 KiB of more chunks, at several strides: no worse than with random
    // positions.
    for stride in [2, 3, 5, 8, 13, 16, 21, 34, 55, 64, 89, 144, 233, 256, 610, 987, 1000, 1024] {
        for (blocks, apart) in [(1024, 1), (64, 16)] {
            let chunks = (0..LIVE / blocks).map(|number| number * stride % (1 << 22) * 1024);
            let keys = chunks.flat_map(|first| (first..first + 1024).step_by(apart));
            let (bytes, chained) = weight(PLACES, seed, keys);
            assert!(
                bytes < 38.0 && chained < 0.65,
                "every {stride}th chunk: {bytes} bytes, {chained} in chains"
            );
        }
    }
}

#[test]
fn what_leaves_a_bucket_leaves_the_rest_as_the_invariants_want_it() {
    let mut random = 5_u64;
    for count in 1..12 {
        for round in 0..200 {
            let mut table = Table::new(1).unwrap();
            let at = table.bucket(start(0), 0);
            let keys: Vec<_> =
                (0..).filter(|key| table.bucket(start(*key), *key) == at).take(count).collect();
            keys.iter().for_each(|key| table.insert(start(*key), entry(*key, *key)));
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let chosen = random >> 40;
            let leaves = |key: u32| {
                let place = keys.iter().position(|known| *known == key).unwrap();
                chosen >> place & 1 == 1
            };
            let (mut gone, stay): (Vec<_>, Vec<_>) = keys.iter().partition(|key| leaves(**key));
            assert_eq!(table.count_leaving(at, leaves), gone.len());
            let mut taken = Vec::new();
            table.drain(at, leaves, |entry| taken.push(entry.key));
            taken.sort_unstable();
            gone.sort_unstable();
            assert_eq!(taken, gone, "{count} entries, round {round}");
            check(&table);
            assert!(stay.iter().all(|key| table.get(start(*key), *key).is_some()));
            assert_eq!(table.live() as usize, stay.len());
        }
    }
}
