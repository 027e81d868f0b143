//! System calls of this crate.
#![allow(unsafe_code)]

use std::io;

/// Restricts the calling thread to those of these processors on which it may run.
///
/// # Errors
/// The system error.
pub fn run_on(processors: &[usize]) -> io::Result<()> {
    // SAFETY: all zeroes are a valid value of this set of bits: the empty one.
    let (mut allowed, mut wanted): (libc::cpu_set_t, libc::cpu_set_t) = unsafe { std::mem::zeroed() };
    let size = size_of::<libc::cpu_set_t>();
    // SAFETY: the kernel writes at most as many bytes as the set has.
    check(unsafe { libc::sched_getaffinity(0, size, &raw mut allowed) })?;
    let mut any = false;
    for &processor in processors.iter().filter(|&&processor| processor < 8 * size) {
        // SAFETY: the number is smaller than the set has bits.
        unsafe {
            if libc::CPU_ISSET(processor, &allowed) {
                libc::CPU_SET(processor, &mut wanted);
                any = true;
            }
        }
    }
    if any {
        // SAFETY: the kernel reads as many bytes as the set has.
        check(unsafe { libc::sched_setaffinity(0, size, &raw const wanted) })?;
    }
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
