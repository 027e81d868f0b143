//! The state block of a cache: its header, the drained epoch, tails, marks.

use super::chain::header_of;
use super::slots::{Object, TwoSlotsRead, Updated, read_two_slots};
use super::{Checker, REPAIR, SECOND_COPY, Subject};
use crate::finding::{Location, Repair, Severity, SlotKind, Structure};
use cbd_format::{
    BackendEntry as BackendRow, Drained, FormerDisk, LaneMark, LaneTail, Layout, SegmentHeader, StateShape,
    segment::STATE_MAGIC, tables::MODE_MOVED,
};
use cbd_types::{LaneId, SegmentId};

/// The location of a cache's state, if its row is plausible.
#[derive(Clone, Copy)]
pub(crate) struct StateLocation {
    base: u64,
    segment_size: u64,
    shape: StateShape,
}

impl StateLocation {
    pub(crate) fn of(row: &BackendRow, layout: &Layout) -> Option<Self> {
        let shape = StateShape { lanes: row.lanes.get() };
        let possible = row.lanes.get().is_power_of_two()
            && u64::from(row.lanes.get()) <= layout.segment_size / 64
            && shape.fits(layout.segment_size)
            && row.state_segment.get() < layout.segment_count;
        possible.then(|| Self {
            base: layout.segment_base(SegmentId(row.state_segment.get())),
            segment_size: layout.segment_size,
            shape,
        })
    }

    pub(crate) const fn lanes(&self) -> u32 {
        self.shape.lanes
    }

    pub(crate) const fn drained(&self) -> [u64; 2] {
        self.absolute(self.shape.drained())
    }

    pub(crate) const fn former(&self, index: u64) -> [u64; 2] {
        self.absolute(self.shape.former(index))
    }

    pub(crate) const fn tail(&self, lane: LaneId) -> [u64; 2] {
        self.absolute(self.shape.tail(lane))
    }

    pub(crate) const fn mark(&self, lane: LaneId) -> [u64; 2] {
        self.absolute(self.shape.mark(lane))
    }

    /// The two copies of the list of pins, and the bytes that each may have.
    pub(crate) fn pins(&self) -> Option<([u64; 2], u64)> {
        let (at, most) = self.shape.pins(self.segment_size)?;
        Some((self.absolute(at), most))
    }

    const fn absolute(&self, [a, b]: [u64; 2]) -> [u64; 2] {
        [self.base + a, self.base + b]
    }
}

impl Checker<'_> {
    pub(super) fn state(&mut self, subject: &Subject<'_>) {
        // An implausible row is reported when the cache is opened.
        let Some(state) = StateLocation::of(subject.row, subject.layout) else { return };
        self.state_header(subject);
        let backend = Location { backend: Some(subject.id.0), ..Location::default() };
        let drained = read_two_slots::<Drained>(&*self.bytes, state.drained(), 0);
        self.two_slots(
            &drained,
            &Object {
                structure: Structure::Drained,
                kind: SlotKind::Drained,
                seed: 0,
                name: format!("drained of backend {}", subject.id),
                location: backend,
                updated: Updated::Both,
                if_lost: (
                    Severity::Affected,
                    "all data in the log counts as dirty and is written to the backing device again; until that is done the \
                     backing device alone is not crash-consistent",
                ),
            },
        );
        self.former_disks(subject, &state);
        for lane in (0..state.lanes()).map(LaneId) {
            self.lane_state(subject, &state, lane);
        }
    }

    /// Checks the disks that a backend had before a rescue moved it. If no such record can be read, only the fact that
    /// the backend is moved shows that there was a former disk.
    fn former_disks(&mut self, subject: &Subject<'_>, state: &StateLocation) {
        let seed = subject.row.cache_id.get();
        let is_moved = subject.row.cache_mode.get() == MODE_MOVED;
        let all: Vec<_> = (0..StateShape::FORMER_DISKS)
            .map(|index| read_two_slots::<FormerDisk>(&*self.bytes, state.former(index), seed))
            .collect();
        let is_lost = is_moved && all.iter().all(|former| former.newest().is_none());
        for (index, former) in all.iter().enumerate() {
            if former.newest().is_none() && (index > 0 || !is_lost) {
                continue;
            }
            self.two_slots(
                former,
                &Object {
                    structure: Structure::Backend,
                    kind: SlotKind::Former,
                    seed,
                    name: format!("former disk of backend {}", subject.id),
                    location: Location { backend: Some(subject.id.0), ..Location::default() },
                    updated: Updated::Both,
                    if_lost: (
                        Severity::Affected,
                        "the disk that the backend had before a rescue moved it is not known any more: a start with that disk gets no \
                         warning that it lacks data",
                    ),
                },
            );
        }
    }

    fn lane_state(&mut self, subject: &Subject<'_>, state: &StateLocation, lane: LaneId) {
        let (seed, id) = (u64::from(lane.0), subject.id);
        let location = Location { backend: Some(id.0), lane: Some(lane.0), ..Location::default() };
        let tail: TwoSlotsRead<LaneTail> = read_two_slots(&*self.bytes, state.tail(lane), seed);
        self.two_slots(
            &tail,
            &Object {
                structure: Structure::Tail,
                kind: SlotKind::Tail,
                seed,
                name: format!("tail of lane {lane} of backend {id}"),
                location,
                updated: Updated::Both,
                if_lost: (
                    Severity::Corrected,
                    "a loss of the oldest segments cannot be detected any more, and freed segments may count again; \
                     their data is on the backing device",
                ),
            },
        );
        let mark: TwoSlotsRead<LaneMark> = read_two_slots(&*self.bytes, state.mark(lane), seed);
        self.two_slots(
            &mark,
            &Object {
                structure: Structure::Mark,
                kind: SlotKind::Mark,
                seed,
                name: format!("mark of lane {lane} of backend {id}"),
                location,
                updated: Updated::Alternately,
                if_lost: (
                    Severity::Corrected,
                    "damage to the lane's last record cannot be distinguished from a write that was never acknowledged",
                ),
            },
        );
    }

    /// Checks the header of the state segment and its copy. No program reads them: the backend's row contains the
    /// location of the state.
    fn state_header(&mut self, subject: &Subject<'_>) {
        let segment = SegmentId(subject.row.state_segment.get());
        let base = subject.layout.segment_base(segment);
        let copies = [base, base + subject.layout.segment_shape().header_copy()];
        let length = size_of::<SegmentHeader>();
        self.report.counted.headers += 2;
        let good = copies.map(|at| {
            self.read(at, length)
                .and_then(|bytes| header_of(subject.row, segment, &bytes))
                .is_some_and(|header| header.magic.get() == STATE_MAGIC)
        });
        for (number, at) in copies.into_iter().enumerate().filter(|(number, _)| !good[*number]) {
            let other = 1 - number;
            let (cost, advice) = if good[other] {
                (SECOND_COPY, REPAIR)
            } else {
                ("nothing: the backend's row has the location of the state", super::NOTHING_TO_DO)
            };
            let what = format!("state of backend {}: a copy of its segment's header is damaged", subject.id);
            let repair = good[other].then(|| Repair::Copy {
                what: format!("header of the state segment {segment} of backend {}", subject.id),
                from: copies[other],
                to: at,
                length: length as u32,
            });
            let location = Location {
                backend: Some(subject.id.0),
                segment: Some(segment.0),
                ..Location::bytes(at, length as u64)
            };
            self.add(Severity::Corrected, Structure::StateHeader, location, what, cost, advice, repair);
        }
    }
}
