//! `cargo xtask test` and `nightly`: the checks that a change must pass before it is merged.
//!
//! Invariants: after a failed step the later ones still run, except those that need its output. Checks that could not run are
//! listed and fail the task, unless the caller chose to leave them out.

use crate::ahead::Ahead;
use crate::flags::TestFlags;
use crate::leftovers::Scratch;
use crate::problem::Problem;
use crate::programs::Limits;
use crate::report::{Count, Report, TestFailures};
use crate::shell::{self, Stream};
use crate::workspace::{self, cargo, cargo_with_lock};
use crate::{deadline, demo, freestanding, fuzz, mutants, package, packages, processes, programs, tidy, vm};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The extent of the tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    /// Before every change.
    Short,
    /// Every night.
    Long,
}

/// The variable that enables the tests which need root and foreign programs.
const SYSTEM_TESTS: &str = "CBD_SYSTEM_TESTS";

/// The time limit of each step except the tests: a build from scratch on two cores that other processes use, too. Without other
/// load the tests are built in six minutes.
const BUILD_LIMIT: Duration = Duration::from_secs(2400);

/// The time limit of all steps of a short run together: build machines end a task after 90 minutes, without its report.
const SHORT_LIMIT: Duration = Duration::from_secs(78 * 60);

/// The time limit of each test program: the longest takes four minutes on two cores that other processes use, too.
const PROGRAM_LIMIT: Duration = Duration::from_secs(1200);

/// The same in a nightly run.
const NIGHTLY_LIMIT: Duration = Duration::from_secs(6 * 3600);

/// Seconds for each fuzz target in a nightly run.
const FUZZ_SECONDS: u64 = 1200;

/// Seconds for each fuzz target before every change, from its corpus.
const FUZZ_SECONDS_SHORT: u64 = 10;

/// Power cuts of a guest in a nightly run; twice as many would fill the disk of that test.
const NIGHTLY_CUTS: usize = 30;

/// Builds the program and the library as users do, and the simulator. cargo unites the features that the packages of one command need of a crate:
/// two commands would compile the engine twice. `cbdctrl` gets the features that it has alone, since `cbd-sim` needs fewer.
const RELEASE: [&str; 8] =
    ["build", "--release", "--package", "cbdctrl", "--package", "libcbd", "--package", "cbd-sim"];

/// Runs the test of the notebook, which is left out otherwise because of what it needs.
const NOTEBOOK: [&str; 8] =
    ["test", "--package", "cbdctrl", "--test", "python", "--", "--ignored", "the_notebook_plots_a_run"];

/// Cargo's progress messages, which are left out of the log.
const PROGRESS: [&str; 10] = [
    "Compiling ",
    "Checking ",
    "Documenting ",
    "Downloading ",
    "Downloaded ",
    "Updating ",
    "Locking ",
    "Blocking ",
    "Adding ",
    "Fresh ",
];

