//! `cargo xtask mutants --generated`: changes each operator, condition, call and constant of some crates, one at a time,
//! and checks whether a test fails.
//!
//! Invariants: all mutants are in one build of a copy of the sources, behind switches (`cbd_types::mutation::generated`),
//! so a mutant is a process with another number in its environment; mutants are tried in an order that depends on a
//! seed alone, so those tried so far are a sample of all.
//!
//! Elsewhere: the mutation points, which are chosen by hand (`mutants`).

pub mod candidates;
mod reach;
mod scratch;
mod survivors;
mod trials;

use crate::problem::Problem;
use crate::workspace;
use reach::Reach;
use scratch::{CRATES, Mutant, Scratch};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};
use survivors::Survivors;
use trials::{Trials, Verdict};

/// The least percentage of the mutants tried that tests kill, without those that are explained.
const KILLED_PERCENT: f64 = 95.0;
/// Fewer are no measure of the tests. Holds where nothing is left out.
const GENERATED: usize = 2000;
/// Interval of the lines that tell how far the trials are.
const INTERVAL: Duration = Duration::from_secs(30);

/// The options.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Only list the mutants.
    list: bool,
    /// One JSON document instead of lines.
    json: bool,
    /// Try those that are explained, too.
    thorough: bool,
    /// Functions whose names contain one of these texts; empty means all.
    only: Vec<String>,
    /// Of these crates; empty means all.
    crates: Vec<String>,
    /// As many of them, at random.
    sample: Option<usize>,
    /// The seed of the order.
    seed: u64,
}

impl Flags {
    /// Reads the options.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option or crate.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut flags = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().ok_or_else(|| Problem::Usage(format!("{argument} needs a value")));
            match argument.as_str() {
                "--generated" => {}
                "--list" => flags.list = true,
                "--json" => flags.json = true,
                "--thorough" => flags.thorough = true,
                "--only" => flags.only.push(value()?.clone()),
                "--crate" => {
                    let name = value()?.trim_start_matches("cbd-").to_owned();
                    if !CRATES.contains(&name.as_str()) {
                        let known = CRATES.join(", ");
                        return Err(Problem::Usage(format!("'{name}' has no mutants; these have: {known}")));
                    }
                    flags.crates.push(name);
                }
                "--sample" => flags.sample = Some(number(argument, value()?)? as usize),
                "--seed" => flags.seed = number(argument, value()?)?,
                other => return Err(Problem::Usage(format!("unknown option '{other}' of --generated"))),
            }
        }
        Ok(flags)
    }

    fn wants(&self, mutant: &Mutant) -> bool {
        let has = |name: &String| mutant.candidate.function.contains(name.as_str());
        (self.only.is_empty() || self.only.iter().any(has))
            && (self.crates.is_empty() || self.crates.iter().any(|name| name == mutant.owner()))
    }

    fn is_all(&self) -> bool {
        self.only.is_empty() && self.crates.is_empty() && self.sample.is_none()
    }
}

fn number(option: &str, given: &str) -> Result<u64, Problem> {
    given.parse().map_err(|_| Problem::Usage(format!("{option} needs a number")))
}

/// Runs the generated mutants. True if tests kill enough of them and all explanations hold.
///
/// # Errors
/// When the copy does not build, or a test fails without a mutant.
pub fn run(flags: &Flags) -> Result<bool, Problem> {
    let begun = Instant::now();
    let explained = Survivors::read(&workspace::root()).map_err(Problem::Failed)?;
    let mut scratch = Scratch::new().map_err(Problem::Failed)?;
    if flags.list {
        for mutant in scratch.mutants.iter().filter(|mutant| flags.wants(mutant)) {
            println!("{}\t{}", mutant.candidate.kind.name(), survivors::line(mutant));
        }
        return Ok(true);
    }
    if !scratch.mutants.iter().any(|mutant| flags.wants(mutant)) {
        return Err(Problem::Usage("no generated mutant has this crate and function; see --list".to_owned()));
    }
    let programs = scratch.build().map_err(Problem::Failed)?;
    let built = begun.elapsed();
    let reach = Reach::find(&scratch, &programs).map_err(Problem::Failed)?;
    eprintln!(
        "{} mutants, {} more do not compile; {:.0} s of building, {:.0} s of tests without a mutant",
        scratch.mutants.len() - scratch.rejected.len(),
        scratch.rejected.len(),
        built.as_secs_f64(),
        (begun.elapsed() - built).as_secs_f64(),
    );
    let numbers = chosen(&scratch, flags, &explained);
    let trials = Trials::new(&scratch, &programs, &reach).map_err(Problem::Failed)?;
    let verdicts = trials.run(&numbers, &progress(numbers.len()));
    let outcome = Report { scratch: &scratch, explained: &explained, verdicts: &verdicts };
    let report = outcome.json(begun.elapsed());
    if flags.json {
        println!("{report:#}");
    } else {
        outcome.print(&report);
    }
    let problems = outcome.problems(flags);
    for problem in &problems {
        eprintln!("mutants: {problem}");
    }
    Ok(problems.is_empty())
}

