//! What a trace has: requests, bytes, and how much of the device it uses.
//!
//! Invariants: the memory is bounded whatever the length of the trace: blocks that were used are counted on a sample of them, which
//! becomes sparser as there are more.

use crate::{Action, Request, Sample};
use cbd_types::{ByteRange, CHECKSUM_BLOCK};
use std::collections::HashSet;

/// Blocks of which it is known that they were used.
const KNOWN_MAX: usize = 1 << 18;
/// The time over which a rate is averaged.
const WINDOW_US: u64 = 10_000_000;
/// Powers of two of the length of requests in blocks.
const LENGTHS: usize = 40;

/// The whole blocks of `range`.
pub(crate) const fn widened(range: ByteRange) -> ByteRange {
    ByteRange {
        start: range.start / CHECKSUM_BLOCK * CHECKSUM_BLOCK,
        end: range.end.next_multiple_of(CHECKSUM_BLOCK),
    }
}

/// Counts of a trace.
#[derive(Clone, Default, Debug)]
pub struct Survey {
    /// Requests that read, write, discard, and flush.
    pub reads: u64,
    /// See `reads`.
    pub writes: u64,
    /// See `reads`.
    pub discards: u64,
    /// See `reads`.
    pub flushes: u64,
    /// Bytes of reads.
    pub read_bytes: u64,
    /// Bytes of writes.
    pub written_bytes: u64,
    /// Microseconds from the first request to the last one.
    pub us: u64,
    /// The end of the last byte that is used.
    pub end: u64,
    /// Blocks in the sample that were used; one of 2^`shift` is in it.
    known: HashSet<u64>,
    shift: u32,
    /// Blocks that were read, and those that were read and had not been used before, by the sample of their time.
    sampled_reads: f64,
    sampled_new: f64,
    /// Requests that read or write, and their blocks, by length.
    lengths: Vec<[u64; 2]>,
    first_us: Option<u64>,
    window: [u64; 2],
    window_bytes_max: u64,
}

impl Survey {
    /// Nothing counted.
    #[must_use]
    pub fn new() -> Self {
        Self { lengths: vec![[0; 2]; LENGTHS], ..Self::default() }
    }

    /// Counts a request.
    pub fn add(&mut self, request: &Request) {
        let first_us = *self.first_us.get_or_insert(request.us);
        self.us = self.us.max(request.us.saturating_sub(first_us));
        match request.action {
            Action::Read => {
                self.reads += 1;
                self.read_bytes += request.range.len();
            }
            Action::Write => {
                self.writes += 1;
                self.written_bytes += request.range.len();
                self.note_rate(self.us / WINDOW_US, request.range.len());
            }
            Action::Discard => self.discards += 1,
            Action::Flush => self.flushes += 1,
        }
        self.end = self.end.max(request.range.end);
        if matches!(request.action, Action::Read | Action::Write) {
            self.use_blocks(request);
        }
    }

