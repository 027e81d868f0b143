//! Reads: look up under the lane's lock, pin, copy and verify without it.
//!
//! Always true here: a pinned segment is not used anew; what fails its checksum is not returned: it is read from the
//! backing device if that has it, or the request fails.

use crate::{
    Cache, Environment, Miss,
    index::{Found, Location, NONE, blocks},
    lane::LaneState,
    overlay::Meaning,
};
use alloc::{format, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, Result, SECTOR, Safeguard};

/// What a piece of a read is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// A record has it.
    Record(Location),
    Zeroes,
    Damaged,
    /// The backing device has it.
    Backing,
}

impl<E: Environment> Cache<E> {
    /// Reads `range`, which lies in one chunk, into `into` as far as the cache has it. What it has not is added to
    /// `misses`: the caller reads it from the backing device and gives each back with
    /// [`complete_fill`](Self::complete_fill) or [`cancel_fill`](Self::cancel_fill).
    ///
    /// # Errors
    /// [`ErrorKind::Media`] where data is damaged and the backing device has no newer; nothing of it is returned.
    pub fn read(&self, range: ByteRange, into: &mut [u8], misses: &mut Vec<Miss>) -> Result<()> {
        debug_assert_eq!(range.len(), into.len() as u64);
        self.check_running()?;
        let first_miss = misses.len();
        let mut pieces: [(ByteRange, Source); 4] = [(range, Source::Backing); 4];
        let mut more = Vec::new();
        let mut count = 0;
        {
            let mut state = self.lane(range.start).state.lock();
            self.look_up(&mut state, range, &mut |piece, source| {
                match source {
                    Source::Record(location) if Safeguard::ReadPins.is_kept() => {
                        self.segments[location.segment as usize].pin();
                    }
                    Source::Record(_) | Source::Backing | Source::Zeroes | Source::Damaged => {}
                }
                // Nearly all reads have one piece: no allocation for them.
                if let Some(place) = pieces.get_mut(count) {
                    *place = (piece, source);
                } else {
                    more.push((piece, source));
                }
                count += 1;
            });
            for (piece, source) in pieces[..count.min(4)].iter().chain(&more) {
                if *source == Source::Backing {
                    state.counters.read_missed += piece.len();
                    misses.push(self.register_fill(&mut state, *piece));
                } else {
                    state.counters.read_hit += piece.len();
                }
            }
        }
        let mut outcome = Ok(());
        for (piece, source) in pieces[..count.min(4)].iter().chain(&more) {
            let out = &mut into[(piece.start - range.start) as usize..(piece.end - range.start) as usize];
            let result = match source {
                Source::Record(location) => {
                    let result = self.read_record(*location, *piece, out, misses);
                    if Safeguard::ReadPins.is_kept() {
                        self.unpin(location.segment);
                    }
                    result
                }
                Source::Zeroes => {
                    out.fill(0);
                    Ok(())
                }
                Source::Damaged => Err(Error::new(
                    ErrorKind::Media,
                    format!("{piece} is damaged; overwrite it in full to heal it"),
                )),
                Source::Backing => Ok(()),
            };
            if outcome.is_ok() {
                outcome = result;
            }
        }
        if outcome.is_err() {
            for miss in misses.drain(first_miss..) {
                self.cancel_fill(miss);
            }
        }
        outcome
    }

    fn read_record(
        &self,
        location: Location,
        piece: ByteRange,
        out: &mut [u8],
        misses: &mut Vec<Miss>,
    ) -> Result<()> {
        let record = match self.load_record(location) {
            Ok(record) => record,
            // Whether it was clean went with the record; its segment may still say so.
            Err(_) if Safeguard::ReadAnewCleanSegment.holds(self.is_clean_segment(location, piece)) => {
                misses.push(self.read_anew(location, piece));
                return Ok(());
            }
            Err(error) => {
                self.note_damage(piece, location, &error);
                return Err(error);
            }
        };
        if !Safeguard::ReadInRecord.holds(record.range().contains(&piece)) {
            let error =
                Error::new(ErrorKind::Damaged, format!("the index and the log disagree about {piece}"));
            self.note_damage(piece, location, &error);
            return Err(error);
        }
        match self.load_data(location, &record, piece, out) {
            Ok(()) => Ok(()),
            Err(_) if Safeguard::ReadAnewClean.holds(self.is_clean(&record)) => {
                misses.push(self.read_anew(location, piece));
                Ok(())
            }
            Err(damage) => {
                self.note_damage(damage.range, location, &damage.error);
                Err(damage.error)
            }
        }
    }

