//! `advise`: what more or less cache would bring, from a trace, or from what the daemon has noted of the requests of a backend.
//!
//! Invariants: the trace is read twice, as a stream, so its length does not matter to memory; nothing is written, and no daemon is
//! asked unless a backend is named.
//!
//! Elsewhere: traces, and the caches that are simulated (`cbd-advise`).

mod live;

use crate::cli::AdviseArguments;
use crate::command::{Output, warn};
use crate::progress::ToolBar;
use crate::table::{Table, fit, terminal_width};
use cbd_advise::{BLOCKS_MAX, CacheForm, Options, Outcome, Request, Simulation, Survey, Trace};
use cbd_daemon::api::{CacheInfo, CacheMode, ErrorAnswer, ErrorBody, Status, TransportStatus};
use cbd_daemon::client::Client;
use cbd_daemon::size::format_size;
use cbd_engine::Settings;
use cbd_inspect::Progress;
use cbd_types::{Error, ErrorKind, Result};
use serde::Serialize;
use std::path::Path;
use std::process::ExitCode;

/// The most sizes that are tried at once: each has its memory.
const SIZES_MAX: usize = 16;
/// The least memory for a size: with less the small caches are too coarse to stand for larger ones.
const MEMORY_MIN: u64 = 8 << 20;
/// Requests between two updates of the progress.
const PROGRESS_EVERY: u64 = 1 << 14;
/// Width of the table where there is no terminal.
const WIDTH: usize = 100;

/// Runs the command.
pub(crate) fn run(arguments: &AdviseArguments, socket: &Path, json: bool) -> ExitCode {
    let output = Output { json };
    match execute(arguments, socket, &output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cbdctrl: {}", error.line().replace('\n', " "));
            if json {
                let _ = output.json(&ErrorAnswer { error: ErrorBody::from(&error) });
            }
            ExitCode::FAILURE
        }
    }
}

/// What is known of the present cache.
#[derive(Clone, Copy)]
struct Present {
    size: Option<u64>,
    segment: Option<u64>,
    settings: Settings,
}

/// The result.
#[derive(Serialize)]
struct Advice {
    trace: TraceInfo,
    sizes: Vec<SizeInfo>,
    advice: String,
}

/// What the trace has.
#[derive(Serialize)]
struct TraceInfo {
    requests: u64,
    reads: u64,
    read_bytes: u64,
    writes: u64,
    written_bytes: u64,
    discards: u64,
    flushes: u64,
    /// Absent if the trace has no times.
    seconds: Option<f64>,
    /// Bytes of the device that were read or written at least once.
    used_bytes: u64,
    /// Share of the bytes read that were neither read nor written before.
    first_read_share: f64,
    /// The highest rate of writes over ten seconds.
    write_bytes_per_s_max: Option<f64>,
}

/// What a cache of one size does.
#[derive(Serialize)]
struct SizeInfo {
    size: u64,
    /// Absent if nothing was read, or too little is known of a cache of this size.
    read_hit_ratio: Option<f64>,
    /// Absent if too little is known of a cache of this size.
    disk_read_bytes: Option<u64>,
    /// Absent if the trace has no times.
    dirty_bytes_max: Option<u64>,
    dirty_bytes_mean: Option<u64>,
    /// Absent if the disk keeps up, or if no rate of it is given.
    full_after_s: Option<f64>,
    /// One block of so many was simulated; 1 if the cache was simulated whole.
    sampled_one_of: u64,
    /// Bytes of memory that the simulation took.
    memory_bytes: u64,
}

