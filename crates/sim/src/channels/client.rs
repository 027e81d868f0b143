//! The processes of a host that uses the device, one after the other.

use super::known::{Flying, Known};
use super::{OverAtEnd, SECTOR, SECTORS, Scene, fill, truth, value_of};
use crate::baton;
use crate::crash::until_crash;
use crate::hosts::HostMemory;
use crate::random::Seeded;
use cbd_channel::Client;
use cbd_types::{
    AlignedBuffer, ByteRange, CHECKSUM_BLOCK, Completion, ErrorKind, Operation, Region, Request,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Processes of a client, one after the other.
const LIVES: u64 = 3;
/// Requests of one process.
const REQUESTS: u64 = 12;
/// Polls of one process after which a history has hung.
const POLLS_MAX: u64 = 20_000;
/// Polls without progress after which a client nudges.
const NUDGE: u64 = 150;

impl Scene<'_> {
    pub(super) fn client(&self, number: usize, seed: u64) {
        let _over = OverAtEnd(self, 1);
        let mut random = Seeded::new(seed);
        let mut known = Known::default();
        for life in 1..=LIVES {
            let memory = self.memory(&mut random);
            if life < LIVES && random.chance(self.dies_permille) {
                memory.die_in(random.below(3000));
            }
            let region = Arc::new(Region::new(memory.clone()));
            let ended = until_crash(|| {
                let client = Client::open(region, self.channels[number], self.shape, random.next());
                let client = client.unwrap_or_else(|error| unreachable!("there is memory: {error}"));
                Using { scene: self, number, life, known: &mut known }.run(client, &mut random);
            });
            memory.live();
            if ended.is_err() {
                known.forget();
                self.truth.lock().count("client_death");
            }
        }
    }

    /// Whether a request may fail, so that it is not known what it has stored.
    const fn is_lenient(&self) -> bool {
        self.is_damaged || self.refused_permille > 0 || self.is_hostile || self.gives_up_permille > 0
    }

    fn has_others(&self) -> bool {
        self.channels.len() > 1
    }
}

/// One process.
struct Using<'a> {
    scene: &'a Scene<'a>,
    number: usize,
    life: u64,
    known: &'a mut Known,
}

