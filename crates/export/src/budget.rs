//! A bound on the bytes that all users of one resource take together: address space, buffers.
//!
//! A group of users, such as the clients of one export, can have a [`Guarantee`]: shares that no other group can take.
//!
//! Invariants: the sum of all shares and of all unused guaranteed shares never exceeds the limit. Guarantees take at most half of
//! it. A share is freed when it is dropped. No call waits, so a caller that is refused must continue without the share, or refuse
//! its own client.
//!
//! Elsewhere: the objects that are accounted, and the consequence of a refusal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A number of bytes that users share.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    used: AtomicU64,
    /// Bytes of all guarantees, in use or not; `used` contains them.
    guaranteed: AtomicU64,
    refusals: AtomicU64,
}

impl Budget {
    /// A budget of `limit` bytes.
    #[must_use]
    pub fn new(limit: u64) -> Arc<Self> {
        let [used, guaranteed, refusals] = [0; 3].map(AtomicU64::new);
        Arc::new(Self { limit, used, guaranteed, refusals })
    }

    /// The limit in bytes.
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that are taken or guaranteed.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Number of refused shares.
    #[must_use]
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// Takes `bytes`, if they are free; otherwise the refusal is counted.
    #[must_use]
    pub fn take(self: &Arc<Self>, bytes: u64) -> Option<Share> {
        self.take_beside(bytes, 0)
    }

    /// Takes `bytes`, if `rest` bytes then remain free; otherwise the refusal is counted.
    fn take_beside(self: &Arc<Self>, bytes: u64, rest: u64) -> Option<Share> {
        if !self.reserve(bytes, rest) {
            self.refusals.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(Share { budget: Arc::clone(self), bytes, guarantee: None })
    }

    /// Takes `bytes`, if `rest` bytes then remain free.
    fn reserve(&self, bytes: u64, rest: u64) -> bool {
        let fits = |used: u64| {
            let after = used.checked_add(bytes)?;
            let needed = after.checked_add(rest)?;
            (needed <= self.limit).then_some(after)
        };
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// Reserves `bytes` for a guarantee, if all guarantees together then take at most half of the limit.
    fn reserve_guaranteed(&self, bytes: u64) -> bool {
        let fits = |all: u64| all.checked_add(bytes).filter(|all| *all <= self.limit / 2);
        if self.guaranteed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return false;
        }
        let is_free = self.reserve(bytes, 0);
        if !is_free {
            self.guaranteed.fetch_sub(bytes, Ordering::Relaxed);
        }
        is_free
    }
}

/// A number of shares of one size that a group of users has to itself: no other group can take them.
#[derive(Debug)]
pub struct Guarantee {
    budget: Arc<Budget>,
    /// Bytes of one share.
    bytes: u64,
    /// Shares that were reserved.
    count: usize,
    /// Reserved shares that are not in use.
    free: AtomicUsize,
}

impl Guarantee {
    /// Reserves `count` shares of `bytes` each in `budget`. Reserves fewer, possibly none, if fewer are free or if half of the
    /// limit would not remain for shares that are not guaranteed.
    #[must_use]
    pub fn new(budget: &Arc<Budget>, bytes: u64, count: usize) -> Arc<Self> {
        let count = (0..count).take_while(|_| budget.reserve_guaranteed(bytes)).count();
        Arc::new(Self { budget: Arc::clone(budget), bytes, count, free: AtomicUsize::new(count) })
    }

    /// The budget to which the shares belong.
    #[must_use]
    pub const fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Number of reserved shares, in use or not.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// A share for one more user of the group. It is a guaranteed one, or if all of these are in use, one of the budget, provided
    /// that `rest` bytes then remain free. A refusal is counted.
    #[must_use]
    pub fn take(self: &Arc<Self>, rest: u64) -> Option<Share> {
        let one = |free: usize| free.checked_sub(1);
        if self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one).is_err() {
            return self.budget.take_beside(self.bytes, rest);
        }
        let (budget, guarantee) = (Arc::clone(&self.budget), Some(Arc::clone(self)));
        Some(Share { budget, bytes: self.bytes, guarantee })
    }
}

