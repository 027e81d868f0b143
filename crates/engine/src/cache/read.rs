//! Reads: look up under the lane's lock, pin, copy and verify without it.
//!
//! Always true here: a pinned segment is not reused; what fails its checksum is not returned: it is read from the
//! backing device if that has it, or the request fails.

use super::{Cache, Miss};
use crate::{
    Environment,
    base::Damage,
    lane::{LaneState, LogSegment, PinnedBlock, Source},
    position::Location,
};
use alloc::{format, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, Result};

/// Why a record does not give what the index says that it holds.
enum Unreadable {
    /// Both copies of it are damaged.
    Record(Error),
    /// It is of another range.
    Index(Error),
    /// A block of its data is damaged; whether the backing device has what the record says, unless it is parked.
    Data { is_clean: bool, damage: Damage },
}

impl Unreadable {
    /// What is damaged when `piece` was asked for.
    fn into_damage(self, piece: ByteRange) -> (ByteRange, Error) {
        match self {
            Self::Record(error) | Self::Index(error) => (piece, error),
            Self::Data { damage, .. } => (damage.range, damage.error),
        }
    }
}

/// The answer to a read of what is quarantined.
fn damaged_error(piece: ByteRange) -> Error {
    Error::new(ErrorKind::Media, format!("{piece} is damaged; overwrite it in full to heal it"))
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
        self.base().gate().check_running()?;
        if let Some(outcome) = self.read_block(range, into, misses) {
            return outcome;
        }
        let first_miss = misses.len();
        let mut pieces: [(ByteRange, Source); 4] = [(range, Source::Backing); 4];
        let mut more = Vec::new();
        let mut count = 0;
        {
            let (base, id) = (self.base(), self.base().identity().lanes.lane_of(range.start));
            let mut state = self.lane(id).lock_for_request();
            state.note_read(base, range);
            state.look_up(base, range, &mut |piece, source| {
                if let Source::Record(location) = source {
                    base.segment(location.segment).pin();
                }
                // Nearly all reads have one piece: no allocation for them.
                if let Some(next) = pieces.get_mut(count) {
                    *next = (piece, source);
                } else {
                    more.push((piece, source));
                }
                count += 1;
            });
            for (piece, source) in pieces[..count.min(4)].iter().chain(&more) {
                if *source == Source::Backing {
                    misses.push(Miss::new(*piece, id, state.register_miss(*piece)));
                } else {
                    state.count_hit(piece.len());
                }
            }
        }
        let mut outcome = Ok(());
        for (piece, source) in pieces[..count.min(4)].iter().chain(&more) {
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

    /// The common read: one block or a part of it, all of which one record holds. `None` where it is anything else; nothing has
    /// happened then.
    fn read_block(&self, range: ByteRange, into: &mut [u8], misses: &mut Vec<Miss>) -> Option<Result<()>> {
        let start = range.start / CHECKSUM_BLOCK * CHECKSUM_BLOCK;
        if range.end > start + CHECKSUM_BLOCK || range.is_empty() {
            return None;
        }
        let base = self.base();
        let pinned = self.prefetched_lane(range).lock_for_request().pin_block(base, range);
        let PinnedBlock { location, at, checksum } = pinned?;
        let block = ByteRange::at(start, CHECKSUM_BLOCK);
        let is_good = base.load_verified(at, block, range, into, checksum).is_ok_and(|is_good| is_good);
        let outcome = if is_good { Ok(()) } else { self.read_again(range, into, misses) };
        base.unpin(location.segment);
        Some(outcome)
    }

    /// Copies `piece` of a pinned record out of it, or what is there instead when the record turns out damaged.
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

    /// A record turned out damaged. While it was read it may have been overwritten, or writeback may have met the same
    /// damage and marked it bad; *drained* passes it then, and does not mean any more that the backing device has it. So it
    /// is looked up again, and read in one hold of the lane's lock, in which none of that can happen. What is
    /// damaged and clean is read from the backing device and cached again.
    fn read_again(&self, piece: ByteRange, out: &mut [u8], misses: &mut Vec<Miss>) -> Result<()> {
        let mut found = Vec::new();
        let mut damaged = Vec::new();
        let mut healed = 0;
        {
            let (base, id) = (self.base(), self.base().identity().lanes.lane_of(piece.start));
            let mut state = self.lane(id).lock();
            state.note_read(base, piece);
            state.look_up(base, piece, &mut |part, source| found.push((part, source)));
            for (part, source) in found {
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

    /// Copies `piece` out of the record at `location`, verified.
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

    /// Whether the backing device has what cannot be read at `location`, to which the index leads now.
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
            // Whether it was clean went with the record; its segment may still say so.
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
