//! The project's tasks, so that a person and a build machine run the same command: `cargo xtask TASK`.
//!
//! Invariants: every command has a time limit, and a task ends with exit code 0 only if everything that was
//! requested was done and succeeded.
//!
//! Elsewhere: the tests (the crates), the measurements (`bench`).
#![forbid(unsafe_code)]

mod ahead;
mod demo;
mod flags;
mod freestanding;
mod fsstress;
mod fsx;
mod fuzz;
mod mutants;
mod package;
mod programs;
mod tasks;
mod test;
mod tidy;

use cbd_guest as vm;
// The modules name these as their own.
use cbd_harness::{
    deadline, install, leftovers, packages, problem, processes, random, report, shell, workspace,
};
use std::process::ExitCode;

const USAGE: &str = "\
Usage: cargo xtask TASK

Tasks:
  test [--no-system] [--only STEP[,STEP..]] [--filter TEXT]
                     runs all checks that a change must pass; as root it installs the Debian packages
                     that the system tests need
  nightly [--no-system]
                     the same with the long forms: more rounds, more kills, a seed of its own, and all of `fuzz` and
                     `mutants`
  bench [GROUP..] [--json] [--report] [..]
                     builds the benchmarks and runs them; arguments are passed on
  sim [--json] [--world NAME] [--seed N] [--seconds N] [--states N] [--histories N] [..]
                     explores crash states in simulated worlds
  models [--scene NAME[,NAME..]] [--seed N] [--iterations N] [--seconds N] [--sweep N] [--jobs N] [--json] [--list]
                     runs the engine's threads under seeded schedules; prints the command that repeats a failure
  fuzz [TARGET..] [--seconds N]
                     runs the coverage-guided fuzzer (default: each target for 60 s), and adds inputs that reach
                     something new to the corpus
  mutants [--only NAME].. [--list] [--json] [--thorough] [--learn]
                     disables the mutation points one at a time; a test must fail each time
  mutants --generated [--crate NAME].. [--only FUNCTION].. [--sample N] [--seed S] [--list] [--json] [--thorough]
                     changes each operator, condition, call and constant of engine, format, device and lock, one at
                     a time; tests must fail for 95 % of them
  install --prefix DIRECTORY [--debug] [--fio | --fio-source DIRECTORY]
                     installs libcbd with its header and pkg-config file, and blkverify; also the engine for the installed fio,
                     whose headers are fetched through apt, or taken from its source
  package [--output DIRECTORY] [--no-build]
                     builds Debian packages (default: target/package); with --stage DIRECTORY [--library FOLDER] lays their files
                     below it instead, as the spec file for rpm does; see docs/packaging.md
  man [DIRECTORY]    writes the man pages and shell completions (default: target/man)
  fsx FILE [--seed N] [--operations N] [--size BYTES] [--direct ALIGNMENT]
                     random operations on a file or block device, which is overwritten, compared with a model
  fsstress DIRECTORY [--seed N] [--operations N] [--threads N]
                     threads create, link, rename and remove files and folders in it, compared with a model
  tidy [--json] [--update]
                     checks rules about the tree: terms, widths, lengths, layers, links; --update lowers the
                     limits in xtask/tidy.txt to the present values
  stack [--json]     builds the engine without std, for a target without an operating system, and checks the stack
                     frames of its functions
  vm run|shell|test|peers|fetch [..]
                     runs programs in a guest with a kernel of its own, with ublk, persistent memory and power
                     cuts; see `vm help`

Steps of `test`: format, tidy, lint, doc, freestanding, build, test, fuzz, sim, release, demo, package, vm
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (task, rest) = match arguments.split_first() {
        Some((task, rest)) => (task.as_str(), rest),
        None => ("help", &[][..]),
    };
    let ended = match task {
        "test" => flags::TestFlags::parse(rest).and_then(|flags| test::run(&flags, test::Length::Short)),
        "nightly" => flags::TestFlags::parse(rest).and_then(|flags| test::run(&flags, test::Length::Long)),
        "bench" => tasks::bench(rest),
        "sim" => tasks::sim(rest),
        "models" => tasks::models(rest),
        "fuzz" => fuzz::Plan::parse(rest).and_then(|plan| fuzz::run(&plan)),
        "mutants" => mutants::task(rest),
        "install" => install::Plan::parse(rest).and_then(|plan| install::run(&plan)),
        "package" => package::Plan::parse(rest).and_then(|plan| package::run(&plan)),
        package::checks::INSIDE => package::checks::inside(rest),
        "man" => tasks::man(rest),
        "fsx" => tasks::exercise(rest),
        "fsstress" => tasks::stress(rest),
        "tidy" => tidy::Flags::parse(rest).and_then(|flags| tidy::run(&flags)),
        "stack" => freestanding::run(rest),
        "vm" => vm::run(rest),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(true)
        }
        other => Err(problem::Problem::Usage(format!("there is no task '{other}'"))),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem::Problem::Usage(text)) => {
            eprintln!("xtask: {text}\n\n{USAGE}");
            ExitCode::from(2)
        }
        Err(problem::Problem::Failed(text)) => {
            eprintln!("xtask: {text}");
            ExitCode::FAILURE
        }
        Err(problem::Problem::Code(code)) => ExitCode::from(code),
    }
}
