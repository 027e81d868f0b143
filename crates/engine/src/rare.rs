//! Counters of rarely taken paths: they show operators what has happened to a region, and tests must take each path at least
//! once.

use core::sync::atomic::{AtomicU64, Ordering};

/// Defines the counters.
macro_rules! rare_paths {
    ($($(#[doc = $about:literal])+ $name:ident,)+) => {
        /// How often rare paths were taken since the cache was opened.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        pub struct RarePaths {
            $($(#[doc = $about])+ pub $name: u64,)+
        }

        impl RarePaths {
            /// The totals of both.
            #[must_use]
            pub const fn and(self, other: Self) -> Self {
                Self { $($name: self.$name + other.$name,)+ }
            }

            /// Each counter with its name.
            #[must_use]
            pub fn named(&self) -> alloc::vec::Vec<(&'static str, u64)> {
                alloc::vec![$((stringify!($name), self.$name),)+]
            }
        }

        /// The counters behind [`RarePaths`]. Nothing depends on them, so a model that schedules threads need not know them.
        #[derive(Default)]
        pub(crate) struct RareCounters {
            $(pub(crate) $name: AtomicU64,)+
        }

        impl RareCounters {
            pub(crate) fn read(&self) -> RarePaths {
                RarePaths { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

rare_paths! {
    /// Last records of a lane that recovery found torn and dropped: writes that were never acknowledged.
    torn_records_dropped,
    /// Records and lines of checksums that were read from their second copy.
    mirror_reads,
    /// Segments that were opened on top of former records.
    segment_reuses,
    /// Segments that reclaim freed.
    segments_reclaimed,
    /// Blocks that reclaim appended again because they had been read.
    second_chances,
    /// Records whose epoch was closed during their store.
    stragglers,
    /// Quarantines that were recorded.
    quarantine_records,
    /// Reads that took data that was read ahead.
    read_ahead_used,
    /// Reads that did not take it, because a write had overlapped it.
    read_ahead_stale,
}

/// Increments a counter.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
