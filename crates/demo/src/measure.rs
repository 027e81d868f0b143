//! The measurement of 4 KiB requests to random blocks, one at a time.
//!
//! Invariants: every write is logged, and every read is compared with the log, outside the measured time.

use crate::block::{BLOCK, Log, Random, Verdict};
use crate::interrupt;
use crate::output::Bar;
use crate::target::{Io, Sync, Target};
use cbd_types::{AlignedBuffer, Error, ErrorKind, Result};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Bytes of one sequential read.
pub const PIECE: usize = 256 << 10;
const SLOTS_OF_PIECE: u32 = (PIECE / BLOCK) as u32;

/// The measurement of one kind of request.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Figures {
    /// Requests a second.
    pub iops: f64,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the latency in microseconds.
    pub p99_us: f64,
    /// 99.9th percentile of the latency in microseconds.
    pub p999_us: f64,
    /// Requests that were measured.
    pub count: u64,
}

impl Figures {
    /// The figures of requests that took `nanoseconds` each and `elapsed` in all.
    pub fn of(mut nanoseconds: Vec<u64>, elapsed: Duration) -> Self {
        nanoseconds.sort_unstable();
        let count = nanoseconds.len();
        // The least value that this share of the requests did not exceed.
        let at = |per_mille: usize| {
            let rank = (count * per_mille).div_ceil(1000).max(1) - 1;
            nanoseconds.get(rank).map_or(0.0, |&time| tenth(time as f64 / 1000.0))
        };
        Self {
            iops: tenth(count as f64 / elapsed.as_secs_f64().max(1e-9)),
            p50_us: at(500),
            p99_us: at(990),
            p999_us: at(999),
            count: count as u64,
        }
    }
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Writes and reads of one device.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Pair {
    /// Writes.
    pub write: Figures,
    /// Reads.
    pub read: Figures,
    /// Bytes of the measured reads that were not in the cache; none without a cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_missed_bytes: Option<u64>,
}

/// Maximum number of passes over the working set before reads are measured. A cache admits a scan in its second
/// pass.
const PASSES: u32 = 6;

/// Measures writes, then reads, each for `duration`. In between it reads the working set from begin to end: once,
/// or with a cache, whose missed bytes `missed` counts, until no read misses.
///
/// # Errors
/// The error of the device, or wrong data that it returned.
pub fn measure(
    target: &Target,
    log: &Log,
    duration: Duration,
    missed: Option<&dyn Fn() -> Result<u64>>,
    bar: &dyn Fn(&str) -> Bar,
) -> Result<Pair> {
    let count = || missed.map(|missed| missed()).transpose();
    let mut io = target.open(Sync::Completed)?;
    let write = timed(&mut io, log, duration, true, bar("random writes"))?;
    let mut before = count()?;
    for _ in 0..PASSES {
        read_all(&mut io, log, &bar("reading everything"), |slot, block| log.validate(slot, block))?
            .check("reading back")?;
        let now = count()?;
        if now == before {
            break;
        }
        before = now;
    }
    let read = timed(&mut io, log, duration, false, bar("random reads"))?;
    let read_missed_bytes = count()?.zip(before).map(|(now, before)| now.saturating_sub(before));
    Ok(Pair { write, read, read_missed_bytes })
}

fn timed(io: &mut Io, log: &Log, duration: Duration, is_write: bool, bar: Bar) -> Result<Figures> {
    let mut random = Random::new(if is_write { 1 } else { 2 });
    let mut buffer = AlignedBuffer::zeroed(BLOCK);
    let mut nanoseconds = Vec::new();
    let begun = Instant::now();
    let mut shown = begun;
    loop {
        let slot = random.below(log.slots());
        if is_write {
            log.issue(slot, &mut buffer);
        }
        let start = Instant::now();
        if is_write {
            io.write(slot, &buffer)?
        } else {
            io.read(slot, &mut buffer)?
        }
        let end = Instant::now();
        nanoseconds.push(u64::try_from((end - start).as_nanos()).unwrap_or(u64::MAX));
        if is_write {
            log.acknowledge(slot);
        } else if log.validate(slot, &buffer) != Verdict::Right {
            let text = format!("block {slot} was read and differs from the data that was written");
            return Err(Error::new(ErrorKind::Damaged, text));
        }
        if end - shown > Duration::from_millis(50) {
            interrupt::check()?;
            shown = end;
            bar.set((end - begun).as_secs_f64() / duration.as_secs_f64());
        }
        if end - begun >= duration {
            return Ok(Figures::of(nanoseconds, end - begun));
        }
    }
}

/// The result of a comparison with the log.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Compared {
    /// Blocks that were compared.
    pub blocks: u64,
    /// Acknowledged writes of the blocks with the right content.
    pub verified: u64,
    /// Acknowledged writes that are lost.
    pub lost: u64,
    /// Blocks that contain no version of themselves.
    pub wrong: u64,
}

