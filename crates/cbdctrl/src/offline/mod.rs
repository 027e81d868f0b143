//! The commands for offline recovery: `check`, `dump`, `repair`, `rescue`. They need no daemon and no configuration,
//! and refuse a region that a daemon serves.
//!
//! Invariants: the output of `--json` and the text have the same contents; the exit code summarizes them.
//!
//! Elsewhere: checking, repairing and rescuing (`cbd-inspect`).

mod arguments;
mod check;
mod dump;
mod pcache;
mod records;
mod repair;
mod rescue;
mod unseal;

pub use arguments::{CheckArguments, DumpArguments, RepairArguments, RescueArguments, UnsealArguments};
pub use check::check;
pub use dump::dump;
pub use repair::repair;
pub use rescue::rescue;
pub(crate) use unseal::held;
pub use unseal::unseal;

use crate::command::Output;
use cbd_daemon::api::{ErrorAnswer, ErrorBody, NumberOrName};
use cbd_daemon::size::{format_size, format_time};
use cbd_inspect::report::RangeSummary;
use cbd_inspect::{BackendSummary, Bytes, Finding, Report};
use cbd_pmem::Reader;
use cbd_types::{Error, ErrorKind};
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// Exit code of wrong usage of these commands: small numbers are findings.
pub const WRONG_USAGE: u8 = 64;
/// Exit code: the region or a necessary part of it cannot be opened.
const UNOPENABLE: u8 = 3;

/// Exit code of `rescue`: dirty data was not written.
const DIRTY: u8 = 1;
/// Exit code of `rescue`: damaged data was not written.
const DAMAGED: u8 = 2;

/// Exit code: the command succeeded, but the result could not be printed, e.g. to a full disk.
const NOT_PRINTED: u8 = 74;

/// The exit codes of `check`, for its help.
pub const CHECK_EXIT_CODES: &str = "\
Exit codes:
   0  nothing is wrong
   1  something is damaged, and no data is lost: second copies are valid
   2  data, or the order in which it reaches the backing device, is affected
   3  the region, or a cache in it, cannot be opened (busy, foreign, damaged beyond its copies)
  64  wrong usage
  74  the result cannot be printed (where it would else be 0)";

/// The exit codes of `dump`, for its help.
pub const DUMP_EXIT_CODES: &str = "\
Exit codes: 0 done, 3 the region, or the requested part of it, cannot be opened, 64 wrong usage,
74 the result cannot be printed";

/// The exit codes of `repair`, for its help.
pub const REPAIR_EXIT_CODES: &str = "\
Exit codes:
   0  every second copy is undamaged
   1  there is something to repair, and it was not done (a dry run, or the answer was no)
   2  something was repaired; no undamaged copy exists for the rest
   3  the region cannot be opened, or could not be repaired
   4  something is damaged, and NOTHING of it could be repaired: nothing was changed
  64  wrong usage
  74  the result cannot be printed (where it would else be 0)";

/// The exit codes of `rescue`, for its help.
pub const RESCUE_EXIT_CODES: &str = "\
Exit codes:
   0  all is on the backing devices
   1  something is dirty: a dry run, or not all could be written (a second run continues with the rest)
   2  all is on the backing devices but for damaged ranges, which are listed; in a dry run: there are such ranges
   3  the region, a cache in it or its disk cannot be opened, or the disk was written without its cache; no data of
      it was written
      (--from: or the disk cannot be that of the cache, or is in use)
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

/// Opens a region that is only read. A warning that the result may be wrong is printed, and returned for JSON.
fn opened_to_read(region: &Path) -> cbd_types::Result<(Reader, Vec<String>)> {
    let (reader, warning) = cbd_inspect::open::to_read(region)?;
    if let Some(warning) = &warning {
        eprintln!("cbdctrl: warning: {warning}");
    }
    Ok((reader, Vec::from_iter(warning)))
}

/// The number of the backend that the user names. The region is opened for a name only.
fn number_of(
    backend: Option<&NumberOrName>,
    open: impl FnOnce() -> cbd_types::Result<Arc<dyn Bytes>>,
) -> cbd_types::Result<Option<u32>> {
    match backend {
        None => Ok(None),
        Some(NumberOrName::Number(number)) => Ok(Some(*number)),
        Some(NumberOrName::Name(name)) => cbd_inspect::names::backend_of_name(&open()?, name).map(Some),
    }
}

/// Reports wrong usage that clap's definitions cannot express.
fn wrong_usage(what: &str) -> ExitCode {
    eprintln!("error: {what}");
    ExitCode::from(WRONG_USAGE)
}

/// The exit code of a command whose result may not have been printed: a code other than 0 takes precedence.
fn ended(printed: cbd_types::Result<()>, code: u8) -> ExitCode {
    let Err(error) = printed else { return ExitCode::from(code) };
    eprintln!("cbdctrl: {}", error.line());
    ExitCode::from(if code == 0 { NOT_PRINTED } else { code })
}

/// Adds the region to an error about its contents.
fn of_region(error: Error, region: &Path) -> Error {
    match error.kind() {
        ErrorKind::Damaged | ErrorKind::Foreign | ErrorKind::Media | ErrorKind::Unsupported => error
            .while_doing(format!(
                "{} cannot be opened (cbdctrl check reports the damage and advice)",
                region.display()
            )),
        _ => error,
    }
}

/// Describes a region and the contents of its caches.
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
    let name = backend.name.as_ref().map_or_else(String::new, |name| format!(" ({name})"));
    let _ =
        writeln!(text, "backend {}{name}: {}, {}", backend.backend, backend.path, format_size(backend.size));
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
            "recovery point of the disk without its cache: {time} (epoch {}, {})",
            backend.drained_epoch, backend.consistency
        ),
        Some(reason) => format!(
            "without its cache the disk is not crash-consistent ({reason}); its last recovery point: {time} (epoch {}, {})",
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
    let place = finding.location.to_string();
    if !place.is_empty() {
        let _ = writeln!(text, "  where:  {place}");
    }
    let _ = writeln!(text, "  costs:  {}", finding.cost);
    let _ = writeln!(text, "  to do:  {}", finding.advice);
}
