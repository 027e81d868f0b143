//! `cargo xtask mutants`: disables the mutation points of [`cbd_types::MutationPoint`], and switches the mutants of
//! `xtask/mutants/written` on, one at a time, and checks whether a test fails.
//!
//! Invariants: the tests are built once, in a copy of the sources in which written mutants are switches, and each mutant is a
//! process of its own with another `CBD_MUTANT`; a mutant counts as caught only by a test that passes without it and fails,
//! or hangs, with it more than once.
//!
//! Elsewhere: the mutation points (`cbd-types`), the tests (the crates), why some mutants change nothing
//! (`docs/mutants.md`).

mod catalog;
mod copy;
mod generated;
mod killers;
mod places;
mod rewrite;
pub mod suite;
mod written;

use crate::problem::Problem;
use crate::workspace;
use catalog::{Catalog, Mutant};
use killers::{Killer, Killers};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;
use suite::Suite;

/// Number of mutants that run at the same time.
const AT_ONCE: usize = 2;

/// The options.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Only list the mutants.
    list: bool,
    /// One JSON document instead of lines.
    json: bool,
    /// Run all tests also on the mutants that are listed as changing nothing.
    thorough: bool,
    /// Write the test that caught each mutant to the file, to begin with it next time.
    learn: bool,
    /// These mutants, or those whose names begin with this text; empty means all.
    only: Vec<String>,
}

impl Flags {
    /// Reads the options.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option or a name that fits no mutant; a list of mutants that cannot be read.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut flags = Self::default();
        let catalog = Catalog::read(&workspace::root()).map_err(Problem::Failed)?;
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--list" => flags.list = true,
                "--json" => flags.json = true,
                "--thorough" => flags.thorough = true,
                "--learn" => flags.learn = true,
                "--only" => {
                    let name = rest.next().ok_or_else(|| Problem::Usage("--only needs a name".to_owned()))?;
                    if !catalog.mutants.iter().any(|known| known.name.starts_with(name.as_str())) {
                        return Err(Problem::Usage(format!("there is no mutant '{name}'; see --list")));
                    }
                    flags.only.push(name.clone());
                }
                other => return Err(Problem::Usage(format!("unknown option '{other}'"))),
            }
        }
        Ok(flags)
    }

    /// All tests, also on the mutants that are listed as changing nothing.
    #[must_use]
    pub fn thorough() -> Self {
        Self { thorough: true, ..Self::default() }
    }

    fn wants(&self, mutant: &Mutant) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| mutant.name.starts_with(name.as_str()))
    }
}

/// The result for a mutant.
#[derive(Clone, Debug)]
enum Verdict {
    Caught {
        by: Killer,
        seconds: f64,
    },
    /// All tests passed.
    Survived,
    /// It is listed as changing nothing; whether all tests ran on it, and passed.
    Equivalent {
        tried: bool,
    },
    /// It is listed as changing nothing, but a test fails.
    NotEquivalent {
        by: Killer,
    },
}

/// Runs what the arguments ask for: the mutants chosen by hand, or the generated ones.
///
/// # Errors
/// [`Problem::Usage`] for an unknown option, and those of [`run`] and [`run_generated`].
pub fn task(arguments: &[String]) -> Result<bool, Problem> {
    if arguments.iter().any(|argument| argument == "--generated") {
        return generated::run(&generated::Flags::parse(arguments)?);
    }
    run(&Flags::parse(arguments)?)
}

/// Runs all generated mutants. True if tests kill enough of them.
///
/// # Errors
/// When the tests do not build, or do not pass without a mutant.
pub fn run_generated() -> Result<bool, Problem> {
    generated::run(&generated::Flags::default())
}

