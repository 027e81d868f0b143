//! Runs the test programs of the workspace, several at a time: most tests wait for an event and leave processors idle.
//!
//! Invariants: the output of a program is passed on without a break, once the program has ended. Every program runs to its end,
//! whatever the others do.
//!
//! Elsewhere: tests that bind loop devices take a lock for them (`cbd_testkit::loop_devices`). Without it they would have to run
//! in one lane; with it, the lane only keeps them from waiting for each other.

use crate::mutants::suite::{self, Program};
use crate::shell::{self, Stream};
use crate::workspace::cargo_with_lock;
use std::collections::VecDeque;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The programs of this package run before all others and one at a time: they expect that no other program sends a request to
/// their devices, and requests have been seen when others ran.
const ALONE: &str = "cbd-fuse";

/// Programs whose tests lock the loop devices. They run one after the other, beside the others.
const OF_LOOP_DEVICES: [&str; 13] = [
    "cbd-blkverify/loop_devices",
    "cbd-cbdctrl/disks_that_fail",
    "cbd-cbdctrl/doctor",
    "cbd-cbdctrl/file_systems",
    "cbd-cbdctrl/grows",
    "cbd-cbdctrl/pins",
    "cbd-cbdctrl/killed_under_fio",
    "cbd-cbdctrl/killed_with_a_file_system",
    "cbd-cbdctrl/limits",
    "cbd-cbdctrl/names",
    "cbd-cbdctrl/outlives",
    "cbd-cbdctrl/restart",
    "cbd-cbdctrl/verifies",
];

/// The longest of the other programs. They begin first, so that none of them runs alone at the end.
const LONGEST: [&str; 4] = ["cbd-cbdctrl/demo", "cbd-daemon/manager", "cbd-daemon", "cbd-libcbd/installed"];

/// Programs that run at once: one of loop devices, the others not. Their tests use a fraction of a processor each.
const AT_ONCE: usize = 3;

/// Tests of a program that run at once; as many as the processors, if these are more.
pub const TESTS_AT_ONCE: usize = 4;

/// The time limits of the programs.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of all together.
    pub all: Duration,
    /// Of each: a program that hangs does not use up the time of those after it.
    pub each: Duration,
}

/// A program to run.
pub struct Job {
    /// Its name in the output, such as `cbd-sim/damage`.
    pub name: String,
    /// The command that runs it.
    pub command: Command,
}

