//! Runs tests on mutants, and stores each result.
//!
//! Invariants: a mutant runs only against tests that reach it, in processes with limits of time and memory; a test kills
//! it if it fails, dies or hangs twice; a result counts only for the sources that it was found with.

use super::reach::{Reach, Test};
use super::scratch::{Mutant, SHORT, Scratch};
use crate::mutants::AT_ONCE;
use crate::mutants::killers::Killer;
use crate::mutants::suite::{self, Limits, Outcome, Program};
use cbd_types::mutation::generated::CHOICE;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Tests up to these durations run in processes of their own before the slower ones, in seconds.
const TIERS: [f64; 4] = [0.05, 0.2, 0.7, LONGEST];

/// Number of tests that are tried first because they killed others of the same function.
const OF_FUNCTION: usize = 3;
/// Number of tests that are tried next because they killed most in the shortest time.
const OF_ALL: usize = 10;
/// With fewer kills a test is not yet among them.
const ENOUGH: usize = 3;
/// Tests that take longer without a mutant, in seconds, do not run on mutants: what they alone find is not worth the hours.
const LONGEST: f64 = 2.0;

/// Seconds that a process costs besides its test.
const OVERHEAD: f64 = 0.05;

/// What became of a mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// This test failed twice.
    Killed(Killer),
    /// All tests that reach it and were tried passed.
    Survived,
    /// No test reaches it.
    Unreached,
}

/// The results so far.
#[derive(Default)]
struct Results {
    verdicts: BTreeMap<u64, Verdict>,
    /// What killed the mutant in other sources.
    before: BTreeMap<u64, Killer>,
    /// How many mutants of a function each test killed.
    popular: BTreeMap<String, BTreeMap<Killer, usize>>,
    /// How many mutants each test killed.
    all: BTreeMap<Killer, usize>,
}

/// The trials.
pub struct Trials<'a> {
    scratch: &'a Scratch,
    programs: &'a [Program],
    reach: &'a Reach,
    results: Mutex<Results>,
    file: Mutex<File>,
}

impl<'a> Trials<'a> {
    /// Reads the results of earlier runs.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn new(scratch: &'a Scratch, programs: &'a [Program], reach: &'a Reach) -> Result<Self, String> {
        let path = scratch.directory.join("results.jsonl");
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let results = Results::read(&text, scratch);
        let header = json!({ "version": scratch.version }).to_string();
        let mut lines = vec![header];
        lines.extend(results.verdicts.iter().map(|(id, verdict)| line(*id, verdict)));
        lines.extend(results.before.iter().map(|(id, killer)| {
            json!({ "id": id, "before": true, "program": killer.program, "test": killer.test }).to_string()
        }));
        let file = File::create(&path)
            .and_then(|mut file| file.write_all(format!("{}\n", lines.join("\n")).as_bytes()).map(|()| file))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self { scratch, programs, reach, results: Mutex::new(results), file: Mutex::new(file) })
    }

    /// Tries these mutants, several at a time, and calls `told` with each verdict and the seconds that it took.
    pub fn run(
        &self,
        numbers: &[u32],
        told: &(dyn Fn(usize, &Mutant, &Verdict, f64) + Sync),
    ) -> BTreeMap<u32, Verdict> {
        let next = AtomicUsize::new(0);
        let verdicts = Mutex::new(BTreeMap::new());
        std::thread::scope(|scope| {
            for _ in 0..AT_ONCE {
                scope.spawn(|| {
                    while let Some(number) = numbers.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let mutant = &self.scratch.mutants[*number as usize];
                        let begun = Instant::now();
                        let verdict = self.verdict(*number, mutant);
                        if let Ok(mut verdicts) = verdicts.lock() {
                            verdicts.insert(*number, verdict.clone());
                            told(verdicts.len(), mutant, &verdict, begun.elapsed().as_secs_f64());
                        }
                    }
                });
            }
        });
        verdicts.into_inner().unwrap_or_default()
    }

    fn verdict(&self, number: u32, mutant: &Mutant) -> Verdict {
        let known = self.results.lock().ok().and_then(|known| known.verdicts.get(&mutant.id).cloned());
        if let Some(known) = known {
            return known;
        }
        let verdict = self.try_one(number, mutant);
        if let Ok(mut file) = self.file.lock() {
            // What is not stored is tried again by the next run.
            let _ = writeln!(file, "{}", line(mutant.id, &verdict));
        }
        if let (Verdict::Killed(killer), Ok(mut results)) = (&verdict, self.results.lock()) {
            results.count(mutant, killer);
        }
        verdict
    }

    fn try_one(&self, number: u32, mutant: &Mutant) -> Verdict {
        let reached = self.reach.of_mutant[number as usize].iter().map(|index| &self.reach.tests[*index]);
        let mut left: Vec<&Test> = reached.collect();
        if left.is_empty() {
            return Verdict::Unreached;
        }
        left.retain(|test| test.seconds < LONGEST);
        let choice = number.to_string();
        let variables = [SHORT, (CHOICE, choice.as_str())];
        let first = self.results.lock().map(|results| results.first(mutant, &left)).unwrap_or_default();
        for test in first {
            left.retain(|other| other.name != test.name);
            let Some(program) = self.program(&test.name.program) else { continue };
            if suite::fails_twice(program, &variables, &test.name.test, limits(&[test])) {
                return Verdict::Killed(test.name.clone());
            }
        }
        let mut begin = 0.0;
        for end in TIERS {
            let tier = left.iter().filter(|test| (begin..end).contains(&test.seconds));
            let mut groups: BTreeMap<&str, Vec<&Test>> = BTreeMap::new();
            for test in tier {
                groups.entry(&test.name.program).or_default().push(test);
            }
            let mut groups: Vec<_> = groups.into_iter().collect();
            groups.sort_by(|(_, a), (_, b)| seconds(a).total_cmp(&seconds(b)));
            for (name, tests) in groups {
                if let Some(program) = self.program(name)
                    && let Some(killer) = kills(program, &variables, tests)
                {
                    return Verdict::Killed(killer);
                }
            }
            begin = end;
        }
        Verdict::Survived
    }

    fn program(&self, name: &str) -> Option<&Program> {
        self.programs.iter().find(|program| program.name == name)
    }
}

