//! The mode in which writes go, and a change to another mode.
//!
//! A change to a mode in which writes go past the cache takes two phases. First the backing device gets everything that was dirty
//! when the change was requested; new writes are cached where they cannot go past the cache yet. This is repeated in rounds, and in
//! each the writes may make only a part dirty of what the backing device gets ([`Round`]), so that less is dirty at the end of each.
//! Then what is left dirty is written, while writes that overlap it, or that would overtake it, wait. The row of the backend has the
//! new mode from the beginning: a process that opens the cache in the middle of a change begins it again.
//!
//! Invariants: the mode is `Settled` only if the backing device had everything at one moment since the change began.

use crate::{
    CacheMode, Environment, Settings,
    sync::{SharedBool, SharedU32, SharedU64},
};
use alloc::boxed::Box;
use core::sync::atomic::Ordering;

/// The phase of a change to a mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// The mode is in force.
    Settled,
    /// What was dirty when the change, or the present round of it, began is written back.
    Draining,
    /// What became dirty since is written back, and writes do not make more data dirty.
    Holding,
}

/// The mode of a cache and its phase.
pub(crate) struct Mode<E: Environment> {
    /// Code of the mode, and the code of the phase eight bits higher: 0 for a settled writeback, the only value that the common
    /// path of a write compares with.
    bits: SharedU32<E>,
    /// Settings other than the mode may send writes past the cache.
    may_bypass: SharedBool<E>,
    /// The latency of reads is measured.
    measures_reads: SharedBool<E>,
    /// The epoch that is drained when the present round of the first phase ends.
    until: SharedU64<E>,
    /// Behind a pointer, because the cache is moved as a value when it is opened.
    round: Box<Round<E>>,
}

/// Bytes that writes may make dirty in a round without regard to what was written back.
const SLACK: u64 = 64 << 10;
/// Rounds of [`Phase::Draining`]. In each the dirty bytes halve, at least.
const ROUNDS_MAX: u32 = 24;
/// When what is dirty is expected to be written in this time, in microseconds, writes wait for it.
const HOLDING_US_MAX: u64 = 5_000;

/// A round of [`Phase::Draining`]. Only speed depends on it.
struct Round<E: Environment> {
    number: SharedU32<E>,
    begun_us: SharedU64<E>,
    /// Bytes that had been written back when it began.
    written_before: SharedU64<E>,
    /// Bytes that clients have written to the cache since.
    cached: SharedU64<E>,
}

impl<E: Environment> Round<E> {
    const fn new() -> Self {
        Self {
            number: SharedU32::new(0),
            begun_us: SharedU64::new(0),
            written_before: SharedU64::new(0),
            cached: SharedU64::new(0),
        }
    }

    fn begin(&self, number: u32, now_us: u64, written: u64) {
        self.number.store(number, Ordering::SeqCst);
        self.begun_us.store(now_us, Ordering::SeqCst);
        self.written_before.store(written, Ordering::SeqCst);
        self.cached.store(0, Ordering::SeqCst);
    }

    fn written_since(&self, written: u64) -> u64 {
        written.saturating_sub(self.written_before.load(Ordering::SeqCst))
    }
}

impl<E: Environment> Mode<E> {
    /// The mode of a cache that is being opened. What recovery found dirty is written back before another mode than writeback is
    /// in force.
    pub(crate) fn opened(settings: &Settings) -> Self {
        let phase = match settings.cache_mode {
            CacheMode::Writeback => Phase::Settled,
            _ => Phase::Draining,
        };
        Self {
            bits: SharedU32::new(code(settings.cache_mode, phase)),
            may_bypass: SharedBool::new(settings.may_bypass_by_choice()),
            measures_reads: SharedBool::new(settings.congestion_read_us > 0),
            until: SharedU64::new(0),
            round: Box::new(Round::new()),
        }
    }

    /// Notes settings that are in force.
    pub(crate) fn note(&self, settings: &Settings) {
        self.may_bypass.store(settings.may_bypass_by_choice(), Ordering::SeqCst);
        self.measures_reads.store(settings.congestion_read_us > 0, Ordering::SeqCst);
    }

    /// Whether settings other than the mode may send writes past the cache.
    #[inline]
    pub(crate) fn may_bypass(&self) -> bool {
        self.may_bypass.load(Ordering::Relaxed)
    }

    /// Whether the latency of reads is measured.
    #[inline]
    pub(crate) fn measures_reads(&self) -> bool {
        self.measures_reads.load(Ordering::Relaxed)
    }

    /// Whether the mode sends no write past the cache.
    #[inline]
    pub(crate) fn is_writeback(&self) -> bool {
        self.bits.load(Ordering::Relaxed) == 0
    }

    /// Whether no client's write may make data dirty: the mode is in force, or what is dirty is written so that it can be. Checked
    /// while a lane is locked: the mode is in force only after all lanes were seen clean.
    #[inline]
    pub(crate) fn refuses_dirty(&self) -> bool {
        let bits = self.bits.load(Ordering::SeqCst);
        bits != 0 && bits >> 8 != DRAINING
    }

    /// Whether reads go past the cache.
    #[inline]
    pub(crate) fn is_passthrough(&self) -> bool {
        self.bits.load(Ordering::Relaxed) == code(CacheMode::Passthrough, Phase::Settled)
    }

