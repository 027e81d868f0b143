//! Settings of a daemon that serves a device to which its own pages may be written.
//!
//! A thread that writes dirty pages out must not wait for memory that only such writing can free. The kernel
//! exempts a thread that declares itself an I/O flusher ([`become_io_flusher`]), and locked memory never has
//! to be paged in through the device itself ([`lock_memory`]).

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::configure_io_flusher_behavior;

/// Declares to the kernel that the calling thread serves a block device: its allocations do not wait for I/O
/// or file systems, and it is not throttled as a writer. Each thread of the data path calls it.
///
/// # Errors
/// The missing requirement, as text: the capability `CAP_SYS_RESOURCE`, or Linux 5.6.
pub fn become_io_flusher() -> Result<(), String> {
    configure_io_flusher_behavior(true).map_err(|error| {
        format!(
            "the kernel does not treat this thread as one that serves a block device (PR_SET_IO_FLUSHER: {error}); \
             it needs CAP_SYS_RESOURCE and Linux 5.6, else memory pressure can stall the device"
        )
    })
}

/// Locks the present and future memory of the process, as it is touched. Regions are exempted by mapping them
/// later and calling [`exclude_from_lock`]: locking them would fill memory with their content.
///
/// # Errors
/// The missing requirement, as text: the capability `CAP_IPC_LOCK`, or a higher limit.
pub fn lock_memory() -> Result<(), String> {
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT).map_err(|error| {
        format!(
            "the daemon's memory cannot be locked (mlockall: {error}); it needs CAP_IPC_LOCK or LimitMEMLOCK=infinity, \
             else a page of the daemon that was paged out can stall the device"
        )
    })
}

/// Exempts a mapping from [`lock_memory`].
///
/// # Errors
/// When the range is not mapped.
pub fn exclude_from_lock(start: *const u8, length: usize) -> Result<(), String> {
    cbd_sys::memory::unlock(start.addr(), length)
        .map_err(|error| format!("a mapping cannot be unlocked (munlock: {error})"))
}
