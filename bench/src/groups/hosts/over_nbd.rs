//! A block device on a backend of another host against the way without a channel: NBD on a unix socket to the host of the backend.
//!
//! Invariants: both get requests of 4 KiB for one device from one thread, in turns. The client and the thread that serves a channel have
//! a processor each; the server of NBD has the processor with which it is faster. Background work runs between the turns, not in them.

use super::connected::Connected;
use crate::figures::{Certainty, Figures, spread};
use crate::groups::export::Exports;
use crate::options::Options;
use crate::rounded;
use crate::scale::Sources;
use crate::statistics::{Summary, median_range};
use crate::turns::{Rounds, Turn, is_noisy, play};
use cbd_export::BlockDevice;
use cbd_export::RequestQueue;
use cbd_export::wake::{Interest, WaitSet};
use cbd_nbd::{Listen, Options as NbdOptions, Server};
use cbd_testkit::{Client, Command};
use cbd_types::{AlignedBuffer, ByteRange, Completion, Error, ErrorKind, Operation, Request, Result};
use serde_json::{Map, json};
use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A device may take so long to answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Divisor of the number of turns: a turn takes some milliseconds.
const FEWER: usize = 8;

/// How many requests are in flight.
struct Depth {
    depth: usize,
    /// Requests in a turn.
    requests: usize,
    /// The processor of the server of NBD.
    server: usize,
}

/// The measured depths.
const DEPTHS: [Depth; 2] =
    [Depth { depth: 1, requests: 512, server: 0 }, Depth { depth: 32, requests: 2048, server: 1 }];

/// How the client of a channel learns of completions.
#[derive(Clone, Copy)]
pub(super) enum Waiting {
    /// On the descriptors of its queue, as exports do.
    Sleeps,
    /// By polling.
    Polls,
}

/// Runs the measurement; `how` begins the names of the figures.
///
/// # Errors
/// Those of both sides.
pub fn run(options: &Options, connected: &mut Connected, how: &str, figures: &mut Figures) -> Result<()> {
    let exports = Exports::new()?;
    let (mut waiting, mut polled) = (Ratios::default(), Ratios::default());
    for Depth { depth, requests, server } in DEPTHS {
        let listen = Listen::Unix(exports.path(&format!("owner-{depth}.sock")));
        let setup = exports.serving_on(server).thread_setup();
        let nbd_options = NbdOptions { thread_setup: Some(setup), ..NbdOptions::default() };
        let nbd = Server::start(Arc::clone(&connected.served) as _, listen.clone(), nbd_options)?;
        let ways =
            Ways { channel: Used::new(connected.device.open_queue()?), nbd: Client::connect(&listen)? };
        let ways = RefCell::new(ways);
        for (operation, name) in [(Operation::Write, "write"), (Operation::Read, "read")] {
            let name = format!("{name}_4k_qd{depth}");
            exports.processors.pin(0)?;
            let rounds = options.rounds().div_ceil(FEWER);
            let found = measure(connected, &ways, (operation, depth, requests), rounds);
            exports.processors.unpin()?;
            let found = found?;
            for (side, way) in ["waiting", "polled", "nbd"].into_iter().enumerate() {
                let figure = format!("{how}_{way}_{name}_us");
                add_time(figures, &figure, &found.each(|turn| turn[side] / 1000.0));
            }
            waiting.add(figures, &format!("{how}_over_nbd"), &name, &found.each(|turn| turn[2] / turn[0]));
            let figure = format!("{how}_polled_over_nbd");
            polled.add(figures, &figure, &name, &found.each(|turn| turn[2] / turn[1]));
        }
        drop(ways);
        nbd.stop()?;
    }
    waiting.report(figures, &format!("{how}_over_nbd"));
    polled.report(figures, &format!("{how}_polled_over_nbd"));
    Ok(())
}

/// Adds the time of a request, in microseconds.
fn add_time(figures: &mut Figures, name: &str, times: &[f64]) {
    let time = Summary::of(times);
    let mut detail = Map::new();
    detail.insert("p10_p90".to_owned(), spread(time, 2));
    figures.add_detailed(name, rounded(time.median, 2), detail, None);
}

/// How many times as fast the channel is, by operation and depth.
#[derive(Default)]
struct Ratios {
    least: Option<(f64, Certainty)>,
    detail: Map<String, serde_json::Value>,
}

impl Ratios {
    fn add(&mut self, figures: &mut Figures, figure: &str, name: &str, ratios: &[f64]) {
        let (ratio, range) = (Summary::of(ratios), median_range(ratios));
        let certainty = Certainty { range, is_noisy: is_noisy(ratio, range) };
        let value = rounded(ratio.median, 3);
        let mut detail = Map::new();
        detail.insert("rounds".to_owned(), json!(ratios.len()));
        detail.insert("p10_p90".to_owned(), spread(ratio, 3));
        figures.add_detailed(&format!("{figure}_{name}"), value, detail, Some(certainty));
        self.detail.insert(name.to_owned(), json!(value));
        if self.least.is_none_or(|(least, _)| value < least) {
            self.least = Some((value, certainty));
        }
    }

