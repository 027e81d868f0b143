//! System calls that neither the standard library nor rustix offers safely, each behind a safe function, and the
//! kernel's tables of mounts and swap space.
//!
//! Invariants: every function is safe to call with any arguments, and a failed call is an [`std::io::Error`]. A
//! pointer that the kernel gets is to a value that outlives the call and is as large as the call needs. No call
//! queries the server of a file, except [`loop_device::status`].
//!
//! Elsewhere: the meaning of a result, and messages for users. A call that rustix offers safely is made through rustix
//! by the crate that needs it; what several crates need on top of such calls (events, timers, mounts) is here too.

pub mod errors;
pub mod event;
pub mod extents;
pub mod files;
pub mod ioctl;
pub mod loop_device;
pub mod memory;
pub mod mounts;
pub mod passing;
pub mod passthrough;
pub mod process;
pub mod words;

mod device;
mod lock;

pub use device::DeviceNumber;
pub use lock::{Lock, set_lock};

use std::io;

/// The result of a system call, or the error that it left in `errno`.
fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
