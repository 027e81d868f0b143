//! A region in an ordinary file, and crashes of the machine: each page holds an old or a new content, independent of
//! the other pages. The cache must never return wrong data: it is recovered in its last state, emptied if the disk
//! holds everything, or refused.
//!
//! `CBD_HISTORIES` is the number of histories, `CBD_SEED` the first seed.

mod syncs;

use cbd_engine::{
    Admission, BackendSpec, BackgroundWorker, Cache, FormatOptions, Mixed, Pages, Settings, Step, Transport,
};
use cbd_sim::{CrashMemory, Keep, Seeded, SimDisk, SimEnvironment, act_as, from_environment, until_crash};
use cbd_types::{BackendId, BootId, ByteRange, ErrorKind, Region, Result};
use std::sync::Arc;
use std::task::Waker;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
const SEGMENT: u64 = 64 << 10;
const BACKEND: BackendId = BackendId(0);

type Tables = Arc<Transport<SimEnvironment>>;
type SimCache = Arc<Cache<SimEnvironment>>;

const fn boot(number: u8) -> BootId {
    BootId([number; 16])
}

fn file() -> CrashMemory {
    act_as(0);
    let memory = CrashMemory::new(17 * SEGMENT + (256 << 10));
    memory.become_file(boot(1));
    memory
}

fn environment(seed: u64) -> Arc<SimEnvironment> {
    Arc::new(SimEnvironment::new(seed, 0))
}

fn open(memory: &CrashMemory, seed: u64) -> Result<Tables> {
    Transport::open(environment(seed), Region::new(memory.clone()))
}

fn format(memory: &CrashMemory, seed: u64, force: bool) -> Result<Tables> {
    let options =
        FormatOptions { segment_size: Some(SEGMENT), force, host_rows: 2, backend_rows: 2, blkdev_rows: 2 };
    Transport::format(environment(seed), Region::new(memory.clone()), &options)
}

fn create(tables: &Tables) -> Result<BackendId> {
    let host = tables.register_host("one", None)?;
    tables.create_backend(&BackendSpec {
        host,
        path: String::from("/simulated/disk"),
        identity: String::from("simulated"),
        size: BLOCKS * BLOCK,
        sector: 512,
        cache_bytes: Some(9 * SEGMENT),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    })
}

fn disk() -> SimDisk {
    SimDisk::new(SimDisk::ordinary(BLOCKS * BLOCK, 512), 3)
}

/// A formatted region with an open cache.
fn life() -> (CrashMemory, Tables, SimCache, SimDisk) {
    let memory = file();
    let tables = format(&memory, 1, false).expect("fresh memory");
    create(&tables).expect("there is space");
    let cache = tables.open_cache(BACKEND).expect("a new cache");
    (memory, tables, cache, disk())
}

/// Writes a block; returns whether there was space.
fn write(cache: &SimCache, block: u64, value: u8) -> bool {
    let range = ByteRange::at(block * BLOCK, BLOCK);
    let admission = cache.write(range, &[value; BLOCK as usize], Waker::noop()).expect("the cache runs");
    matches!(admission, Admission::Done(_))
}

fn drain(cache: &SimCache, disk: &SimDisk) {
    let mut worker = BackgroundWorker::new(Arc::clone(cache), disk.queue(4), disk.geometry());
    let target = cache.request_drain();
    for _ in 0..5000 {
        if matches!(worker.step(), Step::Idle { .. }) && cache.is_drained(target) {
            return;
        }
    }
    panic!("the cache is not drained");
}

/// The content of a block that a client reads; a miss is filled.
fn see(cache: &SimCache, disk: &SimDisk, block: u64) -> u32 {
    let (mut bytes, mut misses) = (vec![0xee; BLOCK as usize], Vec::new());
    let range = ByteRange::at(block * BLOCK, BLOCK);
    cache.read(range, &mut bytes, &mut misses).expect("it is sound");
    if !misses.is_empty() {
        disk.contents().read(range.start, &mut bytes);
    }
    for miss in misses {
        cache.complete_fill(miss, &bytes);
    }
    name_of(&bytes)
}

/// The name of a block's content: its byte if all bytes are equal, otherwise a number above all bytes.
fn name_of(block: &[u8]) -> u32 {
    if block.iter().all(|byte| *byte == block[0]) {
        u32::from(block[0])
    } else {
        cbd_format::crc32c(block) | 0x100
    }
}

