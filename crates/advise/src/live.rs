//! What caches of other sizes would do with the requests of a device in use, by the sample of them that it keeps.
//!
//! The sample has one block of each group of neighbouring blocks. Each of its requests stands for a request of the whole group: so
//! streams are recognized, and bytes are those of all requests. The first part of the sample fills the caches, and hits count from
//! there on: of what was read before the sample begins nothing is known.
//!
//! Invariants: memory is bounded by the sample and the number of sizes.
//!
//! Elsewhere: the sample (`cbd-device`), which part counts (`cbd-runtime`).

use crate::{Action, CacheForm, Options, Outcome, Request, Sample, Simulation, Survey};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, Result};
use std::collections::HashSet;

/// Reads of the part that counts, at least. The hit ratio is then known within a point or two, whatever the load.
const READS_MIN: usize = 2000;

/// The smallest cache that stands for a larger one: with fewer segments of 64 KiB it is too coarse.
const SMALL_BYTES_MIN: u64 = 2 << 20;

/// A request of the sample.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeenRequest {
    /// Milliseconds, modulo [`Seen::period_ms`].
    pub ms: u32,
    /// Whether it writes.
    pub is_write: bool,
    /// The group of blocks.
    pub group: u64,
}

/// The sample.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Blocks of a group: a power of two.
    pub one_of: u64,
    /// The time after which times begin again at 0, in milliseconds.
    pub period_ms: u32,
    /// The requests, oldest first.
    pub requests: Vec<SeenRequest>,
    /// The index of the first one that counts.
    pub counted_from: usize,
    /// Bytes that clients have read since then, in the sample or not.
    pub read_bytes: u64,
    /// The mean bytes of a request.
    pub request_bytes: u64,
}

/// What is foretold.
#[derive(Clone, Debug)]
pub struct Foretold {
    /// Of each size.
    pub outcomes: Vec<Outcome>,
    /// All requests, each as one of its whole group: bytes and rates are estimates.
    pub survey: Survey,
    /// The share of the reads that count whose block was not seen before. Whether a cache had it is not known: it counts as missed.
    pub new_reads: f64,
}

impl Seen {
    /// The smallest cache of which the sample says enough.
    #[must_use]
    pub const fn least_bytes(&self) -> u64 {
        self.one_of.saturating_mul(SMALL_BYTES_MIN)
    }

    fn shift(&self) -> Result<u32> {
        if !self.one_of.is_power_of_two() {
            let text = format!("a sample of one block of {} is none of CBD", self.one_of);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(self.one_of.ilog2())
    }

    /// The requests with times that begin at 0 and never decrease, each as one of its whole group.
    pub fn whole_requests(&self) -> impl Iterator<Item = Request> + '_ {
        let group_bytes = self.one_of.saturating_mul(CHECKSUM_BLOCK);
        let period = self.period_ms.max(1);
        let (mut last, mut us) = (self.requests.first().map_or(0, |first| first.ms), 0_u64);
        self.requests.iter().map(move |seen| {
            let passed = seen.ms.wrapping_add(period).wrapping_sub(last) % period;
            // Threads note their requests in any order: time does not go back by a whole period for it.
            if passed < period / 2 {
                us += u64::from(passed) * 1000;
                last = seen.ms;
            }
            let action = if seen.is_write { Action::Write } else { Action::Read };
            Request { us, action, range: ByteRange::at(seen.group.saturating_mul(group_bytes), group_bytes) }
        })
    }

    /// The reads that count.
    #[must_use]
    pub fn counted_reads(&self) -> usize {
        self.requests.iter().skip(self.counted_from).filter(|seen| !seen.is_write).count()
    }

    /// What caches of these forms would have done.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] if too little was seen; the errors of the engine.
    pub fn foretell(&self, forms: &[CacheForm], options: &Options) -> Result<Foretold> {
        let sample = Sample { shift: self.shift()? };
        let reads = self.counted_reads();
        if reads < READS_MIN {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "too little was seen: {} of {READS_MIN} reads of the sample, which has one block of {}; ask again when some {} \
                     more were read, or record a trace (--trace)",
                    reads,
                    self.one_of,
                    cbd_types::Size(2 * (READS_MIN - reads) as u64 * self.one_of * CHECKSUM_BLOCK)
                ),
            ));
        }
        let mut survey = Survey::new();
        self.whole_requests().for_each(|request| survey.add(&request));
        let record = self.request_bytes.max(CHECKSUM_BLOCK);
        let lengths = [record, (record / self.one_of).max(CHECKSUM_BLOCK)];
        let mut simulation = Simulation::of_sample(forms, sample, lengths, &survey, options)?;
        let (mut known, mut new) = (HashSet::new(), 0_u64);
        for (number, request) in self.whole_requests().enumerate() {
            if number == self.counted_from {
                simulation.begin_count()?;
            }
            let is_new = known.insert(request.range.start);
            new += u64::from(is_new && number >= self.counted_from && request.action == Action::Read);
            simulation.feed(request)?;
        }
        let outcomes = simulation.finish_of(self.read_bytes)?;
        let new_bytes = new as f64 * (self.one_of * CHECKSUM_BLOCK) as f64;
        let new_reads = (new_bytes / self.read_bytes.max(1) as f64).min(1.0);
        Ok(Foretold { outcomes, survey, new_reads })
    }
}
