//! `cbdctrl rescue`.

use super::pcache::rescue_from_pcache;
use super::records::Records;
use super::{
    DAMAGED, DIRTY, RescueArguments, UNOPENABLE, describe_backend, describe_ranges, ended, failed, number_of,
    of_region, opened_to_read,
};
use crate::command::Output;
use crate::progress::ToolBar;
use cbd_daemon::size::{format_size, format_time};
use cbd_inspect::check::{DataChecked, check};
use cbd_inspect::rescue::{DiskRecords, Options, RecordedDisk, Rescued};
use cbd_inspect::{BackendSummary, Bytes, Report};
use cbd_types::{BackendId, Error, ErrorKind, Result};
use serde::Serialize;
use std::fmt::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// A planned rescue, as JSON.
#[derive(Serialize)]
struct Planned<'a> {
    dry_run: bool,
    backends: Vec<PlannedBackend<'a>>,
    /// Reasons for which the plan may be wrong.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct PlannedBackend<'a> {
    #[serde(flatten)]
    summary: &'a BackendSummary,
    /// The disk to which data would be written.
    disk: String,
    /// Why that disk cannot be written.
    disk_error: Option<String>,
    /// It is another disk than the cache belongs to, or was written without its cache.
    #[serde(skip)]
    is_exchanged: bool,
    warnings: Vec<String>,
}

/// A completed rescue, as JSON.
#[derive(Serialize)]
struct Done<'a> {
    dry_run: bool,
    backends: &'a [Rescued],
}

/// Runs `rescue`.
#[must_use]
pub fn rescue(arguments: &RescueArguments, json: bool) -> ExitCode {
    if arguments.from.is_some() {
        return rescue_from_pcache(arguments, json);
    }
    let output = Output { json };
    let opened = || Ok(Arc::new(cbd_inspect::open::to_read(&arguments.region)?.0) as Arc<dyn Bytes>);
    let backend = match number_of(arguments.backend.as_ref(), opened) {
        Ok(backend) => backend,
        Err(error) => return failed(&of_region(error, &arguments.region), &output),
    };
    let records = Arc::new(Records::new(arguments));
    let options = Options {
        backend: backend.map(BackendId),
        to: arguments.to.clone(),
        other_disk: arguments.other_disk,
        forget_disk: arguments.forget_disk.clone(),
        after_crash: arguments.after_crash,
        timeout: Duration::from_secs(arguments.timeout.max(1)),
        records: Some(Arc::clone(&records) as Arc<dyn DiskRecords>),
    };
    let result = if arguments.yes {
        write(arguments, &options, &records, &output)
    } else {
        dry_run(arguments, &options, &output)
    };
    match result {
        Ok((printed, code)) => ended(printed, code),
        Err(error) => failed(&error, &output),
    }
}

fn dry_run(arguments: &RescueArguments, options: &Options, output: &Output) -> Result<(Result<()>, u8)> {
    let mut bar = ToolBar::default();
    let (region, warnings) = opened_to_read(&arguments.region)?;
    let region = Arc::new(region);
    let report =
        check(Arc::clone(&region) as Arc<dyn Bytes>, DataChecked::Dirty, &mut |progress| bar.show(progress));
    bar.end();
    if report.transport.is_none() {
        let why = report.findings.first().map(|finding| finding.what.clone()).unwrap_or_default();
        return Err(of_region(Error::new(ErrorKind::Damaged, why), &arguments.region));
    }
    let region: Arc<dyn Bytes> = region;
    let backends = planned(&region, &report, options)?;
    let code = backends
        .iter()
        .map(|backend| match backend.summary {
            summary if summary.error.is_some() => UNOPENABLE,
            summary if summary.mixed_pages && !options.after_crash => UNOPENABLE,
            summary if summary.dirty_records > 0 && backend.disk_error.is_some() => UNOPENABLE,
            // The cache would not be emptied, either.
            _ if backend.is_exchanged => UNOPENABLE,
            summary if !summary.damaged.is_empty() => DAMAGED,
            summary if summary.dirty_records > 0 => DIRTY,
            _ => 0,
        })
        .max()
        .unwrap_or(0);
    let printed = if output.json {
        output.json(&Planned { dry_run: true, backends, warnings })
    } else {
        output.text(&text_of_plan(&backends, options.other_disk))
    };
    Ok((printed, code))
}

fn planned<'a>(
    region: &Arc<dyn Bytes>,
    report: &'a Report,
    options: &Options,
) -> Result<Vec<PlannedBackend<'a>>> {
    let mut planned = Vec::new();
    for summary in report.backends.iter().filter(|summary| options.concerns(summary.backend)) {
        let recorded = RecordedDisk {
            path: &summary.path,
            identity: &summary.identity,
            size: summary.size,
            sector: None,
        };
        let disk = options.to.as_ref().map_or_else(|| summary.path.clone(), |to| to.display().to_string());
        let opened = if summary.error.is_none() && summary.lanes > 0 {
            // Opened for the checks and closed again: it is held while it is written.
            options.preview_disk(region, BackendId(summary.backend), &recorded)
        } else {
            Ok(Vec::new())
        };
        let (refused, warnings) = match opened {
            Ok(warnings) => (None, warnings),
            Err(error) => (Some(error), Vec::new()),
        };
        let is_exchanged = refused.as_ref().is_some_and(|error| error.kind() == ErrorKind::Exchanged);
        let disk_error = refused.map(|error| error.line());
        planned.push(PlannedBackend { summary, disk, disk_error, is_exchanged, warnings });
    }
    match options.backend {
        Some(id) if planned.is_empty() => {
            Err(Error::new(ErrorKind::NotFound, format!("the region has no backend {id}")))
        }
        _ => Ok(planned),
    }
}

