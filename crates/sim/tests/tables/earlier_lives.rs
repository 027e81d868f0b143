//! A backend in the row of an earlier one shows none of its data, and loses none to it.

use crate::rig::{CHANGES, Tables, backend, environment_of, format_as, made, open, region};
use cbd_engine::{BackgroundWorker, BlkdevSpec, Cache, Step};
use cbd_sim::{CrashMemory, Keep, SimDisk, SimEnvironment, act_as, until_crash};
use cbd_types::{BackendId, ByteRange, HostId, Region, Result};
use std::sync::Arc;
use std::task::Waker;

const BLOCK: u64 = 4096;

fn write(cache: &Cache<SimEnvironment>, at: u64, value: u8) {
    let range = ByteRange::at(at, BLOCK);
    let admission = cache.write(range, &[value; BLOCK as usize], Waker::noop()).expect("the cache runs");
    assert!(matches!(admission, cbd_engine::Admission::Done(_)), "there is space");
}

/// The cached content of the block at `at`, if any.
fn cached(cache: &Cache<SimEnvironment>, at: u64) -> Result<Option<u8>> {
    let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
    cache.read(ByteRange::at(at, BLOCK), &mut bytes, &mut misses)?;
    let is_cached = misses.is_empty();
    misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
    Ok(is_cached.then_some(bytes[0]))
}

/// A region whose cache has a long history: tails have moved, much is drained, lanes are marked.
fn lived_in() -> (CrashMemory, Tables) {
    act_as(0);
    let (memory, tables) = made(&CHANGES[..1]);
    let id = tables.create_backend(&backend(9)).expect("there is space");
    let cache = tables.open_cache(id).expect("a new cache");
    let disk = SimDisk::new(SimDisk::ordinary(1 << 20, 512), 3);
    let mut worker = BackgroundWorker::new(Arc::clone(&cache), disk.queue(4), disk.geometry());
    for round in 0..24 {
        (0..20).for_each(|block| write(&cache, block * BLOCK, 50 + round));
        cache.flush().expect("the cache runs");
        cache.request_drain();
        for _ in 0..2000 {
            if matches!(worker.step(), Step::Idle { .. }) {
                break;
            }
        }
    }
    // Some data is still dirty when the cache is dropped.
    (0..20).for_each(|block| write(&cache, block * BLOCK, 99));
    cache.flush().expect("the cache runs");
    assert!(cache.drained_epoch().0 > 3);
    drop((worker, cache));
    tables.remove_backend(id).expect("nothing is open");
    (memory, tables)
}

/// Expects a cache that is empty and works, also after a power cut.
fn expect_new(memory: CrashMemory, what: &str) {
    let tables = open(&memory).unwrap_or_else(|error| panic!("{what}: {error}"));
    let backends = tables.backends().expect("rows are sound");
    let Some(found) = backends.iter().find(|found| found.cache_segments > 0) else { return };
    let id = found.id;
    {
        let cache = tables.open_cache(id).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(cache.status().damaged, [], "{what}");
        for block in 0..60 {
            let seen = cached(&cache, block * BLOCK).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(seen, None, "{what}: block {block} of an earlier cache");
        }
        (0..12).for_each(|block| write(&cache, block * BLOCK, 1));
        assert_eq!(cache.status().dirty_records, 12, "{what}");
    }
    drop(tables);
    let tables = open(&memory.power_cut(3, Keep::Nothing)).unwrap_or_else(|error| panic!("{what}: {error}"));
    let cache = tables.open_cache(id).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!((cache.status().dirty_records, cache.status().damaged), (12, vec![]), "{what}");
    for block in 0..12 {
        assert_eq!(cached(&cache, block * BLOCK).expect("it is sound"), Some(1), "{what}: block {block}");
    }
}

#[test]
fn a_cache_in_reused_segments_is_empty_wherever_its_creation_is_interrupted() {
    let events = {
        let (memory, tables) = lived_in();
        let before = memory.events();
        tables.create_backend(&backend(9)).expect("there is space");
        memory.events() - before
    };
    for event in 1..=events + 1 {
        let (memory, tables) = lived_in();
        memory.crash_after(event, event);
        assert_eq!(until_crash(|| tables.create_backend(&backend(9))).is_err(), event <= events);
        for (fate, end) in crate::rig::ends(&memory).into_iter().enumerate() {
            act_as(0);
            expect_new(end, &format!("event {event}, fate {fate}"));
        }
    }
}

#[test]
fn a_cache_in_reused_segments_is_empty_though_one_page_of_its_state_fails() {
    let (memory, tables) = lived_in();
    tables.create_backend(&backend(9)).expect("there is space");
    let area = tables.info().layout.segment_area;
    let memory = memory.power_cut(1, Keep::Nothing);
    for page in 0..8 {
        let memory = memory.fork();
        memory.poison(ByteRange::at(area + page * BLOCK, BLOCK));
        expect_new(memory, &format!("page {page} of the state"));
    }
}

/// The row of a blkdev, left by a crash, names a backend that was removed.
#[test]
fn a_blkdev_of_an_earlier_backend_in_the_same_row_is_not_shown() {
    let (memory, tables) = made(&CHANGES[..3]);
    let image = memory.image();
    let layout = tables.info().layout;
    tables.remove_blkdev(cbd_types::BlkdevId(0)).expect("it is there");
    tables.remove_backend(BackendId(0)).expect("nothing stands on it");
    tables.create_backend(&backend(9)).expect("there is space");
    assert!(tables.blkdevs().is_empty());
    drop(tables);
    // Restores the blkdev's row.
    let mut forged = memory.image();
    let row = layout.blkdev_area as usize..layout.segment_table as usize;
    forged[row.clone()].copy_from_slice(&image[row]);
    let tables = open(&CrashMemory::from_image(forged)).expect("a transport");
    assert_eq!(tables.blkdevs(), []);
    let export = String::from("nbd");
    tables
        .create_blkdev(&BlkdevSpec { backend: BackendId(0), host: HostId(0), export, shared: false })
        .expect("nothing stands on the new backend");
}

#[test]
fn a_cache_is_opened_once_at_a_time() {
    let (_memory, tables) = made(&CHANGES[..2]);
    let cache = tables.open_cache(BackendId(0)).expect("a new cache");
    let error = tables.open_cache(BackendId(0)).expect_err("it is open");
    assert_eq!(error.kind(), cbd_types::ErrorKind::Busy);
    drop(cache);
    tables.open_cache(BackendId(0)).expect("it is closed");
}

#[test]
fn a_region_that_holds_something_is_formatted_by_force_only() {
    let (memory, _tables) = made(&CHANGES[..1]);
    let error = format_as(environment_of(8), &memory, false).err().expect("it holds a transport");
    assert_eq!(error.kind(), cbd_types::ErrorKind::AlreadyExists);
    let foreign = region();
    cbd_types::Pmem::store(&foreign, 100, b"data of a user");
    let error = format_as(environment_of(8), &foreign, false).err().expect("it holds data");
    assert_eq!(error.kind(), cbd_types::ErrorKind::Foreign);
    let region: Region<CrashMemory> = Region::new(foreign);
    assert!(cbd_engine::Transport::open(environment_of(8), region).is_err());
}
