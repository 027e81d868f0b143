//! The end of a simulated process: a panic with a payload of its own. A store or a fence raises it, and the code that
//! runs the world catches it.
//!
//! Invariants: no other panic is swallowed, and a simulated crash prints nothing.

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind, set_hook, take_hook};
use std::sync::Once;

/// The payload of a simulated crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CrashNow;

static QUIET: Once = Once::new();

/// Ends the simulated process; [`until_crash`] catches it.
///
/// # Panics
/// Always, with [`CrashNow`] as payload.
pub fn crash_now() -> ! {
    panic_any(CrashNow)
}

/// Runs `work` until it returns or the simulated process crashes. Any other panic is passed on.
///
/// # Errors
/// [`CrashNow`] when the process crashed. The objects that `work` borrowed are then in the state in which the crash
/// interrupted them: abandon them.
pub fn until_crash<T>(work: impl FnOnce() -> T) -> Result<T, CrashNow> {
    QUIET.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            if !info.payload().is::<CrashNow>() {
                previous(info);
            }
        }));
    });
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => Ok(value),
        Err(payload) if payload.is::<CrashNow>() => Err(CrashNow),
        Err(payload) => resume_unwind(payload),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_caught_and_another_panic_is_not() {
        assert_eq!(until_crash(|| 7), Ok(7));
        assert_eq!(until_crash(|| -> u8 { crash_now() }), Err(CrashNow));
        let other = catch_unwind(|| until_crash(|| std::panic::resume_unwind(Box::new("other"))));
        assert!(other.is_err());
    }
}
