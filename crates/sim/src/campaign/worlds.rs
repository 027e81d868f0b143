//! The worlds to explore. They are small, so that a state costs little, and each one stresses another condition.

use crate::flips;
use crate::memory::MemoryKind;
use crate::random::Seeded;
use crate::reconnect;
use crate::sequences;
use crate::workload::Mix;
use crate::world::WorldOptions;
use crate::{channels, group, hosts, moves};
use cbd_engine::{CacheMode, Consistency, OnWriteError};
use cbd_types::{ByteRange, CHUNK};

/// A kind of world.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Its name on the command line.
    pub name: &'static str,
    /// The kind of exploration.
    pub work: Work,
    /// Whether only long runs (`true`) or only short runs (`false`) explore it.
    pub(super) is_long: Option<bool>,
}

/// The exploration of a kind of world.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// Clients send random requests, and every moment is explored. The function gives the world of a seed.
    History(fn(u64) -> WorldOptions),
    /// Bits are flipped.
    Flips,
    /// Clients disconnect and reconnect; a seed is a batch of histories.
    Reconnect,
    /// Two caches have common moments; a seed is a batch of histories.
    Group,
    /// Several hosts share a region; a seed is a batch of histories.
    Hosts,
    /// A host uses a device of another one; a seed is a batch of histories.
    Channels,
    /// A backend moves between hosts; a seed is a batch of histories.
    Moves,
    /// All sequences of this many acts are played; a seed is a batch of them.
    Sequences(u32),
}

impl Work {
    /// Whether this world exists: the number of sequences is finite.
    pub(super) fn has_seed(self, seed: u64) -> bool {
        match self {
            Self::Sequences(length) => (1..=sequences::batches(length)).contains(&seed),
            _ => true,
        }
    }
}

/// Turns of a history that are explored, after the warm-up.
pub(super) const TURNS: u64 = 60;

/// Turns before the exploration begins: with some seeds the cache is almost new, with others it has long been full.
pub(super) fn warm_up(seed: u64) -> u64 {
    let mut random = Seeded::new(seed ^ 0x77a2);
    if random.chance(250) { 0 } else { random.below(500) }
}

/// Mostly small writes, and every other kind of request.
const MIX: Mix = Mix { large_permille: 4, flush: 10, discard: 5, write_zeroes: 6, ..Mix::ALL };
/// Mostly reads, of which many continue a stream.
const READING: Mix = Mix { write: 20, read: 70, ..MIX };
/// A mix with many flushes, and therefore many epochs.
const FLUSHING: Mix = Mix { flush: 25, fua_permille: 200, ..MIX };

/// The ranges that the disk of the `parked` worlds refuses to write.
const REFUSED: &[ByteRange] = &[
    ByteRange { start: 8 << 10, end: 9 << 10 },
    ByteRange { start: 100 << 10, end: 108 << 10 },
    ByteRange { start: CHUNK - 512, end: CHUNK + 4096 },
];

/// The ranges that the disk of the `parked-lanes` world refuses to write: some in each of its four lanes.
const REFUSED_IN_EACH_LANE: &[ByteRange] = &[
    ByteRange { start: 8 << 10, end: 9 << 10 },
    ByteRange { start: CHUNK - 512, end: CHUNK + 4096 },
    ByteRange { start: 2 * CHUNK + 4096, end: 2 * CHUNK + 8192 },
    ByteRange { start: 3 * CHUNK + 100 * 512, end: 3 * CHUNK + 102 * 512 },
];

/// One lane of eight segments, with a disk slightly larger than a chunk.
fn one_lane(seed: u64, consistency: Consistency) -> WorldOptions {
    WorldOptions {
        size: CHUNK + 64 * 1024 + 512,
        segments: 9,
        lanes_max: 1,
        mix: MIX,
        crash_permille: *Seeded::new(seed ^ 0x3c).pick(&[0, 10, 40]),
        ..WorldOptions::small(seed, consistency)
    }
}

