//! The world in which a scene begins: one thread creates it once with the engine itself, and each execution gets a copy.
//!
//! Invariants: no change is open and no request is in flight when a scene begins, and the oracle has recorded every operation.

use crate::aftermath::{Life, offset_of};
use cbd_engine::{BackendSpec, Consistency, FormatOptions, Settings, Transport};
use cbd_sim::{Content, CrashMemory, Keep, Oracle, SimDisk, SimEnvironment};
use cbd_types::{BackendId, ByteRange, Operation, Region};
use std::sync::Arc;

/// Bytes of a segment: small, so that few writes fill one.
pub const SEGMENT: u64 = 64 << 10;
/// Bytes of a block.
pub const BLOCK: u64 = 4096;
/// The largest write that is one record here.
pub const LARGE: u64 = SEGMENT / 4;

/// The size of a world.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Bytes of the device.
    pub size: u64,
    /// Lanes; each has eight segments.
    pub lanes: u32,
    /// Whether data is checksummed.
    pub data_crc: bool,
    /// Reclaim begins above this share of used segments.
    pub gc_percent: u8,
    /// Writeback is urgent above this share of dirty data.
    pub dirty_target_percent: u8,
    /// Order of writeback when the scene begins.
    pub consistency: Consistency,
}

impl Shape {
    /// A small device, one lane.
    pub const ONE_LANE: Self = Self {
        size: 1 << 20,
        lanes: 1,
        data_crc: true,
        gc_percent: 90,
        dirty_target_percent: 10,
        consistency: Consistency::Strict,
    };
    /// Four chunks and two lanes.
    pub const TWO_LANES: Self = Self { size: 16 << 20, lanes: 2, ..Self::ONE_LANE };

    /// This shape, with reclaim above this share of used segments.
    #[must_use]
    pub const fn reclaiming_above(mut self, percent: u8) -> Self {
        self.gc_percent = percent;
        self
    }

    /// This shape without checksums of data: only the engine's order prevents a read from returning foreign bytes.
    #[must_use]
    pub const fn without_checksums(mut self) -> Self {
        self.data_crc = false;
        self
    }

    /// This shape, with writeback that never waits for further writes to merge.
    #[must_use]
    pub const fn in_a_hurry(mut self) -> Self {
        self.dirty_target_percent = 0;
        self
    }

    /// This shape, with checkpoints instead of strict order.
    #[must_use]
    pub const fn checkpointed(mut self) -> Self {
        self.consistency = Consistency::Checkpoint;
        self
    }

    const fn segments(&self) -> u64 {
        8 * self.lanes as u64 + 1
    }
}

/// A world at rest, in which a scene begins.
pub struct Start {
    pub(crate) memory: CrashMemory,
    pub(crate) disk: SimDisk,
    pub(crate) oracle: Oracle,
    pub(crate) backend: BackendId,
}

/// A world under construction.
pub struct Setup {
    life: Life,
    /// The oracle; it records every operation of this object.
    pub oracle: Oracle,
    backend: BackendId,
}

impl Setup {
    /// A fresh cache in front of a disk that holds data already.
    #[must_use]
    pub fn new(shape: &Shape) -> Self {
        let environment = Arc::new(SimEnvironment::new(1, 0));
        let memory = CrashMemory::new((shape.segments() + 1) * SEGMENT + (192 << 10));
        let format = FormatOptions {
            segment_size: Some(SEGMENT),
            force: false,
            host_rows: 1,
            backend_rows: 1,
            blkdev_rows: 1,
        };
        let transport = must(Transport::format(environment, Region::new(memory.clone()), &format));
        let backend = must(transport.create_backend(&BackendSpec {
            host: must(transport.register_host("models", None)),
            path: String::from("/simulated/disk"),
            identity: String::from("simulated"),
            size: shape.size,
            sector: 512,
            cache_bytes: Some(shape.segments() * SEGMENT),
            lanes_max: shape.lanes,
            handlers: 1,
            data_crc: shape.data_crc,
            settings: Settings {
                gc_percent: shape.gc_percent,
                dirty_target_percent: shape.dirty_target_percent,
                consistency: shape.consistency,
                ..Settings::default()
            },
        }));
        let disk = SimDisk::new(SimDisk::ordinary(shape.size, 512), 1);
        disk.set_latency(1);
        Self {
            life: Life::open(memory, disk, backend, 2),
            oracle: Oracle::new(shape.size, 512, LARGE),
            backend,
        }
    }

    /// Writes `range` with a unique content.
    pub fn write(&mut self, range: ByteRange) {
        let content = self.oracle.fresh_content();
        let payload = self.oracle.payload(range, content);
        let change = self.oracle.submit(range, content);
        must(self.life.ask(Operation::Write, range, &payload));
        self.oracle.complete(change, false);
    }

    /// Zeroes `range`.
    pub fn zero(&mut self, range: ByteRange) {
        let change = self.oracle.submit(range, Content::ZEROES);
        must(self.life.ask(Operation::WriteZeroes, range, &[]));
        self.oracle.complete(change, false);
    }

    /// Reads `range`.
    pub fn read(&mut self, range: ByteRange) {
        must(self.life.ask(Operation::Read, range, &[]));
    }

    /// Writes all dirty data back to the backing device, and runs reclaim.
    pub fn drain(&mut self) {
        self.life.drain();
    }

    /// Whether the region holds all of `range`, and with `is_clean` the backing device, too.
    #[must_use]
    pub fn is_cached(&self, range: ByteRange, is_clean: bool) -> bool {
        self.life.extents(range).iter().all(|extent| extent.cached && extent.dirty != is_clean)
    }

    /// The offset in the region at which the data of the sector at `at` is stored.
    pub fn offset_of(&mut self, at: u64) -> Option<u64> {
        let bytes = must(self.life.ask(Operation::Read, ByteRange::at(at, 512), &[]));
        offset_of(self.life.memory(), &bytes)
    }

    /// Flips a bit of the region.
    pub fn flip(&mut self, offset: u64) {
        self.life.memory().flip(offset, 3);
    }

    /// Segments that are free.
    #[must_use]
    pub fn free_segments(&self) -> u32 {
        self.life.status().free_segments
    }

    /// Shuts the process down cleanly, and returns the world in which a scene begins.
    #[must_use]
    pub fn finish(self) -> Start {
        let memory = self.life.memory().fork().power_cut(1, Keep::Nothing);
        let disk = self.life.disk().fork();
        Start { memory, disk, oracle: self.oracle, backend: self.backend }
    }
}

/// Returns the value, or ends the model with the error.
pub(crate) fn must<T>(result: cbd_types::Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