fn text_of_plan(backends: &[PlannedBackend<'_>], moves: bool) -> String {
    let mut text = String::new();
    for backend in backends {
        describe_backend(backend.summary, &mut text);
        for warning in &backend.warnings {
            let _ = writeln!(text, "  warning: {warning}");
        }
        if moves && backend.disk_error.is_none() {
            let _ = writeln!(
                text,
                "  with --yes the backend is moved to {}, and {} is refused then",
                backend.disk, backend.summary.path
            );
        }
        if backend.summary.error.is_some() || backend.summary.lanes == 0 {
            continue;
        }
        if backend.summary.mixed_pages {
            text.push_str(
                "  warning: the machine crashed while this cache was in use: some of its pages may be old. It is written only with \
                 --after-crash, and may write old data over newer\n",
            );
        }
        let _ = match &backend.disk_error {
            Some(error) if backend.is_exchanged => writeln!(text, "  cannot be written: {error}"),
            Some(error) => writeln!(
                text,
                "  cannot be written: {error} (--backend {} --to DISK)",
                backend.summary.backend
            ),
            None if backend.summary.dirty_records == 0 => writeln!(text, "  nothing is dirty"),
            None => writeln!(
                text,
                "  would write {} to {}",
                format_size(backend.summary.dirty_device_bytes),
                backend.disk
            ),
        };
    }
    if backends.is_empty() {
        text.push_str("the region has no backends\n");
    }
    text.push_str(if backends.iter().any(|backend| backend.disk_error.is_some()) {
        "this was a dry run, and nothing was changed; --yes writes what can be written\n"
    } else {
        "this was a dry run, and nothing was changed; --yes writes it\n"
    });
    text
}

fn write(
    arguments: &RescueArguments,
    options: &Options,
    records: &Records,
    output: &Output,
) -> Result<(Result<()>, u8)> {
    let mut bar = ToolBar::default();
    let region = cbd_inspect::open::to_change(&arguments.region)?;
    let rescued = cbd_inspect::rescue::rescue(region, options, &mut |progress| bar.show(progress));
    bar.end();
    let rescued = rescued.map_err(|error| of_region(error, &arguments.region))?;
    for backend in &rescued {
        for warning in &backend.warnings {
            eprintln!("cbdctrl: warning: {warning}");
        }
        if let Some(error) = &backend.error {
            eprintln!("cbdctrl: backend {}: {}", backend.backend, error.replace('\n', " "));
        }
    }
    let code = rescued
        .iter()
        .map(|backend| match backend {
            Rescued { error: Some(_), opened: false, .. } => UNOPENABLE,
            Rescued { error: Some(_), .. } => DIRTY,
            Rescued { damaged, .. } if !damaged.is_empty() => DAMAGED,
            _ => 0,
        })
        .max()
        .unwrap_or(0);
    let printed = if output.json {
        output.json(&Done { dry_run: false, backends: &rescued })
    } else {
        let is_known = records.were_found();
        output.text(&rescued.iter().map(|backend| text_of_rescued(backend, is_known)).collect::<String>())
    };
    Ok((printed, code))
}

/// `is_known` tells that the records of the daemon were found: only then is it known that it has no reason to refuse.
fn text_of_rescued(backend: &Rescued, is_known: bool) -> String {
    let mut text = format!("backend {}: {}\n", backend.backend, backend.disk);
    if !backend.opened {
        text.push_str("  nothing was written\n");
        return text;
    }
    let _ = writeln!(
        text,
        "  {} written, {} dirty",
        format_size(backend.written_bytes),
        format_size(backend.dirty_bytes.unwrap_or(0))
    );
    if backend.drained_wall_ms > 0 {
        let point = if backend.backing_is_consistent {
            "recovery point of the disk"
        } else {
            "the disk is not crash-consistent; its last recovery point"
        };
        let _ = writeln!(text, "  {point}: {}", format_time(backend.drained_wall_ms));
    }
    describe_ranges("damaged", &backend.damaged, &mut text);
    describe_ranges("parked", &backend.parked, &mut text);
    if backend.emptied {
        let is_served = backend.moved_from.is_none() && is_known;
        let again = if is_served { ", and a daemon serves it again" } else { "" };
        let _ = writeln!(
            text,
            "  all is on the disk, and the cache is empty: the disk can be used without it{again}"
        );
    } else if backend.complete && backend.damaged.is_empty() {
        text.push_str("  all is on the disk\n");
    } else if backend.complete {
        text.push_str(
            "  all is on the disk except the damaged ranges, which the region records: start no daemon on it once the disk was \
             written without it, since older data in the cache would hide the newer\n",
        );
    }
    if backend.complete && backend.written_bytes > 0 {
        text.push_str(
            "  another copy of this region, if there is one, still has this data as dirty: start no daemon and no rescue on \
             it, since that would write the data over newer\n",
        );
    }
    if let Some(from) = &backend.moved_from {
        let (id, disk) = (backend.backend, &backend.disk);
        let _ = writeln!(
            text,
            "  moved: {from} lacks data from now on, and is refused. A daemon serves the backend only after a command: \
             backend-start -p {disk}, unless the disk was written without its cache since; backend-stop -b {id} removes it from \
             the region"
        );
    }
    text
}
