//! Handling of failing mapped memory: the SIGBUS of a poisoned page, or of a truncated file, ends neither the process nor
//! unrelated work in it.
//!
//! The code that maps memory registers it, with one of two methods. A fault in memory of *routines* ends the routine that
//! caused it, and the routine reports the fault to its caller: regions use this method. A fault in memory of *zeroes*
//! replaces all of the memory by zeroes and sets a mark. The code that copied from the memory checks this mark before it
//! relies on the copy. The memory of virtual machines uses this method, because the crates that process its rings cannot
//! handle faults.
//!
//! Invariants: there is one handler in the process. It handles only faults that the kernel itself raised, at an address
//! inside registered memory, and in memory of routines only at an instruction of the routines. Every other SIGBUS is passed
//! to the previous handler of the signal, or ends the process as without this crate. The handler allocates nothing, takes no
//! lock and accesses no memory except the statics of this crate, `errno`, and the signal information and context that it was
//! passed.
//!
//! Elsewhere: the meaning of the failure (`cbd-pmem`, `cbd-vhost`).

mod handler;
mod table;

use cbd_types::Result;
use table::{EntryNumber, Kind, LOSSES};

/// Code that returns with an error after a fault in registered memory.
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
    /// The instructions from `begin` up to `end`. After a fault in them execution continues at `landing`, with 1 in `rax` and
    /// the failed address in `rdx`, 0 if the kernel cannot report it.
    ///
    /// # Safety
    /// At each instruction in between, continuing at `landing` with those two registers changed must be
    /// equivalent to returning to the caller of the routine.
    #[must_use]
    pub const unsafe fn new(begin: *const u8, end: *const u8, landing: *const u8) -> Self {
        Self { begin, end, landing }
    }
}

/// Memory whose failures are handled while this value lives. Drop it before the memory is unmapped.
#[derive(Debug)]
pub struct Registration {
    entry: EntryNumber,
}

impl Registration {
    /// Registers `length` bytes from `start`: a fault in them ends the running one of `routines`. On processors other than
    /// x86-64 faults are not handled.
    ///
    /// # Errors
    /// If the system refuses the handler, or too many regions are mapped.
    pub fn of_routines(start: usize, length: usize, routines: &'static Routines) -> Result<Self> {
        Self::new(Kind::Routines(routines), start, length)
    }

    /// Registers `length` bytes from `start`: a fault in them replaces all of them by zeroes; their content is lost.
    ///
    /// # Safety
    /// They are a mapping that outlives this value, that no other code replaces, into which no reference
    /// exists, and whose bytes may change at any time.
    ///
    /// # Errors
    /// If the system refuses the handler, or too many pieces are registered.
    pub unsafe fn of_zeroes(start: usize, length: usize) -> Result<Self> {
        Self::new(Kind::Zeroes, start, length)
    }

    fn new(kind: Kind, start: usize, length: usize) -> Result<Self> {
        let changes = table::change();
        handler::install(&changes)?;
        Ok(Self { entry: changes.take(kind, start, length)? })
    }

    /// Whether memory of zeroes was lost: since then it reads as zeroes.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.entry.is_lost()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        table::change().release(self.entry);
    }
}

/// Number of losses of memory of zeroes since the process started. One load shows whether a loss occurred since the last
/// check.
#[must_use]
pub fn losses() -> u64 {
    LOSSES.load(std::sync::atomic::Ordering::Acquire)
}
