//! `cargo xtask fuzz`: the coverage-guided fuzzer over all targets or one.
//!
//! It uses libFuzzer and the coverage instrumentation of the stable compiler, so neither a nightly compiler nor a cargo plugin is
//! needed. The first build takes minutes and has a target directory of its own.
//!
//! Invariants: an input that fails is kept in `fuzz/regressions`, where every later test replays it, and a command that replays
//! only this input is printed. Only inputs that increase the coverage enter the corpus, and the corpus is reduced to those
//! afterwards. The number of targets that run at once is the number of processors.
//!
//! Elsewhere: the targets (`cbd-fuzz`).

use crate::problem::Problem;
use crate::workspace::{self, cargo_with_lock};
use crate::{packages, shell};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// The names of the targets; a test of `cbd-fuzz` checks them.
pub const TARGETS: [&str; 10] = [
    "recovery",
    "decoders",
    "nbd",
    "virtqueue",
    "guest_memory",
    "fuse",
    "pcache",
    "control",
    "channels",
    "traces",
];

/// The compiler flags that tell libFuzzer which code an input reaches, and which numbers that code compares.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

/// Time limit of a build from scratch on two cores.
const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// Time beyond the limit in which the fuzzer finishes its last input and prints its figures.
const GRACE: Duration = Duration::from_secs(120);

/// An input that takes longer counts as a hang.
const INPUT_LIMIT_S: u64 = 40;

/// The parameters of a fuzz run.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// The names of the targets.
    pub targets: Vec<String>,
    /// Seconds for each target.
    pub seconds: u64,
    /// Whether inputs that increase the coverage are added to the corpus in the tree.
    pub extends_corpus: bool,
}

impl Plan {
    /// All targets, a minute each.
    pub fn all() -> Self {
        Self { targets: TARGETS.map(str::to_owned).to_vec(), seconds: 60, extends_corpus: true }
    }

    /// All targets for `seconds` each, from the present corpus: a test leaves the tree unchanged unless it
    /// finds a failure.
    pub fn check(seconds: u64) -> Self {
        Self { seconds, extends_corpus: false, ..Self::all() }
    }

    /// Reads the options.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option or target, or a value that is not a number.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut plan = Self { targets: Vec::new(), ..Self::all() };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            match argument.as_str() {
                "--seconds" => {
                    let value =
                        rest.next().and_then(|value| value.parse().ok()).filter(|&seconds| seconds > 0);
                    plan.seconds =
                        value.ok_or_else(|| Problem::Usage("--seconds needs a number above 0".to_owned()))?;
                }
                target if TARGETS.contains(&target) => plan.targets.push(target.to_owned()),
                other => {
                    let known = TARGETS.join(", ");
                    return Err(Problem::Usage(format!(
                        "unknown option or target '{other}'; the targets are {known}"
                    )));
                }
            }
        }
        if plan.targets.is_empty() {
            plan.targets = Self::all().targets;
        }
        Ok(plan)
    }
}

/// Builds the fuzzer and runs it on each target of the plan. Returns true if no input failed.
///
/// # Errors
/// When the fuzzer cannot be built or started.
pub fn run(plan: &Plan) -> Result<bool, Problem> {
    if let Err(text) = packages::install_compiler() {
        return Err(Problem::Failed(text));
    }
    let place = Place::find()?;
    println!("building the fuzzer in {}", place.directory.display());
    let end = shell::run(&mut place.build(), BUILD_LIMIT, |_, line| println!("{line}"));
    if !end.is_success() {
        return Err(Problem::Failed(format!("the fuzzer does not build: {end}")));
    }
    let next = AtomicUsize::new(0);
    let jobs = thread::available_parallelism().map_or(1, usize::from).min(plan.targets.len());
    let outcomes: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(|| run_next(&place, plan, &next))).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_else(|_| vec![Ok(false)])).collect()
    });
    outcomes.into_iter().try_fold(true, |sound, outcome| Ok(sound & outcome?))
}

/// Runs targets of the plan that no other thread has taken, beginning with number `next`.
fn run_next(place: &Place, plan: &Plan, next: &AtomicUsize) -> Vec<Result<bool, Problem>> {
    let mut outcomes = Vec::new();
    while let Some(target) = plan.targets.get(next.fetch_add(1, Ordering::Relaxed)) {
        outcomes.push(
            Fuzzer::new(place, target).and_then(|fuzzer| fuzzer.run(plan.seconds, plan.extends_corpus)),
        );
    }
    outcomes
}

/// The command that builds the fuzzer.
///
/// # Errors
/// When cargo does not report its target directory or the host triple.
pub fn build_command() -> Result<Command, Problem> {
    Ok(Place::find()?.build())
}

/// The directory in which the fuzzer is built.
struct Place {
    directory: PathBuf,
    triple: String,
}

impl Place {
    fn find() -> Result<Self, Problem> {
        let target_directory = workspace::target_directory().map_err(Problem::Failed)?;
        let triple = workspace::host_triple().map_err(Problem::Failed)?;
        Ok(Self { directory: target_directory.join("fuzz"), triple })
    }

    fn build(&self) -> Command {
        let mut command = cargo_with_lock([
            "build",
            "--profile",
            "fuzz",
            "--package",
            "cbd-fuzz",
            "--features",
            "libfuzzer",
        ]);
        // With an explicit target, the flags apply only to the fuzzed code, not to build scripts.
        command.args(["--bin", "fuzz", "--target", &self.triple]).arg("--target-dir").arg(&self.directory);
        command.env("RUSTFLAGS", COVERAGE);
        command
    }
}