/// The numbers of the mutants to try, in their order.
fn chosen(scratch: &Scratch, flags: &Flags, explained: &Survivors) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..)
        .zip(&scratch.mutants)
        .filter(|(number, mutant)| {
            !scratch.rejected.contains(number)
                && flags.wants(mutant)
                && (flags.thorough || !explained.explains(mutant))
        })
        .map(|(number, _)| number)
        .collect();
    numbers.sort_by_cached_key(|number| {
        let mut order = DefaultHasher::new();
        (scratch.mutants[*number as usize].id, flags.seed).hash(&mut order);
        order.finish()
    });
    numbers.truncate(flags.sample.unwrap_or(usize::MAX));
    numbers
}

/// Prints each survivor as it comes, and from time to time how far the trials are.
fn progress(all: usize) -> impl Fn(usize, &Mutant, &Verdict, f64) + Sync {
    let begun = Instant::now();
    let state = std::sync::Mutex::new((begun, 0_usize));
    move |done, mutant, verdict, seconds| {
        let Ok(mut state) = state.lock() else { return };
        match verdict {
            Verdict::Killed(_) => state.1 += 1,
            Verdict::Survived => eprintln!("SURVIVES  {seconds:5.1} s {}", survivors::line(mutant)),
            Verdict::Unreached => eprintln!("UNREACHED         {}", survivors::line(mutant)),
        }
        if state.0.elapsed() > INTERVAL {
            state.0 = Instant::now();
            let killed = state.1;
            eprintln!("    {done} of {all} tried, {killed} killed, {} s", begun.elapsed().as_secs());
        }
    }
}

/// What came out.
struct Report<'a> {
    scratch: &'a Scratch,
    explained: &'a Survivors,
    verdicts: &'a BTreeMap<u32, Verdict>,
}

