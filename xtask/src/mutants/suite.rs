//! The tests that run against mutants: built once, run with a mutant in the environment.
//!
//! Invariants: a program has limits of time and memory that it never needs without a mutant, and is killed
//! when it exceeds them; that counts as caught, as a failing test does.

use super::copy::{self, Copy};
use super::killers::Killer;
use super::written::{self, Written};
use crate::tidy::tree;
use crate::workspace::{self, cargo};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The packages whose tests run: those that the mutants change, and those that test them.
const PACKAGES: [&str; 14] = [
    "cbd-types",
    "cbd-format",
    "cbd-pmem",
    "cbd-engine",
    "cbd-device",
    "cbd-backing",
    "cbd-runtime",
    "cbd-channel",
    "cbd-remote",
    "cbd-vhost",
    "cbd-sim",
    "cbd-inspect",
    "cbd-daemon",
    "cbd-models",
];

/// Of this package only tests that are known to catch a mutant run: its programs take minutes.
const BY_NAME: &str = "cbd-daemon";

/// This program runs last, however quick it is: its findings depend on the scheduling of threads.
const LAST: &str = "cbd-sim/threads_agree_with_the_oracle";

/// Programs that read the sources, which have other texts in a copy: they find no mutant.
pub const OF_SOURCES: [&str; 1] = ["cbd-types/mutation_points_are_used"];

/// No program of the suite takes this long alone.
const LIMIT: Duration = Duration::from_secs(150);
/// The limit of a single test that failed or was a killer before.
const LIMIT_OF_ONE: Duration = Duration::from_secs(60);

/// Number of runs of a program in which a test fails only once.
const TRIES: u32 = 3;

/// Kilobytes of private memory: a mutant may allocate any length. A region reserves addresses for its growth, which are none.
const MEMORY_KIB: u64 = 6 << 20;

/// The limit of a build of the tests.
pub const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// The variable that names the mutant.
const MUTANT: &str = "CBD_MUTANT";

/// What a run of a program may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Until it is killed.
    pub time: Duration,
    /// Seconds of processor time.
    pub processor: Option<u64>,
    /// Threads that run tests at the same time.
    pub threads: u32,
}

impl Limits {
    const fn of(time: Duration) -> Self {
        Self { time, processor: None, threads: 2 }
    }
}

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
pub struct Program {
    /// The package and the name of the program, such as `cbd-sim/damage`.
    pub name: String,
    /// The executable.
    pub path: PathBuf,
    /// Where it runs: the package's directory.
    pub directory: PathBuf,
}

impl Program {
    fn is_by_name(&self) -> bool {
        self.name.split('/').next() == Some(BY_NAME)
    }
}

/// All programs; after a run without a mutant, in the order of their duration.
pub struct Suite {
    programs: Vec<Program>,
}

impl Suite {
    /// Copies the workspace, with switches of the `written` mutants, and builds the tests with the feature that lets the
    /// environment choose.
    ///
    /// # Errors
    /// A written mutant that does not fit the sources, a file that cannot be copied, the messages of the compiler.
    pub fn build(written: &[Written]) -> Result<Self, String> {
        let copy = Copy::new(&workspace::target_directory()?.join("mutants/written"));
        let text =
            |file: &str| String::from_utf8(copy::read(file)?).map_err(|error| format!("{file}: {error}"));
        let switched = written::switched(written, text)?;
        let paths = tree::paths()?;
        for path in &paths {
            match switched.get(path) {
                Some(text) => copy.write(path, text.as_bytes())?,
                None => copy.write(path, &copy::read(path)?)?,
            }
        }
        copy.remove_others(&paths)?;
        let (is_success, messages) = copy.run(&mut build_command(&copy.target, &PACKAGES));
        if !is_success {
            return Err(format!("the tests do not build:\n{}", errors(&messages)));
        }
        let programs: Vec<Program> = messages
            .iter()
            .filter_map(|line| program(line))
            .filter(|program| !OF_SOURCES.contains(&program.name.as_str()))
            .collect();
        if programs.is_empty() {
            return Err("cargo built no test".to_owned());
        }
        Ok(Self { programs })
    }

