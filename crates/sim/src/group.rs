//! Two caches on one region with a common moment: two disks alone, without the region, show one cut of what clients did.
//!
//! Clients write to both disks, one write after the other, as threads that are switched at every lock and every number that
//! they share. Each write is part of a history with the times of its submission and its completion. At random moments a
//! command closes the epochs of both caches together, waits until both disks are at the moment, and holds them there. From then
//! until the end of the hold the two disks are compared with the history, with a power cut at each round and after crashes.
//!
//! Invariants:
//! - a seed decides every step of a history, crashes included;
//! - what a disk shows is a prefix of the writes to each of its slots; a slot has one writer at a time, so the order is known.
//!
//! Elsewhere: the oracle (`history`).

mod history;

use crate::actor::act_as;
use crate::baton::{switch_with, together};
use crate::crash::{CrashNow, crash_now, until_crash};
use crate::disk::SimDisk;
use crate::environment::SimEnvironment;
use crate::explorer::{Tally, play_histories, quietly};
use crate::memory::{CrashMemory, Keep};
use crate::process::SimWorker;
use crate::random::{Seeded, mix};
use cbd_engine::{
    Admission, BackendSpec, Cache, CommonMoment, Consistency, Environment, FormatOptions, Settings,
    Transport, ZeroProgress,
};
use cbd_types::{BackendId, BackingGeometry, Epoch, ErrorKind, Region, Result};
use history::{DISKS, History, Slot};
use parking_lot::Mutex;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::task::Waker;

/// The name of this kind of world.
pub const NAME: &str = "group";

/// Histories of one seed.
const BATCH: u64 = 20;
/// Number of clients.
const USERS: usize = 3;
const SEGMENT: u64 = 64 << 10;
/// Segments of each cache.
const SEGMENTS: u64 = 9;
/// Rounds of a history.
const ROUNDS: u64 = 120;
/// The actor of the command.
const COMMAND: u32 = 2000;
/// Steps after which caches must have been drained.
const STEPS_MAX: u32 = 20_000;
/// Milliseconds for which a moment is held: longer than a history lasts.
const HOLD_MS: u64 = 3_600_000;

/// The command whose result is checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// One common moment of both caches.
    Together,
    /// A drain of one cache and then of the other: the control, with which the disks have no common moment.
    OneByOne,
}

/// Plays the histories of one seed; with `only`, only the one with that number.
#[must_use]
pub fn explore(seed: u64, only: Option<u64>) -> Tally {
    explore_with(Command::Together, seed, only)
}

/// As [`explore`], with another command.
#[must_use]
pub fn explore_with(command: Command, seed: u64, only: Option<u64>) -> Tally {
    play_histories(NAME, BATCH, seed, only, |number, tally| {
        let mut seen = Seen::default();
        let outcome = quietly(|| World::new(command, mix(seed ^ mix(number))).play(&mut seen));
        seen.count(tally);
        outcome
    })
}

/// Counts of the events in a history.
#[derive(Default)]
struct Seen {
    commands: u64,
    held: u64,
    checks: u64,
    writes_while_held: u64,
    full_while_held: u64,
    crashes_while_closing: u64,
    crashes_while_held: u64,
    crashes: u64,
    power_cuts: u64,
}

impl Seen {
    fn count(&self, tally: &mut Tally) {
        for _ in 0..self.checks {
            tally.state("common_moment");
        }
        for (name, count) in [
            ("common_moment_requested", self.commands),
            ("common_moment_held", self.held),
            ("write_while_held", self.writes_while_held),
            ("full_while_held", self.full_while_held),
            ("crash_while_closing", self.crashes_while_closing),
            ("crash_while_held", self.crashes_while_held),
            ("crash", self.crashes),
            ("power_cut", self.power_cuts),
        ] {
            tally.fault(name, count);
        }
    }
}

type SimCache = Arc<Cache<SimEnvironment>>;

/// A process that serves both caches.
struct Process {
    environment: Arc<SimEnvironment>,
    transport: Arc<Transport<SimEnvironment>>,
    caches: [SimCache; DISKS],
    workers: [SimWorker; DISKS],
}

/// The progress of the command.
enum Stage {
    Idle,
    /// It began at the time `since` of the history; the disks are not at the moment yet.
    Closing {
        since: u64,
        moment: CommonMoment<SimEnvironment>,
    },
    /// As the control: this disk is being drained up to an epoch.
    Draining {
        since: u64,
        disk: usize,
        epoch: Epoch,
    },
    /// It has completed. The disks stay as they are until it was looked at so many times.
    Held {
        since: u64,
        left: u64,
    },
}

