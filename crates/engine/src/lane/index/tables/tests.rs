//! Compares an index whose size changes with a map, and tests the bounds of a step and the use of memory.

use super::super::{
    BlockData, Found, Index, PARTS, Parts,
    table::{PLACES, tests::check},
};
use super::*;
use crate::position::{Location, NONE};
use alloc::collections::BTreeMap;

struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

fn at(segment: u32, slot: u32) -> Location {
    Location { segment, slot }
}

/// Allocates what steps lack, and checks what they leave.
fn step(tables: &mut Tables, memory: &mut Memory) -> Stepped {
    let (live, boundary) = (tables.live(), tables.boundary);
    let promised = [tables.table.unused(), tables.old.as_ref().map_or(0, |old| old[0].unused())]
        .map(|unused| unused.min(RESERVED_MAX));
    loop {
        match tables.step(memory) {
            Stepped::Lacks(entries) => {
                assert_eq!((tables.live(), tables.boundary), (live, boundary), "nothing has changed");
                assert!(tables.step(memory) == Stepped::Lacks(entries), "nor does it then");
                memory.add(entries).unwrap();
            }
            stepped => {
                assert_eq!(tables.live(), live, "a step loses and adds nothing");
                assert_eq!(stepped == Stepped::Done, tables.boundary == ALL);
                let unused = [tables.table.unused(), tables.old.as_ref().map_or(0, |old| old[0].unused())];
                assert!(unused[0] >= promised[0], "a commit keeps its memory in the new table");
                assert!(unused[1] >= promised[1] || tables.boundary == ALL);
                return stepped;
            }
        }
    }
}

fn finish(tables: &mut Tables, memory: &mut Memory) {
    while step(tables, memory) != Stepped::Done {}
}

/// Checks that each entry is in the table that operations use, in the bucket that they use.
fn check_both(tables: &Tables) {
    for (table, is_new) in tables.both().zip([true, false]) {
        check(table);
        for entry in table.iter() {
            let start = tables.start(entry.key);
            assert_eq!(start.is_up_to(tables.boundary), is_new, "block {}", entry.key);
            assert!(table.get(start, entry.key).is_some(), "block {}", entry.key);
        }
    }
}

/// An index, and plain maps of what it must hold.
struct Pair {
    index: Index,
    parts: BTreeMap<u32, Parts>,
    whole: BTreeMap<u32, Option<(Location, BlockData)>>,
    memory: Option<Memory>,
}

impl Pair {
    fn new(blocks: usize) -> Self {
        let index = Index::new(blocks, 7);
        Self { index, parts: BTreeMap::new(), whole: BTreeMap::new(), memory: None }
    }

    /// Changes block `key` in one of several ways.
    fn change(&mut self, random: &mut Random, key: u32, slot: u32) {
        let location = at(random.below(7) as u32, slot);
        match random.below(6) {
            0 | 1 => {
                self.index.reserve(1).unwrap();
                let data = (!slot.is_multiple_of(3)).then_some(BlockData { offset: slot, sum: !slot });
                self.index.set_block(key, location, [data].into_iter());
                self.whole.insert(key, data.map(|data| (location, data)));
                self.parts.insert(key, [location; PARTS]);
            }
            2 => {
                let first = random.below(PARTS as u64) as usize;
                let end = first + 1 + random.below((PARTS - first) as u64) as usize;
                self.index.reserve(1).unwrap();
                self.index.set_parts(key, first, end, location);
                self.whole.remove(&key);
                self.parts.entry(key).or_insert([NONE; PARTS])[first..end].fill(location);
            }
            3 => {
                let Some(victim) = self.parts.get(&key).map(|parts| parts[0]) else { return };
                self.index.remove_at(key, victim);
                self.forget(|known, location| known == key && location == victim);
            }
            4 => {
                self.index.note_read(key);
                assert_eq!(
                    self.index.was_read(key),
                    self.whole.contains_key(&key) || self.parts.contains_key(&key)
                );
            }
            _ => {
                self.index.reserve(1).unwrap();
                self.index.remove_parts(key, 0, PARTS);
                self.forget(|known, _| known == key);
            }
        }
    }

    /// Removes the parts that `is_gone` selects.
    fn forget(&mut self, is_gone: impl Fn(u32, Location) -> bool) {
        self.parts.retain(|key, parts| {
            let whole = *parts;
            parts.iter_mut().filter(|part| is_gone(*key, **part)).for_each(|part| *part = NONE);
            if whole != *parts {
                self.whole.remove(key);
            }
            parts.iter().any(|part| *part != NONE)
        });
    }

