//! The mode in which writes go, and a change to another mode.
//!
//! A change to a mode in which writes go past the cache takes two phases. First the backing device gets everything that was dirty
//! when the change was requested; new writes are cached as before where they cannot go past the cache yet. Then what they have left
//! dirty is written, while writes that overlap it, or that would overtake it, wait. The row of the backend has the new mode from the
//! beginning: a process that opens the cache in the middle of a change begins it again.
//!
//! Invariants: the mode is `Settled` only if the backing device had everything at one moment since the change began.

use crate::{
    CacheMode, Environment, Settings,
    sync::{SharedBool, SharedU32, SharedU64},
};
use core::sync::atomic::Ordering;

/// The phase of a change to a mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// The mode is in force.
    Settled,
    /// What was dirty when the change began is written back.
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
    /// The epoch that is drained when the first phase ends.
    until: SharedU64<E>,
}

impl<E: Environment> Mode<E> {
    /// The mode of a cache that is being opened. What recovery found dirty is written back before another mode than writeback is
    /// in force.
    pub(crate) const fn opened(settings: &Settings) -> Self {
        let phase = match settings.cache_mode {
            CacheMode::Writeback => Phase::Settled,
            _ => Phase::Draining,
        };
        Self {
            bits: SharedU32::new(code(settings.cache_mode, phase)),
            may_bypass: SharedBool::new(settings.may_bypass_by_choice()),
            measures_reads: SharedBool::new(settings.congestion_read_us > 0),
            until: SharedU64::new(0),
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

    /// Begins a change to `mode`; everything up to `epoch` is to be drained first.
    pub(crate) fn begin(&self, mode: CacheMode, epoch: u64) {
        self.until.store(epoch, Ordering::SeqCst);
        self.bits.store(code(mode, Phase::Draining), Ordering::SeqCst);
    }

    /// Puts a mode in force at once.
    pub(crate) fn settle(&self, mode: CacheMode) {
        self.bits.store(code(mode, Phase::Settled), Ordering::SeqCst);
    }

    /// Enters the next phase, unless the mode has changed meanwhile.
    pub(crate) fn enter(&self, mode: CacheMode, from: Phase, to: Phase) {
        self.bits.replace(code(mode, from), code(mode, to));
    }

    /// The epoch that is drained when the first phase ends.
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
