//! Caches of several sizes that serve the same requests.
//!
//! Each is the engine itself, over memory of its own. A cache that is larger than the memory for it is stood for by a small one, which
//! serves a sample of the blocks. Sequential streams are recognized in front of the sample, in all requests. A cache that fits is served
//! through the queue that clients of a blkdev use, with its readahead.
//!
//! Invariants: memory is bounded by the number of sizes and the limit for each; all sizes get every request in the same order.
//!
//! Elsewhere: what a small cache is (`size`, `sample`), how it works (`cache`).

use crate::cache::SimulatedCache;
use crate::survey::widened;
use crate::{Action, CacheForm, Request, Sample, Survey};
use cbd_device::Streams;
use cbd_engine::{Readahead, Settings};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, CHUNK, Result};
use std::thread;

/// Requests that are served together.
const BATCH: usize = 32 << 10;
/// Requests of a small cache between two looks at its dirty bytes.
const DIRTY_EVERY: u64 = 256;
/// Words of the bits that say which blocks of a sample were used: 16 MiB.
const FIRST_WORDS_MAX: u64 = 2 << 20;
/// Blocks that each size serves at most by default: a million takes some seconds.
pub const BLOCKS_MAX: u64 = 8 << 20;
/// Memory for each size by default.
pub const MEMORY_MAX: u64 = 64 << 20;
/// The time between two requests of a trace without times.
const REQUEST_US: u64 = 20;

/// How sizes are simulated.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Bytes of memory for each size.
    pub memory_max: u64,
    /// Blocks of requests that each size serves at most; of more it serves a sample.
    pub blocks_max: u64,
    /// Settings of the cache.
    pub settings: Settings,
    /// Bytes a second that the disk takes; none if it takes no time.
    pub disk_rate: Option<u64>,
    /// Whether the requests have times.
    pub has_times: bool,
}

/// What a cache of one size does with a trace.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    /// Bytes of the cache.
    pub bytes: u64,
    /// The share of the bytes read that it holds.
    pub hit: f64,
    /// Bytes of reads that it reads from the disk.
    pub disk_read_bytes: u64,
    /// Bytes that the disk does not have, at most and on average.
    pub dirty_bytes_max: u64,
    /// See `dirty_bytes_max`.
    pub dirty_bytes_mean: u64,
    /// One block of so many was simulated: 1 if the cache was simulated whole.
    pub sampled_one_of: u64,
    /// Bytes of memory that the simulation took at its end.
    pub memory_bytes: u64,
}

/// A request, as the sizes get it.
#[derive(Clone, Copy)]
struct Fed {
    request: Request,
    is_behind_cutoff: bool,
    /// What is read ahead behind it, and whether that is behind the cutoff.
    ahead: Option<(ByteRange, bool)>,
}

/// One size.
struct One {
    form: CacheForm,
    sample: Sample,
    cache: SimulatedCache,
    /// Bytes of all reads, and those in the sample that missed.
    read: u64,
    missed: u64,
    first: FirstReads,
    /// Bytes of all reads of blocks that nothing had used before.
    first_bytes: u64,
    served: u64,
    dirty_max: u64,
    dirty_sum: f64,
    dirty_count: u64,
}

/// All sizes.
pub struct Simulation {
    all: Vec<One>,
    streams: Streams,
    cutoff: u64,
    /// The end of what may be read ahead; 0 if nothing may.
    ahead_max: u64,
    has_times: bool,
    batch: Vec<Fed>,
    fed: u64,
}

impl Simulation {
    /// Empty caches of these forms for the trace of `survey`.
    ///
    /// # Errors
    /// The errors of the engine, and a lack of memory.
    pub fn new(forms: &[CacheForm], survey: &Survey, options: &Options) -> Result<Self> {
        let one = |form: &CacheForm| {
            let sample = form.sample_for(options.memory_max, survey.blocks(), options.blocks_max);
            One::new(*form, sample, survey.record_lengths(sample), survey, options)
        };
        let all = forms.iter().map(one).collect::<Result<_>>()?;
        Ok(Self::of(all, survey, options))
    }

    /// Empty caches of these forms for requests of whole groups of `sample`. `lengths`: the mean bytes of a record on the device and in
    /// the sample.
    ///
    /// # Errors
    /// The errors of the engine.
    pub(crate) fn of_sample(
        forms: &[CacheForm],
        sample: Sample,
        lengths: [u64; 2],
        survey: &Survey,
        options: &Options,
    ) -> Result<Self> {
        let one = |form: &CacheForm| One::new(*form, sample, lengths, survey, options);
        let all = forms.iter().map(one).collect::<Result<_>>()?;
        Ok(Self::of(all, survey, options))
    }