fn execute(arguments: &AdviseArguments, socket: &Path, output: &Output) -> Result<()> {
    if arguments.memory < MEMORY_MIN {
        return Err(invalid(format!(
            "--memory is {}: it must be at least 8 MiB",
            format_size(arguments.memory)
        )));
    }
    let present = present(arguments, socket)?;
    let Some(path) = &arguments.trace else { return live::execute(arguments, &present, socket, output) };
    let mut bar = ToolBar::default();
    let mut survey = Survey::new();
    let trace = each_request(path, arguments, "reading the trace", &mut bar, &mut |request| {
        survey.add(&request);
        Ok(())
    });
    let trace = trace.inspect_err(|_| bar.end())?;
    let forms = forms(arguments, &present, &survey).inspect_err(|_| bar.end())?;
    let options = Options {
        memory_max: arguments.memory,
        blocks_max: BLOCKS_MAX,
        settings: present.settings,
        disk_rate: arguments.disk_rate,
        has_times: trace.has_times(),
    };
    let mut simulation = Simulation::new(&forms, &survey, &options).inspect_err(|_| bar.end())?;
    let simulated =
        each_request(path, arguments, "simulating", &mut bar, &mut |request| simulation.feed(request));
    bar.end();
    simulated?;
    let outcomes = simulation.finish()?;
    warn(&trace.note().map(str::to_owned).into_iter().collect::<Vec<_>>());
    let advice = Advice {
        sizes: outcomes.iter().map(|outcome| size_info(outcome, &survey, &options)).collect(),
        advice: cbd_advise::sentence(&outcomes, present.size, &survey),
        trace: trace_info(&survey, &options),
    };
    output.result(&advice, &fit(&page(&advice, present.size, arguments.disk_rate.is_some())))
}

fn invalid(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, text.into())
}

/// Calls `each` with every request of the trace; returns the trace at its end.
fn each_request(
    path: &Path,
    arguments: &AdviseArguments,
    doing: &'static str,
    bar: &mut ToolBar,
    each: &mut dyn FnMut(Request) -> Result<()>,
) -> Result<Trace> {
    let mut trace = Trace::open(path, arguments.format, arguments.device.as_deref())?;
    let mut number = 0_u64;
    while let Some(request) = trace.next_request()? {
        each(request)?;
        number += 1;
        if number.is_multiple_of(PROGRESS_EVERY) {
            let (done, of) = trace.position();
            bar.show(Progress { doing, done, of });
        }
    }
    Ok(trace)
}

/// The present cache, by the options or by the daemon.
fn present(arguments: &AdviseArguments, socket: &Path) -> Result<Present> {
    let Some(backend) = &arguments.backend else {
        let (size, segment) = (arguments.size, arguments.segment_size);
        return Ok(Present { size, segment, settings: Settings::default() });
    };
    let path = format!("/v1/status?transport={}&backend={backend}", arguments.on.transport);
    let status: Status = Client::new(socket).get(&path)?;
    let of_backend = |transport: &TransportStatus| {
        let cache = transport.backends.first()?.cache.clone()?;
        Some((cache, transport.info.bytes_per_segment))
    };
    let (cache, segment) = status.transports.iter().find_map(of_backend).ok_or_else(|| {
        invalid(format!("backend {backend} has no cache that is served: give the size with --size instead"))
    })?;
    Ok(Present { size: Some(cache.size), segment: Some(segment), settings: settings_of(&cache)? })
}

/// The settings that decide what the cache holds.
fn settings_of(cache: &CacheInfo) -> Result<Settings> {
    let of = &cache.settings;
    if of.cache_mode != CacheMode::Writeback {
        return Err(invalid(format!(
            "the cache is in the mode {}, and what is simulated are caches in the mode writeback: give its size with --size \
             instead of the backend",
            of.cache_mode.name()
        )));
    }
    let default = Settings::default();
    Settings {
        gc_percent: u8::try_from(of.gc_percent).unwrap_or(default.gc_percent),
        consistency: of.consistency.into(),
        writeback_rate: of.writeback_rate,
        dirty_target_percent: u8::try_from(of.writeback_percent).unwrap_or(default.dirty_target_percent),
        read_fill: of.read_fill.into(),
        sequential_read_cutoff: of.sequential_read_cutoff,
        ..default
    }
    .validated()
}

/// The caches to try, smallest first.
fn forms(arguments: &AdviseArguments, present: &Present, survey: &Survey) -> Result<Vec<CacheForm>> {
    let sizes = if arguments.sizes.is_empty() {
        let least = present.segment.map_or(9 << 20, |segment| 9 * segment);
        if let Some(size) = present.size {
            forms_of(vec![size], present)?;
        }
        cbd_advise::sizes_around(present.size, survey, least)
    } else {
        arguments.sizes.clone()
    };
    forms_of(sizes, present)
}

