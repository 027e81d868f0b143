//! The C interface: the functions that `cbd.h` declares.
//!
//! Invariants: every function returns 0 (or a count) on success, and a negative errno on failure; [`cbd_last_error`] then returns
//! the text. No panic crosses the boundary. Unexpected null pointers, unknown flags, non-zero reserved fields, and sizes that do
//! not fit are errors. A structure of zeroes is valid wherever a function reads one, and means the defaults.
//!
//! The caller guarantees that a pointer that is not null points to an object of its type, and that a handle is not used during or
//! after its close.

mod border;
mod device;
mod queue;
mod region;
mod verify;

pub use device::*;
pub use queue::*;
pub use region::*;
pub use verify::*;

use std::ffi::{CStr, c_char};

/// The version of the library, as text: "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn cbd_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"?",
        };
    VERSION.as_ptr()
}

/// The error of the last failed call of this thread: the object, and the remedy. The text is valid until the next failed call of
/// this thread, and empty before the first.
#[unsafe(no_mangle)]
pub extern "C" fn cbd_last_error() -> *const c_char {
    border::last_error()
}
