//! The files of the tree that git tracks.

use crate::workspace;
use std::path::PathBuf;
use std::process::Command;

/// A file and its text.
#[derive(Debug)]
pub struct File {
    /// The path from the root, with `/`.
    pub path: String,
    /// Its text.
    pub text: String,
}

impl File {
    /// Whether it is Rust.
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether it is Markdown.
    pub fn is_document(&self) -> bool {
        self.path.ends_with(".md")
    }

    /// Whether it holds only tests: an integration test, or the file of a module `tests`.
    pub fn is_test(&self) -> bool {
        self.path.contains("/tests/") || self.path.ends_with("/tests.rs") || self.path.ends_with("_tests.rs")
    }

    /// Whether it belongs to the product that users run or link: crates, except those that exist for proofs.
    pub fn is_product(&self) -> bool {
        self.path.starts_with("crates/")
            && self.path.contains("/src/")
            && !self.is_test()
            && !PROOFS.iter().any(|name| self.path.starts_with(name))
    }
}

/// Crates that are not part of the product.
const PROOFS: [&str; 3] = ["crates/sim/", "crates/models/", "crates/testkit/"];

/// Names of text files; all other files are data.
const TEXTS: [&str; 8] = [".rs", ".md", ".toml", ".yaml", ".service", ".rules", ".sh", ".py"];

/// The paths of all tracked and new files, from the root.
///
/// # Errors
/// The error of git or the system, as text.
pub fn paths() -> Result<Vec<String>, String> {
    let root = workspace::root();
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(&root)
        .output()
        .map_err(|error| format!("cannot start git: {error}"))?;
    if !listed.status.success() {
        return Err(format!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr).trim()));
    }
    let names = String::from_utf8(listed.stdout).map_err(|error| format!("git ls-files: {error}"))?;
    let mut paths: Vec<String> = names.split_terminator('\0').map(str::to_owned).collect();
    // git also lists a file that was deleted without a commit.
    paths.retain(|path| root.join(path).is_file());
    paths.sort();
    paths.dedup();
    Ok(paths)
}

/// Reads all tracked and new files that are texts.
///
/// # Errors
/// The error of git or the system, as text.
pub fn read() -> Result<Vec<File>, String> {
    let root = workspace::root();
    let mut files = Vec::new();
    for path in paths()?.into_iter().filter(|path| TEXTS.iter().any(|end| path.ends_with(end))) {
        let full: PathBuf = root.join(&path);
        let text = std::fs::read_to_string(&full).map_err(|error| format!("{}: {error}", full.display()))?;
        files.push(File { path, text });
    }
    Ok(files)
}
