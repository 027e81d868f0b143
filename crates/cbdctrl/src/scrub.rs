//! `scrub`: starts, pauses, continues and stops the scrub of a backend, and shows it.
//!
//! Invariants: the exit code says what was found, as `blkverify` says it.

use crate::cli::ScrubArguments;
use crate::command::Output;
use crate::progress::DrainBar;
use cbd_daemon::api::{
    BackendInfo, Done, ErrorAnswer, ErrorBody, MetadataInfo, NumberOrName, ScrubAction, ScrubInfo, ScrubPass,
    ScrubRequest, ScrubState, VerifiedInfo,
};
use cbd_daemon::client::Client;
use cbd_daemon::scrub::gather::{words, words_of_copy};
use cbd_daemon::size::{format_size, format_time};
use cbd_types::{Error, ErrorKind, Result};
use std::fmt::Write;
use std::process::ExitCode;

/// Everything that was found is repaired.
const REPAIRED: u8 = 1;
/// Something was found that is not repaired.
const FOUND: u8 = 2;
/// A part could not be looked at, or the daemon refused.
const COULD_NOT_LOOK: u8 = 3;

/// The findings that are shown.
const SHOWN_MAX: usize = 20;

/// Runs the command.
pub(crate) fn run(arguments: &ScrubArguments, client: &Client, output: &Output) -> ExitCode {
    match execute(arguments, client, output) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("cbdctrl: {}", error.line().replace('\n', " "));
            if output.json {
                let _ = output.json(&ErrorAnswer { error: ErrorBody::from(&error) });
            }
            ExitCode::from(COULD_NOT_LOOK)
        }
    }
}

fn path(transport: u32, backend: &NumberOrName) -> String {
    format!("/v1/transports/{transport}/backends/{backend}/scrub")
}

fn execute(arguments: &ScrubArguments, client: &Client, output: &Output) -> Result<u8> {
    let transport = arguments.on.transport;
    if arguments.status {
        return status(arguments, client, output);
    }
    let backend = arguments.backend.as_ref();
    // The definitions of the options demand it.
    let backend = backend.ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "name a backend (-b)"))?;
    let action = match arguments {
        ScrubArguments { pause: true, .. } => ScrubAction::Pause,
        ScrubArguments { resume: true, .. } => ScrubAction::Resume,
        ScrubArguments { stop: true, .. } => ScrubAction::Stop,
        _ => ScrubAction::Start,
    };
    let ScrubArguments { rate, repair, level, wait, .. } = *arguments;
    let request = ScrubRequest { action, rate, repair, level, wait };
    let mut bar = DrainBar::default();
    let result: Result<Done> =
        client.post_long(&path(transport, backend), &request, |progress| bar.show(progress));
    bar.end();
    let info = result?.scrub.unwrap_or_default();
    match info.last.as_ref().filter(|_| wait) {
        Some(last) => {
            output.result(&info, &text_of_pass(last))?;
            Ok(code_of(&last.results))
        }
        None => output.result(&info, "").map(|()| 0),
    }
}

fn status(arguments: &ScrubArguments, client: &Client, output: &Output) -> Result<u8> {
    let transport = arguments.on.transport;
    let backends: Vec<NumberOrName> = match &arguments.backend {
        Some(backend) => vec![backend.clone()],
        None => {
            let list: Vec<BackendInfo> = client.get(&format!("/v1/transports/{transport}/backends"))?;
            list.into_iter().map(|backend| NumberOrName::Number(backend.backend_id)).collect()
        }
    };
    let infos: Vec<ScrubInfo> =
        backends.iter().map(|backend| client.get(&path(transport, backend))).collect::<Result<_>>()?;
    let text: String = infos.iter().map(text_of).collect();
    match (&arguments.backend, infos.first()) {
        (Some(_), Some(info)) => output.result(info, &text)?,
        _ => output.result(&infos, &text)?,
    }
    let codes = infos.iter().map(|info| match (&info.error, &info.last) {
        (Some(_), _) => COULD_NOT_LOOK,
        (None, Some(last)) => code_of(&last.results),
        (None, None) => 0,
    });
    Ok(codes.max().unwrap_or(0))
}

fn code_of(results: &VerifiedInfo) -> u8 {
    let (repaired, unrepaired) =
        results.metadata.as_ref().map_or((0, 0), |metadata| (metadata.repaired, metadata.unrepaired));
    let is_repaired = results.found == results.repaired && unrepaired == 0;
    match results.found + repaired + unrepaired {
        _ if results.error.is_some() => COULD_NOT_LOOK,
        0 => 0,
        _ if is_repaired => REPAIRED,
        _ => FOUND,
    }
}

/// Writing to a string cannot fail.
fn line(text: &mut String, line: &str) {
    let _ = writeln!(text, "{line}");
}

