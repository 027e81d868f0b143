//! Converts failing memory to a result: a fault in a registered mapping ends only the routine of `guarded.s` that caused it.
//!
//! Elsewhere: the handler (`cbd-guard`), the meaning of the failure (`memory`, `mapping`).

pub use cbd_guard::Registration;

use cbd_guard::Routines;
use cbd_types::Result;

unsafe extern "C" {
    safe static cbd_pmem_guarded_begin: u8;
    safe static cbd_pmem_guarded_end: u8;
    safe static cbd_pmem_guarded_landing: u8;
}

// SAFETY: the routines between the two addresses use no stack and save no registers. A caller first checks the value that
// they leave in `rax`. The landing is their common return.
static ROUTINES: Routines = unsafe {
    Routines::new(
        &raw const cbd_pmem_guarded_begin,
        &raw const cbd_pmem_guarded_end,
        &raw const cbd_pmem_guarded_landing,
    )
};

/// Registers `length` bytes from `start` while the returned value lives.
///
/// # Errors
/// When the system refuses the handler, or too many mappings are open.
pub fn register(start: usize, length: usize) -> Result<Registration> {
    Registration::of_routines(start, length, &ROUTINES)
}