fn on_disk(disk: &SimDisk, block: u64) -> u32 {
    let mut bytes = [0; BLOCK as usize];
    disk.contents().read(block * BLOCK, &mut bytes);
    name_of(&bytes)
}

#[track_caller]
fn refused(tables: &Tables) {
    let error = tables.open_cache(BACKEND).expect_err("it was open when the machine crashed");
    assert_eq!(error.kind(), ErrorKind::Torn, "{error}");
}

#[test]
fn a_cache_with_dirty_data_is_refused_at_every_attempt_after_a_machine_crash() {
    let (memory, _tables, cache, _disk) = life();
    assert!(write(&cache, 0, 7));
    let memory = memory.machine_crash(1, boot(2));
    let tables = open(&memory, 2).expect("the tables are on the disk");
    refused(&tables);
    assert_eq!(tables.pages_of(BACKEND).expect("it is there"), Pages::MixedDirty);
    let memory = memory.process_crash();
    refused(&open(&memory, 3).expect("a transport"));
    refused(&open(&memory.machine_crash(2, boot(3)), 4).expect("a transport"));
}

#[test]
fn a_cache_is_recovered_in_the_boot_in_which_its_process_died() {
    let (memory, _tables, cache, disk) = life();
    assert!(write(&cache, 0, 7));
    let memory = memory.process_crash();
    let tables = open(&memory, 2).expect("a transport");
    let cache = tables.open_cache(BACKEND).expect("the same boot");
    assert_eq!(see(&cache, &disk, 0), 7);
    assert_eq!(cache.status().dirty_records, 1);
}

#[test]
fn a_cache_that_was_closed_and_synced_is_recovered_in_any_boot() {
    let (memory, tables, cache, disk) = life();
    assert!(write(&cache, 0, 7));
    cache.stop();
    drop(cache);
    assert_eq!(tables.sync().expect("the disk takes it"), 0);
    let tables = open(&memory.machine_crash(1, boot(2)), 2).expect("a transport");
    let cache = tables.open_cache(BACKEND).expect("it was synced");
    assert_eq!(see(&cache, &disk, 0), 7);
    assert_eq!(cache.status().dirty_records, 1);
}

#[test]
fn a_cache_that_is_still_open_is_not_noted_as_synced() {
    let (memory, tables, cache, _disk) = life();
    assert!(write(&cache, 0, 7));
    assert_eq!(tables.sync().expect("the disk takes it"), 1);
    assert!(write(&cache, 1, 8));
    refused(&open(&memory.machine_crash(1, boot(2)), 2).expect("a transport"));
}

#[test]
fn a_cache_without_writes_since_it_was_opened_is_emptied_after_a_machine_crash() {
    let (memory, tables, cache, disk) = life();
    (0..20).for_each(|block| assert!(write(&cache, block, 7)));
    drain(&cache, &disk);
    let epoch = cache.drained_epoch();
    cache.stop();
    drop((cache, tables));
    let tables = open(&memory, 2).expect("a transport");
    let cache = tables.open_cache(BACKEND).expect("the same boot");
    // Fills, which a crash may leave in part.
    (20..40).for_each(|block| assert_eq!(see(&cache, &disk, block), see(&cache, &disk, block)));
    for seed in 0..20 {
        let memory = memory.fork();
        memory.write_back_some(seed);
        let memory = memory.machine_crash(seed, boot(2));
        let tables = open(&memory, 3).expect("a transport");
        assert_eq!(tables.pages_of(BACKEND).expect("it is there"), Pages::MixedClean);
        let cache = tables.open_cache(BACKEND).expect("nothing was dirty");
        assert_eq!((cache.status().dirty_records, cache.status().damaged.len()), (0, 0));
        assert!(cache.drained_epoch() > epoch, "epochs go on");
        (0..BLOCKS).for_each(|block| {
            assert_eq!(see(&cache, &disk, block), on_disk(&disk, block), "block {block}");
        });
        assert!(write(&cache, 0, 9));
        refused(&open(&memory.machine_crash(seed, boot(3)), 4).expect("a transport"));
    }
}

