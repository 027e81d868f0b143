//! Which test reaches which mutant: each test runs once by itself, without a mutant, and the switches note their numbers.

use super::scratch::{Mutant, SHORT, Scratch};
use crate::mutants::AT_ONCE;
use crate::mutants::killers::Killer;
use crate::mutants::suite::{self, Limits, Outcome, Program};
use crate::shell;
use cbd_types::mutation::generated::RECORD;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The limit of a test without a mutant.
const LIMIT: Limits = Limits { time: Duration::from_secs(600), processor: None, threads: 1 };

/// Programs that are left out: one reads the sources, which have other texts in the copy; what the other one finds depends
/// on the scheduling of threads, so its failures cannot be repeated.
const LEFT_OUT: [&str; 2] = [suite::OF_SOURCES[0], "cbd-sim/threads_agree_with_the_oracle"];

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
        let path = scratch.directory.join("reach.jsonl");
        let mut known = read(&path, scratch);
        known.retain(|test| !LEFT_OUT.contains(&test.name.program.as_str()));
        let mut waiting = Vec::new();
        for program in programs.iter().filter(|program| !LEFT_OUT.contains(&program.name.as_str())) {
            let is_new = |test: &String| {
                !known.iter().any(|known| known.name.program == program.name && known.name.test == *test)
            };
            waiting.extend(list(program)?.into_iter().filter(is_new).map(|test| (program, test)));
        }
        if !waiting.is_empty() {
            eprintln!("{} tests run without a mutant", waiting.len());
        }
        let header = json!({ "version": scratch.version }).to_string();
        let lines: Vec<String> =
            std::iter::once(header).chain(known.iter().map(|test| line(test, scratch))).collect();
        let file = File::create(&path)
            .and_then(|mut file| file.write_all(format!("{}\n", lines.join("\n")).as_bytes()).map(|()| file))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let waiting = Mutex::new(waiting);
        let next = || waiting.lock().ok()?.pop();
        let found = Mutex::new((file, known, Vec::new()));
        std::thread::scope(|scope| {
            for worker in 0..AT_ONCE {
                let record = scratch.directory.join(format!("reached.{worker}"));
                let (next, found) = (&next, &found);
                scope.spawn(move || {
                    while let Some((program, test)) = next() {
                        let one = run(program, &test, &record);
                        let Ok(mut found) = found.lock() else { return };
                        match one {
                            Ok(one) => {
                                // What is not stored runs again the next time.
                                let _ = writeln!(found.0, "{}", line(&one, scratch));
                                found.1.push(one);
                            }
                            Err(error) => found.2.push(error),
                        }
                    }
                });
            }
        });
        let (_, tests, errors) = found.into_inner().map_err(|_| "a thread panicked".to_owned())?;
        if errors.is_empty() { Ok(Self::new(tests, scratch.mutants.len())) } else { Err(errors.join("\n")) }
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

/// A test as a line of the file; mutants by their ids.
fn line(test: &Test, scratch: &Scratch) -> String {
    let reached: Vec<u64> = test.reached.iter().map(|number| scratch.mutants[*number as usize].id).collect();
    let Killer { program, test: name } = &test.name;
    json!({ "program": program, "test": name, "seconds": test.seconds, "reached": reached }).to_string()
}

/// The tests that have run with the same sources.
fn read(path: &Path, scratch: &Scratch) -> Vec<Test> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    if lines.next().is_none_or(|header| header["version"] != scratch.version) {
        return Vec::new();
    }
    let numbers: BTreeMap<u64, u32> =
        (0..).zip(&scratch.mutants).map(|(number, mutant): (u32, &Mutant)| (mutant.id, number)).collect();
    let test = |line: Value| -> Option<Test> {
        let reached = line["reached"].as_array()?.iter();
        let reached = reached.map(|id| numbers.get(&id.as_u64()?).copied()).collect::<Option<_>>()?;
        let text = |name: &str| line[name].as_str().map(str::to_owned);
        let name = Killer { program: text("program")?, test: text("test")? };
        Some(Test { name, seconds: line["seconds"].as_f64()?, reached })
    };
    lines.filter_map(test).collect()
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
