//! Bits that flip in a region in use, one or some thousands at a time. Each flip is harmless, repaired from a second
//! copy, or detected; none causes wrong data, a panic or an endless loop.
//!
//! Invariants: only data whose read loads the flipped bytes may become unreadable; all other data reads
//! correctly.
//!
//! Elsewhere: damage that is aimed at one structure (the tests), and forged structures (the fuzz targets).

use crate::actor::act_as;
use crate::disk::SimDisk;
use crate::environment::SimEnvironment;
use crate::explorer::{Finding, Tally, quietly};
use crate::memory::CrashMemory;
use crate::oracle::Expectation;
use crate::process::recover;
use crate::random::{Seeded, mix};
use crate::watchdog::Watchdog;
use crate::world::{World, WorldOptions};
use cbd_engine::{Cache, Consistency};
use cbd_types::{BackendId, ByteRange, Pmem};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// The name of this kind of world.
pub const NAME: &str = "flips";

/// Flips in one world.
pub const FLIPS_OF_A_WORLD: u64 = 500;

/// The unit in which data becomes unreadable.
const BLOCK: u64 = 4096;

/// Flips out of a thousand after which a world continues.
const GO_ON_PERMILLE: u64 = 10;

/// Maximum length of a burst: the gap between the two copies of the largest structure, a row of 1 KiB whose
/// copy begins 4 KiB after the row. A longer burst can reach both copies.
const BURST_MAX: u64 = 4096 - 1024;

/// The outcome of one flip.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// The bytes were not read.
    Unread,
    /// The bytes were read, and all data reads correctly.
    Corrected,
    /// Clean data was read from the backing device instead.
    ReadFromDisk,
    /// A read fails with an error.
    Unreadable,
}

/// The flipped bits: the offset of the byte, and the bit.
type Flips = Vec<(u64, u32)>;

/// A region with a history, and its expected contents.
struct Region {
    world: World,
    memory: CrashMemory,
    disk: SimDisk,
    backend: BackendId,
    contents: Expectation,
    /// For each block that was ever changed, the lines that its read loads, without those that recovery
    /// loads.
    blocks: Vec<(ByteRange, BTreeSet<u64>)>,
}

/// Flips bits in the world with `seed`; with `only`, executes only the flip with that number.
#[must_use]
pub fn explore(seed: u64, only: Option<u64>) -> Tally {
    let _watchdog = Watchdog::new(Duration::from_secs(600), format!("world {NAME}, seed {seed}"));
    let mut tally = Tally { histories: 1, ..Tally::default() };
    let region = match quietly(|| Region::new(seed)) {
        Ok(region) => region,
        Err(text) => {
            tally.findings.push(finding(seed, None, "the history itself", text));
            return tally;
        }
    };
    for number in 1..=FLIPS_OF_A_WORLD {
        if only.is_none_or(|only| only == number) {
            let mut random = Seeded::new(mix(seed ^ mix(number)));
            let flips = choose(region.memory.len(), &mut random);
            let kind = if flips.len() == 1 { "flip" } else { "burst" };
            match quietly(|| region.try_flips(&flips, &mut random, &mut tally)) {
                Ok(Ok(())) => {}
                Ok(Err(text)) | Err(text) => {
                    let text = format!("{text}; flipped (byte, bit): {:?}..", &flips[..flips.len().min(4)]);
                    tally.findings.push(finding(seed, Some(number), kind, text));
                }
            }
            tally.fault(kind, 1);
            tally.fault("flipped bit", flips.len() as u64);
            if tally.findings.len() >= 20 {
                break;
            }
        }
    }
    tally
}

fn finding(seed: u64, point: Option<u64>, state: &str, text: String) -> Finding {
    Finding { world: NAME.to_owned(), seed, point, state: state.to_owned(), text }
}

/// One bit, or some of the bits of a short range.
fn choose(size: u64, random: &mut Seeded) -> Flips {
    let at = random.below(size);
    if random.chance(500) {
        return vec![(at, random.below(8) as u32)];
    }
    let length = *random.pick(&[2, 8, 64, 512, BURST_MAX]);
    let end = (at + length).min(size);
    let count = random.between(2, 64);
    let flips: BTreeSet<(u64, u32)> =
        (0..count).map(|_| (random.between(at, end - 1), random.below(8) as u32)).collect();
    flips.into_iter().collect()
}

