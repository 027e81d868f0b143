//! Why bytes went past the cache: the reasons, each with a counter.
//!
//! Invariants: a reason is one line of the list; status, metrics and commands take the names from there.

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
    /// Bytes of a sequential stream of reads behind the cutoff, in a full cache.
    Sequential "sequential",
    /// Reads that missed, and that admission did not find worth their space in a full cache.
    NotWorth "not_worth",
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

    /// Counts bytes.
    pub(crate) const fn count(&mut self, reason: BypassReason, bytes: u64) {
        self.0[reason as usize] += bytes;
    }

    /// Adds the counters of another lane.
    pub(crate) fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, bytes)| *sum += bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_a_counter_and_a_name_of_its_own() {
        let mut bypassed = Bypassed::default();
        for (number, reason) in BypassReason::ALL.into_iter().enumerate() {
            bypassed.count(reason, 1 << number);
        }
        bypassed.add(&bypassed.clone());
        for (number, (reason, bytes)) in bypassed.each().enumerate() {
            assert_eq!((bytes, bypassed.of(reason)), (2 << number, 2 << number));
            assert!(BypassReason::ALL[..number].iter().all(|other| other.name() != reason.name()));
        }
    }
}