    /// Adds the least of them.
    fn report(self, figures: &mut Figures, figure: &str) {
        if let Some((least, certainty)) = self.least {
            figures.add_detailed(figure, least, self.detail, Some(certainty));
        }
    }
}

/// The ways to the device.
struct Ways {
    channel: Used,
    nbd: Client,
}

/// Turns of a channel whose client waits, of one whose client polls, and of NBD.
fn measure(
    connected: &mut Connected,
    ways: &RefCell<Ways>,
    (operation, depth, requests): (Operation, usize, usize),
    rounds: usize,
) -> Result<Rounds<3>> {
    let sources = Sources::new(4096);
    let cached = connected.cached_places()?;
    let mut turns = cached.chunks_exact(requests).cycle();
    let mut next = move || match operation {
        Operation::Read => {
            let none = || Error::new(ErrorKind::NotFound, "too few blocks are in the cache");
            turns.next().map(<[u64]>::to_vec).ok_or_else(none)
        }
        _ => connected.places_to_write(requests),
    };
    let next = RefCell::new(&mut next);
    let by_channel = |how: Waiting| {
        let places = next.borrow_mut()()?;
        timed(places.len(), || ways.borrow_mut().channel.play(operation, &places, &sources, depth, how))
    };
    play(
        rounds,
        [&mut || by_channel(Waiting::Sleeps), &mut || by_channel(Waiting::Polls), &mut || {
            let places = next.borrow_mut()()?;
            timed(places.len(), || by_nbd(&mut ways.borrow_mut().nbd, operation, &places, &sources, depth))
        }],
    )
}

/// The time of a turn. A client that waits for its answer does not occupy its processor.
fn timed(requests: usize, work: impl FnOnce() -> Result<()>) -> Result<Turn> {
    Ok(Turn { undisturbed: true, ..Turn::measure(requests, work)? })
}

/// A queue of a device, and what its client has.
pub(super) struct Used {
    queue: Box<dyn RequestQueue>,
    set: WaitSet,
    done: Vec<Completion>,
    spare: Vec<AlignedBuffer>,
}

impl Used {
    pub fn new(queue: Box<dyn RequestQueue>) -> Self {
        let mut set = WaitSet::new();
        for descriptor in queue.wait_descriptors() {
            set.add(descriptor, Interest::Read);
        }
        Self { queue, set, done: Vec::new(), spare: Vec::new() }
    }

    /// Requests at these places with at most `depth` in flight.
    ///
    /// # Errors
    /// Those of the requests; [`ErrorKind::TimedOut`] if none completes.
    pub fn play(
        &mut self,
        operation: Operation,
        places: &[u64],
        sources: &Sources,
        depth: usize,
        how: Waiting,
    ) -> Result<()> {
        let (mut next, mut flying, mut last) = (0, 0, Instant::now());
        while next < places.len() || flying > 0 {
            while next < places.len() && flying < depth {
                let mut buffer = self.spare.pop().unwrap_or_else(|| AlignedBuffer::zeroed(4096));
                if operation == Operation::Write {
                    buffer.copy_from_slice(sources.get(next));
                }
                let range = ByteRange::at(places[next], 4096);
                let request = Request::unmarked(next as u64, operation, range, false, buffer);
                self.queue.submit(request, &mut self.done);
                (next, flying) = (next + 1, flying + 1);
            }
            if self.done.is_empty() {
                self.queue.poll(&mut self.done);
            }
            if self.done.is_empty() {
                if last.elapsed() > TIMEOUT {
                    return Err(Error::new(ErrorKind::TimedOut, "the other host does not answer"));
                }
                match how {
                    Waiting::Sleeps => drop(self.set.wait(Some(TIMEOUT))?),
                    Waiting::Polls => std::hint::spin_loop(),
                }
                continue;
            }
            last = Instant::now();
            for completion in self.done.drain(..) {
                completion.result?;
                self.spare.push(completion.buffer);
                flying -= 1;
            }
        }
        Ok(())
    }
}

/// The same by NBD.
fn by_nbd(
    client: &mut Client,
    operation: Operation,
    places: &[u64],
    sources: &Sources,
    depth: usize,
) -> Result<()> {
    let mut rest = places.iter().enumerate();
    let mut completed = 0;
    while completed < places.len() {
        while client.in_flight() < depth
            && let Some((number, &offset)) = rest.next()
        {
            let command = match operation {
                Operation::Write => Command::Write { offset, data: sources.get(number), fua: false },
                _ => Command::Read { offset, length: 4096 },
            };
            client.submit(command)?;
        }
        if let Some(reply) = client.complete()? {
            reply.result?;
            client.recycle(reply.data);
            completed += 1;
        }
    }
    Ok(())
}
