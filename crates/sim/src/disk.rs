//! A simulated backing device. It reorders operations, has a volatile cache, fails on demand, and checks that its
//! user obeys the contract.
//!
//! Invariants:
//! - a power cut keeps any subset of the changed sectors that no flush has covered; each sector holds one of the
//!   values that were written to it;
//! - a flush covers the changes that had completed before the flush was submitted;
//! - a failed write leaves each of its sectors old or new; a failed flush permanently loses some of the sectors that
//!   it should have made durable, as a kernel does that drops the pages it could not write;
//! - a read that overlaps a change in flight returns each sector with its old or its new content;
//! - two overlapping changes in flight panic, as do operations past the end or of partial sectors: both are bugs of
//!   the caller.
//!
//! Elsewhere: the queues ([`crate::SimQueue`]), and which images are legal ([`crate::Oracle`]).

use crate::disk_queue::SimQueue;
use crate::image::DiskImage;
use crate::memory::CrashMemory;
use crate::random::Seeded;
use cbd_types::{BackingGeometry, BackingOp, ByteRange, Error, ErrorKind, Expected, OpToken, Result};
use parking_lot::Mutex;
use std::sync::Arc;

/// Which operations fail.
#[derive(Clone, Default, Debug)]
pub struct DiskFaults {
    /// How many reads in a thousand fail.
    pub read_permille: u64,
    /// How many writes, zeroes and discards in a thousand fail.
    pub change_permille: u64,
    /// How many flushes in a thousand fail.
    pub flush_permille: u64,
    /// Reads that touch these ranges fail.
    pub unreadable: Vec<ByteRange>,
    /// Writes, zeroes and discards that touch these ranges fail.
    pub unwritable: Vec<ByteRange>,
}

/// Counts of the operations of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DiskCounters {
    /// Reads completed.
    pub reads: u64,
    /// Writes completed.
    pub writes: u64,
    /// Write-zeroes completed.
    pub zeroes: u64,
    /// Discards completed.
    pub discards: u64,
    /// Verifications completed.
    pub verified: u64,
    /// Comparisons completed.
    pub compared: u64,
    /// Flushes completed.
    pub flushes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads that were in flight together with a change of the same range.
    pub reads_beside_changes: u64,
    /// Operations that were made to fail.
    pub failed: u64,
}

/// A change that the volatile cache holds.
#[derive(Clone)]
struct Change {
    range: ByteRange,
    /// None for zeroes.
    bytes: Option<Arc<[u8]>>,
}

/// An operation that was submitted and has not completed.
pub(crate) struct Flying {
    pub(crate) token: OpToken,
    pub(crate) op: BackingOp,
    /// The queue that submitted it.
    pub(crate) queue: u64,
    /// Polls before it may complete.
    pub(crate) delay: u64,
    /// For a flush: the number of changes that had completed when it was submitted.
    covers: u64,
}

pub(crate) struct State {
    geometry: BackingGeometry,
    current: DiskImage,
    durable: DiskImage,
    /// Completed changes without a flush, in order.
    unflushed: Vec<Change>,
    /// Number of changes that have left `unflushed`.
    flushed: u64,
    /// Operations in the order of submission.
    pub(crate) flying: Vec<Flying>,
    /// In a fork: the changes that were in flight on the original disk.
    left_behind: Vec<Change>,
    faults: DiskFaults,
    pub(crate) random: Seeded,
    pub(crate) latency_polls_max: u64,
    queues: u64,
    /// The memory of the process that uses the disk: when it has crashed, a thread of it that still runs submits nothing.
    user: Option<CrashMemory>,
    /// Queues with lower numbers belong to dead processes.
    pub(crate) first_living_queue: u64,
    counters: DiskCounters,
    /// A failed flush has left changes that reads show and that no later flush makes durable.
    has_lost: bool,
    /// Another disk of the same machine: what ends this one ends that one too.
    beside: Option<SimDisk>,
}

/// The disk; clones share it.
#[derive(Clone)]
pub struct SimDisk(Arc<Mutex<State>>);

