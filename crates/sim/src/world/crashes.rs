//! The ends of simulated processes, and the state that their successors must find.

use super::World;
use super::neighbour::Neighbour;
use crate::crash::until_crash;
use crate::memory::Keep;
use crate::oracle::Oracle;
use crate::workload::Wish;
use cbd_engine::Consistency;
use cbd_types::{ByteRange, Operation};
use std::sync::Arc;

impl World {
    /// Ends the process with a crash or a power cut, and starts the next one. Its recovery crashes, too, at its
    /// `crash_recovery_at`-th store, write-back or fence.
    pub fn crash_with(&mut self, crash_recovery_at: Option<u64>) {
        self.crash_recovery_at = crash_recovery_at;
        self.crash();
    }

    /// Ends the process with a crash or a power cut, and starts the next one.
    pub fn crash(&mut self) {
        self.check_points();
        loop {
            let process = !self.random.chance(500) || !self.options.power_cuts;
            self.take_down(process);
            if self.restart() {
                return;
            }
            self.happened.crashes_in_recovery += 1;
        }
    }

    /// Kills the process or cuts the power, and starts the next process.
    pub(super) fn end(&mut self, process: bool) {
        self.take_down(process);
        if !self.restart() {
            self.crash();
        }
    }

    fn take_down(&mut self, process: bool) {
        let seed = self.random.next();
        if self.options.can_bypass() && self.options.write_errors_permille > 0 {
            // A flush of the background worker may have failed, and no client was told of it.
            self.oracle.flush_failed();
        }
        if process {
            self.happened.process_crashes += 1;
            self.memory = self.memory.process_crash();
            self.disk.process_crash(seed);
        } else {
            self.happened.power_cuts += 1;
            self.memory = self.memory.power_cut(seed, Keep::Any);
            self.disk.power_cut(self.random.next());
            self.had_power_cut = true;
        }
    }

    /// Starts a process on the present contents; false if it crashed.
    fn restart(&mut self) -> bool {
        self.end_process();
        self.draining = None;
        self.asked.clear();
        self.done.clear();
        self.environment = Arc::new(self.environment.successor(self.random.next()));
        let by_chance = self.random.chance(self.options.crash_in_recovery_permille);
        let event = by_chance.then(|| self.random.between(1, 6));
        if let Some(event) = self.crash_recovery_at.take().or(event) {
            self.memory.crash_after(event, self.random.next());
        }
        if let Some(explorer) = &self.explorer {
            explorer.watch(&self.memory, &self.disk);
        }
        let crashed = until_crash(|| self.open()).is_err();
        self.check_points();
        if crashed {
            return false;
        }
        self.memory.never_crash();
        self.take_over();
        true
    }

    /// Starts the first process of a branch.
    pub(super) fn bring_up(&mut self) {
        self.open();
        self.take_over();
    }

    fn take_over(&mut self) {
        if self.options.consistency == Consistency::Strict || self.random.chance(500) {
            self.check_backing();
        }
        self.unwatched(Self::settle);
    }

    /// Determines the outcome of the requests that the last process left open, or that failed.
    pub fn settle(&mut self) {
        self.read_clock();
        let mut oracle = std::mem::replace(&mut self.oracle, Oracle::new(0, self.options.sector, 0));
        let verdict = if std::mem::take(&mut self.had_power_cut) && self.options.can_bypass() {
            oracle.settle_after_power_cut(|range| self.read_now(range))
        } else if self.options.can_bypass() {
            oracle.settle_unflushed(|range| self.read_now(range))
        } else {
            oracle.settle(|range| self.read_now(range))
        };
        self.oracle = oracle;
        self.expect(verdict);
        self.check_neighbour(Neighbour::settle);
    }

    /// Ends the errors of the disk, and determines the outcome of the changes that failed.
    pub fn settle_after_errors(&mut self) {
        self.memory.never_crash();
        self.options.write_errors_permille = 0;
        self.set_faults(true);
        self.quiesce();
        // A flush tells each client of an earlier one that failed.
        for client in 0..self.options.clients {
            self.submit_to(
                client,
                Wish { operation: Operation::Flush, range: ByteRange::at(0, 0), fua: false },
            );
        }
        self.quiesce();
        self.settle();
    }

    /// Shuts the process down cleanly.
    pub fn stop(&mut self) {
        self.quiesce();
        self.happened.stops += 1;
        self.process().stop();
    }

    /// Shuts the process down cleanly, and starts the next one.
    pub fn stop_and_start(&mut self) {
        self.memory.never_crash();
        self.stop();
        let seed = self.random.next();
        if self.options.power_cuts && self.random.chance(500) {
            self.memory = self.memory.power_cut(seed, Keep::Any);
            self.disk.power_cut(self.random.next());
            self.had_power_cut = true;
        } else {
            self.memory = self.memory.process_crash();
            self.disk.process_crash(seed);
        }
        if !self.restart() {
            self.happened.crashes_in_recovery += 1;
            self.crash();
        }
    }
}
