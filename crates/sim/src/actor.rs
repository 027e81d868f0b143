//! The actor of a store: a stand-in for processors.
//!
//! A fence drains the stores of its own processor only. A simulation that runs on one thread names the
//! current actor with [`act_as`]. It then finds a store that a fence of another thread was meant to drain. A
//! thread that does not call [`act_as`] is an actor of its own.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// The processor that a store came from.
pub type Actor = u32;

/// Stores that a process left behind when it died.
pub(crate) const GHOST: Actor = u32::MAX;

// Actors that are chosen by number stay below this number; those of threads begin here.
static NEXT_THREAD: AtomicU32 = AtomicU32::new(1 << 16);

thread_local! {
    static CURRENT: Cell<Actor> = Cell::new(NEXT_THREAD.fetch_add(1, Ordering::Relaxed));
}

/// Makes the later stores and fences of this thread those of `actor`.
pub fn act_as(actor: Actor) {
    CURRENT.set(actor);
}

/// The current actor of this thread.
pub(crate) fn current() -> Actor {
    CURRENT.get()
}
