//! The histories of the golden regions.

use crate::image::Golden;
use cbd_engine::{CacheMode, Consistency, OnWriteError};
use cbd_sim::{Content, Keep, Wish, World, WorldOptions, until_crash};
use cbd_types::{BootId, ByteRange, CHUNK, Class, Operation, Pmem};

const KIB: u64 = 1 << 10;

/// The boot in which ordinary files were used.
const BOOT: u8 = 1;

/// The history of a region.
pub struct History {
    pub name: &'static str,
    options: WorldOptions,
    live: fn(&mut World),
    /// Damages the bytes of the region afterwards.
    hurt: fn(&mut Vec<u8>),
}

fn options(seed: u64) -> WorldOptions {
    WorldOptions {
        size: 2 * CHUNK + 64 * KIB + 4 * KIB,
        segments: 17,
        lanes_max: 2,
        clients: 1,
        crash_in_recovery_permille: 0,
        ..WorldOptions::small(seed, Consistency::Strict)
    }
}

fn ask(world: &mut World, operation: Operation, start: u64, length: u64, fua: bool) {
    assert!(world.submit(Wish { operation, range: ByteRange::at(start, length), fua }), "one at a time");
    world.quiesce();
}

fn write(world: &mut World, start: u64, length: u64) {
    ask(world, Operation::Write, start, length, false);
}

fn flush(world: &mut World) {
    ask(world, Operation::Flush, 0, 0, false);
}

/// Writes of many shapes in both lanes, overwritten, zeroed and discarded, over several epochs.
fn busy(world: &mut World) {
    write(world, 0, 16 * KIB);
    write(world, 20 * KIB, 4 * KIB);
    write(world, CHUNK + 4 * KIB, 8 * KIB);
    flush(world);
    write(world, 4 * KIB, 4 * KIB);
    ask(world, Operation::Write, 2 * CHUNK, 4 * KIB, true);
    ask(world, Operation::WriteZeroes, 8 * KIB, 4 * KIB, false);
    flush(world);
    ask(world, Operation::Discard, CHUNK + 8 * KIB, 4 * KIB, false);
    write(world, 12 * KIB, 8 * KIB);
    write(world, 40 * KIB, 12 * KIB);
}

/// Enough writes that the log wraps around; older data is drained and reclaimed.
fn wrap(world: &mut World) {
    for round in 0..90 {
        write(world, round % 5 * 16 * KIB, 16 * KIB);
        ask(world, Operation::Read, round % 3 * 16 * KIB, 4 * KIB, false);
        if round % 7 == 6 {
            flush(world);
            world.run_worker_until_idle();
        }
    }
    busy(world);
}

/// The process crashes in the middle of a write: its record is present, its data in part.
fn tear(world: &mut World) {
    busy(world);
    flush(world);
    let wish = Wish { operation: Operation::Write, range: ByteRange::at(24 * KIB, 16 * KIB), fua: false };
    world.memory().crash_after(1, 5);
    assert!(until_crash(|| world.submit(wish)).is_err(), "the first store of the write crashes");
}

/// A sector that the disk refuses is parked, then carried forward by reclaim.
fn park(world: &mut World) {
    busy(world);
    flush(world);
    for _ in 0..60 {
        world.run_worker_until_idle();
        world.advance(500);
    }
    assert_eq!(world.status().parked_bytes, 4 * KIB, "one block is parked");
    write(world, 0, 4 * KIB);
}

/// Marks contain the run of their records, and *drained* contains the time at which its epoch was closed; more was
/// flushed since.
fn date(world: &mut World) {
    restart(world);
    world.drain();
    assert!(world.status().drained_wall_ms > 0);
    write(world, 16 * KIB, 4 * KIB);
    flush(world);
}

/// The region grows twice while its cache is open, which uses the new segments.
fn grow(world: &mut World) {
    busy(world);
    world.grow_region(256 * KIB);
    for block in 0..22 {
        write(world, CHUNK + block * 16 * KIB, 16 * KIB);
    }
    flush(world);
    world.grow_region(256 * KIB);
    for block in 0..9 {
        write(world, 64 * KIB + block * 16 * KIB, 16 * KIB);
    }
    world.crash();
    write(world, 0, 8 * KIB);
}

/// Metadata of a file system, written and read, some of it replaced by other data and some in parts.
fn metadata(world: &mut World) {
    busy(world);
    world.set_class(Class::Metadata);
    write(world, 64 * KIB, 32 * KIB);
    write(world, CHUNK + 16 * KIB, 8 * KIB);
    ask(world, Operation::Read, CHUNK + 64 * KIB, 16 * KIB, false);
    flush(world);
    world.set_class(Class::Unmarked);
    write(world, 72 * KIB, 8 * KIB);
    write(world, CHUNK + 16 * KIB, 512);
    ask(world, Operation::WriteZeroes, 64 * KIB, 4 * KIB, false);
}

fn restart(world: &mut World) {
    busy(world);
    world.crash();
    write(world, 0, 8 * KIB);
    flush(world);
    write(world, CHUNK, 4 * KIB);
    world.crash();
    write(world, 4 * KIB, 4 * KIB);
}

/// A program that records no boot made the region in an ordinary file, and a program that records the boot uses it:
/// its superblocks name the feature.
fn note_boot(world: &mut World) {
    busy(world);
    world.memory().become_file(BootId([BOOT; 16]));
    world.crash();
    write(world, 0, 8 * KIB);
    flush(world);
}

