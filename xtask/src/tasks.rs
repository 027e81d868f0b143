//! The short tasks: benchmarks, crash states, models, man pages, the file exerciser.

use crate::flags;
use crate::problem::Problem;
use crate::workspace::{self, cargo};
use crate::{fsstress, fsx};
use std::process::Command;

/// Builds the benchmarks and runs them, with the given arguments and this program's standard output.
///
/// # Errors
/// When the benchmarks cannot be built or started.
pub fn bench(arguments: &[String]) -> Result<bool, Problem> {
    build("cbd-bench")?;
    // This group measures a daemon; without arguments every group runs.
    if arguments.iter().any(|argument| argument == "memory")
        || !arguments.iter().any(|argument| !argument.starts_with('-'))
    {
        build("cbdctrl")?;
    }
    let mut command = Command::new(program("cbd-bench")?);
    // A value that the caller has set is kept.
    let (name, value) = ALLOCATOR;
    if std::env::var_os(name).is_none() {
        command.env(name, value);
    }
    start(command.args(arguments))
}

/// Backs the index of the engine in this process with huge pages; docs/performance.md states the effect. The daemon whose memory
/// is measured does not inherit the variable.
const ALLOCATOR: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.top_pad=16777216",
);

/// Builds the explorer of crash states and runs it, with the given arguments and this program's standard output.
///
/// # Errors
/// When the explorer cannot be built or started.
pub fn sim(arguments: &[String]) -> Result<bool, Problem> {
    build("cbd-sim")?;
    start(Command::new(program("cbd-sim")?).args(arguments))
}

/// Builds the models and plays their scenes, with the given arguments and this program's standard output. They are built as the
/// tests are: with the engine's assertions.
///
/// # Errors
/// When the models cannot be built or started.
pub fn models(arguments: &[String]) -> Result<bool, Problem> {
    if !start(&mut cargo(["build", "--quiet", "--package", "cbd-models"]))? {
        return Err(Problem::Failed("cbd-models does not build".to_owned()));
    }
    let program = workspace::target_directory().map_err(Problem::Failed)?.join("debug/cbd-models");
    start(Command::new(program).args(arguments))
}

/// Writes man pages and shell completions from the definition of the command line.
///
/// # Errors
/// When the program cannot be built or started.
pub fn man(arguments: &[String]) -> Result<bool, Problem> {
    let directory = match arguments {
        [] => workspace::target_directory().map_err(Problem::Failed)?.join("man"),
        [directory] => directory.into(),
        _ => return Err(Problem::Usage("man takes one directory".to_owned())),
    };
    build("cbdctrl")?;
    std::fs::create_dir_all(&directory)
        .map_err(|error| Problem::Failed(format!("cannot make {}: {error}", directory.display())))?;
    let program = program("cbdctrl")?;
    if !start(Command::new(&program).arg("man").arg(&directory))? {
        return Ok(false);
    }
    for shell in ["bash", "zsh", "fish"] {
        let text = Command::new(&program)
            .args(["completions", shell])
            .output()
            .map_err(|error| Problem::Failed(format!("cannot start {}: {error}", program.display())))?;
        if !text.status.success() {
            return Ok(false);
        }
        let file = directory.join(format!("cbdctrl.{shell}"));
        std::fs::write(&file, text.stdout)
            .map_err(|error| Problem::Failed(format!("cannot write {}: {error}", file.display())))?;
    }
    println!("{}", directory.display());
    Ok(true)
}

/// Exercises a file or block device.
///
/// # Errors
/// The first difference from the model.
pub fn exercise(arguments: &[String]) -> Result<bool, Problem> {
    fsx::run(&flags::fsx_plan(arguments)?).map_err(Problem::Failed)?;
    Ok(true)
}

/// Stresses a file system.
///
/// # Errors
/// The first difference from a model.
pub fn stress(arguments: &[String]) -> Result<bool, Problem> {
    fsstress::run(&flags::fsstress_plan(arguments)?).map_err(Problem::Failed)?;
    Ok(true)
}

fn build(package: &str) -> Result<(), Problem> {
    // Cargo prints to standard error, so standard output holds only the output of the program.
    if start(&mut cargo(["build", "--quiet", "--release", "--package", package]))? {
        Ok(())
    } else {
        Err(Problem::Failed(format!("{package} does not build")))
    }
}

fn program(name: &str) -> Result<std::path::PathBuf, Problem> {
    Ok(workspace::target_directory().map_err(Problem::Failed)?.join("release").join(name))
}

/// Runs a command with this program's input and output.
fn start(command: &mut Command) -> Result<bool, Problem> {
    let status = command.status().map_err(|error| {
        Problem::Failed(format!("cannot start {}: {error}", command.get_program().display()))
    })?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_unit_leaves_the_allocator_to_the_daemon() {
        let unit = include_str!("../../packaging/cbdd.service");
        assert!(unit.lines().all(|line| !line.starts_with("Environment=GLIBC_TUNABLES")));
    }
}
