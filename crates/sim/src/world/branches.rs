//! Worlds that an explorer explores, and worlds that continue from a moment of another world.

use super::{Happened, World, WorldOptions};
use crate::disk::SimDisk;
use crate::explorer::Expected;
use crate::explorer::{Explorer, quietly};
use crate::image::DiskImage;
use crate::memory::CrashMemory;
use crate::oracle::{Expectation, Oracle, Violation};
use crate::random::Seeded;
use crate::workload::Wish;
use cbd_engine::CacheStatus;
use cbd_types::{BackendId, ByteRange, Operation};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

impl World {
    /// Runs `turns` turns while `explorer` explores every moment; its tally holds the violations. Returns both.
    #[must_use]
    pub fn explore(mut self, turns: u64, explorer: Explorer) -> (Happened, Explorer) {
        let explorer = self.explored(explorer, |world| {
            world.begin_exploration();
            world.run(turns);
        });
        (self.happened, explorer)
    }

    /// Runs `work`, in which [`begin_exploration`](Self::begin_exploration) starts the exploration, and records
    /// violations.
    pub(super) fn explored(&mut self, explorer: Explorer, work: impl FnOnce(&mut Self)) -> Explorer {
        self.explorer = Some(explorer);
        let outcome = quietly(|| {
            work(self);
            self.check_points();
        });
        let Some(mut explorer) = self.explorer.take() else { unreachable!("it is always put back") };
        if let Err(text) = outcome {
            explorer.history_failed(text);
        }
        self.end_process();
        explorer.count_world(&self.happened);
        explorer
    }

    /// Starts the exploration.
    pub(super) fn begin_exploration(&mut self) {
        if let Some(explorer) = &mut self.explorer {
            explorer.begin();
            explorer.watch(&self.memory, &self.disk);
        }
    }

    /// Checks the moments since the last call against the present knowledge of the clients.
    pub(super) fn check_points(&mut self) {
        if let Some(mut explorer) = self.explorer.take() {
            explorer.check(self);
            self.explorer = Some(explorer);
        }
    }

    /// Called at the end of a turn.
    pub(super) fn note_quiet_moment(&mut self) {
        if let Some(explorer) = &mut self.explorer {
            explorer.note_by_chance(&self.memory, &self.disk);
        }
        self.check_points();
    }

