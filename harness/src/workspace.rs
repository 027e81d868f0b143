//! Paths, and calls of cargo.

use crate::shell;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The root of the workspace.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// The cargo that runs this program, called in the root.
pub fn cargo<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    command
}

/// As [`cargo`]; on a build machine with the versions of the committed lock file, and without incremental data.
pub fn cargo_with_lock<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = cargo(arguments);
    if is_ci() {
        command.arg("--locked").env("CARGO_INCREMENTAL", "0");
    }
    command
}

/// The compiler that cargo uses.
pub fn compiler() -> Command {
    Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
}

/// The directory into which cargo builds.
///
/// # Errors
/// The error of cargo, as text.
pub fn target_directory() -> Result<PathBuf, String> {
    let text = shell::output_of(
        &mut cargo(["metadata", "--no-deps", "--format-version", "1"]),
        Duration::from_secs(120),
    )
    .map_err(|end| format!("cargo metadata: {end}"))?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| format!("cargo metadata: {error}"))?;
    metadata["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .ok_or_else(|| "cargo metadata does not say where the target directory is".to_owned())
}

/// The host triple of the compiler.
///
/// # Errors
/// The error of the compiler, as text.
pub fn host_triple() -> Result<String, String> {
    let text = shell::output_of(compiler().arg("-vV"), Duration::from_secs(120))
        .map_err(|end| format!("rustc -vV: {end}"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .ok_or_else(|| "rustc -vV does not name the host".to_owned())
}

/// Whether this runs on a build machine.
pub fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false" && value != "0")
}

/// Whether the effective user is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
