//! Which test reaches which mutant: each test runs once by itself, without a mutant, and the switches note their numbers.

use super::scratch::{Mutant, SHORT, Scratch};
use crate::mutants::AT_ONCE;
use crate::mutants::killers::Killer;
use crate::mutants::suite::{self, Limits, Outcome, Program};
use crate::shell;
use cbd_types::mutation::generated::RECORD;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The limit of a test without a mutant.
const LIMIT: Limits = Limits { time: Duration::from_secs(600), processor: None, threads: 1 };

/// A test.
#[derive(Clone, Debug)]
pub struct Test {
    /// Its program and its name.
    pub name: Killer,
    /// The seconds that it took without a mutant.
    pub seconds: f64,
    /// The numbers of the mutants that it reaches, in order.
    pub reached: Vec<u32>,
}

/// All tests that reach a mutant, the quickest first.
pub struct Reach {
    /// The tests.
    pub tests: Vec<Test>,
    /// For each mutant the tests that reach it.
    pub of_mutant: Vec<Vec<usize>>,
}

impl Reach {
    /// Runs all tests, or reads what was found of the same sources.
    ///
    /// # Errors
    /// A test that fails without a mutant.
    pub fn find(scratch: &Scratch, programs: &[Program]) -> Result<Self, String> {
        let file = scratch.directory.join("reach.json");
        if let Some(tests) = read(&file, scratch) {
            return Ok(Self::new(tests, scratch.mutants.len()));
        }
        let mut waiting = Vec::new();
        for program in programs {
            waiting.extend(list(program)?.into_iter().map(|test| (program, test)));
        }
        eprintln!("{} tests run without a mutant", waiting.len());
        let waiting = Mutex::new(waiting);
        let next = || waiting.lock().ok()?.pop();
        let found = Mutex::new(Ok(Vec::new()));
        std::thread::scope(|scope| {
            for worker in 0..AT_ONCE {
                let record = scratch.directory.join(format!("reached.{worker}"));
                let (next, found) = (&next, &found);
                scope.spawn(move || {
                    while let Some((program, test)) = next() {
                        let one = run(program, &test, &record);
                        if let Ok(mut found) = found.lock()
                            && let Ok(tests) = &mut *found
                        {
                            match one {
                                Ok(one) => tests.push(one),
                                Err(error) => *found = Err(error),
                            }
                        }
                    }
                });
            }
        });
        let tests = found.into_inner().unwrap_or_else(|_| Err("a thread panicked".to_owned()))?;
        let of_ids = |test: &Test| -> Vec<u64> {
            test.reached.iter().map(|number| scratch.mutants[*number as usize].id).collect()
        };
        let document: Vec<Value> = tests
            .iter()
            .map(|test: &Test| {
                json!({ "program": test.name.program, "test": test.name.test, "seconds": test.seconds, "reached": of_ids(test) })
            })
            .collect();
        let document = json!({ "version": scratch.version, "tests": document });
        std::fs::write(&file, document.to_string())
            .map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(Self::new(tests, scratch.mutants.len()))
    }

    fn new(mut tests: Vec<Test>, mutants: usize) -> Self {
        tests.retain(|test| !test.reached.is_empty());
        tests.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut of_mutant = vec![Vec::new(); mutants];
        for (index, test) in tests.iter().enumerate() {
            for number in &test.reached {
                of_mutant[*number as usize].push(index);
            }
        }
        Self { tests, of_mutant }
    }
}

fn read(file: &Path, scratch: &Scratch) -> Option<Vec<Test>> {
    let document: Value = serde_json::from_str(&std::fs::read_to_string(file).ok()?).ok()?;
    if document["version"] != scratch.version {
        return None;
    }
    let numbers: std::collections::BTreeMap<u64, u32> =
        (0..).zip(&scratch.mutants).map(|(number, mutant): (u32, &Mutant)| (mutant.id, number)).collect();
    let tests = document["tests"].as_array()?.iter().map(|test| {
        let reached = test["reached"].as_array()?.iter();
        let reached = reached.map(|id| numbers.get(&id.as_u64()?).copied()).collect::<Option<_>>()?;
        let text = |name: &str| test[name].as_str().map(str::to_owned);
        let name = Killer { program: text("program")?, test: text("test")? };
        Some(Test { name, seconds: test["seconds"].as_f64()?, reached })
    });
    tests.collect()
}

/// The tests of a program.
fn list(program: &Program) -> Result<Vec<String>, String> {
    let mut command = Command::new(&program.path);
    command.args(["--list", "--format", "terse"]).current_dir(&program.directory);
    let text = shell::output_of(&mut command, LIMIT.time)
        .map_err(|end| format!("{} does not list its tests: {end}", program.name))?;
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

fn run(program: &Program, test: &str, record: &Path) -> Result<Test, String> {
    let path = record.to_string_lossy().into_owned();
    for _ in 0..2 {
        std::fs::write(record, []).map_err(|error| format!("{path}: {error}"))?;
        let begun = Instant::now();
        if suite::run(program, &[SHORT, (RECORD, &path)], &[test], LIMIT) == Outcome::Passed {
            let seconds = begun.elapsed().as_secs_f64();
            let bytes = std::fs::read(record).map_err(|error| format!("{path}: {error}"))?;
            let reached = (0..).zip(bytes).filter(|(_, byte)| *byte != 0).map(|(number, _)| number).collect();
            let name = Killer { program: program.name.clone(), test: test.to_owned() };
            return Ok(Test { name, seconds, reached });
        }
    }
    Err(format!("{} {test} fails without a mutant", program.name))
}
