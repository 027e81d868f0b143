//! Latencies that decide whether a request goes past the cache by choice: those of the cache itself, of the backing device below
//! it, and of the wait for space.
//!
//! Invariants: only speed depends on these numbers, so threads share them without order; no request that is cached is measured
//! while the settings do not ask for it.

use super::Cache;
use crate::{Environment, settings::Settings};
use cbd_types::ByteRange;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// A latency without a new sample for this time does not count: the next requests measure it again.
const STALE_US: u64 = 100_000;
/// The same for the backing device, to which no request is to be sent in vain.
const BACKING_STALE_US: u64 = 1_000_000;
/// A new sample counts for a part of an average: an eighth, so that one slow request has little effect.
const SLOWLY: u32 = 3;
/// The same for the wait for space, of which there are few samples.
const FAST: u32 = 1;

/// A moving average of latencies, in 256ths of a microsecond.
#[derive(Default)]
struct Latency {
    average: AtomicU64,
    /// When the last sample was taken, in microseconds; 0 if there is none.
    sampled_us: AtomicU64,
}

impl Latency {
    /// Adds a sample, which counts for one part of 2 to the power of `shift`.
    fn add(&self, us: u64, now_us: u64, shift: u32) {
        let (old, new) = (self.average.load(Relaxed), us << 8);
        let average = if new > old { old + ((new - old) >> shift) } else { old - ((old - new) >> shift) };
        self.average.store(average, Relaxed);
        self.sampled_us.store(now_us.max(1), Relaxed);
    }

    /// Adds the time since `begun_us`. Out of line: seldom measured.
    #[cold]
    fn add_since(&self, begun_us: u64, now_us: u64) {
        self.add(now_us.saturating_sub(begun_us), now_us, SLOWLY);
    }

    fn us(&self) -> u64 {
        self.average.load(Relaxed) >> 8
    }

    /// Whether there was no sample for `us` microseconds.
    fn is_stale(&self, now_us: u64, us: u64) -> bool {
        let sampled = self.sampled_us.load(Relaxed);
        sampled == 0 || now_us.saturating_sub(sampled) >= us
    }

    fn exceeds(&self, limit_us: u32, now_us: u64) -> bool {
        limit_us > 0 && self.us() > u64::from(limit_us) && !self.is_stale(now_us, STALE_US)
    }
}

/// The latencies of a cache.
#[derive(Default)]
pub(super) struct Overload {
    reads: Latency,
    writes: Latency,
    /// Of changes that went past the cache, on the backing device.
    backing: Latency,
    /// Between two segments that reclaim frees while space is short.
    space: Latency,
    /// Changes that are on their way past the cache.
    in_flight: AtomicU32,
    /// Segments that reclaim had freed when the last one was seen, and when that was; 0 while space is not short.
    freed: AtomicU64,
    freed_us: AtomicU64,
}

impl Overload {
    /// A change goes past the cache.
    pub(super) fn begin(&self) {
        self.in_flight.fetch_add(1, Relaxed);
    }

    /// It has ended; the backing device took `us` microseconds for it, if it took it.
    pub(super) fn end(&self, us: Option<u64>, now_us: u64) {
        self.in_flight.fetch_sub(1, Relaxed);
        if let Some(us) = us {
            self.backing.add(us, now_us, SLOWLY);
        }
    }

    /// Whether the backing device answers sooner than space comes. `freed`: the segments that reclaim has freed.
    fn is_backing_sooner(&self, freed: u64, now_us: u64) -> bool {
        let since_us = self.freed_us.load(Relaxed);
        let before = self.freed.load(Relaxed);
        if since_us == 0 || before != freed {
            if since_us > 0 {
                let segments = freed.saturating_sub(before).max(1);
                self.space.add(now_us.saturating_sub(since_us) / segments, now_us, FAST);
            }
            self.freed.store(freed, Relaxed);
            self.freed_us.store(now_us.max(1), Relaxed);
        }
        let waited_us = now_us.saturating_sub(self.freed_us.load(Relaxed));
        let space_us = self.space.us().max(waited_us);
        if self.backing.is_stale(now_us, BACKING_STALE_US) {
            // One change measures it.
            return space_us > 0 && self.in_flight.load(Relaxed) == 0;
        }
        space_us > self.backing.us()
    }

