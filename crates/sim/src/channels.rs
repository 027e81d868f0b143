//! A channel between two hosts, each in a thread, over a memory that is coherent or is not: processes of both die, are stopped and
//! come back, lines are damaged, and one side may be hostile.
//!
//! Invariants: a seed decides every step of a history. Checked is:
//! - each request completes once, whatever becomes of the server, while its client lives;
//! - a read gets what the requests before it have stored;
//! - what a request stores is stored before its completion, and never after it, nor after the client's next session has begun;
//! - a hostile side makes the other one execute nothing that it must not.
//!
//! Elsewhere: the protocol (`cbd-channel`), the memory ([`HostMemory`]).

use crate::baton::{self, together};
use crate::crash::until_crash;
use crate::explorer::{Tally, play_histories};
use crate::hosts::{HostMemory, Medium};
use crate::random::{Seeded, mix};
use cbd_channel::{Areas, Client, Server, ServerState};
use cbd_format::ChannelShape;
use cbd_types::{
    AlignedBuffer, ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Pmem, Region, Request,
};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The name of this kind of world.
pub const NAME: &str = "channels";

/// Histories of one seed.
const BATCH: u64 = 20;
const SECTOR: u64 = 512;
const SECTORS: u64 = 24;
/// Processes of the client, one after the other.
const LIVES: u64 = 3;
/// Requests of one process.
const REQUESTS: u64 = 12;
/// Polls without progress after which a history has hung.
const POLLS_MAX: u64 = 20_000;
/// Polls without progress after which a client nudges.
const NUDGE: u64 = 150;

/// The device, and what is true of it.
#[derive(Default)]
struct Truth {
    /// The value in each sector.
    sectors: BTreeMap<u64, u64>,
    /// The process of the client that may store: older ones are over.
    life: u64,
    /// Values whose writes the client knows to be complete.
    completed: BTreeSet<u64>,
    counts: BTreeMap<&'static str, u64>,
}

impl Truth {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Executes a request.
    fn execute(&mut self, request: &mut Request) {
        let sectors = request.range.start / SECTOR..request.range.end / SECTOR;
        for sector in sectors {
            let at = (sector * SECTOR - request.range.start) as usize;
            match request.operation {
                Operation::Read => {
                    let value = self.sectors.get(&sector).copied().unwrap_or_default();
                    fill(&mut request.buffer[at..at + SECTOR as usize], value);
                }
                Operation::Write => {
                    let value = value_of(&request.buffer[at..at + SECTOR as usize]);
                    assert!(!self.completed.contains(&value), "{value:#x} is stored after its completion");
                    assert!(value >> 32 >= self.life, "{value:#x} is stored after the session of its client");
                    self.sectors.insert(sector, value);
                }
                Operation::Discard | Operation::WriteZeroes => {
                    self.sectors.insert(sector, 0);
                }
                Operation::Flush => {}
            }
        }
    }
}

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
    play_histories(NAME, BATCH, seed, only, |number, tally| {
        let truth = Mutex::new(Truth::default());
        let outcome = play(mix(seed ^ mix(number)), &truth);
        for (what, count) in &truth.lock().counts {
            tally.fault(what, *count);
        }
        tally.state("history");
        outcome
    })
}

/// What both sides of a history know.
struct Scene<'a> {
    medium: Medium,
    is_coherent: bool,
    shape: ChannelShape,
    areas: Areas,
    truth: &'a Mutex<Truth>,
    /// The client is done.
    is_over: AtomicBool,
    dies_permille: u64,
    /// How soon the device executes a request, and how soon that is reported.
    pace_permille: u64,
    /// Requests out of a thousand that the device refuses.
    refused_permille: u64,
    is_damaged: bool,
    is_hostile: bool,
}