/// Runs the mutants. True if none survived and none is listed wrongly.
///
/// # Errors
/// When the tests do not build, or do not pass without a mutant.
pub fn run(flags: &Flags) -> Result<bool, Problem> {
    let catalog = Catalog::read(&workspace::root()).map_err(Problem::Failed)?;
    let known = Killers::read(&workspace::root(), &catalog).map_err(Problem::Failed)?;
    let wanted: Vec<&Mutant> = catalog.mutants.iter().filter(|mutant| flags.wants(mutant)).collect();
    if flags.list {
        for Mutant { name, about } in wanted {
            let note =
                if known.is_equivalent(name) { "  (changes nothing, see docs/mutants.md)" } else { "" };
            println!("{name:32} {about}{note}");
        }
        return Ok(true);
    }
    let begun = Instant::now();
    let mut suite = Suite::build(&catalog.written).map_err(Problem::Failed)?;
    let build_seconds = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let hinted: Vec<Killer> =
        wanted.iter().filter_map(|mutant| known.killer(&mutant.name)).cloned().collect();
    let needs_all = flags.thorough || flags.learn || hinted.len() < wanted.len();
    suite.check_without_mutant(&hinted, needs_all).map_err(Problem::Failed)?;
    let verdicts = check_all(&suite, &known, flags, wanted);
    if flags.learn {
        let learned = verdicts.iter().filter_map(|(mutant, verdict)| match verdict {
            Verdict::Caught { by, .. } => Some((mutant.clone(), by.clone())),
            _ => None,
        });
        known.write(&workspace::root(), learned).map_err(Problem::Failed)?;
    }
    let report = report(&verdicts, build_seconds, begun.elapsed().as_secs_f64());
    if flags.json {
        println!("{report:#}");
    } else {
        println!(
            "{} mutants: {} caught, {} survive, {} change nothing; {:.0} s after {build_seconds:.0} s of building",
            report["mutants"],
            report["caught"],
            report["survivors"].as_array().map_or(0, Vec::len),
            report["equivalent"].as_array().map_or(0, Vec::len),
            begun.elapsed().as_secs_f64(),
        );
    }
    Ok(verdicts
        .values()
        .all(|verdict| matches!(verdict, Verdict::Caught { .. } | Verdict::Equivalent { .. })))
}

/// Checks all mutants, several at a time, and prints each result as it comes.
fn check_all(
    suite: &Suite,
    known: &Killers,
    flags: &Flags,
    wanted: Vec<&Mutant>,
) -> BTreeMap<String, Verdict> {
    let waiting = Mutex::new(wanted.into_iter());
    let verdicts = Mutex::new(BTreeMap::new());
    let next = || waiting.lock().ok()?.next();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(Mutant { name, .. }) = next() {
                    let verdict = check(suite, known, name, flags.thorough);
                    let line = match &verdict {
                        Verdict::Caught { by, seconds } => format!("caught   {seconds:6.2} s by {by}"),
                        Verdict::Survived => "SURVIVES".to_owned(),
                        Verdict::Equivalent { tried: true } => "changes nothing, as is proved".to_owned(),
                        Verdict::Equivalent { tried: false } => "changes nothing; not tried".to_owned(),
                        Verdict::NotEquivalent { by } => format!("IS NO EQUIVALENT: caught by {by}"),
                    };
                    // With JSON, only the document goes to standard output.
                    if flags.json {
                        eprintln!("{name:32} {line}");
                    } else {
                        println!("{name:32} {line}");
                    }
                    if let Ok(mut verdicts) = verdicts.lock() {
                        verdicts.insert(name.clone(), verdict);
                    }
                }
            });
        }
    });
    verdicts.into_inner().unwrap_or_default()
}

fn check(suite: &Suite, known: &Killers, mutant: &str, thorough: bool) -> Verdict {
    if known.is_equivalent(mutant) {
        if !thorough {
            return Verdict::Equivalent { tried: false };
        }
        return match suite.run_all(mutant) {
            Some(by) => Verdict::NotEquivalent { by },
            None => Verdict::Equivalent { tried: true },
        };
    }
    let begun = Instant::now();
    if let Some(by) = known.killer(mutant)
        && suite.catches(by, mutant)
    {
        return Verdict::Caught { by: by.clone(), seconds: begun.elapsed().as_secs_f64() };
    }
    match suite.run_all(mutant) {
        Some(by) => Verdict::Caught { by, seconds: begun.elapsed().as_secs_f64() },
        None => Verdict::Survived,
    }
}

fn report(verdicts: &BTreeMap<String, Verdict>, build_seconds: f64, seconds: f64) -> Value {
    let names = |which: fn(&Verdict) -> bool| -> Vec<&str> {
        verdicts.iter().filter(|(_, verdict)| which(verdict)).map(|(mutant, _)| mutant.as_str()).collect()
    };
    let killers: serde_json::Map<String, Value> = verdicts
        .iter()
        .filter_map(|(mutant, verdict)| match verdict {
            Verdict::Caught { by, seconds } => {
                Some((mutant.clone(), json!({ "by": by.to_string(), "seconds": seconds })))
            }
            _ => None,
        })
        .collect();
    json!({
        "mutants": verdicts.len(),
        "caught": killers.len(),
        "survivors": names(|verdict| matches!(verdict, Verdict::Survived)),
        "equivalent": names(|verdict| matches!(verdict, Verdict::Equivalent { .. })),
        "equivalent_tried": names(|verdict| matches!(verdict, Verdict::Equivalent { tried: true })),
        "not_equivalent": names(|verdict| matches!(verdict, Verdict::NotEquivalent { .. })),
        "build_seconds": build_seconds,
        "seconds": seconds,
        "killers": killers,
    })
}