    /// What a damaged record held is on the backing device: read it there and cache it anew. A write may have come between,
    /// and it has cancelled only the fills that it found: what is not the newest any more must not be recorded.
    fn read_anew(&self, location: Location, piece: ByteRange) -> Miss {
        self.damage.lock().healed += 1;
        let mut state = self.lane(piece.start).state.lock();
        let mut is_newest = true;
        self.look_up(&mut state, piece, &mut |_, source| is_newest &= source == Source::Record(location));
        let miss = self.register_fill(&mut state, piece);
        if !Safeguard::ReadAnewNewest.holds(is_newest) {
            state.fills.retain(|fill| !miss.is(fill));
        }
        miss
    }

    /// Whether the backing device has all that the segment of `location` holds.
    fn is_clean_segment(&self, location: Location, piece: ByteRange) -> bool {
        let state = self.lane(piece.start).state.lock();
        let drained = self.drained_epoch().0;
        state
            .segments()
            .any(|segment| segment.segment == location.segment && segment.last_dirty_epoch <= drained)
    }

    /// Calls `give` for each piece of `range` in order with where its newest bytes are.
    pub(crate) fn look_up(
        &self,
        lane: &mut LaneState,
        range: ByteRange,
        give: &mut dyn FnMut(ByteRange, Source),
    ) {
        // Neighbours that the same record holds, or nobody, are one piece.
        let mut run: Option<(ByteRange, Location)> = None;
        for (block, first, end) in blocks(range) {
            let base = block * CHECKSUM_BLOCK;
            let key = self.identity.lanes.key(base);
            let mut extend = |lane: &LaneState, piece: ByteRange, location: Location| match &mut run {
                Some((before, known)) if *known == location => before.end = piece.end,
                _ => {
                    if let Some((piece, location)) = run.replace((piece, location)) {
                        self.give_run(lane, piece, location, give);
                    }
                }
            };
            let whole = ByteRange { start: base + first as u64 * SECTOR, end: base + end as u64 * SECTOR };
            lane.index.note_read(key);
            match lane.index.get(key) {
                None => extend(lane, whole, NONE),
                Some(Found::Whole(location)) => extend(lane, whole, location),
                Some(Found::Parts(parts)) => {
                    for (part, location) in parts.iter().enumerate().take(end).skip(first) {
                        extend(lane, ByteRange::at(base + part as u64 * SECTOR, SECTOR), *location);
                    }
                }
            }
        }
        if let Some((piece, location)) = run {
            self.give_run(lane, piece, location, give);
        }
    }

    /// Gives a run that one record holds, or nobody, less what was zeroed or damaged since.
    fn give_run(
        &self,
        lane: &LaneState,
        run: ByteRange,
        location: Location,
        give: &mut dyn FnMut(ByteRange, Source),
    ) {
        let source = if location == NONE { Source::Backing } else { Source::Record(location) };
        if lane.overlay.is_empty() {
            return give(run, source);
        }
        let place =
            (location != NONE).then(|| (self.segments[location.segment as usize].ordinal(), location.slot));
        let mut start = run.start;
        for (part, meaning) in lane.overlay.later_than(run, place) {
            if start < part.start {
                give(ByteRange { start, end: part.start }, source);
            }
            give(
                part,
                match meaning {
                    Meaning::Zeroes => Source::Zeroes,
                    Meaning::Damaged => Source::Damaged,
                },
            );
            start = part.end;
        }
        if start < run.end {
            give(ByteRange { start, end: run.end }, source);
        }
    }
}
