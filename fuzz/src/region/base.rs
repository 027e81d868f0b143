//! Regions that the engine itself made, from scripted histories, as a base for forgeries.
//!
//! Invariants: the same base is the same bytes in every run, as long as the engine stores the same bytes.

use super::forge;
use cbd_engine::{BackendSpec, BlkdevSpec, Consistency, FormatOptions, OnWriteError, Settings, Transport};
use cbd_format::{Layout, RecordKind};
use cbd_sim::process::{Outlook, Process};
use cbd_sim::{Content, CrashMemory, DiskFaults, Keep, Seeded, SimDisk, SimEnvironment};
use cbd_types::{AlignedBuffer, BackendId, ByteRange, CHUNK, Operation, Region, Request, Result};
use std::sync::{Arc, OnceLock};

/// Logical sector of the simulated disks.
pub const SECTOR: u64 = 512;

/// Size in bytes of the simulated disks: two chunks, so two lanes. The second chunk is short, and its size is not a multiple of a
/// block.
pub const DISK: u64 = CHUNK + (160 << 10) + 3 * SECTOR;

/// The ranges that a broken disk refuses to write.
pub const REFUSED: [ByteRange; 2] =
    [ByteRange { start: 4096, end: 12 << 10 }, ByteRange { start: CHUNK - (8 << 10), end: CHUNK + SECTOR }];

/// A base region.
#[derive(Debug)]
pub struct Base {
    /// The region; use a copy of it, see [`CrashMemory::fork`].
    pub memory: CrashMemory,
    /// The layout of its parts.
    pub layout: Layout,
    /// Whether its data has checksums.
    pub data_crc: bool,
}

/// How a base is produced.
#[derive(Clone, Copy)]
struct Script {
    segment_size: u64,
    segments: u32,
    backends: u32,
    data_crc: bool,
    consistency: Consistency,
    /// Number of requests of the clients.
    requests: u64,
    /// Number of steps of the background worker after each of them.
    steps: u64,
    /// Whether the disk refuses ranges, which are parked.
    parks: bool,
    end: End,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The process is killed.
    Killed,
    /// The power fails.
    PowerCut,
    /// All dirty data is written back, then the process shuts down cleanly.
    Drained,
    /// A dirty record loses its data; the next process detects and records that, and is killed.
    Quarantined,
}

const ORDINARY: Script = Script {
    segment_size: 64 << 10,
    segments: 17,
    backends: 1,
    data_crc: true,
    consistency: Consistency::Strict,
    requests: 60,
    steps: 2,
    parks: false,
    end: End::Killed,
};

/// The bases; their order is part of the corpus, so new ones go to the end.
const SCRIPTS: [Script; 11] = [
    Script { requests: 0, ..ORDINARY },
    Script { requests: 6, steps: 0, ..ORDINARY },
    ORDINARY,
    // Segments were reclaimed and reused.
    Script { requests: 500, steps: 8, end: End::PowerCut, ..ORDINARY },
    Script { requests: 100, steps: 4, end: End::Drained, ..ORDINARY },
    Script { data_crc: false, ..ORDINARY },
    // No data is written back before the damage: clean data would be read again from the disk.
    Script { requests: 20, steps: 0, end: End::Quarantined, ..ORDINARY },
    Script { consistency: Consistency::Checkpoint, requests: 120, steps: 3, ..ORDINARY },
    // Records with continuation lines for checksums.
    Script { segment_size: 256 << 10, segments: 9, requests: 40, ..ORDINARY },
    Script { segments: 9, backends: 2, requests: 50, ..ORDINARY },
    Script { requests: 120, steps: 40, parks: true, ..ORDINARY },
];

/// Number of bases.
#[must_use]
pub const fn count() -> usize {
    SCRIPTS.len()
}

/// The base with this number; created at the first call.
///
/// # Panics
/// When the engine refuses a valid request, which is a bug of its own.
#[must_use]
pub fn base(number: usize) -> &'static Base {
    static BASES: [OnceLock<Base>; SCRIPTS.len()] = [const { OnceLock::new() }; SCRIPTS.len()];
    BASES[number].get_or_init(|| {
        SCRIPTS[number].make(number as u64).unwrap_or_else(|error| panic!("base {number}: {error}"))
    })
}

/// A fresh disk of the same geometry as the disks of the bases.
#[must_use]
pub fn disk(seed: u64) -> SimDisk {
    SimDisk::new(SimDisk::ordinary(DISK, SECTOR as u32), seed)
}

/// The backends of a region that fit the simulated disks: the daemon compares a backend with the disk before
/// it opens the cache.
pub fn usable(transport: &Transport<SimEnvironment>) -> impl Iterator<Item = BackendId> {
    let fits = |id: &BackendId| {
        transport.backend(*id).is_ok_and(|entry| (entry.size, u64::from(entry.sector)) == (DISK, SECTOR))
    };
    (0..2).map(BackendId).filter(fits)
}

