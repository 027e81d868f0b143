//! The traces: the blocks that requests read.
//!
//! Invariants: a trace depends only on the seed and the number of blocks that a cache can have.

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// Blocks on the device for each block of the cache.
pub const DEVICE: u32 = 8;

/// Requests for each block of the cache.
pub const LENGTH: u32 = 32;

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The block.
    pub block: u32,
    /// Whether it writes the whole block; otherwise it reads it.
    pub is_write: bool,
}

/// A kind of trace.
pub struct Trace {
    /// Its name.
    pub name: &'static str,
    /// Whether it is one of the five traces of which the worst counts for the budget.
    pub has_budget: bool,
    /// The share of its requests that write, in percent, unless the options ask for more.
    write_percent: u8,
    /// Generates the blocks of the trace, for a cache of this many blocks, and that many requests for each, and a seed.
    blocks: fn(u32, u32, &mut SmallRng) -> Vec<u32>,
}

/// All kinds. The last two are difficult for a cache that does not admit blocks at their first use.
pub const TRACES: [Trace; 7] = [
    Trace { name: "uniform", has_budget: true, write_percent: 0, blocks: uniform },
    Trace { name: "zipf", has_budget: true, write_percent: 0, blocks: zipf },
    Trace { name: "scans", has_budget: true, write_percent: 0, blocks: scans },
    Trace { name: "loops", has_budget: true, write_percent: 0, blocks: loops },
    Trace { name: "writes", has_budget: true, write_percent: 30, blocks: zipf },
    Trace { name: "moving", has_budget: false, write_percent: 0, blocks: moving },
    Trace { name: "recent", has_budget: false, write_percent: 0, blocks: recent },
];

impl Trace {
    /// Its requests, `length` for each block of the cache. `write_percent` percent of them write, or its own share if
    /// that is higher.
    pub fn requests(&self, capacity: u32, length: u32, seed: u64, write_percent: u8) -> Vec<Request> {
        let blocks = (self.blocks)(capacity, length, &mut SmallRng::seed_from_u64(seed));
        let write_percent = write_percent.max(self.write_percent);
        let mut random = SmallRng::seed_from_u64(seed ^ u64::MAX);
        let mut request =
            |block| Request { block, is_write: random.random_range(0..100) < u32::from(write_percent) };
        blocks.into_iter().map(&mut request).collect()
    }
}

/// Twice as many blocks as fit, all with the same probability.
fn uniform(capacity: u32, length: u32, random: &mut SmallRng) -> Vec<u32> {
    (0..length * capacity).map(|_| random.random_range(0..2 * capacity)).collect()
}

/// The block of rank r with a probability proportional to r to the power of -0.99, as in YCSB, over the whole
/// device; ranks are scattered over the device.
fn zipf(capacity: u32, length: u32, random: &mut SmallRng) -> Vec<u32> {
    let places = shuffled(DEVICE * capacity, random);
    let zipf = Zipf::new(places.len());
    (0..length * capacity).map(|_| places[zipf.draw(random)]).collect()
}

/// Ranks, each with a probability proportional to the rank to the power of -0.99.
pub struct Zipf {
    cumulated: Vec<f64>,
}

impl Zipf {
    /// So many ranks.
    pub fn new(count: usize) -> Self {
        let mut below = 0.0;
        let cumulated = (1..=count)
            .map(|rank| {
                below += (rank as f64).powf(-0.99);
                below
            })
            .collect();
        Self { cumulated }
    }

    /// A rank, from 0.
    pub fn draw(&self, random: &mut SmallRng) -> usize {
        let drawn = random.random_range(0.0..self.cumulated.last().copied().unwrap_or(1.0));
        let rank = self.cumulated.partition_point(|below| *below <= drawn);
        rank.min(self.cumulated.len().saturating_sub(1))
    }
}

/// A hot set of half as many blocks as fit is read at random, for four times as many requests as blocks fit. Then a scan reads
/// twice as many blocks as fit, each once, while every other request still reads the hot set. This repeats with another scan over
/// another part of the device.
fn scans(capacity: u32, length: u32, random: &mut SmallRng) -> Vec<u32> {
    let device = DEVICE * capacity;
    let places = shuffled(device, random);
    let hot = &places[..capacity as usize / 2];
    let mut requests = Vec::with_capacity((length * capacity) as usize);
    let mut scanned = random.random_range(0..device);
    while requests.len() < (length * capacity) as usize {
        requests.extend((0..4 * capacity).map(|_| hot[random.random_range(0..hot.len())]));
        for _ in 0..2 * capacity {
            requests.push(scanned);
            requests.push(hot[random.random_range(0..hot.len())]);
            scanned = (scanned + 1) % device;
        }
    }
    requests
}

/// Loops through 0.5, 1.25, 0.8 and 2 times as many blocks as fit, one after the other, eight rounds each,
/// each over another part of the device. With fewer requests than [`LENGTH`] the rounds are fewer.
fn loops(capacity: u32, length: u32, random: &mut SmallRng) -> Vec<u32> {
    let device = DEVICE * capacity;
    let mut first = random.random_range(0..device);
    let mut requests = Vec::new();
    let rounds = 8 * length / LENGTH;
    for percent in [50, 125, 80, 200] {
        let blocks = (u64::from(capacity) * percent / 100) as u32;
        for _ in 0..rounds {
            requests.extend((0..blocks).map(|step| (first + step) % device));
        }
        first = (first + blocks) % device;
    }
    requests
}

/// The numbers below `count` in random order.
fn shuffled(count: u32, random: &mut SmallRng) -> Vec<u32> {
    let mut places: Vec<u32> = (0..count).collect();
    places.shuffle(random);
    places
}

/// A hot set of half as many blocks as fit, read at random, that changes after four times as many requests as
/// blocks fit.
fn moving(capacity: u32, length: u32, random: &mut SmallRng) -> Vec<u32> {
    let set = capacity / 2;
    (0..length * capacity)
        .map(|number| (number / (4 * capacity) * set + random.random_range(0..set)) % (DEVICE * capacity))
        .collect()
}

/// Blocks that were read some number of requests ago, up to three times as many as blocks fit, with all
/// orders of magnitude equally likely; one request in eight is for a new block.
fn recent(capacity: u32, length: u32, random: &mut SmallRng) -> Vec<u32> {
    let mut requests: Vec<u32> = Vec::new();
    let mut new = 0;
    for _ in 0..length * capacity {
        let ago = random.random_range(0.0..(3.0 * f64::from(capacity)).ln()).exp() as usize;
        let block = match requests.len().checked_sub(ago) {
            Some(place) if random.random_range(0..8) > 0 => requests[place],
            _ => {
                new = (new + 1) % (DEVICE * capacity);
                new
            }
        };
        requests.push(block);
    }
    requests
}
