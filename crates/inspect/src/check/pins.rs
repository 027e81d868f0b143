//! The two copies of a cache's list of pins.

use super::{Checker, NOTHING_TO_DO, REPAIR, SECOND_COPY, StateLocation, Subject};
use crate::finding::{Location, Repair, Severity, Structure};
use crate::pins::{newest, read_lists};
use cbd_format::pins::PinCopy;

impl Checker<'_> {
    pub(super) fn pins(&mut self, subject: &Subject<'_>) {
        let Some(state) = StateLocation::of(subject.row, subject.layout) else { return };
        let Some(lists) = read_lists(&*self.bytes, subject.row.cache_id.get(), &state) else { return };
        let name = format!("list of pins of backend {}", subject.id);
        let locate = |number: usize| Location {
            backend: Some(subject.id.0),
            segment: Some(subject.row.state_segment.get()),
            ..Location::bytes(lists[number].at, lists[number].length)
        };
        let Some(good) = newest(&lists) else {
            // As in the engine: a first list that a crash cut off is in the first copy alone.
            let [first, second] = [&lists[0], &lists[1]];
            let is_lost =
                second.copy == PinCopy::Damaged && (first.copy == PinCopy::Damaged || second.is_readable);
            if is_lost {
                let cost =
                    "nothing is pinned: what was pinned leaves the cache like other data; no data is lost";
                let advice = "pin it again (cbdctrl pin), or end the pins (cbdctrl unpin --all)";
                let what = format!("{name}: neither of its two copies is valid");
                self.add(Severity::Corrected, Structure::Pins, locate(1), what, cost, advice, None);
            } else if first.copy == PinCopy::Damaged && first.is_readable {
                let what = format!("{name}: a crash cut off the first list: it counts as never written");
                self.add(Severity::Note, Structure::Pins, locate(0), what, "nothing", NOTHING_TO_DO, None);
            }
            return;
        };
        self.report.counted.slots += 2;
        let other = 1 - good;
        let Some((number, pins)) = lists[good].list() else { return };
        self.report.add_to_fingerprint(number);
        self.report.add_to_fingerprint(pins.len() as u64);
        let (severity, what, cost) = match &lists[other].copy {
            PinCopy::Valid(same, others) if *same == number && others == pins => return,
            PinCopy::Valid(same, _) if *same == number => (
                Severity::Corrected,
                format!("{name}: its two copies have the same number and differ"),
                "nothing: the first one counts",
            ),
            PinCopy::Valid(..) => (
                Severity::Note,
                format!(
                    "{name}: one copy is a version older than the other, as after a crash between two stores"
                ),
                "nothing: the newer one counts, but only one copy has it",
            ),
            PinCopy::Blank if other == 1 && number == 1 => (
                Severity::Note,
                format!("{name}: a crash interrupted its first update after one copy"),
                "nothing: it counts, but only one copy has it",
            ),
            PinCopy::Blank => {
                (Severity::Corrected, format!("{name}: one of its two copies was overwritten"), SECOND_COPY)
            }
            PinCopy::Damaged => (
                Severity::Corrected,
                format!("{name}: one of its two copies was torn by a crash, or is damaged"),
                SECOND_COPY,
            ),
        };
        let repair = Repair::Copy {
            what: name,
            from: lists[good].at,
            to: lists[other].at,
            length: lists[good].length as u32,
        };
        self.add(severity, Structure::Pins, locate(other), what, cost, REPAIR, Some(repair));
    }
}
