//! Several hosts on one region: what it costs to use a block device of another host through a channel, beside NBD and while it is idle,
//! and what it costs that a region is shared.
//!
//! Here: requests of one thread to the cache itself, against the same through shared memory to a thread that serves it.
//!
//! Invariants: both threads poll, and each has a processor; the memory is coherent, except where a figure says `software`. Background
//! work runs between the turns, not in them.

mod connected;
mod idle;
mod over_nbd;
mod region;
mod shared;
mod sharing;
mod threads;

use super::engine::Pair;
use crate::Figures;
use crate::options::Options;
use crate::rig::{Surroundings, no_space};
use crate::rounded;
use crate::scale::{Scale, Sources};
use crate::turns::{Comparison, Turn, compare};
use cbd_backing::PollableQueue;
use cbd_channel::{Areas, Client, Server};
use cbd_device::{Device, Queue};
use cbd_format::ChannelShape;
use cbd_pmem::{Coherence, Mapping};
use cbd_types::{
    AlignedBuffer, ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Region, Request, Result,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

/// Operations that a queue may have in flight on the disk.
const DEPTH: usize = 16;
/// Requests in flight for the throughput.
const DEEP: usize = 32;
/// How long a server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A queue of the device itself.
type Local = Queue<Surroundings, Box<dyn PollableQueue>>;

/// Runs the measurements.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    shared::run(options, figures)?;
    let mut connected = connected::Connected::new(&Scale::of(options))?;
    // As hosts of two kernels, then as those of one.
    idle::run(options, &mut connected, "idle", figures)?;
    over_nbd::run(options, &mut connected, "looking_channel", figures)?;
    connected.wake()?;
    idle::run(options, &mut connected, "woken_idle", figures)?;
    over_nbd::run(options, &mut connected, "channel", figures)?;
    sharing::run(options, &mut connected, figures)?;
    connected.close()?;
    // Last, because they alone need both processors the whole time.
    channel(options, Coherence::Hardware, "channel", figures)?;
    channel(options, Coherence::Software, "software_channel", figures)
}

/// A channel in memory with this coherence, and figures whose names begin with `prefix`.
fn channel(options: &Options, coherence: Coherence, prefix: &str, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    let mapping = Arc::new(Mapping::anonymous(2 * scale.region)?);
    let mut pair = Pair::new(&mapping, scale, options.rounds(), None)?;
    let disk = Arc::clone(pair.rig.disk());
    let device = Arc::new(Device::cached(pair.rig.share(), disk.geometry()));
    let mut local = Queue::new(Arc::clone(&device), disk.open_queue(DEPTH)?, Waker::noop().clone());
    let far = Queue::new(device, disk.open_queue(DEPTH)?, Waker::noop().clone());

    let possible = ChannelShape::new(2 * DEEP as u32, 64 << 10);
    let shape =
        possible.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "no channel has this shape"))?;
    let memory = Mapping::anonymous(2 * shape.bytes())?.with_coherence(coherence);
    let region = Arc::new(Region::new(memory));
    let areas = Areas { client: 0, server: shape.bytes() };
    let geometry = Geometry {
        size: scale.device,
        sector: 512,
        physical_sector: 4096,
        atomic_unit: 1 << 20,
        discard: true,
        discard_granularity: 512,
        rotational: false,
        fast_zeroes: true,
    };
    let server = Server::open(Arc::clone(&region), areas, shape.bytes(), 1, geometry);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| serve(server, far, &is_over));
        let client = Client::open(region, areas, shape, 2);
        let measured = client.and_then(|client| {
            let mut remote = Remote { client, done: Vec::new(), spare: Vec::new() };
            measure(&mut pair, &mut local, &mut remote, (prefix, figures))
        });
        is_over.store(true, Ordering::Relaxed);
        let served = serving.join().map_err(|_| Error::new(ErrorKind::System, "the server has panicked"))?;
        measured.and(served)
    })
}

/// The host that serves the device: it polls until the end.
fn serve(mut server: Server<Mapping>, mut queue: Local, is_over: &AtomicBool) -> Result<()> {
    let (mut requests, mut done) = (Vec::new(), Vec::new());
    while !is_over.load(Ordering::Relaxed) {
        server.poll(&mut requests)?;
        for request in requests.drain(..) {
            queue.submit_plugged(request, &mut done);
        }
        queue.unplug(&mut done);
        if server.in_flight() > done.len() {
            queue.poll(&mut done);
        }
        for completion in done.drain(..) {
            server.complete(completion);
        }
        std::hint::spin_loop();
    }
    Ok(())
}

/// The host that uses it.
struct Remote {
    client: Client<Mapping>,
    done: Vec<Completion>,
    spare: Vec<AlignedBuffer>,
}

