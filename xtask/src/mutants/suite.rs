//! The tests that run against mutants: built once, run with a mutant in the environment.
//!
//! Invariants: a program has limits of time and memory that it never needs without a mutant, and is killed
//! when it exceeds them; that counts as caught, as a failing test does.

use super::killers::Killer;
use crate::shell;
use crate::workspace::{self, cargo};
use cbd_types::MutationPoint;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The packages whose tests run: those that hold the mutation points, and those that test them.
const PACKAGES: [&str; 8] = [
    "cbd-types",
    "cbd-format",
    "cbd-pmem",
    "cbd-engine",
    "cbd-device",
    "cbd-sim",
    "cbd-inspect",
    "cbd-models",
];

/// This program runs last, however quick it is: its findings depend on the scheduling of threads.
const LAST: &str = "cbd-sim/threads_agree_with_the_oracle";

/// No program of the suite takes this long alone.
const LIMIT: Duration = Duration::from_secs(150);
/// The limit of a single test that failed or was a killer before.
const LIMIT_OF_ONE: Duration = Duration::from_secs(60);

/// Number of runs of a program in which a test fails only once.
const TRIES: u32 = 3;

/// Kilobytes of address space: a mutant may allocate any length.
const MEMORY_KIB: u64 = 6 << 20;

const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// The result of a run of tests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All passed.
    Passed,
    /// This test failed, or was running when the program died or was killed.
    Failed(String),
}

/// A program of tests.
#[derive(Clone, Debug)]
struct Program {
    name: String,
    path: PathBuf,
    directory: PathBuf,
}

/// All programs; after a run without a mutant, in the order of their duration.
pub struct Suite {
    programs: Vec<Program>,
}

impl Suite {
    /// Builds the tests with the feature that lets the environment choose, below a target directory of their
    /// own.
    ///
    /// # Errors
    /// The messages of cargo.
    pub fn build() -> Result<Self, String> {
        let target = workspace::target_directory()?.join("mutants");
        let mut command = cargo(["test", "--no-run", "--message-format", "json"]);
        command.args(["--features", "cbd-types/mutants"]).arg("--target-dir").arg(&target);
        for package in PACKAGES {
            command.args(["--package", package]);
        }
        let text = shell::output_of(&mut command, BUILD_LIMIT)
            .map_err(|end| format!("the tests do not build: {end}"))?;
        let programs: Vec<Program> = text.lines().filter_map(program).collect();
        if programs.is_empty() {
            return Err("cargo built no test".to_owned());
        }
        Ok(Self { programs })
    }

    /// Checks that the tests which are to catch mutants pass without one: those of `killers`, or all. Sorts
    /// the programs by their duration.
    ///
    /// # Errors
    /// A test that fails without a mutant.
    pub fn check_without_mutant(&mut self, killers: Option<&[Killer]>) -> Result<(), String> {
        let mut took = BTreeMap::new();
        for program in &self.programs {
            let mut tests: Vec<&str> = killers
                .unwrap_or_default()
                .iter()
                .filter(|killer| killer.program == program.name)
                .map(|killer| killer.test.as_str())
                .collect();
            tests.sort_unstable();
            tests.dedup();
            if tests.is_empty() && killers.is_some() {
                continue;
            }
            let begun = Instant::now();
            if let Outcome::Failed(test) = run(program, None, &tests, LIMIT) {
                return Err(format!("{} {test} fails without a mutant", program.name));
            }
            took.insert(program.name.clone(), begun.elapsed());
        }
        self.programs.sort_by_key(|program| {
            (program.name == LAST, took.get(&program.name).copied().unwrap_or_default())
        });
        Ok(())
    }

    /// Whether a test catches a mutant: it must fail twice, since a test may fail once for another reason.
    pub fn catches(&self, killer: &Killer, mutant: MutationPoint) -> bool {
        let program = self.programs.iter().find(|program| program.name == killer.program);
        let fails = |program| run(program, Some(mutant), &[&killer.test], LIMIT_OF_ONE) != Outcome::Passed;
        program.is_some_and(|program| fails(program) && fails(program))
    }

    /// Runs all tests up to the first that catches the mutant.
    pub fn run_all(&self, mutant: MutationPoint) -> Option<Killer> {
        self.programs.iter().find_map(|program| {
            (0..TRIES).find_map(|_| {
                let Outcome::Failed(test) = run(program, Some(mutant), &[], LIMIT) else { return Some(None) };
                let killer = Killer { program: program.name.clone(), test };
                self.catches(&killer, mutant).then_some(Some(killer))
            })?
        })
    }
}

/// The test program in a line of cargo's messages.
fn program(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let path = PathBuf::from(message["executable"].as_str()?);
    let directory = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned();
    let package = format!("cbd-{}", directory.file_name()?.to_str()?);
    let target = message["target"]["name"].as_str()?.replace('_', "-");
    let name = if target == package { package } else { format!("{package}/{}", target.replace('-', "_")) };
    Some(Program { name, path, directory })
}

/// Runs `tests` of a program, or all of them, up to the first that fails. A program that dies or hangs runs
/// again, one test at a time, to find the test.
fn run(program: &Program, mutant: Option<MutationPoint>, tests: &[&str], limit: Duration) -> Outcome {
    match run_once(program, mutant, tests, limit, 2) {
        Ended::Passed => Outcome::Passed,
        Ended::Failed(test) => Outcome::Failed(test),
        Ended::Died(_) if tests.len() == 1 => Outcome::Failed(tests[0].to_owned()),
        Ended::Died(_) => match run_once(program, mutant, tests, limit, 1) {
            Ended::Failed(test) | Ended::Died(Some(test)) => Outcome::Failed(test),
            Ended::Died(None) | Ended::Passed => Outcome::Failed("(died)".to_owned()),
        },
    }
}

/// How a run of a program ended.
enum Ended {
    Passed,
    Failed(String),
    /// It died, or was killed at its time limit; in this test, if only one ran at a time.
    Died(Option<String>),
}

fn run_once(
    program: &Program,
    mutant: Option<MutationPoint>,
    tests: &[&str],
    limit: Duration,
    threads: u32,
) -> Ended {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -v \"$1\"; shift; exec \"$@\"", "sh", &MEMORY_KIB.to_string()]);
    command.arg(&program.path).args(["--test-threads", &threads.to_string()]);
    if !tests.is_empty() {
        command.arg("--exact").args(tests);
    }
    command
        .current_dir(&program.directory)
        .env("CBD_MUTANT", mutant.map_or("", MutationPoint::name))
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0);
    let Ok(mut child) = command.spawn() else { return Ended::Died(None) };
    let begun = Instant::now();
    let (sender, lines) = channel();
    if let Some(output) = child.stdout.take() {
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
    }
    let mut is_late = false;
    let mut unfinished = None;
    loop {
        match lines.recv_timeout(limit.saturating_sub(begun.elapsed()).max(Duration::from_millis(1))) {
            Ok(line) => {
                let Some(text) = line.strip_prefix("test ") else { continue };
                if let Some(test) = text.strip_suffix(" ... FAILED") {
                    end(&mut child);
                    return Ended::Failed(test.to_owned());
                }
                unfinished = text.strip_suffix(" ... ").map(str::to_owned);
            }
            Err(RecvTimeoutError::Timeout) if !is_late => {
                is_late = true;
                end(&mut child);
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    match child.wait() {
        Ok(status) if status.success() && !is_late => Ended::Passed,
        _ => Ended::Died(unfinished),
    }
}

/// Kills a program and all that it started.
fn end(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}
