//! The legal contents of a device after any history of requests, flushes and crashes: through the cache, and on the
//! backing device alone.
//!
//! For each sector, the oracle records the changes of the clients in order, with the moments at which each was
//! submitted, completed and *guaranteed*. A guaranteed change must survive a power cut on a plain disk. A change is
//! guaranteed by the completion of a flush that was submitted after the change had completed, or by its own
//! completion if it was FUA.
//!
//! The oracle checks:
//! - **a read**: each sector shows the newest change that had completed before the read was submitted, or one
//!   that was in flight during the read ([`Oracle::check_read`]);
//! - **after a crash**: acknowledged changes are present; changes in flight are present or not, an atomic write whole
//!   or not at all, and the outcome does not change after it was observed once ([`Oracle::settle`]);
//! - **the backing device alone**: there is one moment of the history at which a plain disk with a volatile
//!   cache could have shown this image after a power cut ([`Oracle::moment_of`]);
//! - **the recovery point**: for everything that had completed and was flushed before it, the backing device holds
//!   that content or a newer one ([`Oracle::check_recovery_point`]).
//!
//! Invariants: changes that overlap are never open at the same time (the client's duty, checked).

mod expectation;

use crate::image::DiskImage;
use crate::pattern::Content;
use cbd_types::{ByteRange, CHUNK};
pub use expectation::Expectation;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A time in the history; events are numbered from 1.
pub type Moment = u64;

const NEVER: Moment = Moment::MAX;

/// A description of an illegal content, with the sector and its expected content.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation(pub String);

impl std::fmt::Display for Violation {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

/// A change that was submitted and whose outcome is open.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpenChange(u64);

#[derive(Clone, Copy, Debug)]
struct Entry {
    content: Content,
    submitted: Moment,
    completed: Moment,
    guaranteed: Moment,
    /// It was in a cache when it completed: no crash takes it, although no flush has covered it.
    kept: bool,
    /// The wall clock when the change completed, and when it was guaranteed; [`NEVER`] before that.
    completed_ms: u64,
    guaranteed_ms: u64,
}

impl Entry {
    fn complete(&mut self, now: Moment, wall_ms: u64) {
        (self.completed, self.completed_ms) = (now, wall_ms);
    }

    /// Whether a crash of the cache and the disk together keeps it, or something newer.
    const fn is_safe(&self) -> bool {
        self.guaranteed != NEVER || self.kept
    }

    fn guarantee(&mut self, moment: Moment, wall_ms: u64) {
        self.guaranteed = self.guaranteed.min(moment);
        self.guaranteed_ms = if self.guaranteed_ms == NEVER { wall_ms } else { self.guaranteed_ms };
    }
}

#[derive(Clone, Debug)]
struct Open {
    range: ByteRange,
    content: Content,
    atomic: bool,
}

/// The history, and the checks against it.
#[derive(Clone, Debug)]
pub struct Oracle {
    sector: u64,
    size: u64,
    atomic_unit: u64,
    /// For each sector that was ever changed, its changes in order; the first is its initial content.
    sectors: BTreeMap<u64, Vec<Entry>>,
    open: BTreeMap<OpenChange, Open>,
    next_open: u64,
    /// Sectors with newest changes that no flush has covered.
    unguaranteed: Vec<u64>,
    clock: Moment,
    /// The wall clock at the last time that the clients read it.
    wall_ms: u64,
    next_content: u64,
    /// Changes may go past the cache: they are not atomic, and a power cut may lose those that no flush has covered.
    may_lose: bool,
    /// A flush failed at this moment: what had completed before and no flush had covered may be lost.
    flush_failed: Moment,
    /// The content of the device in sectors that were never changed.
    fresh: Arc<[u8]>,
}

impl Oracle {
    /// The oracle of a device with [`Content::INITIAL`] everywhere, durably.
    #[must_use]
    pub fn new(size: u64, sector: u32, atomic_unit: u64) -> Self {
        Self {
            fresh: Content::fresh_disk(size, sector as usize),
            sector: sector as u64,
            size,
            atomic_unit,
            sectors: BTreeMap::new(),
            open: BTreeMap::new(),
            next_open: 0,
            unguaranteed: Vec::new(),
            may_lose: false,
            flush_failed: 0,
            clock: 0,
            wall_ms: 0,
            next_content: Content::INITIAL.0,
        }
    }

    /// The same for a device whose changes may go past the cache: they are not atomic, and a power cut may lose those that no
    /// flush has covered.
    #[must_use]
    pub fn may_lose(self) -> Self {
        Self { may_lose: true, atomic_unit: 0, ..self }
    }

