//! A region with tables, all kinds of changes, and snapshots of their contents.

use cbd_engine::{BackendSpec, BlkdevSpec, Consistency, FormatOptions, Settings, SharedSpace, Transport};
use cbd_sim::{CrashMemory, Keep, SimEnvironment, from_environment};
use cbd_types::{BackendId, BlkdevId, HostId, Region, Result};
use std::sync::Arc;

pub type Tables = Arc<Transport<SimEnvironment>>;

pub const SEGMENT: u64 = 64 << 10;
/// The size of the backing device of each backend, in bytes.
pub const BACKEND_SIZE: u64 = 1 << 20;

/// The same random numbers in every process, so that two processes create the same identities.
pub fn environment() -> Arc<SimEnvironment> {
    environment_of(7)
}

/// Other random numbers than in other processes.
pub fn environment_of(seed: u64) -> Arc<SimEnvironment> {
    Arc::new(SimEnvironment::new(seed, 0))
}

/// Opens the tables as a process does that serves what it finds: a cache that has more segments than its row says is opened, which
/// gives them back.
pub fn open(memory: &CrashMemory) -> Result<Tables> {
    let tables = Transport::open(environment(), Region::new(memory.clone()))?;
    let Ok(backends) = tables.backends() else { return Ok(tables) };
    let counted: u32 = backends.iter().map(|row| row.cache_segments).sum();
    let info = tables.info();
    if counted + info.free_segments < info.layout.segment_count {
        for row in backends.into_iter().filter(|row| row.cache_segments > 0) {
            drop(tables.open_cache(row.id));
        }
    }
    Ok(tables)
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
        size: BACKEND_SIZE,
        sector: 512,
        cache_bytes: (cache_segments > 0).then_some(cache_segments * SEGMENT),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    }
}

/// All kinds of changes of the tables, one after the other.
pub const CHANGES: [fn(&Tables) -> Result<()>; 27] = [
    |tables| tables.register_host("one", None).map(drop),
    |tables| tables.create_backend(&backend(9)).map(drop),
    |tables| {
        let export = String::from("nbd");
        tables
            .create_blkdev(&BlkdevSpec { backend: BackendId(0), host: HostId(0), export, shared: false })
            .map(drop)
    },
    |tables| {
        let settings =
            Settings { consistency: Consistency::Checkpoint, gc_percent: 20, ..Settings::default() };
        tables.update_settings(BackendId(0), settings)
    },
    |tables| tables.update_path(BackendId(0), "/simulated/other"),
    |tables| tables.name_backend(BackendId(0), Some(&"data".parse()?)),
    |tables| tables.name_blkdev(BlkdevId(0), Some(&"disk".parse()?)),
    // A rename, and the end of a name.
    |tables| tables.name_backend(BackendId(0), Some(&"data-2".parse()?)),
    |tables| tables.name_blkdev(BlkdevId(0), None),
    |tables| tables.create_backend(&backend(0)).map(drop),
    |tables| tables.move_backend(BackendId(0), "/simulated/copy", "a copy"),
    |tables| tables.settle_backend(BackendId(0)),
    |tables| tables.move_backend(BackendId(0), "/simulated/third", "a third"),
    // Moves the backend back to a former disk.
    |tables| tables.move_backend(BackendId(0), "/simulated/disk", "simulated"),
    |tables| tables.remove_blkdev(BlkdevId(0)),
    |tables| tables.remove_backend(BackendId(0)),
    |tables| tables.create_named_backend(&backend(12), Some(&"data".parse()?)).map(drop),
    |tables| tables.name_backend(BackendId(0), None),
    |tables| tables.remove_backend(BackendId(1)),
    |tables| tables.share_cache(BackendId(0), Some(SharedSpace { min: 9, max: 14, weight: 2 })),
    |tables| {
        let cache = tables.open_cache(BackendId(0))?;
        tables.grow_cache(BackendId(0), &cache, 2)
    },
    |tables| {
        let cache = tables.open_cache(BackendId(0))?;
        tables.finish_shrink(BackendId(0), cache.begin_shrink(3)?)
    },
    detach,
    |tables| tables.attach_cache(BackendId(0), 9 * SEGMENT, 1),
    |tables| {
        // The segments that come were of the former cache.
        let cache = tables.open_cache(BackendId(0))?;
        tables.grow_cache(BackendId(0), &cache, 1)
    },
    detach,
    |tables| tables.grow_backend(BackendId(0), 3 << 20, "simulated, larger"),
];

/// Detaches the cache of the first backend.
fn detach(tables: &Tables) -> Result<()> {
    let cache = tables.open_cache(BackendId(0))?;
    cache.stop();
    tables.detach_cache(BackendId(0))
}

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
            (row.id, row.name, disk, row.cache_segments, row.shared, row.lanes, row.settings)
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
