//! Points: positions between two steps of a thread at which another thread may continue and the power may fail.
//!
//! Invariants: no thread holds a lock of the simulator at a point, so code that runs there can access memory and
//! disk; outside an execution, and during its setup and checks, a point does nothing.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Work that is planned for a point.
type Event = Box<dyn FnOnce()>;
/// Work that is executed at every step of the disk.
type DiskCheck = Rc<dyn Fn()>;

thread_local! {
    static LIVE: Cell<bool> = const { Cell::new(false) };
    static SPINS: Cell<bool> = const { Cell::new(false) };
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static DISK_CHECK: RefCell<Option<DiskCheck>> = const { RefCell::new(None) };
    static EVENTS: RefCell<Vec<(u64, Event)>> = const { RefCell::new(Vec::new()) };
}

/// A point: another thread may continue here.
pub fn point() {
    if !LIVE.get() || std::thread::panicking() {
        return;
    }
    COUNT.set(COUNT.get() + 1);
    happen();
    shuttle::thread::yield_now();
}

/// As [`point`], for a thread that cannot continue until another thread has changed a value without waking a waiter.
pub fn spin() {
    SPINS.set(true);
    point();
    SPINS.set(false);
}

/// Whether the thread that yields now cannot continue by itself.
pub(crate) fn spins() -> bool {
    SPINS.get()
}

/// Enables points; no event is planned.
pub(crate) fn begin() {
    COUNT.set(0);
    forget();
    LIVE.set(true);
}

/// Disables points. Returns the number of points since [`begin`].
pub(crate) fn end() -> u64 {
    LIVE.set(false);
    SPINS.set(false);
    forget();
    COUNT.get()
}

fn forget() {
    EVENTS.with_borrow_mut(Vec::clear);
    DISK_CHECK.take();
}

/// Calls `check` whenever the disk has accepted an operation or is about to complete one.
pub(crate) fn set_disk_check(check: impl Fn() + 'static) {
    DISK_CHECK.set(Some(Rc::new(check)));
}

/// The disk has accepted an operation, or is about to complete one.
pub(crate) fn disk_step() {
    let check = DISK_CHECK.with_borrow(Clone::clone);
    if let Some(check) = check.filter(|_| LIVE.get() && !std::thread::panicking()) {
        happens(|| check());
    }
}

/// Plans `event` for the `number`-th point from the beginning. The event runs between two steps of the thread that is running at
/// that point.
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

/// Runs an event, which inspects the world with the engine's own code; no other thread runs meanwhile.
fn happens(event: impl FnOnce()) {
    LIVE.set(false);
    event();
    LIVE.set(true);
}