/// Runs the steps that `flags` selects. Returns true if all of them succeeded and only steps that the caller excluded were left
/// out.
///
/// # Errors
/// When a step cannot begin at all.
pub fn run(flags: &TestFlags, length: Length) -> Result<bool, Problem> {
    processes::adopt_orphans();
    if length == Length::Short {
        deadline::set(SHORT_LIMIT);
    }
    let system = workspace::is_root() && !flags.no_system;
    let mut report = Report::new();
    if system && flags.wants("test") {
        report.step("packages", "the programs that the system tests drive", || match packages::install() {
            Ok(()) => Count::one(true),
            Err(text) => {
                println!("    {text}");
                Count::one(false)
            }
        });
    }
    check_source(flags, &mut report);
    let mut builds = true;
    if flags.wants("build") {
        report.step("build", "the tests", || {
            let built = check(cargo_with_lock(["test", "--workspace", "--no-run"]));
            builds = built.failed == 0;
            built
        });
    }
    if flags.wants("test") && !builds {
        report.step("test", "not run, because the tests do not build", || Count::one(false));
    } else if flags.wants("test") {
        let about =
            if system { "all tests" } else { "the tests that need neither root nor foreign programs" };
        let mut problems = TestFailures::default();
        let mut ahead = Ahead::start(builds_ahead(flags, length, system));
        report.step("test", about, || {
            tests(flags.filter.as_deref(), system, length, &mut problems, &mut ahead)
        });
        report.note(problems.lines());
    }
    if length == Length::Long && flags.wants("test") && flags.filter.is_none() {
        long_steps(system, &mut report);
    }
    // Without root, the step would depend on an installed C++ compiler.
    if system && length == Length::Short && flags.wants("fuzz") {
        let plan = fuzz::Plan::check(FUZZ_SECONDS_SHORT);
        report.step("fuzz", "every target for some seconds, coverage-guided", || task(fuzz::run(&plan)));
    }
    if flags.wants("sim") {
        report.step("sim", "cargo xtask sim: what crashes can leave", || explore(length));
    }
    let mut program = None;
    if flags.wants("release") || flags.wants("demo") || flags.wants("package") {
        report.step("release", "cbdctrl as users build it", || {
            let built = check(cargo_with_lock(RELEASE));
            program = (built.failed == 0).then(|| release_program("cbdctrl")).flatten();
            Count::one(program.is_some())
        });
    }
    if let Some(program) = program.as_ref().filter(|_| flags.wants("demo")) {
        report.step("demo", "cbdctrl demo --json", || show(program));
    }
    if let Some(program) = program.filter(|_| system && flags.wants("package")) {
        report
            .step("package", "Debian packages: rules, installation, upgrade, removal", || packaged(&program));
    }
    // The step needs Debian's packages, but not root.
    if flags.wants("vm") && !flags.no_system {
        report.step("vm", "cargo xtask vm test: jobs in guests", || guests(length));
    }
    if !system && flags.wants("test") {
        list_left_out(flags);
        if !flags.no_system {
            report.step("system", "tests that need root", || Count::one(false));
        }
    }
    Ok(report.finish())
}

/// The steps of a nightly run alone.
fn long_steps(system: bool, report: &mut Report) {
    let plan = fuzz::Plan { seconds: FUZZ_SECONDS, ..fuzz::Plan::all() };
    report.step("fuzz", "every target, coverage-guided", || task(fuzz::run(&plan)));
    report.step("mutants", "each mutation point disabled, one at a time", || {
        task(mutants::run(&mutants::Flags::thorough()))
    });
    report.step("mutants, generated", "each operator, condition, call and constant changed", || {
        task(mutants::run_generated())
    });
    if system {
        report.step("notebook", "the notebook of the Python package", notebook);
    }
}

/// The steps that run no test.
fn check_source(flags: &TestFlags, report: &mut Report) {
    if flags.wants("format") {
        report.step("format", "cargo fmt --check", || check(cargo(["fmt", "--all", "--check"])));
    }
    if flags.wants("tidy") {
        report.step("tidy", "terms, widths, lengths, layers, links", || {
            task(tidy::run(&tidy::Flags::default()))
        });
    }
    if flags.wants("lint") {
        report.step("lint", "clippy, warnings are errors", || {
            check(cargo_with_lock(["clippy", "--workspace", "--all-targets"]).args(["--", "-D", "warnings"]))
        });
    }
    if flags.wants("doc") {
        report.step("doc", "rustdoc, warnings are errors", || {
            let mut command = cargo_with_lock(["doc", "--workspace", "--no-deps"]);
            check(command.env("RUSTDOCFLAGS", "-D warnings"))
        });
    }
    if flags.wants("freestanding") {
        report.step("freestanding", "the engine without std, and its stack frames", || {
            task(freestanding::run(&[]))
        });
    }
}

/// The builds of the steps that follow the tests.
fn builds_ahead(flags: &TestFlags, length: Length, system: bool) -> Vec<Command> {
    let mut builds = Vec::new();
    if ["release", "demo", "package", "sim"].iter().any(|step| flags.wants(step)) {
        builds.push(cargo_with_lock(RELEASE));
    }
    if system && length == Length::Short && flags.wants("fuzz") && packages::install_compiler().is_ok() {
        builds.extend(fuzz::build_command());
    }
    builds
}

