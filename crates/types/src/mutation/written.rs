//! Names of written mutants: `cargo xtask mutants` writes calls of `is_mutant` into a copy of the sources, one for each
//! change of a mutant, and their names into the copy of this file.
//!
//! Invariants: the number of a written mutant is the index of its name; a product has none.

/// The names.
pub(super) const NAMES: &[&str] = &[];
