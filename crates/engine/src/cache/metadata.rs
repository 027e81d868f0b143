//! Verification of the metadata of a cache in use: both copies of its state and of the headers of its logs.
//!
//! Each structure is looked at under the lock that its writer holds: the header of a segment under that of its lane, a mark under that
//! of the flush pass. No other lock is held meanwhile.
//!
//! Invariants: a damaged copy of a segment's header is repaired from the other copy only: memory does not have all of it.
//!
//! Elsewhere: objects in two slots (`slots::whole`); the tables, and who may not take the segments away meanwhile
//! (`transport::metadata`).

use super::Cache;
use crate::{
    Environment,
    metadata::{Area, MetadataPlace, STEP, verify_copies},
    slots::Object,
};
use cbd_format::{
    SegmentHeader,
    segment::{LOG_MAGIC, STATE_MAGIC},
};
use cbd_types::{LaneId, SegmentId, Structure, VerifiedMetadata};

/// Bytes of the header of a segment.
const HEADER: usize = size_of::<SegmentHeader>();

impl<E: Environment> Cache<E> {
    /// One step of a verification of the metadata in the segments of the cache.
    pub(crate) fn verify_metadata(
        &self,
        state_segment: SegmentId,
        place: &mut MetadataPlace,
        scratch: &mut [u8],
        found: &mut VerifiedMetadata,
    ) {
        let lanes = self.lanes.len() as u64;
        match place.area() {
            Area::State => {
                self.verify_state_header(state_segment, found);
                self.base.epochs().verify_drained(self.base.context(), scratch, found);
                place.end_area();
            }
            Area::Tails => {
                let object = |lane| Object { structure: Structure::Tail, number: lane, is_synced: false };
                let mut tails = self.tails.lock();
                for lane in place.take(lanes) {
                    tails[lane].verify(self.base.region(), object(lane as u64), scratch, found);
                }
            }
            Area::Marks => {
                let mut pass = self.base.epochs().pass();
                for lane in place.take(lanes) {
                    pass.verify_mark(self.base.context(), LaneId(lane as u32), scratch, found);
                }
            }
            Area::Logs => (0..STEP).for_each(|_| self.verify_log(place, found)),
            _ => place.end_area(),
        }
    }

    /// Looks at the header of the state segment, which nothing stores while the cache is open.
    #[inline(never)]
    fn verify_state_header(&self, segment: SegmentId, found: &mut VerifiedMetadata) {
        let identity = self.base.identity();
        let at = [identity.state_base, identity.state_base + self.base.shape().header_copy()];
        let object =
            Object { structure: Structure::StateHeader, number: u64::from(segment.0), is_synced: false };
        let is_good = |bytes: &[u8; HEADER]| {
            SegmentHeader::decode(bytes)
                .and_then(|header| header.verify(segment, identity.cache_id, identity.lanes.lanes))
                .is_some_and(|header| header.magic.get() == STATE_MAGIC)
        };
        verify_copies(self.base.region(), object, at, is_good, found);
    }

    /// Looks at the header of the next segment of a log, and goes to the next lane at its end.
    #[inline(never)]
    fn verify_log(&self, place: &mut MetadataPlace, found: &mut VerifiedMetadata) {
        if place.area() != Area::Logs {
            return;
        }
        let base = &self.base;
        let lane = LaneId(place.next() as u32);
        let state = self.lane(lane).lock();
        let (next, end) = place.in_log(state.next_ordinal());
        let Some(segment) = state.segment_from(next).filter(|segment| segment.ordinal < end) else {
            return place.end_log(self.lanes.len() as u64);
        };
        place.go_on_behind(segment.ordinal, end);
        let runtime = base.segment(segment.segment);
        let at = [runtime.base(), runtime.base() + base.shape().header_copy()];
        let number = u64::from(runtime.id().0);
        let object = Object { structure: Structure::SegmentHeader, number, is_synced: false };
        let is_good = |bytes: &[u8; HEADER]| {
            let (identity, place) = (base.identity(), runtime.place(0));
            SegmentHeader::decode(bytes)
                .and_then(|header| header.verify(runtime.id(), identity.cache_id, identity.lanes.lanes))
                .is_some_and(|header| {
                    header.magic.get() == LOG_MAGIC
                        && header.lane.get() == lane.0
                        && header.generation.get() == runtime.generation()
                        && (header.ordinal.get(), header.salt.get()) == (segment.ordinal, place.salt)
                })
        };
        verify_copies(base.region(), object, at, is_good, found);
    }
}