impl Script {
    fn make(self, seed: u64) -> Result<Base> {
        let room = u64::from(self.segments * self.backends) * self.segment_size;
        let tables = 256 << 10;
        let memory = CrashMemory::new(tables + room);
        let environment = Arc::new(SimEnvironment::new(seed, 0));
        let options = FormatOptions {
            segment_size: Some(self.segment_size),
            force: false,
            host_rows: 2,
            backend_rows: 2,
            blkdev_rows: 2,
        };
        let transport = Transport::format(Arc::clone(&environment), Region::new(memory.clone()), &options)?;
        let host = transport.register_host("fuzz", None)?;
        for backend in 0..self.backends {
            let id = transport.create_backend(&BackendSpec {
                host,
                path: format!("/simulated/disk{backend}"),
                identity: format!("simulated{backend}"),
                size: DISK,
                sector: SECTOR as u32,
                cache_bytes: Some(u64::from(self.segments) * self.segment_size),
                lanes_max: 2,
                handlers: 1,
                data_crc: self.data_crc,
                settings: Settings {
                    consistency: self.consistency,
                    on_write_error: if self.parks { OnWriteError::Park } else { OnWriteError::Stop },
                    write_error_after_s: 0,
                    ..Settings::default()
                },
            })?;
            transport.create_blkdev(&BlkdevSpec {
                backend: id,
                host,
                export: String::from("auto"),
                shared: false,
            })?;
        }
        let layout = transport.info().layout;
        drop(transport);
        let mut random = Seeded::new(seed);
        for backend in 0..self.backends {
            self.live(&environment, &memory, BackendId(backend), &mut random)?;
        }
        let left = match self.end {
            End::PowerCut => memory.power_cut(seed, Keep::Random),
            End::Killed | End::Drained => memory.process_crash(),
            End::Quarantined => {
                let memory = memory.process_crash();
                damage_dirty_records(&memory, &layout);
                let nothing = Self { requests: 0, steps: 0, end: End::Drained, ..self };
                nothing.live(&environment, &memory, BackendId(0), &mut random)?;
                memory.process_crash()
            }
        };
        Ok(Base { memory: CrashMemory::from_image(left.image()), layout, data_crc: self.data_crc })
    }

    /// Runs one process: opens the backend, submits requests of clients, and runs the background worker.
    fn live(
        self,
        environment: &Arc<SimEnvironment>,
        memory: &CrashMemory,
        backend: BackendId,
        random: &mut Seeded,
    ) -> Result<()> {
        let disk = disk(random.next());
        if self.parks {
            disk.set_faults(DiskFaults { unwritable: REFUSED.to_vec(), ..DiskFaults::default() });
        }
        let mut process = Process::open(Arc::clone(environment), memory, &disk, backend, 1, 4)?;
        let mut done = Vec::new();
        for id in 0..self.requests {
            process.submit(0, wish(id, random), &mut done);
            for _ in 0..self.steps {
                process.maintain();
                process.poll(0, &mut done);
            }
            environment.advance(random.below(200));
        }
        if self.end == End::Drained {
            process.cache().request_drain();
            for _ in 0..10_000 {
                process.poll(0, &mut done);
                if !process.maintain() && process.outlook() != Outlook::Work {
                    break;
                }
            }
            process.cache().stop();
        }
        Ok(())
    }
}

/// A request at one of a few offsets around the border between the lanes, so that requests overlap.
fn wish(id: u64, random: &mut Seeded) -> Request {
    let operation = match random.below(16) {
        0..9 => Operation::Write,
        9..12 => Operation::Read,
        12..14 => Operation::Flush,
        14 => Operation::WriteZeroes,
        _ => Operation::Discard,
    };
    let start = *random.pick(&[0, CHUNK - (32 << 10)]) + random.below(128) * SECTOR;
    let length = *random.pick(&[SECTOR, 4096, 3 * SECTOR, 16 << 10, 70 << 10]);
    let range = match operation {
        Operation::Flush => ByteRange::at(0, 0),
        _ => ByteRange { start, end: (start + length).min(DISK) },
    };
    let has_data = matches!(operation, Operation::Read | Operation::Write);
    let mut buffer = AlignedBuffer::zeroed(if has_data { range.len() as usize } else { 0 });
    if operation == Operation::Write {
        Content(id + 10).fill_range(range.start / SECTOR, SECTOR as usize, &mut buffer);
    }
    Request::unmarked(id, operation, range, random.chance(100), buffer)
}

/// Damages the data of every write but the last, because no later evidence proves that the last one was complete.
fn damage_dirty_records(memory: &CrashMemory, layout: &Layout) {
    let mut places = Vec::new();
    for (segment, header) in forge::segments(memory, layout) {
        let records = forge::records(memory, layout, segment, &header);
        let with_data = records.into_iter().filter(|(_, record)| record.kind() == RecordKind::Write);
        places.extend(
            with_data.map(|(_, record)| layout.segment_base(segment) + u64::from(record.data_offset.get())),
        );
    }
    places.pop();
    for at in places {
        forge::store(memory, at, &forge::MARKER);
    }
}
