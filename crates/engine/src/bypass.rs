//! Why bytes went past the cache: the reasons, each with a counter.
//!
//! Invariants: a reason is one line of the list; status, metrics and commands take the names from there.

use core::sync::atomic::{AtomicU64, Ordering};

/// Defines the reasons.
macro_rules! reasons {
    ($($(#[doc = $about:literal])+ $reason:ident $name:literal,)+) => {
        /// Why bytes that a client read or wrote were not recorded in the cache.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum BypassReason {
            $($(#[doc = $about])+ $reason,)+
        }

        impl BypassReason {
            /// All reasons, in the order of their counters.
            pub const ALL: [Self; [$(Self::$reason,)+].len()] = [$(Self::$reason,)+];

            /// The name in status and metrics.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$reason => $name,)+
                }
            }
        }
    };
}

reasons! {
    /// Bytes that the mode of the cache sends past it.
    Mode "mode",
    /// Bytes of a sequential stream of writes behind the cutoff, and of reads where the cache is full.
    Sequential "sequential",
    /// Bytes that came while the cache itself took longer than `congestion_read_us` or `congestion_write_us`.
    Congested "congested",
    /// Bytes of writes that found the cache full.
    Full "full",
    /// Reads that missed, and that admission did not find worth their space in a full cache.
    NotAdmitted "not_admitted",
    /// Reads that missed while `read_fill` was `off`.
    ReadFillOff "read_fill_off",
}

/// Bytes that went past the cache, for each reason.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Bypassed([u64; BypassReason::ALL.len()]);

impl Bypassed {
    /// The bytes of one reason.
    #[must_use]
    pub const fn of(&self, reason: BypassReason) -> u64 {
        self.0[reason as usize]
    }

    /// Each reason with its bytes.
    pub fn each(&self) -> impl Iterator<Item = (BypassReason, u64)> {
        BypassReason::ALL.into_iter().zip(self.0)
    }
}

/// The counters behind [`Bypassed`]. Nothing depends on them, so a model that schedules threads need not know them.
#[derive(Default)]
pub(crate) struct BypassCounters([AtomicU64; BypassReason::ALL.len()]);

impl BypassCounters {
    /// Counts bytes.
    pub(crate) fn count(&self, reason: BypassReason, bytes: u64) {
        self.0[reason as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Bypassed {
        Bypassed(self.0.each_ref().map(|counter| counter.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_counter_and_a_name_of_its_own() {
        let counters = BypassCounters::default();
        for (number, reason) in BypassReason::ALL.into_iter().enumerate() {
            counters.count(reason, 1 << number);
            counters.count(reason, 1 << number);
        }
        let bypassed = counters.read();
        for (number, (reason, bytes)) in bypassed.each().enumerate() {
            assert_eq!((bytes, bypassed.of(reason)), (2 << number, 2 << number));
            assert!(BypassReason::ALL[..number].iter().all(|other| other.name() != reason.name()));
        }
    }
}