impl Region {
    fn new(seed: u64) -> Self {
        let consistency = Consistency::ALL[(seed % 3) as usize];
        let mut world = World::new(WorldOptions {
            size: (4 << 20) + 64 * 1024 + 512,
            segments: 9,
            lanes_max: 1,
            crash_permille: 5,
            ..WorldOptions::small(seed, consistency)
        });
        world.run(Seeded::new(seed).between(30, 400));
        // All requests are acknowledged, and marks cover the last records.
        world.settle_down();
        let (memory, disk) = (world.memory().fork(), world.disk().fork());
        disk.process_crash(1);
        let contents = world.oracle().expectation(BLOCK);
        let mut region = Self { backend: world.backend(), memory, disk, contents, blocks: Vec::new(), world };
        let memory = region.memory.fork();
        let cache = region.open(&memory, 1).unwrap_or_else(|error| panic!("an undamaged region: {error}"));
        let ranges: Vec<ByteRange> = region.contents.ranges().collect();
        for range in ranges {
            memory.trace_loads();
            let mut bytes = vec![0; range.len() as usize];
            region.read(&cache, range, &mut bytes).unwrap_or_else(|error| panic!("undamaged: {error}"));
            region.blocks.push((range, memory.loaded_lines()));
        }
        region
    }

    fn open(&self, memory: &CrashMemory, seed: u64) -> Result<Arc<Cache<SimEnvironment>>, String> {
        let environment = Arc::new(SimEnvironment::new(seed, 1_000_000));
        recover(&environment, memory, self.backend).map_err(|error| error.to_string())
    }

    fn read(
        &self,
        cache: &Cache<SimEnvironment>,
        range: ByteRange,
        into: &mut [u8],
    ) -> Result<(), cbd_types::Error> {
        act_as(1);
        let mut misses = Vec::new();
        cache.read(range, into, &mut misses)?;
        for miss in misses {
            let part = (miss.range.start - range.start) as usize..(miss.range.end - range.start) as usize;
            self.disk.peek(miss.range.start, &mut into[part]);
            cache.cancel_fill(miss);
        }
        Ok(())
    }

    /// Flips the bits before a recovery, or under a running cache, and reads everything.
    fn try_flips(&self, flips: &Flips, random: &mut Seeded, tally: &mut Tally) -> Result<(), String> {
        let memory = self.memory.fork();
        let flip = || flips.iter().for_each(|(at, bit)| memory.flip(*at, *bit));
        let restart = random.chance(600);
        let cache = if restart {
            flip();
            memory.trace_loads();
            self.open(&memory, random.next()).map_err(|error| format!("the cache does not open: {error}"))?
        } else {
            let cache = self.open(&memory, random.next())?;
            memory.trace_loads();
            flip();
            cache
        };
        let flipped: BTreeSet<u64> = flips.iter().map(|(at, _)| at / 64 * 64).collect();
        let mut fate = Fate::Unread;
        let mut at = 0;
        let mut unreadable = 0;
        self.contents
            .compare(|range, into| {
                let (_, loads) = &self.blocks[at];
                at += 1;
                if let Err(error) = self.read(&cache, range, into) {
                    unreadable += 1;
                    if !loads.iter().any(|line| flipped.contains(line)) {
                        return Err(crate::Violation(format!(
                            "{range} cannot be read, and has nothing to do with the flipped bytes: {error}"
                        )));
                    }
                    // Ranges that cannot be read are not compared.
                    self.contents.fill_standing(range, into);
                }
                Ok(())
            })
            .map_err(|violation| violation.0)?;
        let status = cache.status();
        if flipped.iter().any(|line| memory.was_loaded(*line)) {
            fate = Fate::Corrected;
        }
        if status.damage_healed > 0 {
            fate = Fate::ReadFromDisk;
        }
        if unreadable > 0 {
            fate = Fate::Unreadable;
        }
        tally.engine(&status.rare);
        tally.fault(
            match fate {
                Fate::Unread => "flip: never read",
                Fate::Corrected => "flip: read, and made good",
                Fate::ReadFromDisk => "flip: found, and healed from the disk",
                Fate::Unreadable => "flip: found, and answered with an error",
            },
            1,
        );
        drop(cache);
        if random.chance(GO_ON_PERMILLE) {
            let (seed, turns) = (random.next(), random.between(1, 60));
            let memory = self.memory.fork();
            flips.iter().for_each(|(at, bit)| memory.flip(*at, *bit));
            let happened = self.world.branch_damaged(memory, self.disk.fork(), seed).continue_damaged(turns);
            tally.count_world(&happened);
            tally.fault("flip: worked on, drained, healed by overwriting", 1);
        }
        Ok(())
    }
}
