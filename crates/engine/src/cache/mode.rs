//! A change to another mode of the cache: what is dirty is written back first.
//!
//! Elsewhere: the phases and their rounds (`base::mode`), what goes past the cache (`bypass`).

use super::{Bypass, Cache, bypass::Seen};
use crate::{CacheMode, Environment, base::Phase};
use cbd_types::{ByteRange, Epoch, Result};
use core::task::Waker;

/// What one change counts for at most in a round: a longer one zeroes, or is one of few.
const COUNTED_MAX: u64 = 1 << 20;

impl<E: Environment> Cache<E> {
    /// Begins a change to another mode, which continues in [`advance_mode`](Self::advance_mode).
    pub(super) fn change_mode(&self, mode: CacheMode) {
        let (now, _) = self.base().mode().get();
        if now == mode {
            return;
        }
        if mode == CacheMode::Writeback {
            self.base().mode().settle(mode);
        } else {
            // The phases end at once if the backing device has everything.
            let epoch = self.request_drain();
            self.begin_mode(mode, epoch);
            self.advance_mode();
        }
        self.wake_waiting_for_drained();
    }

    /// The backing device may lack something that the cache holds: a mode in which it has everything is not in force until it does.
    pub(super) fn unsettle_mode(&self) {
        let (mode, phase) = self.base().mode().get();
        if mode != CacheMode::Writeback && phase != Phase::Draining {
            self.begin_mode(mode, Epoch(self.base().epochs().present()));
        }
    }

    /// Enters the next phase of a change to another mode, if it is time for it.
    pub(crate) fn advance_mode(&self) {
        let mode = self.base().mode();
        let (wanted, phase) = mode.get();
        let next = match phase {
            Phase::Settled => return,
            // While the backing device fails, writes are cached instead of waiting for it.
            Phase::Draining if self.backing().is_in_trouble() => {
                if self.has_waiting_for_drained() {
                    self.wake_waiting_for_drained();
                }
                return;
            }
            Phase::Draining if self.is_drained(Epoch(mode.until())) => {
                let (now_us, written) = (self.monotonic_us(), self.backing().written_back_bytes());
                if mode.needs_round(self.unwritten_bytes(), now_us, written) {
                    mode.begin_round(self.request_drain().0, now_us, written);
                    return self.wake_waiting_for_drained();
                }
                Phase::Holding
            }
            Phase::Holding if self.backing().is_in_trouble() => Phase::Draining,
            Phase::Holding if self.has_written_before(u64::MAX) && self.holds_nothing_dirty() => {
                Phase::Settled
            }
            Phase::Draining | Phase::Holding => return,
        };
        mode.enter(wanted, phase, next);
        self.wake_waiting_for_drained();
        if next == Phase::Holding {
            self.advance_mode();
        }
    }

    /// Whether reads go past the cache.
    pub fn is_passthrough(&self) -> bool {
        self.base().mode().is_passthrough()
    }

    /// Whether a change to another mode waits for writeback.
    pub fn is_changing_mode(&self) -> bool {
        self.base().mode().get().1 != Phase::Settled
    }

    fn begin_mode(&self, mode: CacheMode, epoch: Epoch) {
        self.base().mode().begin(mode, epoch.0, self.monotonic_us(), self.backing().written_back_bytes());
    }

    /// The outcome for a change that cannot go past the cache yet, because the backing device lacks what precedes it or what it
    /// overlaps. It is cached, unless the cache changes to a mode in which changes go past it and more becomes dirty than is written
    /// back: then it waits.
    pub(super) fn cache_for_now(&self, seen: Seen, range: ByteRange, waker: &Waker) -> Result<Bypass> {
        let mode = self.base().mode();
        if mode.is_writeback() {
            return Ok(Bypass::Cached);
        }
        let may_cache =
            || self.backing().is_in_trouble() || mode.may_cache(self.backing().written_back_bytes());
        if may_cache() {
            mode.count_cached(range.len().min(COUNTED_MAX));
            return Ok(Bypass::Cached);
        }
        let waits = self.wait_for_drained(seen, waker)?;
        if may_cache() {
            // More may have been written back before the waker was added.
            waker.wake_by_ref();
        }
        Ok(waits)
    }

    /// The backing device has accepted bytes of writeback: requests that wait for that can continue.
    pub(crate) fn note_written_back(&self, bytes: u64) {
        self.backing().count_written(bytes);
        if self.has_waiting_for_drained() && self.base().mode().get().1 == Phase::Draining {
            self.wake_waiting_for_drained();
        }
    }
}
