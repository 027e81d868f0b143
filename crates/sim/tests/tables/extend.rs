//! A region grows while its tables and a cache are in use: crashes at every store, on persistent memory and in an ordinary file.
//! Behind its former end the memory has rows that name the cache, as those of an earlier region could.

use crate::rig::{CHANGES, SEGMENT, Tables, backend, ends_of, environment, made, open, rows};
use cbd_engine::{Admission, Cache, Transport};
use cbd_format::{Layout, SegmentEntry, Slot};
use cbd_sim::{CrashMemory, Keep, SimEnvironment, act_as, until_crash};
use cbd_types::{BackendId, BootId, ByteRange, Region, Result, SegmentId};
use std::cell::Cell;
use std::sync::Arc;
use std::task::Waker;

const ID: BackendId = BackendId(0);
const BLOCK: u64 = 4096;
/// Blocks that are written, one after the other and again.
const BLOCKS: u64 = 200;
/// Bytes by which the memory becomes larger: six segments and their table.
const MORE: u64 = 7 * SEGMENT;

const fn boot(number: u8) -> BootId {
    BootId([number; 16])
}

/// What is behind the former end: rows of segments that name the cache of the backend.
fn leftovers(tables: &Tables, length: u64) -> Vec<u8> {
    let (before, row) = (tables.info().layout, tables.backend_row(ID).expect("it is there"));
    let layout = before.grown_to(before.region_size + length).expect("it fits");
    let mut bytes = vec![0xa5; length as usize];
    let entry = SegmentEntry::of_cache(0, row.cache_id.get());
    for segment in (before.segment_count..layout.segment_count).map(SegmentId) {
        let slot = Slot::encode_content_line(9, &entry, u64::from(segment.0));
        for at in layout.segment_slots(segment) {
            let at = (at - before.region_size) as usize;
            bytes[at..at + slot.len()].copy_from_slice(&slot);
        }
    }
    bytes
}

/// A region with a backend, whose memory has become larger.
fn extended(is_file: bool) -> (CrashMemory, Tables) {
    act_as(0);
    let (memory, tables) = made(&CHANGES[..2]);
    memory.extend(&leftovers(&tables, MORE));
    if is_file {
        memory.become_file(boot(1));
    }
    let tables = open(&memory).expect("as before");
    (memory, tables)
}

/// What crashes leave.
fn left(memory: &CrashMemory, is_file: bool) -> Vec<CrashMemory> {
    if !is_file {
        return ends_of(memory, 8);
    }
    let crashes = (0..8).map(|seed| memory.fork().machine_crash(seed, boot(2)));
    [memory.fork().process_crash()].into_iter().chain(crashes).collect()
}

/// Opens the tables, and no cache: that would give segments back that are none of it.
fn opened(memory: &CrashMemory) -> Result<Tables> {
    Transport::open(environment(), Region::new(memory.clone()))
}

fn check(tables: &Tables, expected: &str, layouts: &[Layout], when: &str) {
    let info = tables.info();
    assert!(layouts.contains(&info.layout), "{when}: {:?}", info.layout);
    assert_eq!(rows(tables), expected, "{when}");
    let owned = tables.segments_of(ID).len() as u32;
    assert_eq!((owned, info.free_segments), (9, info.layout.segment_count - 9), "{when}");
}

#[test]
fn a_region_has_its_former_size_or_the_new_one_after_a_crash_at_any_store_of_its_growth() {
    for is_file in [false, true] {
        let (memory, tables) = extended(is_file);
        let (before, expected) = (tables.info().layout, rows(&tables));
        let now = before.grown_to(before.region_size + MORE).expect("it fits");
        drop((memory, tables));
        let (mut event, mut seen) = (0, [0; 2]);
        loop {
            event += 1;
            let mut is_done = false;
            for seed in 0..8 {
                let (memory, tables) = extended(is_file);
                memory.crash_after(event, seed);
                is_done = until_crash(|| tables.grow_region().expect("there is room")).is_ok();
                act_as(0);
                for (fate, end) in left(&memory, is_file).into_iter().enumerate() {
                    let when = format!("file {is_file}, event {event}, seed {seed}, fate {fate}");
                    let tables = opened(&end).unwrap_or_else(|error| panic!("{when}: {error}"));
                    let layouts: &[Layout] = if is_done { &[now] } else { &[before, now] };
                    check(&tables, &expected, layouts, &when);
                    let has_grown = tables.info().layout == now;
                    seen[usize::from(has_grown)] += 1;
                    if !has_grown {
                        tables.grow_region().unwrap_or_else(|error| panic!("{when}: {error}"));
                    }
                    check(&tables, &expected, &[now], &when);
                    // Either copy suffices.
                    if !is_done || seed > 0 {
                        continue;
                    }
                    for at in [0, Layout::second_superblock(now.region_size)] {
                        let half = end.fork();
                        half.flip(at + 60, 3);
                        check(&opened(&half).expect("by the other copy"), &expected, &[now], &when);
                    }
                }
            }
            if is_done {
                break;
            }
        }
        assert!(event > 8 && seen.iter().all(|count| *count > 100), "{event} {seen:?}");
    }
}