impl Drop for Guarantee {
    fn drop(&mut self) {
        // A share in use holds a reference to its guarantee, so no share is in use here.
        let bytes = self.bytes * self.count as u64;
        self.budget.used.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.guaranteed.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes that one user has taken.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    bytes: u64,
    /// The guarantee to which the share returns, if it is a guaranteed share.
    guarantee: Option<Arc<Guarantee>>,
}

impl Share {
    /// Bytes of this share.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The guaranteed bytes: the share never becomes smaller than this.
    fn guaranteed(&self) -> u64 {
        self.guarantee.as_ref().map_or(0, |guarantee| guarantee.bytes)
    }

    /// Changes the share to `bytes`, or to the guaranteed bytes if they are more. The share grows only if `rest` bytes then
    /// remain free; returns false if it did not grow.
    pub fn resize(&mut self, bytes: u64, rest: u64) -> bool {
        let bytes = bytes.max(self.guaranteed());
        if let Some(more) = bytes.checked_sub(self.bytes)
            && more > 0
        {
            if !self.budget.reserve(more, rest) {
                return false;
            }
        } else {
            self.budget.used.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
        }
        self.bytes = bytes;
        true
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes - self.guaranteed(), Ordering::Relaxed);
        if let Some(guarantee) = &self.guarantee {
            guarantee.free.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_never_exceed_the_limit_and_return_when_they_are_dropped() {
        let budget = Budget::new(100);
        let first = budget.take(60).expect("free");
        assert!(budget.take(41).is_none());
        assert!(budget.take(u64::MAX).is_none());
        let second = budget.take(40).expect("free");
        assert_eq!((budget.used(), budget.refusals()), (100, 2));
        drop(first);
        assert_eq!(budget.used(), 40);
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_share_grows_only_while_enough_is_left_for_others() {
        let budget = Budget::new(100);
        let mut share = budget.take(0).expect("free");
        assert!(share.resize(50, 50));
        assert!(!share.resize(51, 50));
        assert!(share.resize(20, u64::MAX));
        assert_eq!((share.bytes(), budget.used()), (20, 20));
    }

    #[test]
    fn a_guaranteed_share_is_free_whatever_other_groups_take() {
        let budget = Budget::new(100);
        let (one, other) = (Guarantee::new(&budget, 10, 2), Guarantee::new(&budget, 10, 2));
        let taken: Vec<Share> = std::iter::from_fn(|| one.take(20)).collect();
        assert_eq!((taken.len(), budget.used(), budget.refusals()), (6, 80, 1));
        let mut own = [(); 2].map(|()| other.take(u64::MAX).expect("guaranteed"));
        assert!(own[0].resize(30, 0) && own[0].resize(0, 0));
        assert_eq!((own[0].bytes(), budget.used()), (10, 80));
        assert!(other.take(20).is_none());
        drop(own);
        assert_eq!(budget.used(), 80);
        drop((taken, one, other));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn guarantees_take_half_of_the_limit_at_most_and_end_with_their_last_share() {
        let budget = Budget::new(100);
        let (one, other) = (Guarantee::new(&budget, 20, 2), Guarantee::new(&budget, 10, 4));
        assert_eq!((one.count(), other.count(), budget.used()), (2, 1, 50));
        let share = one.take(0).expect("guaranteed");
        drop(one);
        assert_eq!(Guarantee::new(&budget, 10, 4).count(), 0);
        drop(share);
        assert_eq!(Guarantee::new(&budget, 10, 4).count(), 4);
        assert_eq!(budget.used(), 10);
        let _all = budget.take(85).expect("free");
        assert_eq!(Guarantee::new(&budget, 5, 4).count(), 1);
    }
}