/// Caches of these sizes, and of the present one, smallest first.
fn forms_of(mut sizes: Vec<u64>, present: &Present) -> Result<Vec<CacheForm>> {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let processors = u32::try_from(processors).unwrap_or(1);
    let form = |bytes| CacheForm::new(bytes, present.segment, processors);
    sizes.extend(present.size);
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.len() > SIZES_MAX {
        return Err(invalid(format!("{} sizes: at most {SIZES_MAX} are possible at once", sizes.len())));
    }
    sizes.into_iter().map(form).collect()
}

fn trace_info(survey: &Survey, options: &Options) -> TraceInfo {
    TraceInfo {
        requests: survey.requests(),
        reads: survey.reads,
        read_bytes: survey.read_bytes,
        writes: survey.writes,
        written_bytes: survey.written_bytes,
        discards: survey.discards,
        flushes: survey.flushes,
        seconds: options.has_times.then_some(survey.us as f64 / 1e6),
        used_bytes: survey.working_set(),
        first_read_share: survey.new_reads(),
        write_bytes_per_s_max: survey.write_rate_max(),
    }
}

fn size_info(outcome: &Outcome, survey: &Survey, options: &Options) -> SizeInfo {
    let full_after = |rate| cbd_advise::time_to_full_s(outcome.bytes, survey, rate);
    SizeInfo {
        size: outcome.bytes,
        read_hit_ratio: (survey.reads > 0).then_some(outcome.hit),
        disk_read_bytes: Some(outcome.disk_read_bytes),
        dirty_bytes_max: options.has_times.then_some(outcome.dirty_bytes_max),
        dirty_bytes_mean: options.has_times.then_some(outcome.dirty_bytes_mean),
        full_after_s: options.disk_rate.and_then(full_after),
        sampled_one_of: outcome.sampled_one_of,
        memory_bytes: outcome.memory_bytes,
    }
}

fn page(advice: &Advice, present: Option<u64>, has_rate: bool) -> String {
    let trace = &advice.trace;
    let time = trace.seconds.map_or_else(|| "no times".to_owned(), |seconds| format!("{seconds:.1} s"));
    let mut text = format!(
        "{} requests, {time}: {} reads of {}, {} writes of {}\n{} of the device are used; {:.1} % of what is read had not been used \
         before, and misses in any cache\n\n",
        trace.requests,
        trace.reads,
        format_size(trace.read_bytes),
        trace.writes,
        format_size(trace.written_bytes),
        format_size(trace.used_bytes),
        100.0 * trace.first_read_share,
    );
    text.push_str(&table(&advice.sizes, present, trace.seconds.is_some(), has_rate));
    text.push_str(&format!("\n{}\n", advice.advice));
    text
}

/// The table of the sizes.
fn table(sizes: &[SizeInfo], present: Option<u64>, has_times: bool, has_rate: bool) -> String {
    let columns = [
        ("CACHE", true),
        ("HITS", true),
        ("READ FROM DISK", true),
        ("DIRTY AT MOST", has_times),
        ("FULL AFTER", has_rate),
        ("SIMULATED", true),
    ];
    let heads: Vec<&str> = columns.iter().filter(|(_, is_shown)| *is_shown).map(|(head, _)| *head).collect();
    let mut table = Table::new(&heads);
    for size in sizes {
        let now = if present == Some(size.size) { " (now)" } else { "" };
        let cells = [
            format!("{}{now}", format_size(size.size)),
            size.read_hit_ratio.map_or_else(|| "-".to_owned(), |hit| format!("{:.1} %", 100.0 * hit)),
            size.disk_read_bytes.map_or_else(|| "-".to_owned(), format_size),
            size.dirty_bytes_max.map_or_else(|| "-".to_owned(), format_size),
            size.full_after_s.map_or_else(|| "never".to_owned(), |seconds| format!("{seconds:.0} s")),
            match size.sampled_one_of {
                1 => "whole".to_owned(),
                one_of => format!("1 of {one_of} blocks"),
            },
        ];
        let shown = cells.into_iter().zip(columns).filter(|(_, (_, is_shown))| *is_shown);
        table.row(shown.map(|(cell, _)| cell).collect());
    }
    table.render(terminal_width().unwrap_or(WIDTH))
}