struct World {
    command: Command,
    random: Seeded,
    memory: CrashMemory,
    disks: [SimDisk; DISKS],
    backends: [BackendId; DISKS],
    process: Process,
    history: Mutex<History>,
    stage: Stage,
    crash_permille: u64,
    switch_permille: u64,
    command_permille: u64,
    worker_permille: u64,
}

impl World {
    fn new(command: Command, seed: u64) -> Self {
        let mut random = Seeded::new(seed);
        let memory = CrashMemory::new(2 * (SEGMENTS + 1) * SEGMENT + (512 << 10));
        let environment = Arc::new(SimEnvironment::new(random.next(), 0));
        let disks: [SimDisk; DISKS] = std::array::from_fn(|_| {
            let geometry = SimDisk::ordinary(history::SIZE, 512);
            let disk = SimDisk::new(BackingGeometry { discard_zeroes: true, ..geometry }, random.next());
            disk.set_latency(random.between(1, 6));
            disk
        });
        let consistency = *random.pick(&[Consistency::Strict, Consistency::Checkpoint]);
        let backends = must(make_caches(&environment, &memory, consistency));
        Self {
            command,
            process: must(Process::open(environment, &memory, &disks, backends)),
            history: Mutex::new(History::new(USERS, disks.each_ref().map(SimDisk::contents))),
            memory,
            disks,
            backends,
            stage: Stage::Idle,
            crash_permille: *random.pick(&[0, 5, 30]),
            switch_permille: *random.pick(&[5, 20, 100, 300]),
            command_permille: *random.pick(&[20, 200, 500]),
            worker_permille: *random.pick(&[200, 600, 950]),
            random,
        }
    }

    fn play(mut self, seen: &mut Seen) {
        for _ in 0..ROUNDS {
            if self.random.chance(self.crash_permille) {
                self.memory.crash_after(self.random.between(1, 60), self.random.next());
            }
            let was_closing = matches!(self.stage, Stage::Closing { .. });
            let ended = until_crash(|| self.round(seen));
            self.check(seen);
            if ended.is_err() {
                seen.crashes_while_closing += u64::from(was_closing);
                self.crash(seen);
            }
            if self.random.chance(100) {
                self.process.environment.advance(self.random.between(1, 1500));
            }
        }
        self.memory.never_crash();
        self.end();
    }

    /// Clients, both workers and perhaps the command, interleaved.
    fn round(&mut self, seen: &mut Seen) {
        let clock_ms = self.process.environment.clock_ms();
        let was_held = matches!(self.stage, Stage::Held { .. });
        let was_idle = matches!(self.stage, Stage::Idle);
        let (seed, switch_permille, command) = (self.random.next(), self.switch_permille, self.command);
        let command_permille = self.command_permille;
        let Self { process, history, memory, disks, stage, random, worker_permille, .. } = self;
        let Process { caches, workers, transport, environment } = process;
        let (memory, caches, history) = (&*memory, &*caches, &*history);
        let mut works: Vec<Box<dyn FnOnce() -> Did + Send + '_>> = Vec::new();
        let commands = random.chance(300);
        // So many that the command does not outlive them.
        let writes_max = if commands && was_idle { 16 } else { 5 };
        for user in 0..USERS {
            let mut random = random.fork();
            let writes = random.between(1, writes_max);
            works.push(Box::new(move || write_some(user, writes, &mut random, memory, caches, history)));
        }
        for (worker, disk) in workers.iter_mut().zip(&*disks) {
            if random.chance(*worker_permille) {
                let steps = random.between(1, 6);
                works.push(Box::new(move || {
                    for _ in 0..steps {
                        worker.step_if_woken(disk, clock_ms);
                    }
                    Did::default()
                }));
            }
        }
        if commands {
            let mut call = Call { random: random.fork(), caches, transport, environment };
            works.push(Box::new(move || {
                act_as(COMMAND);
                switch_with(command_permille);
                let before = std::mem::replace(stage, Stage::Idle);
                let now = history.lock().now();
                let after = match command {
                    Command::Together => call.advance(before, now),
                    Command::OneByOne => call.advance_one_by_one(before, now),
                };
                if memory.is_dead() {
                    crash_now();
                }
                *stage = after;
                Did::default()
            }));
        }
        let done = join(together(seed, switch_permille, works));
        let is_held = matches!(self.stage, Stage::Held { .. });
        seen.commands += u64::from(was_idle && !matches!(self.stage, Stage::Idle));
        seen.held += u64::from(!was_held && is_held);
        if was_held && is_held {
            seen.writes_while_held += done.iter().map(|did| did.writes).sum::<u64>();
            seen.full_while_held += done.iter().map(|did| did.full).sum::<u64>();
        }
    }

    /// If the command has completed, the disks alone show a common moment, whenever the power is cut.
    fn check(&mut self, seen: &mut Seen) {
        let Stage::Held { since, .. } = self.stage else { return };
        seen.checks += 1;
        self.check_disks(since);
    }