impl Compared {
    /// Adds the result of one block, to which `writes` writes were acknowledged.
    pub fn add(&mut self, verdict: Verdict, writes: u64) {
        self.blocks += 1;
        match verdict {
            Verdict::Right => self.verified += writes,
            Verdict::Older(lost) => {
                self.lost += u64::from(lost);
                self.verified += writes.saturating_sub(u64::from(lost));
            }
            Verdict::Wrong => {
                self.wrong += 1;
                self.lost += writes;
            }
        }
    }

    /// The sum of two results.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            blocks: self.blocks + other.blocks,
            verified: self.verified + other.verified,
            lost: self.lost + other.lost,
            wrong: self.wrong + other.wrong,
        }
    }

    /// An error if a write is lost or a block is wrong.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] with the numbers.
    pub fn check(self, name: &str) -> Result<Self> {
        if self.lost == 0 && self.wrong == 0 {
            return Ok(self);
        }
        let text = format!(
            "{name}: {} acknowledged writes are lost, {} of {} blocks contain data that was never written there",
            self.lost, self.wrong, self.blocks
        );
        Err(Error::new(ErrorKind::Damaged, text))
    }
}

/// Reads all blocks from begin to end and lets `check` compare them with the log.
///
/// # Errors
/// The error of the device.
pub fn read_all(
    io: &mut Io,
    log: &Log,
    bar: &Bar,
    check: impl Fn(u32, &[u8]) -> Verdict,
) -> Result<Compared> {
    let mut buffer = AlignedBuffer::zeroed(PIECE);
    let mut compared = Compared::default();
    let mut first = 0;
    while first < log.slots() {
        interrupt::check()?;
        let slots = SLOTS_OF_PIECE.min(log.slots() - first);
        let piece = &mut buffer[..slots as usize * BLOCK];
        io.read(first, piece)?;
        for (slot, block) in (first..).zip(piece.chunks(BLOCK)) {
            compared.add(check(slot, block), log.acknowledged(slot));
        }
        first += slots;
        bar.set(f64::from(first) / f64::from(log.slots()));
    }
    Ok(compared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_the_least_value_that_its_share_does_not_exceed() {
        let figures = Figures::of((1..=1000).map(|index| index * 1000).collect(), Duration::from_secs(2));
        assert_eq!(
            figures,
            Figures { iops: 500.0, p50_us: 500.0, p99_us: 990.0, p999_us: 999.0, count: 1000 }
        );
    }

    #[test]
    fn one_request_has_percentiles_and_none_has_zeroes() {
        let one = Figures::of(vec![7000], Duration::from_secs(1));
        assert_eq!((one.p50_us, one.p99_us, one.p999_us, one.count), (7.0, 7.0, 7.0, 1));
        assert_eq!(Figures::of(Vec::new(), Duration::from_secs(1)).p999_us, 0.0);
    }

    #[test]
    fn lost_writes_are_an_error_with_their_number() {
        let mut compared = Compared::default();
        compared.add(Verdict::Right, 3);
        compared.add(Verdict::Older(1), 4);
        compared.add(Verdict::Wrong, 2);
        assert_eq!(compared, Compared { blocks: 3, verified: 6, lost: 3, wrong: 1 });
        let error = compared.check("disk").unwrap_err().line();
        assert!(error.contains("3 acknowledged writes are lost"), "{error}");
    }
}
