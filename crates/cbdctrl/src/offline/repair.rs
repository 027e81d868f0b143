//! `cbdctrl repair`.

use super::{RepairArguments, describe_finding, ended, failed, of_region, opened_to_read};
use crate::command::Output;
use crate::progress::ToolBar;
use cbd_inspect::open::{announce, to_change};
use cbd_inspect::repair::{Plan, apply, plan};
use cbd_inspect::{Bytes, Finding, Outcome};
use cbd_types::{Error, ErrorKind, MutationPoint, Region, Result};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, BufRead, IsTerminal, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

/// Exit code: repairs are necessary and were not made.
const NOT_DONE: u8 = 1;
/// Exit code: some damage was repaired, and the rest cannot be.
const UNREPAIRED: u8 = 2;
/// Exit code: no damage can be repaired.
const NOTHING_REPAIRED: u8 = 4;

/// The result as JSON.
#[derive(Serialize)]
struct Answer<'a> {
    /// The planned repairs.
    planned: Vec<String>,
    /// Whether the repairs were made, if there were any.
    done: bool,
    /// Number of repairs that were made.
    repaired: usize,
    /// The result of a check before, and its result afterwards, or expected.
    before: Outcome,
    after: Outcome,
    /// Damage that cannot be repaired.
    left: Vec<&'a Finding>,
    /// Reasons for which the plan may be wrong.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

/// Runs `repair`.
#[must_use]
pub fn repair(arguments: &RepairArguments, json: bool) -> ExitCode {
    let output = Output { json };
    match run(arguments, &output) {
        Ok((printed, code)) => ended(printed, code),
        Err(error) => failed(&error, &output),
    }
}

fn run(arguments: &RepairArguments, output: &Output) -> Result<(Result<()>, u8)> {
    let mut bar = ToolBar::default();
    // A plan only reads the region; it does not even fill holes of the file.
    let may_change = !arguments.dry_run && (arguments.yes || (!output.json && io::stdin().is_terminal()));
    let region = if may_change { Some(Arc::new(Region::new(to_change(&arguments.region)?))) } else { None };
    let _presence = region.as_ref().map(|region| announce(region, &arguments.region)).transpose()?;
    let (bytes, warnings): (Arc<dyn Bytes>, _) = match &region {
        Some(region) => (Arc::clone(region) as Arc<dyn Bytes>, Vec::new()),
        None => {
            let (reader, warnings) = opened_to_read(&arguments.region)?;
            (Arc::new(reader), warnings)
        }
    };
    let plan = plan(&bytes, &mut |progress| bar.show(progress));
    bar.end();
    let plan = plan?;
    if plan.before.transport.is_none() {
        let why = plan.before.findings.first().map(|finding| finding.what.clone()).unwrap_or_default();
        return Err(of_region(Error::new(ErrorKind::Damaged, why), &arguments.region));
    }
    if !output.json {
        output.text(&text_of(&plan))?;
    }
    let mut done = plan.repairs.is_empty();
    if let Some(region) = region.filter(|_| !done)
        && (arguments.yes || confirmed(&plan)?)
    {
        for repair in &plan.repairs {
            apply(&region, repair)?;
        }
        region.sync(MutationPoint::UseSync, 0, region.size())?;
        done = true;
    }
    let left: Vec<&Finding> = plan.not_repaired().collect();
    let code = match (done, left.is_empty(), plan.repairs.is_empty()) {
        (false, ..) => NOT_DONE,
        (true, false, true) => NOTHING_REPAIRED,
        (true, false, false) => UNREPAIRED,
        (true, true, _) => 0,
    };
    let printed = if output.json {
        output.json(&Answer {
            planned: plan.repairs.iter().map(ToString::to_string).collect(),
            done,
            repaired: if done { plan.repairs.len() } else { 0 },
            before: plan.before.outcome,
            after: plan.after.outcome,
            left,
            warnings,
        })
    } else {
        let count = left.len();
        output.text(&match (done, plan.repairs.is_empty()) {
            (_, true) if count > 0 => {
                format!("NOTHING could be repaired: {count} findings are unchanged\n")
            }
            (_, true) => "there is nothing to repair\n".to_owned(),
            (true, false) if count > 0 => {
                format!("repaired {}, and {count} findings are unchanged\n", plan.repairs.len())
            }
            (true, false) => format!("repaired {}\n", plan.repairs.len()),
            (false, false) if may_change => "nothing was changed\n".to_owned(),
            (false, false) => "nothing was changed; --yes does it\n".to_owned(),
        })
    };
    Ok((printed, code))
}

fn text_of(plan: &Plan) -> String {
    const SHOWN: usize = 100;
    let mut text = String::new();
    for repair in plan.repairs.iter().take(SHOWN) {
        let _ = writeln!(text, "to do: {repair}");
    }
    if plan.repairs.len() > SHOWN {
        let _ = writeln!(text, "to do: {} more like these", plan.repairs.len() - SHOWN);
    }
    let mut left = plan.not_repaired().peekable();
    if left.peek().is_some() {
        text.push_str("not repaired, because no undamaged copy determines the contents:\n");
    }
    for finding in left {
        describe_finding(finding, &mut text);
    }
    text
}

/// Asks for confirmation on the terminal.
fn confirmed(plan: &Plan) -> Result<bool> {
    let not_asked =
        |error: io::Error| Error::new(ErrorKind::System, "the question cannot be asked").caused_by(error);
    eprint!(
        "{} repairs, each to a copy that is damaged or older than the other. Do it? [y/N] ",
        plan.repairs.len()
    );
    io::stderr().flush().map_err(not_asked)?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).map_err(not_asked)?;
    Ok(["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()))
}