#[test]
fn a_crash_while_a_cache_is_emptied_leaves_one_that_is_emptied_again() {
    let (memory, tables, cache, disk) = life();
    (0..20).for_each(|block| assert!(write(&cache, block, 7)));
    drain(&cache, &disk);
    drop((cache, tables));
    drop(open(&memory, 2).expect("a transport").open_cache(BACKEND).expect("the same boot"));
    let memory = memory.machine_crash(5, boot(2));
    for event in 1.. {
        let memory = memory.fork();
        memory.crash_after(event, event);
        let opened = until_crash(|| open(&memory, 3).and_then(|tables| tables.open_cache(BACKEND)).map(drop));
        if opened.is_ok() {
            assert!(event > 10, "it was emptied");
            break;
        }
        for end in [memory.fork().process_crash(), memory.machine_crash(event, boot(3))] {
            match open(&end, 4).expect("a transport").open_cache(BACKEND) {
                Ok(cache) => assert_eq!(see(&cache, &disk, 3), 7),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Torn, "event {event}: {error}"),
            }
        }
    }
}

#[test]
fn a_mixed_cache_that_was_only_inspected_is_still_not_trusted() {
    let (memory, _tables, cache, _disk) = life();
    assert!(write(&cache, 0, 7));
    let memory = memory.machine_crash(1, boot(2));
    let tables = open(&memory, 2).expect("a transport");
    drop(tables.open_cache_if(BACKEND, Mixed::Look).expect("it can be read"));
    refused(&tables);
    drop(tables.open_cache_if(BACKEND, Mixed::Recover).expect("the user requested it"));
    drop(tables.open_cache(BACKEND).expect("it is this boot's now"));
}

/// The region as a program left it that records no notes.
#[test]
fn a_cache_without_a_note_is_recovered_and_noted_from_then_on() {
    act_as(0);
    let memory = CrashMemory::new(17 * SEGMENT + (256 << 10));
    let tables = format(&memory, 1, false).expect("fresh memory");
    create(&tables).expect("there is space");
    assert!(write(&tables.open_cache(BACKEND).expect("a new cache"), 0, 7));
    drop(tables);
    let memory = memory.power_cut(1, Keep::Nothing);
    memory.become_file(boot(1));
    let tables = open(&memory, 2).expect("a transport");
    assert_eq!(tables.pages_of(BACKEND).expect("it is there"), Pages::Unknown);
    assert_eq!(see(&tables.open_cache(BACKEND).expect("recovered"), &disk(), 0), 7);
    refused(&open(&memory.machine_crash(1, boot(2)), 3).expect("a transport"));
}

/// A copy of the region on memory that keeps every store.
#[test]
fn the_note_of_an_ordinary_file_is_cleared_on_memory_that_needs_none() {
    let (memory, tables, cache, disk) = life();
    assert!(write(&cache, 0, 7));
    cache.stop();
    drop(cache);
    tables.sync().expect("the disk takes it");
    let memory = CrashMemory::from_image(memory.image());
    let cache = open(&memory, 2).expect("a transport").open_cache(BACKEND).expect("it was synced");
    assert!(write(&cache, 1, 8));
    let memory = memory.power_cut(1, Keep::Nothing);
    let cache = open(&memory, 3).expect("a transport").open_cache(BACKEND).expect("the memory keeps it");
    assert_eq!((see(&cache, &disk, 0), see(&cache, &disk, 1)), (7, 8));
}

/// If the old superblocks were still on the disk, blank tables would count as those of the former transport.
#[test]
fn a_crash_while_a_region_is_formatted_again_leaves_the_former_transport_whole_or_none() {
    let (memory, tables, cache, _disk) = life();
    cache.stop();
    drop(cache);
    tables.sync().expect("the disk takes it");
    let former = tables.info().uuid;
    drop(tables);
    for event in 1.. {
        let mut is_done = false;
        for seed in 0..60 {
            let memory = memory.fork();
            memory.crash_after(event, seed);
            is_done = until_crash(|| format(&memory, 9, true).map(drop).expect("the disk takes it")).is_ok();
            act_as(0);
            let Ok(tables) = open(&memory.machine_crash(seed, boot(2)), 3) else {
                assert!(!is_done, "a transport that was reported as created is lost");
                continue;
            };
            if tables.info().uuid == former {
                assert!(!is_done, "the former transport is back");
                tables.backend(BACKEND).expect("the former transport has its backend");
            } else {
                let rows = (tables.hosts().len(), tables.backends().expect("sound rows").len());
                assert_eq!(rows, (0, 0), "event {event}, seed {seed}: rows of the former transport");
            }
        }
        if is_done {
            assert!(event > 10, "it erases, writes tables, and writes two superblocks");
            break;
        }
    }
}

