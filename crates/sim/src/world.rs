//! A world: memory, disk, an engine between them, clients that send random requests, crashes at any store, and an
//! oracle that observes what the clients observe.
//!
//! Invariants: the same options give the same history up to the last store, so that the seed repeats a failure; every
//! violation panics with the seed.
//!
//! Elsewhere: which worlds to run (the tests).

mod branches;
mod caches;
mod checks;
mod crashes;
mod making;
mod metadata;
mod neighbour;
mod options;
mod requests;
mod sequences;
mod verify;

use crate::crash::until_crash;
use crate::disk::{DiskFaults, SimDisk};
use crate::environment::SimEnvironment;
use crate::explorer::Explorer;
use crate::memory::CrashMemory;
use crate::oracle::{Moment, Oracle, Violation};
use crate::process::{Outlook, Process};
use crate::random::Seeded;
use crate::workload::Workload;
use cbd_engine::{
    BypassReason, CacheMode, CacheStatus, Consistency, Environment, IndexResize, ReadFill, Readahead,
    Settings, WhenFull,
};
use cbd_types::{
    AlignedBuffer, BackendId, BackingGeometry, ByteRange, Completion, Epoch, Error, Operation, Request,
};
pub(crate) use making::{make_cache, region_size};
pub use metadata::Copies;
use neighbour::Neighbour;
pub use options::{Happened, WorldOptions};
use requests::PendingRequest;
pub use sequences::Act;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

/// The world.
pub struct World {
    options: WorldOptions,
    random: Seeded,
    memory: CrashMemory,
    disk: SimDisk,
    oracle: Oracle,
    workload: Workload,
    segment_area: ByteRange,
    backend: BackendId,
    process: Option<Process>,
    environment: Arc<SimEnvironment>,
    asked: BTreeMap<u64, PendingRequest>,
    next_id: u64,
    done: Vec<Completion>,
    /// A drain that was requested: the moment, and the epoch up to which it drains.
    draining: Option<(Moment, Epoch)>,
    /// The backing device shows nothing older than this moment.
    drained: Moment,
    drained_epoch: Epoch,
    /// The event at which the next recovery crashes.
    crash_recovery_at: Option<u64>,
    /// Whether the region was damaged: reads may fail.
    is_damaged: bool,
    is_disk_broken: bool,
    /// The power was cut since the outcome of changes was determined.
    had_power_cut: bool,
    /// Whether changes may fail because the disk refuses writes for a long time.
    expects_refusals: bool,
    /// The numbers of ranges that the present process has parked and unparked, as far as they were counted.
    parked_seen: (u64, u64),
    /// The resize of the present process's index.
    index_resize: Option<IndexResize>,
    happened: Happened,
    /// Explores every moment, if there is one.
    explorer: Option<Explorer>,
    /// Another backend on the region, if there is one.
    neighbour: Option<Neighbour>,
    /// Raised when a change of the cache begins and when it ends.
    route_changes: u64,
}

