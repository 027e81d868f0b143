//! The processors that a thread runs on.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;

/// Restricts the calling thread to those of these processors on which it may run.
///
/// # Errors
/// The system error.
pub fn run_on(processors: &[usize]) -> io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let mut wanted = CpuSet::new();
    let is_allowed = |&&processor: &&usize| processor < CpuSet::MAX_CPU && allowed.is_set(processor);
    processors.iter().filter(is_allowed).for_each(|&processor| wanted.set(processor));
    if wanted.count() > 0 {
        sched_setaffinity(None, &wanted)?;
    }
    Ok(())
}
