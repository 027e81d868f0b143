//! Verification: of what the cache holds, against reading it, and of a whole device, against the disk's sequential rate.
//!
//! Invariants: both contestants go through the same ranges in the same order, so that what is in the processor's cache is the same.

mod beside;

use crate::figures::Certainty;
use crate::groups::writeback::sequentially;
use crate::instant_disk::InstantDisk;
use crate::options::Options;
use crate::rig::{self, Rig};
use crate::scale::Scale;
use crate::statistics::{Summary, median_range};
use crate::turns::{Comparison, Turn, compare};
use crate::window::Window;
use crate::{Figures, rounded};
use cbd_backing::{Backing, Throttle, ThrottleParameters};
use cbd_device::{Device, Queue, VERIFY_MAX};
use cbd_engine::{Holding, Part};
use cbd_export::wait_any;
use cbd_pmem::Mapping;
use cbd_types::{AlignedBuffer, BackingOp, ByteRange, Error, ErrorKind, Pmem, Result, Verify, VerifyLevel};
use crc_fast::{CrcAlgorithm, checksum};
use serde_json::{Map, json};
use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Whether a queue has work besides what the disk returns.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Bytes of a turn of the measurements in memory.
const TURN: u64 = 8 * MIB;

/// Bytes of the writes that fill the cache.
const WRITE: u64 = 64 << 10;

/// A ratio of latencies whose median has a wider range is reported as uncertain.
const NOISY: f64 = 0.2;

/// Runs the measurements.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    in_memory(options, scale, figures)?;
    let disks = [
        ("over_sequential", ThrottleParameters::HARD_DISK),
        ("flash_over_sequential", ThrottleParameters::FLASH_DISK),
    ];
    for (name, parameters) in disks {
        let (length, turns) = if options.quick { (16 * MIB, 1) } else { (256 * MIB, 3) };
        let found = against_disk(parameters, length, turns)?;
        let share = |of: f64| rounded(1.0 / of, 3);
        let mut detail = Map::new();
        let rate = |nanoseconds: f64| 1e9 / nanoseconds;
        let absolute = format!("{:.0} MiB/s against {:.0} MiB/s", rate(found.a.median), rate(found.b.median));
        detail.insert("absolute".to_owned(), json!(absolute));
        detail.insert("rounds".to_owned(), json!(found.rounds));
        let (low, high) = found.ratio_range;
        let certainty = Certainty { range: (1.0 / high, 1.0 / low), is_noisy: found.is_noisy() };
        figures.add_detailed(name, share(found.ratio.median), detail, Some(certainty));
    }
    beside::run(options, figures)
}

/// Adds a latency beside a verification over that without one, from those of each round in nanoseconds.
fn add_latency(figures: &mut Figures, name: &str, rounds: &[[f64; 2]]) {
    let ratios: Vec<_> = rounds.iter().map(|[beside, alone]| beside / alone).collect();
    let of = |which: usize| Summary::of(&rounds.iter().map(|round| round[which]).collect::<Vec<_>>()).median;
    let mut detail = Map::new();
    let absolute = format!("{:.1} us against {:.1} us", of(0) / 1000.0, of(1) / 1000.0);
    detail.insert("absolute".to_owned(), json!(absolute));
    detail.insert("rounds".to_owned(), json!(rounds.len()));
    let range = median_range(&ratios);
    let certainty = Certainty { range, is_noisy: range.1 - range.0 > NOISY };
    figures.add_detailed(name, rounded(Summary::of(&ratios).median, 3), detail, Some(certainty));
}

/// A cache of adjacent blocks: inspected, against bare copies with a checksum, and against reads through the cache.
fn in_memory(options: &Options, scale: Scale, figures: &mut Figures) -> Result<()> {
    let mapping = Arc::new(Mapping::anonymous(2 * scale.region)?);
    let bare = Window::new(Arc::clone(&mapping), scale.region, scale.region);
    bare.fill();
    let mut rig = Rig::new(Window::new(mapping, 0, scale.region), scale.device)?;
    let cached = scale.region / 2 / TURN * TURN;
    fill(&mut rig, ByteRange { start: 0, end: cached }, WRITE)?;
    let turns = RefCell::new((0..cached / TURN).map(|turn| ByteRange::at(turn * TURN, TURN)).cycle());
    let next = || turns.borrow_mut().next().unwrap_or(ByteRange::at(0, TURN));
    let (mut scratch, mut parts) = (AlignedBuffer::zeroed(MIB as usize), Vec::new());
    let mut inspect = |range: ByteRange| {
        Turn::measure((TURN / 4096) as usize, || {
            for window in range.split_at_multiples(MIB) {
                parts.clear();
                rig.cache().inspect(window, &mut scratch, &mut parts)?;
                if parts.iter().any(|part: &Part| part.holding != Holding::Clean) {
                    return Err(Error::new(ErrorKind::Damaged, "a window is not cached, or damaged"));
                }
            }
            Ok(())
        })
    };
    // The range changes behind each round: both contestants of a round go through the same one, in two halves of the mapping.
    let mut plain = AlignedBuffer::zeroed(4096);
    let over_copy = compare(
        options.rounds(),
        || inspect(next()),
        || {
            let range = next();
            Turn::measure((TURN / 4096) as usize, || {
                for block in range.split_at_multiples(4096) {
                    bare.load(block.start, &mut plain)?;
                    black_box(checksum(CrcAlgorithm::Crc32Iscsi, &plain));
                }
                Ok(())
            })
        },
    )?;
    add_rate(figures, "region_over_read", &over_copy);
    // A client's memory, which is in no processor's cache.
    let mut memory = AlignedBuffer::zeroed(256 << 20);
    let (mut at, mut misses) = (0, Vec::new());
    let over_read = compare(
        options.rounds(),
        || inspect(next()),
        || {
            let range = next();
            at = (at + TURN as usize) % memory.len();
            let into = &mut memory[at..at + TURN as usize];
            Turn::measure((TURN / 4096) as usize, || {
                for piece in rig.cache().pieces(range) {
                    let to = (piece.start - range.start) as usize;
                    let into = &mut into[to..to + piece.len() as usize];
                    rig.cache().read(piece, into, &mut misses)?;
                }
                Ok(())
            })
        },
    )?;
    add_rate(figures, "over_read", &over_read);
    Ok(())
}

