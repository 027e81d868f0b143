//! Clients that disconnect with requests in flight and reconnect, over full caches and over disks without a
//! cache.
//!
//! Requests of an ended connection that were not answered may have taken effect or not, and may still take effect
//! until the server has closed the connection. The outcome becomes final when the server answers the first request of
//! a new connection: for each connection that was closed when that request arrived, a change that is not visible then
//! never appears.
//!
//! Invariants: a seed decides every step of a history, crashes included.
//!
//! Elsewhere: the server side of connections (`server`).

mod server;

use crate::crash::until_crash;
use crate::disk::SimDisk;
use crate::environment::SimEnvironment;
use crate::explorer::{Tally, play_histories, quietly};
use crate::memory::{CrashMemory, Keep};
use crate::oracle::{Moment, OpenChange, Oracle};
use crate::pattern::Content;
use crate::random::{Seeded, mix};
use crate::workload::{Mix, Wish, Workload};
use crate::world::{WorldOptions, make_cache, region_size};
use cbd_engine::Consistency;
use cbd_types::{
    AlignedBuffer, BackendId, BackingGeometry, ByteRange, CHUNK, Completion, Operation, Request,
};
use server::{Event, Server, Stage};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The name of this kind of world.
pub const NAME: &str = "reconnect";

/// Histories of one seed.
const BATCH: u64 = 50;
/// Number of clients.
const USERS: usize = 2;
/// Maximum number of requests in flight.
const IN_FLIGHT_MAX: usize = 8;
/// Turns without progress after which the world counts as stuck.
const STUCK: u32 = 2000;
const SECTOR: u32 = 512;
const SEGMENT: u64 = 64 << 10;
const SIZE: u64 = CHUNK + (64 << 10);

/// Large changes, so that a small cache fills at once, and requests of several pieces.
const MIX: Mix = Mix {
    write: 60,
    read: 20,
    flush: 6,
    discard: 5,
    write_zeroes: 9,
    fua_permille: 100,
    large_permille: 250,
};

/// Plays the histories of one seed; with `only`, only the one with that number.
#[must_use]
pub fn explore(seed: u64, only: Option<u64>) -> Tally {
    play_histories(NAME, BATCH, seed, only, |number, tally| {
        let mut seen = Seen::default();
        let outcome = quietly(|| World::new(mix(seed ^ mix(number))).play(&mut seen));
        seen.count(tally);
        outcome
    })
}

/// Counts of the events in a history.
#[derive(Default)]
struct Seen {
    closed: u64,
    closed_with_requests: u64,
    closed_with_unread: u64,
    waited: u64,
    happened: u64,
    given_up: u64,
    process_crashes: u64,
    power_cuts: u64,
}

impl Seen {
    fn count(&self, tally: &mut Tally) {
        for (name, count) in [
            ("connection_closed", self.closed),
            ("connection_closed_with_requests_in_flight", self.closed_with_requests),
            ("connection_closed_with_requests_unread", self.closed_with_unread),
            ("new_client_waited", self.waited),
            ("change_of_ended_connection_happened", self.happened),
            ("change_of_ended_connection_given_up", self.given_up),
            ("process_crash", self.process_crashes),
            ("power_cut", self.power_cuts),
        ] {
            tally.fault(name, count);
        }
    }
}

/// A request whose client waits for its answer.
struct PendingRequest {
    connection: u64,
    wish: Wish,
    submitted: Moment,
    change: Option<OpenChange>,
}