/// The fuzzer on one target.
struct Fuzzer<'a> {
    program: PathBuf,
    target: &'a str,
    /// The inputs that increased the coverage, kept between runs.
    found: PathBuf,
    /// The part of these inputs that is in the tree.
    corpus: PathBuf,
    /// Inputs that failed.
    broken: PathBuf,
}

impl<'a> Fuzzer<'a> {
    fn new(place: &Place, target: &'a str) -> Result<Self, Problem> {
        let kept = workspace::root().join("fuzz");
        let fuzzer = Self {
            program: place.directory.join(&place.triple).join("fuzz/fuzz"),
            target,
            found: place.directory.join("found").join(target),
            corpus: kept.join("corpus").join(target),
            broken: kept.join("regressions").join(target),
        };
        for folder in [&fuzzer.found, &fuzzer.corpus, &fuzzer.broken] {
            fs::create_dir_all(folder)
                .map_err(|error| Problem::Failed(format!("cannot make {}: {error}", folder.display())))?;
        }
        Ok(fuzzer)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("CBD_FUZZ_TARGET", self.target).env("RUST_BACKTRACE", "1");
        command.current_dir(workspace::root());
        command
    }

    fn run(&self, seconds: u64, extends_corpus: bool) -> Result<bool, Problem> {
        let longest = self.prepare()?;
        let before = self.broken_inputs();
        let mut command = self.command();
        command.args([&self.found, &self.corpus]).args([
            format!("-max_total_time={seconds}"),
            format!("-max_len={longest}"),
            format!("-timeout={INPUT_LIMIT_S}"),
            format!("-artifact_prefix={}/", self.broken.display()),
            "-use_value_profile=1".to_owned(),
            // Inputs are structures: a short one is not simpler than a long one.
            "-len_control=0".to_owned(),
            "-print_final_stats=1".to_owned(),
            "-verbosity=1".to_owned(),
        ]);
        if !extends_corpus {
            // A check uses a fixed seed; the nightly run searches for new inputs.
            command.arg("-seed=1");
        }
        let limit = Duration::from_secs(seconds) + GRACE;
        let mut log = Vec::new();
        let end = shell::run(&mut command, limit, |_, line| log.push(line.to_owned()));
        // Several targets run at once and print to the same log, so the output of a target is printed at once.
        let mut shown = vec![format!("{}: {seconds} s", self.target)];
        if end.is_success() {
            shown.extend(figures(&log).map(|line| format!("    {line}")));
            if extends_corpus {
                shown.push(self.reduce()?);
            }
            println!("{}", shown.join("\n"));
            return Ok(true);
        }
        shown.extend(log[log.len().saturating_sub(60)..].iter().map(|line| format!("    {line}")));
        shown.push(format!("    {}: {end}", self.target));
        for input in self.broken_inputs().iter().filter(|input| !before.contains(input)) {
            let input = input.strip_prefix(workspace::root()).unwrap_or(input);
            shown.push(format!(
                "    kept in the tree; replay it: cargo run -p cbd-fuzz --bin replay -- {} {}",
                self.target,
                input.display()
            ));
        }
        println!("{}", shown.join("\n"));
        Ok(false)
    }

    /// Writes the initial inputs of the target, and returns the maximum length of an input.
    fn prepare(&self) -> Result<u64, Problem> {
        let mut command = self.command();
        command.env("CBD_FUZZ_PREPARE", &self.found);
        let text = shell::output_of(&mut command, GRACE)
            .map_err(|end| Problem::Failed(format!("{}: no inputs to begin with: {end}", self.target)))?;
        text.trim().parse().map_err(|_| {
            Problem::Failed(format!(
                "{}: the fuzzer does not print the length of an input: {text}",
                self.target
            ))
        })
    }

    /// Adds the inputs with coverage that the corpus in the tree lacks: as few and as small as possible.
    fn reduce(&self) -> Result<String, Problem> {
        let count = |folder: &Path| files(folder).len();
        let had = count(&self.corpus);
        let mut command = self.command();
        command.args(["-merge=1", "-verbosity=0"]).args([&self.corpus, &self.found]);
        let end = shell::run(&mut command, BUILD_LIMIT, |_, _| {});
        if !end.is_success() {
            return Err(Problem::Failed(format!("the corpus of {} cannot be reduced: {end}", self.target)));
        }
        Ok(format!("    fuzz/corpus/{}: {had} inputs before, {} now", self.target, count(&self.corpus)))
    }

    fn broken_inputs(&self) -> Vec<PathBuf> {
        files(&self.broken)
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.flatten().map(|entry| entry.path()).collect()
}

/// The figures of the run.
fn figures(log: &[String]) -> impl Iterator<Item = &String> {
    let coverage = log.iter().rev().find(|line| line.contains(" cov: "));
    coverage.into_iter().chain(log.iter().filter(|line| line.starts_with("stat::")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Plan, Problem> {
        Plan::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn without_a_target_all_targets_are_fuzzed() {
        let plan = parse("--seconds 5").expect("a number is fine");
        assert_eq!((plan.targets.len(), plan.seconds), (TARGETS.len(), 5));
    }

    #[test]
    fn named_targets_are_fuzzed_alone() {
        assert_eq!(parse("nbd fuse").expect("both exist").targets, ["nbd", "fuse"]);
    }

    #[test]
    fn an_unknown_target_or_no_time_is_wrong_usage() {
        for line in ["ndb", "--seconds", "--seconds x", "--seconds 0", "--minutes 3"] {
            assert!(matches!(parse(line), Err(Problem::Usage(_))), "{line}");
        }
    }

    #[test]
    fn each_target_has_a_corpus() {
        for target in TARGETS {
            let corpus = workspace::root().join("fuzz/corpus").join(target);
            assert!(!files(&corpus).is_empty(), "{}", corpus.display());
        }
    }
}