    /// Requests.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        self.reads + self.writes + self.discards + self.flushes
    }

    /// Blocks of all requests that read or write.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.lengths.iter().map(|[_, blocks]| blocks).sum()
    }

    /// Bytes of the blocks that were read or written at least once; an estimate where there are very many.
    #[must_use]
    pub fn working_set(&self) -> u64 {
        (self.known.len() as u64) << self.shift << CHECKSUM_BLOCK.ilog2()
    }

    /// The share of the reads whose block was neither read nor written before: what misses in any cache that begins empty.
    #[must_use]
    pub fn new_reads(&self) -> f64 {
        if self.sampled_reads > 0.0 { self.sampled_new / self.sampled_reads } else { 0.0 }
    }

    /// Bytes of the blocks that were read before anything else used them; an estimate where there are very many.
    #[must_use]
    pub fn first_read_bytes(&self) -> u64 {
        self.sampled_new as u64 * CHECKSUM_BLOCK
    }

    /// The highest rate of writes over ten seconds, in bytes a second; `None` if the trace is shorter than a second.
    #[must_use]
    pub fn write_rate_max(&self) -> Option<f64> {
        let bytes = self.window_bytes_max.max(self.window[1]) as f64;
        let us = self.us.min(WINDOW_US);
        (us >= 1_000_000).then(|| bytes * 1e6 / us as f64)
    }

    /// The mean bytes of a record here, and in `sample`.
    #[must_use]
    pub fn record_lengths(&self, sample: Sample) -> [u64; 2] {
        let one_of = sample.one_of() as f64;
        let (mut records, mut sampled, mut blocks) = (0.0, 0.0, 0.0);
        for &[count, of_them] in self.lengths.iter().filter(|[count, _]| *count > 0) {
            records += count as f64;
            blocks += of_them as f64;
            // A request that is shorter than a group is in the sample now and then, a longer one always.
            sampled += (of_them as f64 / one_of).min(count as f64);
        }
        let bytes = |records: f64, blocks: f64| (blocks / records * CHECKSUM_BLOCK as f64) as u64;
        if records == 0.0 {
            return [CHECKSUM_BLOCK; 2];
        }
        [bytes(records, blocks), bytes(sampled, blocks / one_of)].map(|bytes| bytes.max(CHECKSUM_BLOCK))
    }

    fn note_rate(&mut self, window: u64, bytes: u64) {
        if self.window[0] != window {
            self.window_bytes_max = self.window_bytes_max.max(self.window[1]);
            self.window = [window, 0];
        }
        self.window[1] += bytes;
    }

    fn use_blocks(&mut self, request: &Request) {
        let range = widened(request.range);
        let (first, last) = (range.start / CHECKSUM_BLOCK, range.end / CHECKSUM_BLOCK);
        let of_length = &mut self.lengths[(last - first).max(1).ilog2() as usize % LENGTHS];
        of_length[0] += 1;
        of_length[1] += last - first;
        let is_read = request.action == Action::Read;
        for block in first..last {
            let hash = hash(block);
            if hash & ((1 << self.shift) - 1) != 0 {
                continue;
            }
            let weight = (1_u64 << self.shift) as f64;
            let is_new = self.known.insert(block);
            if is_read {
                self.sampled_reads += weight;
                self.sampled_new += if is_new { weight } else { 0.0 };
            }
            if self.known.len() > KNOWN_MAX {
                self.shift += 1;
                let mask = (1 << self.shift) - 1;
                self.known.retain(|block| self::hash(*block) & mask == 0);
            }
        }
    }
}

const fn hash(block: u64) -> u64 {
    let product = block.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (product ^ (product >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    mixed ^ (mixed >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(us: u64, action: Action, block: u64, blocks: u64) -> Request {
        Request { us, action, range: ByteRange::at(block * 4096, blocks * 4096) }
    }

    #[test]
    fn a_survey_counts_what_the_trace_has() {
        let mut survey = Survey::new();
        for (us, action, block, blocks) in [
            (5_000_000, Action::Read, 0, 4),
            (6_000_000, Action::Write, 2, 4),
            (9_000_000, Action::Read, 4, 4),
            (9_000_000, Action::Discard, 0, 1000),
        ] {
            survey.add(&request(us, action, block, blocks));
        }
        assert_eq!((survey.reads, survey.writes, survey.discards, survey.requests()), (2, 1, 1, 4));
        assert_eq!((survey.read_bytes, survey.written_bytes), (32_768, 16_384));
        assert_eq!((survey.us, survey.end), (4_000_000, 4_096_000));
        assert_eq!(survey.working_set(), 8 * 4096);
        // 0 to 3, and 6 and 7, of eight blocks that were read.
        assert_eq!(survey.new_reads(), 0.75);
        assert_eq!(survey.write_rate_max(), Some(4096.0));
    }

    #[test]
    fn a_large_working_set_is_estimated_in_bounded_memory() {
        let mut survey = Survey::new();
        let blocks = 5 << 18;
        for block in 0..blocks / 256 {
            survey.add(&request(0, Action::Read, block * 256, 256));
        }
        let error = survey.working_set() as f64 / (blocks * 4096) as f64 - 1.0;
        assert!(error.abs() < 0.02, "{error}");
        assert!(survey.known.len() <= KNOWN_MAX);
        assert!((survey.new_reads() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn records_in_a_sample_are_shorter_where_requests_are_long() {
        let mut survey = Survey::new();
        survey.add(&request(0, Action::Read, 0, 64));
        survey.add(&request(0, Action::Read, 0, 64));
        assert_eq!(survey.record_lengths(Sample { shift: 0 }), [64 * 4096; 2]);
        assert_eq!(survey.record_lengths(Sample { shift: 2 }), [64 * 4096, 16 * 4096]);
        assert_eq!(survey.record_lengths(Sample { shift: 8 }), [64 * 4096, 4096]);
    }
}
