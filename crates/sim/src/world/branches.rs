//! Worlds that an explorer looks at, and worlds that go on from a moment of another one.

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
    /// Runs `turns` turns while `explorer` looks at every moment; what goes wrong is in its tally. Returns both.
    #[must_use]
    pub fn explore(mut self, turns: u64, explorer: Explorer) -> (Happened, Explorer) {
        let explorer = self.explored(explorer, |world| {
            world.let_look();
            world.run(turns);
        });
        (self.happened, explorer)
    }

    /// Does `work`, in which the explorer begins to look with [`let_look`](Self::let_look), and notes what went wrong.
    pub(super) fn explored(&mut self, explorer: Explorer, work: impl FnOnce(&mut Self)) -> Explorer {
        self.explorer = Some(explorer);
        let outcome = quietly(|| {
            work(self);
            self.judge_points();
        });
        let Some(mut explorer) = self.explorer.take() else { unreachable!("it is always put back") };
        if let Err(text) = outcome {
            explorer.history_failed(text);
        }
        self.let_process_go();
        explorer.count_world(&self.happened);
        explorer
    }

    /// From now on the explorer looks.
    pub(super) fn let_look(&mut self) {
        if let Some(explorer) = &mut self.explorer {
            explorer.begin();
            explorer.watch(&self.memory, &self.disk);
        }
    }

    /// The moments since the last call are judged by what the clients know now.
    pub(super) fn judge_points(&mut self) {
        if let Some(mut explorer) = self.explorer.take() {
            explorer.judge(self);
            self.explorer = Some(explorer);
        }
    }

    /// A turn is over.
    pub(super) fn note_quiet_moment(&mut self) {
        if let Some(explorer) = &mut self.explorer {
            explorer.note_by_chance(&self.memory, &self.disk);
        }
        self.judge_points();
    }

    /// Does something that no explorer is to look at.
    pub(super) fn unwatched<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let explorer = self.explorer.take();
        if explorer.is_some() {
            self.memory.unwatch();
        }
        // A complaint passes through here, and the explorer must hear of it.
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
        }
    }

    /// Whether a bare disk with this content is a crash state of what the clients did so far.
    pub(crate) fn judge_bare_disk(&self, image: &DiskImage) -> Result<(), Violation> {
        self.oracle.moment_of(image, self.drained).map(drop)
    }

    /// Whether `status` dates a bare disk with this content not too late. Where something is or was damaged or parked, it does so only
    /// for a disk that is a crash state.
    pub(crate) fn judge_recovery_point(
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

    /// A world that begins with what a crash of this one has left in `memory` and on `disk`, and knows what this one
    /// knows.
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
        Self {
            options,
            random,
            memory,
            disk,
            oracle: self.oracle.clone(),
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
            recovery_place: None,
            is_damaged: self.is_damaged,
            is_disk_broken: self.is_disk_broken,
            expects_refusals: self.expects_refusals,
            parked_seen: (0, 0),
            happened: Happened::default(),
            explorer: None,
        }
    }

    /// As [`branch`](Self::branch), for a world in which nothing happens but what it is told.
    #[must_use]
    pub(crate) fn branch_in_order(&self, memory: CrashMemory, disk: SimDisk, seed: u64) -> Self {
        let mut world = self.make_branch(memory, disk, seed);
        world.options.crash_permille = 0;
        world.options.crash_in_recovery_permille = 0;
        world.bring_up();
        world
    }

    /// As [`branch`](Self::branch), with a memory that somebody has damaged.
    #[must_use]
    pub(crate) fn branch_damaged(&self, memory: CrashMemory, disk: SimDisk, seed: u64) -> Self {
        let mut world = self.make_branch(memory, disk, seed);
        world.options.crash_permille = 0;
        world.expect_damage();
        world.bring_up();
        world
    }

    /// Some turns, and what cannot be read is healed by overwriting it; then the bare disk must hold everything.
    pub(crate) fn live_on_damaged(mut self, turns: u64) -> Happened {
        self.run(turns);
        self.quiesce();
        for block in self.unreadable_changed() {
            self.submit(Wish { operation: Operation::Write, range: block, fua: false });
            self.quiesce();
        }
        let left = self.unreadable_changed();
        if !left.is_empty() {
            self.complain(format!("an overwrite has not healed {left:?}"));
        }
        self.finish()
    }

    /// Everything that was asked for completes, and is proved by marks.
    pub(crate) fn settle_down(&mut self) {
        self.quiesce();
        self.submit(Wish { operation: Operation::Flush, range: ByteRange::at(0, 0), fua: false });
        self.quiesce();
    }

    /// The cache's backend.
    pub(crate) const fn backend(&self) -> BackendId {
        self.backend
    }

    /// Some turns, a crash, and everything must be there.
    pub(crate) fn live_on(mut self, turns: u64) -> Happened {
        self.run(turns);
        self.crash();
        self.check_changed();
        if self.random.chance(300) {
            return self.finish();
        }
        self.let_process_go();
        self.happened
    }
}