    /// Checks that the tests which are to catch mutants pass without one: those of `killers`, and with `all` those of all programs that
    /// [`run_all`](Self::run_all) runs. Sorts the programs by their duration.
    ///
    /// # Errors
    /// A killer whose program the suite does not have; a test that fails without a mutant.
    pub fn check_without_mutant(&mut self, killers: &[Killer], all: bool) -> Result<(), String> {
        let is_known = |killer: &&Killer| self.programs.iter().any(|program| program.name == killer.program);
        if let Some(unknown) = killers.iter().find(|killer| !is_known(killer)) {
            return Err(format!("{unknown}: the suite has no such program; see PACKAGES"));
        }
        let mut took = BTreeMap::new();
        for program in &self.programs {
            let of_it = killers.iter().filter(|killer| killer.program == program.name);
            let mut tests: Vec<&str> = of_it.map(|killer| killer.test.as_str()).collect();
            tests.sort_unstable();
            tests.dedup();
            if all && !program.is_by_name() {
                tests.clear();
            } else if tests.is_empty() {
                continue;
            }
            let begun = Instant::now();
            if let Outcome::Failed(test) = run(program, &[(MUTANT, "")], &tests, Limits::of(LIMIT)) {
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
    pub fn catches(&self, killer: &Killer, mutant: &str) -> bool {
        let program = self.programs.iter().find(|program| program.name == killer.program);
        let variables = [(MUTANT, mutant)];
        program
            .is_some_and(|program| fails_twice(program, &variables, &killer.test, Limits::of(LIMIT_OF_ONE)))
    }

    /// Runs all tests up to the first that catches the mutant.
    pub fn run_all(&self, mutant: &str) -> Option<Killer> {
        self.programs.iter().filter(|program| !program.is_by_name()).find_map(|program| {
            (0..TRIES).find_map(|_| {
                let ended = run(program, &[(MUTANT, mutant)], &[], Limits::of(LIMIT));
                let Outcome::Failed(test) = ended else { return Some(None) };
                let killer = Killer { program: program.name.clone(), test };
                self.catches(&killer, mutant).then_some(Some(killer))
            })?
        })
    }
}

/// Cargo's command that builds the tests of `packages` with the feature `mutants`, and prints messages in JSON.
pub fn build_command(target: &Path, packages: &[&str]) -> Command {
    let mut command = cargo(["test", "--no-run", "--message-format", "json"]);
    command.args(["--features", "cbd-types/mutants"]).arg("--target-dir").arg(target);
    for package in packages {
        command.args(["--package", package]);
    }
    command
}

/// The errors of the compiler among cargo's messages, or else all messages.
fn errors(messages: &[String]) -> String {
    let rendered = |line: &String| {
        let value: Value = serde_json::from_str(line).ok()?;
        let message = &value["message"];
        (message["level"] == "error").then(|| message["rendered"].as_str().map(str::to_owned))?
    };
    let found: Vec<String> = messages.iter().filter_map(rendered).collect();
    if found.is_empty() { messages.join("\n") } else { found.join("\n") }
}

/// Whether a test fails twice: it may fail once for another reason than the mutant.
pub fn fails_twice(program: &Program, variables: &[(&str, &str)], test: &str, limits: Limits) -> bool {
    let fails = || run(program, variables, &[test], limits) != Outcome::Passed;
    fails() && fails()
}

/// The test program in a line of cargo's messages.
pub fn program(line: &str) -> Option<Program> {
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

/// Runs `tests` of a program, or all of them, up to the first that fails, with these environment variables. A program
/// that dies or hangs runs again, one test at a time, to find the test.
pub fn run(program: &Program, variables: &[(&str, &str)], tests: &[&str], limits: Limits) -> Outcome {
    match run_once(program, variables, tests, limits) {
        Ended::Passed => Outcome::Passed,
        Ended::Failed(test) => Outcome::Failed(test),
        Ended::Died(_) if tests.len() == 1 => Outcome::Failed(tests[0].to_owned()),
        Ended::Died(Some(test)) if limits.threads == 1 => Outcome::Failed(test),
        Ended::Died(_) => match run_once(program, variables, tests, Limits { threads: 1, ..limits }) {
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

fn run_once(program: &Program, variables: &[(&str, &str)], tests: &[&str], limits: Limits) -> Ended {
    let limit = limits.time;
    let processor = limits.processor.map_or("unlimited".to_owned(), |seconds| seconds.to_string());
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -d \"$1\"; ulimit -t \"$2\"; shift 2; exec \"$@\"", "sh"]);
    command.args([&MEMORY_KIB.to_string(), &processor]);
    command.arg(&program.path).args(["--test-threads", &limits.threads.to_string()]);
    if !tests.is_empty() {
        command.arg("--exact").args(tests);
    }
    command
        .current_dir(&program.directory)
        .envs(variables.iter().copied())
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
