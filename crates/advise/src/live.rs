//! What caches of other sizes would do with the requests of a device in use, by the sample of them that it keeps.
//!
//! The sample has one block of each group of neighbouring blocks. Each of its requests stands for a request of the whole group: so
//! streams are recognized, and bytes are those of all requests. What came before and the first part of the sample fill the caches, and
//! hits count from there on. A cache that begins empty is not like one in use: it records everything until it is full.
//!
//! Invariants: memory is bounded by the sample and the number of sizes.
//!
//! Elsewhere: the sample (`cbd-device`), what came before, and which part counts (`cbd-runtime`).

use crate::{Action, CacheForm, Options, Outcome, Request, Sample, Simulation, Survey};
use cbd_runtime::sampled::earlier::EarlierRequest;
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
/// Microseconds between two requests that have no time, at least and at most.
const EARLIER_US: u64 = 20;
const EARLIER_US_MAX: u64 = 3_600_000_000;
/// The share of reads of blocks that were never seen before that is no error worth mentioning.
const NEW_READS_MAX: f64 = 0.02;
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
    /// What came before, oldest first, as far as it is known.
    pub earlier: Vec<EarlierRequest>,
    /// Whether nothing that fills caches is missing there.
    pub earlier_is_all: bool,
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
    /// The largest cache of which enough is known: what was seen before the part that counts has filled it. A larger one may have held
    /// what was used before. [`u64::MAX`] if nothing was used before that matters.
    pub known_bytes: u64,
}

impl Seen {
    /// The smallest cache of which the sample says enough.
    #[must_use]
    pub const fn least_bytes(&self) -> u64 {
        self.one_of.saturating_mul(SMALL_BYTES_MIN)
    }

    fn shift(&self) -> Result<u32> {
        let end = |group: u64| {
            group
                .checked_add(1)?
                .checked_mul(self.one_of)?
                .checked_mul(CHECKSUM_BLOCK)
                .filter(|end| *end <= OFFSET_MAX)
        };
        let is_one = self.one_of.is_power_of_two() && self.one_of > 1;
        let mut groups = self
            .requests
            .iter()
            .map(|seen| seen.group)
            .chain(self.earlier.iter().map(|earlier| earlier.group));
        if !is_one || !groups.all(|group| end(group).is_some()) {
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

    /// What came before, each as a request of its whole group; adjacent ones were one request. They have no times.
    fn whole_earlier(&self) -> impl Iterator<Item = Request> + '_ {
        let group_bytes = self.one_of.saturating_mul(CHECKSUM_BLOCK);
        let range = move |earlier: &EarlierRequest| {
            ByteRange::at(earlier.group.saturating_mul(group_bytes), group_bytes)
        };
        let mut each = self.earlier.iter().peekable();
        std::iter::from_fn(move || {
            let first = each.next()?;
            let action = if first.is_write { Action::Write } else { Action::Read };
            let mut whole = range(first);
            while let Some(next) = each.next_if(|next| {
                let is_adjacent = next.is_write == first.is_write && range(next).start == whole.end;
                is_adjacent && range(next).end - whole.start <= REQUEST_MAX
            }) {
                whole.end = range(next).end;
            }
            Some(Request { us: 0, action, range: whole })
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
        survey.end = self.whole_earlier().map(|request| request.range.end).fold(survey.end, u64::max);
        let mut simulation = Simulation::of_sample(forms, sample, lengths, &survey, options)?;
        let mut known: HashSet<u64> = self.earlier.iter().map(|earlier| earlier.group).collect();
        let (mut new, mut known_before) = (0_u64, known.len());
        for (number, seen) in self.requests.iter().enumerate() {
            let is_new = known.insert(seen.group);
            if number < self.counted_from {
                known_before = known.len();
            } else {
                new += u64::from(is_new && !seen.is_write);
            }
        }
        let mut us = 0;
        for request in self.whole_earlier() {
            simulation.feed(Request { us, ..request })?;
            // The disk keeps up with what is written.
            us += match options.disk_rate.filter(|_| request.action == Action::Write) {
                Some(rate) => request.range.len().saturating_mul(1_000_000) / rate.max(1),
                None => 0,
            }
            .clamp(EARLIER_US, EARLIER_US_MAX);
        }
        simulation.forget_dirty()?;
        for (number, request) in self.whole_requests() {
            if number == self.counted_from {
                simulation.begin_count()?;
            }
            simulation.feed(Request { us: us + request.us, ..request })?;
        }
        let outcomes = simulation.finish_of(self.read_bytes)?;
        let new_bytes = new as f64 * (self.one_of * CHECKSUM_BLOCK) as f64;
        let new_reads = (new_bytes / self.read_bytes.max(1) as f64).min(1.0);
        let filled = known_before as u64 * self.one_of * CHECKSUM_BLOCK;
        let is_enough = self.earlier_is_all || new_reads <= NEW_READS_MAX;
        Ok(Foretold { outcomes, survey, new_reads, known_bytes: if is_enough { u64::MAX } else { filled } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_engine::Settings;

    fn seen(requests: Vec<SeenRequest>) -> Seen {
        let counted_from = requests.len() / 2;
        Seen {
            one_of: 8,
            period_ms: 1000,
            earlier: Vec::new(),
            earlier_is_all: true,
            requests,
            counted_from,
            read_bytes: 1 << 30,
            request_bytes: 4096,
        }
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

    /// Reads that have just come.
    fn read(groups: impl Iterator<Item = u64>) -> Vec<SeenRequest> {
        groups.map(|group| request(0, group)).collect()
    }

    /// Reads of the past.
    fn earlier(groups: impl Iterator<Item = u64>) -> Vec<EarlierRequest> {
        groups.map(|group| EarlierRequest { group, is_write: false }).collect()
    }

    #[test]
    fn a_loop_that_finds_the_cache_full_of_something_else_has_no_hits() {
        // A cache of 64 MiB holds some 2000 groups of 32 KiB; the loop has 3000, in one stream.
        let of_loop = || read((0..12_000).map(|number| number % 3000));
        let hit = |seen: &Seen| foretell(seen).expect("enough").outcomes[0].hit;
        let read_bytes = 6000 * 32_768;
        let alone = hit(&Seen { read_bytes, ..seen(of_loop()) });
        assert!(alone > 0.3, "an empty cache records what it has space for: {alone}");
        let before = earlier(100_000..104_000);
        let behind = hit(&Seen { read_bytes, earlier: before, ..seen(of_loop()) });
        assert!(behind < 0.03, "{behind}");
    }

    #[test]
    fn what_is_known_of_is_a_cache_that_was_filled_unless_everything_is_known() {
        // Half of what counts was never seen before.
        let requests = || {
            let all = (0..8000).map(|number| if number % 2 == 0 { number % 1000 } else { 10_000 + number });
            read(all)
        };
        let known =
            |seen: Seen| foretell(&Seen { read_bytes: 4000 * 32_768, ..seen }).expect("enough").known_bytes;
        assert_eq!(known(seen(requests())), u64::MAX);
        let some = Seen { earlier_is_all: false, ..seen(requests()) };
        assert_eq!(known(some.clone()), 2500 * 32_768);
        assert_eq!(known(Seen { earlier: earlier(50_000..51_000), ..some.clone() }), 3500 * 32_768);
        // Nothing that counts is new.
        let old = read((0..8000).map(|number| number % 1000));
        assert_eq!(known(Seen { requests: old, ..some }), u64::MAX);
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