struct World {
    random: Seeded,
    /// None without a cache.
    memory: Option<(CrashMemory, BackendId)>,
    disk: SimDisk,
    environment: Arc<SimEnvironment>,
    oracle: Oracle,
    workload: Workload,
    server: Option<Server>,
    /// The connection of each client, if it has one.
    users: [Option<u64>; USERS],
    asked: BTreeMap<u64, PendingRequest>,
    next_id: u64,
    /// Unanswered changes of closed connections, by connection.
    abandoned: Vec<(u64, OpenChange)>,
    /// For each connection, the connections that were closed when its first request arrived.
    former: BTreeMap<u64, BTreeSet<u64>>,
    /// Connections with a client that waits and gets no reply.
    waits: BTreeSet<u64>,
    maintenance_permille: u64,
    crash_permille: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Seeded::new(seed);
        let is_cached = random.chance(700);
        let consistency = *random.pick(&Consistency::ALL);
        let options = WorldOptions {
            size: SIZE,
            sector: SECTOR,
            segment_size: SEGMENT,
            segments: 9,
            lanes_max: 1,
            ..WorldOptions::small(seed, consistency)
        };
        // Without a cache, a power cut would lose unflushed data, so an acknowledged change could be missing.
        let geometry = BackingGeometry { volatile_cache: is_cached, ..SimDisk::ordinary(SIZE, SECTOR) };
        let disk = SimDisk::new(geometry, random.next());
        disk.set_latency(*random.pick(&[2, 6, 20]));
        let environment = Arc::new(SimEnvironment::new(random.next(), 0));
        let memory = is_cached.then(|| {
            let memory = CrashMemory::new(region_size(&options));
            match make_cache(&options, &environment, &memory) {
                Ok((backend, _)) => (memory, backend),
                Err(error) => panic!("the engine makes no cache: {error}"),
            }
        });
        let atomic_unit = if is_cached { SEGMENT / 4 } else { u64::from(SECTOR) };
        let mut world = Self {
            oracle: Oracle::new(SIZE, SECTOR, atomic_unit),
            workload: Workload::new(SIZE, SECTOR, SEGMENT / 4, MIX),
            memory,
            disk,
            environment,
            server: None,
            users: [None; USERS],
            asked: BTreeMap::new(),
            next_id: 0,
            abandoned: Vec::new(),
            former: BTreeMap::new(),
            waits: BTreeSet::new(),
            maintenance_permille: *random.pick(&[20, 60, 150]),
            crash_permille: *random.pick(&[0, 3, 15]),
            random,
        };
        world.open();
        world
    }

    fn server(&mut self) -> &mut Server {
        match &mut self.server {
            Some(server) => server,
            None => unreachable!("a world has a server but while it recovers"),
        }
    }

    fn open(&mut self) {
        let cache = self.memory.as_ref().map(|(memory, backend)| (memory, *backend));
        match Server::open(&self.environment, cache, &self.disk) {
            Ok(server) => self.server = Some(server),
            Err(error) => panic!("the cache does not open: {error}"),
        }
    }

    fn play(mut self, seen: &mut Seen) {
        for _ in 0..self.random.between(40, 160) {
            if let Some((memory, _)) = &self.memory
                && self.random.chance(self.crash_permille)
            {
                memory.crash_after(self.random.between(1, 60), self.random.next());
            }
            let crashes = self.memory.is_none() && self.random.chance(self.crash_permille);
            if until_crash(|| self.turn(seen)).is_err() || crashes {
                self.crash(seen);
            }
        }
        if let Some((memory, _)) = &self.memory {
            memory.never_crash();
        }
        self.quiesce(seen);
        for range in self.oracle.changed(32 << 10) {
            let submitted = self.oracle.now();
            let bytes = self.read_now(range);
            self.oracle
                .check_read(range, submitted, &bytes)
                .unwrap_or_else(|violation| panic!("{violation}"));
        }
    }

    fn turn(&mut self, seen: &mut Seen) {
        if self.random.chance(self.maintenance_permille) {
            self.server().maintain();
        }
        match self.random.below(100) {
            0..40 => self.ask(),
            40..90 => {
                self.step(seen);
            }
            90..97 => self.disconnect(seen),
            _ => self.environment.advance(self.random.between(1, 300)),
        }
    }

    /// A client sends some requests; it connects first if it has no connection.
    fn ask(&mut self) {
        let user = self.random.below(USERS as u64) as usize;
        let connection = match self.users[user] {
            Some(connection) => connection,
            None => {
                let connection = self.server().connect();
                self.users[user] = Some(connection);
                connection
            }
        };
        for _ in 0..self.random.between(1, 4) {
            let wish = self.workload.next(&mut self.random);
            if let Some(request) = self.request(wish, connection)
                && let Some(connection) = self.server().connection(connection)
            {
                connection.unread.push_back(request);
            }
        }
    }

    fn request(&mut self, wish: Wish, connection: u64) -> Option<Request> {
        let changes = !matches!(wish.operation, Operation::Read | Operation::Flush);
        let discards = wish.operation == Operation::Discard;
        if self.asked.len() >= IN_FLIGHT_MAX
            || (changes && self.oracle.overlaps_open(wish.range))
            || (discards && !self.disk.geometry().discard_zeroes)
        {
            return None;
        }
        let mut buffer = AlignedBuffer::default();
        let mut change = None;
        match wish.operation {
            Operation::Write => {
                let content = self.oracle.fresh_content();
                buffer = AlignedBuffer::from_slice(&self.oracle.payload(wish.range, content));
                change = Some(self.oracle.submit(wish.range, content));
            }
            Operation::Discard | Operation::WriteZeroes => {
                change = Some(self.oracle.submit(wish.range, Content::ZEROES));
            }
            Operation::Read => buffer = AlignedBuffer::zeroed(wish.range.len() as usize),
            Operation::Flush => {}
        }
        let submitted = self.oracle.now();
        let id = self.next_id;
        self.next_id += 1;
        self.asked.insert(id, PendingRequest { connection, wish, submitted, change });
        Some(Request::unmarked(id, wish.operation, wish.range, wish.fua, buffer))
    }

    /// A client closes its connection, with unanswered requests if it has any.
    fn disconnect(&mut self, seen: &mut Seen) {
        let user = self.random.below(USERS as u64) as usize;
        let Some(number) = self.users[user].take() else { return };
        let in_order = self.random.chance(300);
        if let Some(connection) = self.server().connection(number) {
            connection.close(in_order);
            seen.closed += 1;
            seen.closed_with_requests += u64::from(connection.parked() > 0);
            seen.closed_with_unread += u64::from(!connection.unread.is_empty());
        }
        let abandoned = &mut self.abandoned;
        self.asked.retain(|_, asked| {
            if asked.connection == number {
                abandoned.extend(asked.change.map(|change| (number, change)));
            }
            asked.connection != number
        });
    }

    /// The thread of a random connection continues.
    fn step(&mut self, seen: &mut Seen) -> bool {
        let count = self.server().connections.len() as u64;
        if count == 0 {
            return false;
        }
        let index = self.random.below(count) as usize;
        let (most, notices) = (self.random.between(1, 4) as usize, self.random.chance(300));
        let number = self.server().connections[index].number;
        match self.server().step(index, most, notices) {
            None => {
                if self
                    .server()
                    .connection(number)
                    .is_some_and(|connection| connection.stage == Stage::Waiting)
                {
                    seen.waited += u64::from(self.waits.insert(number));
                }
                return false;
            }
            Some(Event::Begun) => {
                let closed = self.server().closed().filter(|&other| other != number).collect();
                self.former.insert(number, closed);
            }
            Some(Event::Admitted) => self.fix_outcomes(number, seen),
            Some(Event::Answers(answers)) => self.deliver(answers),
            Some(Event::Over) => {}
        }
        true
    }

    /// The server begins to execute the first request of a connection: the changes of former connections that its
    /// client observes are final.
    fn fix_outcomes(&mut self, connection: u64, seen: &mut Seen) {
        let former = self.former.remove(&connection).unwrap_or_default();
        // The server has also dropped connections that were closed before.
        let is_fixed = |number: u64, server: &mut Server| {
            former.contains(&number) || server.connection(number).is_none()
        };
        let (mut fixed, mut open) = (Vec::new(), Vec::new());
        for (number, change) in std::mem::take(&mut self.abandoned) {
            let is_fixed = is_fixed(number, self.server());
            if is_fixed { fixed.push(change) } else { open.push((number, change)) }
        }
        self.abandoned = open;
        let ranges: Vec<ByteRange> =
            fixed.iter().filter_map(|change| self.oracle.range_of(*change)).collect();
        let found: Vec<(ByteRange, Vec<u8>)> =
            ranges.into_iter().map(|range| (range, self.read_now(range))).collect();
        let happened = self.oracle.decide(&fixed, |range| {
            found
                .iter()
                .find(|(known, _)| *known == range)
                .map(|(_, bytes)| bytes.clone())
                .unwrap_or_default()
        });
        match happened {
            Ok(happened) => {
                seen.happened += happened;
                seen.given_up += fixed.len() as u64 - happened;
            }
            Err(violation) => panic!("a former connection's: {violation}"),
        }
    }

    /// A client receives answers.
    fn deliver(&mut self, answers: Vec<Completion>) {
        for Completion { id, result, buffer } in answers {
            let Some(asked) = self.asked.remove(&id) else {
                panic!("request {id} was answered twice, or was never asked for");
            };
            if let Err(error) = result {
                panic!("{:?} failed: {error}", asked.wish);
            }
            match asked.wish.operation {
                Operation::Read => {
                    let verdict = self.oracle.check_read(asked.wish.range, asked.submitted, &buffer);
                    verdict.unwrap_or_else(|violation| panic!("{violation}"));
                }
                Operation::Flush => self.oracle.flushed(asked.submitted),
                Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                    asked.change.into_iter().for_each(|change| self.oracle.complete(change, asked.wish.fua));
                }
            }
        }
    }

    /// Reads `range` on a separate queue, while no connection is stepped.
    fn read_now(&mut self, range: ByteRange) -> Vec<u8> {
        let mut queue = self.server().queue();
        let (id, operation, mut done) = (0, Operation::Read, Vec::new());
        let buffer = AlignedBuffer::zeroed(range.len() as usize);
        queue.queue.submit(Request::unmarked(id, operation, range, false, buffer), &mut done);
        for _ in 0..STUCK {
            if let Some(Completion { result, buffer, .. }) = done.pop() {
                return result.map_or_else(|error| panic!("reading {range}: {error}"), |()| buffer.to_vec());
            }
            self.server().poll(&mut queue, &mut done);
        }
        panic!("reading {range} does not end")
    }

    /// Continues until every request is answered and all closed connections are gone.
    fn quiesce(&mut self, seen: &mut Seen) {
        let mut idle = 0_u32;
        loop {
            let is_winding_up = self.server().closed().next().is_some();
            if self.asked.is_empty() && !is_winding_up {
                return;
            }
            let went_on = self.step(seen) | self.server().maintain();
            idle = if went_on { 0 } else { idle + 1 };
            if idle.is_multiple_of(20)
                && idle > 0
                && let Some(until) = self.server().sleeps_until()
            {
                let now = self.environment.clock_ms();
                self.environment.advance(until.saturating_sub(now).max(1));
            }
            assert!(idle < STUCK, "all threads wait and none will be woken");
        }
    }

    /// The process dies or the power fails, and all connections end; the next process starts.
    fn crash(&mut self, seen: &mut Seen) {
        let is_power_cut = self.memory.is_some() && self.random.chance(500);
        let seed = self.random.next();
        match &mut self.memory {
            Some((memory, _)) if is_power_cut => *memory = memory.power_cut(seed, Keep::Any),
            Some((memory, _)) => *memory = memory.process_crash(),
            None => {}
        }
        if is_power_cut {
            seen.power_cuts += 1;
            self.disk.power_cut(self.random.next());
        } else {
            seen.process_crashes += 1;
            self.disk.process_crash(seed);
        }
        self.server = None;
        self.users = [None; USERS];
        self.asked.clear();
        self.abandoned.clear();
        self.former.clear();
        self.waits.clear();
        self.environment = Arc::new(SimEnvironment::new(self.random.next(), self.environment.clock_ms()));
        self.open();
        let mut oracle = std::mem::replace(&mut self.oracle, Oracle::new(0, SECTOR, 0));
        let verdict = oracle.settle(|range| self.read_now(range));
        self.oracle = oracle;
        verdict.unwrap_or_else(|violation| panic!("after a crash: {violation}"));
    }
}
