//! `cargo xtask vm peers`: CBD beside the kernel's own caches, the same requests in guests that count
//! instructions.
//!
//! Invariants: each stack has a guest of its own, and all guests are alike: the same kernel, one processor,
//! the same memory and the same disk; the instructions of their processors are compared. Nothing of the peers
//! is in this project.
//!
//! Elsewhere: how long a request takes on a machine (`cargo xtask bench`), and what the figures mean
//! (docs/performance.md).

mod figures;
mod script;
mod stacks;

use super::guest::{Ended, Host};
use super::jobs::{Ran, shipped};
use super::plan::{MIB, Mode, Plan, Shipped};
use crate::leftovers::Scratch;
use crate::problem::Problem;
use crate::shell;
use crate::workspace::{self, cargo};
use crate::{install, packages};
use figures::Figures;
use script::{Amount, JOBS, QUICK, WHOLE};
use serde_json::Value;
use stacks::{Ours, STACKS, Stack};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Persistent memory of a guest: dm-pcache requires at least 512 MiB.
const PMEM: u64 = 640 * MIB;
/// Ordinary memory, which includes the disk.
const MEMORY: u64 = 2560 * MIB;
/// Ten times what a guest takes on two idle processors.
const LIMIT: Duration = Duration::from_secs(3600);
/// Building takes minutes.
const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// The options.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    json: bool,
    report: bool,
    amount: Amount,
    names: Vec<String>,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut options = Self { json: false, report: false, amount: WHOLE, names: Vec::new() };
        let (mut rounds, mut only) = (None, WHOLE.jobs);
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--json" => options.json = true,
                "--report" => options.report = true,
                "--quick" => options.amount = QUICK,
                "--rounds" => {
                    let given = rest.next().and_then(|number| number.parse().ok());
                    let given = given.filter(|number| (1..=100).contains(number));
                    rounds =
                        Some(given.ok_or_else(|| {
                            Problem::Usage("--rounds needs a number from 1 to 100".to_owned())
                        })?);
                }
                "--only" => only = jobs(rest.next().map_or("", String::as_str))?,
                name if STACKS.iter().any(|stack| stack.name == name) => options.names.push(name.to_owned()),
                other => {
                    let names: Vec<_> = STACKS.iter().map(|stack| stack.name).collect();
                    return Err(Problem::Usage(format!(
                        "vm peers has no option and no stack '{other}'; the stacks are {}",
                        names.join(", ")
                    )));
                }
            }
        }
        options.amount.rounds = rounds.unwrap_or(options.amount.rounds);
        options.amount.jobs = only;
        if options.report && only != WHOLE.jobs {
            return Err(Problem::Usage("--report needs all columns: leave --only out".to_owned()));
        }
        Ok(options)
    }

    fn wants(&self, stack: &Stack) -> bool {
        self.names.is_empty() || self.names.iter().any(|name| name == stack.name)
    }
}

/// The jobs that are named in a list with commas.
fn jobs(names: &str) -> Result<[bool; JOBS.len()], Problem> {
    let wanted: Vec<_> = names.split(',').collect();
    if let Some(unknown) = wanted.iter().find(|name| JOBS.iter().all(|job| job.name != **name)) {
        let known: Vec<_> = JOBS.iter().map(|job| job.name).collect();
        return Err(Problem::Usage(format!(
            "--only needs columns with commas between them, and '{unknown}' is none; the columns are {}",
            known.join(", ")
        )));
    }
    Ok(std::array::from_fn(|place| wanted.contains(&JOBS[place].name)))
}

/// Measures, and prints the figures.
///
/// # Errors
/// Wrong usage, and why a stack could not be measured.
pub fn run(arguments: &[String]) -> Result<bool, Problem> {
    let options = Options::parse(arguments)?;
    let (figures, failures) = measure(&options).map_err(Problem::Failed)?;
    if options.json {
        println!("{figures:#}");
    } else {
        println!("{}", figures::table(&figures));
    }
    for failure in &failures {
        eprintln!("xtask: {failure}");
    }
    if options.report && failures.is_empty() {
        report(&figures)?;
    }
    Ok(failures.is_empty())
}

/// The figures of the stacks that could be measured, and why others could not.
fn measure(options: &Options) -> Result<(Value, Vec<String>), String> {
    let scratch = Scratch::new()?;
    let host = Host::new(scratch.path())?;
    packages::install_peers()?;
    let wanted = || STACKS.iter().filter(|stack| options.wants(stack));
    let built = Built::all(wanted(), scratch.path())?;
    let (mut all, mut failures) = (BTreeMap::new(), Vec::new());
    for stack in wanted() {
        let begun = Instant::now();
        match one(&host, stack, &options.amount, &built) {
            Ok(figures) => drop(all.insert(stack.name, figures)),
            Err(text) => failures.push(text),
        }
        eprintln!("    {}: {:.0} s", stack.title, begun.elapsed().as_secs_f64());
    }
    Ok((figures::json(host.kernel_release(), &options.amount, &all), failures))
}

