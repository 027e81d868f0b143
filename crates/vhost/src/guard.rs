//! Guest memory that is taken away under us: the SIGBUS of a file that was cut short, or of a page that failed, puts
//! zeroes where the memory was and leaves a mark.
//!
//! Whoever copied from that memory looks at the mark before it relies on what it copied. So every access, also those in
//! the crates that walk the rings, can be an ordinary one.
//!
//! Always true here: only a fault that the kernel raised itself, at an address inside registered memory, is taken; every
//! other SIGBUS goes to who had the signal before (`cbd-pmem`, which takes those of regions, or the system's default).
//! The handler allocates nothing, takes no lock and touches no memory but its own statics.

use cbd_types::{Error, ErrorKind, Result};
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Pieces of memory that may be registered at a time.
const SLOTS: usize = 1024;

struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

/// Read by the handler; changed under [`CHANGES`].
static MAPPED: [Slot; SLOTS] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), lost: AtomicBool::new(false) } };
        SLOTS];
static CHANGES: Mutex<()> = Mutex::new(());
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
/// How often memory was lost, anywhere: one load says that nothing was.
static LOSSES: AtomicU64 = AtomicU64::new(0);

/// How often memory was lost since the process began.
pub(crate) fn losses() -> u64 {
    LOSSES.load(Ordering::Acquire)
}

/// Memory whose failures are taken while this lives. It has to go before the memory is unmapped.
#[derive(Debug)]
pub(crate) struct Registration {
    slot: usize,
}

impl Registration {
    /// Registers `length` bytes from `start`, which are mapped and whose mapping nobody else replaces.
    pub(crate) fn new(start: usize, length: usize) -> Result<Self> {
        let _held = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        install()?;
        let Some(slot) = MAPPED.iter().position(|slot| slot.end.load(Ordering::Relaxed) == 0) else {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("virtual machines have handed over {SLOTS} pieces of memory already; stop one first"),
            ));
        };
        MAPPED[slot].lost.store(false, Ordering::Relaxed);
        MAPPED[slot].start.store(start, Ordering::Relaxed);
        // The end makes the slot count, so it comes last.
        MAPPED[slot].end.store(start + length, Ordering::Release);
        Ok(Self { slot })
    }

    /// Whether the memory was taken away: it reads as zeroes since.
    pub(crate) fn is_lost(&self) -> bool {
        MAPPED[self.slot].lost.load(Ordering::Acquire)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _held = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        MAPPED[self.slot].end.store(0, Ordering::Release);
    }
}

/// Installs the handler once; the caller holds [`CHANGES`].
fn install() -> Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let refused = |error: io::Error| {
        Error::new(
            ErrorKind::System,
            format!("cannot handle SIGBUS, which memory raises that is taken away: {error}"),
        )
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
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: `ours` is whole: a handler of the three-argument kind and an empty mask.
    if unsafe { libc::sigaction(libc::SIGBUS, &ours, null_mut()) } != 0 {
        return Err(refused(io::Error::last_os_error()));
    }
    Ok(())
}

extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a SA_SIGINFO handler a siginfo that lives until it returns.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let sent = code <= 0;
    if !sent && put_zeroes(address) {
        return;
    }
    pass_on(signal, sent, info, context);
}

/// Replaces the registered memory around `address`; false if there is none.
fn put_zeroes(address: usize) -> bool {
    let found = MAPPED.iter().find(|slot| {
        let end = slot.end.load(Ordering::Acquire);
        end > address && slot.start.load(Ordering::Relaxed) <= address
    });
    let Some(slot) = found else { return false };
    let (start, end) = (slot.start.load(Ordering::Relaxed), slot.end.load(Ordering::Relaxed));
    // The marks come first: who reads a zero from here on, and looks at them then, sees them.
    slot.lost.store(true, Ordering::SeqCst);
    LOSSES.fetch_add(1, Ordering::SeqCst);
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
    );
    // SAFETY: the range is that of a mapping of guest memory, which is nothing of ours: nobody holds a reference into it,
    // it is accessed by volatile copies and atomics alone, and it stays mapped. The call is one system call. What it leaves
    // in errno on failure is put back, as a handler has to.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let placed = libc::mmap(start as *mut libc::c_void, end - start, protection, flags, -1, 0);
        *errno = before;
        placed != libc::MAP_FAILED
    }
}

/// Does what would have been done without us.
fn pass_on(signal: i32, sent: bool, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(before) = BEFORE.get() else { return };
    match before.sa_sigaction {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: all zeroes is a valid value of this plain structure, and SIG_DFL is zero. Both calls are safe in a
            // signal handler. A fault comes again when this returns; a signal that was sent has to be sent again.
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