impl Report<'_> {
    fn mutant(&self, number: u32) -> &Mutant {
        &self.scratch.mutants[number as usize]
    }

    /// Those without an explanation.
    fn counted(&self) -> impl Iterator<Item = (&Mutant, &Verdict)> {
        self.verdicts
            .iter()
            .map(|(number, verdict)| (self.mutant(*number), verdict))
            .filter(|(mutant, _)| !self.explained.explains(mutant))
    }

    fn killed_percent(&self) -> f64 {
        let killed = self.counted().filter(|(_, verdict)| matches!(verdict, Verdict::Killed(_))).count();
        100.0 * killed as f64 / self.counted().count().max(1) as f64
    }

    /// The mutants that are explained, but killed.
    fn killed_though_explained(&self) -> Vec<String> {
        let killed = |(number, verdict): (&u32, &Verdict)| match verdict {
            Verdict::Killed(by) if self.explained.explains(self.mutant(*number)) => {
                Some(format!("{} killed by {by}", survivors::line(self.mutant(*number))))
            }
            _ => None,
        };
        self.verdicts.iter().filter_map(killed).collect()
    }

    fn json(&self, took: Duration) -> Value {
        let generated = self.scratch.mutants.len() - self.scratch.rejected.len();
        let of = |wanted: &dyn Fn(&Mutant) -> bool| {
            let count = |is: fn(&Verdict) -> bool| {
                self.counted().filter(|(mutant, verdict)| wanted(mutant) && is(verdict)).count()
            };
            json!({
                "tried": count(|_| true),
                "killed": count(|verdict| matches!(verdict, Verdict::Killed(_))),
                "survived": count(|verdict| *verdict == Verdict::Survived),
                "unreached": count(|verdict| *verdict == Verdict::Unreached),
            })
        };
        let kinds: std::collections::BTreeSet<_> =
            self.scratch.mutants.iter().map(|mutant| mutant.candidate.kind).collect();
        let by_kind: BTreeMap<&str, Value> =
            kinds.iter().map(|kind| (kind.name(), of(&|mutant| mutant.candidate.kind == *kind))).collect();
        let by_crate: BTreeMap<&str, Value> =
            CRATES.iter().map(|name| (*name, of(&|mutant| mutant.owner() == *name))).collect();
        let explained = (0..).zip(&self.scratch.mutants).filter(|(number, mutant)| {
            !self.scratch.rejected.contains(number) && self.explained.explains(mutant)
        });
        json!({
            "mutants": {
                "generated": generated,
                "generated_rejected": self.scratch.rejected.len(),
                "generated_explained": explained.count(),
                "generated_tried": self.counted().count(),
                "generated_killed_percent": (self.killed_percent() * 100.0).round() / 100.0,
                "generated_total": of(&|_| true),
                "by_kind": by_kind,
                "by_crate": by_crate,
                "survivors": self.survivors(),
            },
            "seconds": took.as_secs_f64(),
        })
    }

    fn survivors(&self) -> Vec<Value> {
        let left = self.verdicts.iter().filter(|(number, verdict)| {
            !matches!(verdict, Verdict::Killed(_)) && !self.explained.explains(self.mutant(**number))
        });
        left.map(|(number, verdict)| {
            let mutant = self.mutant(*number);
            json!({
                "number": number,
                "kind": mutant.candidate.kind.name(),
                "verdict": if *verdict == Verdict::Unreached { "unreached" } else { "survived" },
                "at": format!("{}:{}", mutant.file, mutant.candidate.function),
                "original": mutant.candidate.original,
                "mutated": mutant.candidate.mutated,
            })
        })
        .collect()
    }

    fn print(&self, report: &Value) {
        for survivor in self.survivors() {
            println!("{} {} {}", survivor["verdict"], survivor["kind"], survivor["at"]);
            println!("    {}", survivor["original"].as_str().unwrap_or_default());
            println!("    {}", survivor["mutated"].as_str().unwrap_or_default());
        }
        let figures = &report["mutants"];
        println!(
            "{} generated mutants, {} explained; {} tried, {} % killed, {} survive, {} unreached",
            figures["generated"],
            figures["generated_explained"],
            figures["generated_tried"],
            figures["generated_killed_percent"],
            figures["generated_total"]["survived"],
            figures["generated_total"]["unreached"],
        );
    }

    fn problems(&self, flags: &Flags) -> Vec<String> {
        let mut problems: Vec<String> = Vec::new();
        for line in self.explained.unmatched(&self.scratch.mutants) {
            problems.push(format!("survivors.txt explains no mutant: {line}"));
        }
        for line in self.killed_though_explained() {
            problems.push(format!("survivors.txt explains what a test kills: {line}"));
        }
        let percent = self.killed_percent();
        if percent < KILLED_PERCENT && !self.verdicts.is_empty() {
            problems.push(format!("{percent:.1} % are killed, which is less than {KILLED_PERCENT} %"));
        }
        let generated = self.scratch.mutants.len() - self.scratch.rejected.len();
        if flags.is_all() && generated < GENERATED {
            problems.push(format!("{generated} mutants are fewer than {GENERATED}"));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Flags, Problem> {
        Flags::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_select_mutants() {
        let flags =
            parse("--generated --crate cbd-format --only Record:: --sample 20 --seed 3").expect("valid");
        assert_eq!(flags.crates, ["format"]);
        assert_eq!((flags.sample, flags.seed), (Some(20), 3));
        assert!(!flags.is_all() && parse("--generated --json").expect("valid").is_all());
        assert!(matches!(parse("--generated --crate nbd"), Err(Problem::Usage(_))));
        assert!(matches!(parse("--generated --learn"), Err(Problem::Usage(_))));
    }
}
