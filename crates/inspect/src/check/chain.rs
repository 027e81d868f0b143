//! The chains of segments: completeness, order, and both copies of their headers.

use super::slots::read_two_slots;
use super::state::StateLocation;
use super::{Checker, NOTHING_TO_DO, PrivateCache, REPAIR, SECOND_COPY, Subject};
use crate::Bytes;
use crate::finding::{Location, Repair, Severity, Structure};
use crate::report::BackendSummary;
use cbd_engine::LogSegmentView;
use cbd_format::{BackendEntry as BackendRow, LaneMark, LaneTail, Layout, SegmentHeader, segment::LOG_MAGIC};
use cbd_types::{LaneId, SegmentId};

/// The state of a lane's log at the present position of the check.
#[derive(Clone, Copy, Default)]
pub(super) struct History {
    /// The next expected sequence number; `None` if it is unknown.
    pub(super) sequence: Option<u64>,
    /// The highest epoch so far.
    pub(super) epoch: u64,
    ordinal: Option<u64>,
    run: u64,
}

impl Checker<'_> {
    /// Checks all logs of a cache. `has_damage` is set if reads of some range of it fail.
    pub(super) fn logs(
        &mut self,
        subject: &Subject<'_>,
        cache: &PrivateCache,
        has_damage: bool,
        dirty: &mut Vec<(u64, u64)>,
        summary: &mut BackendSummary,
    ) {
        let Some(state) = StateLocation::of(subject.row, subject.layout) else { return };
        let (mut done, of) = (0, u64::from(summary.segments - summary.free_segments));
        for lane in (0..cache.lane_count()).map(LaneId) {
            let tail = read_two_slots::<LaneTail>(&*self.bytes, state.tail(lane), u64::from(lane.0)).newest();
            let mark = read_two_slots::<LaneMark>(&*self.bytes, state.mark(lane), u64::from(lane.0)).newest();
            let mut history = History {
                sequence: tail.map(|tail| tail.content.first_sequence.get()),
                ordinal: tail.map(|tail| tail.content.ordinal.get()),
                ..History::default()
            };
            let mut last = None;
            for segment in cache.log().segments(lane) {
                self.progress("logs", done, of);
                done += 1;
                // A segment that recovery would add to record a loss is not on the medium.
                let copies = header_copies(&*self.bytes, subject.layout, subject.row, &segment);
                let Some(header) = copies[0].or(copies[1]) else { continue };
                self.log_segment(subject, &segment, &header, &mut history, has_damage);
                self.headers(subject, &segment, copies);
                self.lines(subject, cache, &segment, &mut history, has_damage, dirty, summary);
                for value in [segment.segment.0.into(), segment.ordinal.0, segment.slots.into()] {
                    self.report.add_to_fingerprint(value);
                }
                last = Some(segment);
            }
            let marked = mark.map_or(0, |mark| mark.content.lane_sequence.get());
            self.head(subject, cache, lane, last.as_ref(), &history, marked, has_damage);
        }
    }

    /// Checks a segment's position in its chain.
    fn log_segment(
        &mut self,
        subject: &Subject<'_>,
        segment: &LogSegmentView,
        header: &SegmentHeader,
        history: &mut History,
        has_damage: bool,
    ) {
        let location = location_of(subject, segment);
        let (lane, ordinal, first) = (segment.lane, segment.ordinal.0, segment.first_sequence.0);
        if let Some(expected) = history.ordinal.filter(|expected| *expected != ordinal) {
            let suspects = self.segments_without_header(subject);
            self.lost(
                Structure::Chain,
                location,
                format!(
                    "lane {lane} of backend {}: its segments {expected} to {} are missing before this one{suspects}",
                    subject.id,
                    ordinal.saturating_sub(1)
                ),
                has_damage,
            );
        } else if let Some(expected) = history.sequence.filter(|expected| *expected != first) {
            self.lost(
                Structure::Chain,
                location,
                format!(
                    "lane {lane} of backend {}: the segment begins with sequence {first}, but {expected} was expected",
                    subject.id
                ),
                has_damage,
            );
        }
        if header.run.get() < history.run || header.epoch.get() < history.epoch {
            self.contradiction(
                Structure::SegmentHeader,
                location,
                format!(
                    "the segment has run {} and epoch {}, its predecessor had {} and {}: they must not decrease",
                    header.run, header.epoch, history.run, history.epoch
                ),
            );
        }
        history.run = history.run.max(header.run.get());
        history.epoch = history.epoch.max(header.epoch.get());
        history.ordinal = Some(ordinal + 1);
        history.sequence = Some(first);
    }

    /// Checks both copies of the header of a log segment.
    fn headers(
        &mut self,
        subject: &Subject<'_>,
        segment: &LogSegmentView,
        counts: [Option<SegmentHeader>; 2],
    ) {
        let copies = [segment.base, segment.base + subject.layout.segment_shape().header_copy()];
        let length = size_of::<SegmentHeader>();
        self.report.counted.headers += 2;
        for number in 0..2 {
            let other = 1 - number;
            if counts[number].is_some() || counts[other].is_none() {
                continue;
            }
            let header = |bytes: Vec<u8>| header_of(subject.row, segment.segment, &bytes);
            let is_earlier =
                segment.slots == 0 && self.read(copies[number], length).and_then(header).is_some();
            let (severity, what) = if is_earlier {
                (
                    Severity::Note,
                    "a copy of the segment's header is of an earlier generation: a crash interrupted the opening of the segment",
                )
            } else {
                (Severity::Corrected, "a copy of the segment's header is damaged")
            };
            let repair = Repair::Copy {
                what: format!("header of segment {}", segment.segment),
                from: copies[other],
                to: copies[number],
                length: length as u32,
            };
            let location = Location {
                at: Some(copies[number]),
                length: Some(length as u64),
                ..location_of(subject, segment)
            };
            self.add(severity, Structure::SegmentHeader, location, what, SECOND_COPY, REPAIR, Some(repair));
        }
    }

    /// Checks for missing records after the last one, and for a record that recovery drops at that position.
    #[expect(clippy::too_many_arguments, reason = "what is known at the end of a lane")]
    fn head(
        &mut self,
        subject: &Subject<'_>,
        cache: &PrivateCache,
        lane: LaneId,
        last: Option<&LogSegmentView>,
        history: &History,
        marked: u64,
        has_damage: bool,
    ) {
        let next = history.sequence.unwrap_or(marked + 1);
        let location = Location { backend: Some(subject.id.0), lane: Some(lane.0), ..Location::default() };
        self.report.add_to_fingerprint(next.max(marked + 1));
        if marked >= next {
            let suspects = self.segments_without_header(subject);
            self.lost(
                Structure::Chain,
                location,
                format!(
                    "lane {lane} of backend {}: its mark states that there are records up to sequence {marked}, but the log \
                     ends before {next}{suspects}",
                    subject.id
                ),
                has_damage,
            );
            return;
        }
        let Some(segment) = last else { return };
        if let Some(dropped) = cache.log().record(segment, segment.slots)
            && dropped.sequence.get() == next
        {
            self.add(
                Severity::Note,
                Structure::Record,
                Location {
                    slot: Some(segment.slots),
                    sequence: Some(next),
                    ..location_of(subject, segment)
                }
                .of_range(dropped.range()),
                "the last write of the lane is torn, and nothing proves that it was acknowledged: recovery drops it",
                "nothing, unless the damage occurred after the write had completed: the last write before a power cut, with no \
                 flush and no idle mark after it, cannot be distinguished from one that was cut off",
                NOTHING_TO_DO,
                None,
            );
        }
    }

    /// Segments of the cache that are not in a chain and whose header cannot be read: the missing segment may be one of
    /// them.
    fn segments_without_header(&self, subject: &Subject<'_>) -> String {
        let mut suspects = Vec::new();
        for segment in subject.transport.segments_of(subject.id) {
            if segment.0 == subject.row.state_segment.get() {
                continue;
            }
            let base = subject.layout.segment_base(segment);
            let copies = [base, base + subject.layout.segment_shape().header_copy()];
            let is_damaged = |at: u64| match self.read(at, size_of::<SegmentHeader>()) {
                None => true,
                Some(bytes) => {
                    bytes.iter().any(|byte| *byte != 0) && header_of(subject.row, segment, &bytes).is_none()
                }
            };
            if copies.into_iter().all(is_damaged) {
                suspects.push(segment.to_string());
            }
            if suspects.len() == 8 {
                break;
            }
        }
        if suspects.is_empty() {
            String::new()
        } else {
            format!("; both headers of segment {} are damaged", suspects.join(", "))
        }
    }

    /// Reports lost records; their ranges are lost, too.
    pub(super) fn lost(&mut self, structure: Structure, location: Location, what: String, has_damage: bool) {
        if has_damage {
            self.add(
                Severity::Affected,
                structure,
                location,
                what,
                "which range was lost is not known: each range that the lane may hold and that was not written later answers with \
                 an error (listed as ranges)",
                "rescue saves all other data; overwriting the listed ranges repairs them",
                None,
            );
        } else {
            let cost = "nothing any more: the log records the loss, and each range that it may have covered was overwritten since";
            self.add(Severity::Corrected, structure, location, what, cost, NOTHING_TO_DO, None);
        }
    }

    /// Reports structures whose checksums are correct and whose contents contradict each other.
    pub(super) fn contradiction(&mut self, structure: Structure, location: Location, what: String) {
        self.add(
            Severity::Affected,
            structure,
            location,
            what,
            "the checksums are right, so it was written with this content and not damaged: its content is not reliable",
            "keep a copy of the region and report it: this is a bug of a program, or a forgery",
            None,
        );
    }
}

