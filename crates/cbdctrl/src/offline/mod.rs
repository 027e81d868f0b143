//! The commands for offline recovery: `check`, `dump`, `repair`, `rescue`. They need no daemon and no configuration, and refuse a
//! region that a daemon serves.
//!
//! Invariants: what `--json` prints and what is printed for people say the same; the exit code says it in one number.
//!
//! Elsewhere: what is found and done (`cbd-inspect`).

mod arguments;
mod check;
mod dump;
mod pcache;
mod repair;
mod rescue;

pub use arguments::{CheckArguments, DumpArguments, RepairArguments, RescueArguments};
pub use check::check;
pub use dump::dump;
pub use repair::repair;
pub use rescue::rescue;

use crate::command::Output;
use cbd_daemon::api::{ErrorAnswer, ErrorBody};
use cbd_daemon::size::{format_size, format_time};
use cbd_inspect::report::RangeSummary;
use cbd_inspect::{BackendSummary, Finding, Report};
use cbd_types::{Error, ErrorKind};
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

/// Wrong usage of these commands: small numbers say what was found.
pub const WRONG_USAGE: u8 = 64;
/// The region, or what is needed of it, cannot be opened.
const UNOPENABLE: u8 = 3;

/// `rescue`: something is dirty and was not written.
const DIRTY: u8 = 1;
/// `rescue`: something is damaged, and is not written.
const HARMED: u8 = 2;

/// Everything is in order, but the result could not be printed, as on a full disk.
const NOT_PRINTED: u8 = 74;

/// What the exit codes of `check` mean.
pub const CHECK_EXIT_CODES: &str = "\
Exit codes:
   0  nothing is wrong
   1  something is damaged, and nothing is lost: second copies serve
   2  data, or the order in which it reaches the backing device, is affected
   3  the region, or a cache in it, cannot be opened (busy, foreign, damaged beyond its copies)
  64  wrong usage
  74  the result cannot be printed (where it would else be 0)";

/// What the exit codes of `dump` mean.
pub const DUMP_EXIT_CODES: &str = "\
Exit codes: 0 done, 3 the region, or what is asked for in it, cannot be opened, 64 wrong usage,
74 the result cannot be printed";

/// What the exit codes of `repair` mean.
pub const REPAIR_EXIT_CODES: &str = "\
Exit codes:
   0  every second copy is whole
   1  there is something to repair, and it was not done (a dry run, or you said no)
   2  something was repaired; what is left cannot be repaired without guessing
   3  the region cannot be opened, or could not be repaired
   4  something is damaged, and NOTHING of it could be repaired: nothing was changed
  64  wrong usage
  74  the result cannot be printed (where it would else be 0)";

/// What the exit codes of `rescue` mean.
pub const RESCUE_EXIT_CODES: &str = "\
Exit codes:
   0  all is on the backing devices
   1  something is dirty: a dry run, or not all could be written (run it again, it goes on from there)
   2  all is on the backing devices but for damaged ranges, which are listed; in a dry run: there are such ranges
   3  the region or a cache in it cannot be opened; nothing of that was written
      (--from: or the disk cannot be the one, or is in use)
  64  wrong usage
  74  the result cannot be printed (where it would else be 0)";

/// One line on standard error and, with `--json`, the error in JSON.
fn failed(error: &Error, output: &Output) -> ExitCode {
    eprintln!("cbdctrl: {}", error.line().replace('\n', " "));
    if output.json {
        let _ = output.json(&ErrorAnswer { error: ErrorBody::from(error) });
    }
    ExitCode::from(UNOPENABLE)
}

/// What the definition of the arguments cannot say.
fn wrong_usage(what: &str) -> ExitCode {
    eprintln!("error: {what}");
    ExitCode::from(WRONG_USAGE)
}

/// The result was not printed, perhaps: an exit code that says what is wrong stands.
fn ended(printed: cbd_types::Result<()>, code: u8) -> ExitCode {
    let Err(error) = printed else { return ExitCode::from(code) };
    eprintln!("cbdctrl: {}", error.line());
    ExitCode::from(if code == 0 { NOT_PRINTED } else { code })
}