    fn tick(&mut self) -> Moment {
        self.clock += 1;
        self.clock
    }

    /// The present moment: an argument for [`check_read`](Self::check_read), [`flushed`](Self::flushed) and
    /// [`moment_of`](Self::moment_of).
    pub fn now(&mut self) -> Moment {
        self.tick()
    }

    /// Sets the wall clock that the clients read: later completions have this time.
    pub const fn read_clock(&mut self, wall_ms: u64) {
        self.wall_ms = wall_ms;
    }

    fn sectors_of(&self, range: ByteRange) -> std::ops::Range<u64> {
        range.start / self.sector..range.end / self.sector
    }

    /// A content that no other write has.
    pub const fn fresh_content(&mut self) -> Content {
        self.next_content += 1;
        Content(self.next_content)
    }

    /// The bytes that give `range` the content `content`.
    #[must_use]
    pub fn payload(&self, range: ByteRange, content: Content) -> Vec<u8> {
        let mut bytes = vec![0; range.len() as usize];
        content.fill_range(range.start / self.sector, self.sector as usize, &mut bytes);
        bytes
    }

    /// Whether a change of `range` would overlap one that is open. The client must not submit it then.
    #[must_use]
    pub fn overlaps_open(&self, range: ByteRange) -> bool {
        self.open.values().any(|open| open.range.overlaps(&range))
    }

    /// A client submits a change of `range` to `content` (zeroes for discards and write-zeroes).
    ///
    /// # Panics
    /// When an open change overlaps it.
    pub fn submit(&mut self, range: ByteRange, content: Content) -> OpenChange {
        assert!(!self.overlaps_open(range), "the client submits overlapping changes");
        let submitted = self.tick();
        for sector in self.sectors_of(range) {
            let start = Entry {
                content: Content::INITIAL,
                submitted: 0,
                completed: 0,
                guaranteed: 0,
                kept: true,
                completed_ms: 0,
                guaranteed_ms: 0,
            };
            let entry = Entry {
                content,
                submitted,
                completed: NEVER,
                guaranteed: NEVER,
                kept: false,
                completed_ms: NEVER,
                guaranteed_ms: NEVER,
            };
            self.sectors.entry(sector).or_insert_with(|| vec![start]).push(entry);
        }
        let in_one_chunk = range.start / CHUNK == (range.end - 1) / CHUNK;
        let atomic = content != Content::ZEROES && range.len() <= self.atomic_unit && in_one_chunk;
        let change = OpenChange(self.next_open);
        self.next_open += 1;
        self.open.insert(change, Open { range, content, atomic });
        change
    }

    /// Notes that the change was acknowledged; with `fua`, as durable.
    pub fn complete(&mut self, change: OpenChange, fua: bool) {
        let Some(open) = self.open.remove(&change) else {
            return;
        };
        let now = self.tick();
        for sector in self.sectors_of(open.range) {
            if let Some(entry) = self.sectors.get_mut(&sector).and_then(|entries| entries.last_mut()) {
                entry.complete(now, self.wall_ms);
                if fua {
                    entry.guarantee(now, self.wall_ms);
                }
            }
            self.unguaranteed.push(sector);
        }
    }

    /// As [`complete`](Self::complete), for a change that a cache has recorded: it is durable at once, although the backing device
    /// alone may lack it until a flush has covered it.
    pub fn complete_in_cache(&mut self, change: OpenChange, fua: bool) {
        let Some(range) = self.range_of(change) else { return };
        self.complete(change, fua);
        for sector in self.sectors_of(range) {
            if let Some(entry) = self.sectors.get_mut(&sector).and_then(|entries| entries.last_mut()) {
                entry.kept = true;
            }
        }
    }

    /// Records the completion of a flush that was submitted at `submitted`.
    pub fn flushed(&mut self, submitted: Moment) {
        let now = self.tick();
        // A later flush does not bring back what a failed one has lost.
        let (sectors, wall_ms, failed) = (&mut self.sectors, self.wall_ms, self.flush_failed);
        self.unguaranteed.sort_unstable();
        self.unguaranteed.dedup();
        self.unguaranteed.retain(|sector| {
            let mut rest = false;
            for entry in sectors.get_mut(sector).into_iter().flatten() {
                if failed > 0 && entry.completed <= failed {
                    continue;
                }
                if entry.completed < submitted {
                    entry.guarantee(now, wall_ms);
                } else if entry.guaranteed == NEVER {
                    rest = true;
                }
            }
            rest
        });
    }

