//! A copy of the workspace in which sources have switches, and cargo's runs there.
//!
//! Invariants: a file of the copy is written only when it changes, so that cargo builds only what depends on it.

use crate::mutants::suite::BUILD_LIMIT;
use crate::shell::{self, Stream};
use crate::workspace;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The copy.
pub struct Copy {
    /// The root.
    root: PathBuf,
    /// The directory into which cargo builds it.
    pub target: PathBuf,
}

impl Copy {
    /// A copy below `directory`, as an earlier run has left it.
    pub fn new(directory: &Path) -> Self {
        Self { root: directory.join("tree"), target: directory.join("target") }
    }

    /// Writes a file, which has this path from the root.
    ///
    /// # Errors
    /// That of the system, as text.
    pub fn write(&self, path: &str, bytes: &[u8]) -> Result<(), String> {
        write(&self.root.join(path), bytes)
    }

    /// Runs cargo in the copy. Returns whether it succeeded, and the lines of its messages.
    pub fn run(&self, command: &mut Command) -> (bool, Vec<String>) {
        // What the copies of an expression look like is no concern of lints.
        command.current_dir(&self.root).env("RUSTFLAGS", "--cap-lints=allow");
        let mut messages = Vec::new();
        let end = shell::run(command, BUILD_LIMIT, |stream, line| {
            if stream == Stream::Output {
                messages.push(line.to_owned());
            }
        });
        if !end.is_success() && messages.is_empty() {
            messages.push(format!("cargo: {end}"));
        }
        (end.is_success(), messages)
    }

    /// Removes sources that the workspace has no longer; `paths` are those that it has, in order.
    ///
    /// # Errors
    /// A directory or file of the copy, and the error of the system.
    pub fn remove_others(&self, paths: &[String]) -> Result<(), String> {
        let mut waiting = vec![self.root.join("crates")];
        while let Some(directory) = waiting.pop() {
            let entries =
                std::fs::read_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
            for path in entries.flatten().map(|entry| entry.path()) {
                if path.is_dir() {
                    waiting.push(path);
                    continue;
                }
                let name = path.strip_prefix(&self.root).unwrap_or(&path).to_string_lossy().into_owned();
                if paths.binary_search(&name).is_err() {
                    std::fs::remove_file(&path).map_err(|error| format!("{name}: {error}"))?;
                }
            }
        }
        Ok(())
    }
}

/// Reads a file of the workspace, which has this path from the root.
///
/// # Errors
/// The file, and the error of the system.
pub fn read(path: &str) -> Result<Vec<u8>, String> {
    let from = workspace::root().join(path);
    std::fs::read(&from).map_err(|error| format!("{}: {error}", from.display()))
}

/// Writes a file, unless it has this content.
///
/// # Errors
/// The file, and the error of the system.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    if std::fs::read(path).is_ok_and(|known| known == bytes) {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(path);
    std::fs::create_dir_all(parent)
        .and_then(|()| std::fs::write(path, bytes))
        .map_err(|error| format!("{}: {error}", path.display()))
}