/// Adds how many times as fast the first contestant is.
fn add_rate(figures: &mut Figures, name: &str, found: &Comparison) {
    let mut detail = Map::new();
    let rate = |nanoseconds: f64| 4096.0 / nanoseconds;
    let absolute = format!("{:.2} GB/s against {:.2} GB/s", rate(found.a.median), rate(found.b.median));
    detail.insert("absolute".to_owned(), json!(absolute));
    detail.insert("rounds".to_owned(), json!(found.rounds));
    let (low, high) = found.ratio_range;
    let certainty = Certainty { range: (1.0 / high, 1.0 / low), is_noisy: found.is_noisy() };
    figures.add_detailed(name, rounded(1.0 / found.ratio.median, 3), detail, Some(certainty));
}

/// Caches `range`, clean, in records of `length` bytes. The disk reads as zeroes, and so does the cache.
fn fill(rig: &mut Rig, range: ByteRange, length: u64) -> Result<()> {
    let zeroes = AlignedBuffer::zeroed(length as usize);
    for place in (range.start..range.end).step_by(length as usize) {
        let mut attempts = 0;
        while !rig::write(rig.cache(), place, &zeroes)? {
            attempts += 1;
            if attempts > 1000 {
                return Err(rig::no_space());
            }
            rig.settle()?;
        }
    }
    rig.settle()
}

/// A device of which every second 64 KiB are cached, verified with all copies compared, against sequential reads of its disk; nanoseconds
/// for each MiB.
fn against_disk(parameters: ThrottleParameters, length: u64, turns: usize) -> Result<Comparison> {
    let disk: Arc<dyn Backing> = Arc::new(Throttle::new(InstantDisk::new(length)?, parameters));
    let memory = Window::new(Arc::new(Mapping::anonymous(2 * length)?), 0, 2 * length);
    let mut rig = Rig::before(memory, Arc::clone(&disk), rig::lanes_of_a_daemon())?;
    for place in (0..length).step_by(2 * WRITE as usize) {
        fill_one(&mut rig, ByteRange::at(place, WRITE))?;
    }
    rig.settle()?;
    let woken = Arc::new(Woken::default());
    let device = Arc::new(Device::cached(rig.share(), disk.geometry()));
    let mut queue = Queue::new(device, disk.open_queue(16)?, Waker::from(Arc::clone(&woken)));
    // A thread that waits for a disk does not occupy its processor.
    let turn = |work: &mut dyn FnMut() -> Result<()>| {
        let turn = Turn::measure((length / MIB) as usize, work)?;
        Ok(Turn { undisturbed: true, ..turn })
    };
    compare(
        turns,
        || {
            turn(&mut || {
                let mut ranges = ByteRange::at(0, length).split_at_multiples(VERIFY_MAX);
                let (mut asked, mut answered) = (0, 0);
                loop {
                    while asked < answered + 2
                        && let Some(range) = ranges.next()
                    {
                        queue.verify(asked, Verify { range, level: VerifyLevel::Agree, repair: false });
                        asked += 1;
                    }
                    if asked == answered {
                        return Ok(());
                    }
                    queue.poll(&mut Vec::new());
                    let ended = queue.take_verified();
                    answered += ended.len() as u64;
                    for (_, verified) in ended {
                        if !verified?.findings.is_empty() {
                            return Err(Error::new(ErrorKind::Damaged, "something is found on a good disk"));
                        }
                    }
                    if !woken.0.swap(false, Ordering::Relaxed) && queue.backing().in_flight() > 0 {
                        wait_any(&[queue.backing().wait_descriptor()], Some(Duration::from_secs(60)))?;
                    }
                }
            })
        },
        || {
            turn(&mut || {
                let read = |offset, buffer| BackingOp::Read { offset, buffer };
                sequentially(&*disk, ByteRange::at(0, length), read)
            })
        },
    )
}

fn fill_one(rig: &mut Rig, range: ByteRange) -> Result<()> {
    let zeroes = AlignedBuffer::zeroed(range.len() as usize);
    if !rig::write(rig.cache(), range.start, &zeroes)? {
        rig.settle()?;
        if !rig::write(rig.cache(), range.start, &zeroes)? {
            return Err(rig::no_space());
        }
    }
    Ok(())
}
