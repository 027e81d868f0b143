//! A backing device grows, and its backend is written beyond the former end: crashes at every store.

use crate::rig::{BACKEND_SIZE, Tables, backend, ends, made, open};
use cbd_engine::{Admission, Cache};
use cbd_sim::{CrashMemory, SimEnvironment, act_as, until_crash};
use cbd_types::{BackendId, ByteRange, Result};
use std::cell::Cell;
use std::sync::Arc;
use std::task::Waker;

const BLOCK: u64 = 4096;
const LARGER: u64 = 3 * BACKEND_SIZE;
const ID: BackendId = BackendId(0);

fn write(cache: &Cache<SimEnvironment>, at: u64, value: u8) {
    let admission = cache.write(ByteRange::at(at, BLOCK), &[value; BLOCK as usize], Waker::noop());
    assert!(matches!(admission.expect("the cache runs"), Admission::Done(_)), "there is space");
}

fn cached(cache: &Cache<SimEnvironment>, at: u64) -> Result<Option<u8>> {
    let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
    cache.read(ByteRange::at(at, BLOCK), &mut bytes, &mut misses)?;
    let is_cached = misses.is_empty();
    misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
    Ok(is_cached.then_some(bytes[0]))
}

/// A cache that holds the last block of its device.
fn in_use() -> (CrashMemory, Tables, Arc<Cache<SimEnvironment>>) {
    act_as(0);
    let (memory, tables) = made(&[|tables| tables.register_host("one", None).map(drop)]);
    tables.create_backend(&backend(9)).expect("there is space");
    let cache = tables.open_cache(ID).expect("a new cache");
    write(&cache, BACKEND_SIZE - BLOCK, 1);
    (memory, tables, cache)
}

/// Writes beyond the former end as soon as the cache accepts that; `done` counts the writes that have completed.
fn grow(tables: &Tables, cache: &Cache<SimEnvironment>, done: &Cell<u64>) {
    tables.grow_backend(ID, LARGER, "simulated, larger").expect("it is larger");
    assert_eq!(cache.size(), LARGER);
    for number in 0..3 {
        write(cache, LARGER - (number + 1) * BLOCK, 10 + number as u8);
        done.set(number + 1);
    }
    write(cache, BACKEND_SIZE - BLOCK, 2);
    done.set(4);
}

#[test]
fn what_completed_beyond_the_former_end_is_there_after_a_crash_at_any_store() {
    let events = {
        let (memory, tables, cache) = in_use();
        let before = memory.events();
        grow(&tables, &cache, &Cell::new(0));
        memory.events() - before
    };
    let mut sizes = [0; 2];
    for event in 1..=events + 1 {
        let (memory, tables, cache) = in_use();
        let done = Cell::new(0);
        memory.crash_after(event, event);
        let crashed = until_crash(|| grow(&tables, &cache, &done)).is_err();
        assert_eq!(crashed, event <= events, "event {event}");
        let done = done.get();
        for (fate, end) in ends(&memory).into_iter().enumerate() {
            act_as(0);
            let what = format!("event {event}, fate {fate}, {done} writes");
            let tables = open(&end).unwrap_or_else(|error| panic!("{what}: {error}"));
            let entry = tables.backend(ID).unwrap_or_else(|error| panic!("{what}: {error}"));
            let cache = tables.open_cache(ID).unwrap_or_else(|error| panic!("{what}: {error}"));
            let is_larger = entry.size == LARGER;
            sizes[usize::from(is_larger)] += 1;
            assert_eq!(entry.size, if is_larger { LARGER } else { BACKEND_SIZE }, "{what}");
            assert_eq!(entry.identity, if is_larger { "simulated, larger" } else { "simulated" }, "{what}");
            assert!(is_larger || done == 0, "{what}: a write completed before the size was durable");
            assert_eq!((cache.size(), cache.status().damaged), (entry.size, vec![]), "{what}");
            for number in 0..done.min(3) {
                let found = cached(&cache, LARGER - (number + 1) * BLOCK).expect("it is sound");
                assert_eq!(found, Some(10 + number as u8), "{what}: write {number} is lost");
            }
            let last = cached(&cache, BACKEND_SIZE - BLOCK).expect("it is sound");
            assert!(last == Some(2) || last == Some(1) && done < 4, "{what}: {last:?}");
        }
    }
    assert!(sizes.iter().all(|count| *count > 0), "both sizes are found: {sizes:?}");
}
