//! The memory of one connection's requests and replies, part of the budget that all connections of the process share.
//!
//! Each export reserves the memory of its first [`GUARANTEED_CONNECTIONS`] connections when it starts, so that clients
//! of other exports, however many, cannot exclude its own. An eighth of the budget admits no further connections of an
//! export: it is left for exports that start later.
//!
//! Each connection has a reserved part, which no other connection can take: with that part alone it makes progress,
//! whatever other clients do. Memory beyond it comes from the rest of the budget, and only while the rest still holds
//! as much again and a quarter of the budget for new connections: many clients that do not read their replies leave
//! room for one more. No connection waits for memory of another: a request that exceeds the free memory is executed in
//! parts (`parts`), or waits for requests of its own connection.
//!
//! Invariants: all buffers of a connection, spare ones included, are counted; the total never exceeds the budget.
//!
//! Elsewhere: the memory that each request needs (`connection`).

use cbd_export::budget::{Budget, Guarantee, Share};
use cbd_export::buffers::Buffers;
use cbd_types::{AlignedBuffer, Error, ErrorKind, Result};
use std::sync::Arc;

/// Memory of a connection besides buffers: its thread, its receive buffer, replies without data.
const OVERHEAD: usize = 256 << 10;
/// Bytes of buffers that are reserved for each connection.
pub(super) const RESERVED: usize = 2 << 20;
/// Connections of an export for which memory is reserved from its start.
const GUARANTEED_CONNECTIONS: usize = 4;
/// Bytes that a connection takes from the budget at least.
pub(super) const CONNECTION: u64 = (RESERVED + OVERHEAD) as u64;
/// Smallest buffer in bytes.
const PAGE: usize = 4096;

#[derive(Debug)]
pub(super) struct Memory {
    budget: Arc<Budget>,
    share: Share,
    buffers: Buffers,
    /// Bytes of buffers and replies in use.
    used: usize,
    /// Bytes that may be in use together; a larger request is admitted only while no other is in use.
    limit: usize,
}

/// Bytes that a buffer of `length` bytes takes.
pub(super) const fn cost_of(length: usize) -> usize {
    if length == 0 {
        0
    } else if length < PAGE {
        PAGE
    } else {
        length.next_power_of_two()
    }
}

/// The part of `budget` for the first connections of an export. It is smaller if the budget is small for the number of
/// exports.
pub(super) fn guarantee(budget: &Arc<Budget>) -> Arc<Guarantee> {
    Guarantee::new(budget, CONNECTION, GUARANTEED_CONNECTIONS)
}

impl Memory {
    /// # Errors
    /// [`ErrorKind::NoSpace`] if the export has its guaranteed connections, and all connections together have taken so
    /// much that there is no room for one more.
    pub(super) fn new(guarantee: &Arc<Guarantee>, limit: usize) -> Result<Self> {
        let budget = guarantee.budget();
        let for_others = budget.limit() / 8 / CONNECTION * CONNECTION;
        let share = guarantee.take(for_others).ok_or_else(|| {
            Error::new(
                ErrorKind::NoSpace,
                format!(
                    "there is no memory for one more NBD client: {} of {} bytes are taken (nbd_memory in the configuration)",
                    budget.used(),
                    budget.limit()
                ),
            )
        })?;
        Ok(Self { budget: Arc::clone(budget), share, buffers: Buffers::default(), used: 0, limit })
    }

    /// Bytes that may be in use without a larger share of the budget.
    fn share_bytes(&self) -> usize {
        // It was a `usize` when it was added to the share.
        self.share.bytes() as usize - OVERHEAD
    }

    /// Takes `cost` bytes; false if they are not available.
    pub(super) fn take(&mut self, cost: usize) -> bool {
        let after = self.used + cost;
        if cost == 0 {
            return true;
        }
        if self.used > 0 && after > self.limit {
            return false;
        }
        // A buffer that is reused is already counted.
        let again = if cost > 0 && self.buffers.has(cost) { cost } else { 0 };
        let held = self.buffers.held() - again;
        if after + held > self.share_bytes() && !self.grow(after + held) {
            if after > self.share_bytes() && !self.grow(after) {
                return false;
            }
            self.buffers.trim();
        }
        self.used = after;
        true
    }

    /// Whether [`take`](Self::take) would succeed now; another connection may take the memory first.
    pub(super) fn has(&self, cost: usize) -> bool {
        let after = self.used + cost;
        let more = after.saturating_sub(self.share_bytes()) as u64;
        let free = || self.budget.limit().saturating_sub(self.budget.used());
        cost == 0
            || (self.used == 0 || after <= self.limit)
                && (more == 0 || free() >= more.saturating_add(self.left_for_others(after)))
    }

    /// Bytes of the budget that must remain free after a connection has taken `bytes`.
    fn left_for_others(&self, bytes: usize) -> u64 {
        (bytes as u64).saturating_add(self.budget.limit() / 4)
    }

    fn grow(&mut self, bytes: usize) -> bool {
        let rest = self.left_for_others(bytes);
        self.share.resize((bytes + OVERHEAD) as u64, rest)
    }

    /// Returns `cost` bytes that were taken.
    pub(super) fn give(&mut self, cost: usize) {
        debug_assert!(cost <= self.used, "more is returned than was taken");
        self.used -= cost.min(self.used);
        if self.is_short() {
            self.buffers.trim();
            self.shrink();
        }
    }