    /// Begins a resize, or takes a step of one.
    fn resize(&mut self, random: &mut Random) {
        let Some(memory) = &mut self.memory else {
            let blocks = [1, 16, 50, 300, 1000, 1500, 3000, 9000][random.below(8) as usize];
            let mut memory = Memory::new(blocks).unwrap();
            assert!(self.index.begin_resize(&mut memory));
            assert!(self.index.is_sized_for(blocks));
            let mut other = Memory::new(7).unwrap();
            assert!(!self.index.begin_resize(&mut other), "one is on its way");
            self.memory = Some(memory);
            return;
        };
        if step(&mut self.index.table, memory) == Stepped::Done {
            self.memory = None;
        }
    }

    fn check(&mut self, key: u32) {
        let found = match self.index.get(key) {
            None => [NONE; PARTS],
            Some(Found::Whole(location)) => [location; PARTS],
            Some(Found::Parts(parts)) => *parts,
        };
        assert_eq!(found, self.parts.get(&key).copied().unwrap_or([NONE; PARTS]), "block {key}");
        assert_eq!(self.index.read_whole(key), self.whole.get(&key).copied().flatten(), "block {key}");
    }

    fn check_all(&mut self) {
        check_both(&self.index.table);
        let mut keys: Vec<u32> = self.index.iter().map(|(key, _)| key).collect();
        keys.sort_unstable();
        assert!(keys.iter().eq(self.parts.keys()), "no block is lost or comes back");
        assert_eq!(self.index.live() as usize, keys.len());
        keys.into_iter().for_each(|key| self.check(key));
    }
}

#[test]
fn an_index_whose_size_changes_agrees_with_a_map() {
    for (seed, chunks, blocks) in [(1, 3, 1024), (2, 40, 60), (3, 3000, 3), (4, 500, 1024), (5, 1, 20)] {
        let mut random = Random(seed);
        let mut pair = Pair::new([1, 16, 300, 1500][seed as usize % 4]);
        for slot in 0..15_000_u32 {
            let key = random.below(chunks) as u32 * 1024 + random.below(blocks) as u32;
            pair.change(&mut random, key, slot);
            pair.check(key);
            if random.below(20) == 0 {
                pair.resize(&mut random);
                pair.check(key);
            }
            match random.below(2000) {
                0 => {
                    let segment = random.below(7) as u32;
                    pair.index.remove_segment(segment);
                    pair.forget(|_, location| location.segment == segment);
                }
                1 if slot % 5 == 0 => {
                    pair.index.clear();
                    pair.parts.clear();
                    pair.whole.clear();
                }
                _ => {}
            }
            if slot % 256 == 0 {
                pair.check_all();
            }
        }
        pair.check_all();
    }
}

/// A table of `blocks` places with whole chunks, enough to fill it.
fn filled(blocks: usize, live: u32) -> Index {
    let mut index = Index::new(blocks, 7);
    for key in 0..live {
        index.reserve(1).unwrap();
        index.set_block(key * 3 / 2, at(1, key), [None].into_iter());
    }
    index
}

#[test]
fn each_step_of_each_size_keeps_every_block() {
    for from in [1, 51, 1000, 1400, 1500, 4000] {
        for to in [1, 49, 51, 900, 1403, 3000, 9000] {
            let mut index = filled(from, 2000);
            let mut memory = Memory::new(to).unwrap();
            assert!(index.begin_resize(&mut memory));
            let mut before = 0;
            loop {
                check_both(&index.table);
                assert_eq!(index.resized(), first_behind(index.table.boundary));
                let stepped = step(&mut index.table, &mut memory);
                assert!(index.resized() > before, "each step moves the boundary");
                before = index.resized();
                for key in 0..2000 {
                    let found = index.get(key * 3 / 2);
                    assert_eq!(found, Some(Found::Whole(at(1, key))), "from {from} to {to}, block {key}");
                }
                if stepped == Stepped::Done {
                    break;
                }
            }
            check_both(&index.table);
            assert!(index.table.old.is_none());
            let old = &memory.table.as_ref().unwrap()[0];
            assert_eq!((old.live(), old.count()), (0, Table::buckets_for(from)));
            assert_eq!(step(&mut index.table, &mut memory), Stepped::Done, "nothing is left to do");
        }
    }
}

