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

/// No device has a byte behind this one.
const OFFSET_MAX: u64 = 1 << 56;
/// How late a request may be noted.
const LATE_MS: u32 = 100;
/// The longest request that adjacent groups are joined to.
const REQUEST_MAX: u64 = 256 << 10;
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
        let end = |seen: &SeenRequest| {
            seen.group
                .checked_add(1)?
                .checked_mul(self.one_of)?
                .checked_mul(CHECKSUM_BLOCK)
                .filter(|end| *end <= OFFSET_MAX)
        };
        let is_one = self.one_of.is_power_of_two() && self.one_of > 1;
        if !is_one || !self.requests.iter().all(|seen| end(seen).is_some()) {
            let text = format!(
                "the sample of one block of {} has requests that no device has: is the daemon of another version?",
                self.one_of
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Ok(self.one_of.ilog2())
    }

    /// The requests with times that begin at 0 and never decrease, each as one of its whole group. What has come at one time, of
    /// adjacent groups, was one request. With each the number of its first one in the sample.
    pub fn whole_requests(&self) -> impl Iterator<Item = (usize, Request)> + '_ {
        let mut each = self.each_request().enumerate().peekable();
        std::iter::from_fn(move || {
            let (number, mut request) = each.next()?;
            while let Some((_, next)) = each.next_if(|(number, next)| {
                let is_same = (next.us, next.action) == (request.us, request.action);
                is_same
                    && next.range.start == request.range.end
                    && next.range.end - request.range.start <= REQUEST_MAX
                    && *number != self.counted_from
            }) {
                request.range.end = next.range.end;
            }
            Some((number, request))
        })
    }

    fn each_request(&self) -> impl Iterator<Item = Request> + '_ {
        let group_bytes = self.one_of.saturating_mul(CHECKSUM_BLOCK);
        let period = self.period_ms.max(1);
        let (mut last, mut us) = (self.requests.first().map_or(0, |first| first.ms), 0_u64);
        self.requests.iter().map(move |seen| {
            let (ms, before) = (u64::from(seen.ms % period), u64::from(last % period));
            let passed = (ms + u64::from(period) - before) % u64::from(period);
            // Threads note their requests in any order: one that is a little late does not mean that a whole period has passed.
            if passed + u64::from(LATE_MS) < u64::from(period) {
                us += passed * 1000;
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
        self.whole_requests().for_each(|(_, request)| survey.add(&request));
        let record = self.request_bytes.max(CHECKSUM_BLOCK);
        let lengths = [record, (record / self.one_of).max(CHECKSUM_BLOCK)];
        let mut simulation = Simulation::of_sample(forms, sample, lengths, &survey, options)?;
        let (mut known, mut new) = (HashSet::new(), 0_u64);
        for (number, seen) in self.requests.iter().enumerate() {
            let is_new = known.insert(seen.group);
            new += u64::from(is_new && number >= self.counted_from && !seen.is_write);
        }
        for (number, request) in self.whole_requests() {
            if number == self.counted_from {
                simulation.begin_count()?;
            }
            simulation.feed(request)?;
        }
        let outcomes = simulation.finish_of(self.read_bytes)?;
        let new_bytes = new as f64 * (self.one_of * CHECKSUM_BLOCK) as f64;
        let new_reads = (new_bytes / self.read_bytes.max(1) as f64).min(1.0);
        Ok(Foretold { outcomes, survey, new_reads })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_engine::Settings;

    fn seen(requests: Vec<SeenRequest>) -> Seen {
        let counted_from = requests.len() / 2;
        Seen { one_of: 8, period_ms: 1000, requests, counted_from, read_bytes: 1 << 30, request_bytes: 4096 }
    }

    fn request(ms: u32, group: u64) -> SeenRequest {
        SeenRequest { ms, is_write: false, group }
    }

    fn foretell(seen: &Seen) -> Result<Foretold> {
        let form = CacheForm::new(64 << 20, None, 2).expect("a size");
        let options = Options {
            memory_max: crate::MEMORY_MAX,
            blocks_max: crate::BLOCKS_MAX,
            settings: Settings::default(),
            disk_rate: None,
            has_times: true,
        };
        seen.foretell(&[form], &options)
    }

    #[test]
    fn requests_stand_for_whole_groups_and_adjacent_ones_at_one_time_were_one_request() {
        let seen = seen(vec![
            request(990, 5),
            request(990, 6),
            request(995, 7),
            request(3, 8),
            request(2, 9),
            request(3, 10),
        ]);
        let whole: Vec<(usize, Request)> = seen.whole_requests().collect();
        let found: Vec<_> = whole.iter().map(|(number, request)| (*number, request.us / 1000)).collect();
        // The fourth begins the part that counts; the fifth was noted late.
        assert_eq!(found, [(0, 0), (2, 5), (3, 13)]);
        assert_eq!(whole[0].1.range, ByteRange::at(5 * 32_768, 65_536));
        assert_eq!(whole[2].1.range, ByteRange::at(8 * 32_768, 3 * 32_768));
    }

    #[test]
    fn nothing_is_foretold_from_a_few_requests_or_from_impossible_ones() {
        let error =
            foretell(&seen((0..100).map(|number| request(0, number)).collect())).expect_err("too few");
        assert!(error.line().contains("too little was seen: 50 of 2000"), "{}", error.line());
        let many: Vec<SeenRequest> = (0..8000).map(|number| request(0, number % 100)).collect();
        let far = Seen { requests: [&many[..], &[request(0, u64::MAX)]].concat(), ..seen(many.clone()) };
        assert!(foretell(&far).expect_err("too far").line().contains("no device has"));
        for one_of in [0, 1, 7] {
            assert!(foretell(&Seen { one_of, ..seen(many.clone()) }).is_err());
        }
        assert!(foretell(&Seen { counted_from: usize::MAX, ..seen(many.clone()) }).is_err());
        let foretold = foretell(&seen(many)).expect("enough");
        assert_eq!((foretold.new_reads, foretold.outcomes[0].hit), (0.0, 1.0));
    }
}
