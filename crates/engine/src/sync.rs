//! Numbers that threads share without a lock.
//!
//! Invariants: each access first calls [`Environment::before_shared_access`], so that a model that schedules threads can let
//! another thread run before it. With an environment whose hook does nothing, each access is a plain atomic access.

use crate::Environment;
use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// A number of type `A` that threads of `E` share.
pub(crate) struct Shared<E, A> {
    number: A,
    environment: PhantomData<fn() -> E>,
}

/// A shared boolean.
pub(crate) type SharedBool<E> = Shared<E, AtomicBool>;
/// A shared number of 32 bits.
pub(crate) type SharedU32<E> = Shared<E, AtomicU32>;
/// A shared number of 64 bits.
pub(crate) type SharedU64<E> = Shared<E, AtomicU64>;

/// The methods that every atomic type of `core` has.
macro_rules! shared {
    ($atomic:ty, $plain:ty) => {
        impl<E: Environment> Shared<E, $atomic> {
            pub(crate) const fn new(value: $plain) -> Self {
                Self { number: <$atomic>::new(value), environment: PhantomData }
            }

            #[inline]
            pub(crate) fn load(&self, order: Ordering) -> $plain {
                E::before_shared_access();
                self.number.load(order)
            }

            #[inline]
            pub(crate) fn store(&self, value: $plain, order: Ordering) {
                E::before_shared_access();
                self.number.store(value, order);
            }
        }
    };
}

shared!(AtomicBool, bool);
shared!(AtomicU32, u32);
shared!(AtomicU64, u64);

impl<E: Environment> SharedBool<E> {
    #[inline]
    pub(crate) fn swap(&self, value: bool, order: Ordering) -> bool {
        E::before_shared_access();
        self.number.swap(value, order)
    }
}

impl<E: Environment> SharedU32<E> {
    #[inline]
    pub(crate) fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        E::before_shared_access();
        self.number.fetch_add(value, order)
    }

    /// Stores `to` if the value is `from`.
    pub(crate) fn replace(&self, from: u32, to: u32) {
        E::before_shared_access();
        let _ = self.number.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst);
    }

    #[inline]
    pub(crate) fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        E::before_shared_access();
        self.number.fetch_sub(value, order)
    }

    #[inline]
    pub(crate) fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        E::before_shared_access();
        self.number.fetch_or(bits, order)
    }

    #[inline]
    pub(crate) fn fetch_and(&self, bits: u32, order: Ordering) -> u32 {
        E::before_shared_access();
        self.number.fetch_and(bits, order)
    }
}

impl<E: Environment> SharedU64<E> {
    #[inline]
    pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        E::before_shared_access();
        self.number.fetch_add(value, order)
    }

    #[inline]
    pub(crate) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
        E::before_shared_access();
        self.number.fetch_max(value, order)
    }

    /// Stores `to` if the value is `from`; returns whether it was.
    pub(crate) fn replace(&self, from: u64, to: u64) -> bool {
        E::before_shared_access();
        self.number.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}