impl std::fmt::Debug for SimDisk {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.with(|state| {
            out.debug_struct("SimDisk")
                .field("geometry", &state.geometry)
                .field("in_flight", &state.flying.len())
                .field("unflushed", &state.unflushed.len())
                .field("counters", &state.counters)
                .finish_non_exhaustive()
        })
    }
}

impl SimDisk {
    /// The geometry of an ordinary disk of `size` bytes: a volatile cache, and discards that zero.
    #[must_use]
    pub const fn ordinary(size: u64, sector: u32) -> BackingGeometry {
        BackingGeometry {
            size,
            sector,
            physical_sector: sector,
            rotational: false,
            volatile_cache: true,
            discard_zeroes: true,
            discard_granularity: sector,
        }
    }

    /// A disk that already holds data: every sector durably has the content
    /// [`INITIAL`](crate::Content::INITIAL).
    #[must_use]
    pub fn new(geometry: BackingGeometry, seed: u64) -> Self {
        assert_eq!(geometry.size % u64::from(geometry.sector), 0, "a disk is whole sectors");
        let image = DiskImage::fresh(geometry.size, geometry.sector as usize);
        Self(Arc::new(Mutex::new(State {
            geometry,
            durable: image.clone(),
            current: image,
            unflushed: Vec::new(),
            flushed: 0,
            flying: Vec::new(),
            left_behind: Vec::new(),
            faults: DiskFaults::default(),
            random: Seeded::new(seed),
            latency_polls_max: 4,
            queues: 0,
            user: None,
            first_living_queue: 0,
            counters: DiskCounters::default(),
            has_lost: false,
            beside: None,
        })))
    }

    /// Puts another disk into the same machine: forks, crashes and power cuts of this one are those of that one too.
    #[must_use]
    pub fn with_beside(self, other: Self) -> Self {
        self.with(|state| state.beside = Some(other));
        self
    }

