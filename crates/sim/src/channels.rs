//! Channels between hosts, each side in a thread, over a memory that is coherent or is not: one to three clients, and the server of all
//! of them with one device. Processes of all die, are stopped and come back, lines are damaged, and one side may be hostile.
//!
//! Invariants: a seed decides every step of a history. Checked is:
//! - each request completes once, whatever becomes of the server, while its client lives;
//! - a read gets what the requests before it have stored; with several clients there is one order of all that explains each read;
//! - what a request stores is stored before its completion is stored, and never after that, nor after the client's next session has
//!   begun;
//! - what a later request has replaced is never stored again, although the server may have died before the completion;
//! - a hostile side makes the other one execute nothing that it must not.
//!
//! Elsewhere: the protocol (`cbd-channel`), the memory ([`HostMemory`]).

mod client;
mod known;
mod order;
mod server;
mod truth;

use crate::baton::{self, together};
use crate::explorer::{Tally, play_counted};
use crate::hosts::{HostMemory, Medium};
use crate::random::Seeded;
use cbd_channel::Areas;
use cbd_format::ChannelShape;
use cbd_types::{BootId, Geometry, Operation, Pmem};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use truth::Truth;

/// The name of this kind of world.
pub const NAME: &str = "channels";

/// Histories of one seed.
const BATCH: u64 = 20;
const BOOT: BootId = BootId([1; 16]);
const SECTOR: u64 = 512;
const SECTORS: u64 = 24;

fn fill(sector: &mut [u8], value: u64) {
    sector.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
}

/// The value of a sector, all of which has it.
fn value_of(sector: &[u8]) -> u64 {
    let words = sector.as_chunks::<8>().0;
    let value = words.first().map_or(0, |word| u64::from_le_bytes(*word));
    assert!(words.iter().all(|word| u64::from_le_bytes(*word) == value), "a sector has parts of two values");
    value
}

fn changes(operation: Operation) -> bool {
    !matches!(operation, Operation::Read | Operation::Flush)
}

/// The geometry of the device that is served.
pub const GEOMETRY: Geometry = Geometry {
    size: SECTORS * SECTOR,
    sector: SECTOR as u32,
    physical_sector: 4096,
    atomic_unit: 1 << 20,
    discard: true,
    discard_granularity: SECTOR as u32,
    rotational: false,
    fast_zeroes: true,
};

/// Plays the histories of one seed; with `only`, only the one with that number.
#[must_use]
pub fn explore(seed: u64, only: Option<u64>) -> Tally {
    play_counted(NAME, BATCH, seed, only, |seed| {
        let truth = Mutex::new(Truth::default());
        let outcome = play(seed, &truth);
        (outcome, truth.into_inner().counts)
    })
}

/// What all sides of a history know.
struct Scene<'a> {
    medium: Medium,
    is_coherent: bool,
    shape: ChannelShape,
    /// The areas of each client.
    channels: Vec<Areas>,
    truth: &'a Mutex<Truth>,
    /// Clients that are not done.
    clients_left: AtomicUsize,
    /// They all are, or a side has failed.
    is_over: AtomicBool,
    dies_permille: u64,
    /// How soon the device executes a request, and how soon that is reported.
    pace_permille: u64,
    /// Whether the device executes the last request first, so that others wait for long.
    is_last_first: bool,
    /// Requests out of a thousand that the device refuses.
    refused_permille: u64,
    /// Polls out of a thousand after which a client nudges, although there is no need.
    nudges_permille: u64,
    /// The same for those after which it asks for what was not begun, or gives requests up.
    recalls_permille: u64,
    gives_up_permille: u64,
    is_damaged: bool,
    is_hostile: bool,
}

