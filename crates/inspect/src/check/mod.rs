//! Check: every structure of a region, every checksum, every chain, and the result of recovery.
//!
//! Invariants: the region is only read. `cbd-format` decodes structures. The engine recovers a private copy and thereby
//! determines which records are valid, which are dirty and which ranges cannot be read.
//!
//! Elsewhere: repairs (`repair`), printing (`cbdctrl`).

mod chain;
mod lines;
mod names;
mod pins;
mod shared;
mod slots;
mod state;
mod superblocks;
mod tables;

use crate::finding::{Finding, Location, Repair, Severity, Structure};
use crate::report::{BackendSummary, RangeSummary, Report, TransportSummary};
use crate::{Bytes, PrivateMemory, Progress};
use cbd_engine::{BackendEntry, Cache, Mixed, Pages, Transport};
use cbd_format::{BackendEntry as BackendRow, Layout, tables::STATE_ACTIVE};
use cbd_runtime::ProcessEnvironment;
use cbd_types::{BackendId, Error, Region, Result, uuid_text};
use std::sync::Arc;

pub(crate) use chain::{header_copies, header_of};
pub(crate) use lines::valid_copies;
pub(crate) use slots::read_two_slots;
pub(crate) use state::StateLocation;

/// The engine's transport over a private copy.
pub(crate) type PrivateTransport = Transport<ProcessEnvironment<PrivateMemory>>;
/// The engine's cache over a private copy.
pub(crate) type PrivateCache = Cache<ProcessEnvironment<PrivateMemory>>;

/// The advice for a damaged second copy.
const REPAIR: &str = "cbdctrl repair restores it; a daemon would start on it as it is";
/// The advice where no action is needed.
const NOTHING_TO_DO: &str = "nothing";
/// The cost if a second copy is valid.
const SECOND_COPY: &str = "nothing: the other copy is valid";

/// The data that a check verifies besides metadata.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum DataChecked {
    /// None, except the data that recovery itself verifies.
    None,
    /// Data that the backing device does not have, which would be lost.
    #[default]
    Dirty,
    /// The data of every record.
    All,
}

/// Checks a region.
#[must_use]
pub fn check(bytes: Arc<dyn Bytes>, data: DataChecked, progress: &mut dyn FnMut(Progress)) -> Report {
    let report = Report::new(bytes.len(), data == DataChecked::All);
    let mut checker = Checker { bytes, data, progress, report, lost: Vec::new() };
    checker.run();
    checker.report
}

pub(crate) struct Checker<'a> {
    pub(crate) bytes: Arc<dyn Bytes>,
    data: DataChecked,
    progress: &'a mut dyn FnMut(Progress),
    pub(crate) report: Report,
    /// Damaged dirty data of the present cache that the log does not record as damaged yet.
    lost: Vec<RangeSummary>,
}

/// The cache that is being checked.
pub(crate) struct Subject<'a> {
    pub(crate) id: BackendId,
    pub(crate) row: &'a BackendRow,
    pub(crate) layout: &'a Layout,
    pub(crate) transport: &'a PrivateTransport,
}

