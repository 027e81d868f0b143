//! The inputs in the tree, and those that a fuzzer begins with.

use crate::Target;
use std::io;
use std::path::{Path, PathBuf};

/// The directories of a target's inputs: those that extended the coverage, and those that once failed.
#[must_use]
pub fn directories(target: &str) -> [PathBuf; 2] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    [root.join("corpus").join(target), root.join("regressions").join(target)]
}

/// The files in `directory`, in the order of their names; an empty list if the directory does not exist.
///
/// # Errors
/// The error of the system.
pub fn files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut files = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

/// Writes the initial inputs of `target` to `directory`.
///
/// # Errors
/// The error of the system.
pub fn plant(target: &Target, directory: &Path) -> io::Result<()> {
    for (number, seed) in (target.seeds)().iter().enumerate() {
        std::fs::write(directory.join(format!("seed-{number:03}")), seed)?;
    }
    Ok(())
}
