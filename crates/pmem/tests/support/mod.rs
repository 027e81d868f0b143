//! Regions in a folder that is deleted with its test.

use cbd_pmem::{Mapping, OpenOptions};
use std::path::Path;

pub const MIB: u64 = 1 << 20;

pub fn create(size: u64) -> OpenOptions {
    OpenOptions { size: Some(size), create: true, ..OpenOptions::default() }
}

pub fn existing() -> OpenOptions {
    OpenOptions::default()
}

pub fn directory() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

/// The error of an open that must be refused.
pub fn refusal(path: &Path, options: &OpenOptions) -> cbd_types::Error {
    Mapping::open(path, options).expect_err("must be refused")
}
