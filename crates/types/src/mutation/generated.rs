//! Switches of generated mutants: `cargo xtask mutants --generated` writes calls of `generated` into a copy of the
//! sources, one for each mutant.
//!
//! Invariants: at most one mutant is switched on, by its number in the environment, for the whole life of a process;
//! while the reached ones are recorded, none is.

/// The variable with the number of the mutant that is switched on.
pub const CHOICE: &str = "CBD_GENERATED_MUTANT";
/// The variable with the path of the existing file in which byte *n* becomes 1 when mutant *n* is reached.
pub const RECORD: &str = "CBD_GENERATED_REACHED";
/// All numbers are below this.
pub const NUMBERS: usize = 1 << 16;

#[cfg(any(test, feature = "mutants"))]
pub use switch::generated;

#[cfg(any(test, feature = "mutants"))]
mod switch {
    use super::{CHOICE, NUMBERS, RECORD};
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::FileExt;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    /// The environment was not read yet.
    const UNKNOWN: u32 = u32::MAX;
    /// No mutant is switched on; those that are reached are recorded.
    const RECORDS: u32 = u32::MAX - 1;
    /// No mutant is switched on.
    const NONE: u32 = u32::MAX - 2;

    static CHOSEN: AtomicU32 = AtomicU32::new(UNKNOWN);

    /// Whether the mutant of this number is switched on.
    ///
    /// # Panics
    /// When the environment names a number that is none, or a file that cannot be written.
    #[inline]
    #[must_use]
    pub fn generated(number: u32) -> bool {
        match CHOSEN.load(Ordering::Relaxed) {
            UNKNOWN => read_environment(number),
            RECORDS => {
                record(number);
                false
            }
            chosen => chosen == number,
        }
    }

    /// Reads the environment. Concurrent calls read the same value.
    #[cold]
    fn read_environment(number: u32) -> bool {
        let chosen = choice(std::env::var(CHOICE).ok().as_deref(), std::env::var_os(RECORD).is_some());
        CHOSEN.store(chosen, Ordering::Relaxed);
        generated(number)
    }

    fn choice(mutant: Option<&str>, records: bool) -> u32 {
        match mutant {
            Some(number) => {
                let number = number.parse().ok().filter(|number| (*number as usize) < NUMBERS);
                number.unwrap_or_else(|| panic!("{CHOICE} is not the number of a mutant"))
            }
            None if records => RECORDS,
            None => NONE,
        }
    }

    fn record(number: u32) {
        static SEEN: [AtomicBool; NUMBERS] = [const { AtomicBool::new(false) }; NUMBERS];
        static FILE: OnceLock<File> = OnceLock::new();
        if SEEN[number as usize].swap(true, Ordering::Relaxed) {
            return;
        }
        let file = FILE.get_or_init(|| {
            let path = std::env::var_os(RECORD).unwrap_or_default();
            OpenOptions::new().write(true).open(path).unwrap_or_else(|error| panic!("{RECORD}: {error}"))
        });
        file.write_all_at(&[1], u64::from(number)).unwrap_or_else(|error| panic!("{RECORD}: {error}"));
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_mutant_that_is_named_is_switched_on_and_recording_switches_none_on() {
            assert_eq!(choice(None, false), NONE);
            assert_eq!(choice(None, true), RECORDS);
            assert_eq!(choice(Some("17"), true), 17);
            assert!(std::panic::catch_unwind(|| choice(Some("65536"), false)).is_err());
            assert!(std::panic::catch_unwind(|| choice(Some(""), false)).is_err());
        }
    }
}
