//! Tries every end of a history. At each fence, and at random moments between fences, the explorer recovers each
//! state that a power cut or a process crash can leave, and compares it with the expected contents.
//!
//! Invariants:
//! - a moment is checked against the knowledge of the clients at that moment: a change that is acknowledged only
//!   later counts as open;
//! - the states that are tried at a moment depend only on the seed of the world and the number of the moment, so that
//!   one moment can be repeated without the others;
//! - a state is skipped if it differs from an earlier state only in bytes that the recovery of the earlier one never
//!   read: its outcome could not differ.
//!
//! Elsewhere: which worlds to explore ([`crate::campaign`]), and which contents are legal ([`crate::Oracle`]).

mod check;
mod fates;
mod histories;
mod tally;

use crate::crash::until_crash;
use crate::disk::SimDisk;
use crate::memory::{CrashMemory, Keep, OpenLine};
use crate::oracle::Violation;
use crate::random::{Seeded, mix};
use crate::world::{Happened, World};
use check::Recovered;
pub(crate) use check::{Beside, Expected};
use fates::Fate;
pub(crate) use histories::{play_counted, play_histories};
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
pub use tally::{Counts, Finding, Tally};

/// Size in bytes of the pieces in which contents are compared: the maximum size that the engine reads in one piece
/// with the smallest segments.
pub(crate) const UNIT: u64 = 16 << 10;

/// The effort at each moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Effort {
    /// Every subset of the open lines is tried if there are at most this many.
    pub lines_max: usize,
    /// Moments out of a thousand with more than six open lines of which every subset is tried; the others are
    /// sampled.
    pub exhausted_permille: u64,
    /// With more open lines, every subset of the lines that recovery reads is tried if there are at most this
    /// many.
    pub lines_read_max: usize,
    /// Further random states of many lines.
    pub sampled: u64,
    /// States with torn lines, and with a version between the oldest and the newest.
    pub torn: u64,
    /// States with an open line that cannot be read.
    pub poisoned: u64,
    /// Stores out of a thousand at which a moment is explored.
    pub stores_permille: u64,
    /// States out of a thousand that crash a second time after their recovery; the second recovery must find the same
    /// contents.
    pub again_permille: u64,
    /// States out of a thousand whose recovery is interrupted by a crash.
    pub recovery_permille: u64,
    /// States out of a thousand from which a world continues.
    pub go_on_permille: u64,
    /// States out of a thousand whose region is discarded, so that the disk alone is checked.
    pub bare_permille: u64,
}

impl Default for Effort {
    fn default() -> Self {
        Self {
            lines_max: 12,
            exhausted_permille: 1000,
            lines_read_max: 6,
            sampled: 6,
            torn: 2,
            poisoned: 1,
            stores_permille: 30,
            again_permille: 100,
            recovery_permille: 100,
            go_on_permille: 10,
            bare_permille: 50,
        }
    }
}

/// Turns out of a thousand after which a moment between stores is explored.
const QUIET_PERMILLE: u64 = 100;

/// With at most this many lines, all subsets are always tried.
const FEW_LINES: usize = 6;

/// A moment of a history.
struct Point {
    memory: CrashMemory,
    disk: SimDisk,
}

/// Explores the moments of one history.
pub struct Explorer {
    name: &'static str,
    seed: u64,
    label: String,
    is_looking: bool,
    effort: Effort,
    /// The number of the only moment to explore, if one is to be repeated.
    only: Option<u64>,
    points: Arc<Mutex<Vec<Point>>>,
    /// Chooses the moments between stores, and nothing else.
    random: Seeded,
    number: u64,
    tally: Tally,
}

impl Explorer {
    /// An explorer of the world `name` with `seed`; with `only`, of one of its moments.
    #[must_use]
    pub fn new(name: &'static str, seed: u64, effort: Effort, only: Option<u64>) -> Self {
        let points = Arc::new(Mutex::new(Vec::new()));
        let random = Seeded::new(mix(seed));
        Self {
            name,
            seed,
            label: String::new(),
            is_looking: false,
            effort,
            only,
            points,
            random,
            number: 0,
            tally: Tally::default(),
        }
    }

    /// Returns the counts and findings.
    #[must_use]
    pub fn into_tally(self) -> Tally {
        self.tally
    }