impl World {
    /// Formats a region, creates a cache in front of a fresh disk, and opens it.
    ///
    /// # Panics
    /// When the engine refuses.
    #[must_use]
    pub fn new(options: WorldOptions) -> Self {
        let mut random = Seeded::new(options.seed);
        let memory = CrashMemory::new(region_size(&options));
        memory.set_kind(options.memory);
        let geometry = BackingGeometry {
            volatile_cache: options.volatile_cache,
            discard_zeroes: options.discard_zeroes,
            ..SimDisk::ordinary(options.size, options.sector)
        };
        let mut disk = SimDisk::new(geometry, random.next());
        let environment = Arc::new(SimEnvironment::new(random.next(), 0));
        if options.bypasses && options.seed.is_multiple_of(3) {
            environment.pass_at_each_look(3);
        }
        let refused = |error| -> ! { panic!("seed {}: the engine makes no cache: {error}", options.seed) };
        let (transport, backend, segment_area) = making::make_cache_on(&options, &environment, &memory)
            .unwrap_or_else(|error: Error| refused(error));
        let mut neighbour = None;
        if options.varies_size {
            let other = Neighbour::new_disk(options.seed);
            disk = disk.with_beside(other.clone());
            neighbour =
                Some(Neighbour::make(&options, &transport, other).unwrap_or_else(|error| refused(error)));
        }
        drop(transport);
        let atomic_unit = (options.segment_size / 4).min(1 << 20);
        let oracle = Oracle::new(options.size, options.sector, atomic_unit);
        let mut world = Self {
            oracle: if options.can_bypass() { oracle.may_lose() } else { oracle },
            workload: Workload::new(options.size, options.sector, atomic_unit, options.mix)
                .with_sequential_writes(if options.bypasses { 400 } else { 0 }),
            random,
            memory,
            disk,
            segment_area,
            backend,
            process: None,
            environment,
            asked: BTreeMap::new(),
            next_id: 0,
            done: Vec::new(),
            draining: None,
            drained: 0,
            drained_epoch: Epoch(0),
            crash_recovery_at: None,
            is_damaged: false,
            had_power_cut: false,
            is_disk_broken: !options.unwritable.is_empty(),
            expects_refusals: options.varies_route && options.write_errors_permille > 0,
            parked_seen: (0, 0),
            index_resize: None,
            happened: Happened::default(),
            explorer: None,
            neighbour,
            route_changes: 0,
            options,
        };
        world.set_faults(true);
        world.open();
        world
    }

    /// The counts so far.
    #[must_use]
    pub const fn happened(&self) -> Happened {
        self.happened
    }

    /// The memory of the present process.
    #[must_use]
    pub const fn memory(&self) -> &CrashMemory {
        &self.memory
    }

    /// The disk.
    #[must_use]
    pub const fn disk(&self) -> &SimDisk {
        &self.disk
    }

    fn fail(&self, what: impl Display) -> ! {
        let state = self.process.as_ref().map_or_else(|| String::from("no process"), Process::describe);
        panic!("seed {}: {what}\n  {:?}\n  {:?}\n  {state}", self.options.seed, self.happened, self.options)
    }

    fn expect<T>(&self, verdict: Result<T, Violation>) -> T {
        verdict.unwrap_or_else(|violation| self.fail(violation))
    }

    /// Makes the disk fail as the options say; without `reads_too`, reads succeed, because checks need them.
    fn set_faults(&self, reads_too: bool) {
        let options = &self.options;
        self.disk.set_faults(DiskFaults {
            read_permille: if reads_too { options.read_errors_permille } else { 0 },
            change_permille: options.write_errors_permille,
            flush_permille: if self.is_disk_broken && options.refuses_flushes {
                1000
            } else {
                options.write_errors_permille
            },
            unwritable: if self.is_disk_broken { options.unwritable.to_vec() } else { Vec::new() },
            ..DiskFaults::default()
        });
    }

