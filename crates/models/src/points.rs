//! Points: the places between two steps of a thread, at which another thread may go on, and the power may fail.
//!
//! Always true here: nobody holds a lock of the simulator at a point, so whatever runs there can look at memory and disk;
//! outside an execution, and while one is being set up or judged, a point is nothing.

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

/// Another thread may go on here.
pub fn point() {
    if !LIVE.get() || std::thread::panicking() {
        return;
    }
    COUNT.set(COUNT.get() + 1);
    happen();
    shuttle::thread::yield_now();
}

/// As [`point`], by a thread that cannot go on until another one has done something that wakes nobody.
pub fn spin() {
    SPINS.set(true);
    point();
    SPINS.set(false);
}

/// Whether the thread that yields now cannot go on by itself.
pub(crate) fn spins() -> bool {
    SPINS.get()
}

/// From now on points count; no event is planned.
pub(crate) fn begin() {
    COUNT.set(0);
    forget();
    LIVE.set(true);
}

/// From now on points do nothing. Returns how many there were.
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

/// Whenever the disk has taken an operation or is about to give one back, `look` happens.
pub(crate) fn look_at_disk(look: impl Fn() + 'static) {
    LOOK.set(Some(Rc::new(look)));
}

/// The disk has taken an operation, or is about to give one back.
pub(crate) fn disk_step() {
    let look = LOOK.with_borrow(Clone::clone);
    if let Some(look) = look.filter(|_| LIVE.get() && !std::thread::panicking()) {
        happens(|| look());
    }
}

/// At the `number`-th point from the beginning `event` happens, between two steps of whoever runs then.
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

/// An event looks at the world with the engine's own code: nobody else moves meanwhile.
fn happens(event: impl FnOnce()) {
    LIVE.set(false);
    event();
    LIVE.set(true);
}
