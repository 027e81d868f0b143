//! The registrations: a table that the handler reads at any moment, without a lock.
//!
//! Invariants: the handler reads an entry in its state before a change or after it, or skips it. Regions and the memory of
//! virtual machines have separate entries, so that neither can exhaust those of the other.

use crate::Routines;
use cbd_types::{Error, ErrorKind, Result};
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

const ROUTINE_ENTRIES: Range<usize> = 0..256;
const ZEROES_ENTRIES: Range<usize> = 256..ENTRIES;
const ENTRIES: usize = 256 + 1024;

/// The handling of a fault.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// The routine that caused the fault ends.
    Routines(&'static Routines),
    /// Zeroes replace the memory.
    Zeroes,
}

/// An entry as the handler reads it.
#[derive(Clone, Copy)]
pub(crate) struct Registered {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) kind: Kind,
}

struct Slot {
    /// Odd during a change.
    changes: AtomicU32,
    start: AtomicUsize,
    /// Zero if nothing is registered.
    end: AtomicUsize,
    /// Null for zeroes.
    routines: AtomicPtr<Routines>,
    lost: AtomicBool,
}

/// Changed under [`CHANGES`].
static SLOTS: [Slot; ENTRIES] = [const {
    Slot {
        changes: AtomicU32::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        routines: AtomicPtr::new(null_mut()),
        lost: AtomicBool::new(false),
    }
}; ENTRIES];
static CHANGES: Mutex<()> = Mutex::new(());
/// Number of losses of memory, in all entries.
pub(crate) static LOSSES: AtomicU64 = AtomicU64::new(0);

/// The number of a used entry of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryNumber(usize);

impl EntryNumber {
    pub(crate) fn is_lost(self) -> bool {
        SLOTS[self.0].lost.load(Ordering::Acquire)
    }

    /// Marks the memory as lost. Called before its bytes change: a thread that then reads a zero, and checks the marks after
    /// that, observes the loss.
    pub(crate) fn mark_lost(self) {
        SLOTS[self.0].lost.store(true, Ordering::SeqCst);
        LOSSES.fetch_add(1, Ordering::SeqCst);
    }
}

/// All registrations; for the handler.
pub(crate) fn all() -> impl Iterator<Item = (EntryNumber, Registered)> {
    SLOTS.iter().enumerate().filter_map(|(number, slot)| Some((EntryNumber(number), slot.read()?)))
}

/// The right to change the table.
pub(crate) struct Changes {
    _held: MutexGuard<'static, ()>,
}

pub(crate) fn change() -> Changes {
    Changes { _held: CHANGES.lock().unwrap_or_else(PoisonError::into_inner) }
}

impl Changes {
    /// Registers `length` bytes from `start`.
    pub(crate) fn take(&self, kind: Kind, start: usize, length: usize) -> Result<EntryNumber> {
        let (range, routines) = match kind {
            Kind::Routines(routines) => (ROUTINE_ENTRIES, std::ptr::from_ref(routines).cast_mut()),
            Kind::Zeroes => (ZEROES_ENTRIES, null_mut()),
        };
        let most = range.len();
        let free = range.into_iter().find(|&number| SLOTS[number].end.load(Ordering::Relaxed) == 0);
        let number = free.ok_or_else(|| {
            let text = match kind {
                Kind::Routines(_) => format!("{most} regions are mapped already; unregister one first"),
                Kind::Zeroes => {
                    format!(
                        "virtual machines have handed over {most} pieces of memory already; stop one first"
                    )
                }
            };
            Error::new(ErrorKind::NoSpace, text)
        })?;
        SLOTS[number].set(start, start + length, routines);
        Ok(EntryNumber(number))
    }

    pub(crate) fn release(&self, entry: EntryNumber) {
        SLOTS[entry.0].set(0, 0, null_mut());
    }
}

impl Slot {
    /// The caller holds the right to change the table.
    fn set(&self, start: usize, end: usize, routines: *mut Routines) {
        let before = self.changes.load(Ordering::Relaxed);
        self.changes.store(before.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        self.routines.store(routines, Ordering::Relaxed);
        self.lost.store(false, Ordering::Relaxed);
        self.changes.store(before.wrapping_add(2), Ordering::Release);
    }

    /// The registration in this entry; `None` if it is unused or being changed. No thread accesses memory while it is being
    /// registered or unregistered, so a changing entry cannot belong to a fault.
    fn read(&self) -> Option<Registered> {
        let before = self.changes.load(Ordering::Acquire);
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        let routines = self.routines.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if before % 2 == 1 || self.changes.load(Ordering::Relaxed) != before || end == 0 {
            return None;
        }
        // SAFETY: the pointer is null or was created from a reference with a static lifetime.
        let kind = unsafe { routines.as_ref() }.map_or(Kind::Zeroes, Kind::Routines);
        Some(Registered { start, end, kind })
    }
}