/// Lists the steps that did not run without root, or that the caller left out.
fn list_left_out(flags: &TestFlags) {
    if workspace::is_root() || flags.no_system {
        println!("\nleft out by --no-system: the tests behind {SYSTEM_TESTS} in");
    } else {
        println!(
            "\nnot run, because they need root (run as root, or leave them out by --no-system): the tests behind {SYSTEM_TESTS} in"
        );
    }
    for file in files_with_system_tests(&workspace::root()) {
        println!("    {file}");
    }
    if flags.no_system {
        println!("    guest/src/jobs (the step vm)");
        println!("    fuzz (the step fuzz)");
        println!("    xtask/src/package/checks.rs (the step package)");
    }
}

/// Runs the notebook of the Python package.
fn notebook() -> Count {
    match packages::install_plots() {
        Ok(()) => check(cargo_with_lock(NOTEBOOK)),
        Err(text) => {
            println!("    {text}");
            Count::one(false)
        }
    }
}

/// All tests of the workspace. A failed crate does not stop the tests of the later ones.
fn tests(
    filter: Option<&str>,
    system: bool,
    length: Length,
    problems: &mut TestFailures,
    ahead: &mut Ahead,
) -> Count {
    let scratch = match Scratch::new() {
        Ok(scratch) => scratch,
        Err(text) => {
            println!("    {text}");
            return Count::one(false);
        }
    };
    let mut jobs = match programs::build(BUILD_LIMIT, print) {
        Ok(programs) => programs::Jobs::new(&programs, filter.as_slice()),
        Err(text) => {
            println!("    {text}");
            return Count::one(false);
        }
    };
    let mut limits = Limits { all: BUILD_LIMIT, each: PROGRAM_LIMIT };
    let mut seed_of_night = None;
    if length == Length::Long {
        limits = Limits { all: NIGHTLY_LIMIT, each: NIGHTLY_LIMIT };
        let seed = seed();
        println!("    CBD_SEED={seed}");
        seed_of_night = Some(seed);
    }
    for command in jobs.commands() {
        set_variables(command, system, seed_of_night, &scratch);
    }
    let mut count = Count::default();
    let failed = jobs.run(limits, |line| {
        count.add_line(line);
        problems.add_line(line);
        print(line);
    });
    if !failed.is_empty() {
        println!("    these programs failed: {}", failed.join(", "));
        // A program may die before it prints how many of its tests failed.
        count.failed = count.failed.max(1);
    }
    // The processes of these builds are not leftovers.
    ahead.finish();
    for left in scratch.leftovers() {
        println!("    left behind: {left}");
        count.failed += 1;
    }
    count
}

/// Sets the environment of a test program; with a seed, that of a nightly run.
fn set_variables(command: &mut Command, system: bool, seed: Option<u64>, scratch: &Scratch) {
    let threads = programs::TESTS_AT_ONCE.max(std::thread::available_parallelism().map_or(1, usize::from));
    command
        .env_remove(SYSTEM_TESTS)
        .env("RUST_TEST_THREADS", threads.to_string())
        .env("TMPDIR", scratch.path())
        .env("PATH", packages::search_path())
        .env("RUST_BACKTRACE", "1");
    if system {
        command.env(SYSTEM_TESTS, "1");
    }
    if let Some(seed) = seed {
        command.env("CBD_SEED", seed.to_string());
        for (name, value) in [
            ("CBD_ROUNDS", "2000"),
            ("CBD_SCHEDULES", "10000"),
            ("CBD_KILLS", "500"),
            ("PROPTEST_CASES", "5000"),
        ] {
            command.env(name, value);
        }
    }
}

