//! Exhaustive small worlds: every sequence of a few acts over three overlapping ranges, from three initial states.
//! Each sequence is played with the crash states of its last act; the shorter sequences cover those of the earlier
//! acts.
//!
//! Invariants: the number of a batch decides its sequences, and the batches up to [`batches`] hold every
//! sequence once.

use crate::explorer::{Effort, Explorer, Tally};
use crate::random::mix;
use crate::watchdog::Watchdog;
use crate::workload::Wish;
use crate::world::{Act, World, WorldOptions};
use cbd_engine::Consistency;
use cbd_types::{ByteRange, Operation};
use std::time::Duration;

/// Sequences of a batch.
const BATCH: u64 = 200;

/// The state of the cache when a sequence begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Beginning {
    /// Nothing was ever written.
    Young,
    /// Data in several epochs that the disk does not have.
    Dirty,
    /// Full and clean, with reused segments.
    Full,
}

const BEGINNINGS: [Beginning; 3] = [Beginning::Young, Beginning::Dirty, Beginning::Full];

/// The ranges: two that cover a block in part, and the whole block.
const RANGES: [ByteRange; 3] = [
    ByteRange { start: 0, end: 1024 },
    ByteRange { start: 512, end: 2048 },
    ByteRange { start: 0, end: 4096 },
];

/// All acts.
fn acts() -> Vec<Act> {
    let ask = |operation, range, fua| Act::Ask(Wish { operation, range, fua });
    let mut acts = Vec::new();
    for range in RANGES {
        acts.extend([
            ask(Operation::Write, range, false),
            ask(Operation::Write, range, true),
            ask(Operation::Discard, range, false),
            ask(Operation::WriteZeroes, range, false),
            ask(Operation::Read, range, false),
        ]);
    }
    acts.extend([
        ask(Operation::Flush, ByteRange::at(0, 0), false),
        Act::WritebackStep,
        Act::Writeback,
        Act::Reclaim,
        Act::CrashProcess,
        Act::CutPower,
    ]);
    acts
}

/// The number of sequences of `length` acts.
#[must_use]
pub fn sequences(length: u32) -> u64 {
    (acts().len() as u64).pow(length) * BEGINNINGS.len() as u64
}

/// The number of batches of such sequences.
#[must_use]
pub fn batches(length: u32) -> u64 {
    sequences(length).div_ceil(BATCH)
}

/// Plays the sequences of one batch; batches 1 to [`batches`] play all sequences, in a mixed order.
#[must_use]
pub fn explore(name: &'static str, length: u32, batch: u64, effort: Effort, only: Option<u64>) -> Tally {
    let _watchdog = Watchdog::new(Duration::from_secs(1200), format!("world {name}, seed {batch}"));
    let total = sequences(length);
    let beginnings = BEGINNINGS.map(begin);
    let mut explorer = Explorer::new(name, batch, effort, only);
    let mut played = 0;
    for number in (batch.saturating_sub(1) * BATCH)..(batch * BATCH).min(total) {
        // A stride that is coprime to the total reaches every sequence once.
        let sequence = (number as u128 * u128::from(stride(total)) % u128::from(total)) as u64;
        let (beginning, acts) = decode(sequence, length);
        let world = &beginnings[beginning];
        let (memory, disk) = (world.memory().fork(), world.disk().fork());
        disk.process_crash(1);
        explorer = explorer.next_history(format!("{:?}, then {acts:?}", BEGINNINGS[beginning]));
        explorer = world.branch_in_order(memory, disk, mix(sequence)).play(&acts, explorer);
        played += 1;
    }
    let mut tally = explorer.into_tally();
    tally.histories = played;
    *tally.sequences.entry(length).or_default() += played;
    tally
}

fn stride(total: u64) -> u64 {
    let common = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (total * 5 / 8..).find(|stride| common(*stride, total) == 1).unwrap_or(1)
}

fn decode(sequence: u64, length: u32) -> (usize, Vec<Act>) {
    let all = acts();
    let beginning = (sequence % BEGINNINGS.len() as u64) as usize;
    let mut rest = sequence / BEGINNINGS.len() as u64;
    let mut chosen = Vec::new();
    for _ in 0..length {
        chosen.push(all[(rest % all.len() as u64) as usize]);
        rest /= all.len() as u64;
    }
    (beginning, chosen)
}

fn begin(beginning: Beginning) -> World {
    let mut world = World::new(WorldOptions {
        size: 1 << 20,
        segments: 9,
        lanes_max: 1,
        clients: 1,
        fickle_permille: 0,
        crash_permille: 0,
        crash_in_recovery_permille: 0,
        ..WorldOptions::small(1, Consistency::Strict)
    });
    let write = |world: &mut World, start: u64, length: u64| {
        world.submit(Wish { operation: Operation::Write, range: ByteRange::at(start, length), fua: false });
        world.quiesce();
    };
    match beginning {
        Beginning::Young => {}
        Beginning::Dirty => {
            for round in 0..3 {
                write(&mut world, 512 * round, 1024);
                write(&mut world, 64 << 10, 4096);
                world.settle_down();
            }
        }
        Beginning::Full => {
            for round in 0..40 {
                write(&mut world, (64 << 10) + round % 7 * (16 << 10), 16 << 10);
            }
            write(&mut world, 0, 4096);
            world.drain();
        }
    }
    world.settle_down();
    world
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_batches_hold_every_sequence_once() {
        let total = sequences(2);
        let step = stride(total);
        let numbers: BTreeSet<u64> = (0..total)
            .map(|number| (u128::from(number) * u128::from(step) % u128::from(total)) as u64)
            .collect();
        assert_eq!(numbers.len() as u64, total);
        let decoded: BTreeSet<String> =
            numbers.iter().map(|number| format!("{:?}", decode(*number, 2))).collect();
        assert_eq!(decoded.len() as u64, total);
    }
}