impl Remote {
    /// Requests at these places with at most `depth` in flight.
    fn play(&mut self, operation: Operation, places: &[u64], sources: &Sources, depth: usize) -> Result<()> {
        let (mut next, mut flying) = (0, 0);
        let mut last = Instant::now();
        while next < places.len() || flying > 0 {
            while next < places.len() && flying < depth {
                let mut buffer = self.spare.pop().unwrap_or_else(|| AlignedBuffer::zeroed(4096));
                if operation == Operation::Write {
                    buffer.copy_from_slice(sources.get(next));
                }
                let range = ByteRange::at(places[next], 4096);
                let request = Request::unmarked(next as u64, operation, range, false, buffer);
                self.client.submit(request, &mut self.done);
                (next, flying) = (next + 1, flying + 1);
            }
            self.client.poll(&mut self.done);
            if !self.done.is_empty() {
                last = Instant::now();
            }
            for completion in self.done.drain(..) {
                completion.result?;
                self.spare.push(completion.buffer);
                flying -= 1;
            }
            if last.elapsed() > TIMEOUT {
                return Err(Error::new(ErrorKind::TimedOut, "the channel does not answer"));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

fn measure(
    pair: &mut Pair,
    local: &mut Local,
    remote: &mut Remote,
    (prefix, figures): (&str, &mut Figures),
) -> Result<()> {
    let name = |what: &str| format!("{prefix}_{what}");
    let beside = |what: &str| format!("{}{what}", prefix.trim_end_matches("channel"));
    let written = writes(pair, local, remote, 1)?;
    figures.add_comparison(&name("write_4k"), "local", &beside("write_4k"), &written);
    let read = reads(pair, local, remote, 1)?;
    figures.add_comparison(&name("read_4k"), "local", &beside("read_4k"), &read);
    let extra = written.difference.median.max(read.difference.median);
    figures.add(name("extra_us"), rounded(extra / 1000.0, 2));
    let deep_writes = writes(pair, local, remote, DEEP)?;
    figures.add_comparison(&name("write_4k_deep"), "local", &beside("write_4k_deep"), &deep_writes);
    let deep_reads = reads(pair, local, remote, DEEP)?;
    figures.add_comparison(&name("read_4k_deep"), "local", &beside("read_4k_deep"), &deep_reads);
    let worse = deep_writes.ratio.median.max(deep_reads.ratio.median);
    figures.add(name("throughput"), rounded(1.0 / worse, 2));
    figures.add(name("repeated"), remote.client.repeated());
    Ok(())
}

/// Random writes of 4 KiB: through the channel, and by this thread.
fn writes(pair: &mut Pair, local: &mut Local, remote: &mut Remote, depth: usize) -> Result<Comparison> {
    let sources = Sources::new(4096);
    let rounds = pair.rounds;
    let pair = std::cell::RefCell::new(pair);
    let places = || -> Result<Vec<u64>> {
        let mut pair = pair.borrow_mut();
        pair.rest_before(1)?;
        Ok(pair.places(4096, 1))
    };
    compare(
        rounds,
        || {
            let places = places()?;
            Turn::measure(places.len(), || remote.play(Operation::Write, &places, &sources, depth))
        },
        || {
            let places = places()?;
            Turn::measure(places.len(), || {
                places.iter().enumerate().try_for_each(|(number, &place)| {
                    let range = ByteRange::at(place, 4096);
                    local.write_from(0, range, sources.get(number), false).ok_or_else(no_space)?
                })
            })
        },
    )
}

/// Random reads of 4 KiB that hit.
fn reads(pair: &mut Pair, local: &mut Local, remote: &mut Remote, depth: usize) -> Result<Comparison> {
    pair.rig.settle()?;
    let hits: Vec<u64> = pair.rig.held_blocks().iter().map(|held| held.place).collect();
    let sources = Sources::new(4096);
    let turns = std::cell::RefCell::new(hits.chunks_exact(pair.scale.turn(4096)).cycle());
    let next = || turns.borrow_mut().next().unwrap_or_default();
    let mut buffer = AlignedBuffer::zeroed(4096);
    compare(
        pair.rounds,
        || {
            let places = next();
            Turn::measure(places.len(), || remote.play(Operation::Read, places, &sources, depth))
        },
        || {
            let places = next();
            Turn::measure(places.len(), || {
                places.iter().try_for_each(|&place| {
                    let missed = || Error::new(ErrorKind::NotFound, "what the log holds is not in the cache");
                    local.read_into(0, ByteRange::at(place, 4096), &mut buffer).ok_or_else(missed)?
                })
            })
        },
    )
}
