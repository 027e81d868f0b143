//! Lookup of the newest data of a range.
//!
//! Invariants: a lookup changes only what the lane records about reads.

use super::{LaneState, blocks, index::Found, overlay::Meaning};
use crate::{
    Environment,
    base::Base,
    position::{Location, NONE},
};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, SECTOR};

/// Cache lines of a block that are prefetched as soon as its offset is known; the processor predicts the remaining ones.
const PREFETCHED_LINES: u64 = 8;

/// The source of a piece of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// A record holds the data.
    Record(Location),
    Zeroes,
    Damaged,
    /// The backing device holds the data.
    Backing,
}

/// A block that one record holds whole. Its segment is pinned.
pub(crate) struct PinnedBlock {
    pub location: Location,
    /// The offset of its data in the region.
    pub at: u64,
    /// The checksum of its data.
    pub checksum: u32,
}

impl LaneState {
    /// Notes that a client reads `range`: reclaim gives its blocks a second chance, and admission and the model of other sizes
    /// count the read. Other lookups do not count as reads.
    pub(crate) fn note_read<E: Environment>(&mut self, base: &Base<E>, range: ByteRange) {
        for (block, ..) in blocks(range) {
            let key = base.identity().lanes.key(block * CHECKSUM_BLOCK);
            self.index.note_read(key);
            self.admission.note_read(key);
            self.curve.note_read(key);
        }
    }

    /// Calls `give` for each piece of `range`, in order, with the source of its newest data.
    pub(crate) fn look_up<E: Environment>(
        &self,
        base: &Base<E>,
        range: ByteRange,
        give: &mut dyn FnMut(ByteRange, Source),
    ) {
        // Adjacent pieces that the same record holds, or that no record holds, are merged into one run.
        let mut run: Option<(ByteRange, Location)> = None;
        for (block, first, end) in blocks(range) {
            let start = block * CHECKSUM_BLOCK;
            let key = base.identity().lanes.key(start);
            let mut extend = |piece: ByteRange, location: Location| match &mut run {
                Some((before, known)) if *known == location => before.end = piece.end,
                _ => {
                    if let Some((piece, location)) = run.replace((piece, location)) {
                        self.give_run(base, piece, location, give);
                    }
                }
            };
            let whole = ByteRange { start: start + first as u64 * SECTOR, end: start + end as u64 * SECTOR };
            match self.index.get(key) {
                None => extend(whole, NONE),
                Some(Found::Whole(location)) => extend(whole, location),
                Some(Found::Parts(parts)) => {
                    for (part, location) in parts.iter().enumerate().take(end).skip(first) {
                        extend(ByteRange::at(start + part as u64 * SECTOR, SECTOR), *location);
                    }
                }
            }
        }
        if let Some((piece, location)) = run {
            self.give_run(base, piece, location, give);
        }
    }

    /// Calls `give` for a run that one record or no record holds, and separately for the parts of it that were zeroed or
    /// damaged later.
    fn give_run<E: Environment>(
        &self,
        base: &Base<E>,
        run: ByteRange,
        location: Location,
        give: &mut dyn FnMut(ByteRange, Source),
    ) {
        let source = if location == NONE { Source::Backing } else { Source::Record(location) };
        if self.overlay.is_empty() {
            return give(run, source);
        }
        let place = (location != NONE).then(|| base.place_of(location));
        let mut start = run.start;
        for (part, meaning) in self.overlay.later_than(run, place) {
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

    /// Calls `give` for the parts of `range`, which a lookup has found to be zeroes, with the location of the record that zeroed each.
    pub(crate) fn zeroes_of(&self, range: ByteRange, give: &mut dyn FnMut(ByteRange, Option<Location>)) {
        for (part, (ordinal, slot)) in self.overlay.zeroes_in(range) {
            let segment = self.segments().find(|segment| segment.ordinal == ordinal);
            give(part, segment.map(|segment| Location { segment: segment.segment, slot }));
        }
    }

    /// Finds `range`, a block or a part of one, if one record holds the whole block and the offset and checksum of its data are
    /// known. Pins the segment, notes the read and prefetches the data. Otherwise returns `None` and changes nothing.
    #[inline]
    pub(crate) fn pin_block<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
    ) -> Option<PinnedBlock> {
        if !self.overlay.is_empty() {
            return None;
        }
        let key = base.identity().lanes.key(range.start);
        let (location, data) = self.index.read_whole(key)?;
        let segment = base.segment(location.segment);
        let at = segment.base() + u64::from(data.offset);
        // Prefetch first: the atomic instructions that follow would delay the loads.
        for line in 0..PREFETCHED_LINES {
            base.region().prefetch(at + line * 64);
        }
        self.admission.note_read(key);
        self.curve.note_read(key);
        segment.pin();
        self.counters.read_hit += range.len();
        Some(PinnedBlock { location, at, checksum: data.sum })
    }

    /// The source of a read that goes past the lane: the backing device, if it has the content of `source`.
    pub(crate) fn past<E: Environment>(&self, base: &Base<E>, source: Source) -> Source {
        let Source::Record(location) = source else { return source };
        let record = base.find_record(location);
        match record {
            Some(record)
                if !self.is_unwritten(base, &record) && !self.is_parked_at(record.range(), location) =>
            {
                Source::Backing
            }
            _ => source,
        }
    }

    /// Counts bytes of a read that the cache holds.
    pub(crate) fn count_hit(&mut self, bytes: u64) {
        self.counters.read_hit += bytes;
    }
}
