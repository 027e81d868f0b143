//! The processes of the host that serves the device, with one channel for each client.
//!
//! A service does the same (`cbd-remote`, `shared.rs`): changes that a former process has left are executed first, and others wait for
//! them; what overlaps waits until the completion of the earlier one is stored.

use super::truth::Execution;
use super::{GEOMETRY, OverAtEnd, SECTOR, SECTORS, Scene, changes, value_of};
use crate::baton;
use crate::crash::until_crash;
use crate::hosts::HostMemory;
use crate::random::Seeded;
use cbd_channel::{Exclusion, Server, ServerState};
use cbd_format::crc32c;
use cbd_types::{ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Region, Request};
use std::sync::Arc;

/// A request that a server has handed out.
struct Taken {
    channel: usize,
    ticket: u64,
    /// It is a change that was outstanding when a former process ended.
    is_former: bool,
    request: Request,
}

/// A request that the device has executed, with what it has stored.
struct Executed {
    channel: usize,
    ticket: u64,
    stored: Option<(ByteRange, u64)>,
    completion: Completion,
}

/// One process.
struct Serving<'a> {
    scene: &'a Scene<'a>,
    servers: Vec<Server<HostMemory>>,
    exclusion: Exclusion,
    tickets: u64,
    /// What has not begun.
    held: Vec<Taken>,
    /// What waits for a request that it overlaps.
    waiting: Vec<Taken>,
    ready: Vec<Taken>,
    executed: Vec<Executed>,
}

impl Scene<'_> {
    pub(super) fn server(&self, seed: u64) {
        let _over = OverAtEnd(self, 0);
        let mut random = Seeded::new(seed);
        while !self.is_over() {
            let memory = self.memory(&mut random);
            if random.chance(self.dies_permille) {
                let within = *random.pick(&[50, 500, 3000]);
                memory.die_in(random.below(within));
            }
            let lives_for = if random.chance(self.dies_permille) { random.below(60) } else { u64::MAX };
            let ended = until_crash(|| self.open_servers(&memory, &mut random).serve(lives_for, &mut random));
            memory.live();
            if ended.is_err() {
                self.truth.lock().count("server_death");
            }
            self.truth.lock().server_ends();
        }
    }

    fn open_servers(&self, memory: &HostMemory, random: &mut Seeded) -> Serving<'_> {
        let region = Arc::new(Region::new(memory.clone()));
        let geometry = Geometry { size: (SECTORS + random.below(2)) * SECTOR, ..GEOMETRY };
        let open =
            |areas| Server::open(Arc::clone(&region), areas, self.shape.bytes(), random.next(), geometry);
        Serving {
            scene: self,
            servers: self.channels.iter().copied().map(open).collect(),
            exclusion: Exclusion::default(),
            tickets: 0,
            held: Vec::new(),
            waiting: Vec::new(),
            ready: Vec::new(),
            executed: Vec::new(),
        }
    }

    /// What a server hands out can be executed, whatever its client has stored.
    fn check_taken(&self, request: &Request) {
        let has_data = matches!(request.operation, Operation::Read | Operation::Write);
        assert!(request.range.end <= (SECTORS + 1) * SECTOR && request.range.start <= request.range.end);
        assert!(request.range.start.is_multiple_of(SECTOR) && request.range.len().is_multiple_of(SECTOR));
        assert_eq!(request.buffer.len() as u64, if has_data { request.range.len() } else { 0 });
        assert!(!has_data || request.range.len() <= u64::from(self.shape.place_bytes()));
        assert!(request.operation != Operation::Flush || request.range.is_empty());
        assert!(!request.fua || !matches!(request.operation, Operation::Read | Operation::Flush));
    }
}

