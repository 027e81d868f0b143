//! The options of worlds, and counts of the events in them.

use crate::memory::MemoryKind;
use crate::random::Seeded;
use crate::workload::Mix;
use cbd_engine::{CacheMode, Consistency, OnWriteError, RarePaths};
use cbd_types::ByteRange;

/// The options of a world.
#[derive(Clone, Copy, Debug)]
pub struct WorldOptions {
    /// The seed of all random decisions.
    pub seed: u64,
    /// Size of the backing device in bytes, whole sectors.
    pub size: u64,
    /// Logical sector in bytes.
    pub sector: u32,
    /// Size of a segment in bytes.
    pub segment_size: u64,
    /// Segments of the cache.
    pub segments: u32,
    /// Maximum number of lanes.
    pub lanes_max: u32,
    /// Whether data is checksummed.
    pub data_crc: bool,
    /// Order of writeback.
    pub consistency: Consistency,
    /// The guarantees of the memory.
    pub memory: MemoryKind,
    /// Writes out of a thousand whose client changes its buffer during the copy.
    pub fickle_permille: u64,
    /// Number of clients.
    pub clients: usize,
    /// Maximum number of requests that all clients have in flight.
    pub in_flight_max: usize,
    /// Reads of the disk out of a thousand that fail, except for those of checks.
    pub read_errors_permille: u64,
    /// Writes and flushes of the disk out of a thousand that fail.
    pub write_errors_permille: u64,
    /// The ranges that the disk refuses to write while it is broken: see
    /// [`World::break_disk`](super::World::break_disk).
    pub unwritable: &'static [ByteRange],
    /// Whether the broken disk refuses flushes, too.
    pub refuses_flushes: bool,
    /// The policy for write errors.
    pub on_write_error: OnWriteError,
    /// The time after which `on_write_error` applies, in seconds.
    pub write_error_after_s: u32,
    /// Whether a power cut loses unflushed data of the disk.
    pub volatile_cache: bool,
    /// Whether the disk promises zeroes from a discard.
    pub discard_zeroes: bool,
    /// Depth of each queue to the disk.
    pub depth: usize,
    /// The mix of the clients' requests.
    pub mix: Mix,
    /// The mode of the cache. In another mode than writeback, writes are not atomic, and those that no flush has covered may be
    /// lost in a power cut.
    pub cache_mode: CacheMode,
    /// Whether the mode changes during the run.
    pub vary_modes: bool,
    /// Whether writes go past the cache by choice: sequential ones, those that find the cache full, and in a third of the worlds
    /// those that find it slow.
    pub bypasses: bool,
    /// Whether as much as possible of the beginning of the device is pinned.
    pub pins: bool,
    /// Whether settings change during the run.
    pub vary_settings: bool,
    /// Whether the index changes its size during the run, with requests and crashes between its steps.
    pub resizes_index: bool,
    /// Whether the cache is detached, and another one attached, during the run.
    pub varies_route: bool,
    /// Whether the backend has no cache at first.
    pub uncached_at_first: bool,
    /// Whether the cache grows and shrinks during the run, and the cache of another backend on the same region too.
    pub varies_size: bool,
    /// Whether clients verify ranges during the run.
    pub verifies: bool,
    /// Whether the wall clock is set back and forth.
    pub sets_clock: bool,
    /// Whether the power is cut, too. Without, all crashes are of the process.
    pub power_cuts: bool,
    /// Turns out of a thousand before which a crash is set up.
    pub crash_permille: u64,
    /// Turns out of a hundred in which the background worker steps: with few, the cache is always full.
    pub worker_percent: u64,
    /// Recoveries out of a thousand in which a crash is set up.
    pub crash_in_recovery_permille: u64,
}

impl WorldOptions {
    /// Whether changes can go past the cache.
    #[must_use]
    pub fn can_bypass(&self) -> bool {
        self.vary_modes || self.bypasses || self.varies_route || self.cache_mode != CacheMode::Writeback
    }

    /// Whether the cache comes, goes, grows or shrinks.
    #[must_use]
    pub const fn varies_caches(&self) -> bool {
        self.varies_route || self.varies_size
    }

    /// A small world that is always full: 16 segments of 64 KiB and their state, in front of 8 MiB and some
    /// sectors.
    #[must_use]
    pub fn small(seed: u64, consistency: Consistency) -> Self {
        let mut random = Seeded::new(seed).fork();
        Self {
            seed,
            size: (8 << 20) + 333 * 512,
            sector: 512,
            segment_size: 64 << 10,
            segments: 17,
            lanes_max: 16,
            data_crc: true,
            consistency,
            memory: MemoryKind::Ordinary,
            fickle_permille: 30,
            clients: 2,
            in_flight_max: 6,
            read_errors_permille: 0,
            write_errors_permille: 0,
            unwritable: &[],
            refuses_flushes: false,
            on_write_error: OnWriteError::Stop,
            write_error_after_s: 60,
            volatile_cache: true,
            discard_zeroes: true,
            depth: 4,
            mix: Mix::ALL,
            cache_mode: CacheMode::Writeback,
            vary_modes: false,
            bypasses: false,
            pins: false,
            vary_settings: false,
            resizes_index: false,
            varies_route: false,
            uncached_at_first: false,
            varies_size: false,
            verifies: false,
            sets_clock: false,
            power_cuts: true,
            crash_permille: *random.pick(&[2, 10, 40]),
            worker_percent: *random.pick(&[3, 10, 30]),
            crash_in_recovery_permille: 400,
        }
    }
}

