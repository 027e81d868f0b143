//! The signal handler: finds the registration of a fault, and handles the fault.

use crate::Routines;
use crate::table::{self, Changes, EntryNumber, Kind, Registered};
use cbd_types::{Error, ErrorKind, Result};
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// `si_code` of a signal that the kernel raised without an address.
const SI_KERNEL: i32 = 0x80;

/// The previous handler of the signal.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler once; concurrent callers wait until it is installed.
pub(crate) fn install(_held: &Changes) -> Result<()> {
    if PREVIOUS.get().is_some() {
        return Ok(());
    }
    let refused = |error: io::Error| {
        Error::new(ErrorKind::System, "cannot handle SIGBUS, which failing or removed memory raises")
            .caused_by(error)
    };
    let mut before = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: `before` is as large as the structure that the call writes.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) } != 0 {
        return Err(refused(io::Error::last_os_error()));
    }
    // SAFETY: the call succeeded, so it wrote all of it.
    let before = unsafe { before.assume_init() };
    // SAFETY: all zeroes is a valid value of this plain structure.
    let mut ours: libc::sigaction = unsafe { zeroed() };
    ours.sa_sigaction = on_bus_error as *const () as usize;
    // On the alternate stack, if std provides one: the thread's own stack may be the failing memory.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // Set before the handler can run.
    let _ = PREVIOUS.set(before);
    // SAFETY: `ours` is complete: a handler of the three-argument kind and an empty mask.
    if unsafe { libc::sigaction(libc::SIGBUS, &ours, null_mut()) } != 0 {
        return Err(refused(io::Error::last_os_error()));
    }
    Ok(())
}

extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo to a SA_SIGINFO handler, which lives until it returns.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // SAFETY: the same applies to the context.
    if !unsafe { handle(code, address, context) } {
        pass_on(signal, code, info, context);
    }
}

/// Handles a fault in registered memory; returns false for any other fault.
///
/// # Safety
/// `context` is the one that was passed to the handler.
unsafe fn handle(code: i32, address: usize, context: *mut libc::c_void) -> bool {
    if code == SI_KERNEL {
        return table::all().any(|(_, registered)| match registered.kind {
            // SAFETY: the caller ensures it.
            Kind::Routines(routines) => unsafe { end_routine(routines, 0, context) },
            Kind::Zeroes => false,
        });
    }
    let here =
        |(_, registered): &(EntryNumber, Registered)| registered.start <= address && address < registered.end;
    match code {
        libc::BUS_ADRALN | libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR => {
            table::all().find(here).is_some_and(|(entry, registered)| match registered.kind {
                // SAFETY: the caller ensures it.
                Kind::Routines(routines) => unsafe { end_routine(routines, address, context) },
                Kind::Zeroes => replace_by_zeroes(entry, registered),
            })
        }
        // Advance notice of a page that no thread accesses at this moment; a later access gets the error.
        libc::BUS_MCEERR_AO => table::all().any(|found| here(&found)),
        _ => false,
    }
}

/// Ends the running routine, if it is one of `routines`.
///
/// # Safety
/// `context` is the one that was passed to the handler.
#[cfg(target_arch = "x86_64")]
unsafe fn end_routine(routines: &Routines, address: usize, context: *mut libc::c_void) -> bool {
    // SAFETY: the kernel passes a ucontext to a SA_SIGINFO handler, which lives until it returns.
    let user = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    let registers = &mut user.uc_mcontext.gregs;
    let at = registers[libc::REG_RIP as usize] as usize;
    if !(routines.begin as usize..routines.end as usize).contains(&at) {
        return false;
    }
    registers[libc::REG_RAX as usize] = 1;
    registers[libc::REG_RDX as usize] = address as i64;
    registers[libc::REG_RIP as usize] = routines.landing as i64;
    true
}

/// Faults of routines are not handled on this processor.
///
/// # Safety
/// Always safe; it has the type of the unsafe one.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn end_routine(routines: &Routines, _address: usize, _context: *mut libc::c_void) -> bool {
    let Routines { begin: _, end: _, landing: _ } = routines;
    false
}

/// Replaces memory by zeroes; false if the system refuses.
fn replace_by_zeroes(entry: EntryNumber, registered: Registered) -> bool {
    entry.mark_lost();
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
    );
    // SAFETY: the code that registered the range ensured that it is a mapping without references into it, and
    // that it stays mapped. The call is one system call. Its errno after a failure is restored, as a handler
    // has to.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let length = registered.end - registered.start;
        let placed = libc::mmap(registered.start as *mut libc::c_void, length, protection, flags, -1, 0);
        *errno = before;
        placed != libc::MAP_FAILED
    }
}

/// Applies the previous action of the signal.
fn pass_on(signal: i32, code: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = PREVIOUS.get() else { return };
    let sent = code <= 0;
    match before.sa_sigaction {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: all zeroes is a valid value of this plain structure, and SIG_DFL is zero. Both calls
            // are safe in a signal handler. A fault occurs again when this returns; a signal that was sent
            // has to be sent again.
            unsafe {
                let default: libc::sigaction = zeroed();
                libc::sigaction(signal, &default, null_mut());
                if sent {
                    libc::raise(signal);
                }
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the flag states that the installed handler takes three arguments.
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without the flag the installed handler takes only the number of the signal.
            let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