#[test]
fn a_step_visits_and_moves_no_more_than_it_may() {
    const LIVE: u32 = 58_491;
    for (from, to) in [(63_550, 127_100), (63_550, 32_000), (63_550, 63_553), (300, 63_550), (63_550, 1)] {
        let mut tables = Tables::new(from, 7).unwrap();
        for number in 0..LIVE.min(from as u32) {
            let key = number.wrapping_mul(0x9e37_79b9) ^ (number << 7) ^ (number >> 5);
            *tables.get_or_insert(entry(key)) = entry(key);
        }
        let mut memory = Memory::new(to).unwrap();
        assert!(tables.begin_resize(&mut memory));
        let old = tables.old.as_ref().unwrap()[0].count();
        let larger = old.max(tables.table.count());
        let mut steps = 0;
        while tables.boundary < ALL {
            let sweep = tables.sweep(old);
            let buckets: Vec<usize> = sweep.buckets(old).collect();
            assert!(buckets.len() <= SPAN as usize + ROW, "{} buckets", buckets.len());
            assert!(buckets.len() <= old, "each once");
            let before = tables.table.live();
            step(&mut tables, &mut memory);
            let moved = tables.table.live() - before;
            assert!(moved <= 2 * SPAN as u32 * PLACES as u32, "from {from} to {to}: {moved} entries");
            steps += 1;
        }
        assert_eq!(steps, larger.div_ceil(SPAN as usize));
    }
}

fn entry(key: u32) -> Entry {
    Entry { key, slot: key ^ 5, segment: 3, data: BlockData { offset: key, sum: !key } }
}

#[test]
fn what_is_reserved_stays_reserved_in_both_tables_whatever_steps_come_between() {
    let mut index = filled(1500, 4000);
    let mut memory = Memory::new(3000).unwrap();
    assert!(index.begin_resize(&mut memory));
    let mut slot = 0;
    loop {
        index.reserve(RESERVED_MAX).unwrap();
        let stepped = step(&mut index.table, &mut memory);
        let before = index.bytes();
        // Wherever they lie: with the first step all of these are in the old table, with the last in the new one.
        for chunk in 0..RESERVED_MAX as u32 {
            slot += 1;
            index.set_block((chunk % 64) * 1024 + slot % 1024, at(2, slot), [None].into_iter());
        }
        assert_eq!(index.bytes(), before, "no insert had to allocate");
        if stepped == Stepped::Done {
            break;
        }
    }
}

#[test]
fn a_commit_to_a_chunk_that_has_not_moved_has_its_memory_too() {
    let mut index = filled(1500, 4000);
    // Until no node of the table is left.
    let mut slot = 0;
    while index.table.table.unused() > 0 {
        slot += 1;
        index.set_block(slot % 1024 + 1024 * 64, at(2, slot), [None].into_iter());
        index.set_block(slot * 1024, at(2, slot), [None].into_iter());
    }
    let mut memory = Memory::new(3000).unwrap();
    assert!(index.begin_resize(&mut memory));
    index.reserve(RESERVED_MAX).unwrap();
    assert!(
        index.table.old.as_ref().unwrap()[0].unused() >= RESERVED_MAX
            && index.table.table.unused() >= RESERVED_MAX
    );
}

/// Bytes of an index for each of its blocks.
fn weight(index: &Index) -> f64 {
    index.bytes() as f64 / f64::from(index.live())
}

#[test]
fn a_full_index_that_has_grown_or_shrunk_weighs_what_a_new_one_does() {
    const PLACES: usize = 63_550;
    const LIVE: u32 = 58_491;
    let key = |number: u32| number.wrapping_mul(0x9e37_79b9) ^ (number << 7) ^ (number >> 5);
    let fill = |index: &mut Index, numbers: core::ops::Range<u32>| {
        for number in numbers {
            index.reserve(1).unwrap();
            index.set_block(key(number), at(1, number), [None].into_iter());
        }
    };
    let mut index = Index::new(PLACES, 7);
    fill(&mut index, 0..LIVE);
    let fresh = weight(&index);
    let mut memory = Memory::new(2 * PLACES).unwrap();
    assert!(index.begin_resize(&mut memory));
    finish(&mut index.table, &mut memory);
    fill(&mut index, LIVE..2 * LIVE);
    assert!(weight(&index) < fresh + 0.5 && weight(&index) < 29.0, "{} and {fresh}", weight(&index));
    // Blocks leave before the index shrinks.
    (0..LIVE).for_each(|number| assert!(!index.remove_at(key(number), at(1, number))));
    let mut memory = Memory::new(PLACES).unwrap();
    assert!(index.begin_resize(&mut memory));
    finish(&mut index.table, &mut memory);
    assert_eq!(index.live(), LIVE);
    assert!(weight(&index) < fresh + 1.0 && weight(&index) < 29.5, "{} and {fresh}", weight(&index));
}

#[test]
fn the_lines_are_those_of_the_table_that_has_most_chunks() {
    let mut index = filled(1500, 1000);
    let mut memory = Memory::new(3000).unwrap();
    assert!(index.begin_resize(&mut memory));
    let tables = &mut index.table;
    loop {
        let expected =
            if tables.boundary >= ALL / 2 { &tables.table } else { &tables.old.as_ref().unwrap()[0] };
        assert_eq!(tables.lines(), expected.lines(7));
        if step(tables, &mut memory) == Stepped::Done {
            break;
        }
    }
    assert_eq!(tables.lines(), tables.table.lines(7));
}