/// The contents that the history acknowledged.
struct Known {
    /// For each block the content that was acknowledged last, and the content of a write in flight, which the block
    /// may hold instead.
    blocks: Vec<(u32, Option<u32>)>,
    /// Whether the backend was reported as created.
    created: bool,
}

/// Plays a random history until it ends or the process crashes.
fn live(memory: &CrashMemory, disk: &SimDisk, random: &mut Seeded, known: &mut Known) {
    let mut tables = format(memory, random.next(), true).expect("the memory works");
    create(&tables).expect("there is space");
    known.created = true;
    let mut cache = tables.open_cache(BACKEND).expect("the same boot");
    for _ in 0..random.below(60) {
        match random.below(12) {
            0..=5 => {
                let (block, value) = (random.below(BLOCKS), random.between(1, 250) as u8);
                known.blocks[block as usize].1 = Some(value.into());
                if write(&cache, block, value) {
                    known.blocks[block as usize] = (value.into(), None);
                } else {
                    known.blocks[block as usize].1 = None;
                    drain(&cache, disk);
                }
            }
            6 => cache.flush().expect("the cache runs"),
            7 => drain(&cache, disk),
            8 => drop(see(&cache, disk, random.below(BLOCKS))),
            9 => memory.write_back_some(random.next()),
            _ => {
                cache.stop();
                drop(cache);
                if random.chance(500) {
                    tables.sync().expect("the disk takes it");
                }
                drop(tables);
                if random.chance(200) {
                    return;
                }
                tables = open(memory, random.next()).expect("the same boot");
                cache = tables.open_cache(BACKEND).expect("the same boot");
            }
        }
    }
}

#[test]
fn no_history_shows_old_data_after_a_machine_crash() {
    let first = from_environment("CBD_SEED", 0);
    let (mut refused, mut opened, mut emptied) = (0, 0, 0);
    for seed in first..first + from_environment("CBD_HISTORIES", 1500) {
        let mut random = Seeded::new(seed);
        let (memory, disk) = (file(), disk());
        // Some histories format a region that holds another transport.
        let mut former = None;
        if random.chance(300) {
            let mut other = Known { blocks: vec![(0, None); BLOCKS as usize], created: false };
            live(&memory, &SimDisk::new(SimDisk::ordinary(BLOCKS * BLOCK, 512), 4), &mut random, &mut other);
            former = Some(open(&memory, seed).expect("a transport").info().uuid);
        }
        let mut known = Known {
            blocks: (0..BLOCKS).map(|block| (on_disk(&disk, block), None)).collect(),
            created: false,
        };
        if random.chance(700) {
            memory.crash_after(random.between(1, 1200), random.next());
        }
        let _ = until_crash(|| live(&memory, &disk, &mut random, &mut known));
        act_as(0);
        disk.process_crash(seed);
        let memory = memory.machine_crash(random.next(), boot(2));
        let Ok(tables) = open(&memory, seed) else {
            assert!(!known.created, "seed {seed}: the transport is lost");
            continue;
        };
        if former == Some(tables.info().uuid) {
            assert!(!known.created, "seed {seed}: the former transport is back");
            assert!(
                tables.backend(BACKEND).is_ok(),
                "seed {seed}: the former transport has lost its backend"
            );
            continue;
        }
        let pages = tables.pages_of(BACKEND);
        match tables.open_cache(BACKEND) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                assert!(!known.created, "seed {seed}: the backend is lost");
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Torn, "seed {seed}: {error}");
                refused += 1;
            }
            Ok(cache) => {
                if pages.is_ok_and(|pages| pages == Pages::MixedClean) {
                    emptied += 1;
                } else {
                    opened += 1;
                }
                let check = |when: &str, seen: u32, block: usize| {
                    let (value, other) = known.blocks[block];
                    assert!(
                        seen == value || Some(seen) == other,
                        "seed {seed}, {when}: block {block} is {seen}, not {value} or {other:?}"
                    );
                };
                (0..BLOCKS)
                    .for_each(|block| check("in the cache", see(&cache, &disk, block), block as usize));
                drain(&cache, &disk);
                (0..BLOCKS).for_each(|block| check("on the disk", on_disk(&disk, block), block as usize));
            }
        }
    }
    assert!(
        refused > 20 && opened > 20 && emptied > 20,
        "{refused} refused, {opened} opened, {emptied} emptied"
    );
}