    /// Records the moments of this memory from this call on.
    pub(crate) fn watch(&self, memory: &CrashMemory, disk: &SimDisk) {
        if !self.is_looking {
            return;
        }
        let (points, disk) = (Arc::clone(&self.points), disk.clone());
        memory.watch(self.effort.stores_permille, self.seed, move |memory| {
            points.lock().push(Point { memory, disk: disk.fork() });
        });
    }

    /// Records this moment, at which nothing is stored, with a random probability.
    pub(crate) fn note_by_chance(&mut self, memory: &CrashMemory, disk: &SimDisk) {
        if self.is_looking && self.random.chance(QUIET_PERMILLE) {
            self.note(memory, disk);
        }
    }

    /// An explorer of the next history of the same seed. It takes over the counts and does not explore yet.
    #[must_use]
    pub(crate) fn next_history(self, label: String) -> Self {
        self.points.lock().clear();
        Self { label, is_looking: false, ..self }
    }

    /// Starts the exploration of the memories that this explorer watches.
    pub(crate) const fn begin(&mut self) {
        self.is_looking = true;
    }

    /// Adds the counts of the world that was explored.
    pub(crate) fn count_world(&mut self, happened: &Happened) {
        self.tally.count_world(happened);
    }

    /// Records this moment, at which nothing is stored.
    pub(crate) fn note(&self, memory: &CrashMemory, disk: &SimDisk) {
        self.points.lock().push(Point { memory: memory.fork(), disk: disk.fork() });
    }

    /// Checks the moments since the last call. At all of them, the knowledge of the clients of `world` was the same
    /// as now.
    pub(crate) fn check(&mut self, world: &World) {
        let points = std::mem::take(&mut *self.points.lock());
        if points.is_empty() {
            return;
        }
        // Computed when the first selected moment is checked.
        let mut contents = None;
        for point in points {
            self.number += 1;
            if self.only.is_none_or(|only| only == self.number) {
                let contents = contents.get_or_insert_with(|| world.oracle().expectation(UNIT));
                Moment {
                    world,
                    point: &point,
                    lines: point.memory.open_lines(),
                    expected: world.expected(contents),
                    random: Seeded::new(mix(self.seed ^ mix(self.number))),
                    explorer: self,
                }
                .explore();
            }
        }
    }

    fn state(&self, kind: &str) -> String {
        if self.label.is_empty() { kind.to_owned() } else { format!("{kind}, {}", self.label) }
    }

    /// Records a failure of the history itself.
    pub(crate) fn history_failed(&mut self, text: String) {
        let finding = Finding {
            world: self.name.to_owned(),
            seed: self.seed,
            point: None,
            state: self.state("the history itself"),
            text,
        };
        self.tally.findings.push(finding);
    }
}

/// A moment during its exploration.
struct Moment<'a> {
    world: &'a World,
    point: &'a Point,
    lines: Vec<OpenLine>,
    expected: Expected<'a>,
    random: Seeded,
    explorer: &'a mut Explorer,
}