    fn of(all: Vec<One>, survey: &Survey, options: &Options) -> Self {
        let cutoff = match options.settings.sequential_read_cutoff {
            0 => u64::MAX,
            cutoff => cutoff,
        };
        let is_auto = options.settings.readahead == Readahead::Auto;
        let ahead_max = if is_auto { survey.end.next_multiple_of(CHUNK) } else { 0 };
        let (streams, has_times) = (Streams::new(), options.has_times);
        Self { all, streams, cutoff, ahead_max, has_times, batch: Vec::with_capacity(BATCH), fed: 0 }
    }

    /// Serves the next request.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn feed(&mut self, mut request: Request) -> Result<()> {
        if !self.has_times {
            request.us = self.fed * REQUEST_US;
        }
        self.fed += 1;
        let mut fed = Fed { request, is_behind_cutoff: false, ahead: None };
        if request.action == Action::Read {
            let (before, step) = self.streams.follow_alone(request.range, self.ahead_max);
            fed.is_behind_cutoff = before >= self.cutoff;
            fed.ahead = step.map(|(range, before)| (range, before >= self.cutoff));
        }
        self.batch.push(fed);
        if self.batch.len() == BATCH { self.serve() } else { Ok(()) }
    }

    /// Forgets the dirty bytes so far.
    ///
    /// # Errors
    /// The errors of the engine.
    pub(crate) fn forget_dirty(&mut self) -> Result<()> {
        self.serve()?;
        self.all.iter_mut().for_each(One::forget_dirty);
        Ok(())
    }

    /// Forgets the hits so far, but not what the caches hold.
    ///
    /// # Errors
    /// The errors of the engine.
    pub(crate) fn begin_count(&mut self) -> Result<()> {
        self.serve()?;
        self.all.iter_mut().for_each(One::begin_count);
        Ok(())
    }

    /// As [`finish`](Self::finish), of requests that have read so many bytes.
    ///
    /// # Errors
    /// The errors of the engine.
    pub(crate) fn finish_of(mut self, read_bytes: u64) -> Result<Vec<Outcome>> {
        self.serve()?;
        self.all.iter_mut().for_each(|one| one.read = read_bytes);
        Ok(self.all.iter_mut().map(One::outcome).collect())
    }

    /// What each size did, in the order of the forms.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn finish(mut self) -> Result<Vec<Outcome>> {
        self.serve()?;
        Ok(self.all.iter_mut().map(One::outcome).collect())
    }

    /// Serves what was gathered, by as many threads as there are processors.
    fn serve(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        let processors = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        // The largest sample is the most work: sizes are dealt out in turn.
        let mut shares: Vec<Vec<&mut One>> = (0..processors).map(|_| Vec::new()).collect();
        self.all.iter_mut().enumerate().for_each(|(number, one)| shares[number % processors].push(one));
        let serve_share = |share: Vec<&mut One>| {
            share.into_iter().try_for_each(|one| batch.iter().try_for_each(|fed| one.serve(fed)))
        };
        thread::scope(|scope| {
            let workers: Vec<_> =
                shares.into_iter().map(|share| scope.spawn(|| serve_share(share))).collect();
            let mut ended = workers.into_iter().map(|worker| worker.join());
            ended.try_for_each(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }
}

impl One {
    fn new(
        form: CacheForm,
        sample: Sample,
        [record, sampled]: [u64; 2],
        survey: &Survey,
        options: &Options,
    ) -> Result<Self> {
        let small = form.small(sample, record, sampled);
        let us_per_byte =
            options.disk_rate.map_or(0.0, |rate| 1e6 * sample.one_of() as f64 / rate.max(1) as f64);
        let cache = SimulatedCache::new(&small, sample, survey.end, options.settings, us_per_byte)?;
        let (read, missed, served) = (0, 0, 0);
        let (first, first_bytes) = (FirstReads::new(sample, survey.end), survey.first_read_bytes());
        Ok(Self {
            form,
            sample,
            cache,
            read,
            missed,
            first,
            first_bytes,
            served,
            dirty_max: 0,
            dirty_sum: 0.0,
            dirty_count: 0,
        })
    }

    fn forget_dirty(&mut self) {
        (self.dirty_max, self.dirty_sum, self.dirty_count) = (0, 0.0, 0);
    }

    fn begin_count(&mut self) {
        (self.read, self.missed) = (0, 0);
        // First reads are not known here: the requests begin somewhere.
        self.first = FirstReads { used: Vec::new(), bytes: 0 };
    }

    fn serve(&mut self, fed: &Fed) -> Result<()> {
        let Fed { request: Request { us, action, range }, is_behind_cutoff, ahead } = *fed;
        if action == Action::Read {
            self.read += widened(range).len();
        }
        // Most requests of a large cache have no block in the sample.
        let Some(span) = self.sample.span(range).or((action == Action::Flush).then_some(range)) else {
            self.read_ahead(ahead);
            return Ok(());
        };
        self.cache.pass_until(us)?;
        if matches!(action, Action::Read | Action::Write) {
            self.first.note(self.sample, range, action == Action::Read);
        }
        match action {
            Action::Read if self.sample.shift == 0 => self.cache.read_through_queue(span)?,
            Action::Read => {
                for part in self.sample.of(range) {
                    self.missed += self.cache.read(part, is_behind_cutoff)?;
                }
                self.read_ahead(ahead);
            }
            Action::Write => {
                for part in self.sample.of(range) {
                    self.cache.write(part)?;
                }
            }
            Action::Discard => {
                if let Some(span) = narrowed(range).and_then(|range| self.sample.span(range)) {
                    self.cache.discard(span)?;
                }
            }
            Action::Flush => self.cache.flush()?,
        }
        self.served += 1;
        if self.served.is_multiple_of(DIRTY_EVERY) {
            self.count_dirty();
        }
        Ok(())
    }

    /// Reads the part of a stream ahead that is in the sample. A whole cache does so by itself.
    fn read_ahead(&mut self, ahead: Option<(ByteRange, bool)>) {
        let Some((range, is_behind_cutoff)) = ahead.filter(|_| self.sample.shift > 0) else { return };
        self.sample.of(range).for_each(|part| self.cache.read_ahead(part, is_behind_cutoff));
    }

    fn count_dirty(&mut self) {
        let dirty = self.cache.dirty_bytes();
        self.dirty_max = self.dirty_max.max(dirty);
        self.dirty_sum += dirty as f64;
        self.dirty_count += 1;
    }

    /// The misses of the sample stand for those of all blocks, except for those that nothing can avoid: how many these are is known
    /// better from all requests. The reads are not those of the sample but all: whether the few hottest blocks are in the sample is
    /// chance, and they hardly ever miss.
    fn outcome(&mut self) -> Outcome {
        self.count_dirty();
        let one_of = self.sample.one_of();
        let is_whole = self.sample.shift == 0;
        let missed = match self.first.bytes() {
            _ if is_whole => self.read - self.cache.hit_bytes().min(self.read),
            Some(first) => self.missed.saturating_sub(first) * one_of + self.first_bytes,
            None => self.missed * one_of,
        };
        let missed = missed.min(self.read);
        let hit = if self.read == 0 { 0.0 } else { 1.0 - missed as f64 / self.read as f64 };
        let mean = self.dirty_sum / self.dirty_count as f64;
        Outcome {
            bytes: self.form.bytes,
            hit,
            disk_read_bytes: if is_whole { self.cache.disk_read_bytes() } else { missed },
            dirty_bytes_max: self.dirty_max * one_of,
            dirty_bytes_mean: (mean * one_of as f64) as u64,
            sampled_one_of: one_of,
            memory_bytes: self.cache.memory_bytes(),
        }
    }
}

/// The reads of blocks of a sample that nothing had used before.
struct FirstReads {
    /// A bit for each group; none if there are too many.
    used: Vec<u64>,
    bytes: u64,
}

impl FirstReads {
    /// For a sample of a device of `end` bytes; it is not used for a cache that is simulated whole.
    fn new(sample: Sample, end: u64) -> Self {
        let words = ((end / CHECKSUM_BLOCK) >> sample.shift) / 64 + 1;
        let is_possible = sample.shift > 0 && words <= FIRST_WORDS_MAX;
        Self { used: if is_possible { vec![0; words as usize] } else { Vec::new() }, bytes: 0 }
    }

    fn note(&mut self, sample: Sample, range: ByteRange, is_read: bool) {
        for group in sample.groups(range) {
            let Some(word) = self.used.get_mut((group / 64) as usize) else { return };
            let bit = 1 << (group % 64);
            self.bytes += if is_read && *word & bit == 0 { CHECKSUM_BLOCK } else { 0 };
            *word |= bit;
        }
    }

    /// Their bytes, if they were counted.
    const fn bytes(&self) -> Option<u64> {
        if self.used.is_empty() { None } else { Some(self.bytes) }
    }
}

/// The whole blocks in `range`: a block that is discarded in part keeps its data.
const fn narrowed(range: ByteRange) -> Option<ByteRange> {
    let start = range.start.next_multiple_of(CHECKSUM_BLOCK);
    let end = range.end / CHECKSUM_BLOCK * CHECKSUM_BLOCK;
    if start < end { Some(ByteRange { start, end }) } else { None }
}