fn play(seed: u64, truth: &Mutex<Truth>) -> Result<(), String> {
    let mut random = Seeded::new(seed);
    let shape = ChannelShape::new(random.between(1, 4) as u32, 4096)
        .unwrap_or_else(|| unreachable!("it is possible"));
    let is_hostile = random.chance(100);
    let scene = Scene {
        medium: Medium::new(2 * shape.bytes()),
        is_coherent: random.chance(300),
        shape,
        areas: Areas { client: 0, server: shape.bytes() },
        truth,
        is_over: AtomicBool::new(false),
        dies_permille: *random.pick(&[0, 300, 700]),
        pace_permille: *random.pick(&[20, 500]),
        refused_permille: *random.pick(&[0, 0, 100]),
        is_damaged: random.chance(200),
        is_hostile,
    };
    let switch_permille = *random.pick(&[5, 20, 100]);
    let (client, server, other) = (random.next(), random.next(), random.next());
    let mut works: Vec<Box<dyn FnOnce() + Send>> =
        vec![Box::new(|| scene.client(client)), Box::new(|| scene.server(server))];
    if scene.is_damaged || is_hostile {
        works.push(Box::new(|| scene.damage(other)));
    }
    for outcome in together(random.next(), switch_permille, works) {
        outcome.map_err(crate::hosts::text_of)?;
    }
    Ok(())
}

/// Ends a history with its first thread, also if that one fails.
struct OverAtEnd<'a>(&'a AtomicBool);

