//! The report of the demonstration, as one JSON object and as a table.
//!
//! Invariants: the object has the same fields however the demonstration ends; results that were not reached are null.

use crate::measure::Pair;
use crate::output::grouped;
use crate::target::ExportKind;
use cbd_backing::ThrottleParameters;
use cbd_daemon::api::ErrorBody;
use cbd_daemon::size::format_size;
use serde::Serialize;
use std::fmt::Write;

/// What each demonstration reports.
#[derive(Clone, Debug, Serialize)]
pub struct Common {
    /// Whether every check passed.
    pub ok: bool,
    /// The error that ended it.
    pub error: Option<ErrorBody>,
    /// Version of this program.
    pub version: &'static str,
    /// The region.
    pub region: Option<Region>,
    /// The parameters of the disk.
    pub throttle: Throttle,
    /// Bytes of the disk.
    pub disk_bytes: u64,
    /// Bytes that are written and read.
    pub working_set_bytes: u64,
    /// Bytes of the cache.
    pub cache_bytes: u64,
    /// Requests that were measured.
    pub samples: u64,
    /// The drain at the end.
    pub drain: Option<Drain>,
    /// Whether the backing file alone has all acknowledged writes.
    pub backing_verified: bool,
    /// The comparison of the backing file.
    pub backing: Option<BackingComparison>,
    /// Leftovers of killed demonstrations that were removed.
    pub swept: Vec<String>,
    /// Duration of the demonstration in seconds.
    pub duration_s: f64,
}

impl Common {
    /// A report without results, of a demonstration with this disk, and these bytes of it, of what is written and of the cache.
    pub fn new(disk: ThrottleParameters, [disk_bytes, working_set_bytes, cache_bytes]: [u64; 3]) -> Self {
        Self {
            ok: false,
            error: None,
            version: env!("CARGO_PKG_VERSION"),
            region: None,
            throttle: disk.into(),
            disk_bytes,
            working_set_bytes,
            cache_bytes,
            samples: 0,
            drain: None,
            backing_verified: false,
            backing: None,
            swept: Vec::new(),
            duration_s: 0.0,
        }
    }
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What the other one reports, too.
    #[serde(flatten)]
    pub common: Common,
    /// The export through which the device was reached.
    pub path: Option<ExportKind>,
    /// Why it is not the kernel block device.
    pub fallback_reason: Option<String>,
    /// The figures.
    pub results: Results,
    /// The kill of the daemon.
    pub kill: Option<Kill>,
}

/// The location of the region.
#[derive(Clone, Debug, Serialize)]
pub struct Region {
    /// Its file.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Whether it is in shared memory.
    pub shared_memory: bool,
    /// Why it is not in shared memory.
    pub reason: Option<String>,
}

/// The throttle in front of the backing file.
#[derive(Clone, Debug, Serialize)]
pub struct Throttle {
    /// Average seek.
    pub seek_ms: f64,
    /// Rotations a minute.
    pub rpm: f64,
    /// Transfer rate.
    pub mib_per_s: f64,
    /// All parameters as the daemon takes them.
    pub specification: String,
}

impl From<ThrottleParameters> for Throttle {
    fn from(parameters: ThrottleParameters) -> Self {
        Self {
            seek_ms: parameters.seek_ms,
            rpm: parameters.rpm,
            mib_per_s: parameters.mib_per_s,
            specification: parameters.to_string(),
        }
    }
}

/// The figures of each device.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Results {
    /// The slow disk without a cache.
    pub uncached: Option<Pair>,
    /// The slow disk with a cache.
    pub cached: Option<Pair>,
    /// Plain memory.
    pub memory: Option<Pair>,
}

/// A report that says at the end how the demonstration has ended.
pub trait Conclusion: Serialize {
    /// What each demonstration reports.
    fn common(&mut self) -> &mut Common;
    /// The figures of each device.
    fn pairs(&self) -> [Option<Pair>; 3];
    /// The figures, for people.
    fn table(&self) -> String;

    /// Notes the error, if there was one, and the duration.
    fn conclude(&mut self, error: Option<ErrorBody>, duration_s: f64) {
        let samples = self.pairs().iter().flatten().map(|pair| pair.write.count + pair.read.count).sum();
        let common = self.common();
        (common.ok, common.error) = (error.is_none(), error);
        (common.samples, common.duration_s) = (samples, duration_s);
    }
}

impl Conclusion for Report {
    fn common(&mut self) -> &mut Common {
        &mut self.common
    }

    fn pairs(&self) -> [Option<Pair>; 3] {
        [self.results.uncached, self.results.cached, self.results.memory]
    }

    fn table(&self) -> String {
        table(self)
    }
}

