//! What one client knows of the device, if it is the only one.

use super::{SECTOR, value_of};
use cbd_types::{Operation, Request};
use std::collections::BTreeMap;

/// A request in flight.
pub struct Flying {
    pub operation: Operation,
    pub start: u64,
    pub value: u64,
    /// Its number among all requests of a history.
    pub number: u64,
    /// Its sectors, with what may be in them when it begins.
    pub sectors: Vec<(u64, Vec<Stored>)>,
}

/// What a request may have stored in a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stored {
    /// The number of the request.
    pub number: u64,
    pub value: u64,
    /// Whether its client has died, so that it is not known whether it was executed.
    pub is_unknown: bool,
}

/// What may be in each sector once all requests that were submitted are complete, in the order of submission.
#[derive(Default)]
pub struct Known {
    sectors: BTreeMap<u64, Vec<Stored>>,
    requests: u64,
}

impl Known {
    fn of(&mut self, sector: u64) -> &mut Vec<Stored> {
        let blank = Stored { number: 0, value: 0, is_unknown: false };
        self.sectors.entry(sector).or_insert_with(|| vec![blank])
    }

    /// The client has died.
    pub fn forget(&mut self) {
        self.sectors.values_mut().flatten().for_each(|stored| stored.is_unknown = true);
    }

    pub fn submit(&mut self, request: &Request) -> Flying {
        let is_write = request.operation == Operation::Write;
        let value = if is_write { value_of(&request.buffer[..SECTOR as usize]) } else { 0 };
        let changes = !matches!(request.operation, Operation::Read | Operation::Flush);
        self.requests += 1;
        let number = self.requests;
        let sectors = (request.range.start / SECTOR..request.range.end / SECTOR).map(|sector| {
            let values = self.of(sector);
            let before = values.clone();
            if changes {
                values.push(Stored { number, value, is_unknown: false });
            }
            (sector, before)
        });
        let sectors = sectors.collect();
        Flying { operation: request.operation, start: request.range.start, value, number, sectors }
    }

    /// A change is complete: what was there before is gone.
    pub fn stored(&mut self, sector: u64, number: u64) {
        self.of(sector).retain(|one| one.number >= number);
    }

    /// A read has found a value: of what could be there before it, the others are not.
    pub fn found(&mut self, sector: u64, value: u64, before: &[Stored]) {
        self.of(sector)
            .retain(|one| one.value == value || !before.iter().any(|other| other.number == one.number));
    }
}
