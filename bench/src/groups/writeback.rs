//! The rate at which adjacent dirty blocks are written back to a disk, against the sequential rate of the disk.
//!
//! Invariants: both contestants write the same range of the same disk model, which delays operations and stores nothing, and both
//! end with a flush. The blocks were written in random order, one by one. The budget applies to the worse of the typical disks
//! behind a cache: a hard disk and a SATA flash disk. A faster disk, and a disk that completes every operation at once, show the
//! limits of writeback itself.

use crate::figures::Certainty;
use crate::instant_disk::InstantDisk;
use crate::options::Options;
use crate::rig::{self, Rig};
use crate::scale::{Scale, Sources};
use crate::turns::{Comparison, Turn, compare};
use crate::window::Window;
use crate::{Figures, rounded};
use cbd_backing::{Backing, Throttle, ThrottleParameters};
use cbd_pmem::Mapping;
use cbd_types::{AlignedBuffer, BackingOp, ByteRange, OpToken, Result};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use serde_json::{Map, json};
use std::cell::RefCell;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// Bytes of a sequential request, and the unit of rates.
const REQUEST: u64 = MIB;

/// Requests of the sequential writer in flight.
const DEPTH: usize = 16;

/// A flash disk on PCI Express.
const FAST_FLASH_DISK: ThrottleParameters = ThrottleParameters {
    latency_us: 20.0,
    flush_us: Some(100.0),
    mib_per_s: 2000.0,
    parallel: 32,
    ..ThrottleParameters::NONE
};

struct Disk {
    name: &'static str,
    parameters: ThrottleParameters,
    /// MiB that are drained in a turn.
    drain: u64,
    turns: usize,
    has_budget: bool,
}

const DISKS: [Disk; 4] = [
    Disk {
        name: "hard_disk",
        parameters: ThrottleParameters::HARD_DISK,
        drain: 256,
        turns: 3,
        has_budget: true,
    },
    Disk {
        name: "flash",
        parameters: ThrottleParameters::FLASH_DISK,
        drain: 256,
        turns: 5,
        has_budget: true,
    },
    Disk { name: "fast_flash", parameters: FAST_FLASH_DISK, drain: 256, turns: 9, has_budget: false },
    Disk { name: "instant", parameters: ThrottleParameters::NONE, drain: 256, turns: 9, has_budget: false },
];

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    let mapping = Arc::new(Mapping::anonymous(scale.region)?);
    let mut worst: Option<(&str, Comparison)> = None;
    for disk in &DISKS {
        let (drain, turns) = if options.quick { (16, 1) } else { (disk.drain, disk.turns) };
        let found = against_sequential(disk.parameters, &mapping, drain * MIB, turns)?;
        let rate = |nanoseconds: f64| rounded(1e9 / nanoseconds, 1);
        figures.add(format!("{}.drain_mib_per_s", disk.name), rate(found.a.median));
        figures.add(format!("{}.sequential_mib_per_s", disk.name), rate(found.b.median));
        figures.add(format!("{}.over_sequential", disk.name), rounded(1.0 / found.ratio.median, 3));
        let is_worse = worst.as_ref().is_none_or(|(_, worst)| found.ratio.median > worst.ratio.median);
        if disk.has_budget && is_worse {
            worst = Some((disk.name, found));
        }
    }
    if let Some((name, found)) = worst {
        let share = |of: f64| rounded(1.0 / of, 3);
        let mut detail = Map::new();
        detail.insert("disk".to_owned(), json!(name));
        let rate = |nanoseconds: f64| 1e9 / nanoseconds;
        let absolute = format!("{:.0} MiB/s against {:.0} MiB/s", rate(found.a.median), rate(found.b.median));
        detail.insert("absolute".to_owned(), json!(absolute));
        detail.insert("rounds".to_owned(), json!(found.rounds));
        detail.insert("p10_p90".to_owned(), json!([share(found.ratio.high), share(found.ratio.low)]));
        let (low, high) = found.ratio_range;
        let certainty = Certainty { range: (1.0 / high, 1.0 / low), is_noisy: found.is_noisy() };
        figures.add_detailed("over_sequential", share(found.ratio.median), detail, Some(certainty));
    }
    Ok(())
}

/// Drains of `length` bytes against sequential writes of the same length; nanoseconds for each request.
fn against_sequential(
    parameters: ThrottleParameters,
    mapping: &Arc<Mapping>,
    length: u64,
    turns: usize,
) -> Result<Comparison> {
    let disk: Arc<dyn Backing> = Arc::new(Throttle::new(InstantDisk::new(4 * length)?, parameters));
    let memory = Window::new(Arc::clone(mapping), 0, mapping_length(mapping));
    let mut rig = Rig::before(memory, Arc::clone(&disk), rig::lanes_of_a_daemon())?;
    let sources = Sources::new(4096);
    let mut places: Vec<u64> = (0..length / 4096).map(|block| block * 4096).collect();
    places.shuffle(&mut SmallRng::seed_from_u64(5));
    let begin = RefCell::new((0..4).map(|quarter| quarter * length).cycle());
    let next = || begin.borrow_mut().next().unwrap_or(0);
    // A thread that waits for a disk does not occupy its processor.
    let turn = |work: &mut dyn FnMut() -> Result<()>| {
        let turn = Turn::measure((length / REQUEST) as usize, work)?;
        Ok(Turn { undisturbed: true, ..turn })
    };
    compare(
        turns,
        || {
            let begin = next();
            rig.settle()?;
            for (number, place) in places.iter().enumerate() {
                if !rig::write(rig.cache(), begin + place, sources.get(number))? {
                    return Err(rig::no_space());
                }
            }
            turn(&mut || rig.settle())
        },
        || {
            let begin = next();
            turn(&mut || write_sequentially(&*disk, ByteRange::at(begin, length)))
        },
    )
}

fn mapping_length(mapping: &Mapping) -> u64 {
    cbd_types::Pmem::len(mapping)
}

/// Writes `range` in order, and flushes.
fn write_sequentially(disk: &dyn Backing, range: ByteRange) -> Result<()> {
    sequentially(disk, range, |offset, buffer| BackingOp::Write { offset, buffer })
}

/// Submits an operation for each MiB of `range`, in order, and flushes.
///
/// # Errors
/// The error of an operation.
pub fn sequentially(
    disk: &dyn Backing,
    range: ByteRange,
    op: impl Fn(u64, AlignedBuffer) -> BackingOp,
) -> Result<()> {
    let mut queue = disk.open_queue(DEPTH)?;
    let mut buffers: Vec<_> = (0..DEPTH).map(|_| AlignedBuffer::zeroed(REQUEST as usize)).collect();
    let mut done = Vec::new();
    let mut offset = range.start;
    while offset < range.end || queue.in_flight() > 0 {
        while offset < range.end
            && let Some(buffer) = buffers.pop()
        {
            queue.submit(OpToken(offset), op(offset, buffer));
            offset += REQUEST;
        }
        queue.wait(&mut done);
        for one in done.drain(..) {
            one.result?;
            if let BackingOp::Write { buffer, .. } | BackingOp::Read { buffer, .. } = one.op {
                buffers.push(buffer);
            }
        }
    }
    queue.submit(OpToken(0), BackingOp::Flush);
    queue.wait(&mut done);
    done.drain(..).try_for_each(|one| one.result)
}