impl Checker<'_> {
    fn run(&mut self) {
        if !self.superblocks() {
            return;
        }
        self.shared();
        let transports = match open_private(&self.bytes) {
            Ok(transports) => transports,
            Err(error) => {
                return self.fatal(Structure::Superblock, Location::default(), &error, "no transport of it");
            }
        };
        transports.iter().for_each(|transport| self.transport(transport));
        // Those of the hosts are counted.
        let of_no_host = transports.first().map_or(0, |transport| shared::segments_of_no_host(transport));
        if let Some(summary) = &mut self.report.transport {
            summary.free_segments += of_no_host;
        }
    }

    /// Checks what the tables of the region, or of one of its hosts, describe.
    fn transport(&mut self, transport: &Arc<PrivateTransport>) {
        let info = transport.info();
        let hosts = transport.hosts().into_iter().map(|host| host.name);
        let summary = self.report.transport.get_or_insert_with(|| TransportSummary {
            uuid: uuid_text(info.uuid),
            version: info.version,
            features: info.features[2],
            region_size: info.layout.region_size,
            segment_size: info.layout.segment_size,
            segments: info.layout.segment_count,
            free_segments: 0,
            hosts: Vec::new(),
        });
        summary.free_segments += info.free_segments;
        summary.hosts.extend(hosts);
        self.tables(&info.layout);
        self.names(&info.layout);
        for id in (0..info.layout.backend_rows).map(BackendId) {
            let Some(row) = transport.backend_row(id).filter(|row| row.state.get() == STATE_ACTIVE) else {
                continue;
            };
            let subject = Subject { id, row: &row, layout: &info.layout, transport };
            let summary = self.backend(&subject);
            self.report.backends.push(summary);
        }
    }

    fn backend(&mut self, subject: &Subject<'_>) -> BackendSummary {
        let id = subject.id;
        let location = Location { backend: Some(id.0), ..Location::default() };
        let mut summary = BackendSummary { backend: id.0, ..BackendSummary::default() };
        let entry = match subject.transport.backend(id) {
            Ok(entry) => entry,
            Err(error) => {
                self.fatal(Structure::Backend, location, &error, "the backend and its cache");
                summary.error = Some(error.line());
                return summary;
            }
        };
        summary.moved_from = entry.is_moved.then(|| self.moved(subject, &entry));
        summary.uuid = uuid_text(entry.uuid);
        summary.name = entry.name.map(|name| name.to_string());
        summary.path = entry.path;
        summary.identity = entry.identity;
        summary.size = entry.size;
        entry.settings.consistency.name().clone_into(&mut summary.consistency);
        if subject.row.cache_id.get() == 0 {
            summary.backing_is_consistent = true;
            return summary;
        }
        self.state(subject);
        self.pins(subject);
        summary.mixed_pages = self.pages(subject);
        match subject.transport.open_cache_if(id, Mixed::Look) {
            Ok(cache) => self.cache(subject, &cache, &mut summary),
            Err(error) => {
                self.fatal(Structure::Cache, location, &error, "the cache of the backend");
                summary.error = Some(error.line());
            }
        }
        summary
    }

    /// Reports a backend that a rescue has moved; returns its former disk.
    fn moved(&mut self, subject: &Subject<'_>, entry: &BackendEntry) -> String {
        let former = subject.transport.former_disk(subject.id);
        let from =
            former.map_or_else(|| "a disk that is not known any more".to_owned(), |former| former.path);
        self.add(
            Severity::Note,
            Structure::Backend,
            Location { backend: Some(subject.id.0), ..Location::default() },
            format!("a rescue has moved the backend from {from} to {}", entry.path),
            "nothing: only the latter has all the data, and a daemon serves either only after a command",
            "backend-start with the path of the latter serves it again, backend-stop removes the backend from the region",
            None,
        );
        from
    }

    /// Reports whether a crash of the machine left a mixture of old and new pages.
    fn pages(&mut self, subject: &Subject<'_>) -> bool {
        let boot = uuid_text(subject.row.use_boot);
        let location = Location { backend: Some(subject.id.0), ..Location::default() };
        let pages = subject.transport.pages_of(subject.id);
        match pages {
            Ok(Pages::MixedDirty) => self.add(
                Severity::Affected,
                Structure::Cache,
                location,
                format!(
                    "the cache was in use in boot {boot} of the machine and was not closed: some of its pages may be new and others old"
                ),
                "the findings below are not certain, and a daemon refuses it: recovering it could write old data over newer",
                format!(
                    "compare the disk with a backup first; then either drop the cache (cbdctrl backend-stop -b {0} \
                     --discard-dirty BYTES, whose error states the number), or write its data all the same (cbdctrl rescue REGION \
                     -b {0} --after-crash --yes)",
                    subject.id.0
                ),
                None,
            ),
            Ok(Pages::MixedClean) => self.add(
                Severity::Note,
                Structure::Cache,
                location,
                format!("the cache was in use in boot {boot} of the machine and was not closed; nothing in it was dirty"),
                "its content is dropped when it is opened: the disk has all of it",
                NOTHING_TO_DO,
                None,
            ),
            _ => {}
        }
        matches!(pages, Ok(Pages::MixedDirty))
    }

    fn cache(&mut self, subject: &Subject<'_>, cache: &PrivateCache, summary: &mut BackendSummary) {
        let status = cache.status();
        summary.lanes = status.lanes;
        summary.segments = status.segments;
        summary.free_segments = status.free_segments;
        summary.dirty_records = status.dirty_records;
        summary.dirty_bytes = status.dirty_bytes;
        summary.drained_epoch = status.drained_epoch.0;
        summary.drained_wall_ms = status.drained_wall_ms;
        summary.backing_is_consistent = status.backing_is_consistent;
        summary.void_reason = status.void_reason;
        summary.parked = status.parked.iter().copied().map(RangeSummary::parked).collect();
        for value in [status.epoch.0, status.dirty_bytes, status.dirty_records, status.drained_epoch.0] {
            self.report.add_to_fingerprint(value);
        }
        let mut dirty = Vec::new();
        let mut damaged = status.damaged;
        damaged.sort_by_key(|damage| (damage.range.start, damage.range.end));
        self.logs(subject, cache, !damaged.is_empty(), &mut dirty, summary);
        summary.dirty_device_bytes = covered(dirty);
        summary.damaged = std::mem::take(&mut self.lost);
        for damage in damaged {
            self.report.add_to_fingerprint(damage.range.start);
            self.report.add_to_fingerprint(damage.range.end);
            self.add(
                Severity::Affected,
                Structure::Range,
                Location { backend: Some(subject.id.0), ..Location::default() }.of_range(damage.range),
                "the data of this range is lost, except data that was written to it since",
                "reads of it fail; it is not written to the backing device, which alone is not crash-consistent until it is \
                 overwritten",
                "overwrite the range in full (a file system's repair, a restore from a backup); rescue leaves it out",
                None,
            );
            summary.damaged.push(RangeSummary::new(damage.range, damage.reason));
        }
    }

    /// Adds a finding.
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of a finding, in the order in which they are read"
    )]
    pub(crate) fn add(
        &mut self,
        severity: Severity,
        structure: Structure,
        location: Location,
        what: impl Into<String>,
        cost: impl Into<String>,
        advice: impl Into<String>,
        repair: Option<Repair>,
    ) {
        let (what, cost, advice) = (what.into(), cost.into(), advice.into());
        self.report.add(Finding { severity, structure, location, what, cost, advice }, repair);
    }

    fn fatal(&mut self, structure: Structure, location: Location, error: &Error, what_is_lost: &str) {
        let cost = format!("{what_is_lost} cannot be opened, not by a daemon either");
        let advice = "keep a copy of the region (dd) before any repair; cbdctrl dump shows its content";
        self.add(Severity::Fatal, structure, location, error.line(), cost, advice, None);
    }

    pub(crate) fn progress(&mut self, doing: &'static str, done: u64, of: u64) {
        (self.progress)(Progress { doing, done, of });
    }

    /// Bytes of the region; `None` where its memory fails.
    pub(crate) fn read(&self, at: u64, length: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.bytes.load(at, &mut bytes).ok()?;
        Some(bytes)
    }
}

/// Bytes that these ranges cover, each counted once.
fn covered(mut ranges: Vec<(u64, u64)>) -> u64 {
    ranges.sort_unstable();
    let (mut sum, mut end) = (0, 0);
    for (start, this) in ranges {
        sum += this.saturating_sub(start.max(end));
        end = end.max(this);
    }
    sum
}

/// Opens the transport of a private copy of a region: the tables of each host, if several share it.
pub(crate) fn open_private(bytes: &Arc<dyn Bytes>) -> Result<Vec<Arc<PrivateTransport>>> {
    let memory = PrivateMemory::new(Arc::clone(bytes));
    Transport::open_each(&Arc::new(ProcessEnvironment::new()), Arc::new(Region::new(memory)))
}

#[cfg(test)]
mod tests {
    use super::covered;

    #[test]
    fn bytes_in_several_ranges_are_counted_once() {
        assert_eq!(covered(vec![(10, 20), (0, 5), (15, 30), (16, 18), (30, 31)]), 26);
        assert_eq!(covered(Vec::new()), 0);
    }
}
