//! `cbd-sim`: explores crash states and prints the findings; `cargo xtask sim` runs it.
#![forbid(unsafe_code)]

use cbd_sim::campaign::{self, Outcome, Plan};
use cbd_sim::explorer::{Effort, Finding, Tally};
use cbd_sim::sequences;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "\
Usage: cargo xtask sim [OPTION..]

Explores what crashes can leave, and compares what comes up with what must be there.

  --seed N       first seed (default 1)
  --seeds N      most seeds for each kind of world
  --seconds N    begin no world after so many seconds
  --states N     begin no world after so many crash states (default 200000, unless another limit is given)
  --histories N  begin no world after so many histories
  --distinct N   .. and so many different recovered states (default 0)
  --world NAME   only this kind of world; 'reconnect', 'group', 'hosts', 'channels' and 'moves' are explored only by name
  --point N      only this moment of each history
  --long         at every moment every subset of at most 12 open lines, not at a share of the moments; sequences of
                 four acts, not of three
  --complete     fail unless every rare path was taken, and --states and --distinct were reached
  --threads N    default: all cores
  --json         figures as JSON on standard output; progress goes to standard error
";

struct Options {
    plan: Plan,
    complete: bool,
    json: bool,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = match parse(&arguments) {
        Ok(options) => options,
        Err(text) => {
            eprintln!("sim: {text}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let outcome = campaign::run(&options.plan, |tally, elapsed| {
        eprintln!(
            "{:4} s: {} histories, {} crash states, {} distinct, {} violations",
            elapsed.as_secs(),
            tally.histories,
            tally.crash_states(),
            tally.distinct.len(),
            tally.findings.len()
        );
    });
    for finding in &outcome.tally.findings {
        eprintln!("violation: {} ({})\n  repeat: {}", finding.text, finding.state, repeat(finding, &options));
    }
    let missing = if options.complete { missing(&outcome, &options.plan) } else { Vec::new() };
    for what in &missing {
        eprintln!("incomplete: {what}");
    }
    let figures = figures(&outcome, &options);
    if options.json {
        println!("{figures:#}");
    } else {
        print(&figures);
    }
    if outcome.tally.findings.is_empty() && missing.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn parse(arguments: &[String]) -> Result<Options, String> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut plan = Plan {
        seed: 1,
        seeds: None,
        limit: None,
        states: None,
        histories: None,
        distinct: 0,
        world: None,
        point: None,
        is_long: false,
        effort: Effort { exhausted_permille: 40, ..Effort::default() },
        threads,
    };
    let (mut complete, mut json) = (false, false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().ok_or_else(|| format!("{argument} needs a value"));
        let number = |text: &String| text.parse::<u64>().map_err(|_| format!("{argument} needs a number"));
        match argument.as_str() {
            "--seed" => plan.seed = number(value()?)?,
            "--seeds" => plan.seeds = Some(number(value()?)?),
            "--seconds" => plan.limit = Some(Duration::from_secs(number(value()?)?)),
            "--states" => plan.states = Some(number(value()?)?),
            "--histories" => plan.histories = Some(number(value()?)?),
            "--distinct" => plan.distinct = number(value()?)?,
            "--point" => plan.point = Some(number(value()?)?),
            "--threads" => plan.threads = number(value()?)? as usize,
            "--world" => plan.world = Some(value()?.clone()),
            "--long" => plan.is_long = true,
            "--complete" => complete = true,
            "--json" => json = true,
            other => return Err(format!("unknown option '{other}'")),
        }
    }
    if plan.is_long {
        plan.effort = Effort::default();
    }
    let kinds = campaign::kinds();
    if let Some(name) = &plan.world
        && kinds.iter().all(|kind| kind.name != name)
    {
        let known: Vec<&str> = kinds.iter().map(|kind| kind.name).collect();
        return Err(format!("there is no world '{name}'; there are {}", known.join(", ")));
    }
    if plan.seeds.is_none() && plan.limit.is_none() && plan.states.is_none() && plan.histories.is_none() {
        plan.states = Some(200_000);
    }
    Ok(Options { plan, complete, json })
}

/// The command that repeats only this finding.
fn repeat(finding: &Finding, options: &Options) -> String {
    let mut command = format!("cargo xtask sim --world {} --seed {} --seeds 1", finding.world, finding.seed);
    if let Some(point) = finding.point {
        command.push_str(&format!(" --point {point}"));
    }
    if options.plan.is_long {
        command.push_str(" --long");
    }
    command
}

/// The coverage that a complete run requires and this run did not reach.
fn missing(outcome: &Outcome, plan: &Plan) -> Vec<String> {
    let tally = &outcome.tally;
    let mut missing = Vec::new();
    for (path, count) in &tally.rare {
        if *count == 0 {
            missing.push(format!("the rare path '{path}' was never taken"));
        }
    }
    let distinct = tally.distinct.len() as u64;
    for (what, seen, wanted) in [
        ("crash states", tally.crash_states(), plan.states.unwrap_or(0)),
        ("distinct recovered states", distinct, plan.distinct),
    ] {
        if seen < wanted {
            missing.push(format!("{seen} {what} of {wanted} in the given time"));
        }
    }
    missing
}

fn figures(outcome: &Outcome, options: &Options) -> Value {
    let tally @ Tally { histories, points, points_exhausted, equivalent_states, states, faults, rare, .. } =
        &outcome.tally;
    let seconds = outcome.elapsed.as_secs_f64();
    let violations: Vec<Value> = tally
        .findings
        .iter()
        .map(|finding| {
            json!({ "what": finding.text, "state": finding.state, "repeat": repeat(finding, options) })
        })
        .collect();
    let sequences: Vec<Value> = tally
        .sequences
        .iter()
        .map(|(length, played)| {
            let of = sequences::sequences(*length);
            json!({ "length": length, "played": played, "of": of, "all": *played == of })
        })
        .collect();
    json!({
        "first_seed": outcome.seeds.0,
        "last_seed": outcome.seeds.1,
        "seeds": outcome.seeds.1 - outcome.seeds.0 + 1,
        "histories": histories,
        "sequences": sequences,
        "points": points,
        "points_exhausted": points_exhausted,
        "crash_states": tally.crash_states(),
        "crash_states_by_kind": states,
        "equivalent_states": equivalent_states,
        "distinct_recovered_states": tally.distinct.len(),
        "faults": faults,
        "rare_paths": rare,
        "violations": violations.len(),
        "violations_found": violations,
        "long": options.plan.is_long,
        "seconds": (seconds * 10.0).round() / 10.0,
        "threads": options.plan.threads,
        "crash_states_per_second": (tally.crash_states() as f64 / seconds.max(0.001)).round(),
    })
}

/// Prints the figures as text.
fn print(figures: &Value) {
    for (name, value) in figures.as_object().into_iter().flatten() {
        match value.as_object() {
            Some(parts) => {
                println!("{name}:");
                for (name, value) in parts {
                    println!("    {name:44} {value}");
                }
            }
            None => println!("{name:48} {value}"),
        }
    }
}