impl Moment<'_> {
    fn explore(mut self) {
        self.explorer.tally.points += 1;
        self.crash_process();
        let effort = self.explorer.effort;
        let count = self.lines.len();
        let all = count <= FEW_LINES || self.random.chance(effort.exhausted_permille);
        if count <= effort.lines_max && all {
            self.explorer.tally.points_exhausted += 1;
            self.try_all_subsets();
        } else {
            let read = self.lines_read();
            for fate in fates::sampled(&self.lines, &read, &effort, &mut self.random) {
                self.cut(&fate);
            }
        }
        for fate in fates::hostile(&self.lines, &effort, &mut self.random) {
            self.cut(&fate);
        }
    }

    fn try_all_subsets(&mut self) {
        // For each tried state: the mask of the lines that recovery read, and their contents. The state represents
        // all states that agree with it in these lines.
        let mut known: Vec<(u64, u64)> = Vec::new();
        for subset in 0..1_u64 << self.lines.len() {
            if known.iter().any(|(read, found)| subset & read == *found) {
                self.explorer.tally.equivalent_states += 1;
                continue;
            }
            let read = self.cut(&Fate::subset(&self.lines, subset));
            known.push((read, subset & read));
        }
    }

    /// The open lines that recovery reads when all of them or none of them are present.
    fn lines_read(&mut self) -> Vec<bool> {
        let disk = self.disk_after_power_cut();
        let mut read = vec![false; self.lines.len()];
        for all in [false, true] {
            let left = self
                .point
                .memory
                .cut_to(self.lines.iter().filter(|_| all).map(|line| (line.at, line.newest())));
            left.trace_loads();
            let seed = self.random.next();
            if self.guarded("sampled", |moment| moment.expected.check(seed, &left, &disk)).is_some() {
                for (read, line) in read.iter_mut().zip(&self.lines) {
                    *read |= left.was_loaded(line.at);
                }
            }
        }
        read
    }

    fn disk_after_power_cut(&mut self) -> SimDisk {
        let disk = self.point.disk.fork();
        disk.power_cut(self.random.next());
        disk
    }

    /// Cuts the power with this fate. Returns the mask of the lines that recovery and the reads after it have loaded.
    fn cut(&mut self, fate: &Fate) -> u64 {
        let disk = self.disk_after_power_cut();
        let left = fate.apply(&self.point.memory, &self.lines);
        let before = left.fork();
        left.trace_loads();
        let seed = self.random.next();
        let Some(found) = self.guarded(fate.kind, |moment| moment.expected.check(seed, &left, &disk)) else {
            // The set of lines that it read is unknown: the state represents only itself.
            return u64::MAX;
        };
        let read = self.lines.iter().enumerate().take(64);
        let read = read.fold(0, |read, (at, line)| read | u64::from(left.was_loaded(line.at)) << at);
        self.follow(&before, &left, &disk, &found);
        read
    }

    /// Kills the process at this moment; the next process sees all its stores. Then cuts the power, too.
    fn crash_process(&mut self) {
        let disk = self.point.disk.fork();
        disk.process_crash(self.random.next());
        let left = self.point.memory.fork().process_crash();
        let before = left.fork();
        let seed = self.random.next();
        let checked = self.guarded("process crash", |moment| moment.expected.check(seed, &left, &disk));
        let Some(found) = checked else { return };
        self.again("process crash, then power cut", &left, &disk, &found, false);
        self.follow(&before, &left, &disk, &found);
    }

    /// Chooses at random what follows a recovery.
    fn follow(&mut self, before: &CrashMemory, left: &CrashMemory, disk: &SimDisk, found: &Recovered) {
        let effort = self.explorer.effort;
        if self.random.chance(effort.again_permille) {
            let by_crash = self.random.chance(500);
            let kind = if by_crash { "power cut, then process crash" } else { "power cut twice" };
            self.again(kind, left, disk, found, by_crash);
        }
        if self.random.chance(effort.recovery_permille) {
            self.crash_in_recovery(before, disk, found);
        }
        if self.random.chance(effort.go_on_permille) {
            self.continue_world(before, disk);
        }
        if self.random.chance(effort.bare_permille) {
            self.discard_region(disk, found);
        }
    }

    /// Crashes a second time directly after a recovery: the second recovery must find the same contents.
    fn again(
        &mut self,
        kind: &'static str,
        left: &CrashMemory,
        disk: &SimDisk,
        found: &Recovered,
        process: bool,
    ) {
        let (memory, disk, seed) = (left.fork(), disk.fork(), self.random.next());
        let must_match = self.must_match(&disk);
        let memory = if process {
            disk.process_crash(seed);
            memory.process_crash()
        } else {
            disk.power_cut(seed);
            memory.power_cut(seed, Keep::Any)
        };
        let contents = found.contents;
        self.guarded(kind, |moment| {
            let again = moment.expected.check(seed, &memory, &disk)?;
            if must_match { same(contents, again) } else { Ok(again) }
        });
    }

    /// Whether a second recovery must find the same contents: a power cut takes nothing more from the disk, or what it takes does
    /// not count.
    fn must_match(&self, disk: &SimDisk) -> bool {
        !self.world.can_bypass() || disk.is_durable()
    }

    /// Discards the region. If the status reports that the backing device alone is crash-consistent, checks its
    /// contents as a crash state. They must include all changes that were flushed before the recovery point.
    fn discard_region(&mut self, disk: &SimDisk, found: &Recovered) {
        let Some(status) = &found.status else {
            // The disk is everything, and was compared.
            return;
        };
        if status.drained_wall_ms > 0 {
            self.explorer.tally.rare("recovery_point_checked", 1);
        }
        if let Err(violation) = self.world.check_recovery_point(&disk.contents(), status) {
            self.found("region thrown away", violation.0);
        }
        if !status.backing_is_consistent {
            self.explorer.tally.rare("bare_disk_void", 1);
            return;
        }
        self.explorer.tally.rare("bare_disk_checked", 1);
        if let Err(violation) = self.world.check_bare_disk(&disk.contents()) {
            self.found("region thrown away", violation.0);
        }
    }

    /// Interrupts the recovery of this state by a crash, and recovers again.
    fn crash_in_recovery(&mut self, before: &CrashMemory, disk: &SimDisk, found: &Recovered) {
        let contents = found.contents;
        // If stores can still be lost, the second recovery may find another of the legal states.
        let is_settled = before.open_lines().is_empty() && self.must_match(disk);
        let (seed, event, process) = (self.random.next(), self.random.between(1, 4), self.random.chance(500));
        let (memory, disk) = (before.fork(), disk.fork());
        memory.crash_after(event, seed);
        let crashed = until_crash(|| {
            let checked = self
                .guarded("recovery that was to crash", |moment| moment.expected.check(seed, &memory, &disk));
            drop(checked);
        });
        if crashed.is_ok() {
            return;
        }
        self.explorer.tally.rare("crash_in_recovery", 1);
        let (kind, memory) = if process {
            disk.process_crash(seed);
            ("process crash in recovery", memory.process_crash())
        } else {
            disk.power_cut(seed);
            ("power cut in recovery", memory.power_cut(seed, Keep::Any))
        };
        self.guarded(kind, |moment| {
            let again = moment.expected.check(seed, &memory, &disk)?;
            if is_settled { same(contents, again) } else { Ok(again) }
        });
    }

    /// Continues a world from this state: it works, crashes, and must still have every acknowledged change.
    fn continue_world(&mut self, before: &CrashMemory, disk: &SimDisk) {
        let seed = self.random.next();
        let turns = self.random.between(1, 30);
        let (memory, disk) = (before.fork(), disk.fork());
        let world = self.world;
        let outcome = quietly(|| world.branch(memory, disk, seed).continue_and_check(turns));
        self.explorer.tally.state("went on");
        match outcome {
            Ok(happened) => self.explorer.tally.count_world(&happened),
            Err(text) => self.found("went on", text),
        }
    }

    /// Checks a state and records every failure.
    fn guarded(
        &mut self,
        kind: &'static str,
        check: impl FnOnce(&mut Self) -> Result<Recovered, Violation>,
    ) -> Option<Recovered> {
        let checked = quietly(|| check(self));
        self.explorer.tally.state(kind);
        match checked {
            Ok(Ok(found)) => {
                self.explorer.tally.distinct.insert(found.digest());
                if let Some(status) = &found.status {
                    self.explorer.tally.engine(&status.rare);
                }
                Some(found)
            }
            Ok(Err(violation)) => {
                self.found(kind, violation.0);
                None
            }
            Err(text) => {
                self.found(kind, text);
                None
            }
        }
    }

    fn found(&mut self, kind: &str, text: String) {
        let finding = Finding {
            world: self.explorer.name.to_owned(),
            seed: self.explorer.seed,
            point: Some(self.explorer.number),
            state: self.explorer.state(kind),
            text,
        };
        // One moment can report the same bug many times.
        if self.explorer.tally.findings.len() < 20 {
            self.explorer.tally.findings.push(finding);
        }
    }
}

fn same(contents: u64, again: Recovered) -> Result<Recovered, Violation> {
    if again.contents == contents {
        Ok(again)
    } else {
        Err(Violation(String::from("a second recovery found other contents than the first")))
    }
}

/// Runs `work` and returns the text of its panic, if any; a simulated crash is passed on.
pub(crate) fn quietly<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => Ok(value),
        Err(payload) if payload.is::<crate::CrashNow>() => std::panic::resume_unwind(payload),
        Err(payload) => Err(payload
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_else(|| String::from("a panic without text"))),
    }
}