fn play(seed: u64, truth: &Mutex<Truth>) -> Result<(), String> {
    let mut random = Seeded::new(seed);
    let shape = ChannelShape::new(random.between(1, 4) as u32, 4096)
        .unwrap_or_else(|| unreachable!("it is possible"));
    let is_hostile = random.chance(100);
    let clients = if is_hostile { 1 } else { *random.pick(&[1, 1, 2, 3]) };
    let areas =
        |client| Areas { client: 2 * client * shape.bytes(), server: (2 * client + 1) * shape.bytes() };
    let scene = Scene {
        medium: Medium::new(2 * clients * shape.bytes()),
        is_coherent: random.chance(300),
        shape,
        channels: (0..clients).map(areas).collect(),
        truth,
        clients_left: AtomicUsize::new(clients as usize),
        is_over: AtomicBool::new(false),
        dies_permille: *random.pick(&[0, 300, 700]),
        pace_permille: *random.pick(&[20, 500]),
        is_last_first: random.chance(200),
        refused_permille: *random.pick(&[0, 0, 100]),
        nudges_permille: *random.pick(&[0, 0, 20]),
        recalls_permille: *random.pick(&[0, 0, 20]),
        gives_up_permille: *random.pick(&[0, 0, 0, 10]),
        is_damaged: random.chance(200),
        is_hostile,
    };
    let scene = &scene;
    let switch_permille = *random.pick(&[5, 20, 100]);
    let (server, other) = (random.next(), random.next());
    let mut works: Vec<Box<dyn FnOnce() + Send>> = vec![Box::new(|| scene.server(server))];
    for number in 0..scene.channels.len() {
        let seed = random.next();
        works.push(Box::new(move || scene.client(number, seed)));
    }
    if scene.is_damaged || is_hostile {
        works.push(Box::new(|| scene.damage(other)));
    }
    for outcome in together(random.next(), switch_permille, works) {
        outcome.map_err(crate::hosts::text_of)?;
    }
    let contradiction = truth.lock().order.contradiction();
    contradiction.filter(|_| scene.is_exact()).map_or(Ok(()), Err)
}

/// Ends a history with the server, the last client, or one that fails.
struct OverAtEnd<'a>(&'a Scene<'a>, usize);

impl Drop for OverAtEnd<'_> {
    fn drop(&mut self) {
        let left = self.0.clients_left.fetch_sub(self.1, Ordering::Relaxed) - self.1;
        if self.1 == 0 || left == 0 || std::thread::panicking() {
            self.0.is_over.store(true, Ordering::Relaxed);
        }
    }
}

impl Scene<'_> {
    fn memory(&self, random: &mut Seeded) -> HostMemory {
        HostMemory::new(&self.medium, self.is_coherent, random.next()).in_boot(BOOT)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Whether all lines are as they were stored.
    const fn is_exact(&self) -> bool {
        !self.is_damaged && !self.is_hostile
    }

    /// Stores random bytes in lines of the channels.
    fn damage(&self, seed: u64) {
        let mut random = Seeded::new(seed);
        let lines = self.medium.bytes().len() as u64 / 64;
        let areas = 2 * self.channels.len() as u64;
        while !self.is_over() {
            let memory = self.memory(&mut random);
            // Most lines are those of data, of which few are in use.
            let ring =
                random.below(self.shape.completions() + 2) * 64 + random.below(areas) * self.shape.bytes();
            let at = if random.chance(700) { ring } else { random.below(lines) * 64 };
            let line: [u8; 64] = std::array::from_fn(|_| random.next() as u8);
            let line = if random.chance(300) {
                line
            } else {
                changed(&memory, at, line, self.is_hostile, &mut random)
            };
            memory.store(at, &line);
            memory.publish(at, 64);
            self.truth.lock().count("damage");
            for _ in 0..random.below(300) {
                if self.is_over() {
                    return;
                }
                baton::must_switch();
            }
        }
    }
}

/// A line that is there with some bytes changed; with `is_forged` its checksum fits.
fn changed(memory: &HostMemory, at: u64, other: [u8; 64], is_forged: bool, random: &mut Seeded) -> [u8; 64] {
    let mut line = [0; 64];
    if memory.load(at, &mut line).is_err() {
        return other;
    }
    for _ in 0..random.between(1, 4) {
        let byte = random.between(24, 63) as usize;
        line[byte] = if random.chance(500) { 0 } else { other[byte] };
    }
    if is_forged {
        let sum = cbd_format::crc32c(&line[4..]);
        line[..4].copy_from_slice(&sum.to_le_bytes());
    }
    line
}