fn text_of(info: &ScrubInfo) -> String {
    let mut text = format!("backend {}: {}", info.backend_id, info.state.words());
    if info.state != ScrubState::Idle {
        let speed = match info.state {
            ScrubState::Running | ScrubState::BesideClients => {
                format!(", {} a second", format_size(info.bytes_per_s))
            }
            _ => String::new(),
        };
        let (position, size) = (format_size(info.position), format_size(info.size));
        let _ = write!(text, ", at {position} of {size} ({} %){speed}", info.percent);
    }
    text.push('\n');
    if let Some(began) = info.began {
        line(&mut text, &format!("  began {}", format_time(began * 1000)));
    }
    if let Some(results) = &info.results {
        add_results(&mut text, results);
    }
    if let Some(last) = &info.last {
        text.push_str("  last pass: ");
        text.push_str(&text_of_pass(last));
    }
    if let Some(method) = &info.method {
        line(&mut text, &format!("  the disk is asked by {method}"));
    }
    if let Some(next) = info.next {
        line(&mut text, &format!("  next pass: {}", format_time(next * 1000)));
    }
    if let Some(error) = &info.error {
        line(&mut text, &format!("  ERROR: {error}"));
    }
    text
}

fn text_of_pass(pass: &ScrubPass) -> String {
    let results = &pass.results;
    let mut text = format!(
        "{} to {}: {} looked at, {} in the cache, {} on the disk\n",
        format_time(pass.began * 1000),
        format_time(pass.ended * 1000),
        format_size(results.verified_bytes),
        format_size(results.cache_bytes),
        format_size(results.backing_bytes)
    );
    add_results(&mut text, results);
    text
}

fn add_results(text: &mut String, results: &VerifiedInfo) {
    if results.found == 0 {
        line(text, "  nothing was found");
    } else {
        line(
            text,
            &format!("  ranges with a flaw: {}, of them repaired: {}", results.found, results.repaired),
        );
    }
    for finding in results.findings.iter().take(SHOWN_MAX) {
        line(text, &format!("    {}", words(finding)));
    }
    if results.found > SHOWN_MAX as u64 {
        line(text, &format!("    and {} more (--json shows 1024)", results.found - SHOWN_MAX as u64));
    }
    if let Some(MetadataInfo { structures, repaired, unrepaired, copies }) = &results.metadata {
        let what = format!(
            "  metadata of the region: {structures} structures, {repaired} copies repaired, {unrepaired} damaged"
        );
        line(text, &what);
        for copy in copies.iter().take(SHOWN_MAX) {
            line(text, &format!("    {}", words_of_copy(copy)));
        }
    }
    if let Some(error) = &results.error {
        line(text, &format!("  a part could not be looked at or repaired: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_daemon::api::FindingInfo;
    use clap::Parser;

    #[test]
    fn the_exit_code_says_what_was_found() {
        let results = |found, repaired, error: Option<&str>| VerifiedInfo {
            found,
            repaired,
            error: error.map(str::to_owned),
            ..VerifiedInfo::default()
        };
        for (found, repaired, error, code) in [
            (0, 0, None, 0),
            (3, 3, None, 1),
            (3, 2, None, 2),
            (3, 3, Some("no disk"), 3),
            (0, 0, Some("no disk"), 3),
        ] {
            assert_eq!(code_of(&results(found, repaired, error)), code, "{found} {repaired} {error:?}");
        }
    }

    #[test]
    fn damage_of_metadata_counts_like_any_other() {
        let results = |repaired, unrepaired| VerifiedInfo {
            metadata: Some(MetadataInfo { structures: 40, repaired, unrepaired, copies: Vec::new() }),
            ..VerifiedInfo::default()
        };
        assert_eq!([code_of(&results(0, 0)), code_of(&results(2, 0)), code_of(&results(2, 1))], [0, 1, 2]);
        let mut text = String::new();
        add_results(&mut text, &results(2, 1));
        assert!(text.contains("40 structures, 2 copies repaired, 1 damaged"), "{text}");
    }

    #[test]
    fn options_that_contradict_each_other_are_wrong_usage() {
        let parse = |line: &str| {
            crate::cli::Cli::try_parse_from(line.split_whitespace()).map_err(|error| error.to_string())
        };
        for line in [
            "cbdctrl scrub -b 0",
            "cbdctrl scrub -b db-data --rate 50M --repair --level all --wait",
            "cbdctrl scrub --status",
            "cbdctrl scrub -b 0 --pause",
        ] {
            assert!(parse(line).is_ok(), "{line}");
        }
        for line in [
            "cbdctrl scrub",
            "cbdctrl scrub --stop",
            "cbdctrl scrub -b 0 --pause --resume",
            "cbdctrl scrub -b 0 --stop --repair",
            "cbdctrl scrub -b 0 --level most",
            "cbdctrl scrub -b 0 --rate fast",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(parse("cbdctrl scrub -b 0 --rate 0").unwrap_err().contains("leave the rate out"));
    }

    #[test]
    fn the_status_shows_place_results_and_schedule() {
        let finding = FindingInfo { start: 4096, length: 512, flaw: "unreadable".into(), repaired: false };
        let results = VerifiedInfo { found: 1, findings: vec![finding], ..VerifiedInfo::default() };
        let info = ScrubInfo {
            state: ScrubState::Running,
            position: 1 << 30,
            size: 2 << 30,
            percent: 50,
            bytes_per_s: 50 << 20,
            results: Some(results),
            ..ScrubInfo::default()
        };
        let text = text_of(&info);
        assert!(text.contains("running, at 1 GiB of 2 GiB (50 %), 50 MiB a second"), "{text}");
        assert!(text.contains("512 bytes at 4096"), "{text}");
        let idle = ScrubInfo { next: Some(86_400), ..ScrubInfo::default() };
        assert_eq!(text_of(&idle), "backend 0: idle\n  next pass: 1970-01-02 00:00:00 UTC\n");
    }
}
