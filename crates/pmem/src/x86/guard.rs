//! Failing memory becomes a result: the SIGBUS of a poisoned line or a truncated file ends the routine that
//! touched it, and nothing else.
//!
//! Always true here: only a fault that the kernel raised itself, at an instruction of `guarded.s`, at an
//! address inside a registered mapping, is taken; every other SIGBUS goes to who had the signal before, or
//! ends the process as it would have without us. The handler allocates nothing, takes no lock and touches
//! no memory but its own statics and the context it was given.
//!
//! Left to others: what the failure means (`memory`, `mapping`).

use cbd_types::{Error, ErrorKind, Result};
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

unsafe extern "C" {
    safe static cbd_pmem_guarded_begin: u8;
    safe static cbd_pmem_guarded_end: u8;
    safe static cbd_pmem_guarded_landing: u8;
}

/// The kernel raised the signal, and could not say at which address.
const SI_KERNEL: i32 = 0x80;

/// Mappings that may be registered at a time.
const SLOTS: usize = 256;

struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
}

/// Read by the handler; changed under [`CHANGES`].
static MAPPED: [Slot; SLOTS] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; SLOTS];
static CHANGES: Mutex<()> = Mutex::new(());
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A range of addresses whose failures are taken while this lives.
#[derive(Debug)]
pub struct Registration {
    slot: usize,
}

impl Registration {
    /// Registers `length` bytes from `start`, and installs the handler when it is the first.
    ///
    /// # Errors
    /// When the system refuses the handler, or too many mappings are open.
    pub fn new(start: usize, length: usize) -> Result<Self> {
        let _held = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        install()?;
        let free = MAPPED.iter().position(|slot| slot.end.load(Ordering::Relaxed) == 0);
        let Some(slot) = free else {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{SLOTS} regions are mapped already; unregister one first"),
            ));
        };
        MAPPED[slot].start.store(start, Ordering::Relaxed);
        // The end makes the slot count, so it comes last.
        MAPPED[slot].end.store(start + length, Ordering::Release);
        Ok(Self { slot })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _held = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        MAPPED[self.slot].end.store(0, Ordering::Release);
    }
}

fn is_mapped(address: usize) -> bool {
    MAPPED.iter().any(|slot| {
        let end = slot.end.load(Ordering::Acquire);
        end > address && slot.start.load(Ordering::Relaxed) <= address
    })
}

/// Installs the handler once; the caller holds [`CHANGES`].
fn install() -> Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let refused = |error: io::Error| {
        Error::new(ErrorKind::System, format!("cannot handle SIGBUS, which failing memory raises: {error}"))
    };
    let mut before = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: `before` has room for what the call writes.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) } != 0 {
        return Err(refused(io::Error::last_os_error()));
    }
    // SAFETY: the call succeeded, so it wrote all of it.
    let before = unsafe { before.assume_init() };
    // It is there before the handler can run.
    let _ = BEFORE.set(before);
    // SAFETY: all zeroes is a valid value of this plain structure.
    let mut ours: libc::sigaction = unsafe { zeroed() };
    ours.sa_sigaction = on_bus_error as *const () as usize;
    // On the alternate stack, where std keeps one: the thread's own may be what is failing.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: `ours` is whole: a handler of the three-argument kind and an empty mask.
    if unsafe { libc::sigaction(libc::SIGBUS, &ours, null_mut()) } != 0 {
        return Err(refused(io::Error::last_os_error()));
    }
    Ok(())
}

extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a SA_SIGINFO handler a siginfo and a ucontext that live until it returns.
    let (code, address, user) =
        unsafe { ((*info).si_code, (*info).si_addr() as usize, &mut *context.cast::<libc::ucontext_t>()) };
    let registers = &mut user.uc_mcontext.gregs;
    let at = registers[libc::REG_RIP as usize] as usize;
    let ours =
        (&raw const cbd_pmem_guarded_begin as usize..&raw const cbd_pmem_guarded_end as usize).contains(&at);
    let raised_by_access = match code {
        libc::BUS_ADRALN | libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR => is_mapped(address),
        SI_KERNEL => true,
        _ => false,
    };
    if ours && raised_by_access {
        registers[libc::REG_RAX as usize] = 1;
        registers[libc::REG_RDX as usize] = if code == SI_KERNEL { 0 } else { address as i64 };
        registers[libc::REG_RIP as usize] = &raw const cbd_pmem_guarded_landing as i64;
        return;
    }
    if code == libc::BUS_MCEERR_AO && is_mapped(address) {
        // Early news of a page that nobody touches now; who loads from it later gets the error.
        return;
    }
    pass_on(signal, code, info, context);
}

/// Does what would have been done without us.
fn pass_on(signal: i32, code: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return };
    let sent = code <= 0;
    match before.sa_sigaction {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: all zeroes is a valid value of this plain structure, and SIG_DFL is zero. Both
            // calls are safe in a signal handler. A fault comes again when this returns; a signal that was
            // sent has to be sent again.
            unsafe {
                let default: libc::sigaction = zeroed();
                libc::sigaction(signal, &default, null_mut());
                if sent {
                    libc::raise(signal);
                }
            }
        }
        handler if before.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: the flag says that the handler that was installed takes three arguments.
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without the flag the handler that was installed takes the number of the signal.
            let handler: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
