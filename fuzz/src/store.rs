//! The inputs that are kept in the tree.

use std::io;
use std::path::{Path, PathBuf};

/// Where the inputs of a target are kept: what reaches something, and what once broke something.
#[must_use]
pub fn directories(target: &str) -> [PathBuf; 2] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    [root.join("corpus").join(target), root.join("regressions").join(target)]
}

/// The files in `directory`, in the order of their names; none where there is no directory.
///
/// # Errors
/// What the system says.
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