fn value(number: u64) -> u8 {
    (number % 250) as u8 + 1
}

/// Writes the block at `number`, if the cache takes it at once; false without space.
fn write(cache: &Cache<SimEnvironment>, number: u64) -> bool {
    let (range, bytes) = (ByteRange::at(number % BLOCKS * BLOCK, BLOCK), [value(number); BLOCK as usize]);
    let admission = cache.write(range, &bytes, Waker::noop()).expect("the cache runs");
    matches!(admission, Admission::Done(_))
}

fn cached(cache: &Cache<SimEnvironment>, number: u64) -> Option<u8> {
    let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
    cache
        .read(ByteRange::at(number % BLOCKS * BLOCK, BLOCK), &mut bytes, &mut misses)
        .expect("nothing is damaged");
    let is_cached = misses.is_empty();
    misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
    is_cached.then_some(bytes[0])
}

/// The region grows, its open cache gets all that is free then, and writes go on; `done` counts those that have completed.
fn use_more(tables: &Tables, cache: &Arc<Cache<SimEnvironment>>, done: &Cell<u64>) {
    tables.grow_region().expect("there is room");
    tables.grow_cache(ID, cache, tables.info().free_segments).expect("they are free");
    while write(cache, done.get()) {
        done.set(done.get() + 1);
    }
}

#[test]
fn what_completed_in_new_segments_is_there_after_a_crash_at_any_store() {
    /// A cache of nine segments, of which the log has filled all that writers may take.
    fn in_use() -> (CrashMemory, Tables, Arc<Cache<SimEnvironment>>, Cell<u64>) {
        let (memory, tables) = extended(false);
        let cache = tables.open_cache(ID).expect("a new cache");
        let done = Cell::new(0);
        while write(&cache, done.get()) {
            done.set(done.get() + 1);
        }
        (memory, tables, cache, done)
    }
    let (events, before, all) = {
        let (memory, tables, cache, done) = in_use();
        let (from, before) = (memory.events(), done.get());
        use_more(&tables, &cache, &done);
        (memory.events() - from, before, done.get())
    };
    assert!(all > before + 50, "{before} {all}: the new segments are used");
    for event in (1..=events + 1).filter(|event| *event < 60 || event % 7 == 0 || *event > events) {
        let (memory, tables, cache, done) = in_use();
        memory.crash_after(event, event);
        let result = until_crash(|| use_more(&tables, &cache, &done));
        assert_eq!(result.is_ok(), event > events, "{event}");
        act_as(0);
        let mut left = ends_of(&memory, 2);
        left.push(memory.fork().power_cut(1, Keep::Nothing));
        for (fate, end) in left.into_iter().enumerate() {
            let when = format!("event {event}, fate {fate}");
            let tables = open(&end).unwrap_or_else(|error| panic!("{when}: {error}"));
            let cache = tables.open_cache(ID).unwrap_or_else(|error| panic!("{when}: {error}"));
            let done = done.get();
            for number in done - BLOCKS.min(done)..done {
                let found = cached(&cache, number);
                // The write that the crash came into may be there.
                let is_next = number + BLOCKS == done && found == Some(value(done));
                assert!(is_next || found == Some(value(number)), "{when}, block {number}: {found:?}");
            }
        }
    }
}

#[test]
fn a_region_that_has_grown_has_room_for_another_backend() {
    let (memory, tables) = extended(false);
    tables.create_backend(&backend(16)).expect_err("the first size has no room");
    tables.grow_region().expect("there is room");
    let free = tables.info().free_segments;
    let id = tables.create_backend(&backend(u64::from(free))).expect("all that is free");
    let cache = tables.open_cache(id).expect("a new cache");
    assert!((0..8).all(|number| write(&cache, number)));
    drop(cache);
    let next = open(&memory.power_cut(3, Keep::Any)).expect("it opens");
    assert_eq!((next.info().free_segments, next.segments_of(id).len() as u32), (0, free));
    let cache = next.open_cache(id).expect("it recovers");
    assert!((0..8).all(|number| cached(&cache, number) == Some(value(number))));
}
