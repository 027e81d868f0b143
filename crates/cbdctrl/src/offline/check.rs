//! `cbdctrl check`.

use super::{CheckArguments, describe, describe_finding, ended, failed, opened_to_read};
use crate::command::Output;
use crate::progress::ToolBar;
use cbd_inspect::check::DataChecked;
use cbd_inspect::{Outcome, Report};
use std::fmt::Write;
use std::process::ExitCode;
use std::sync::Arc;

/// Runs `check`.
#[must_use]
pub fn check(arguments: &CheckArguments, json: bool) -> ExitCode {
    let output = Output { json };
    let (region, warnings) = match opened_to_read(&arguments.region) {
        Ok(opened) => opened,
        Err(error) => return failed(&error, &output),
    };
    let data = if arguments.data { DataChecked::All } else { DataChecked::Dirty };
    let mut bar = ToolBar::default();
    let mut report = cbd_inspect::check::check(Arc::new(region), data, &mut |progress| bar.show(progress));
    bar.end();
    report.warnings = warnings;
    let printed = if json { output.json(&report) } else { output.text(&text_of(&report)) };
    ended(printed, report.exit_code)
}

fn text_of(report: &Report) -> String {
    let mut text = String::new();
    describe(report, &mut text);
    for finding in &report.findings {
        describe_finding(finding, &mut text);
    }
    let listed = report.findings.len() as u64;
    let all: u64 = report.found.iter().sum();
    if all > listed {
        let _ = writeln!(text, "... and {} more", all - listed);
    }
    let counted = &report.counted;
    let _ = writeln!(
        text,
        "checked {} slots and {} headers, {} lines of logs{}",
        counted.slots,
        counted.headers,
        counted.lines,
        format_args!(
            ", verified {} bytes of {} records{}",
            counted.verified_bytes,
            counted.verified_records,
            if report.data {
                ""
            } else {
                "; data that is also on the disks was not verified (--data does that)"
            }
        )
    );
    let [notes, corrected, affected, fatal] = report.found;
    let verdict = match report.outcome {
        Outcome::Clean => "clean",
        Outcome::Corrected => "damaged, no data lost: second copies are valid",
        Outcome::Affected => "damaged: data is affected",
        Outcome::Unopenable => "cannot be opened",
    };
    let _ = writeln!(
        text,
        "{verdict} ({notes} notes, {corrected} corrected, {affected} affected, {fatal} fatal)"
    );
    text
}
