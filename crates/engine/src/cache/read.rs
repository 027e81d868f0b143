//! Reads: look up and pin under the lane's lock; copy and verify without it.
//!
//! Invariants: a pinned segment is not reused; data that fails its checksum is not returned: it is read from the backing device
//! if that has it, or the request fails.

use super::{Cache, Miss};
use crate::{
    Environment,
    base::Damage,
    lane::{LaneState, LogSegment, PinnedBlock, Source},
    position::Location,
};
use alloc::{format, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, Result};

/// Why a record does not have the data that the index promises.
enum Unreadable {
    /// Both copies of the record are damaged.
    Record(Error),
    /// The record is of another range.
    Index(Error),
    /// A block of its data is damaged; `is_clean`: whether the backing device has the content of the record, unless it is parked.
    Data { is_clean: bool, damage: Damage },
}

impl Unreadable {
    /// The damaged range when `piece` was requested.
    fn into_damage(self, piece: ByteRange) -> (ByteRange, Error) {
        match self {
            Self::Record(error) | Self::Index(error) => (piece, error),
            Self::Data { damage, .. } => (damage.range, damage.error),
        }
    }
}

/// The parts of a range and their sources, in order.
struct Pieces {
    /// The first ones. Nearly all reads have one piece: no allocation for them.
    few: [(ByteRange, Source); 4],
    more: Vec<(ByteRange, Source)>,
    count: usize,
    /// The number of those that only the backing device has.
    misses: usize,
    /// Whether there was memory for all of them.
    is_complete: bool,
}

impl Pieces {
    const fn new(range: ByteRange) -> Self {
        Self { few: [(range, Source::Backing); 4], more: Vec::new(), count: 0, misses: 0, is_complete: true }
    }

    /// Adds a piece. `false` if there is no memory for it.
    fn push(&mut self, piece: ByteRange, source: Source) -> bool {
        if let Some(next) = self.few.get_mut(self.count) {
            *next = (piece, source);
            self.count += 1;
        } else if self.more.try_reserve(1).is_ok() {
            self.more.push((piece, source));
        } else {
            self.is_complete = false;
            return false;
        }
        self.misses += usize::from(source == Source::Backing);
        true
    }

    fn iter(&self) -> impl Iterator<Item = &(ByteRange, Source)> {
        self.few[..self.count].iter().chain(&self.more)
    }
}

/// The error of a read for which there is no memory.
#[cold]
fn no_memory() -> Error {
    Error::new(ErrorKind::System, "there is no memory for the request; nothing was read")
}

/// The error of a read of a quarantined range.
fn damaged_error(piece: ByteRange) -> Error {
    Error::new(ErrorKind::Media, format!("{piece} is damaged; overwrite it in full to heal it"))
}

impl<E: Environment> Cache<E> {
    /// Prefetches what a read at `at` looks up first, so that it arrives while the caller prepares the read.
    #[inline]
    pub fn prefetch(&self, at: u64) {
        self.prefetched_lane(ByteRange::at(at, 1));
    }