    fn check_disks(&mut self, since: u64) {
        let random = &mut self.random;
        let images = std::array::from_fn(|disk| self.disks[disk].image_after_power_cut(random.next()));
        if let Err(text) = self.history.lock().check(&images, since) {
            panic!("the disks alone have no common moment: {text}");
        }
    }

    /// The process ends, and the next one begins.
    fn crash(&mut self, seen: &mut Seen) {
        seen.crashes += 1;
        let held = match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Held { since, .. } => Some(since),
            _ => None,
        };
        seen.crashes_while_held += u64::from(held.is_some());
        if self.random.chance(500) {
            self.memory = self.memory.process_crash();
            self.disks.iter().for_each(|disk| disk.process_crash(self.random.next()));
        } else {
            seen.power_cuts += 1;
            self.memory = self.memory.power_cut(self.random.next(), Keep::Any);
            self.disks.iter().for_each(|disk| disk.power_cut(self.random.next()));
        }
        self.memory.never_crash();
        let environment = Arc::new(self.process.environment.successor(self.random.next()));
        self.process = must(Process::open(environment, &self.memory, &self.disks, self.backends));
        for cache in &self.process.caches {
            assert!(!cache.has_common_moment(), "a process leaves no limit behind");
        }
        // The pause is in the rows, and a cache that is not full keeps it.
        let statuses: Vec<_> = self.process.caches.iter().map(|cache| cache.status()).collect();
        let is_full = statuses.iter().any(|status| status.free_segments * 2 < status.segments);
        if let Some(since) = held.filter(|_| !is_full) {
            for _ in 0..20 {
                self.process.maintain(&self.disks);
            }
            self.check_disks(since);
        }
        let process = &self.process;
        must(process.call(self.random.fork()).pause(0));
    }

    /// Everything that clients wrote gets to the disks.
    fn end(mut self) {
        self.stage = Stage::Idle;
        let random = self.random.fork();
        must(self.process.call(random).pause(0));
        let epochs = self.process.caches.each_ref().map(|cache| cache.request_drain());
        for step in 0.. {
            let mut caches = self.process.caches.iter().zip(epochs);
            if caches.all(|(cache, epoch)| cache.is_drained(epoch)) {
                break;
            }
            assert!(step < STEPS_MAX, "the caches are not drained");
            self.process.maintain(&self.disks);
            self.process.environment.advance(10);
        }
        let now = self.history.lock().now();
        self.check_disks(now);
    }
}

/// What a client did in a round.
#[derive(Default)]
struct Did {
    writes: u64,
    full: u64,
}

/// A client writes to its slots, each write after the one before has completed.
fn write_some(
    user: usize,
    writes: u64,
    random: &mut Seeded,
    memory: &CrashMemory,
    caches: &[SimCache; DISKS],
    history: &Mutex<History>,
) -> Did {
    act_as(1 + user as u32);
    let mut did = Did::default();
    for _ in 0..writes {
        let slot = Slot::of(user, random.below(DISKS as u64) as usize, random.below(100) as usize);
        let (cache, range, zeroes) = (&caches[slot.disk], slot.range(), random.chance(100));
        let content = history.lock().begin(slot, zeroes);
        let outcome = if zeroes {
            cache.zero(range, random.chance(500), &mut ZeroProgress::default(), Waker::noop())
        } else {
            cache.write(range, &content.to_le_bytes().repeat(range.len() as usize / 8), Waker::noop())
        };
        let happened = matches!(must(outcome), Admission::Done(_));
        if memory.is_dead() {
            // Another thread has met the crash; no client gets this answer.
            crash_now();
        }
        if happened && random.chance(100) {
            must(cache.force_unit_access(&[range]));
        }
        history.lock().end(slot, happened);
        did.writes += u64::from(happened);
        did.full += u64::from(!happened);
        if random.chance(150) {
            must(cache.flush());
        }
    }
    did
}

/// What the threads did. A panic with a message comes before a crash.
fn join(ended: Vec<std::thread::Result<Did>>) -> Vec<Did> {
    let (mut done, mut crash) = (Vec::new(), None);
    for outcome in ended {
        match outcome {
            Ok(did) => done.push(did),
            Err(payload) if payload.is::<CrashNow>() => crash = Some(payload),
            Err(payload) => resume_unwind(payload),
        }
    }
    if let Some(payload) = crash {
        resume_unwind(payload);
    }
    done
}

fn must<T>(outcome: Result<T>) -> T {
    outcome.unwrap_or_else(|error| panic!("{error}"))
}

/// A call of the command.
struct Call<'a> {
    random: Seeded,
    caches: &'a [SimCache; DISKS],
    transport: &'a Transport<SimEnvironment>,
    environment: &'a SimEnvironment,
}