    /// The other disk of the machine.
    #[must_use]
    pub fn beside(&self) -> Option<Self> {
        self.with(|state| state.beside.clone())
    }

    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.0.lock())
    }

    /// The geometry that the system reports.
    #[must_use]
    pub fn geometry(&self) -> BackingGeometry {
        self.with(|state| state.geometry)
    }

    /// A queue to the disk that works on `depth` operations at a time.
    #[must_use]
    pub fn queue(&self, depth: usize) -> SimQueue {
        let number = self.with(|state| {
            state.queues += 1;
            state.queues
        });
        SimQueue::new(self.clone(), number, depth)
    }

    /// Operations that queue `number` has in flight.
    #[must_use]
    pub fn in_flight_of(&self, number: u64) -> usize {
        self.with(|state| {
            if number < state.first_living_queue {
                return 0;
            }
            state.flying.iter().filter(|flying| flying.queue == number).count()
        })
    }

    /// Sets the seed of the later random decisions, so that forks of one disk differ.
    pub fn set_seed(&self, seed: u64) {
        self.with(|state| state.random = Seeded::new(seed));
    }

    /// Sets the number of polls after which an operation completes at the latest.
    pub fn set_latency(&self, polls: u64) {
        self.with(|state| state.latency_polls_max = polls);
    }

    /// Sets which later operations fail.
    pub fn set_faults(&self, faults: DiskFaults) {
        self.with(|state| state.faults = faults);
    }

    /// The operations so far.
    #[must_use]
    pub fn counters(&self) -> DiskCounters {
        self.with(|state| state.counters)
    }

    /// The content that a read returns at this moment.
    #[must_use]
    pub fn contents(&self) -> DiskImage {
        self.with(|state| state.current.clone())
    }

    /// Copies the content at offset `at` at this moment, without an operation.
    pub fn peek(&self, at: u64, into: &mut [u8]) {
        self.with(|state| state.current.read(at, into));
    }

    /// The content that certainly survives a power cut.
    #[must_use]
    pub fn durable(&self) -> DiskImage {
        self.with(|state| state.durable.clone())
    }

    /// A content that a power cut at this moment could leave; the disk itself does not change.
    #[must_use]
    pub fn image_after_power_cut(&self, seed: u64) -> DiskImage {
        self.with(|state| state.after_power_cut(&mut Seeded::new(seed)))
    }

    /// A copy of the disk without users, with the operations in flight and the volatile cache, to try several ends of
    /// one history. [`power_cut`](Self::power_cut) or [`process_crash`](Self::process_crash) decides the outcome of
    /// these.
    #[must_use]
    pub fn fork(&self) -> Self {
        self.with(|state| {
            let flying = state.flying.iter().filter_map(|flying| Change::of(&flying.op));
            Self(Arc::new(Mutex::new(State {
                geometry: state.geometry,
                current: state.current.clone(),
                durable: state.durable.clone(),
                unflushed: state.unflushed.clone(),
                flushed: state.flushed,
                flying: Vec::new(),
                left_behind: state.left_behind.iter().cloned().chain(flying).collect(),
                faults: state.faults.clone(),
                random: state.random.clone(),
                latency_polls_max: state.latency_polls_max,
                queues: state.queues,
                user: None,
                first_living_queue: state.queues + 1,
                counters: DiskCounters::default(),
                has_lost: state.has_lost,
                beside: state.beside.as_ref().map(Self::fork),
            })))
        })
    }

    /// Cuts the power: a random subset of the sectors that were not flushed remains. No queue works afterwards.
    pub fn power_cut(&self, seed: u64) {
        self.with(|state| {
            let image = state.after_power_cut(&mut Seeded::new(seed));
            state.durable.clone_from(&image);
            state.current = image;
            state.flushed += state.unflushed.len() as u64;
            state.unflushed.clear();
            state.flying.clear();
            state.left_behind.clear();
            state.has_lost = false;
            state.first_living_queue = state.queues + 1;
            state.beside.iter().for_each(|beside| beside.power_cut(seed ^ 1));
        });
    }

    /// Whether a power cut takes nothing from it.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.with(|state| {
            !state.has_lost
                && state.unflushed.is_empty()
                && state.left_behind.is_empty()
                && state.flying.is_empty()
        })
    }

    /// From this call on, the process with this memory uses the disk.
    pub fn used_by(&self, memory: &CrashMemory) {
        self.with(|state| {
            state.user = Some(memory.clone());
            state.beside.iter().for_each(|beside| beside.used_by(memory));
        });
    }

    /// Kills the process that uses the disk. Each operation that it had in flight takes effect whole, in part or not
    /// at all before the disk is opened again. No queue works afterwards.
    pub fn process_crash(&self, seed: u64) {
        self.with(|state| {
            let mut random = Seeded::new(seed);
            let flying: Vec<Change> = state.in_flight_changes().collect();
            state.flying.clear();
            state.left_behind.clear();
            for change in flying {
                for piece in change.some_sectors(state.sector(), &mut random) {
                    state.change(piece);
                }
            }
            state.first_living_queue = state.queues + 1;
            state.beside.iter().for_each(|beside| beside.process_crash(seed ^ 1));
        });
    }
}

impl Change {
    fn of(op: &BackingOp) -> Option<Self> {
        match op {
            BackingOp::Write { offset, buffer } => Some(Self {
                range: ByteRange::at(*offset, buffer.len() as u64),
                bytes: Some(buffer[..].into()),
            }),
            BackingOp::WriteZeroes { range } | BackingOp::Discard { range } => {
                Some(Self { range: *range, bytes: None })
            }
            BackingOp::Read { .. }
            | BackingOp::Verify { .. }
            | BackingOp::Compare { .. }
            | BackingOp::Flush => None,
        }
    }

    fn apply(&self, image: &mut DiskImage) {
        image.write(self.range, self.bytes.as_deref());
    }

