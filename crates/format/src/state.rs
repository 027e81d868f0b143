//! The state block of a cache: its drained epoch, and each lane's tail and mark.
//!
//! It has a segment of its own. Page 0 and the last page hold the segment's header. Pages 1 and 2 hold the two slots of
//! [`Drained`], and from byte 1024 of each the two slots of [`FormerDisk`]. After them come four areas, each from a page
//! boundary on: all first slots of the lanes' tails, all second ones, all first slots of their marks, all second ones. Behind them
//! are the two copies of the list of pins.

use crate::{COUNTER_END, PAGE, layout::on_media, slot::SlotContent};
use cbd_types::LaneId;
use zerocopy::little_endian::{U32, U64};

on_media! {
    /// The epoch up to which the backing device is complete.
    pub struct Drained, size 48 {
        /// All records of this epoch and of earlier ones are durable on the backing device.
        0 epoch: U64,
        /// While `epoch` is below this, the backing device alone is not crash-consistent.
        8 void_until: U64,
        /// When `epoch` was reached, in milliseconds since 1970 UTC.
        16 wall_ms: U64,
        /// Number of the owner that wrote it.
        24 ownership: U64,
        /// The recovery point, in milliseconds since 1970 UTC: every write that completed before this time belongs to `epoch`
        /// or an earlier one. 0 if it is not known.
        32 closed_ms: U64,
        /// Zero.
        40 reserved: [u8; 8],
    }
}

on_media! {
    /// The oldest valid segment of a lane.
    pub struct LaneTail, size 48 {
        /// Segments of the lane with a lower ordinal are free, whatever their headers say.
        0 ordinal: U64,
        /// Number of the owner that wrote it.
        8 ownership: U64,
        /// Sequence number of the first valid record: the first of the tail segment, or the next one of a lane without
        /// segments.
        16 first_sequence: U64,
        /// Zero.
        24 reserved: [u8; 24],
    }
}

on_media! {
    /// The position up to which a lane is known to be complete.
    pub struct LaneMark, size 48 {
        /// All records up to this sequence number were durable when it was written.
        0 lane_sequence: U64,
        /// The lane's last record belonged to this epoch or an earlier one.
        8 epoch: U64,
        /// Number of the owner that wrote it.
        16 ownership: U64,
        /// `run` of the segment that holds the record `lane_sequence`; 0 if it is not known.
        24 run: U64,
        /// Zero.
        32 reserved: [u8; 16],
    }
}

on_media! {
    /// A backing device that a backend had before a rescue moved it to another one.
    pub struct FormerDisk, size 1008 {
        /// Bytes of `path` in use.
        0 path_length: U32,
        /// Bytes of `identity` in use.
        4 identity_length: U32,
        /// When the rescue began, in milliseconds since 1970 UTC.
        8 moved_ms: U64,
        /// Path of that backing device, UTF-8, zero-padded.
        16 path: [u8; 512],
        /// Its identity, UTF-8, zero-padded.
        528 identity: [u8; 256],
        /// Incremented with every move of the backend: the largest number is that of the last move.
        784 number: U64,
        /// Zero.
        792 reserved: [u8; 216],
    }
}

impl SlotContent for FormerDisk {
    const KIND: u32 = 19;
    const SLOT_SIZE: usize = 1024;
}

impl SlotContent for Drained {
    const KIND: u32 = 16;
    const SLOT_SIZE: usize = 64;

    fn is_plausible(&self) -> bool {
        self.epoch.get() < COUNTER_END && self.void_until.get() < COUNTER_END
    }
}

impl SlotContent for LaneTail {
    const KIND: u32 = 17;
    const SLOT_SIZE: usize = 64;

    fn is_plausible(&self) -> bool {
        self.ordinal.get() < COUNTER_END && self.first_sequence.get() < COUNTER_END
    }
}

impl SlotContent for LaneMark {
    const KIND: u32 = 18;
    const SLOT_SIZE: usize = 64;

    fn is_plausible(&self) -> bool {
        self.lane_sequence.get() < COUNTER_END
            && self.epoch.get() < COUNTER_END
            && self.run.get() < COUNTER_END
    }
}

/// The layout of a state segment, in bytes from its base.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateShape {
    /// Number of lanes.
    pub lanes: u32,
}

impl StateShape {
    const LANES_BEGIN: u64 = 3 * PAGE;

    /// Whether a segment of `size` bytes holds the state of this many lanes.
    #[must_use]
    pub const fn fits(&self, size: u64) -> bool {
        Self::LANES_BEGIN + 4 * self.array() + PAGE <= size
    }