impl Call<'_> {
    /// The command goes on.
    fn advance(&mut self, stage: Stage, now: u64) -> Stage {
        match stage {
            Stage::Idle | Stage::Draining { .. } => {
                Stage::Closing { since: now, moment: must(CommonMoment::close(self.caches)) }
            }
            Stage::Closing { .. } if self.random.chance(50) => Stage::Idle,
            Stage::Closing { since, moment } => match moment.check() {
                Ok(()) => {
                    must(self.pause(HOLD_MS));
                    must(moment.hold());
                    Stage::Held { since, left: self.random.between(0, 4) }
                }
                Err(error) if error.kind() == ErrorKind::Busy => Stage::Closing { since, moment },
                // A crash has interrupted a batch of several epochs, and the one after it began before the moment.
                Err(error) if error.kind() == ErrorKind::Backing => Stage::Idle,
                Err(error) => panic!("{error}"),
            },
            Stage::Held { left: 0, .. } => {
                must(self.pause(0));
                Stage::Idle
            }
            Stage::Held { since, left } => Stage::Held { since, left: left - 1 },
        }
    }

    /// The control: one disk is drained and its writeback paused, then the other one.
    fn advance_one_by_one(&mut self, stage: Stage, now: u64) -> Stage {
        let drain =
            |disk: usize, since| Stage::Draining { since, disk, epoch: self.caches[disk].request_drain() };
        match stage {
            Stage::Idle | Stage::Closing { .. } => drain(0, now),
            Stage::Draining { since, disk, epoch } => {
                if !self.caches[disk].is_drained(epoch) {
                    return Stage::Draining { since, disk, epoch };
                }
                must(self.pause_one(disk, HOLD_MS));
                if disk + 1 < DISKS { drain(disk + 1, since) } else { Stage::Held { since, left: 3 } }
            }
            Stage::Held { .. } => self.advance(stage, now),
        }
    }

    /// Pauses writeback of both caches, or ends the pause: in the rows first.
    fn pause(&self, ms: u64) -> Result<()> {
        (0..DISKS).try_for_each(|disk| self.pause_one(disk, ms))
    }

    fn pause_one(&self, disk: usize, ms: u64) -> Result<()> {
        let cache = &self.caches[disk];
        let until = if ms == 0 { 0 } else { self.environment.wall_ms() + ms };
        let settings = Settings { writeback_paused_until_ms: until, ..cache.settings() };
        self.transport.update_settings(cache.backend(), settings)?;
        cache.set_settings(settings)
    }
}

impl Process {
    /// Opens both caches, which recovers them.
    fn open(
        environment: Arc<SimEnvironment>,
        memory: &CrashMemory,
        disks: &[SimDisk; DISKS],
        backends: [BackendId; DISKS],
    ) -> Result<Self> {
        act_as(COMMAND);
        let transport = Transport::open(Arc::clone(&environment), Region::new(memory.clone()))?;
        let caches = [transport.open_cache(backends[0])?, transport.open_cache(backends[1])?];
        disks.iter().for_each(|disk| disk.used_by(memory));
        let workers = std::array::from_fn(|disk| SimWorker::new(&caches[disk], &disks[disk], 4));
        Ok(Self { environment, transport, caches, workers })
    }

    fn call(&self, random: Seeded) -> Call<'_> {
        act_as(COMMAND);
        let Self { environment, transport, caches, .. } = self;
        Call { random, caches, transport, environment }
    }

    /// The workers take a step if they were woken.
    fn maintain(&mut self, disks: &[SimDisk; DISKS]) {
        let clock_ms = self.environment.clock_ms();
        for (worker, disk) in self.workers.iter_mut().zip(disks) {
            worker.step_if_woken(disk, clock_ms);
        }
    }
}

/// A fresh region with both caches.
fn make_caches(
    environment: &Arc<SimEnvironment>,
    memory: &CrashMemory,
    consistency: Consistency,
) -> Result<[BackendId; DISKS]> {
    act_as(COMMAND);
    let format = FormatOptions {
        segment_size: Some(SEGMENT),
        force: false,
        host_rows: 2,
        backend_rows: 2,
        blkdev_rows: 2,
    };
    let transport = Transport::format(Arc::clone(environment), Region::new(memory.clone()), &format)?;
    let host = transport.register_host("simulated", None)?;
    let make = |name: &str| {
        transport.create_backend(&BackendSpec {
            host,
            path: format!("/simulated/{name}"),
            identity: name.to_owned(),
            size: history::SIZE,
            sector: 512,
            cache_bytes: Some(SEGMENTS * SEGMENT),
            lanes_max: 2,
            handlers: 1,
            data_crc: true,
            settings: Settings { consistency, ..Settings::default() },
        })
    };
    Ok([make("data")?, make("log")?])
}
