//! Small worlds that play given acts; an explorer explores the last one.

use super::World;
use crate::explorer::Explorer;
use crate::workload::Wish;
use cbd_engine::Settings;

/// The next event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    /// The client submits a request and waits for it.
    Ask(Wish),
    /// One step of writeback at the maximum rate, without reclaim.
    WritebackStep,
    /// Writeback until there is nothing to do.
    Writeback,
    /// Reclaim of all clean segments.
    Reclaim,
    /// The process dies.
    CrashProcess,
    /// The power fails.
    CutPower,
}

impl World {
    /// Plays `acts`; `explorer` explores every moment of the last act, and the moment after it.
    pub(crate) fn play(mut self, acts: &[Act], explorer: Explorer) -> Explorer {
        self.explored(explorer, |world| {
            let Some((last, before)) = acts.split_last() else { return };
            before.iter().for_each(|act| world.act(*act));
            world.begin_exploration();
            world.act(*last);
            if let Some(explorer) = &world.explorer {
                explorer.note(&world.memory, &world.disk);
            }
        })
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Ask(wish) => {
                self.submit(wish);
                while !self.asked.is_empty() && self.poll(0) {}
                if !self.asked.is_empty() {
                    self.quiesce();
                }
            }
            Act::WritebackStep => {
                self.set_gc(90);
                self.process().cache().request_drain();
                self.maintain();
                self.note_drained();
            }
            Act::Writeback => {
                self.set_gc(90);
                self.process().cache().request_drain();
                self.run_worker_until_idle();
            }
            Act::Reclaim => {
                self.set_gc(0);
                self.run_worker_until_idle();
            }
            Act::CrashProcess => self.end(true),
            Act::CutPower => self.end(false),
        }
        self.check_points();
    }

    fn set_gc(&mut self, gc_percent: u8) {
        let consistency = self.options.consistency;
        let settings = Settings { gc_percent, consistency, ..Settings::default() };
        if let Err(error) = self.process().cache().set_settings(settings) {
            self.fail(error);
        }
    }
}
