//! Who stores: a stand-in for processors.
//!
//! A fence drains the stores of its own processor only. A simulation that runs on one thread says with
//! [`act_as`] whose turn it is, and so finds the fence that one thread left to another. A thread that says
//! nothing is an actor of its own.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// The processor that a store came from.
pub type Actor = u32;

/// Stores that a process left behind when it died.
pub(crate) const GHOST: Actor = u32::MAX;

// Actors that are chosen by number stay below, those of threads above.
static NEXT_THREAD: AtomicU32 = AtomicU32::new(1 << 16);

thread_local! {
    static CURRENT: Cell<Actor> = Cell::new(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
}

/// From now on this thread's stores and fences are those of `actor`.
pub fn act_as(actor: Actor) {
    CURRENT.set(actor);
}

/// Whose turn it is on this thread.
pub(crate) fn current() -> Actor {
    CURRENT.get()
}