    /// A buffer of `length` bytes, for which memory was taken.
    pub(super) fn buffer(&mut self, length: usize) -> AlignedBuffer {
        self.buffers.take(length)
    }

    /// Keeps a buffer for reuse; its bytes remain counted.
    pub(super) fn keep_spare(&mut self, buffer: AlignedBuffer) {
        if self.used + self.buffers.held() <= self.share_bytes() && !self.is_short() {
            self.buffers.give(buffer);
        }
    }

    /// Whether more than half of the budget is taken; then spare buffers are freed.
    fn is_short(&self) -> bool {
        self.budget.used() > self.budget.limit() / 2
    }

    /// Whether nothing is in use.
    pub(super) const fn is_unused(&self) -> bool {
        self.used == 0
    }

    /// Whether no bytes are in use, but spare buffers or a share above the reserved part are held.
    pub(super) fn is_idle(&self) -> bool {
        self.used == 0 && (self.buffers.held() > 0 || self.share_bytes() > RESERVED)
    }

    /// Frees everything that is not in use.
    pub(super) fn trim(&mut self) {
        self.buffers.trim();
        self.shrink();
    }

    fn shrink(&mut self) {
        let needed = self.used.max(RESERVED);
        if needed < self.share_bytes() {
            self.share.resize((needed + OVERHEAD) as u64, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// The only connection of an export that has ended otherwise.
    fn memory(budget: &Arc<Budget>) -> Memory {
        connection(&guarantee(budget)).expect("room")
    }

    fn connection(export: &Arc<Guarantee>) -> Result<Memory> {
        Memory::new(export, 64 * MIB)
    }

    #[test]
    fn the_first_clients_of_an_export_find_memory_while_those_of_another_return_none() {
        let budget = Budget::new(1 << 30);
        let (attacked, other) = (guarantee(&budget), guarantee(&budget));
        let mut greedy = Vec::new();
        while let Ok(mut memory) = connection(&attacked) {
            while memory.take(MIB) {}
            greedy.push(memory);
        }
        assert!(greedy.len() > GUARANTEED_CONNECTIONS);
        let mut own: Vec<Memory> =
            (0..GUARANTEED_CONNECTIONS).map(|_| connection(&other).expect("guaranteed")).collect();
        assert!(own.iter_mut().all(|memory| memory.take(RESERVED)));
        assert_eq!(connection(&other).expect_err("no room").kind(), ErrorKind::NoSpace);
        own.pop();
        assert!(connection(&other).is_ok());
        let later = guarantee(&budget);
        assert!(
            (0..GUARANTEED_CONNECTIONS).all(|_| connection(&later).is_ok()),
            "an export that starts during the attack"
        );
        assert!(budget.used() <= budget.limit());
    }

    #[test]
    fn reserved_memory_is_available_whatever_other_connections_take() {
        let budget = Budget::new(20 << 20);
        let export = guarantee(&budget);
        let [mut greedy, mut modest] = [(); 2].map(|()| connection(&export).expect("room"));
        while greedy.take(MIB) {}
        assert!(greedy.used > RESERVED);
        assert!(modest.take(RESERVED));
        assert!(budget.used() <= budget.limit());
    }

    #[test]
    fn a_new_connection_finds_memory_while_many_others_return_none() {
        let budget = Budget::new(512 << 20);
        let mut greedy: Vec<Memory> = (0..60).map(|_| memory(&budget)).collect();
        for memory in &mut greedy {
            while memory.take(MIB) {}
        }
        assert!(budget.used() <= budget.limit());
        assert!(memory(&budget).take(RESERVED));
    }

    #[test]
    fn the_smallest_allowed_budget_admits_one_connection_and_a_smaller_one_none() {
        let export = guarantee(&Budget::new(CONNECTION));
        let mut memory = connection(&export).expect("room");
        assert!(memory.take(RESERVED));
        assert!(connection(&export).is_err());
        assert!(connection(&guarantee(&Budget::new(CONNECTION - 1))).is_err());
    }

    #[test]
    fn a_connection_beyond_the_budget_is_refused() {
        let budget = Budget::new(5 << 20);
        let export = guarantee(&budget);
        let _both = [(); 2].map(|()| connection(&export).expect("room"));
        assert_eq!(connection(&export).expect_err("no room").kind(), ErrorKind::NoSpace);
    }

    #[test]
    fn all_memory_returns_to_the_budget() {
        let budget = Budget::new(512 << 20);
        let export = guarantee(&budget);
        let mut memory = connection(&export).expect("room");
        assert!(memory.take(16 * MIB));
        let buffer = memory.buffer(16 * MIB);
        memory.keep_spare(buffer);
        memory.give(16 * MIB);
        assert!(memory.is_idle());
        memory.trim();
        assert!(!memory.is_idle());
        assert_eq!(budget.used(), GUARANTEED_CONNECTIONS as u64 * CONNECTION);
        drop((memory, export));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_request_above_the_bound_of_a_connection_is_admitted_alone() {
        let budget = Budget::new(512 << 20);
        let mut memory = Memory::new(&guarantee(&budget), 4 * MIB).expect("room");
        assert!(memory.has(8 * MIB) && memory.take(8 * MIB));
        assert!(!memory.has(4096) && !memory.take(4096));
        memory.give(8 * MIB);
        assert!(memory.take(4 * MIB) && !memory.take(4096));
    }
}