    /// Records that a flush has failed: what had completed and no flush had covered may be lost.
    pub fn flush_failed(&mut self) {
        self.flush_failed = self.tick();
    }

    /// Records that the backing device durably holds everything that had completed at `moment`. Check later images
    /// with [`moment_of`](Self::moment_of) and a `not_before` of at least `moment`.
    pub fn drained(&mut self, moment: Moment) {
        let failed = self.flush_failed;
        let is_drained =
            |entry: &&mut Entry| entry.completed <= moment && (failed == 0 || entry.completed > failed);
        for entry in self.sectors.values_mut().flatten().filter(is_drained) {
            entry.guarantee(moment, self.wall_ms);
        }
    }

    /// Whether the device may return `bytes` for a read of `range` that was submitted at `submitted` and
    /// completes now.
    ///
    /// # Errors
    /// The first sector with another content.
    pub fn check_read(&mut self, range: ByteRange, submitted: Moment, bytes: &[u8]) -> Result<(), Violation> {
        if bytes.len() as u64 != range.len() {
            return Err(Violation(format!("a read of {range} returned {} bytes", bytes.len())));
        }
        for sector in self.sectors_to_check(range, bytes) {
            let shown = Content::of(sector, self.sector_in(range, bytes, sector));
            let legal = self.legal_reads(sector, submitted);
            if !shown.is_some_and(|shown| legal.contains(&shown)) {
                return Err(self.violation("read", sector, shown, &legal));
            }
        }
        Ok(())
    }

    /// The sectors of `range` that were ever changed, and the first of the other sectors with bytes that differ from
    /// the initial content. Comparing bytes is faster than recognising contents.
    fn sectors_to_check(&self, range: ByteRange, bytes: &[u8]) -> Vec<u64> {
        let mut check = Vec::new();
        let end = range.end / self.sector;
        let mut next = range.start / self.sector;
        for changed in self.sectors.range(next..end).map(|(sector, _)| *sector).chain([end]) {
            let untouched = ByteRange { start: next * self.sector, end: changed * self.sector };
            let shown =
                &bytes[(untouched.start - range.start) as usize..(untouched.end - range.start) as usize];
            if shown != &self.fresh[untouched.start as usize..untouched.end as usize] {
                let differs = |sector: &u64| {
                    let start = (sector * self.sector) as usize;
                    self.fresh[start..start + self.sector as usize] != *self.sector_in(range, bytes, *sector)
                };
                check.extend((next..changed).find(differs));
            }
            if changed < end {
                check.push(changed);
            }
            next = changed + 1;
        }
        check
    }

