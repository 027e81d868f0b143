//! Points: between two steps of a thread, where another thread may continue and the power may fail.
//!
//! Invariants: no thread holds a lock of the simulator at a point, so whatever runs there can access memory
//! and disk; outside an execution, and during its setup and checks, a point does nothing.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// What is to happen at a point.
type Event = Box<dyn FnOnce()>;
/// What is to happen at every step of the disk.
type Look = Rc<dyn Fn()>;

thread_local! {
    static LIVE: Cell<bool> = const { Cell::new(false) };
    static SPINS: Cell<bool> = const { Cell::new(false) };
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static LOOK: RefCell<Option<Look>> = const { RefCell::new(None) };
    static EVENTS: RefCell<Vec<(u64, Event)>> = const { RefCell::new(Vec::new()) };
}

/// Another thread may continue here.
pub fn point() {
    if !LIVE.get() || std::thread::panicking() {
        return;
    }
    COUNT.set(COUNT.get() + 1);
    happen();
    shuttle::thread::yield_now();
}

/// As [`point`], by a thread that cannot continue until another thread has done something that wakes no
/// waiter.
pub fn spin() {
    SPINS.set(true);
    point();
    SPINS.set(false);
}

/// Whether the thread that yields now cannot continue by itself.
pub(crate) fn spins() -> bool {
    SPINS.get()
}

/// Enables points, without any planned event.
pub(crate) fn begin() {
    COUNT.set(0);
    forget();
    LIVE.set(true);
}

/// Disables points. Returns how many there were.
pub(crate) fn end() -> u64 {
    LIVE.set(false);
    SPINS.set(false);
    forget();
    COUNT.get()
}

fn forget() {
    EVENTS.with_borrow_mut(Vec::clear);
    LOOK.take();
}

/// Calls `look` whenever the disk has accepted an operation or is about to complete one.
pub(crate) fn look_at_disk(look: impl Fn() + 'static) {
    LOOK.set(Some(Rc::new(look)));
}

/// The disk has accepted an operation, or is about to complete one.
pub(crate) fn disk_step() {
    let look = LOOK.with_borrow(Clone::clone);
    if let Some(look) = look.filter(|_| LIVE.get() && !std::thread::panicking()) {
        happens(|| look());
    }
}

/// Plans `event` for the `number`-th point from the beginning, between two steps of the thread that runs
/// then.
pub(crate) fn plan(number: u64, event: impl FnOnce() + 'static) {
    EVENTS.with_borrow_mut(|events| events.push((number, Box::new(event))));
}

fn happen() {
    let now = COUNT.get();
    let due = EVENTS.with_borrow_mut(|events| {
        let at = events.iter().position(|(number, _)| *number <= now)?;
        Some(events.swap_remove(at).1)
    });
    if let Some(event) = due {
        happens(event);
    }
}

/// An event inspects the world with the engine's own code: no other thread runs meanwhile.
fn happens(event: impl FnOnce()) {
    LIVE.set(false);
    event();
    LIVE.set(true);
}
