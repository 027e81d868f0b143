//! Values that were read from media and are not verified yet.

use cbd_types::MutationPoint;

/// A value read from media. It is accessible only through `verify`, which each type implements with the arguments that
/// its check needs.
#[derive(Clone, Copy, Debug)]
pub struct Unverified<T>(T);

impl<T: Copy> Unverified<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(value)
    }

    /// The first of several named checks.
    #[inline]
    pub(crate) fn demand(&self, point: MutationPoint, check: impl FnOnce(&T) -> bool) -> Option<Checked<T>> {
        Checked(self.0).demand(point, check)
    }

    /// An unverified property of the value. Do not rely on it.
    #[inline]
    pub(crate) fn claim<C>(&self, claim: impl FnOnce(&T) -> C) -> C {
        claim(&self.0)
    }
}

/// A value that has passed at least one check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked<T>(T);

impl<T: Copy> Checked<T> {
    /// A further check.
    #[inline]
    pub(crate) fn demand(self, point: MutationPoint, check: impl FnOnce(&T) -> bool) -> Option<Self> {
        point.holds(check(&self.0)).then_some(self)
    }

    /// The value, after all checks.
    #[inline]
    pub(crate) const fn accept(self) -> T {
        self.0
    }
}
