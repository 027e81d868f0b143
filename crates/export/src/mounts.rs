//! The mounts of this process's namespace, with errors for users.
//!
//! Invariants: those of [`cbd_sys::mounts`].

use crate::system_error;
use cbd_types::Result;
use std::path::Path;

pub use cbd_sys::mounts::Mount;

/// All mounts that the process sees.
///
/// # Errors
/// When the system does not report them.
pub fn list() -> Result<Vec<Mount>> {
    cbd_sys::mounts::list().map_err(|error| system_error("/proc/self/mountinfo", &error))
}

/// The mount at exactly this path, the topmost if there are several.
///
/// # Errors
/// When the system does not report them.
pub fn at(target: &Path) -> Result<Option<Mount>> {
    Ok(list()?.into_iter().rev().find(|mount| mount.target == target))
}
