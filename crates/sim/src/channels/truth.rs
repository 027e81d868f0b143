//! The device of a history, and what is true of it whatever the processes know.

use super::order::Order;
use super::{SECTOR, fill, value_of};
use cbd_types::{ByteRange, Operation, Request};
use std::collections::{BTreeMap, BTreeSet};

/// Bits of a value behind those of the process and above those of its client.
const LIFE_BITS: u32 = 32;
const CLIENT_BITS: u32 = 40;

/// A value that is written once: by the request `number` of a process of a client.
pub fn value(client: usize, life: u64, number: u64) -> u64 {
    (client as u64) << CLIENT_BITS | life << LIFE_BITS | (number + 1)
}

/// Who executes a request, and when.
#[derive(Clone, Copy)]
pub struct Execution {
    /// It was outstanding when a former process of the server ended.
    pub is_former: bool,
    /// No line of a ring was damaged: the server knows what was outstanding.
    pub is_exact: bool,
}

/// The device, and what is true of it.
#[derive(Default)]
pub struct Truth {
    /// The value in each sector.
    sectors: BTreeMap<u64, u64>,
    /// The process of each client that may store: older ones are over.
    lives: BTreeMap<u64, u64>,
    /// Values whose writes their client knows to be complete.
    completed: BTreeSet<u64>,
    /// Sectors with values whose writes have a completion that a server has stored.
    stored: BTreeSet<(u64, u64)>,
    /// The same, of a completion that becomes visible before any later one, and is lost if its host ends before.
    completing: BTreeSet<(u64, u64)>,
    /// Sectors with values that a later request has replaced, which was not outstanding together with their own.
    replaced: BTreeSet<(u64, u64)>,
    /// What several clients have written and read.
    pub order: Order,
    now: u64,
    pub counts: BTreeMap<&'static str, u64>,
}

impl Truth {
    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// A moment after all others.
    pub fn moment(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// No process of the client before this one stores any more.
    pub fn lives(&mut self, client: usize, life: u64) {
        self.lives.insert(client as u64, life);
    }

    /// The client knows that a write is complete.
    pub fn completed(&mut self, value: u64) {
        self.completed.insert(value);
    }

    /// A server stores the completion of a request, with what that has written.
    pub fn completes(&mut self, written: Option<(ByteRange, u64)>, is_coherent: bool) {
        // Former ones are visible by now.
        self.stored.append(&mut self.completing);
        let Some((range, value)) = written else { return };
        let written = (range.start / SECTOR..range.end / SECTOR).map(|sector| (sector, value));
        if is_coherent { self.completing.extend(written) } else { self.stored.extend(written) }
    }

    /// A process of the server has ended.
    pub fn server_ends(&mut self) {
        self.completing.clear();
    }

    /// Executes a request.
    pub fn execute(&mut self, request: &mut Request, how: Execution) {
        let sectors = request.range.start / SECTOR..request.range.end / SECTOR;
        for sector in sectors {
            let at = (sector * SECTOR - request.range.start) as usize;
            match request.operation {
                Operation::Read => {
                    let value = self.sectors.get(&sector).copied().unwrap_or_default();
                    fill(&mut request.buffer[at..at + SECTOR as usize], value);
                }
                Operation::Write => {
                    let value = value_of(&request.buffer[at..at + SECTOR as usize]);
                    self.check_write(sector, value, how);
                    self.replace(sector, value, how);
                }
                Operation::Discard | Operation::WriteZeroes => self.replace(sector, 0, how),
                Operation::Flush => {}
            }
        }
    }

    fn check_write(&mut self, sector: u64, value: u64, how: Execution) {
        assert!(!self.completed.contains(&value), "{value:#x} is stored after its completion");
        let (client, life) = (value >> CLIENT_BITS, value >> LIFE_BITS & 0xff);
        let least = self.lives.get(&client).copied().unwrap_or_default();
        assert!(life >= least, "{value:#x} is stored after the session of its client");
        if how.is_exact {
            assert!(
                !self.stored.contains(&(sector, value)),
                "{value:#x} is stored after its completion was stored"
            );
            assert!(!self.replaced.contains(&(sector, value)), "{value:#x} is applied twice");
        }
    }

    fn replace(&mut self, sector: u64, value: u64, how: Execution) {
        let before = self.sectors.insert(sector, value).filter(|before| *before != value);
        let Some(before) = before else { return };
        if how.is_former {
            self.count("replaced_by_former");
        } else if !self.completing.contains(&(sector, before)) {
            self.replaced.insert((sector, before));
        }
    }
}
