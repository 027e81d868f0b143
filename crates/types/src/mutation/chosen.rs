//! The mutant of this process: the environment names it.
//!
//! Invariants: the mutant does not change while the process runs.

use super::{MutationPoint, written};
use std::sync::atomic::{AtomicU32, Ordering};

/// The variable with the name of the mutant.
const VARIABLE: &str = "CBD_MUTANT";

/// The environment was not read yet.
const UNKNOWN: u32 = u32::MAX;
/// No mutant is named.
const NONE: u32 = u32::MAX - 1;

/// The position of a mutation point in the list, or the number of a written mutant, counted behind the mutation points.
static CHOSEN: AtomicU32 = AtomicU32::new(UNKNOWN);

/// Whether the environment names this mutation point.
pub(super) fn is_removed(point: MutationPoint) -> bool {
    is_chosen(point as u32)
}

/// Whether the written mutant of this number is switched on: the environment names it.
///
/// # Panics
/// When the environment names no mutant.
#[inline]
#[must_use]
pub fn is_mutant(number: u32) -> bool {
    is_chosen(MutationPoint::ALL.len() as u32 + number)
}

#[inline]
fn is_chosen(number: u32) -> bool {
    match CHOSEN.load(Ordering::Relaxed) {
        UNKNOWN => read_environment(number),
        chosen => chosen == number,
    }
}

/// Reads the environment. Concurrent calls read the same value.
#[cold]
fn read_environment(number: u32) -> bool {
    let chosen = match std::env::var(VARIABLE) {
        Ok(name) if !name.is_empty() => number_of(&name, written::NAMES),
        _ => NONE,
    };
    CHOSEN.store(chosen, Ordering::Relaxed);
    chosen == number
}

fn number_of(name: &str, written: &[&str]) -> u32 {
    let labels = MutationPoint::ALL.iter().map(|known| known.name());
    let position = labels.chain(written.iter().copied()).position(|known| known == name);
    position.unwrap_or_else(|| panic!("{VARIABLE}={name} is not a mutant of this build")) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_mutants_are_numbered_behind_the_mutation_points() {
        for point in MutationPoint::ALL {
            assert_eq!(number_of(point.name(), &[]), *point as u32);
        }
        let all = MutationPoint::ALL.len() as u32;
        assert_eq!(number_of("b", &["a", "b"]), all + 1);
        assert!(std::panic::catch_unwind(|| number_of("b", &["a"])).is_err());
    }
}
