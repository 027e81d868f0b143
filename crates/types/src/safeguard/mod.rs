//! Names for everything that keeps data from being lost or wrong: each fence, each write-back, each check of what was
//! read, each step whose place in an order matters.
//!
//! Always true here: in an ordinary build every safeguard is kept, and asking is a constant that costs nothing. With the
//! feature `mutants`, in a build made for it, the environment variable `CBD_MUTANT` names one that is left out, and the
//! tests must notice: see `docs/mutants.md`.
//!
//! Left to others: what a safeguard does (where it is used), who removes them one by one (`cargo xtask mutants`).
//!
//! The idea is that of mutation testing, but the mutants are chosen by hand: each is a mistake that systems like this one
//! have made.

mod list;

pub use list::Safeguard;

#[cfg(all(feature = "mutants", not(debug_assertions)))]
compile_error!("the feature `mutants` lets the environment take safeguards away: it is for tests only");

impl Safeguard {
    /// The safeguard of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|known| known.name() == name)
    }

    /// Whether the safeguard does its work: always, but where a test takes it away.
    #[cfg(not(feature = "mutants"))]
    #[inline(always)]
    #[must_use]
    pub const fn is_kept(self) -> bool {
        true
    }

    /// Whether the safeguard does its work, or was taken away by `CBD_MUTANT`.
    ///
    /// # Panics
    /// When the variable names no safeguard.
    #[cfg(feature = "mutants")]
    #[must_use]
    pub fn is_kept(self) -> bool {
        removed::get() != Some(self)
    }

    /// A check: whether `condition` holds, or nobody looks.
    #[inline(always)]
    #[must_use]
    pub fn holds(self, condition: bool) -> bool {
        condition || !self.is_kept()
    }
}

#[cfg(feature = "mutants")]
mod removed {
    use super::Safeguard;
    use std::sync::OnceLock;

    static REMOVED: OnceLock<Option<Safeguard>> = OnceLock::new();

    pub(super) fn get() -> Option<Safeguard> {
        *REMOVED.get_or_init(|| {
            let name = std::env::var("CBD_MUTANT").ok().filter(|name| !name.is_empty())?;
            Some(Safeguard::from_name(&name).unwrap_or_else(|| panic!("CBD_MUTANT={name} is no safeguard")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn each_safeguard_has_a_name_of_its_own_and_says_what_goes_wrong_without_it() {
        let names: BTreeSet<_> = Safeguard::ALL.iter().map(|known| known.name()).collect();
        assert_eq!(names.len(), Safeguard::ALL.len());
        for known in Safeguard::ALL {
            assert_eq!(Safeguard::from_name(known.name()), Some(*known));
            assert!(known.about().len() > 20, "{} says nothing", known.name());
        }
    }
}