/// Builds all tests.
///
/// # Errors
/// The end of cargo, as text.
pub fn build(limit: Duration, mut line: impl FnMut(&str)) -> Result<Vec<Program>, String> {
    let mut command = cargo_with_lock(["test", "--workspace", "--no-run"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    let mut programs = Vec::new();
    let end = shell::run(&mut command, limit, |stream, text| match stream {
        Stream::Output => programs.extend(suite::program(text)),
        Stream::Error => line(text),
    });
    if end.is_success() { Ok(programs) } else { Err(end.to_string()) }
}

/// The programs to run, in order.
#[derive(Default)]
pub struct Jobs {
    alone: Vec<Job>,
    of_loop_devices: VecDeque<Job>,
    others: VecDeque<Job>,
}

impl Jobs {
    /// Runs these programs and the tests in documentation, with the `arguments` of the test harness.
    pub fn new(programs: &[Program], arguments: &[&str]) -> Self {
        let mut jobs = Self::default();
        for program in programs {
            let mut command = Command::new(&program.path);
            command.args(arguments).current_dir(&program.directory);
            // As cargo sets it; here it has the value for xtask.
            command.env("CARGO_MANIFEST_DIR", &program.directory);
            let job = Job { name: program.name.clone(), command };
            let package = job.name.split('/').next().unwrap_or_default();
            if package == ALONE {
                jobs.alone.push(job);
            } else if OF_LOOP_DEVICES.contains(&job.name.as_str()) {
                jobs.of_loop_devices.push_back(job);
            } else {
                jobs.others.push_back(job);
            }
        }
        let mut command = cargo_with_lock(["test", "--workspace", "--doc", "--no-fail-fast"]);
        command.arg("--").args(arguments);
        jobs.others.push_back(Job { name: "documentation".to_owned(), command });
        let rank = |job: &Job| LONGEST.iter().position(|name| job.name == *name).unwrap_or(LONGEST.len());
        jobs.others.make_contiguous().sort_by_key(rank);
        jobs
    }

    /// All commands, to change their environment.
    pub fn commands(&mut self) -> impl Iterator<Item = &mut Command> {
        let jobs = self.alone.iter_mut().chain(&mut self.of_loop_devices).chain(&mut self.others);
        jobs.map(|job| &mut job.command)
    }

    /// Runs all of them and passes on every line. Returns the names of those that failed.
    pub fn run(mut self, limits: Limits, line: impl FnMut(&str) + Send) -> Vec<String> {
        let (end, limit) = (Instant::now() + limits.all, limits.each);
        let (line, failed) = (Mutex::new(line), Mutex::new(Vec::new()));
        for job in self.alone.drain(..) {
            let name = job.name.clone();
            if !run_one(job, end, limit, &line) {
                lock(&failed).push(name);
            }
        }
        let jobs = Mutex::new(self);
        thread::scope(|scope| {
            for number in 0..AT_ONCE {
                let (jobs, line, failed) = (&jobs, &line, &failed);
                scope.spawn(move || {
                    // A lock in the condition of the loop would be held while the program runs.
                    let next = || lock(jobs).next(number == 0);
                    while let Some(job) = next() {
                        let name = job.name.clone();
                        if !run_one(job, end, limit, line) {
                            lock(failed).push(name);
                        }
                    }
                });
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&mut self, is_lane_of_loop_devices: bool) -> Option<Job> {
        let job = if is_lane_of_loop_devices { self.of_loop_devices.pop_front() } else { None };
        job.or_else(|| self.others.pop_front())
    }
}

/// Whether the program ends with success within `limit` and before `end`.
fn run_one(mut job: Job, end: Instant, limit: Duration, line: &Mutex<impl FnMut(&str)>) -> bool {
    let begun = Instant::now();
    let mut lines = Vec::new();
    let left = end.saturating_duration_since(begun);
    let outcome = shell::run_beside(&mut job.command, left.min(limit), |_, text| lines.push(text.to_owned()));
    let mut line = lock(line);
    line(&format!("     Running {}: {:.1} s", job.name, begun.elapsed().as_secs_f64()));
    lines.iter().for_each(|text| line(text));
    if !outcome.is_success() {
        line(&format!("    {}: {outcome}", job.name));
    }
    outcome.is_success()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn shell(name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job { name: name.to_owned(), command }
    }

    fn run_all(jobs: Vec<Job>) -> (Vec<String>, Vec<String>) {
        let mut lines = Vec::new();
        let jobs = Jobs { others: jobs.into(), ..Jobs::default() };
        let limits = Limits { all: Duration::from_secs(60), each: Duration::from_secs(60) };
        let failed = jobs.run(limits, |line| lines.push(line.to_owned()));
        (lines, failed)
    }

    #[test]
    fn the_output_of_a_program_is_not_broken_by_that_of_another() {
        let script = "for number in 1 2 3; do echo line; sleep 0.05; done";
        let (lines, failed) = run_all(vec![shell("one", script), shell("other", script)]);
        let is_heading = |line: &String| line.contains("Running");
        assert_eq!(lines.iter().map(is_heading).collect::<Vec<_>>(), [true, false, false, false].repeat(2));
        assert_eq!(failed, [""; 0]);
    }

    #[test]
    fn a_program_that_fails_is_named_and_the_others_run() {
        let (lines, mut failed) =
            run_all(vec![shell("bad", "exit 3"), shell("died", "kill $$"), shell("good", "echo good")]);
        assert!(lines.contains(&"good".to_owned()), "{lines:?}");
        failed.sort();
        assert_eq!(failed, ["bad", "died"]);
    }

    #[test]
    fn programs_run_at_the_same_time() {
        let folder = tempfile::tempdir().expect("a folder");
        // Each waits for the file that the other one makes.
        let meet = |own: &str, other: &str| {
            let folder = folder.path().display();
            format!(
                "touch {folder}/{own}; for number in $(seq 500); do \
                 test -e {folder}/{other} && exit 0; sleep 0.1; done; exit 1"
            )
        };
        assert_eq!(run_all(vec![shell("a", &meet("a", "b")), shell("b", &meet("b", "a"))]).1, [""; 0]);
    }

    #[test]
    fn programs_of_loop_devices_have_a_lane_of_their_own_and_the_longest_of_the_others_begin() {
        let program = |name: &str| Program {
            name: name.to_owned(),
            path: PathBuf::from("/nonexistent"),
            directory: PathBuf::from("/"),
        };
        let programs =
            ["cbd-sim/damage", "cbd-fuse/lifetime", "cbd-fuse", "cbd-cbdctrl/outlives", "cbd-cbdctrl/demo"];
        let jobs = Jobs::new(&programs.map(program), &[]);
        let names = |jobs: VecDeque<Job>| jobs.into_iter().map(|job| job.name).collect::<Vec<_>>();
        assert_eq!(names(jobs.alone.into()), ["cbd-fuse/lifetime", "cbd-fuse"]);
        assert_eq!(names(jobs.of_loop_devices), ["cbd-cbdctrl/outlives"]);
        assert_eq!(names(jobs.others), ["cbd-cbdctrl/demo", "cbd-sim/damage", "documentation"]);
    }
}
