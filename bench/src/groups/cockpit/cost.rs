//! What it costs to count requests: a queue that counts them against one that does not, over the same cache.
//!
//! Invariants: both queues execute requests in the memory of their caller, as a program with libcbd does, on one thread; both have
//! the same cache and the same clock. The order of their turns alternates. Background work runs between the turns, not in them.

use super::super::engine::Pair;
use crate::Figures;
use crate::options::Options;
use crate::rig::{Surroundings, no_space};
use crate::rounded;
use crate::scale::{Scale, Sources};
use crate::turns::{Comparison, Turn, compare_both_orders};
use cbd_backing::PollableQueue;
use cbd_device::{Device, Queue};
use cbd_pmem::Mapping;
use cbd_runtime::environment::{coarse_ns, monotonic_ns};
use cbd_types::{AlignedBuffer, ByteRange, Error, ErrorKind, Result};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use std::cell::RefCell;
use std::sync::Arc;
use std::task::Waker;

/// Operations that a queue may have in flight on the disk.
const DEPTH: usize = 16;

/// How many times as many turns as elsewhere: the difference is a few nanoseconds.
const MORE: usize = 2;

/// A queue of the measurement.
type Measured<const COUNTS: bool> = Queue<Surroundings, Box<dyn PollableQueue>, COUNTS>;

/// Runs the measurements.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    let mapping = Arc::new(Mapping::anonymous(2 * scale.region)?);
    let mut pair = Pair::new(&mapping, scale, MORE * options.rounds(), None)?;
    let disk = Arc::clone(pair.rig.disk());
    let device =
        Device::cached(pair.rig.share(), disk.geometry()).with_clock(monotonic_ns).with_sample(coarse_ns);
    device.sample_for(scale.region);
    let device = Arc::new(device);
    let counting = Queue::new(Arc::clone(&device), disk.open_queue(DEPTH)?, Waker::noop().clone());
    let other = Queue::uncounted(device, disk.open_queue(DEPTH)?, Waker::noop().clone());
    let queues = &mut (counting, other);
    let written = writes(&mut pair, queues)?;
    figures.add_comparison("write_4k", "uncounted", "write_4k_uncounted", &written);
    let read = reads(&mut pair, queues)?;
    figures.add_comparison("read_4k", "uncounted", "read_4k_uncounted", &read);
    // The budget is of both.
    let worse = if written.ratio.median > read.ratio.median { written } else { read };
    figures.add_ratio("cost", &worse);
    figures.add("counting_write_ns", rounded(written.difference.median, 2));
    figures.add("counting_read_ns", rounded(read.difference.median, 2));
    Ok(())
}

/// Random writes of 4 KiB.
fn writes(pair: &mut Pair, queues: &mut (Measured<true>, Measured<false>)) -> Result<Comparison> {
    let sources = Sources::new(4096);
    let rounds = pair.rounds;
    let pair = RefCell::new(pair);
    let places = || -> Result<Vec<u64>> {
        let mut pair = pair.borrow_mut();
        pair.rest_before(1)?;
        Ok(pair.places(4096, 1))
    };
    let (counting, other) = (RefCell::new(&mut queues.0), RefCell::new(&mut queues.1));
    compare_both_orders(
        rounds,
        || write(&mut counting.borrow_mut(), &places()?, &sources),
        || write(&mut other.borrow_mut(), &places()?, &sources),
    )
}

fn write<const COUNTS: bool>(
    queue: &mut Measured<COUNTS>,
    places: &[u64],
    sources: &Sources,
) -> Result<Turn> {
    Turn::measure(places.len(), || {
        for (number, &place) in places.iter().enumerate() {
            let range = ByteRange::at(place, 4096);
            queue.write_from(0, range, sources.get(number), false).ok_or_else(no_space)??;
        }
        Ok(())
    })
}

/// Random reads of 4 KiB that hit.
fn reads(pair: &mut Pair, queues: &mut (Measured<true>, Measured<false>)) -> Result<Comparison> {
    pair.rig.settle()?;
    let mut hits: Vec<u64> = pair.rig.held_blocks().iter().map(|held| held.place).collect();
    hits.shuffle(&mut SmallRng::seed_from_u64(3));
    let mut turns = hits.chunks_exact(pair.scale.turn(4096)).cycle();
    let turns = RefCell::new(&mut turns);
    let next = || turns.borrow_mut().next().unwrap_or_default();
    let buffer = RefCell::new(AlignedBuffer::zeroed(4096));
    let (counting, other) = (RefCell::new(&mut queues.0), RefCell::new(&mut queues.1));
    compare_both_orders(
        pair.rounds,
        || read(&mut counting.borrow_mut(), next(), &mut buffer.borrow_mut()),
        || read(&mut other.borrow_mut(), next(), &mut buffer.borrow_mut()),
    )
}

fn read<const COUNTS: bool>(queue: &mut Measured<COUNTS>, places: &[u64], buffer: &mut [u8]) -> Result<Turn> {
    Turn::measure(places.len(), || {
        for &place in places {
            let missed = || Error::new(ErrorKind::NotFound, "what the log holds is not in the cache");
            queue.read_into(0, ByteRange::at(place, 4096), buffer).ok_or_else(missed)??;
        }
        Ok(())
    })
}