/// Explores crash states: a small number for a change; ten million crash states and a million flipped bits in a nightly run.
fn explore(length: Length) -> Count {
    let built = check(cargo_with_lock(RELEASE));
    if built.failed > 0 {
        return built;
    }
    let Some(program) = release_program("cbd-sim") else { return Count::one(false) };
    let seed = seed().to_string();
    let (runs, limit): (Vec<Vec<&str>>, _) = match length {
        Length::Short => (
            vec![
                vec!["--states", "200000", "--distinct", "20000", "--seconds", "900", "--complete"],
                vec!["--world", "reconnect", "--histories", "2000", "--seconds", "60"],
                vec!["--world", "group", "--histories", "400", "--seconds", "60"],
                vec!["--world", "hosts", "--histories", "50000", "--seconds", "300"],
                vec!["--world", "channels", "--histories", "2000", "--seconds", "60"],
                vec!["--world", "moves", "--histories", "1000", "--seconds", "60"],
            ],
            Duration::from_secs(1200),
        ),
        Length::Long => (
            vec![
                vec!["--long", "--states", "10000000", "--seconds", "28800", "--complete", "--seed", &seed],
                vec!["--world", "sequences-1", "--long", "--seconds", "600"],
                vec!["--world", "sequences-2", "--long", "--seconds", "1200"],
                vec!["--world", "sequences-3", "--long", "--seconds", "7200"],
                vec!["--world", "sequences-4", "--long", "--seconds", "14400"],
                vec!["--world", "flips", "--seeds", "2000", "--seed", &seed],
                vec!["--world", "reconnect", "--histories", "100000", "--seconds", "1800", "--seed", &seed],
                vec!["--world", "group", "--histories", "100000", "--seconds", "1800", "--seed", &seed],
                vec!["--world", "hosts", "--histories", "500000", "--seconds", "3600", "--seed", &seed],
                vec!["--world", "channels", "--histories", "500000", "--seconds", "3600", "--seed", &seed],
                vec!["--world", "moves", "--histories", "200000", "--seconds", "3600", "--seed", &seed],
            ],
            Duration::from_secs(10 * 3600),
        ),
    };
    let mut count = Count::default();
    for run in runs {
        let end = shell::run(Command::new(&program).arg("--json").args(run), limit, |_, line| print(line));
        if !end.is_success() {
            println!("    {end}");
        }
        let run = Count::one(end.is_success());
        count.passed += run.passed;
        count.failed += run.failed;
    }
    count
}

/// Runs the demo, and checks its output and its leftovers.
fn show(program: &Path) -> Count {
    let scratch = match Scratch::new() {
        Ok(scratch) => scratch,
        Err(text) => {
            println!("    {text}");
            return Count::one(false);
        }
    };
    let mut problems = demo::run(program, scratch.path());
    problems.extend(scratch.leftovers().into_iter().map(|left| format!("left behind: {left}")));
    for problem in &problems {
        println!("    {problem}");
    }
    Count::one(problems.is_empty())
}

/// Builds packages of the programs that the step `release` has built, and checks them.
fn packaged(program: &Path) -> Count {
    if let Err(text) = packages::install() {
        println!("    {text}");
        return Count::one(false);
    }
    package::checks::run(program.parent().unwrap_or(program))
}

/// Runs jobs in guests, with programs of this machine.
fn guests(length: Length) -> Count {
    if workspace::is_root()
        && let Err(text) = packages::install()
    {
        println!("    {text}");
        return Count::one(false);
    }
    vm::test(if length == Length::Long { NIGHTLY_CUTS } else { vm::CUTS })
}

/// A task that is one check.
fn task(outcome: Result<bool, Problem>) -> Count {
    Count::one(outcome.unwrap_or_else(|problem| {
        println!("    {problem:?}");
        false
    }))
}

/// A command that is one check, its output passed on.
fn check(mut command: impl std::borrow::BorrowMut<Command>) -> Count {
    let end = shell::run(command.borrow_mut(), BUILD_LIMIT, |_: Stream, line: &str| print(line));
    if !end.is_success() {
        println!("    {end}");
    }
    Count::one(end.is_success())
}

fn print(line: &str) {
    let text = line.trim_start();
    let progress = PROGRESS.iter().any(|word| text.starts_with(word));
    if !(workspace::is_ci() && (progress || text.is_empty())) {
        println!("{line}");
    }
}

fn release_program(name: &str) -> Option<PathBuf> {
    match workspace::target_directory() {
        Ok(target) => Some(target.join("release").join(name)).filter(|program| program.is_file()),
        Err(text) => {
            println!("    {text}");
            None
        }
    }
}

/// A number that differs from night to night.
fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |since| since.as_secs())
}

/// The source files with tests that read the variable, relative to the root.
fn files_with_system_tests(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut waiting = vec![root.join("crates")];
    while let Some(directory) = waiting.pop() {
        let Ok(entries) = std::fs::read_dir(&directory) else { continue };
        for entry in entries.flatten() {
            let path = entry.path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && std::fs::read_to_string(&path).is_ok_and(|text| text.contains(SYSTEM_TESTS))
            {
                found.push(path.strip_prefix(root).unwrap_or(&path).display().to_string());
            }
        }
    }
    found.sort();
    found
}