    /// The change as a power cut or a failure leaves it: whole, not at all, or some of its sectors.
    fn some_sectors(&self, sector: u64, random: &mut Seeded) -> Vec<Self> {
        let choice = random.below(4);
        let part = |range: ByteRange| Self {
            range,
            bytes: self.bytes.as_ref().map(|bytes| {
                bytes[(range.start - self.range.start) as usize..(range.end - self.range.start) as usize]
                    .into()
            }),
        };
        match choice {
            0 => Vec::new(),
            1 => vec![part(self.range)],
            _ => self.range.split_at_multiples(sector).filter(|_| random.chance(500)).map(part).collect(),
        }
    }
}

/// The range of the disk that an operation accesses; a flush has none.
pub(crate) fn range_of(op: &BackingOp) -> Option<ByteRange> {
    match op {
        BackingOp::Read { offset, buffer } | BackingOp::Write { offset, buffer } => {
            Some(ByteRange::at(*offset, buffer.len() as u64))
        }
        BackingOp::WriteZeroes { range }
        | BackingOp::Discard { range }
        | BackingOp::Verify { range }
        | BackingOp::Compare { range, .. } => Some(*range),
        BackingOp::Flush => None,
    }
}

impl State {
    const fn sector(&self) -> u64 {
        self.geometry.sector as u64
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.current);
        if self.geometry.volatile_cache {
            self.unflushed.push(change);
        } else {
            change.apply(&mut self.durable);
        }
    }

    /// Whether the process that uses the disk has crashed. Its other threads end a little later.
    pub(crate) fn user_has_crashed(&self) -> bool {
        self.user.as_ref().is_some_and(CrashMemory::is_dead)
    }

    /// Accepts an operation. Panics if the caller broke the contract.
    pub(crate) fn submit(&mut self, queue: u64, token: OpToken, op: BackingOp) {
        if let Some(range) = range_of(&op) {
            let sector = self.sector();
            assert!(
                !range.is_empty() && range.start % sector == 0 && range.end % sector == 0,
                "{op:?} of {range} is not whole sectors of {sector} bytes"
            );
            assert!(
                range.end <= self.geometry.size,
                "{op:?} of {range} reaches past {} bytes",
                self.geometry.size
            );
            assert!(
                self.geometry.discard_zeroes || !matches!(op, BackingOp::Discard { .. }),
                "discard on a disk that does not promise zeroes"
            );
            for other in &self.flying {
                let Some(other_range) = range_of(&other.op) else { continue };
                let changes = [&op, &other.op].iter().filter(|op| op.changes()).count();
                if other_range.overlaps(&range) && changes > 0 {
                    assert!(
                        changes == 1,
                        "{op:?} of {range} while {:?} of {other_range} is in flight",
                        other.op
                    );
                    self.counters.reads_beside_changes += 1;
                }
            }
        }
        let delay = self.random.below(self.latency_polls_max + 1);
        let covers = self.flushed + self.unflushed.len() as u64;
        self.flying.push(Flying { token, op, queue, delay, covers });
    }

    /// Completes an operation.
    pub(crate) fn complete(&mut self, flying: &mut Flying) -> Result<()> {
        let fails = self.fails(&flying.op);
        self.counters.failed += u64::from(fails);
        if let Some(change) = Change::of(&flying.op) {
            if fails {
                let mut random = self.random.fork();
                for piece in change.some_sectors(self.sector(), &mut random) {
                    self.change(piece);
                }
            } else {
                self.counters.written_bytes += change.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
                self.change(change);
            }
        }
        match &mut flying.op {
            BackingOp::Read { buffer, .. } if fails => buffer.fill(0xee),
            BackingOp::Read { offset, buffer } => {
                self.counters.reads += 1;
                let range = ByteRange::at(*offset, buffer.len() as u64);
                self.current.read(range.start, buffer);
                self.show_some_changes(range, buffer);
            }
            BackingOp::Write { .. } => self.counters.writes += 1,
            BackingOp::WriteZeroes { .. } => self.counters.zeroes += 1,
            BackingOp::Discard { .. } => self.counters.discards += 1,
            BackingOp::Verify { .. } => self.counters.verified += 1,
            BackingOp::Compare { .. } if fails => {}
            BackingOp::Compare { range, expected } => {
                self.counters.compared += 1;
                return self.compare(*range, expected);
            }
            BackingOp::Flush => self.flush(flying.covers, fails),
        }
        if fails {
            return Err(Error::new(ErrorKind::Backing, "the simulated disk is set to fail this operation"));
        }
        Ok(())
    }

    /// Whether the range is as expected.
    fn compare(&mut self, range: ByteRange, expected: &Expected) -> Result<()> {
        let mut bytes = vec![0; range.len() as usize];
        self.current.read(range.start, &mut bytes);
        self.show_some_changes(range, &mut bytes);
        match expected.first_difference(0, &bytes, self.sector() as usize) {
            None => Ok(()),
            Some(found) => {
                Err(Error::new(ErrorKind::Mismatch, "the simulated disk has other content than expected")
                    .at_range(ByteRange::at(range.start + found.start, found.len())))
            }
        }
    }

    /// A read may see sectors of changes that are still in flight.
    fn show_some_changes(&mut self, range: ByteRange, buffer: &mut [u8]) {
        let mut random = self.random.fork();
        for change in self.flying.iter().filter_map(|flying| Change::of(&flying.op)) {
            let Some(both) = change.range.intersection(&range) else { continue };
            for piece in change.some_sectors(u64::from(self.geometry.sector), &mut random) {
                let Some(part) = piece.range.intersection(&both) else { continue };
                let out = &mut buffer[(part.start - range.start) as usize..(part.end - range.start) as usize];
                match &piece.bytes {
                    Some(bytes) => {
                        let from = (part.start - piece.range.start) as usize;
                        out.copy_from_slice(&bytes[from..from + out.len()]);
                    }
                    None => out.fill(0),
                }
            }
        }
    }

    /// Makes the changes durable that had completed before the flush was submitted. If the flush fails, some sectors
    /// become durable and the others never do.
    fn flush(&mut self, covers: u64, fails: bool) {
        let count = covers.saturating_sub(self.flushed) as usize;
        let covered: Vec<Change> = self.unflushed.drain(..count).collect();
        self.flushed += count as u64;
        if fails {
            let mut random = self.random.fork();
            let sector = self.sector();
            self.has_lost |= !covered.is_empty();
            for change in covered {
                change
                    .some_sectors(sector, &mut random)
                    .iter()
                    .for_each(|piece| piece.apply(&mut self.durable));
            }
        } else {
            self.counters.flushes += 1;
            covered.iter().for_each(|change| change.apply(&mut self.durable));
        }
    }

    fn fails(&mut self, op: &BackingOp) -> bool {
        let range = range_of(op);
        let (permille, bad) = match op {
            BackingOp::Read { .. } | BackingOp::Verify { .. } | BackingOp::Compare { .. } => {
                (self.faults.read_permille, &self.faults.unreadable)
            }
            BackingOp::Flush => (self.faults.flush_permille, &self.faults.unwritable),
            _ => (self.faults.change_permille, &self.faults.unwritable),
        };
        let in_bad = range.is_some_and(|range| bad.iter().any(|bad| bad.overlaps(&range)));
        in_bad || self.random.chance(permille)
    }

    fn in_flight_changes(&self) -> impl Iterator<Item = Change> {
        let flying = self.flying.iter().filter_map(|flying| Change::of(&flying.op));
        self.left_behind.iter().cloned().chain(flying)
    }

    fn after_power_cut(&self, random: &mut Seeded) -> DiskImage {
        let mut image = self.durable.clone();
        // Some cuts lose nothing and some everything: these two extremes find other bugs than a random subset does.
        let ends = random.below(6);
        let flying: Vec<Change> = self.in_flight_changes().collect();
        for change in self.unflushed.iter().chain(&flying) {
            match ends {
                0 => {}
                1 => change.apply(&mut image),
                _ => {
                    let pieces = change.some_sectors(self.sector(), random);
                    pieces.iter().for_each(|piece| piece.apply(&mut image));
                }
            }
        }
        image
    }
}

#[cfg(test)]
mod tests;