impl Using<'_> {
    fn run(&mut self, mut client: Client<HostMemory>, random: &mut Seeded) {
        let scene = self.scene;
        let mut done = Vec::new();
        let mut flying: BTreeMap<u64, (Flying, u64)> = BTreeMap::new();
        let (mut idle, mut polls, mut next) = (0, 0, 0);
        while next < REQUESTS || !flying.is_empty() {
            if next < REQUESTS && flying.len() < 6 && random.chance(400) {
                let request = self.request(next, random);
                flying.insert(next, self.begin(&request));
                client.submit(request, &mut done);
                next += 1;
            }
            client.poll(&mut done);
            self.take_back(&mut client, &mut done, random);
            if client.geometry().is_some() {
                scene.truth.lock().lives(self.number, self.life);
            }
            idle = if done.is_empty() { idle + 1 } else { 0 };
            polls += 1;
            if scene.is_over() {
                // Another side has failed, which it reports.
                return;
            }
            for completion in done.drain(..) {
                let Some((flying, begin)) = flying.remove(&completion.id) else {
                    panic!("completed twice: {}", completion.id)
                };
                self.check(&completion, &flying, begin);
            }
            if idle > 0 {
                baton::must_switch();
            }
            // Whole memory needs no nudge, whatever dies.
            let is_due = !scene.is_exact() && idle % NUDGE == NUDGE - 1;
            if is_due || random.chance(scene.nudges_permille) {
                client.nudge();
                scene.truth.lock().count("nudge");
            }
            if scene.is_hostile && polls > 1000 {
                return;
            }
            assert!(polls < POLLS_MAX, "requests {:?} do not complete", flying.keys());
        }
        assert_eq!(client.in_flight(), 0);
        assert!(client.repeated() == 0 || !scene.is_exact(), "data was not there before its entry");
        scene.truth.lock().count("client_done");
        client.close();
    }

    /// Asks for requests of which nothing was done yet, and gives some up.
    fn take_back(&self, client: &mut Client<HostMemory>, done: &mut Vec<Completion>, random: &mut Seeded) {
        if random.chance(self.scene.recalls_permille) {
            client.recall();
        }
        if random.chance(self.scene.gives_up_permille) {
            let remainder = random.below(3);
            client.give_up(|id| id % 3 == remainder, done);
        }
    }

    fn request(&self, number: u64, random: &mut Seeded) -> Request {
        let operation = match random.below(10) {
            0..4 => Operation::Write,
            4..8 => Operation::Read,
            // Each value of several clients is written once.
            8 if self.scene.has_others() => Operation::Write,
            8 => *random.pick(&[Operation::Discard, Operation::WriteZeroes]),
            _ => Operation::Flush,
        };
        let length = if random.chance(100) { random.between(9, SECTORS) } else { random.between(1, 3) };
        let first = random.below(SECTORS - length + 1).min(if random.chance(700) { 4 } else { SECTORS });
        let range = if operation == Operation::Flush {
            ByteRange::at(0, 0)
        } else if random.chance(100) {
            // A whole block: the device compares its data with the checksum.
            ByteRange::at(random.below(SECTORS * SECTOR / CHECKSUM_BLOCK) * CHECKSUM_BLOCK, CHECKSUM_BLOCK)
        } else {
            ByteRange::at(first * SECTOR, length * SECTOR)
        };
        let mut buffer = AlignedBuffer::default();
        if matches!(operation, Operation::Read | Operation::Write) {
            buffer = AlignedBuffer::zeroed(range.len() as usize);
        }
        if operation == Operation::Write {
            fill(&mut buffer, truth::value(self.number, self.life, number));
        }
        Request::unmarked(number, operation, range, random.chance(100), buffer)
    }

    /// What is known of a request before it is submitted, and the moment.
    fn begin(&mut self, request: &Request) -> (Flying, u64) {
        let flying = self.known.submit(request);
        let mut truth = self.scene.truth.lock();
        let begin = truth.moment();
        if self.scene.has_others() && flying.operation == Operation::Write {
            for (sector, _) in &flying.sectors {
                truth.order.write_begins(*sector, flying.value, begin);
            }
        }
        (flying, begin)
    }

    fn check(&mut self, completion: &Completion, flying: &Flying, begin: u64) {
        let scene = self.scene;
        let mut truth = scene.truth.lock();
        match &completion.result {
            Ok(()) => {}
            Err(error) => {
                assert!(scene.is_lenient(), "{error}");
                if error.kind() == ErrorKind::Stopped && scene.is_exact() && flying.value != 0 {
                    truth.count("given_up");
                    // It is not executed any more.
                    truth.completed(flying.value);
                }
                return truth.count("error");
            }
        }
        truth.count("completed");
        if scene.is_hostile {
            return;
        }
        let end = truth.moment();
        for (sector, before) in &flying.sectors {
            let read = || {
                let at = (sector * SECTOR - flying.start) as usize;
                value_of(&completion.buffer[at..at + SECTOR as usize])
            };
            match flying.operation {
                Operation::Read if scene.has_others() => {
                    truth.order.read(*sector, read(), begin, end);
                }
                Operation::Read => {
                    let value = read();
                    // What this client has submitted before is there, unless it failed.
                    let last = before.last().filter(|last| !last.is_unknown && !scene.is_lenient());
                    let possible = last.map_or(&before[..], std::slice::from_ref);
                    let is_possible = possible.iter().any(|one| one.value == value);
                    assert!(is_possible, "sector {sector} has {value:#x} instead of {possible:x?}");
                    self.known.found(*sector, value, before);
                }
                Operation::Write if scene.has_others() => {
                    truth.order.write_ends(*sector, flying.value, end);
                }
                _ => self.known.stored(*sector, flying.number),
            }
        }
        if flying.value != 0 {
            truth.completed(flying.value);
        }
    }
}
