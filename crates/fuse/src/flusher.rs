//! What a daemon needs that serves the device its own pages may be written to.
//!
//! A thread that writes dirty pages out must not wait for memory that only such writing can free: the kernel
//! spares a thread that says so ([`become_io_flusher`]), and memory that cannot be paged out never has to be paged
//! in through the device itself ([`lock_memory`]).

use crate::system;

/// Tells the kernel that the calling thread serves a block device: its allocations do not wait for I/O or file
/// systems, and it is not throttled as a writer. To be called by each thread of the data path.
///
/// # Errors
/// What is missing, in words: the capability `CAP_SYS_RESOURCE`, or Linux 5.6.
pub fn become_io_flusher() -> Result<(), String> {
    system::set_io_flusher().map_err(|error| {
        format!(
            "the kernel does not treat this thread as one that serves a block device (PR_SET_IO_FLUSHER: {error}); \
             it needs CAP_SYS_RESOURCE and Linux 5.6, else memory pressure can stall the device"
        )
    })
}

/// Locks the memory of the process, now and to come, as it is touched. Regions are left out by mapping them later
/// and calling [`exclude_from_lock`], since locking them would fill memory with what is in them.
///
/// # Errors
/// What is missing, in words: the capability `CAP_IPC_LOCK`, or a higher limit.
pub fn lock_memory() -> Result<(), String> {
    system::lock_all_memory().map_err(|error| {
        format!(
            "the daemon's memory cannot be locked (mlockall: {error}); it needs CAP_IPC_LOCK or LimitMEMLOCK=infinity, \
             else a page of the daemon that was paged out can stall the device"
        )
    })
}

/// Takes a mapping out of what [`lock_memory`] locked.
///
/// # Errors
/// When the range is not mapped.
pub fn exclude_from_lock(start: *const u8, length: usize) -> Result<(), String> {
    system::unlock_memory(start, length)
        .map_err(|error| format!("a mapping cannot be unlocked (munlock: {error})"))
}