/// The valid header of the backend in these bytes of a segment, if there is one.
pub(crate) fn header_of(row: &BackendRow, segment: SegmentId, bytes: &[u8]) -> Option<SegmentHeader> {
    SegmentHeader::decode(bytes)?.verify(segment, row.cache_id.get(), row.lanes.get())
}

/// The copies of the header of a segment that are on the medium: the first one and the one at the end, if
/// they belong to the segment's present generation.
pub(crate) fn header_copies(
    bytes: &dyn Bytes,
    layout: &Layout,
    row: &BackendRow,
    segment: &LogSegmentView,
) -> [Option<SegmentHeader>; 2] {
    [0, layout.segment_shape().header_copy()].map(|at| {
        let mut header = [0; size_of::<SegmentHeader>()];
        bytes.load(segment.base + at, &mut header).ok()?;
        let header = header_of(row, segment.segment, &header)?;
        (header.generation.get() == segment.generation && header.magic.get() == LOG_MAGIC).then_some(header)
    })
}

/// The location of a log segment.
pub(super) fn location_of(subject: &Subject<'_>, segment: &LogSegmentView) -> Location {
    Location {
        at: Some(segment.base),
        backend: Some(subject.id.0),
        lane: Some(segment.lane.0),
        segment: Some(segment.segment.0),
        ..Location::default()
    }
}
