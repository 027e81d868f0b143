//! `cbdctrl rescue --from dm-pcache`.

use super::{DAMAGED, DIRTY, RescueArguments, ended, failed, wrong_usage};
use crate::command::Output;
use crate::progress::ToolBar;
use cbd_daemon::size::format_size;
use cbd_inspect::pcache::{Options, Rescued, examine, rescue};
use cbd_pcache::RangeList;
use cbd_types::Result;
use serde::Serialize;
use std::fmt::Write;
use std::process::ExitCode;

/// Lines of a list that are printed for people.
const SHOWN: usize = 20;

/// The result as JSON.
#[derive(Serialize)]
struct Answer<'a> {
    from: &'static str,
    dry_run: bool,
    #[serde(flatten)]
    rescued: &'a Rescued,
}

/// Runs `rescue --from dm-pcache`.
#[must_use]
pub fn rescue_from_pcache(arguments: &RescueArguments, json: bool) -> ExitCode {
    if arguments.yes && arguments.to.is_none() {
        return wrong_usage(
            "--from dm-pcache writes nothing without --to DISK: a cache device does not record its disk",
        );
    }
    let output = Output { json };
    match run(arguments, &output) {
        Ok((printed, code)) => ended(printed, code),
        Err(error) => failed(&error, &output),
    }
}

fn run(arguments: &RescueArguments, output: &Output) -> Result<(Result<()>, u8)> {
    let options = Options {
        cache: arguments.region.clone(),
        to: arguments.to.clone(),
        reading: cbd_pcache::Options { past_damage: arguments.past_damage, ..cbd_pcache::Options::default() },
    };
    let mut bar = ToolBar::default();
    let rescued = if arguments.yes {
        rescue(&options, &mut |progress| bar.show(progress))
    } else {
        examine(&options, &mut |progress| bar.show(progress))
    };
    bar.end();
    let rescued = rescued?;
    let code = match (arguments.yes, rescued.is_harmed) {
        (true, _) if !rescued.failed.is_empty() => DIRTY,
        (_, true) => DAMAGED,
        (false, false) if rescued.dirty.count > 0 => DIRTY,
        _ => 0,
    };
    let printed = if output.json {
        output.json(&Answer { from: "dm-pcache", dry_run: !arguments.yes, rescued: &rescued })
    } else {
        output.text(&text_of(&rescued, arguments.yes))
    };
    Ok((printed, code))
}

fn text_of(rescued: &Rescued, written: bool) -> String {
    let mut text = String::new();
    let survey = &rescued.survey;
    let _ = writeln!(
        text,
        "{}: cache of dm-pcache, {}, {} segments, data {} checksums",
        rescued.cache,
        format_size(rescued.size),
        rescued.segments,
        if rescued.data_crc { "with" } else { "without" },
    );
    let _ = writeln!(
        text,
        "  log: {} key sets in {} segments, {} of them with {} dirty keys",
        survey.key_sets, survey.log_segments, survey.dirty_key_sets, survey.dirty_keys
    );
    if let Some(end) = survey.end {
        let _ = writeln!(text, "  {}", end.text());
    }
    if survey.impossible_keys > 0 {
        let _ = writeln!(text, "  {} dirty keys have ranges that no device can have", survey.impossible_keys);
    }
    if survey.passed_key_sets > 0 {
        let _ =
            writeln!(text, "  {} damaged key sets were skipped; their keys are lost", survey.passed_key_sets);
    }
    for finding in rescued.findings.iter().take(SHOWN) {
        let word = if finding.harmful { "lost" } else { "damaged" };
        let _ = writeln!(text, "  {word}: {finding}");
    }
    more(rescued.findings.len(), "findings", &mut text);
    let _ = writeln!(
        text,
        "  dirty: {} in {} ranges, up to byte {} of the device",
        format_size(rescued.dirty.bytes),
        rescued.dirty.count,
        survey.device_end
    );
    describe_damaged(&rescued.damaged, &mut text);
    describe_disk(rescued, written, &mut text);
    text
}

fn describe_damaged(damaged: &RangeList, text: &mut String) {
    for range in damaged.ranges.iter().take(SHOWN) {
        let end = range.offset.saturating_add(range.bytes);
        let why = range.reason.map_or("", cbd_pcache::Reason::text);
        let _ = writeln!(text, "  damaged: device bytes {}..{end} ({why})", range.offset);
    }
    more(usize::try_from(damaged.count).unwrap_or(usize::MAX), "damaged ranges", text);
}

fn describe_disk(rescued: &Rescued, written: bool, text: &mut String) {
    let disk = rescued.disk.as_deref().unwrap_or_default();
    for failed in rescued.failed.iter().take(SHOWN) {
        let end = failed.offset.saturating_add(failed.bytes);
        let _ = writeln!(text, "  not written: device bytes {}..{end} ({})", failed.offset, failed.error);
    }
    more(rescued.failed.len(), "ranges that were not written", text);
    let _ = match (&rescued.disk_error, written) {
        (Some(error), _) => writeln!(text, "  cannot be written: {error}"),
        (None, true) if rescued.failed.is_empty() && !rescued.is_harmed => writeln!(
            text,
            "  {} written to {disk} and read back: all is on the disk",
            format_size(rescued.written_bytes)
        ),
        (None, true) => writeln!(
            text,
            "  {} written to {disk} and read back; the ranges above are not on it",
            format_size(rescued.written_bytes)
        ),
        (None, false) if rescued.disk.is_some() => {
            writeln!(text, "  would write {} to {disk}", format_size(rescued.dirty.bytes))
        }
        (None, false) => Ok(()),
    };
    if !written {
        text.push_str("this was a dry run, and nothing was changed; --to DISK --yes writes it\n");
    }
}

fn more(all: usize, what: &str, text: &mut String) {
    if all > SHOWN {
        let _ = writeln!(text, "  {} more {what} (--json lists them)", all - SHOWN);
    }
}