    /// Runs `work` without exploration.
    pub(super) fn unwatched<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let explorer = self.explorer.take();
        if explorer.is_some() {
            self.memory.unwatch();
        }
        // A violation panics through this function, and the explorer must receive it.
        let outcome = catch_unwind(AssertUnwindSafe(|| work(self)));
        if let Some(explorer) = explorer {
            explorer.watch(&self.memory, &self.disk);
            self.explorer = Some(explorer);
        }
        outcome.unwrap_or_else(|payload| resume_unwind(payload))
    }

    pub(crate) const fn oracle(&self) -> &Oracle {
        &self.oracle
    }

    pub(crate) fn expected<'a>(&self, contents: &'a Expectation) -> Expected<'a> {
        Expected {
            backend: self.backend,
            contents,
            drained: self.drained_epoch,
            clock_ms: self.environment.clock_ms(),
            beside: self.neighbour.as_ref().map(|neighbour| neighbour.expected(crate::explorer::UNIT)),
        }
    }

    /// Whether a disk with this content is a crash state of the changes of the clients so far.
    pub(crate) fn check_bare_disk(&self, image: &DiskImage) -> Result<(), Violation> {
        self.oracle.moment_of(image, self.drained).map(drop)
    }

    /// Checks that the recovery point in `status` is not too late for a disk with this content. If data is or was
    /// damaged or parked, this holds only while the status reports the disk as crash-consistent.
    pub(crate) fn check_recovery_point(
        &self,
        image: &DiskImage,
        status: &CacheStatus,
    ) -> Result<(), Violation> {
        let is_whole = !self.is_damaged && self.options.unwritable.is_empty();
        if is_whole || status.backing_is_consistent {
            self.oracle.check_recovery_point(image, status.drained_wall_ms)
        } else {
            Ok(())
        }
    }

    /// A world that continues from the contents that a crash of this one has left in `memory` and on `disk`, with the
    /// oracle of this one.
    #[must_use]
    pub(crate) fn branch(&self, memory: CrashMemory, disk: SimDisk, seed: u64) -> Self {
        let mut world = self.make_branch(memory, disk, seed);
        world.bring_up();
        world
    }

    fn make_branch(&self, memory: CrashMemory, disk: SimDisk, seed: u64) -> Self {
        let mut random = Seeded::new(seed);
        let options =
            WorldOptions { seed, crash_permille: 20, crash_in_recovery_permille: 300, ..self.options };
        let environment = Arc::new(self.environment.successor(random.next()));
        let beside = self.neighbour.as_ref().zip(disk.beside());
        let neighbour = beside.map(|(neighbour, disk)| neighbour.branch(disk));
        let mut oracle = self.oracle.clone();
        if self.options.varies_route && self.options.write_errors_permille > 0 {
            // A flush may have failed, and no client was told of it.
            oracle.flush_failed();
        }
        Self {
            options,
            random,
            memory,
            disk,
            oracle,
            workload: self.workload.clone(),
            segment_area: self.segment_area,
            backend: self.backend,
            process: None,
            environment,
            asked: BTreeMap::new(),
            next_id: 0,
            done: Vec::new(),
            draining: None,
            drained: self.drained,
            drained_epoch: self.drained_epoch,
            crash_recovery_at: None,
            is_damaged: self.is_damaged,
            is_disk_broken: self.is_disk_broken,
            had_power_cut: true,
            expects_refusals: self.expects_refusals,
            parked_seen: (0, 0),
            index_resize: None,
            happened: Happened::default(),
            explorer: None,
            neighbour,
            route_changes: 0,
        }
    }

    /// As [`branch`](Self::branch), for a world without random crashes.
    #[must_use]
    pub(crate) fn branch_in_order(&self, memory: CrashMemory, disk: SimDisk, seed: u64) -> Self {
        let mut world = self.make_branch(memory, disk, seed);
        world.options.crash_permille = 0;
        world.options.crash_in_recovery_permille = 0;
        world.bring_up();
        world
    }

    /// As [`branch`](Self::branch), with a damaged memory.
    #[must_use]
    pub(crate) fn branch_damaged(&self, memory: CrashMemory, disk: SimDisk, seed: u64) -> Self {
        let mut world = self.make_branch(memory, disk, seed);
        world.options.crash_permille = 0;
        world.expect_damage();
        world.bring_up();
        world
    }

    /// Runs some turns; then repairs unreadable blocks by overwriting them, and expects the disk alone to hold
    /// everything.
    pub(crate) fn continue_damaged(mut self, turns: u64) -> Happened {
        self.run(turns);
        self.quiesce();
        for block in self.unreadable_changed() {
            self.submit(Wish { operation: Operation::Write, range: block, fua: false });
            self.quiesce();
        }
        let left = self.unreadable_changed();
        if !left.is_empty() {
            self.fail(format!("an overwrite has not healed {left:?}"));
        }
        self.finish()
    }

    /// Continues until every request is complete, and marks prove all records.
    pub(crate) fn settle_down(&mut self) {
        self.quiesce();
        self.submit(Wish { operation: Operation::Flush, range: ByteRange::at(0, 0), fua: false });
        self.quiesce();
    }

    /// Whether changes can go past the cache.
    pub(crate) fn can_bypass(&self) -> bool {
        self.options.can_bypass()
    }

    /// The cache's backend.
    pub(crate) const fn backend(&self) -> BackendId {
        self.backend
    }

    /// Runs some turns and a crash; then every acknowledged change must be present.
    pub(crate) fn continue_and_check(mut self, turns: u64) -> Happened {
        self.run(turns);
        self.crash();
        self.check_changed();
        if self.random.chance(300) {
            return self.finish();
        }
        self.end_process();
        self.happened
    }
}
