//! A region with tables, all kinds of changes, and snapshots of their contents.

use cbd_engine::{BackendSpec, BlkdevSpec, Consistency, FormatOptions, Settings, SharedSpace, Transport};
use cbd_sim::{CrashMemory, Keep, SimEnvironment, from_environment};
use cbd_types::{BackendId, BlkdevId, HostId, Region, Result};
use std::sync::Arc;

pub type Tables = Arc<Transport<SimEnvironment>>;

pub const SEGMENT: u64 = 64 << 10;

/// The same random numbers in every process, so that two processes create the same identities.
pub fn environment() -> Arc<SimEnvironment> {
    environment_of(7)
}

/// Other random numbers than in other processes.
pub fn environment_of(seed: u64) -> Arc<SimEnvironment> {
    Arc::new(SimEnvironment::new(seed, 0))
}

pub fn open(memory: &CrashMemory) -> Result<Tables> {
    Transport::open(environment(), Region::new(memory.clone()))
}

pub fn format(memory: &CrashMemory, force: bool) -> Result<Tables> {
    format_as(environment(), memory, force)
}

/// Formats with identities of the environment.
pub fn format_as(environment: Arc<SimEnvironment>, memory: &CrashMemory, force: bool) -> Result<Tables> {
    let options =
        FormatOptions { segment_size: Some(SEGMENT), force, host_rows: 2, backend_rows: 2, blkdev_rows: 2 };
    Transport::format(environment, Region::new(memory.clone()), &options)
}

pub fn backend(cache_segments: u64) -> BackendSpec {
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

/// All kinds of changes of the tables, one after the other.
pub const CHANGES: [fn(&Tables) -> Result<()>; 15] = [
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
    |tables| tables.move_backend(BackendId(0), "/simulated/copy", "a copy"),
    |tables| tables.settle_backend(BackendId(0)),
    |tables| tables.move_backend(BackendId(0), "/simulated/third", "a third"),
    // Moves the backend back to a former disk.
    |tables| tables.move_backend(BackendId(0), "/simulated/disk", "simulated"),
    |tables| tables.remove_blkdev(BlkdevId(0)),
    |tables| tables.remove_backend(BackendId(0)),
    |tables| tables.create_backend(&backend(12)).map(drop),
    |tables| tables.remove_backend(BackendId(1)),
    |tables| tables.share_cache(BackendId(0), Some(SharedSpace { min: 9, max: 14, weight: 2 })),
];

/// The contents of the tables, without random identities.
pub fn snapshot(tables: &Tables) -> String {
    format!("{} {}", rows(tables), tables.info().free_segments)
}

/// The hosts, backends and blkdevs.
pub fn rows(tables: &Tables) -> String {
    let backends: Vec<_> = tables
        .backends()
        .expect("rows are sound")
        .into_iter()
        .map(|row| {
            // The time of the move comes from a clock.
            let former = tables.former_disks(row.id).into_iter();
            let moved: Vec<_> = former.map(|former| (former.path, former.identity)).collect();
            let disk = (row.path, row.identity, row.size, row.is_moved, moved);
            (row.id, disk, row.cache_segments, row.shared, row.lanes, row.settings)
        })
        .collect();
    format!("{:?} {backends:?} {:?}", tables.hosts(), tables.blkdevs())
}

pub fn region() -> CrashMemory {
    CrashMemory::new(17 * SEGMENT + (256 << 10))
}

pub fn made(changes: &[fn(&Tables) -> Result<()>]) -> (CrashMemory, Tables) {
    let memory = region();
    let tables = format(&memory, false).expect("a fresh region");
    changes.iter().for_each(|change| change(&tables).expect("each change is possible"));
    (memory, tables)
}

/// The possible ends of a process: a crash, and power cuts with several outcomes.
pub fn ends(memory: &CrashMemory) -> Vec<CrashMemory> {
    ends_of(memory, from_environment("CBD_FATES", 6))
}

/// As [`ends`], with `fates` outcomes.
pub fn ends_of(memory: &CrashMemory, fates: u64) -> Vec<CrashMemory> {
    let cuts = (0..fates).map(|fate| memory.fork().power_cut(fate, Keep::Any));
    [memory.fork().process_crash()].into_iter().chain(cuts).collect()
}
