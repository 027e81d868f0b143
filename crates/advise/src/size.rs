//! The form of a simulated cache: its segments and lanes, and the small cache that stands for it.
//!
//! A small cache stands for a large one if it has the same share of space that holds no data: headers, records, and open segments.
//! Its segments cannot be as small as the sample demands, and their headers would take more of them; so it has as many segments as
//! hold the same data.
//!
//! Elsewhere: the region (`cbd-format`), how tools choose lanes (`cbd-runtime`).

use crate::Sample;
use cbd_format::layout::{SEGMENT_SIZE_MAX, SEGMENT_SIZE_MIN};
use cbd_format::record::checksum_lines;
use cbd_format::{Layout, SegmentShape};
use cbd_runtime::disk::lanes_max;
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, Result, Size};

/// The least number of segments of a cache: one lane, and the state of the cache.
const SEGMENTS_MIN: u64 = 9;
/// A small cache has at least this many segments, as far as the large one has them.
const SMALL_SEGMENTS_MIN: u64 = 128;
/// The sparsest sample.
const SHIFT_MAX: u32 = 40;
/// Memory of a simulated cache for each block: the index of the engine, admission, and the table of pages.
const INDEX_BYTES: u64 = 32;

/// A cache as a user creates it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheForm {
    /// Bytes of the cache.
    pub bytes: u64,
    /// Bytes of a segment.
    pub segment: u64,
    /// The most lanes that it has.
    pub lanes_max: u32,
}

impl CacheForm {
    /// A cache of `bytes` as the tools create it on a machine with so many processors, in a region that is little larger unless the
    /// segment size is given.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a cache that is too small, and for a segment size that no region has.
    pub fn new(bytes: u64, segment: Option<u64>, processors: u32) -> Result<Self> {
        let segment = segment.unwrap_or_else(|| Layout::default_segment_size(bytes));
        let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
        if !segment.is_power_of_two() || !(SEGMENT_SIZE_MIN..=SEGMENT_SIZE_MAX).contains(&segment) {
            let size = Size(segment);
            return invalid(format!("a segment size of {size} is no power of two from 64 KiB to 64 MiB"));
        }
        if bytes < SEGMENTS_MIN * segment {
            return invalid(format!(
                "a cache of {} is too small: with segments of {} it has at least {}",
                Size(bytes),
                Size(segment),
                Size(SEGMENTS_MIN * segment)
            ));
        }
        Ok(Self { bytes, segment, lanes_max: lanes_max(bytes / segment, processors) })
    }

    /// Segments that hold a log.
    const fn log_segments(&self) -> u64 {
        self.bytes / self.segment - 1
    }

    /// The cache that stands for this one with the blocks of `sample` alone. `request` and `sampled`: the mean bytes of a record here,
    /// and in the sample.
    #[must_use]
    pub fn small(&self, sample: Sample, request: u64, sampled: u64) -> Self {
        if sample.shift == 0 {
            return *self;
        }
        let segment = (self.segment >> sample.shift).max(SEGMENT_SIZE_MIN);
        let held = held_bytes(self.segment, request) as f64 * self.log_segments() as f64;
        let wanted = held / sample.one_of() as f64 / held_bytes(segment, sampled) as f64;
        let segments = (wanted.round() as u64).max(SEGMENTS_MIN - 1);
        // Open segments hold half of what they could: their share of the cache stays as it is.
        let lanes = f64::from(self.lanes_max) * segments as f64 / self.log_segments() as f64;
        let lanes_max = (lanes.round() as u32).clamp(1, self.lanes_max);
        Self { bytes: (segments + 1) * segment, segment, lanes_max }
    }

    /// Bytes of memory that the simulation of this cache takes when it is full of single blocks: what is not data, and the index.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let held = held_bytes(self.segment, CHECKSUM_BLOCK);
        self.log_segments() * (self.segment - held) + self.bytes / CHECKSUM_BLOCK * INDEX_BYTES
    }

    /// The sample with which a cache that takes at most `memory_max` bytes of memory stands for this one, and serves at most
    /// `blocks_max` of the `blocks` that a trace uses.
    #[must_use]
    pub fn sample_for(&self, memory_max: u64, blocks: u64, blocks_max: u64) -> Sample {
        let is_small_enough = |shift: u32| {
            let segment = (self.segment >> shift).max(SEGMENT_SIZE_MIN);
            let small = Self { bytes: self.bytes >> shift, segment, ..*self };
            small.memory_bytes() <= memory_max && (blocks >> shift) <= blocks_max
        };
        let mut shift = 0;
        while shift < SHIFT_MAX
            && !is_small_enough(shift)
            && (self.bytes >> (shift + 1)) >= SMALL_SEGMENTS_MIN * SEGMENT_SIZE_MIN
        {
            shift += 1;
        }
        Sample { shift }
    }
}

/// The data that a segment holds in records of `length` bytes each.
fn held_bytes(segment: u64, length: u64) -> u64 {
    let shape = SegmentShape { size: segment };
    let length =
        length.next_multiple_of(CHECKSUM_BLOCK).clamp(CHECKSUM_BLOCK, u64::from(shape.atomic_unit()));
    let slots = 1 + checksum_lines(ByteRange::at(0, length));
    let (mut used, mut low) = (0, shape.data_top());
    while shape.fits(used, low, slots, length) {
        used += slots;
        low -= length;
    }
    shape.data_top() - low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_cache_holds_its_share_of_the_data() {
        for (bytes, length) in [(1 << 30, 4096), (64 << 30, 65_536), (1 << 40, 4096)] {
            let form = CacheForm::new(bytes, None, 2).expect("a size");
            let sample = form.sample_for(8 << 20, 0, 0);
            let small = form.small(sample, length, 4096);
            assert!(small.memory_bytes() < 10 << 20, "{small:?}");
            let held = |form: &CacheForm, length| held_bytes(form.segment, length) * form.log_segments();
            let ratio = held(&form, length) as f64 / held(&small, 4096) as f64 / sample.one_of() as f64;
            assert!((ratio - 1.0).abs() < 0.01, "{ratio}");
        }
    }

    #[test]
    fn a_cache_that_fits_is_simulated_as_it_is() {
        let form = CacheForm::new(32 << 20, None, 2).expect("a size");
        assert_eq!(form.sample_for(8 << 20, 0, 0), Sample { shift: 0 });
        assert_eq!(form.small(Sample { shift: 0 }, 4096, 4096), form);
    }

    #[test]
    fn a_cache_without_room_for_a_lane_is_refused() {
        let error = CacheForm::new(1 << 20, None, 2).expect_err("too small");
        assert!(error.line().contains("at least 9 MiB"), "{}", error.line());
        assert!(CacheForm::new(1 << 20, Some(64 << 10), 2).is_ok());
        assert!(CacheForm::new(1 << 30, Some(3 << 20), 2).is_err());
    }
}