    /// The two slots of [`Drained`].
    #[must_use]
    pub const fn drained(&self) -> [u64; 2] {
        [PAGE, 2 * PAGE]
    }

    /// Maximum number of [`FormerDisk`]s, each in two slots.
    pub const FORMER_DISKS: u64 = 3;

    /// The two slots of the [`FormerDisk`] with this index, which is below [`FORMER_DISKS`](Self::FORMER_DISKS). Their
    /// place, which seeds the checksums, is the `cache_id`: slots of an earlier cache are invalid.
    #[must_use]
    pub const fn former(&self, index: u64) -> [u64; 2] {
        let within = 1024 * (1 + index);
        [PAGE + within, 2 * PAGE + within]
    }

    /// The two slots of a lane's [`LaneTail`].
    #[must_use]
    pub const fn tail(&self, lane: LaneId) -> [u64; 2] {
        let first = Self::LANES_BEGIN + lane.0 as u64 * 64;
        [first, first + self.array()]
    }

    /// The two slots of a lane's [`LaneMark`].
    #[must_use]
    pub const fn mark(&self, lane: LaneId) -> [u64; 2] {
        let first = Self::LANES_BEGIN + 2 * self.array() + lane.0 as u64 * 64;
        [first, first + self.array()]
    }

    /// The first byte of the slots of all these, and the end of the last one.
    #[must_use]
    pub const fn all_slots(&self) -> [u64; 2] {
        [PAGE, Self::LANES_BEGIN + 4 * self.array()]
    }

    /// The most bytes of a copy of the list of pins.
    const PINS_MAX: u64 = 1 << 20;

    /// The two copies of the list of pins in a segment of `size` bytes, and the bytes that each has; `None` if there is no
    /// room for them.
    #[must_use]
    pub const fn pins(&self, size: u64) -> Option<([u64; 2], u64)> {
        let first = Self::LANES_BEGIN + 4 * self.array();
        let pages = size.saturating_sub(PAGE).saturating_sub(first) / PAGE / 2;
        let length = if pages * PAGE < Self::PINS_MAX { pages * PAGE } else { Self::PINS_MAX };
        if length == 0 { None } else { Some(([first, first + length], length)) }
    }

    const fn array(&self) -> u64 {
        (self.lanes as u64 * 64).next_multiple_of(PAGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn each_counter_is_below_the_end_of_counters() {
        let (last, end) = (U64::new(COUNTER_END - 1), U64::new(COUNTER_END));
        let drained: [fn(&mut Drained, U64); 2] =
            [|d, value| d.epoch = value, |d, value| d.void_until = value];
        let tail: [fn(&mut LaneTail, U64); 2] =
            [|t, value| t.ordinal = value, |t, value| t.first_sequence = value];
        let mark: [fn(&mut LaneMark, U64); 3] =
            [|m, value| m.lane_sequence = value, |m, value| m.epoch = value, |m, value| m.run = value];
        fn check<T: SlotContent + FromZeros>(fields: &[fn(&mut T, U64)], last: U64, end: U64) {
            for field in fields {
                let mut content = T::new_zeroed();
                field(&mut content, last);
                assert!(content.is_plausible());
                field(&mut content, end);
                assert!(!content.is_plausible());
            }
        }
        check(&drained, last, end);
        check(&tail, last, end);
        check(&mark, last, end);
    }

    #[test]
    fn tails_and_marks_of_all_lanes_fit_and_share_no_page_with_their_second_slots() {
        let shape = StateShape { lanes: 65 };
        let mut used = alloc::collections::BTreeSet::new();
        for lane in (0..shape.lanes).map(LaneId) {
            for [first, second] in [shape.tail(lane), shape.mark(lane)] {
                assert!(first >= 3 * PAGE && first / PAGE != second / PAGE);
                assert!(used.insert(first) && used.insert(second));
            }
        }
        let end = used.last().map_or(0, |last| last + 64).next_multiple_of(PAGE);
        assert!(shape.fits(end + PAGE) && !shape.fits(end + PAGE - 1));
    }

    #[test]
    fn the_list_of_pins_is_behind_the_lanes_and_before_the_last_page() {
        let shape = StateShape { lanes: 64 };
        assert_eq!(shape.pins(64 << 10), Some(([7 * PAGE, 11 * PAGE], 4 * PAGE)));
        assert_eq!(shape.pins(9 * PAGE), None, "one page is left");
        assert_eq!(shape.pins(10 * PAGE), Some(([7 * PAGE, 8 * PAGE], PAGE)));
        assert_eq!(shape.pins(4 << 20), Some(([7 * PAGE, 7 * PAGE + (1 << 20)], 1 << 20)));
    }
}