impl Serving<'_> {
    fn serve(mut self, lives_for: u64, random: &mut Seeded) {
        for _ in 0..lives_for {
            if self.scene.is_over() {
                return;
            }
            self.poll();
            (0..self.servers.len()).for_each(|channel| self.send_back(channel));
            self.begin();
            if !self.ready.is_empty() && random.chance(self.scene.pace_permille) {
                let last = self.ready.len() as u64 - 1;
                let next = if self.scene.is_last_first { last } else { random.below(last + 1) };
                let taken = self.ready.remove(next as usize);
                self.execute(taken, random);
            }
            if !self.executed.is_empty() && random.chance(self.scene.pace_permille) {
                let executed = self.executed.swap_remove(random.below(self.executed.len() as u64) as usize);
                self.complete(executed);
            } else {
                baton::must_switch();
            }
        }
        self.scene.truth.lock().count("server_stop");
    }

    fn poll(&mut self) {
        for (channel, server) in self.servers.iter_mut().enumerate() {
            let mut requests = Vec::new();
            server.poll(&mut requests).unwrap_or_else(|error| unreachable!("there is memory: {error}"));
            let places = self.scene.shape.places() as usize;
            assert!(server.in_flight() <= places, "more than there are places");
            if server.state() == ServerState::Settling {
                self.scene.truth.lock().count("settling");
            }
            for request in requests {
                self.scene.check_taken(&request);
                let is_former = server.is_former(request.id) && changes(request.operation);
                self.tickets += 1;
                self.held.push(Taken { channel, ticket: self.tickets, is_former, request });
            }
        }
    }

    /// Sends back what a client asks for.
    fn send_back(&mut self, channel: usize) {
        if !self.servers[channel].take_recall() {
            return;
        }
        let is_of = |taken: &mut Taken| taken.channel == channel;
        let held = self.held.extract_if(.., is_of).map(|taken| (taken, false));
        let admitted = self.waiting.extract_if(.., is_of).chain(self.ready.extract_if(.., is_of));
        let returned: Vec<_> = held.chain(admitted.map(|taken| (taken, true))).collect();
        for (taken, is_admitted) in returned {
            self.scene.truth.lock().count("returned");
            self.servers[channel].send_back(taken.request);
            if is_admitted {
                self.end(taken.ticket);
            }
        }
    }

    fn begin(&mut self) {
        let is_settled = self.servers.iter().all(Server::is_settled);
        let mut truth = self.scene.truth.lock();
        for taken in std::mem::take(&mut self.held) {
            let (range, changes) = (taken.request.range, changes(taken.request.operation));
            if taken.is_former {
                truth.count("former");
            } else if !is_settled && taken.request.operation != Operation::Flush {
                truth.count("held");
                self.held.push(taken);
                continue;
            }
            let begun = self.exclusion.begin(taken.ticket, range, changes);
            if begun.unwrap_or_else(|error| unreachable!("there is memory: {error}")) {
                self.ready.push(taken);
            } else {
                truth.count("excluded");
                self.waiting.push(taken);
            }
        }
    }

    fn execute(&mut self, taken: Taken, random: &mut Seeded) {
        let Taken { channel, ticket, is_former, mut request } = taken;
        let mut stored = None;
        let result = if let Err(error) = request.check_data(crc32c) {
            self.scene.truth.lock().count("other_data");
            Err(error)
        } else if random.chance(self.scene.refused_permille) {
            Err(Error::new(ErrorKind::Backing, "the device refuses it"))
        } else {
            if !self.scene.is_hostile {
                let how = Execution { is_former, is_exact: self.scene.is_exact() };
                self.scene.truth.lock().execute(&mut request, how);
                let is_write = request.operation == Operation::Write;
                stored = is_write.then(|| (request.range, value_of(&request.buffer[..SECTOR as usize])));
            }
            Ok(())
        };
        let completion = Completion { id: request.id, result, buffer: request.buffer };
        self.executed.push(Executed { channel, ticket, stored, completion });
    }

    fn complete(&mut self, executed: Executed) {
        self.servers[executed.channel].complete(executed.completion);
        self.scene.truth.lock().completes(executed.stored, self.scene.is_coherent);
        self.end(executed.ticket);
    }

    /// A request excludes others no longer.
    fn end(&mut self, ticket: u64) {
        let Self { exclusion, waiting, ready, .. } = self;
        exclusion.end(ticket, |ticket| {
            let place = waiting.iter().position(|taken| taken.ticket == ticket);
            ready.extend(place.map(|place| waiting.swap_remove(place)));
        });
    }
}