/// An error of what a region holds, with the region it is about.
fn of_region(error: Error, region: &Path) -> Error {
    match error.kind() {
        ErrorKind::Damaged | ErrorKind::Foreign | ErrorKind::Media | ErrorKind::Unsupported => error
            .while_doing(format!("{} cannot be opened (cbdctrl check says what to do)", region.display())),
        _ => error,
    }
}

/// The identity of a region and what its caches hold.
fn describe(report: &Report, text: &mut String) {
    if let Some(transport) = &report.transport {
        let _ = writeln!(
            text,
            "transport {}, format {}, {}: {} segments of {}, {} of them free; hosts: {}",
            transport.uuid,
            transport.version,
            format_size(transport.region_size),
            transport.segments,
            format_size(transport.segment_size),
            transport.free_segments,
            if transport.hosts.is_empty() { "none".to_owned() } else { transport.hosts.join(", ") },
        );
    }
    for backend in &report.backends {
        describe_backend(backend, text);
    }
}

fn describe_backend(backend: &BackendSummary, text: &mut String) {
    let _ = writeln!(text, "backend {}: {}, {}", backend.backend, backend.path, format_size(backend.size));
    if let Some(from) = &backend.moved_from {
        let _ = writeln!(
            text,
            "  moved here by a rescue from {from}, which lacks data; not served before it is started here"
        );
    }
    if let Some(error) = &backend.error {
        let _ = writeln!(text, "  cannot be opened: {error}");
        return;
    }
    if backend.lanes == 0 {
        text.push_str("  no cache\n");
        return;
    }
    let _ = writeln!(
        text,
        "  cache: {} lanes, {} of {} segments in use, {} records with {} of data",
        backend.lanes,
        backend.segments - backend.free_segments,
        backend.segments,
        backend.records,
        format_size(backend.data_bytes),
    );
    let _ = writeln!(
        text,
        "  dirty: {} in {} records, over {} of the device",
        format_size(backend.dirty_bytes),
        backend.dirty_records,
        format_size(backend.dirty_device_bytes),
    );
    let _ = writeln!(text, "  {}", recovery_point(backend));
    describe_ranges("damaged", &backend.damaged, text);
    describe_ranges("parked", &backend.parked, text);
}

/// The recovery point: the time to which the backing device alone is consistent.
fn recovery_point(backend: &BackendSummary) -> String {
    let time = match backend.drained_wall_ms {
        0 if backend.drained_epoch == 0 => "the time before it was cached".to_owned(),
        0 => "a time that is not known".to_owned(),
        at => format_time(at),
    };
    match &backend.void_reason {
        None => format!(
            "without its cache the disk is of {time} (epoch {}, {})",
            backend.drained_epoch, backend.consistency
        ),
        Some(reason) => format!(
            "without its cache the disk is no crash state ({reason}); last caught up {time} (epoch {}, {})",
            backend.drained_epoch, backend.consistency
        ),
    }
}

fn describe_ranges(what: &str, ranges: &[RangeSummary], text: &mut String) {
    const SHOWN: usize = 20;
    for range in ranges.iter().take(SHOWN) {
        let end = range.offset.saturating_add(range.bytes);
        let _ = writeln!(text, "  {what}: device bytes {}..{end} ({})", range.offset, range.reason);
    }
    if ranges.len() > SHOWN {
        let _ = writeln!(text, "  {what}: {} more ranges (--json lists them)", ranges.len() - SHOWN);
    }
}

fn describe_finding(finding: &Finding, text: &mut String) {
    let _ = writeln!(text, "{}: {}", finding.severity.name(), finding.what);
    let place = finding.place.to_string();
    if !place.is_empty() {
        let _ = writeln!(text, "  where:  {place}");
    }
    let _ = writeln!(text, "  costs:  {}", finding.cost);
    let _ = writeln!(text, "  to do:  {}", finding.advice);
}