    fn sector_in<'a>(&self, range: ByteRange, bytes: &'a [u8], sector: u64) -> &'a [u8] {
        let start = (sector * self.sector - range.start) as usize;
        &bytes[start..start + self.sector as usize]
    }

    /// Everything that was ever changed, in whole chunks of `unit` bytes.
    #[must_use]
    pub fn changed(&self, unit: u64) -> Vec<ByteRange> {
        let mut units: Vec<u64> = self.sectors.keys().map(|sector| sector * self.sector / unit).collect();
        units.dedup();
        let range =
            |number: u64| ByteRange { start: number * unit, end: ((number + 1) * unit).min(self.size) };
        units.into_iter().map(range).collect()
    }

    /// The contents that a read may return that was submitted at `submitted` and completes now.
    fn legal_reads(&self, sector: u64, submitted: Moment) -> Vec<Content> {
        let Some(entries) = self.sectors.get(&sector) else {
            return vec![Content::INITIAL];
        };
        let is_certain = |entry: &Entry| {
            entry.completed <= submitted
                && (entry.is_safe() || self.flush_failed == 0 || entry.completed > self.flush_failed)
        };
        let oldest = entries.iter().rposition(is_certain).unwrap_or(0);
        entries[oldest..].iter().map(|entry| entry.content).collect()
    }

    /// Decides every open change by the content that `read` returns now, after a crash and a recovery (or after
    /// errors). The outcome is final. Changes that had completed before the crash count as flushed, as on a disk that
    /// restarted.
    ///
    /// # Errors
    /// If the content is neither the old nor the new one, or an atomic write is there in part.
    pub fn settle(&mut self, read: impl FnMut(ByteRange) -> Vec<u8>) -> Result<(), Violation> {
        self.settle_unflushed(read)?;
        let now = self.tick();
        self.flushed(now);
        Ok(())
    }

    /// As [`settle`](Self::settle), if changes may have gone past the cache and only the process crashed: what had completed
    /// is there, but no flush has covered it.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    pub fn settle_unflushed(&mut self, read: impl FnMut(ByteRange) -> Vec<u8>) -> Result<(), Violation> {
        let all: Vec<OpenChange> = self.open.keys().copied().collect();
        self.decide(&all, read).map(drop)
    }

    /// As [`settle`](Self::settle) after a power cut, if changes may have gone past the cache: what had completed and no flush
    /// had covered may be lost, each sector for itself.
    ///
    /// # Errors
    /// The first sector whose content is older than one that was guaranteed, or that no client wrote.
    pub fn settle_after_power_cut(
        &mut self,
        mut read: impl FnMut(ByteRange) -> Vec<u8>,
    ) -> Result<(), Violation> {
        let now = self.tick();
        let mut unguaranteed = Vec::new();
        for range in self.changed(32 << 10) {
            let bytes = read(range);
            for sector in self.sectors_to_check(range, &bytes) {
                let shown = Content::of(sector, self.sector_in(range, &bytes, sector));
                let entries = self.sectors.get(&sector).map_or(&[][..], Vec::as_slice);
                let oldest = entries.iter().rposition(Entry::is_safe).unwrap_or(0);
                let legal: Vec<Content> = entries[oldest..].iter().map(|entry| entry.content).collect();
                let found = legal.iter().rposition(|content| Some(*content) == shown);
                let Some(found) = found else {
                    return Err(self.violation("after a power cut", sector, shown, &legal));
                };
                let wall_ms = self.wall_ms;
                if let Some(entries) = self.sectors.get_mut(&sector) {
                    entries.truncate(oldest + found + 1);
                    if let Some(entry) = entries.last_mut() {
                        // It may be in the cache alone, so it counts as unflushed.
                        // And what a flush has failed to cover since may still be lost, if the power was not cut after all.
                        let is_lost = self.flush_failed > entry.submitted;
                        let latest = if is_lost { self.flush_failed } else { now };
                        entry.complete(entry.completed.min(latest), entry.completed_ms.min(wall_ms));
                        unguaranteed.push(sector);
                    }
                }
            }
        }
        self.open.clear();
        self.unguaranteed = unguaranteed;
        Ok(())
    }

    /// The range of an open change.
    #[must_use]
    pub fn range_of(&self, change: OpenChange) -> Option<ByteRange> {
        self.open.get(&change).map(|open| open.range)
    }

    /// Decides these open changes by the content that `read` returns now. They cannot take effect later, and the
    /// outcome is final. Returns the number of changes that took effect at least in part.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    pub fn decide(
        &mut self,
        changes: &[OpenChange],
        mut read: impl FnMut(ByteRange) -> Vec<u8>,
    ) -> Result<u64, Violation> {
        let submitted = self.tick();
        let mut happened = 0;
        for change in changes {
            let Some(open) = self.open.remove(change) else { continue };
            let bytes = read(open.range);
            self.check_read(open.range, submitted, &bytes)?;
            let (mut there, mut missing) = (None, None);
            let now = self.tick();
            for (sector, bytes) in self.sectors_of(open.range).zip(bytes.chunks_exact(self.sector as usize)) {
                let found = Content::of(sector, bytes) == Some(open.content);
                *(if found { &mut there } else { &mut missing }) = Some(sector);
                let Some(entries) = self.sectors.get_mut(&sector) else { continue };
                if !found {
                    entries.pop();
                } else if let Some(entry) = entries.last_mut() {
                    // What a flush has failed to cover since may still be lost.
                    let is_lost = self.flush_failed > entry.submitted;
                    entry.complete(if is_lost { self.flush_failed } else { now }, self.wall_ms);
                    self.unguaranteed.push(sector);
                }
            }
            happened += u64::from(there.is_some());
            if let (true, Some(there), Some(missing)) = (open.atomic, there, missing) {
                return Err(Violation(format!(
                    "write {} of {} is there in part: sector {there} shows it, sector {missing} does not",
                    open.content.0, open.range
                )));
            }
        }
        Ok(happened)
    }

    /// Whether `image` is the whole content of the device at this moment, with nothing open.
    ///
    /// # Errors
    /// The first sector that differs.
    pub fn check_everything(&mut self, image: &DiskImage) -> Result<(), Violation> {
        let now = self.tick();
        for sector in self.sectors_of_image(image) {
            let shown = Content::of(sector, image.sector(sector, self.sector));
            let legal = self.legal_reads(sector, now);
            if !shown.is_some_and(|shown| legal.contains(&shown)) {
                return Err(self.violation("whole device", sector, shown, &legal));
            }
        }
        Ok(())
    }

    /// The sectors that were ever changed, by a client or in the image.
    fn sectors_of_image(&self, image: &DiskImage) -> BTreeSet<u64> {
        self.sectors.keys().copied().chain(image.sectors_perhaps_changed(self.sector)).collect()
    }

    /// The latest moment of the history, but not before `not_before`, at which a plain disk could have shown
    /// `image` after a power cut. The device is known to be drained up to `not_before`.
    ///
    /// # Errors
    /// A sector that contradicts the others, or whose content no client wrote.
    pub fn moment_of(&self, image: &DiskImage, not_before: Moment) -> Result<Moment, Violation> {
        // Times at which the image is legal: sorted, disjoint, half-open intervals.
        let mut legal = vec![(not_before, NEVER)];
        for sector in self.sectors_of_image(image) {
            let shown = Content::of(sector, image.sector(sector, self.sector));
            let Some(entries) = self.sectors.get(&sector) else {
                if shown == Some(Content::INITIAL) {
                    continue;
                }
                return Err(self.violation("backing device", sector, shown, &[Content::INITIAL]));
            };
            let times = times_of(entries, shown);
            let both = intersection(&legal, &times);
            if both.is_empty() {
                let all: Vec<Content> = entries.iter().map(|entry| entry.content).collect();
                let Violation(text) = self.violation("backing device", sector, shown, &all);
                return Err(Violation(format!(
                    "{text}; a disk shows that only at the times {times:?}, the sectors before it only at {legal:?}"
                )));
            }
            legal = both;
        }
        Ok(legal.last().map_or(not_before, |&(_, end)| (end - 1).min(self.clock)))
    }

    /// Whether each sector of `image` holds the last change that had completed and was flushed before the wall clock
    /// showed `before_ms`, or a later one. This is the guarantee of a recovery point with that time.
    ///
    /// # Errors
    /// The first sector with an older content.
    pub fn check_recovery_point(&self, image: &DiskImage, before_ms: u64) -> Result<(), Violation> {
        for (sector, entries) in &self.sectors {
            let is_due = |entry: &Entry| {
                entry.completed_ms.max(entry.guaranteed_ms) < before_ms && entry.completed_ms > 0
            };
            let Some(oldest) = entries.iter().rposition(is_due) else { continue };
            let shown = Content::of(*sector, image.sector(*sector, self.sector));
            let legal: Vec<Content> = entries[oldest..].iter().map(|entry| entry.content).collect();
            if !shown.is_some_and(|shown| legal.contains(&shown)) {
                let Violation(text) = self.violation("recovery point", *sector, shown, &legal);
                let Entry { completed_ms, guaranteed_ms, .. } = entries[oldest];
                return Err(Violation(format!(
                    "{text}; the recovery point is {before_ms} ms, and the first of them completed at {completed_ms} and was flushed at {guaranteed_ms}"
                )));
            }
        }
        Ok(())
    }

    fn violation(&self, subject: &str, sector: u64, shown: Option<Content>, legal: &[Content]) -> Violation {
        let shown =
            shown.map_or_else(|| String::from("torn or foreign bytes"), |Content(shown)| shown.to_string());
        let legal: Vec<u64> = legal.iter().map(|content| content.0).collect();
        Violation(format!(
            "{subject}: sector {sector} (byte {}) shows {shown}, legal are {legal:?} (0 is zeroes, 1 the initial content)",
            sector * self.sector
        ))
    }
}

/// The times at which a plain disk may show `shown` after a power cut: for each change with that content,
/// from its submission until a later change is guaranteed.
fn times_of(entries: &[Entry], shown: Option<Content>) -> Vec<(Moment, Moment)> {
    let mut times: Vec<(Moment, Moment)> = Vec::new();
    for (at, entry) in entries.iter().enumerate().filter(|(_, entry)| Some(entry.content) == shown) {
        let end = entries[at + 1..].iter().map(|later| later.guaranteed).min().unwrap_or(NEVER);
        match times.last_mut() {
            // Entries are sorted by submission, so an interval can only join the last one.
            Some(last) if entry.submitted <= last.1 => last.1 = last.1.max(end),
            _ if entry.submitted < end => times.push((entry.submitted, end)),
            _ => {}
        }
    }
    times
}

fn intersection(one: &[(Moment, Moment)], other: &[(Moment, Moment)]) -> Vec<(Moment, Moment)> {
    let pairs =
        one.iter().flat_map(|one| other.iter().map(move |other| (one.0.max(other.0), one.1.min(other.1))));
    pairs.filter(|(start, end)| start < end).collect()
}

#[cfg(test)]
mod tests;
