//! Creating caches: the choice of their segments, and their content before the first write.
//!
//! Invariants: nothing relies on the stored content before a row records that the cache exists or is in use.
//!
//! Elsewhere: the row (`backends`), opening (`uses`).

use super::{SEGMENTS_PER_LANE, Tables, Transport};
use crate::{Environment, lane_map::LaneMap, slots::TwoSlots};
use alloc::{format, vec::Vec};
use cbd_format::{
    Drained, LaneMark, LaneTail, SegmentEntry, SegmentHeader, StateShape, record::bytes_of,
    segment::STATE_MAGIC,
};
use cbd_types::{Epoch, Error, ErrorKind, InFlight, LaneId, MutationPoint, Result, SegmentId, Size};

/// The segments and the number of lanes of a new cache.
pub(super) struct CachePlan {
    /// The first one is the state segment.
    pub segments: Vec<SegmentId>,
    pub lanes: u32,
}

/// Added to the highest epoch that the pages of an emptied cache still show: pages with higher epochs may never have reached
/// the disk.
const EPOCHS_SKIPPED: u64 = 1 << 32;

impl<E: Environment> Transport<E> {
    /// The plan of a cache of `bytes` with at most `lanes_max` lanes, for a backing device of `device` bytes.
    pub(super) fn plan_cache(
        &self,
        tables: &mut Tables<E>,
        bytes: u64,
        device: u64,
        lanes_max: u32,
    ) -> Result<CachePlan> {
        let size = self.segment_size;
        let wanted = bytes / size;
        let minimum = u64::from(SEGMENTS_PER_LANE + 1);
        if wanted < minimum {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a cache of {} is too small: the smallest one here is {}, {minimum} segments of {}",
                    Size(bytes),
                    Size(minimum * size),
                    Size(size)
                ),
            ));
        }
        self.take_segments(tables, usize::try_from(wanted).unwrap_or(usize::MAX))?;
        let free = tables.free_segments();
        if wanted > free.len() as u64 {
            self.release_unused(tables);
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a cache of {} is larger than the free space of the transport, {}",
                    Size(bytes),
                    Size(free.len() as u64 * size)
                ),
            ));
        }
        let segments: Vec<SegmentId> = free.into_iter().take(wanted as usize).collect();
        let mut lanes = 1;
        while lanes * 2 <= lanes_max
            && (segments.len() as u32 - 1) / (lanes * 2) >= SEGMENTS_PER_LANE
            && (StateShape { lanes: lanes * 2 }).fits(size)
        {
            lanes *= 2;
        }
        let map = LaneMap { lanes };
        if device > map.device_max() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "a backing device of {} is too large for a cache of {lanes} lanes, which reaches {}: use a larger cache",
                    Size(device),
                    Size(map.device_max())
                ),
            ));
        }
        Ok(CachePlan { segments, lanes })
    }

    /// Stores the state block of an empty cache in which all epochs up to `drained_epoch` are drained. In flight until the
    /// caller fences.
    fn initialise_state(
        &self,
        segment: SegmentId,
        lanes: u32,
        cache_id: u64,
        (drained_epoch, closed_ms): (u64, u64),
    ) -> InFlight {
        let state = StateShape { lanes };
        let base = self.segment_base(segment);
        let absolute = |[a, b]: [u64; 2]| [base + a, base + b];
        let header = SegmentHeader {
            crc: 0.into(),
            magic: STATE_MAGIC.into(),
            cache_id: cache_id.into(),
            segment: segment.0.into(),
            generation: 1.into(),
            salt: self.environment.random().into(),
            lane: 0.into(),
            lanes: lanes.into(),
            ordinal: 0.into(),
            ownership: 1.into(),
            run: 0.into(),
            cut: 0.into(),
            first_sequence: 0.into(),
            epoch: 0.into(),
            reserved: [0; 40],
        }
        .sealed();
        let copy = base + self.segment_shape().header_copy();
        let region = &*self.region;
        let mut stored = region.store(base, bytes_of(&header)).and(region.store(copy, bytes_of(&header)));
        for lane in (0..lanes).map(LaneId) {
            let place = u64::from(lane.0);
            // A mark of an earlier cache would make recovery report missing records.
            let mut mark = TwoSlots::<LaneMark>::empty(absolute(state.mark(lane)), place);
            stored = stored.and(mark.clear(region));
            let mut tail = TwoSlots::<LaneTail>::empty(absolute(state.tail(lane)), place);
            let first = LaneTail {
                ordinal: 1.into(),
                ownership: 1.into(),
                first_sequence: 1.into(),
                reserved: [0; 24],
            };
            stored = stored.and(tail.fill(region, MutationPoint::BackendTailSecond, |tail| *tail = first));
        }
        let mut drained = TwoSlots::<Drained>::empty(absolute(state.drained()), 0);
        let first = Drained {
            epoch: drained_epoch.into(),
            void_until: 0.into(),
            wall_ms: self.environment.wall_ms().into(),
            ownership: 1.into(),
            closed_ms: closed_ms.into(),
            reserved: [0; 8],
        };
        stored.and(drained.fill(region, MutationPoint::BackendDrainedSecond, |drained| *drained = first))
    }

    /// Assigns the segments of `plan` to the cache `cache_id` of the backend in `row`, and initialises it as an empty cache
    /// whose epochs begin above `after`.
    pub(super) fn place_cache(
        &self,
        tables: &mut Tables<E>,
        row: u32,
        plan: &CachePlan,
        cache_id: u64,
        after: Epoch,
    ) -> Result<()> {
        // 1. The segments name the cache. They remain free until a row names it too.
        self.store_entries(tables, &plan.segments, SegmentEntry::of_cache(row, cache_id))?;
        // 2. The state block of an empty cache. Nothing relies on it before the row is stored.
        let stored = self.initialise_state(plan.segments[0], plan.lanes, cache_id, (after.0, 0));
        self.region.fence(MutationPoint::BackendStateFence, stored);
        Ok(())
    }

    /// Empties a cache that is not open and holds nothing dirty. After a crash it can be repeated, as long as the row still
    /// records that the cache must be emptied.
    pub(super) fn empty_cache(&self, segments: &[SegmentId], state: SegmentId, lanes: u32, cache_id: u64) {
        // The recorded time of closing remains a lower bound.
        let (epoch, closed_ms) = self.highest_epoch(state, lanes);
        let drained = (epoch.saturating_add(EPOCHS_SKIPPED), closed_ms);
        // 1. Clear the headers, so that no segment holds a log.
        let nothing = [0; size_of::<SegmentHeader>()];
        let mut stored = self.region.nothing_in_flight();
        for segment in segments.iter().filter(|segment| **segment != state) {
            let base = self.segment_base(*segment);
            let copy = base + self.segment_shape().header_copy();
            stored = stored.and(self.region.store(base, &nothing)).and(self.region.store(copy, &nothing));
        }
        // 2. Store the state of an empty cache.
        let stored = stored.and(self.initialise_state(state, lanes, cache_id, drained));
        self.region.fence(MutationPoint::BackendStateFence, stored);
    }

    /// The highest epoch that the state block records, and the time at which the last drained epoch was closed.
    fn highest_epoch(&self, state: SegmentId, lanes: u32) -> (u64, u64) {
        let shape = StateShape { lanes };
        let base = self.segment_base(state);
        let absolute = |[a, b]: [u64; 2]| [base + a, base + b];
        let drained: TwoSlots<Drained> = TwoSlots::read(&self.region, absolute(shape.drained()), 0);
        let (drained, closed_ms) = drained
            .content()
            .map_or((0, 0), |seen| (seen.epoch.get().max(seen.void_until.get()), seen.closed_ms.get()));
        let marks = (0..lanes).map(LaneId).map(|lane| {
            let at = absolute(shape.mark(lane));
            let mark: TwoSlots<LaneMark> = TwoSlots::read(&self.region, at, u64::from(lane.0));
            mark.content().map_or(0, |mark| mark.epoch.get())
        });
        (marks.max().unwrap_or(0).max(drained), closed_ms)
    }
}
