//! Names of the mutation points: each fence, each write-back, each validation of data that was read, each
//! step whose position in an order matters.
//!
//! Invariants: in an ordinary build every mutation point is active, and the query is a constant without a
//! cost. With the feature `mutants`, in a build made for it, the environment variable `CBD_MUTANT` names one
//! that is left out, and the tests must detect this: see `docs/mutants.md`.
//!
//! Elsewhere: the code at a mutation point (where it is used), their removal one by one (`cargo xtask
//! mutants`).
//!
//! The method is mutation testing, but with mutants chosen by hand: each is a mistake that has occurred in
//! systems like this one.

pub mod generated;
mod list;

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

    /// Whether the mutation point is active; `CBD_MUTANT` may name one that is not.
    ///
    /// # Panics
    /// When the variable names no mutation point.
    #[cfg(feature = "mutants")]
    #[must_use]
    pub fn is_active(self) -> bool {
        removed::get() != Some(self)
    }

    /// A validation: whether `condition` holds, or the mutation point is removed.
    #[inline(always)]
    #[must_use]
    pub fn holds(self, condition: bool) -> bool {
        condition || !self.is_active()
    }
}

#[cfg(feature = "mutants")]
mod removed {
    use super::MutationPoint;
    use std::sync::OnceLock;

    static REMOVED: OnceLock<Option<MutationPoint>> = OnceLock::new();

    pub(super) fn get() -> Option<MutationPoint> {
        *REMOVED.get_or_init(|| {
            let name = std::env::var("CBD_MUTANT").ok().filter(|name| !name.is_empty())?;
            Some(
                MutationPoint::from_name(&name)
                    .unwrap_or_else(|| panic!("CBD_MUTANT={name} is no mutation point")),
            )
        })
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
