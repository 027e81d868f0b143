//! A bound on the bytes that all users of one resource take together: address space, buffers.
//!
//! Always true here: the sum of all shares never exceeds the limit; a share is returned when it is dropped; nothing
//! waits, so a caller that is refused has to go on without, or to refuse its own client.
//!
//! Left to others: what is accounted, and the consequence of a refusal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number of bytes that users share.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    used: AtomicU64,
    refusals: AtomicU64,
}

impl Budget {
    /// A budget of `limit` bytes.
    #[must_use]
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, used: AtomicU64::new(0), refusals: AtomicU64::new(0) })
    }

    /// The limit in bytes.
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that are taken.
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
        if !self.reserve(bytes, 0) {
            self.refusals.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(Share { budget: Arc::clone(self), bytes })
    }

    /// Takes `bytes` if `rest` bytes remain free.
    fn reserve(&self, bytes: u64, rest: u64) -> bool {
        let fits = |used: u64| {
            let after = used.checked_add(bytes)?;
            let needed = after.checked_add(rest)?;
            (needed <= self.limit).then_some(after)
        };
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }
}

/// Bytes that one user has taken.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Share {
    /// Bytes of this share.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the share to `bytes`. It grows only if `rest` bytes remain free; false if it did not grow.
    pub fn resize(&mut self, bytes: u64, rest: u64) -> bool {
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
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
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
}