/// Two lanes.
fn two_lanes(seed: u64, consistency: Consistency) -> WorldOptions {
    WorldOptions {
        size: 2 * CHUNK + 64 * 1024 + 512,
        segments: 17,
        lanes_max: 2,
        ..one_lane(seed, consistency)
    }
}

/// The worlds in which changes go past the cache.
fn kinds_of_modes() -> [Kind; 5] {
    [
        kind("writethrough", |seed| WorldOptions {
            cache_mode: CacheMode::Writethrough,
            mix: FLUSHING,
            ..two_lanes(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("writearound", |seed| WorldOptions {
            cache_mode: CacheMode::Writearound,
            ..two_lanes(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("modes", |seed| WorldOptions {
            cache_mode: *Seeded::new(seed ^ 0x5a).pick(&CacheMode::ALL),
            vary_modes: true,
            mix: FLUSHING,
            ..two_lanes(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("bypass", |seed| WorldOptions {
            bypasses: true,
            ..two_lanes(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("bypass-full", |seed| WorldOptions {
            bypasses: true,
            vary_modes: seed.is_multiple_of(4),
            worker_percent: 3,
            ..one_lane(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
    ]
}

/// The worlds whose disk refuses to write some sectors.
fn kinds_of_refusals() -> [Kind; 2] {
    [
        kind("parked", |seed| WorldOptions {
            unwritable: REFUSED,
            on_write_error: OnWriteError::Park,
            write_error_after_s: (seed % 2) as u32,
            ..one_lane(seed, Consistency::Strict)
        }),
        kind("parked-lanes", |seed| WorldOptions {
            // Four lanes with two segments in reserve, and almost always full.
            size: 4 * CHUNK + 512,
            segments: 33,
            lanes_max: 4,
            worker_percent: 3,
            unwritable: REFUSED_IN_EACH_LANE,
            on_write_error: OnWriteError::Park,
            write_error_after_s: (seed % 2) as u32,
            ..one_lane(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
    ]
}

/// The worlds whose caches come, go, grow and shrink while clients use them.
fn kinds_of_changes() -> [Kind; 4] {
    [
        kind("live", |seed| WorldOptions {
            varies_route: true,
            uncached_at_first: seed.is_multiple_of(2),
            mix: FLUSHING,
            ..two_lanes(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("live-failing-disk", |seed| WorldOptions {
            varies_route: true,
            uncached_at_first: seed.is_multiple_of(2),
            read_errors_permille: 50,
            write_errors_permille: 50,
            mix: FLUSHING,
            ..one_lane(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("live-sizes", |seed| WorldOptions {
            varies_size: true,
            segments: 13,
            ..one_lane(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("live-all", |seed| WorldOptions {
            varies_route: true,
            uncached_at_first: seed.is_multiple_of(2),
            varies_size: true,
            clients: 3,
            mix: FLUSHING,
            ..two_lanes(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
    ]
}

/// The worlds whose caches have little space.
fn kinds_of_space() -> [Kind; 2] {
    [
        kind("full", |seed| WorldOptions { worker_percent: 3, ..one_lane(seed, Consistency::Strict) }),
        kind("pinned", |seed| WorldOptions {
            pins: true,
            segments: 25,
            worker_percent: if seed.is_multiple_of(2) { 3 } else { 30 },
            ..two_lanes(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
    ]
}

/// A kind of world with random requests.
fn kind(name: &'static str, options: fn(u64) -> WorldOptions) -> Kind {
    Kind { name, work: Work::History(options), is_long: None }
}

/// All kinds.
#[must_use]
pub fn kinds() -> Vec<Kind> {
    let mut kinds = vec![
        kind("strict", |seed| one_lane(seed, Consistency::Strict)),
        kind("strict-two-lanes", |seed| two_lanes(seed, Consistency::Strict)),
        kind("checkpoint", |seed| one_lane(seed, Consistency::Checkpoint)),
        kind("none", |seed| one_lane(seed, Consistency::None)),
        kind("flushing", |seed| WorldOptions { mix: FLUSHING, ..two_lanes(seed, Consistency::Strict) }),
        kind("flushing-checkpoint", |seed| WorldOptions {
            mix: FLUSHING,
            ..two_lanes(seed, Consistency::Checkpoint)
        }),
        kind("no-checksums", |seed| WorldOptions { data_crc: false, ..one_lane(seed, Consistency::Strict) }),
        kind("settings", |seed| WorldOptions { vary_settings: true, ..two_lanes(seed, Consistency::Strict) }),
        kind("resized-index", |seed| WorldOptions {
            // Several chunks in each lane, between which the boundary of a resize passes.
            resizes_index: true,
            size: (16 << 20) + 333 * 512,
            ..two_lanes(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("clock-set-back", |seed| WorldOptions {
            sets_clock: true,
            ..two_lanes(seed, Consistency::Strict)
        }),
        kind("backlog", |seed| WorldOptions {
            // Writeback is far behind: the cache flushes often between the closing of an epoch and the end of
            // its writeback.
            worker_percent: 3,
            mix: FLUSHING,
            segments: 33,
            ..one_lane(seed, *Seeded::new(seed).pick(&Consistency::ALL))
        }),
        kind("streams", |seed| WorldOptions {
            // Readahead, with writes to what is read ahead.
            depth: 8,
            vary_settings: true,
            mix: READING,
            ..two_lanes(seed, Consistency::Strict)
        }),
        kind("failing-disk", |seed| WorldOptions {
            read_errors_permille: 100,
            write_errors_permille: 300,
            ..one_lane(seed, Consistency::Strict)
        }),
        kind("discards", |seed| WorldOptions {
            mix: Mix { discard: 20, write_zeroes: 20, ..MIX },
            discard_zeroes: seed.is_multiple_of(2),
            ..two_lanes(seed, Consistency::Strict)
        }),
        kind("large-sectors", |seed| WorldOptions {
            sector: 4096,
            size: CHUNK + 5 * 4096,
            ..one_lane(seed, Consistency::Strict)
        }),
        kind("persistent-caches", |seed| WorldOptions {
            memory: MemoryKind::PersistentCaches,
            ..one_lane(seed, Consistency::Strict)
        }),
        kind("whole-lines", |seed| WorldOptions {
            memory: MemoryKind::WholeLines,
            ..one_lane(seed, Consistency::Checkpoint)
        }),
        kind("no-volatile-cache", |seed| WorldOptions {
            volatile_cache: false,
            ..one_lane(seed, Consistency::Strict)
        }),
        Kind { name: "sequences-1", work: Work::Sequences(1), is_long: None },
        Kind { name: "sequences-2", work: Work::Sequences(2), is_long: None },
        Kind { name: "sequences-3", work: Work::Sequences(3), is_long: None },
        Kind { name: "sequences-4", work: Work::Sequences(4), is_long: Some(true) },
    ];
    kinds.extend(kinds_of_batches());
    kinds.extend(kinds_of_space());
    kinds.extend(kinds_of_modes());
    kinds.extend(kinds_of_refusals());
    kinds.extend(kinds_of_changes());
    kinds
}

/// Worlds of which a seed is a batch of histories.
fn kinds_of_batches() -> Vec<Kind> {
    vec![
        Kind { name: flips::NAME, work: Work::Flips, is_long: None },
        Kind { name: reconnect::NAME, work: Work::Reconnect, is_long: None },
        Kind { name: group::NAME, work: Work::Group, is_long: None },
        Kind { name: hosts::NAME, work: Work::Hosts, is_long: None },
        Kind { name: channels::NAME, work: Work::Channels, is_long: None },
        Kind { name: moves::NAME, work: Work::Moves, is_long: None },
    ]
}
