//! Mapped memory that fails under us: the SIGBUS of a poisoned page, or of a file that was cut short, ends neither the process
//! nor what others do in it.
//!
//! Whoever maps memory registers it, in one of two ways. A fault in memory of *routines* ends the routine that touched it, which
//! then says so to its caller: regions are reached like this. A fault in memory of *zeroes* puts zeroes where all of the memory
//! was and leaves a mark, which whoever copied from it looks at before it relies on what it copied: the memory of virtual
//! machines, whose rings are walked by crates that know nothing of faults.
//!
//! Always true here: there is one handler in the process; only a fault that the kernel raised itself, at an address inside
//! registered memory, is taken, and in memory of routines only at an instruction of theirs; every other SIGBUS goes to who had
//! the signal before, or ends the process as it would have without us. The handler allocates nothing, takes no lock and touches
//! no memory but the statics here and the context it was given.
//!
//! Left to others: what the failure means (`cbd-pmem`, `cbd-vhost`).

mod handler;
mod table;

use cbd_types::Result;
use table::{Kind, LOSSES, Place};

/// Code of which a fault in registered memory ends what runs.
#[derive(Debug)]
pub struct Routines {
    begin: *const u8,
    end: *const u8,
    landing: *const u8,
}

// SAFETY: the addresses are only compared and jumped to.
unsafe impl Sync for Routines {}
// SAFETY: as above.
unsafe impl Send for Routines {}

impl Routines {
    /// The instructions from `begin` up to `end`. A fault in them goes on at `landing`, with 1 in `rax` and the address that
    /// failed in `rdx`, 0 where the kernel cannot say which.
    ///
    /// # Safety
    /// At each instruction in between, going on at `landing` with those two registers changed must be as good as returning to the
    /// caller of the routine.
    #[must_use]
    pub const unsafe fn new(begin: *const u8, end: *const u8, landing: *const u8) -> Self {
        Self { begin, end, landing }
    }
}

/// Memory whose failures are taken while this lives. It has to go before the memory is unmapped.
#[derive(Debug)]
pub struct Registration {
    place: Place,
}

impl Registration {
    /// Registers `length` bytes from `start`: a fault there ends the one of `routines` that touched them. On processors other
    /// than x86-64 it is not taken.
    ///
    /// # Errors
    /// When the system refuses the handler, or too many regions are mapped.
    pub fn of_routines(start: usize, length: usize, routines: &'static Routines) -> Result<Self> {
        Self::new(Kind::Routines(routines), start, length)
    }

    /// Registers `length` bytes from `start`: with a fault there all of them are replaced by zeroes, and are lost.
    ///
    /// # Safety
    /// They are a mapping that outlives this, that nobody else replaces, into which nobody holds a reference, and whose bytes may
    /// change at any time.
    ///
    /// # Errors
    /// When the system refuses the handler, or too many pieces are registered.
    pub unsafe fn of_zeroes(start: usize, length: usize) -> Result<Self> {
        Self::new(Kind::Zeroes, start, length)
    }

    fn new(kind: Kind, start: usize, length: usize) -> Result<Self> {
        let changes = table::change();
        handler::install(&changes)?;
        Ok(Self { place: changes.take(kind, start, length)? })
    }

    /// Whether memory of zeroes was taken away: it reads as zeroes since.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.place.is_lost()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        table::change().give_back(self.place);
    }
}

/// How often memory of zeroes was lost since the process began: one load says that nothing was since one looked.
#[must_use]
pub fn losses() -> u64 {
    LOSSES.load(std::sync::atomic::Ordering::Acquire)
}
