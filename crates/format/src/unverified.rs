//! Bytes that were read and are not trusted yet.

use cbd_types::MutationPoint;

/// A value as it came from media. Nothing of it can be used before `verify`, which each type offers with
/// the arguments that its check needs.
#[derive(Clone, Copy, Debug)]
pub struct Unverified<T>(T);

impl<T: Copy> Unverified<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(value)
    }

    /// The first check of several: no value without one, and none without a name.
    #[inline]
    pub(crate) fn demand(&self, point: MutationPoint, check: impl FnOnce(&T) -> bool) -> Option<Checked<T>> {
        Checked(self.0).demand(point, check)
    }

    /// Something that it claims, whatever else is wrong with it. Not to be believed.
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

    /// The value: all checks were made.
    #[inline]
    pub(crate) const fn accept(self) -> T {
        self.0
    }
}
