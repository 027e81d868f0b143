//! Checks from outside: all bytes through the engine, and the disk alone.

use super::neighbour::Neighbour;
use super::{Happened, World};
use cbd_engine::{CacheMode, Consistency};
use cbd_types::ByteRange;

impl World {
    /// Checks the case that the region and the power fail now: the backing device must be a legal crash state.
    pub fn check_backing(&mut self) {
        let image = self.disk.image_after_power_cut(self.random.next());
        let Some(status) = self.process().cached().map(|cache| cache.status()) else {
            // The disk is everything that there is.
            let not_before = if self.had_power_cut { self.drained } else { self.oracle.now() };
            self.happened.images_checked += 1;
            return self.expect(self.oracle.moment_of(&image, not_before).map(drop));
        };
        self.happened.points_checked += u64::from(status.drained_wall_ms > 0);
        self.expect(self.check_recovery_point(&image, &status));
        if !status.backing_is_consistent {
            self.happened.images_inconsistent += 1;
            let is_strict = self.options.consistency == Consistency::Strict && !self.options.vary_settings;
            if is_strict && !self.is_damaged && self.options.unwritable.is_empty() {
                self.fail("strict, and the backing device is not crash-consistent");
            }
            return;
        }
        self.happened.images_checked += 1;
        // In a mode in which all changes go past the cache, the region holds nothing that a flush has covered.
        let is_past = status.cache_mode != CacheMode::Writeback
            && !status.is_changing_mode
            && status.dirty_records == 0;
        let not_before = if is_past && !self.had_power_cut { self.oracle.now() } else { self.drained };
        self.happened.images_past += u64::from(is_past);
        self.expect(self.oracle.moment_of(&image, not_before));
    }

    /// Repairs the disk, so that it accepts the parked data.
    fn write_back_parked(&mut self) {
        if !self.is_cached() {
            return;
        }
        self.wait_until(|world| {
            world.note_drained();
            world.process().cache().parked_bytes() == 0
        });
        // A drain continues until the backing device is crash-consistent.
        self.drain();
    }

    /// Reads everything through the engine and compares it.
    pub fn check_everything(&mut self) {
        let everything = ByteRange { start: 0, end: self.options.size };
        everything.split_at_multiples(1 << 20).for_each(|range| self.check(range));
    }

    /// Reads everything that was ever changed through the engine and compares it.
    pub fn check_changed(&mut self) {
        self.oracle.changed(32 << 10).into_iter().for_each(|range| self.check(range));
    }

    /// From this call on, reads may fail, because the region is damaged.
    pub const fn expect_damage(&mut self) {
        self.is_damaged = true;
    }

    /// Everything that was ever changed, in whole blocks of 4 KiB.
    #[must_use]
    pub fn changed(&self) -> Vec<ByteRange> {
        self.oracle.changed(4 << 10)
    }

    /// The range of the segments in the region, in bytes.
    #[must_use]
    pub fn segment_area(&self) -> ByteRange {
        self.segment_area
    }

    /// Reads everything, block by block, and compares the readable blocks. Returns the unreadable ones.
    pub fn unreadable(&mut self) -> Vec<ByteRange> {
        let everything = ByteRange { start: 0, end: self.options.size };
        self.unreadable_of(everything.split_at_multiples(4096).collect())
    }

    /// As [`unreadable`](Self::unreadable), for everything that was ever changed.
    pub fn unreadable_changed(&mut self) -> Vec<ByteRange> {
        self.unreadable_of(self.oracle.changed(4096))
    }

    fn unreadable_of(&mut self, blocks: Vec<ByteRange>) -> Vec<ByteRange> {
        let mut unreadable = Vec::new();
        for block in blocks {
            let submitted = self.oracle.now();
            match self.try_read(block) {
                Ok(bytes) => {
                    let verdict = self.oracle.check_read(block, submitted, &bytes);
                    self.expect(verdict);
                }
                Err(_) if self.is_damaged => unreadable.push(block),
                Err(error) => self.fail(format!("reading {block}: {error}")),
            }
        }
        unreadable
    }

    fn check(&mut self, range: ByteRange) {
        let submitted = self.oracle.now();
        let bytes = self.read_now(range);
        let verdict = self.oracle.check_read(range, submitted, &bytes);
        self.expect(verdict);
    }

    /// Ends the world: every request completes, reads return the right bytes, the cache is drained, and the disk
    /// alone holds everything.
    ///
    /// Data that was never changed is compared on the disk only: reads through the cache would replace its whole
    /// content.
    pub fn finish(mut self) -> Happened {
        self.memory.never_crash();
        self.finish_change();
        self.quiesce();
        self.check_changed();
        self.check_neighbour(Neighbour::check_changed);
        self.repair_disk();
        self.drain();
        self.write_back_parked();
        self.run_worker_until_idle();
        let status = self.process().cached().map(|cache| cache.status());
        if status.is_some_and(|status| !status.backing_is_consistent) {
            self.fail("everything is on the backing device, but status says it is inconsistent");
        }
        self.process().stop();
        for image in [self.disk.contents(), self.disk.durable()] {
            let verdict = self.oracle.check_everything(&image);
            self.expect(verdict);
        }
        self.end_process();
        self.happened
    }
}