/// Runs all stacks in their smallest form: each is created, measured, and ends.
///
/// # Errors
/// What failed.
pub fn smallest(host: &Host, folder: &Path) -> Result<(), String> {
    packages::install_peers()?;
    let built = Built::all(STACKS.iter(), folder)?;
    for stack in &STACKS {
        let figures = one(host, stack, &QUICK, &built)?;
        if let Some((job, figure)) =
            figures.iter().find(|(_, figure)| figure.median().is_nan() || figure.median() <= 0.0)
        {
            return Err(format!("{} {job}: {} instructions a request", stack.name, figure.median()));
        }
    }
    Ok(())
}

/// What is built for the stacks.
#[derive(Default)]
struct Built {
    nothing: Option<PathBuf>,
    engine: Option<PathBuf>,
}

impl Built {
    /// Builds what these stacks need, in `folder`. The daemon is built with the guest's root.
    fn all<'a>(stacks: impl Iterator<Item = &'a Stack> + Clone, folder: &Path) -> Result<Self, String> {
        let needed = |ours| stacks.clone().any(|stack| stack.ours == ours);
        let mut built = Self::default();
        if needed(Ours::Nothing) {
            let build = ["build", "--quiet", "--release", "--package", "cbd-ublk", "--example", "nothing"];
            let end = shell::run(&mut cargo(build), BUILD_LIMIT, |_, line| eprintln!("    {line}"));
            if !end.is_success() {
                return Err(format!("the ublk device that does nothing does not build: {end}"));
            }
            built.nothing = Some(workspace::target_directory()?.join("release/examples/nothing"));
        }
        if needed(Ours::Engine) {
            let installed = install::engine(&folder.join("engine"));
            built.engine = Some(installed.map_err(|problem| match problem {
                Problem::Usage(text) | Problem::Failed(text) => text,
                Problem::Code(code) => format!("the engine for fio cannot be built: exit code {code}"),
            })?);
        }
        Ok(built)
    }

    fn shipped(&self, stack: &Stack) -> Vec<Shipped> {
        let (from, to) = match stack.ours {
            Ours::Nothing => (&self.nothing, Some(PathBuf::from("/usr/bin/nothing"))),
            // At this path the loader finds the library, which is beside it.
            Ours::Engine => (&self.engine, self.engine.clone()),
            Ours::None | Ours::Daemon => (&None, None),
        };
        from.iter().zip(to).map(|(from, to)| Shipped { from: from.clone(), to }).collect()
    }
}

/// Measures a stack in a guest of its own.
fn one(host: &Host, stack: &Stack, amount: &Amount, built: &Built) -> Result<Figures, String> {
    let engine = built.engine.as_deref().unwrap_or(Path::new(""));
    let mut files = shipped(&[&["fio"], stack.programs].concat())?;
    files.extend(built.shipped(stack));
    let plan = Plan {
        mode: Mode::Counting,
        memory: MEMORY,
        pmem: Some(PMEM),
        modules: ["null_blk"].iter().chain(stack.modules).map(|&name| name.to_owned()).collect(),
        cbd: matches!(stack.ours, Ours::Daemon | Ours::Engine),
        files,
        timeout: LIMIT,
        ..Plan::of_script(&script::of(stack, amount, &engine.to_string_lossy()))
    };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::Exited(0), &[]).map_err(|text| format!("{}: {text}", stack.name))?;
    figures::read(stack, amount, &ran.output).map_err(|text| ran.complaint(&text))
}

/// Passes the figures to the benchmarks, which write them into the documentation.
fn report(figures: &Value) -> Result<(), Problem> {
    let failed = |text: String| Problem::Failed(text);
    let scratch = Scratch::new().map_err(failed)?;
    let file = scratch.path().join("peers.json");
    fs::write(&file, figures.to_string())
        .map_err(|error| failed(format!("cannot write {}: {error}", file.display())))?;
    let mut bench = workspace::cargo(["xtask", "bench", "--report", "--from"]);
    let end = shell::run(bench.arg(&file), BUILD_LIMIT, |_, line| println!("{line}"));
    if end.is_success() { Ok(()) } else { Err(failed(format!("the report was not written: {end}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, Problem> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn stacks_are_named_and_rounds_counted_in_any_order() {
        let options = parse("pmem --rounds 5 --quick bcache --json").expect("all of it is known");
        assert_eq!(options.amount, Amount { rounds: 5, ..QUICK });
        assert!(options.json && !options.report);
        let wanted: Vec<_> = STACKS.iter().filter(|stack| options.wants(stack)).collect();
        assert_eq!(wanted.iter().map(|stack| stack.name).collect::<Vec<_>>(), ["pmem", "bcache"]);
        assert!(STACKS.iter().all(|stack| parse("").is_ok_and(|options| options.wants(stack))));
    }

    #[test]
    fn only_the_named_columns_are_measured() {
        let options = parse("cbd_in_process --only write_1,dsync_1").expect("both are known");
        let named: Vec<_> = JOBS.iter().zip(options.amount.jobs).filter(|(_, is_run)| *is_run).collect();
        assert_eq!(named.iter().map(|(job, _)| job.name).collect::<Vec<_>>(), ["write_1", "dsync_1"]);
    }

    #[test]
    fn what_is_unknown_is_refused() {
        for line in [
            "zfs",
            "--fast",
            "--rounds",
            "--rounds 0",
            "--rounds x",
            "--only",
            "--only write_2",
            "--only write_1 --report",
        ] {
            assert!(matches!(parse(line), Err(Problem::Usage(_))), "{line}");
        }
    }
}
