//! Fills: data read from the backing device becomes a clean record.
//!
//! Invariants: a commit or discard that overlaps a pending fill cancels it while it holds the lane's lock, so data that was read
//! before a write can never be recorded after it; a fill never waits for space.

use super::{Cache, write::class_of};
use crate::{
    BypassReason, Environment, ReadFill,
    base::{Base, Requester},
    lane::{Content, FEW_BLOCKS, FillId, LaneState, MANY_BLOCKS},
};
use cbd_format::{RecordKind, record::blocks_in};
use cbd_types::{ByteRange, Class, LaneId, MutationPoint};

/// A range that the caller must read from the backing device.
#[derive(Debug)]
#[must_use = "a fill that is neither completed nor cancelled stays registered"]
pub struct Miss {
    /// The bytes to read.
    pub range: ByteRange,
    lane: LaneId,
    id: FillId,
    class: Class,
}

impl Miss {
    /// A range of `lane` that a read has missed, registered as `id`.
    pub(super) const fn new(range: ByteRange, lane: LaneId, id: FillId) -> Self {
        Self { range, lane, id, class: Class::Unmarked }
    }

    /// Sets the class of its data.
    pub const fn set_class(&mut self, class: Class) {
        self.class = class;
    }

    /// The class of its data.
    #[must_use]
    pub const fn class(&self) -> Class {
        self.class
    }

    /// Its lane.
    pub(super) const fn lane(&self) -> LaneId {
        self.lane
    }

    /// Its number in the lane.
    pub(super) const fn id(&self) -> FillId {
        self.id
    }
}

impl<E: Environment> Cache<E> {
    /// Caches the data that was read, unless a write or discard overlapped it meanwhile, space is short, or the full cache holds
    /// data of more value. `data` is memory that no client can access.
    pub fn complete_fill(&self, miss: Miss, data: &[u8]) {
        self.end_read(miss, data, false);
    }

    /// As [`complete_fill`](Self::complete_fill), for data behind the cutoff of its sequential stream: it is cached only while the
    /// cache has space.
    pub fn complete_fill_behind_cutoff(&self, miss: Miss, data: &[u8]) {
        self.end_read(miss, data, true);
    }

    fn end_read(&self, miss: Miss, data: &[u8], is_behind_cutoff: bool) {
        debug_assert_eq!(miss.range.len(), data.len() as u64);
        debug_assert!(self.is_piece(miss.range), "{} is no piece", miss.range);
        let (base, lane) = (self.base(), self.lane(miss.lane));
        let mut state = lane.lock();
        if !state.end_fill(miss.id) {
            return;
        }
        let is_pinned = state.is_pinned(miss.range);
        let is_metadata = miss.class == Class::Metadata;
        let rank = match (is_pinned, is_metadata) {
            (true, _) => Rank::First,
            (false, true) if self.prefers_metadata() => Rank::First,
            (false, true) => Rank::Last,
            (false, false) => Rank::ByAdmission,
        };
        // Taking the last free segments would only make writers wait for reclaim. What is pinned is worth that: it is missed once.
        if base.gate().check_running().is_err()
            || base.region().check_stores(MutationPoint::RecordAfterFailure).is_err()
            || (base.pool().has_waiters() && !is_pinned)
        {
            return;
        }
        if let Some(reason) = bypass_of(base, &mut state, miss.range, is_behind_cutoff, rank) {
            base.bypassed().count(reason, miss.range.len());
            return;
        }
        lane.announce(base);
        // A power failure may take from the backing device what went past the cache and no flush has covered.
        let kind = if self.has_unflushed_bypass() { RecordKind::WriteThrough } else { RecordKind::Fill };
        let content = Content { class: class_of(miss.class), ..kind.into() };
        let requester = if is_pinned { Requester::Client } else { Requester::Optional };
        if self.record_clean(&mut state, content, miss.range, data, requester) {
            state.count_filled(miss.range.len());
            if is_metadata {
                base.note_more_metadata(miss.range.len());
            }
        }
    }

    /// Records data that the backing device has. Returns `false` if there was no space.
    pub(crate) fn record_clean(
        &self,
        lane: &mut LaneState,
        content: Content,
        range: ByteRange,
        data: &[u8],
        requester: Requester,
    ) -> bool {
        if blocks_in(range) <= FEW_BLOCKS {
            self.commit_clean::<FEW_BLOCKS>(lane, content, range, data, requester)
        } else {
            self.commit_clean::<MANY_BLOCKS>(lane, content, range, data, requester)
        }
    }

    fn commit_clean<const BLOCKS: usize>(
        &self,
        lane: &mut LaneState,
        content: Content,
        range: ByteRange,
        data: &[u8],
        requester: Requester,
    ) -> bool {
        lane.commit::<E, BLOCKS>(self.base(), content, range, data, requester, None).is_ok()
    }

    /// Ends a fill whose data is not recorded for this reason.
    pub fn bypass_fill(&self, miss: Miss, reason: BypassReason) {
        if self.lane(miss.lane).lock().end_fill(miss.id) {
            self.base().bypassed().count(reason, miss.range.len());
        }
    }

    /// Cancels a fill: the read failed, or its data is not needed any more.
    pub fn cancel_fill(&self, miss: Miss) {
        self.lane(miss.lane).lock().end_fill(miss.id);
    }
}

/// How data that was read competes for its place in a full cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rank {
    /// It is recorded: it is pinned, or metadata.
    First,
    /// Admission decides.
    ByAdmission,
    /// It is not recorded: it is metadata, of which there is too much.
    Last,
}

/// Why data that was read is not recorded, if it is not.
fn bypass_of<E: Environment>(
    base: &Base<E>,
    lane: &mut LaneState,
    range: ByteRange,
    is_behind_cutoff: bool,
    rank: Rank,
) -> Option<BypassReason> {
    if base.mode().is_passthrough() {
        return Some(BypassReason::Mode);
    }
    match base.settings().read_fill {
        ReadFill::Off => Some(BypassReason::ReadFillOff),
        _ if rank == Rank::First || !base.is_full() => None,
        _ if rank == Rank::Last => Some(BypassReason::NotAdmitted),
        _ if is_behind_cutoff => Some(BypassReason::Sequential),
        ReadFill::Admit if !lane.admits(base, range) => Some(BypassReason::NotAdmitted),
        ReadFill::Admit | ReadFill::All => None,
    }
}
