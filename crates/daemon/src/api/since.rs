//! What was counted between two states of the same counters, for everything that shows rates.
//!
//! Invariants: no difference is negative. Counters that are smaller than before, or have gone, belong to another run of
//! the daemon or of a backend: [`have_fallen`] tells that, and the caller has no difference then.
//!
//! Elsewhere: the counters ([`super::figures`]), who shows rates (`cbdctrl top`, [`crate::web`]).

use super::{DiskFigures, OperationFigures, Wait};
use std::collections::BTreeMap;

/// Counters of one name.
pub trait Counted: Default {
    /// What was counted since `earlier`.
    #[must_use]
    fn since(&self, earlier: &Self) -> Self;

    /// The counters that only grow.
    fn counters(&self) -> [u64; 3];
}

impl Counted for OperationFigures {
    fn since(&self, earlier: &Self) -> Self {
        self.minus(earlier)
    }

    fn counters(&self) -> [u64; 3] {
        [self.requests, self.bytes, self.failed]
    }
}

impl Counted for DiskFigures {
    fn since(&self, earlier: &Self) -> Self {
        self.minus(earlier)
    }

    fn counters(&self) -> [u64; 3] {
        [self.operations, self.bytes, self.failed]
    }
}

impl Counted for Wait {
    fn since(&self, earlier: &Self) -> Self {
        Self {
            count: self.count.saturating_sub(earlier.count),
            total_ns: self.total_ns.saturating_sub(earlier.total_ns),
        }
    }

    fn counters(&self) -> [u64; 3] {
        [self.count, self.total_ns, 0]
    }
}

/// Whether a counter is smaller than before, or has gone.
#[must_use]
pub fn have_fallen<T: Counted>(earlier: &BTreeMap<String, T>, later: &BTreeMap<String, T>) -> bool {
    earlier.iter().any(|(name, before)| {
        let now = later.get(name).map_or([0; 3], Counted::counters);
        before.counters().iter().zip(now).any(|(before, now)| now < *before)
    })
}

/// What was counted since `earlier`, by name. A name that is new began at 0.
#[must_use]
pub fn since<T: Counted>(earlier: &BTreeMap<String, T>, later: &BTreeMap<String, T>) -> BTreeMap<String, T> {
    let nothing = T::default();
    let difference =
        |(name, now): (&String, &T)| (name.clone(), now.since(earlier.get(name).unwrap_or(&nothing)));
    later.iter().map(difference).collect()
}
