//! The tables of a transport are crashed at every store, write-back and fence of every change: afterwards the change is
//! there or it is not, nothing else has changed, and what was seen once is still there after a power cut.

use cbd_engine::{BackendSpec, BlkdevSpec, Consistency, FormatOptions, Settings, Transport};
use cbd_sim::{CrashMemory, Keep, SimEnvironment, from_environment, until_crash};
use cbd_types::{BackendId, BlkdevId, HostId, Region, Result};
use std::sync::Arc;

type Tables = Arc<Transport<SimEnvironment>>;

const SEGMENT: u64 = 64 << 10;

/// The same numbers in every life, so that two lives make the same identities.
fn environment() -> Arc<SimEnvironment> {
    Arc::new(SimEnvironment::new(7, 0))
}

fn open(memory: &CrashMemory) -> Result<Tables> {
    Transport::open(environment(), Region::new(memory.clone()))
}

fn format(memory: &CrashMemory, force: bool) -> Result<Tables> {
    let options =
        FormatOptions { segment_size: Some(SEGMENT), force, host_rows: 2, backend_rows: 2, blkdev_rows: 2 };
    Transport::format(environment(), Region::new(memory.clone()), &options)
}

fn backend(cache_segments: u64) -> BackendSpec {
    BackendSpec {
        host: HostId(0),
        path: String::from("/simulated/disk"),
        identity: String::from("simulated"),
        size: 1 << 20,
        sector: 512,
        cache_bytes: (cache_segments > 0).then_some(cache_segments * SEGMENT),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    }
}

/// Every change that the tables know, one after the other.
const CHANGES: [fn(&Tables) -> Result<()>; 10] = [
    |tables| tables.register_host("one", None).map(drop),
    |tables| tables.create_backend(&backend(9)).map(drop),
    |tables| {
        let export = String::from("nbd");
        tables.create_blkdev(&BlkdevSpec { backend: BackendId(0), host: HostId(0), export }).map(drop)
    },
    |tables| {
        let settings =
            Settings { consistency: Consistency::Checkpoint, gc_percent: 20, ..Settings::default() };
        tables.update_settings(BackendId(0), settings)
    },
    |tables| tables.update_path(BackendId(0), "/simulated/other"),
    |tables| tables.create_backend(&backend(0)).map(drop),
    |tables| tables.remove_blkdev(BlkdevId(0)),
    |tables| tables.remove_backend(BackendId(0)),
    |tables| tables.create_backend(&backend(12)).map(drop),
    |tables| tables.remove_backend(BackendId(1)),
];

/// What the tables say, but for identities that are random.
fn snapshot(tables: &Tables) -> String {
    let backends: Vec<_> = tables
        .backends()
        .expect("rows are sound")
        .into_iter()
        .map(|row| (row.id, row.path, row.size, row.cache_segments, row.lanes, row.settings))
        .collect();
    format!("{:?} {backends:?} {:?} {}", tables.hosts(), tables.blkdevs(), tables.info().free_segments)
}

fn region() -> CrashMemory {
    CrashMemory::new(17 * SEGMENT + (256 << 10))
}

fn made(changes: &[fn(&Tables) -> Result<()>]) -> (CrashMemory, Tables) {
    let memory = region();
    let tables = format(&memory, false).expect("a fresh region");
    changes.iter().for_each(|change| change(&tables).expect("each change is possible"));
    (memory, tables)
}

/// Both ends that a process can come to, with several fates.
fn ends(memory: &CrashMemory) -> Vec<CrashMemory> {
    let fates = from_environment("CBD_FATES", 6);
    let cuts = (0..fates).map(|fate| memory.fork().power_cut(fate, Keep::Any));
    [memory.fork().process_crash()].into_iter().chain(cuts).collect()
}

#[test]
fn a_change_is_there_or_not_and_stays_what_it_was_found_to_be() {
    for number in 0..CHANGES.len() {
        let (before, after, places) = {
            let (memory, tables) = made(&CHANGES[..number]);
            let (before, events) = (snapshot(&tables), memory.events());
            CHANGES[number](&tables).expect("possible");
            (before, snapshot(&tables), memory.events() - events)
        };
        for place in 1..=places {
            let (memory, tables) = made(&CHANGES[..number]);
            memory.crash_after(place, place);
            assert!(until_crash(|| CHANGES[number](&tables)).is_err(), "change {number}, place {place}");
            for (fate, end) in ends(&memory).into_iter().enumerate() {
                let place = format!("change {number}, place {place}, fate {fate}");
                let tables = open(&end).unwrap_or_else(|error| panic!("{place}: {error}"));
                let found = snapshot(&tables);
                assert!(
                    found == before || found == after,
                    "{place}: {found}\nbefore {before}\nafter {after}"
                );
                // Seen once, so it must outlive a power cut.
                let tables =
                    open(&end.power_cut(1, Keep::Nothing)).unwrap_or_else(|error| panic!("{place}: {error}"));
                assert_eq!(snapshot(&tables), found, "{place}: lost by a power cut after it was seen");
                if found == before {
                    CHANGES[number](&tables).unwrap_or_else(|error| panic!("{place}: {error}"));
                    assert_eq!(snapshot(&tables), after, "{place}: made after the crash");
                }
            }
        }
    }
}

#[test]
fn a_crash_while_formatting_leaves_a_transport_or_none() {
    let places = {
        let memory = region();
        format(&memory, false).expect("a fresh region");
        memory.events()
    };
    for place in 1..=places {
        let memory = region();
        memory.crash_after(place, place);
        assert!(until_crash(|| format(&memory, false)).is_err());
        for end in ends(&memory) {
            if let Ok(tables) = open(&end) {
                assert_eq!(snapshot(&tables), snapshot(&made(&[]).1));
            }
            let tables = format(&end, true).unwrap_or_else(|error| panic!("place {place}: {error}"));
            tables.register_host("one", None).expect("an empty table");
        }
    }
}

#[test]
fn a_crash_while_formatting_anew_never_mixes_the_old_transport_with_the_new() {
    let (old, fresh) = (snapshot(&made(&CHANGES[..3]).1), snapshot(&made(&[]).1));
    let places = {
        let (memory, _) = made(&CHANGES[..3]);
        let before = memory.events();
        format(&memory, true).expect("forced");
        memory.events() - before
    };
    for place in 1..=places {
        let (memory, _) = made(&CHANGES[..3]);
        memory.crash_after(place, place);
        assert!(until_crash(|| format(&memory, true)).is_err());
        for (fate, end) in ends(&memory).into_iter().enumerate() {
            let Ok(tables) = open(&end) else { continue };
            let found = snapshot(&tables);
            assert!(found == old || found == fresh, "place {place}, fate {fate}: {found}");
        }
    }
}