/// Changes go past the cache, some of them twice, and no flush covers the last of them.
fn past_the_cache(world: &mut World) {
    busy(world);
    ask(world, Operation::Read, 40 * KIB, 12 * KIB, false);
    flush(world);
    write(world, 44 * KIB, 4 * KIB);
    write(world, 12 * KIB, 8 * KIB);
    ask(world, Operation::Read, 20 * KIB, 4 * KIB, false);
}

/// Damage that writeback has found: there is a quarantine on the medium.
fn mark_bad(world: &mut World) {
    busy(world);
    flush(world);
    world.expect_damage();
    let image = world.memory().image();
    let at = place_of(&image, 20 * KIB / 512);
    world.memory().flip(at + 100, 3);
    world.drain();
}

/// The same, but a part of the damage was overwritten before writeback met it: the quarantine has a map.
fn damage_in_part(world: &mut World) {
    busy(world);
    flush(world);
    world.expect_damage();
    let at = place_of(&world.memory().image(), 20 * KIB / 512);
    world.memory().flip(at + 100, 3);
    write(world, 21 * KIB, 512);
    world.drain();
}

/// The lowest offset at which the region holds data of a sector.
fn place_of(image: &[u8], sector: u64) -> u64 {
    let places = (0..image.len() / 64).map(|line| line * 64).filter(|&at| {
        let bytes = &image[at..(at + 512).min(image.len())];
        Content::of(sector, bytes).is_some_and(|content| bytes.len() == 512 && content.0 > 1)
    });
    places.min().expect("the sector is in the region") as u64
}

fn hurt_nothing(_: &mut Vec<u8>) {}

/// The first superblock is lost, that is, the first page of each structure that has a second copy.
#[expect(clippy::ptr_arg, reason = "its type is that of all that hurt a region")]
fn hurt_first_copies(region: &mut Vec<u8>) {
    region[..4096].fill(0xa5);
}

pub fn all() -> Vec<History> {
    let history = |name, options, live| History { name, options, live, hurt: hurt_nothing };
    vec![
        history("fresh", options(1), |_| {}),
        history("killed", options(2), busy),
        history("stopped", options(3), |world| {
            busy(world);
            world.stop();
        }),
        history("drained", options(4), |world| {
            busy(world);
            world.drain();
            world.stop();
        }),
        history("wrapped", WorldOptions { segments: 9, lanes_max: 1, ..options(5) }, wrap),
        history("torn", options(6), tear),
        history("dated", options(15), date),
        history("restarted", options(7), restart),
        history("boot-noted", options(16), note_boot),
        history("grown", WorldOptions { segments: 9, lanes_max: 1, ..options(19) }, grow),
        History {
            name: "grown-one-superblock",
            options: WorldOptions { segments: 9, lanes_max: 1, ..options(20) },
            live: grow,
            hurt: hurt_first_copies,
        },
        history("metadata", options(21), metadata),
        history("quarantined", options(8), mark_bad),
        history("quarantined-in-part", options(14), damage_in_part),
        History { name: "one-superblock", options: options(9), live: busy, hurt: hurt_first_copies },
        history(
            "parked",
            WorldOptions {
                unwritable: &[ByteRange { start: 20 * KIB, end: 24 * KIB }],
                on_write_error: OnWriteError::Park,
                write_error_after_s: 1,
                ..options(13)
            },
            park,
        ),
        history("no-checksums", WorldOptions { data_crc: false, ..options(10) }, busy),
        history(
            "past-written-through",
            WorldOptions { cache_mode: CacheMode::Writethrough, ..options(17) },
            past_the_cache,
        ),
        history(
            "past-written-around",
            WorldOptions { cache_mode: CacheMode::Writearound, ..options(18) },
            past_the_cache,
        ),
        history("sectors-of-4096", WorldOptions { sector: 4096, ..options(11) }, busy),
        history(
            "checkpoint",
            WorldOptions { consistency: Consistency::Checkpoint, segment_size: 256 * KIB, ..options(12) },
            |world| {
                busy(world);
                // More checksum blocks than one line holds.
                write(world, 64 * KIB, 64 * KIB);
                world.run_worker_until_idle();
                write(world, 0, 4 * KIB);
            },
        ),
    ]
}

impl History {
    /// Plays the history; returns the image, and the sectors that were ever changed.
    pub fn play(&self) -> (Golden, Vec<u64>) {
        let mut world = World::new(self.options);
        (self.live)(&mut world);
        let is_torn = world.memory().is_dead();
        let changed = world.changed();
        let memory = if is_torn {
            world.memory().power_cut(1, Keep::Everything)
        } else {
            world.memory().process_crash()
        };
        let mut region = memory.image();
        (self.hurt)(&mut region);
        let sector = u64::from(self.options.sector);
        let mut golden = Golden {
            name: self.name.to_owned(),
            region,
            size: self.options.size,
            sector_size: sector,
            boot: if memory.mixes_pages() { BOOT } else { 0 },
            ..Golden::default()
        };
        golden.take_disk(&world.disk().durable());
        let sectors = changed.iter().flat_map(|range| range.start / sector..range.end / sector);
        (golden, sectors.collect())
    }
}