    /// Ends the process and adds the counts of its engine.
    fn end_process(&mut self) {
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.end();
        }
        if let Some(process) = self.process.take() {
            let Some(status) = process.cached().map(|cache| cache.status()) else { return };
            self.happened.rare = self.happened.rare.and(status.rare);
            let bypassed = |reason| status.bypassed.of(reason);
            self.happened.past_sequential += bypassed(BypassReason::Sequential);
            self.happened.past_full += bypassed(BypassReason::Full);
            self.happened.past_congested += bypassed(BypassReason::Congested);
            self.happened.past_refused += status.refused_bypass_bytes;
        }
    }

    /// From this call on, the disk refuses to write the ranges of the options; this is also the initial state.
    pub fn break_disk(&mut self) {
        self.is_disk_broken = true;
        self.set_faults(true);
    }

    /// From this call on, the disk accepts all writes.
    pub fn repair_disk(&mut self) {
        self.is_disk_broken = false;
        self.set_faults(true);
    }

    /// From this call on, changes may fail because the disk refuses writes for a long time; [`settle`](Self::settle)
    /// determines their outcome.
    pub const fn expect_refusals(&mut self) {
        self.expects_refusals = true;
    }

    /// The clients read the wall clock.
    fn read_clock(&mut self) {
        self.oracle.read_clock(self.environment.wall_ms());
    }

    /// Sets the wall clock back.
    pub fn set_wall_back(&self, ms: i64) {
        self.environment.set_wall_back(ms);
    }

    /// Advances the clock.
    pub fn advance(&self, ms: u64) {
        self.environment.advance(ms);
    }

    /// The clock, in milliseconds.
    #[must_use]
    pub fn clock_ms(&self) -> u64 {
        self.environment.clock_ms()
    }

    /// The status of the cache.
    pub fn status(&mut self) -> CacheStatus {
        self.process().cache().status()
    }

    fn process(&mut self) -> &mut Process {
        match &mut self.process {
            Some(process) => process,
            None => unreachable!("a world has a process but while it recovers"),
        }
    }

    fn open(&mut self) {
        let (environment, memory) = (Arc::clone(&self.environment), self.memory.clone());
        let options = self.options;
        self.parked_seen = (0, 0);
        self.index_resize = None;
        match Process::open(environment, &memory, &self.disk, self.backend, options.clients, options.depth) {
            Ok(process) => self.process = Some(process),
            Err(error) => self.fail(format!("the cache does not open: {error}")),
        }
        // No client relies on the recovered contents before recovery has ended.
        self.check_points();
        self.route_changes += 1;
        self.open_neighbour();
        let Some(drained) = self.process().cached().map(|cache| cache.status().drained_epoch) else {
            self.drained_epoch = Epoch(0);
            return;
        };
        // If the newest slot of *drained* is damaged, an older one counts.
        if drained < self.drained_epoch && !self.is_damaged {
            self.fail(format!("drained fell from {} to {drained}", self.drained_epoch));
        }
        self.drained_epoch = drained;
    }

    /// Runs `turns` turns, with random crashes.
    pub fn run(&mut self, turns: u64) {
        for _ in 0..turns {
            if self.random.chance(self.options.crash_permille) {
                let (count, seed) = (self.random.between(1, 80), self.random.next());
                self.memory.crash_after(count, seed);
            }
            if until_crash(|| self.turn()).is_err() {
                self.crash();
            }
            if self.options.sets_clock && self.random.chance(20) {
                let span = self.random.between(1, 400) as i64;
                self.environment.set_wall_back(if self.random.chance(700) { span } else { -span });
            }
            self.note_quiet_moment();
        }
        self.memory.never_crash();
    }

    /// Executes one random event.
    pub fn turn(&mut self) {
        if self.options.resizes_index && self.random.chance(300) {
            self.resize_index();
        }
        if self.turn_of_caches() {
            return;
        }
        if self.options.verifies {
            self.take_verified();
            if self.random.chance(60) {
                return self.verify_some();
            }
        }
        if self.random.chance(self.options.worker_percent * 10) {
            for _ in 0..self.random.between(1, 4) {
                self.maintain();
            }
            self.note_drained();
            return;
        }
        match self.random.below(100) {
            0..10 if self.options.clients > 1 => self.ask_together(),
            0..65 => self.ask(),
            65..95 => {
                let client = self.random.below(self.options.clients as u64) as usize;
                self.poll(client);
            }
            95 => self.environment.advance(self.random.between(1, 300)),
            96 => self.ask_drain(),
            97 | 98 => self.check_backing(),
            _ => match self.random.below(20) {
                0 => self.stop_and_start(),
                1..6 => self.replace_a_client(),
                6..10 if self.options.vary_settings && self.is_cached() => self.vary_settings(),
                10..16 if self.options.vary_modes || self.options.bypasses => self.vary_mode(),
                _ => {}
            },
        }
    }

    fn is_cached(&mut self) -> bool {
        self.process().cached().is_some()
    }

    /// Replaces a client. A client that waits for changes is not replaced, because the outcome of these changes would
    /// remain unknown.
    fn replace_a_client(&mut self) {
        let client = self.random.below(self.options.clients as u64) as usize;
        if self.asked.values().all(|asked| asked.client != client || asked.change.is_none()) {
            self.process().replace_client(client);
            self.asked.retain(|_, asked| asked.client != client);
        }
    }

    /// Changes the settings of the running cache.
    fn vary_settings(&mut self) {
        let pause_ms = *self.random.pick(&[0, 0, 50, 5000, 100_000]);
        let settings = Settings {
            gc_percent: *self.random.pick(&[0, 10, 70, 90]),
            consistency: *self.random.pick(&Consistency::ALL),
            writeback_rate: *self.random.pick(&[0, 0, 100_000, 10_000_000]),
            dirty_target_percent: *self.random.pick(&[0, 10, 90]),
            read_fill: *self.random.pick(&ReadFill::ALL),
            sequential_read_cutoff: *self.random.pick(&[0, 4096, 256 << 10, 4 << 20]),
            readahead: *self.random.pick(&[Readahead::Auto, Readahead::Auto, Readahead::Off]),
            read_latency_target_us: *self.random.pick(&[0, 0, 1, 5000]),
            writeback_paused_until_ms: if pause_ms == 0 { 0 } else { self.environment.wall_ms() + pause_ms },
            ..self.process().cache().settings()
        };
        if let Err(error) = self.process().cache().set_settings(settings) {
            self.fail(format!("{settings:?}: {error}"));
        }
    }

    /// Begins to resize the index, or takes a step. Some resizes are left in the middle, for the next one to complete.
    fn resize_index(&mut self) {
        let wanted = *self.random.pick(&[1, 50, 300, 2000, 10_000]);
        let mut resize = self.index_resize.take().unwrap_or(IndexResize::new(wanted));
        let is_left = self.random.chance(20);
        match self.process().cache().step_index_resize(&mut resize) {
            Ok(true) if is_left => {}
            Ok(true) => self.index_resize = Some(resize),
            Ok(false) => self.happened.index_resizes += 1,
            Err(error) => self.fail(format!("resizing the index: {error}")),
        }
    }

    /// Changes what goes past the cache in the running cache, in the region first.
    fn vary_mode(&mut self) {
        let now = self.process().cache().settings();
        let cache_mode =
            if self.options.vary_modes { *self.random.pick(&CacheMode::ALL) } else { now.cache_mode };
        let mut settings = Settings { cache_mode, ..now };
        if self.options.bypasses {
            settings.sequential_write_cutoff = *self.random.pick(&[0, 512, 4096, 64 << 10]);
            settings.when_full = *self.random.pick(&WhenFull::ALL);
            settings.congestion_write_us = *self.random.pick(&[0, 1, 1, 100]);
        }
        if let Err(error) = self.process().change_settings(settings) {
            self.fail(format!("{settings:?}: {error}"));
        }
        self.check_points();
    }

    /// The background worker takes a step if it was woken.
    fn maintain(&mut self) -> bool {
        let went_on = self.process().maintain();
        self.check_points();
        went_on
    }

    fn ask_drain(&mut self) {
        if self.draining.is_none() && self.process().cached().is_some() {
            let asked = self.oracle.now();
            let epoch = self.process().cache().request_drain();
            self.draining = Some((asked, epoch));
        }
    }

    fn note_drained(&mut self) {
        let Some(status) = self.process().cached().map(|cache| cache.status()) else { return };
        if status.drained_epoch < self.drained_epoch {
            self.fail(format!("drained fell from {} to {}", self.drained_epoch, status.drained_epoch));
        }
        self.drained_epoch = status.drained_epoch;
        self.happened.parked += status.parked_total - self.parked_seen.0;
        self.happened.unparked += status.unparked_total - self.parked_seen.1;
        self.parked_seen = (status.parked_total, status.unparked_total);
        self.happened.waited_for_space += u64::from(status.writers_waiting);
        let counters = self.memory.counters();
        if counters.loads_of_unfenced + counters.stores_over_unfenced > 0 {
            self.fail(format!("a thread relies on stores that no thread has fenced: {counters:?}"));
        }
        self.read_clock();
        if let Some((asked, epoch)) = self.draining
            && self.process().cache().is_drained(epoch)
        {
            self.draining = None;
            self.drained = asked;
            self.oracle.drained(asked);
            self.happened.drains += 1;
        }
    }

    /// Writes `bytes` as fast as the cache accepts them, without crashes and without advancing the clock.
    pub fn press(&mut self, bytes: u64) {
        let (mut turns, mut written) = (0_u64, self.happened.written_bytes);
        while self.happened.written_bytes < bytes {
            let asked = self.random.chance(700) && {
                let wish = self.workload.next(&mut self.random);
                self.submit(wish)
            };
            let client = self.random.below(self.options.clients as u64) as usize;
            let went_on = self.poll(client) | (self.random.chance(500) && self.maintain());
            self.note_drained();
            if !asked && !went_on && self.process().outlook() != Outlook::Work && !self.asked.is_empty() {
                self.advance_clock();
            }
            if turns % 100_000 == 99_999 && written == self.happened.written_bytes {
                self.fail("nothing was written for a long time");
            }
            if turns % 100_000 == 0 {
                written = self.happened.written_bytes;
            }
            turns += 1;
        }
    }

    /// Reads `range` through the engine, with no other request in flight, and returns the bytes.
    fn read_now(&mut self, range: ByteRange) -> Vec<u8> {
        self.try_read(range).unwrap_or_else(|error| self.fail(format!("reading {range}: {error}")))
    }

    fn try_read(&mut self, range: ByteRange) -> Result<Vec<u8>, Error> {
        self.set_faults(false);
        let id = self.next_id;
        self.next_id += 1;
        let buffer = AlignedBuffer::zeroed(range.len() as usize);
        let request = Request::unmarked(id, Operation::Read, range, false, buffer);
        let mut done = Vec::new();
        self.process().submit(0, request, &mut done);
        self.wait_until(|world| {
            let mut polled = std::mem::take(&mut done);
            world.process().poll(0, &mut polled);
            done = polled;
            !done.is_empty()
        });
        self.set_faults(true);
        match done.pop() {
            Some(Completion { result, buffer, .. }) => result.map(|()| buffer.to_vec()),
            None => unreachable!("waited for it"),
        }
    }

    /// Lets all clients but client 0 continue until `ready`.
    fn wait_until(&mut self, mut ready: impl FnMut(&mut Self) -> bool) {
        let mut turns = 0_u64;
        while !ready(self) {
            turns += 1;
            if turns > 1_000_000 {
                self.fail("no end after a million turns");
            }
            let client = turns % self.options.clients.max(1) as u64;
            let went_on = (client > 0 && self.poll(client as usize)) | self.maintain();
            if went_on {
                continue;
            }
            if self.process().is_changing() {
                self.advance_change();
            }
            if !self.process().is_changing() || self.process().outlook() != Outlook::Stuck {
                self.advance_clock();
            }
        }
    }

    /// Advances the clock if no thread can continue.
    fn advance_clock(&mut self) {
        match self.process().outlook() {
            Outlook::Work => {}
            Outlook::Sleeps(until) => {
                if !self.asked.is_empty() {
                    self.happened.rescued_by_clock += 1;
                }
                let now = self.environment.clock_ms();
                self.environment.advance(until.saturating_sub(now).max(1));
            }
            Outlook::Stuck => self.fail("all threads wait and none will be woken"),
        }
    }

    /// Continues until every request is complete.
    pub fn quiesce(&mut self) {
        self.wait_until(|world| {
            world.poll(0);
            world.note_drained();
            world.asked.is_empty()
        });
    }

    /// Runs the background worker until it waits for an event from outside.
    pub fn run_worker_until_idle(&mut self) {
        let mut steps = 0;
        while self.maintain() {
            steps += 1;
            if steps > 1_000_000 {
                self.fail("the background worker does not become idle");
            }
        }
        self.note_drained();
    }

    /// Continues until every request is complete and its data is on the backing device.
    pub fn drain(&mut self) {
        self.quiesce();
        if !self.is_cached() {
            // The disk has everything; a flush makes it durable.
            return self.settle_down();
        }
        self.draining = None;
        self.ask_drain();
        self.wait_until(|world| {
            world.poll(0);
            world.note_drained();
            world.draining.is_none()
        });
    }
}