/// The first of these tests of a program that kills the mutant.
fn kills(program: &Program, variables: &[(&str, &str)], mut tests: Vec<&Test>) -> Option<Killer> {
    while !tests.is_empty() {
        let names: Vec<&str> = tests.iter().map(|test| test.name.test.as_str()).collect();
        let Outcome::Failed(failed) = suite::run(program, variables, &names, limits(&tests)) else {
            return None;
        };
        let killer = Killer { program: program.name.clone(), test: failed.clone() };
        let Some(at) = tests.iter().position(|test| test.name.test == failed) else {
            // The program died between two tests; does it again?
            let again = suite::run(program, variables, &names, limits(&tests));
            return (again != Outcome::Passed).then_some(killer);
        };
        let test = tests.remove(at);
        if suite::run(program, variables, &[&failed], limits(&[test])) != Outcome::Passed {
            return Some(killer);
        }
    }
    None
}

fn seconds(tests: &[&Test]) -> f64 {
    tests.iter().map(|test| test.seconds).sum()
}

/// What a program that runs these tests never needs without a mutant.
fn limits(tests: &[&Test]) -> Limits {
    let seconds = seconds(tests);
    Limits {
        time: Duration::from_secs_f64(20.0 + 20.0 * seconds),
        processor: Some((3.0 + 5.0 * seconds).ceil() as u64),
        threads: 1,
    }
}

fn line(id: u64, verdict: &Verdict) -> String {
    match verdict {
        Verdict::Killed(killer) => {
            json!({ "id": id, "verdict": "killed", "program": killer.program, "test": killer.test })
        }
        Verdict::Survived => json!({ "id": id, "verdict": "survived" }),
        Verdict::Unreached => json!({ "id": id, "verdict": "unreached" }),
    }
    .to_string()
}

impl Results {
    /// Reads lines; verdicts of other sources are hints only.
    fn read(text: &str, scratch: &Scratch) -> Self {
        let mut results = Self::default();
        let mut is_same = false;
        let mutants: BTreeMap<u64, &Mutant> =
            scratch.mutants.iter().map(|mutant| (mutant.id, mutant)).collect();
        for value in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            if let Some(version) = value["version"].as_u64() {
                is_same = version == scratch.version;
            }
            let Some((id, mutant)) = value["id"].as_u64().and_then(|id| Some((id, mutants.get(&id)?))) else {
                continue;
            };
            let killer = value["test"]
                .as_str()
                .zip(value["program"].as_str())
                .map(|(test, program)| Killer { program: program.to_owned(), test: test.to_owned() });
            if let Some(killer) = &killer {
                results.count(mutant, killer);
                results.before.insert(id, killer.clone());
            }
            let verdict = match (value["verdict"].as_str(), killer) {
                (Some("killed"), Some(killer)) => Verdict::Killed(killer),
                (Some("survived"), _) => Verdict::Survived,
                (Some("unreached"), _) => Verdict::Unreached,
                _ => continue,
            };
            if is_same {
                results.before.remove(&id);
                results.verdicts.insert(id, verdict);
            }
        }
        results
    }

    fn count(&mut self, mutant: &Mutant, killer: &Killer) {
        let of_function = self.popular.entry(mutant.candidate.function.clone()).or_default();
        *of_function.entry(killer.clone()).or_default() += 1;
        *self.all.entry(killer.clone()).or_default() += 1;
    }

    /// The tests to begin with: what killed the mutant before, what killed most of the same function, and what killed most
    /// of all in its time.
    fn first<'a>(&self, mutant: &Mutant, tests: &[&'a Test]) -> Vec<&'a Test> {
        let of_function = self.popular.get(&mutant.candidate.function);
        let kills = |test: &Test| of_function.and_then(|known| known.get(&test.name)).copied().unwrap_or(0);
        let mut neighbours: Vec<&Test> = tests.iter().copied().filter(|test| kills(test) > 0).collect();
        neighbours.sort_by_key(|test| std::cmp::Reverse(kills(test)));
        let score = |test: &Test| match self.all.get(&test.name) {
            Some(kills) if *kills >= ENOUGH => *kills as f64 / (test.seconds + OVERHEAD),
            _ => 0.0,
        };
        let mut best: Vec<&Test> = tests.iter().copied().filter(|test| score(test) > 0.0).collect();
        best.sort_by(|a, b| score(b).total_cmp(&score(a)));
        let before = tests.iter().copied().filter(|test| self.before.get(&mutant.id) == Some(&test.name));
        let mut first: Vec<&Test> = Vec::new();
        for test in
            before.chain(neighbours.into_iter().take(OF_FUNCTION)).chain(best.into_iter().take(OF_ALL))
        {
            if !first.iter().any(|other| other.name == test.name) {
                first.push(test);
            }
        }
        first
    }
}