    /// Reads the parts of `range`, which lies in one chunk, that the cache holds into `into`. The missing parts are added to
    /// `misses`: the caller reads each from the backing device and passes it to [`complete_fill`](Self::complete_fill) or
    /// [`cancel_fill`](Self::cancel_fill).
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if data is damaged and the backing device does not have it; none of it is returned.
    /// [`ErrorKind::System`] if there is no memory for the request.
    pub fn read(&self, range: ByteRange, into: &mut [u8], misses: &mut Vec<Miss>) -> Result<()> {
        debug_assert_eq!(range.len(), into.len() as u64);
        debug_assert!(self.base().identity().lanes.is_in_one_chunk(range), "{range} is in several chunks");
        self.base().gate().check_running()?;
        let is_past = self.base().mode().is_passthrough();
        if !is_past && let Some(outcome) = self.read_block(range, into, misses) {
            return outcome;
        }
        let first_miss = misses.len();
        let mut pieces = Pieces::new(range);
        {
            let (base, id) = (self.base(), self.base().identity().lanes.lane_of(range.start));
            let mut state = self.lane(id).lock_for_request(base);
            state.note_read(base, range);
            state.look_up(base, range, &mut |piece, source| {
                let source = if is_past { state.past(base, source) } else { source };
                if !pieces.push(piece, source) {
                    return;
                }
                if let Source::Record(location) = source {
                    base.segment(location.segment).pin();
                }
            });
            if !pieces.is_complete || misses.try_reserve(pieces.misses).is_err() {
                pieces.iter().for_each(|(_, source)| self.unpin(source));
                return Err(no_memory());
            }
            for (piece, source) in pieces.iter() {
                if *source == Source::Backing {
                    let fill =
                        if is_past { state.unrecorded_miss(*piece) } else { state.register_miss(*piece) };
                    misses.push(Miss::new(*piece, id, fill));
                } else {
                    state.count_hit(piece.len());
                }
            }
        }
        let mut outcome = Ok(());
        for (piece, source) in pieces.iter() {
            let out = &mut into[(piece.start - range.start) as usize..(piece.end - range.start) as usize];
            let result = match source {
                Source::Record(location) => {
                    let result = self.read_record(*location, *piece, out, misses);
                    self.base().unpin(location.segment);
                    result
                }
                Source::Zeroes => {
                    out.fill(0);
                    Ok(())
                }
                Source::Damaged => Err(damaged_error(*piece)),
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

    fn unpin(&self, source: &Source) {
        if let Source::Record(location) = source {
            self.base().unpin(location.segment);
        }
    }

    /// The common read: one block or a part of it, all of which one record holds. `None` for any other read; nothing has changed
    /// then.
    fn read_block(&self, range: ByteRange, into: &mut [u8], misses: &mut Vec<Miss>) -> Option<Result<()>> {
        let start = range.start / CHECKSUM_BLOCK * CHECKSUM_BLOCK;
        if range.end > start + CHECKSUM_BLOCK || range.is_empty() {
            return None;
        }
        let base = self.base();
        let pinned = self.prefetched_lane(range).lock_for_request(base).pin_block(base, range);
        let PinnedBlock { location, at, checksum } = pinned?;
        let block = ByteRange::at(start, CHECKSUM_BLOCK);
        let is_good = base.load_verified(at, block, range, into, checksum).is_ok_and(|is_good| is_good);
        let outcome = if is_good { Ok(()) } else { self.read_again(range, into, misses) };
        base.unpin(location.segment);
        Some(outcome)
    }

    /// Copies `piece` of a pinned record, or reads it again if the record is damaged.
    fn read_record(
        &self,
        location: Location,
        piece: ByteRange,
        out: &mut [u8],
        misses: &mut Vec<Miss>,
    ) -> Result<()> {
        match self.load_piece(location, piece, out) {
            Ok(()) => Ok(()),
            Err(_) => self.read_again(piece, out, misses),
        }
    }

    /// Reads a range again whose record was found damaged. While it was read, a client may have overwritten it, or writeback may
    /// have found the same damage and marked it bad; *drained* then passes the record although the backing device does not have
    /// it. So the range is looked up again and read while the lane is locked, which excludes both. Damaged data that is clean is
    /// read from the backing device and cached again.
    fn read_again(&self, piece: ByteRange, out: &mut [u8], misses: &mut Vec<Miss>) -> Result<()> {
        let mut found = Pieces::new(piece);
        let mut damaged = Vec::new();
        let mut healed = 0;
        {
            let (base, id) = (self.base(), self.base().identity().lanes.lane_of(piece.start));
            let mut state = self.lane(id).lock();
            state.note_read(base, piece);
            state.look_up(base, piece, &mut |part, source| {
                found.push(part, source);
            });
            let count = found.iter().count();
            if !found.is_complete
                || misses.try_reserve(count).is_err()
                || damaged.try_reserve_exact(count).is_err()
            {
                return Err(no_memory());
            }
            for (part, source) in found.iter().copied() {
                let out = &mut out[(part.start - piece.start) as usize..(part.end - piece.start) as usize];
                match source {
                    Source::Record(location) => match self.load_piece(location, part, out) {
                        Ok(()) => {}
                        Err(unreadable) if self.is_clean_now(&state, location, part, &unreadable) => {
                            healed += 1;
                            misses.push(Miss::new(part, id, state.register_fill(part)));
                        }
                        Err(unreadable) => {
                            let (range, error) = unreadable.into_damage(part);
                            damaged.push((range, Some(location), error));
                        }
                    },
                    Source::Zeroes => out.fill(0),
                    Source::Damaged => damaged.push((part, None, damaged_error(part))),
                    Source::Backing => misses.push(Miss::new(part, id, state.register_fill(part))),
                }
            }
        }
        if healed > 0 {
            self.damage_log().count_healed(healed);
        }
        let mut outcome = Ok(());
        for (range, location, error) in damaged {
            if let Some(location) = location {
                self.damage_log().note(range, location, &error);
            }
            if outcome.is_ok() {
                outcome = Err(error);
            }
        }
        outcome
    }

    /// Copies `piece` of the record at `location`, verified.
    fn load_piece(
        &self,
        location: Location,
        piece: ByteRange,
        out: &mut [u8],
    ) -> core::result::Result<(), Unreadable> {
        let record = self.base().load_record(location).map_err(Unreadable::Record)?;
        if !record.range().contains(&piece) {
            let text = format!("the index and the log disagree about {piece}");
            return Err(Unreadable::Index(Error::new(ErrorKind::Damaged, text)));
        }
        self.base()
            .load_data(location, &record, piece, out)
            .map_err(|damage| Unreadable::Data { is_clean: self.base().is_clean(&record), damage })
    }

    /// Whether the backing device has the unreadable data at `location`, to which the index points now.
    fn is_clean_now(
        &self,
        state: &LaneState,
        location: Location,
        piece: ByteRange,
        unreadable: &Unreadable,
    ) -> bool {
        if state.is_parked_at(piece, location) {
            return false;
        }
        match unreadable {
            Unreadable::Data { is_clean, .. } => *is_clean,
            // The record that showed whether it was clean is lost; its segment may still show that it is clean.
            Unreadable::Record(_) => {
                let drained = self.drained_epoch().0;
                let is_clean = |segment: &LogSegment| {
                    segment.segment == location.segment && segment.last_dirty_epoch <= drained
                };
                state.segments().any(is_clean)
            }
            Unreadable::Index(_) => false,
        }
    }
}