impl Drop for OverAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Scene<'_> {
    fn memory(&self, random: &mut Seeded) -> HostMemory {
        HostMemory::new(&self.medium, self.is_coherent, random.next())
    }

    /// The processes of the host that serves the device.
    fn server(&self, seed: u64) {
        let _over = OverAtEnd(&self.is_over);
        let mut random = Seeded::new(seed);
        while !self.is_over.load(Ordering::Relaxed) {
            let memory = self.memory(&mut random);
            if random.chance(self.dies_permille) {
                memory.die_in(random.below(3000));
            }
            let region = Arc::new(Region::new(memory.clone()));
            let session = random.next();
            let server = Server::open(region, self.areas, self.shape.bytes(), session, GEOMETRY);
            let lives_for = if random.chance(self.dies_permille) { random.below(60) } else { u64::MAX };
            let ended = until_crash(|| self.serve(server, lives_for, &mut random));
            memory.live();
            if ended.is_err() {
                self.truth.lock().count("server_death");
            }
        }
    }

    fn serve(&self, mut server: Server<HostMemory>, lives_for: u64, random: &mut Seeded) {
        let (mut taken, mut executed) = (Vec::new(), Vec::new());
        for _ in 0..lives_for {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            let before = taken.len();
            server.poll(&mut taken).unwrap_or_else(|error| unreachable!("there is memory: {error}"));
            assert!(
                taken.len() + executed.len() <= self.shape.places() as usize,
                "more than there are places"
            );
            for request in &taken[before..] {
                self.check_taken(request);
            }
            if server.state() == ServerState::Settling {
                self.truth.lock().count("settling");
            }
            if !taken.is_empty() && random.chance(self.pace_permille) {
                let request: Request = taken.swap_remove(random.below(taken.len() as u64) as usize);
                executed.push(self.execute(request, random));
            }
            if !executed.is_empty() && random.chance(self.pace_permille) {
                server.complete(executed.swap_remove(random.below(executed.len() as u64) as usize));
            } else {
                baton::must_switch();
            }
        }
        self.truth.lock().count("server_stop");
    }

    /// What a server hands out can be executed, whatever its client has stored.
    fn check_taken(&self, request: &Request) {
        let has_data = matches!(request.operation, Operation::Read | Operation::Write);
        assert!(request.range.end <= SECTORS * SECTOR && request.range.start <= request.range.end);
        assert!(request.range.start.is_multiple_of(SECTOR) && request.range.len().is_multiple_of(SECTOR));
        assert_eq!(request.buffer.len() as u64, if has_data { request.range.len() } else { 0 });
        assert!(!has_data || request.range.len() <= u64::from(self.shape.place_bytes()));
        assert!(request.operation != Operation::Flush || request.range.is_empty());
        assert!(!request.fua || !matches!(request.operation, Operation::Read | Operation::Flush));
    }

    fn execute(&self, mut request: Request, random: &mut Seeded) -> Completion {
        let result = if random.chance(self.refused_permille) {
            Err(Error::new(ErrorKind::Backing, "the device refuses it"))
        } else {
            if !self.is_hostile {
                self.truth.lock().execute(&mut request);
            }
            Ok(())
        };
        Completion { id: request.id, result, buffer: request.buffer }
    }

    /// The processes of the host that uses the device.
    fn client(&self, seed: u64) {
        let _over = OverAtEnd(&self.is_over);
        let mut random = Seeded::new(seed);
        let mut known = Known::default();
        for life in 1..=LIVES {
            let memory = self.memory(&mut random);
            if life < LIVES && random.chance(self.dies_permille) {
                memory.die_in(random.below(3000));
            }
            let region = Arc::new(Region::new(memory.clone()));
            let ended = until_crash(|| {
                let client = Client::open(region, self.areas, self.shape, random.next());
                let client = client.unwrap_or_else(|error| unreachable!("there is memory: {error}"));
                self.use_device(client, life, &mut known, &mut random);
            });
            memory.live();
            if ended.is_err() {
                known.forget();
                self.truth.lock().count("client_death");
            }
        }
    }

    fn use_device(&self, mut client: Client<HostMemory>, life: u64, known: &mut Known, random: &mut Seeded) {
        let mut done = Vec::new();
        let mut flying: BTreeMap<u64, Flying> = BTreeMap::new();
        let (mut idle, mut polls, mut next) = (0, 0, 0);
        while next < REQUESTS || !flying.is_empty() {
            if next < REQUESTS && flying.len() < 6 && random.chance(400) {
                let request = request(life, next, random);
                flying.insert(next, known.submit(&request));
                client.submit(request, &mut done);
                next += 1;
            }
            client.poll(&mut done);
            if client.geometry().is_some() {
                // No process before this one stores any more.
                self.truth.lock().life = life;
            }
            idle = if done.is_empty() { idle + 1 } else { 0 };
            polls += 1;
            if self.is_over.load(Ordering::Relaxed) {
                // The server has failed, which it reports.
                return;
            }
            for completion in done.drain(..) {
                let Some(flying) = flying.remove(&completion.id) else {
                    panic!("completed twice: {}", completion.id)
                };
                self.check(&completion, &flying, known);
            }
            if idle > 0 {
                baton::must_switch();
            }
            // Whole memory needs no nudge, whatever dies.
            if (self.is_damaged || self.is_hostile) && idle % NUDGE == NUDGE - 1 {
                client.nudge();
                self.truth.lock().count("nudge");
            }
            if self.is_hostile && polls > 1000 {
                return;
            }
            assert!(polls < POLLS_MAX, "requests {:?} do not complete", flying.keys());
        }
        assert_eq!(client.in_flight(), 0);
        assert!(
            client.repeated() == 0 || self.is_damaged || self.is_hostile,
            "data was not there before its entry"
        );
        self.truth.lock().count("client_done");
        client.close();
    }

    /// Whether a request may fail, so that it is not known what it has stored.
    const fn is_lenient(&self) -> bool {
        self.is_damaged || self.refused_permille > 0 || self.is_hostile
    }

    fn check(&self, completion: &Completion, flying: &Flying, known: &mut Known) {
        let mut truth = self.truth.lock();
        match &completion.result {
            Ok(()) => {}
            Err(error) => {
                assert!(self.is_lenient(), "{error}");
                return truth.count("error");
            }
        }
        truth.count("completed");
        if self.is_hostile {
            return;
        }
        for (sector, before) in &flying.sectors {
            match flying.operation {
                Operation::Read => {
                    let at = (sector * SECTOR - flying.start) as usize;
                    let value = value_of(&completion.buffer[at..at + SECTOR as usize]);
                    // What this client has submitted before is there, unless it failed.
                    let last = before.last().filter(|last| !last.is_unknown && !self.is_lenient());
                    let possible = last.map_or(&before[..], std::slice::from_ref);
                    let is_possible = possible.iter().any(|one| one.value == value);
                    assert!(is_possible, "sector {sector} has {value:#x} instead of {possible:x?}");
                    known.found(*sector, value, before);
                }
                _ => known.stored(*sector, flying.number),
            }
        }
        if flying.value != 0 {
            truth.completed.insert(flying.value);
        }
    }

    /// Stores random bytes in lines of the channel.
    fn damage(&self, seed: u64) {
        let mut random = Seeded::new(seed);
        let lines = 2 * self.shape.bytes() / 64;
        while !self.is_over.load(Ordering::Relaxed) {
            let memory = self.memory(&mut random);
            // Most lines are those of data, of which few are in use.
            let ring = random.below(self.shape.completions() + 2) * 64 + random.below(2) * self.shape.bytes();
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
                if self.is_over.load(Ordering::Relaxed) {
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

/// A request in flight.
struct Flying {
    operation: Operation,
    start: u64,
    value: u64,
    /// Its number among all requests of a history.
    number: u64,
    /// Its sectors, with what may be in them when it begins.
    sectors: Vec<(u64, Vec<Stored>)>,
}

/// What a request may have stored in a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stored {
    /// The number of the request.
    number: u64,
    value: u64,
    /// Whether its client has died, so that it is not known whether it was executed.
    is_unknown: bool,
}

/// What may be in each sector once all requests that were submitted are complete, in the order of submission.
#[derive(Default)]
struct Known {
    sectors: BTreeMap<u64, Vec<Stored>>,
    requests: u64,
}

impl Known {
    fn of(&mut self, sector: u64) -> &mut Vec<Stored> {
        let blank = Stored { number: 0, value: 0, is_unknown: false };
        self.sectors.entry(sector).or_insert_with(|| vec![blank])
    }

    /// The client has died.
    fn forget(&mut self) {
        self.sectors.values_mut().flatten().for_each(|stored| stored.is_unknown = true);
    }

    fn submit(&mut self, request: &Request) -> Flying {
        let is_write = request.operation == Operation::Write;
        let value = if is_write { value_of(&request.buffer[..SECTOR as usize]) } else { 0 };
        let changes = !matches!(request.operation, Operation::Read | Operation::Flush);
        self.requests += 1;
        let number = self.requests;
        let sectors = (request.range.start / SECTOR..request.range.end / SECTOR).map(|sector| {
            let values = self.of(sector);
            let before = values.clone();
            if changes {
                values.push(Stored { number, value, is_unknown: false });
            }
            (sector, before)
        });
        let sectors = sectors.collect();
        Flying { operation: request.operation, start: request.range.start, value, number, sectors }
    }

    /// A change is complete: what was there before is gone.
    fn stored(&mut self, sector: u64, number: u64) {
        self.of(sector).retain(|one| one.number >= number);
    }

    /// A read has found a value: of what could be there before it, the others are not.
    fn found(&mut self, sector: u64, value: u64, before: &[Stored]) {
        self.of(sector)
            .retain(|one| one.value == value || !before.iter().any(|other| other.number == one.number));
    }
}

fn request(life: u64, number: u64, random: &mut Seeded) -> Request {
    let operation = match random.below(10) {
        0..4 => Operation::Write,
        4..8 => Operation::Read,
        8 => *random.pick(&[Operation::Discard, Operation::WriteZeroes]),
        _ => Operation::Flush,
    };
    let length = if random.chance(100) { random.between(9, SECTORS) } else { random.between(1, 3) };
    let first = random.below(SECTORS - length + 1).min(if random.chance(700) { 4 } else { SECTORS });
    let range = if operation == Operation::Flush {
        ByteRange::at(0, 0)
    } else {
        ByteRange::at(first * SECTOR, length * SECTOR)
    };
    let mut buffer = AlignedBuffer::default();
    if matches!(operation, Operation::Read | Operation::Write) {
        buffer = AlignedBuffer::zeroed(range.len() as usize);
    }
    if operation == Operation::Write {
        fill(&mut buffer, life << 32 | (number + 1));
    }
    Request::unmarked(number, operation, range, random.chance(100), buffer)
}