/// Counts of the events in a world, so that a test can require activity.
#[derive(Clone, Copy, Default, Debug)]
pub struct Happened {
    /// Requests completed.
    pub completed: u64,
    /// Bytes of completed writes.
    pub written_bytes: u64,
    /// Reads that failed because the disk failed them.
    pub failed_reads: u64,
    /// Process crashes.
    pub process_crashes: u64,
    /// Power cuts.
    pub power_cuts: u64,
    /// Crashes while the engine recovered.
    pub crashes_in_recovery: u64,
    /// Clean shutdowns.
    pub stops: u64,
    /// Drains completed.
    pub drains: u64,
    /// Images of the backing device that were checked.
    pub images_checked: u64,
    /// Those in a mode in which the region holds nothing that a flush has covered.
    pub images_past: u64,
    /// Recovery points that were checked.
    pub points_checked: u64,
    /// Moments at which the engine reported that the backing device alone is not crash-consistent.
    pub images_inconsistent: u64,
    /// Ranges that were parked.
    pub parked: u64,
    /// Parked ranges that the disk accepted later.
    pub unparked: u64,
    /// Changes that failed because the disk had refused writes for a long time.
    pub refused: u64,
    /// Turns at which a client waited for space.
    pub waited_for_space: u64,
    /// Moments at which clients waited and no thread could continue before the clock advanced.
    pub rescued_by_clock: u64,
    /// Bytes that went past the cache because they were sequential, and because they found it full or slow; and those that were
    /// cached because that was not legal. Without those of engines that are still running.
    pub past_sequential: u64,
    /// See `past_sequential`.
    pub past_full: u64,
    /// See `past_sequential`.
    pub past_congested: u64,
    /// See `past_sequential`.
    pub past_refused: u64,
    /// Resizes of the index that were completed.
    pub index_resizes: u64,
    /// Caches that were attached, and detached.
    pub attached: u64,
    /// See `attached`.
    pub detached: u64,
    /// Caches that grew, and shrank.
    pub grown: u64,
    /// See `grown`.
    pub shrunk: u64,
    /// Changes of a cache that were given up.
    pub given_up: u64,
    /// Bytes of copies that verifications looked at.
    pub verified_bytes: u64,
    /// Bytes that changed while they were verified.
    pub changed_bytes: u64,
    /// Structures of the region that verifications have looked at during the run.
    pub verified_structures: u64,
    /// Findings of verifications during the run.
    pub findings: u64,
    /// Rare paths that the engines took, without those of engines that are still running.
    pub rare: RarePaths,
}

impl Happened {
    /// The sum of the counts of two worlds.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            completed: self.completed + other.completed,
            written_bytes: self.written_bytes + other.written_bytes,
            failed_reads: self.failed_reads + other.failed_reads,
            process_crashes: self.process_crashes + other.process_crashes,
            power_cuts: self.power_cuts + other.power_cuts,
            crashes_in_recovery: self.crashes_in_recovery + other.crashes_in_recovery,
            stops: self.stops + other.stops,
            drains: self.drains + other.drains,
            images_checked: self.images_checked + other.images_checked,
            images_past: self.images_past + other.images_past,
            points_checked: self.points_checked + other.points_checked,
            images_inconsistent: self.images_inconsistent + other.images_inconsistent,
            parked: self.parked + other.parked,
            unparked: self.unparked + other.unparked,
            refused: self.refused + other.refused,
            waited_for_space: self.waited_for_space + other.waited_for_space,
            rescued_by_clock: self.rescued_by_clock + other.rescued_by_clock,
            past_sequential: self.past_sequential + other.past_sequential,
            past_full: self.past_full + other.past_full,
            past_congested: self.past_congested + other.past_congested,
            past_refused: self.past_refused + other.past_refused,
            index_resizes: self.index_resizes + other.index_resizes,
            attached: self.attached + other.attached,
            detached: self.detached + other.detached,
            grown: self.grown + other.grown,
            shrunk: self.shrunk + other.shrunk,
            given_up: self.given_up + other.given_up,
            verified_bytes: self.verified_bytes + other.verified_bytes,
            changed_bytes: self.changed_bytes + other.changed_bytes,
            verified_structures: self.verified_structures + other.verified_structures,
            findings: self.findings + other.findings,
            rare: self.rare.and(other.rare),
        }
    }
}
