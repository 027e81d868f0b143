//! The C interface: what `cbd.h` declares.
//!
//! Always true here: every function says whether it went well, with 0 (or a count) or a negative errno, and
//! [`cbd_last_error`] then has the words; no panic crosses the border; null pointers where none may be, flags and reserved fields
//! that mean nothing, and sizes that do not fit are errors. A structure of zeroes is valid wherever one is read, and stands for the
//! defaults.
//!
//! Left to the caller: that a pointer which is not null leads to what its type says, and that a handle is not used while, or after,
//! it is closed.

mod border;
mod device;
mod queue;
mod region;

pub use device::*;
pub use queue::*;
pub use region::*;

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

/// What went wrong in the last call of this thread that failed: which object, and what to do about it. It is valid until
/// the next call of this thread that fails, and empty before the first.
#[unsafe(no_mangle)]
pub extern "C" fn cbd_last_error() -> *const c_char {
    border::last_error()
}