/// The kill of the daemon, and the comparison after its restart.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct Kill {
    /// Writes that were acknowledged before the kill.
    pub acknowledged: u64,
    /// Writes in flight at the kill, which were never acknowledged.
    pub in_flight: u64,
    /// Dirty bytes before the kill.
    pub dirty_bytes: u64,
    /// Dirty bytes that the new daemon recovered.
    pub dirty_bytes_recovered: u64,
    /// Acknowledged writes that were found.
    pub verified: u64,
    /// Acknowledged writes that are lost.
    pub lost: u64,
    /// Time from the kill until the device can be used again.
    pub recovery_ms: u64,
    /// Number of kills: the kill is repeated if no write was in flight.
    pub attempts: u32,
    /// Writes acknowledged after the restart.
    pub acknowledged_after: u64,
}

/// The result of the drain.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Drain {
    /// Dirty bytes when it began.
    pub dirty_bytes: u64,
    /// Bytes that were written to the disk.
    pub written_bytes: u64,
    /// Duration of the drain.
    pub seconds: f64,
}

/// The comparison of the backing file alone.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct BackingComparison {
    /// Blocks that were compared.
    pub blocks: u64,
    /// Acknowledged writes in these blocks.
    pub verified: u64,
    /// Bytes that were compared.
    pub bytes: u64,
    /// Whether a file system checker has checked it; absent without a file system or a checker.
    pub file_system_checked: Option<bool>,
}

/// The table at the end, with its conditions.
fn table(report: &Report) -> String {
    let mut text = figures(&[
        ("disk alone", report.results.uncached),
        ("with CBD", report.results.cached),
        ("plain memory", report.results.memory),
    ]);
    let _ = writeln!(
        text,
        "Working set {}, cache {}, all through the same export: {}.",
        format_size(report.common.working_set_bytes),
        format_size(report.common.cache_bytes),
        report.path.map_or("none", ExportKind::description)
    );
    text
}

/// The figures of each device, writes before reads.
pub fn figures(devices: &[(&str, Option<Pair>)]) -> String {
    let mut rows = vec![["", "", "IOPS", "p50 us", "p99 us", "p99.9 us", "samples"].map(str::to_owned)];
    for (is_write, kind) in [(true, "write"), (false, "read")] {
        for (index, (name, pair)) in devices.iter().enumerate() {
            let Some(pair) = pair else { continue };
            let figures = if is_write { pair.write } else { pair.read };
            let kind = if index == 0 { kind } else { "" };
            rows.push([
                kind.to_owned(),
                (*name).to_owned(),
                whole(figures.iops),
                time(figures.p50_us),
                time(figures.p99_us),
                time(figures.p999_us),
                grouped(figures.count),
            ]);
        }
    }
    let mut text = String::from("4 KiB, random, one request at a time\n");
    text.push_str(&aligned(&rows));
    text
}

/// The names left-aligned, the numbers right-aligned.
fn aligned(rows: &[[String; 7]]) -> String {
    let mut widths = [0; 7];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            let _ =
                if column < 2 { write!(line, "  {cell:<width$}") } else { write!(line, "   {cell:>width$}") };
        }
        text.push_str(line.trim_end());
        text.push('\n');
        if index == 0 {
            let all: usize = widths.iter().sum::<usize>() + 2 * 2 + 3 * 5 - 2;
            let _ = writeln!(text, "  {}", "-".repeat(all));
        }
    }
    text
}

fn whole(number: f64) -> String {
    grouped(number.round() as u64)
}

fn time(microseconds: f64) -> String {
    if microseconds < 100.0 { format!("{microseconds:.1}") } else { whole(microseconds) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Figures;

    #[test]
    fn numbers_are_right_aligned() {
        let figures = |iops| Figures { iops, p50_us: 9.25, p99_us: 1234.0, p999_us: 20_000.0, count: 77 };
        let pair = |iops| Some(Pair { write: figures(iops), read: figures(iops), read_missed_bytes: None });
        let sizes = [0, 64 << 20, 256 << 20];
        let mut report = Report {
            common: Common::new(ThrottleParameters::HARD_DISK, sizes),
            path: Some(ExportKind::Nbd),
            fallback_reason: None,
            results: Results { uncached: pair(80.0), cached: pair(50_000.0), memory: pair(60_000.0) },
            kill: None,
        };
        let text = table(&report);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 10, "{text}");
        assert!(lines[1..9].iter().all(|line| line.len() == lines[1].len()), "{text}");
        assert!(lines[9].contains("64 MiB") && lines[9].contains("256 MiB"));
        report.conclude(None, 1.0);
        assert_eq!((report.common.ok, report.common.samples), (true, 6 * 77));
    }
}