    /// Space is not short.
    fn has_space(&self) {
        if self.freed_us.load(Relaxed) > 0 {
            self.freed_us.store(0, Relaxed);
        }
    }
}

impl<E: Environment> Cache<E> {
    /// Begins a write of the cache itself, whose latency is measured if a setting depends on it.
    pub fn begin_measured_write(&self) -> Option<u64> {
        (!self.caches_writes() && self.settings().congestion_write_us > 0).then(|| self.monotonic_us())
    }

    /// The write that began with this result is complete.
    #[inline]
    pub fn end_measured_write(&self, begun_us: Option<u64>) {
        if let Some(begun_us) = begun_us {
            self.overload.writes.add_since(begun_us, self.monotonic_us());
        }
    }

    /// As [`begin_measured_write`](Self::begin_measured_write), for a read.
    #[inline]
    pub fn begin_measured_read(&self) -> Option<u64> {
        self.base().mode().measures_reads().then(|| self.monotonic_us())
    }

    /// The read that began with this result is complete.
    #[inline]
    pub fn end_measured_read(&self, begun_us: Option<u64>) {
        if let Some(begun_us) = begun_us {
            self.overload.reads.add_since(begun_us, self.monotonic_us());
        }
    }

    /// Whether writes of the cache itself take longer on average than `congestion_write_us`.
    pub fn are_writes_congested(&self, settings: &Settings) -> bool {
        let limit_us = settings.congestion_write_us;
        limit_us > 0 && self.overload.writes.exceeds(limit_us, self.monotonic_us())
    }

    /// Whether reads take longer than `congestion_read_us`.
    pub fn are_reads_congested(&self) -> bool {
        self.base().mode().measures_reads()
            && self.overload.reads.exceeds(self.settings().congestion_read_us, self.monotonic_us())
    }

    /// Whether a write of `range`, a [piece](Self::pieces), would take the last space, and the backing device answers sooner than
    /// reclaim frees more.
    pub fn is_sooner_around(&self, range: ByteRange) -> bool {
        let (base, pool) = (self.base(), self.base().pool());
        if pool.free() > pool.reserve() {
            self.overload.has_space();
            return false;
        }
        let is_sooner = self.overload.is_backing_sooner(pool.released(), self.monotonic_us());
        let is_short = self.lane_of(range.start).lock().is_short_of_space(base, range.len());
        if is_short {
            base.wakeups().wake();
        }
        is_short && is_sooner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slow_request_is_no_congestion_and_a_slow_cache_is_tried_again() {
        let latency = Latency::default();
        latency.add(7_000, 1, SLOWLY);
        assert!(!latency.exceeds(1_000, 1));
        latency.add(7_000, 2, SLOWLY);
        assert!(latency.exceeds(1_000, 2) && !latency.exceeds(0, 2));
        assert!(latency.exceeds(1_000, 1 + STALE_US));
        assert!(!latency.exceeds(1_000, 2 + STALE_US), "requests measure it again");
        (0..20).for_each(|_| latency.add(0, 3 + STALE_US, SLOWLY));
        assert!(!latency.exceeds(1_000, 3 + STALE_US));
    }

    #[test]
    fn changes_go_around_only_while_the_backing_device_is_sooner_than_space() {
        let overload = Overload::default();
        assert!(!overload.is_backing_sooner(5, 1_000), "space may come at once");
        assert!(overload.is_backing_sooner(5, 2_000), "the backing device is not known");
        overload.begin();
        assert!(!overload.is_backing_sooner(5, 3_000), "one change measures it");
        overload.end(Some(16_000), 4_000);
        assert!(overload.is_backing_sooner(5, 4_000), "2 ms on average, and 3 ms without space");
        (0..20).for_each(|_| {
            overload.begin();
            overload.end(Some(16_000), 5_000);
        });
        assert!(!overload.is_backing_sooner(5, 5_000));
        assert!(!overload.is_backing_sooner(7, 9_000), "two segments came in 8 ms");
        assert!(overload.is_backing_sooner(7, 30_000), "for 21 ms none came");
        overload.has_space();
        assert!(!overload.is_backing_sooner(8, 40_000));
    }
}
