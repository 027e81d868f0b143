//! Names of the mutation points: each fence, each write-back, each sync, each check of stores, each validation of data
//! that was read.
//!
//! Invariants: in an ordinary build every mutation point is active, and the query is a constant without a cost. With
//! the feature `mutants`, in a build for that purpose, the environment variable `CBD_MUTANT` names a mutation point
//! that is inactive, and the tests must detect this: see `docs/mutants.md`.
//!
//! Elsewhere: the code at a mutation point (where it is used), their removal one by one (`cargo xtask mutants`),
//! mutants of all other steps, which the product does not contain (`xtask/mutants/written`).
//!
//! The method is mutation testing, but with mutants chosen by hand: each is a mistake that has occurred in systems like
//! this one.

#[cfg(feature = "mutants")]
mod chosen;
pub mod generated;
mod list;
#[cfg(feature = "mutants")]
mod written;

#[cfg(feature = "mutants")]
pub use chosen::is_mutant;
#[cfg(any(test, feature = "mutants"))]
pub use generated::generated;
pub use list::MutationPoint;

#[cfg(all(feature = "mutants", not(debug_assertions)))]
compile_error!("the feature `mutants` lets the environment remove mutation points: it is for tests only");

impl MutationPoint {
    /// The mutation point of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|known| known.name() == name)
    }

    /// Whether the mutation point is active: always, except where a test removes it.
    #[cfg(not(feature = "mutants"))]
    #[inline(always)]
    #[must_use]
    pub const fn is_active(self) -> bool {
        true
    }

    /// Whether the mutation point is active; `CBD_MUTANT` may name an inactive one.
    ///
    /// # Panics
    /// When the variable names no mutant.
    #[cfg(feature = "mutants")]
    #[must_use]
    pub fn is_active(self) -> bool {
        !chosen::is_removed(self)
    }

    /// A validation: whether `condition` holds, or the mutation point is inactive.
    #[inline(always)]
    #[must_use]
    pub fn holds(self, condition: bool) -> bool {
        condition || !self.is_active()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn each_mutation_point_has_a_unique_name_and_a_description() {
        let names: BTreeSet<_> = MutationPoint::ALL.iter().map(|known| known.name()).collect();
        assert_eq!(names.len(), MutationPoint::ALL.len());
        for known in MutationPoint::ALL {
            assert_eq!(MutationPoint::from_name(known.name()), Some(*known));
            assert!(known.about().len() > 20, "{} says nothing", known.name());
        }
    }
}