    /// The mode and the phase.
    pub(crate) fn get(&self) -> (CacheMode, Phase) {
        let bits = self.bits.load(Ordering::SeqCst);
        let mode = CacheMode::from_code(bits & 0xff).unwrap_or_default();
        let phase = match bits >> 8 {
            0 => Phase::Settled,
            DRAINING => Phase::Draining,
            _ => Phase::Holding,
        };
        (mode, phase)
    }

    /// Begins a change to `mode`; everything up to `epoch` is to be drained first. `written`: bytes that have been written back.
    pub(crate) fn begin(&self, mode: CacheMode, epoch: u64, now_us: u64, written: u64) {
        self.round.begin(0, now_us, written);
        self.until.store(epoch, Ordering::SeqCst);
        self.bits.store(code(mode, Phase::Draining), Ordering::SeqCst);
    }

    /// Whether the first phase takes one more round before writes wait for what is dirty now, `dirty` bytes.
    pub(crate) fn needs_round(&self, dirty: u64, now_us: u64, written: u64) -> bool {
        let round = &self.round;
        if dirty == 0 || round.number.load(Ordering::SeqCst) >= ROUNDS_MAX {
            return false;
        }
        let us = now_us.saturating_sub(round.begun_us.load(Ordering::SeqCst));
        match round.written_since(written) {
            0 => dirty > SLACK,
            written => u128::from(us) * u128::from(dirty) / u128::from(written) > u128::from(HOLDING_US_MAX),
        }
    }

    /// Begins the next round of the first phase, in which everything up to `epoch` is drained.
    pub(crate) fn begin_round(&self, epoch: u64, now_us: u64, written: u64) {
        self.round.begin(self.round.number.load(Ordering::SeqCst) + 1, now_us, written);
        self.until.fetch_max(epoch, Ordering::SeqCst);
    }

    /// Whether a write may be cached now, in the first phase: what writes make dirty in a round is limited to what was written back
    /// in the first round, and to half of that in each later one.
    pub(crate) fn may_cache(&self, written: u64) -> bool {
        let written = self.round.written_since(written);
        let share = if self.round.number.load(Ordering::SeqCst) == 0 { written } else { written / 2 };
        self.round.cached.load(Ordering::SeqCst) <= share.saturating_add(SLACK)
    }

    /// Counts bytes that a client writes to the cache in the first phase.
    pub(crate) fn count_cached(&self, bytes: u64) {
        self.round.cached.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Puts a mode in force at once.
    pub(crate) fn settle(&self, mode: CacheMode) {
        self.bits.store(code(mode, Phase::Settled), Ordering::SeqCst);
    }

    /// Enters the next phase, unless the mode has changed meanwhile.
    pub(crate) fn enter(&self, mode: CacheMode, from: Phase, to: Phase) {
        self.bits.replace(code(mode, from), code(mode, to));
    }

    /// The epoch that is drained when the present round of the first phase ends.
    pub(crate) fn until(&self) -> u64 {
        self.until.load(Ordering::SeqCst)
    }
}

/// The code of [`Phase::Draining`].
const DRAINING: u32 = 1;

const fn code(mode: CacheMode, phase: Phase) -> u32 {
    let phase = match phase {
        Phase::Settled => 0,
        Phase::Draining => DRAINING,
        Phase::Holding => 2,
    };
    mode.code() | phase << 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Still;

    const MIB: u64 = 1 << 20;
    const SECOND: u64 = 1_000_000;

    fn changing() -> Mode<Still> {
        let mode = Mode::opened(&Settings::default());
        mode.begin(CacheMode::Writethrough, 7, SECOND, 5 * MIB);
        mode
    }

    #[test]
    fn one_more_round_is_needed_unless_little_time_is_needed() {
        let mode = changing();
        // 100 MiB in a second: 512 KiB take 5 ms.
        let needs = |dirty| mode.needs_round(dirty, 2 * SECOND, 105 * MIB);
        assert_eq!([0, 1, MIB / 2, MIB, 100 * MIB].map(needs), [false, false, false, true, true]);
        let unknown = |dirty| mode.needs_round(dirty, 2 * SECOND, 5 * MIB);
        assert_eq!([0, SLACK, SLACK + 1].map(unknown), [false, false, true], "nothing was written back");
        assert!(mode.needs_round(u64::MAX, u64::MAX, 6 * MIB));
        for round in 1..=ROUNDS_MAX {
            assert!(mode.needs_round(100 * MIB, 2 * SECOND, 5 * MIB), "round {round}");
            mode.begin_round(7 + u64::from(round), SECOND, 5 * MIB);
        }
        assert!(!mode.needs_round(100 * MIB, 2 * SECOND, 5 * MIB), "the writer is never slower");
        assert_eq!(mode.until(), 7 + u64::from(ROUNDS_MAX));
    }

    #[test]
    fn writes_make_dirty_what_was_written_back_in_the_first_round_and_half_of_it_in_the_others() {
        let mode = changing();
        let may = |bytes| {
            mode.count_cached(bytes);
            mode.may_cache(15 * MIB)
        };
        assert_eq!([10 * MIB, SLACK, 1].map(may), [true, true, false]);
        mode.begin_round(8, 2 * SECOND, 5 * MIB);
        assert_eq!([5 * MIB, SLACK, 1].map(may), [true, true, false]);
        mode.begin(CacheMode::Writearound, 9, 3 * SECOND, 5 * MIB);
        assert_eq!(
            [10 * MIB, SLACK, 1].map(may),
            [true, true, false],
            "another change begins at its first round"
        );
    }
}
