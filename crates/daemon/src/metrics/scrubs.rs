//! The metrics of scrubs.
//!
//! Invariants: those of [`super`].

use super::backends_of;
use super::text::Page;
use crate::api::{ScrubInfo, ScrubState, Status};

/// Name, kind, help and value of the metrics of scrubs.
type OfScrub = (&'static str, &'static str, &'static str, fn(&ScrubInfo) -> Option<u64>);

const OF_SCRUBS: [OfScrub; 8] = [
    ("cbd_scrub_running", "gauge", "Whether a scrub is looking at the device.", |it| {
        Some(u64::from(matches!(it.state, ScrubState::Running | ScrubState::BesideClients)))
    }),
    ("cbd_scrub_position_bytes", "gauge", "Bytes of the device that the scrub has looked at.", |it| {
        it.began.map(|_| it.position)
    }),
    ("cbd_scrub_verified_bytes_total", "counter", "Bytes that scrubs have looked at.", |it| {
        Some(it.verified_bytes_total)
    }),
    ("cbd_scrub_repaired_total", "counter", "Ranges that scrubs have repaired.", |it| {
        Some(it.repaired_total)
    }),
    (
        "cbd_scrub_metadata_repaired_total",
        "counter",
        "Copies of structures of the region that scrubs have repaired.",
        |it| Some(it.metadata_repaired_total),
    ),
    (
        "cbd_scrub_unrepaired",
        "gauge",
        "Ranges that the last complete scrub has found and not repaired.",
        |it| it.last.as_ref().map(|last| last.results.found.saturating_sub(last.results.repaired)),
    ),
    (
        "cbd_scrub_metadata_unrepaired",
        "gauge",
        "Copies of structures of the region that the last complete scrub could not repair.",
        |it| it.last.as_ref()?.results.metadata.as_ref().map(|metadata| metadata.unrepaired),
    ),
    ("cbd_scrub_last_pass_timestamp_seconds", "gauge", "When the last complete scrub ended.", |it| {
        it.last.as_ref().map(|last| last.ended)
    }),
];

/// The metrics of scrubs.
pub(super) fn for_scrubs(page: &mut Page<'_>, status: &Status) {
    let scrubs =
        || backends_of(status).filter_map(|(labels, backend)| Some((labels, backend.scrub.as_ref()?)));
    for (name, kind, help, value) in OF_SCRUBS {
        page.head(name, kind, help);
        for (labels, scrub) in scrubs() {
            if let Some(value) = value(scrub) {
                page.line(name, &labels, value);
            }
        }
    }
    page.head("cbd_scrub_findings_total", "counter", "Ranges that scrubs have found, by flaw.");
    for (labels, scrub) in scrubs() {
        for flaw in cbd_types::Flaw::ALL.map(cbd_types::Flaw::name) {
            let [transport, id, place] = labels.clone();
            let labels = [transport, id, place, ("flaw", flaw.to_owned())];
            let count = scrub.found_total.get(flaw).copied().unwrap_or_default();
            page.line("cbd_scrub_findings_total", &labels, count);
        }
    }
}
