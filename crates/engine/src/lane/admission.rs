//! Admission: which of the blocks that are read from the backing device a full cache records.
//!
//! Recording all of them is best if blocks are soon read again. But a scan, or a loop that is larger than the cache, then
//! evicts needed blocks and gets no hits itself. Recording only blocks that are missed a second time prevents this, at the cost
//! of one more miss for each block of a new working set. Neither policy is always best, so each lane tries both on a sample of
//! its blocks, in two small models of itself, and uses the one that had more hits lately.
//!
//! Invariants: a hit costs a multiplication and a comparison, and for a block of the sample a search of the two models; nothing
//! is allocated after the lane is created; only speed depends on admission.
//!
//! Elsewhere: whether the cache is full (`cache`), and what is evicted (`reclaim`).

use alloc::{boxed::Box, vec};

/// Names kept for each block that the lane can hold.
const NAMES_PER_BLOCK: usize = 2;
/// Blocks of the device whose names are adjacent: one cache line.
const GROUP: u32 = 64;
/// Minimum number of blocks in a model, if the lane has as many.
const MODEL_BLOCKS: usize = 128;
/// At least one block in this many is in the sample.
const SAMPLE_MAX: u32 = 64;
/// Blocks of a set, among which a model selects the one to evict.
const WAYS: usize = 8;
/// No block: no device is so large that a lane has a block of this number.
const NO_BLOCK: u32 = u32::MAX;

/// A hash of the key.
#[inline]
pub(super) fn scatter(key: u32) -> u64 {
    let product = u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// `hash`, scaled to a number below `count`.
pub(super) const fn scaled(hash: u64, count: usize) -> usize {
    (((hash & 0xffff_ffff) * count as u64) >> 32) as usize
}

/// Names of blocks that were missed: one-byte hashes. Each name has one slot, in which the next name with the same slot
/// replaces it; so a name is forgotten after about as many other names as there are slots. One name in 255 is mistaken for that
/// of another block.
struct Names(Box<[u8]>);

impl Names {
    fn new(blocks: usize) -> Self {
        Self(vec![0; (blocks * NAMES_PER_BLOCK).max(1).next_multiple_of(GROUP as usize)].into_boxed_slice())
    }

    /// The slot of `key`, and its name.
    fn slot(&mut self, key: u32) -> Option<(&mut u8, u8)> {
        let hash = scatter(key / GROUP);
        let line = scaled(hash, self.0.len() / GROUP as usize);
        let place = self.0.get_mut(line * GROUP as usize + (key % GROUP) as usize)?;
        Some((place, ((hash >> 56) as u8).max(1)))
    }

    /// Returns whether `key` is present, and removes it if it was, or inserts it if it was not.
    fn exchange(&mut self, key: u32) -> bool {
        let Some((place, name)) = self.slot(key) else { return false };
        let is_there = *place == name;
        *place = if is_there { 0 } else { name };
        is_there
    }

    fn insert(&mut self, key: u32) {
        if let Some((place, name)) = self.slot(key) {
            *place = name;
        }
    }
}

/// The blocks that a lane would hold if it read only a sample of the blocks: in sets, the block that was read last in front.
struct Model {
    blocks: Box<[u32]>,
    /// The blocks that were missed once, if a single miss is not enough.
    names: Option<Names>,
}

impl Model {
    fn new(blocks: usize, is_strict: bool) -> Self {
        let blocks = blocks.next_multiple_of(WAYS);
        Self {
            blocks: vec![NO_BLOCK; blocks].into_boxed_slice(),
            names: is_strict.then(|| Names::new(blocks)),
        }
    }

    /// Reads `key`; returns whether it was a hit.
    fn read(&mut self, key: u32, hash: u64) -> bool {
        let set = scaled(hash >> 16, self.blocks.len() / WAYS) * WAYS;
        let Some(set) = self.blocks.get_mut(set..set + WAYS) else { return false };
        let (is_hit, place) = match set.iter().position(|known| *known == key) {
            Some(place) => (true, place),
            None => (false, WAYS - 1),
        };
        // While the set has room, everything is recorded.
        if is_hit || set[place] == NO_BLOCK || self.names.as_mut().is_none_or(|names| names.exchange(key)) {
            set[..=place].rotate_right(1);
            set[0] = key;
        }
        is_hit
    }
}

/// The state of a lane's admission.
pub(crate) struct Admission {
    /// Bits of a block's hash that are zero if it is in the sample.
    sample: u64,
    /// Records every block that is missed.
    open: Model,
    /// Records blocks that are missed a second time.
    strict: Model,
    /// The number of hits by which `strict` is ahead.
    lead: i32,
    lead_max: i32,
    missed: Names,
}

impl Admission {
    /// The admission of a lane that can hold `blocks` blocks.
    pub(crate) fn new(blocks: usize) -> Self {
        let one_of = ((blocks / MODEL_BLOCKS).max(1).ilog2()).min(SAMPLE_MAX.ilog2());
        // Space that is kept free, or is not full yet, holds no blocks.
        let held = (blocks - blocks / 8) >> one_of;
        Self {
            sample: (1 << one_of) - 1,
            open: Model::new(held, false),
            strict: Model::new(held, true),
            lead: 0,
            lead_max: i32::try_from(held).unwrap_or(i32::MAX).max(1),
            missed: Names::new(blocks),
        }
    }

    /// Notes that a client reads block `key`.
    #[inline]
    pub(crate) fn note_read(&mut self, key: u32) {
        let hash = scatter(key);
        if hash & self.sample == 0 {
            self.try_both(key, hash);
        }
    }

    #[cold]
    #[inline(never)]
    fn try_both(&mut self, key: u32, hash: u64) {
        let ahead = i32::from(self.strict.read(key, hash)) - i32::from(self.open.read(key, hash));
        self.lead = (self.lead + ahead).clamp(-self.lead_max, self.lead_max);
    }

    /// Whether to record block `key`, which a full lane does not hold and has just read from the backing device.
    pub(crate) fn is_worth(&mut self, key: u32) -> bool {
        self.lead < 0 || self.missed.exchange(key)
    }

    /// Notes that reclaim dropped block `key`, which had got a second chance: it counts as missed once.
    pub(crate) fn note_eviction(&mut self, key: u32) {
        self.missed.insert(key);
    }

    /// Memory of the admission in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let names = |names: &Names| names.0.len();
        let model = |model: &Model| model.blocks.len() * 4 + model.names.as_ref().map_or(0, names);
        model(&self.open) + model(&self.strict) + names(&self.missed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: usize = 4096;

    /// A full lane of `BLOCKS` blocks that records what admission accepts, and evicts the block that it has held longest.
    struct Lane {
        admission: Admission,
        held: alloc::collections::VecDeque<u32>,
    }

    impl Lane {
        fn new() -> Self {
            let held = (0..BLOCKS as u32).map(|block| 1_000_000 + block).collect();
            Self { admission: Admission::new(BLOCKS), held }
        }

        /// Reads `count` blocks from `first` on; returns the number of hits.
        fn read(&mut self, first: u32, count: u32) -> u32 {
            let known: alloc::collections::BTreeSet<u32> = self.held.iter().copied().collect();
            let mut hits = 0;
            for key in first..first + count {
                self.admission.note_read(key);
                if known.contains(&key) {
                    hits += 1;
                } else if self.admission.is_worth(key) {
                    self.held.pop_front();
                    self.held.push_back(key);
                }
            }
            hits
        }
    }

    #[test]
    fn a_scan_is_not_admitted_a_place() {
        let mut lane = Lane::new();
        lane.read(0, 100_000);
        let left = lane.held.iter().filter(|key| **key >= 1_000_000).count();
        assert!(left > BLOCKS * 95 / 100, "{left} of {BLOCKS} blocks are left");
    }

    #[test]
    fn what_is_missed_twice_is_worth_a_place() {
        let mut lane = Lane::new();
        lane.read(0, 1000);
        lane.read(0, 1000);
        assert!(lane.read(0, 1000) > 750);
    }

    #[test]
    fn what_was_missed_very_long_ago_is_forgotten() {
        let mut names = Names::new(BLOCKS);
        (0..1000).for_each(|key| assert!(!names.exchange(key)));
        for key in 1000..200_000 {
            names.exchange(key);
        }
        let known = (0..1000).filter(|key| names.exchange(*key)).count();
        assert!(known < 30, "{known} of 1000 names are still known");
    }

    #[test]
    fn a_lane_whose_working_sets_are_new_again_and_again_takes_all_at_once() {
        let mut lane = Lane::new();
        for set in 0..40 {
            for _ in 0..4 {
                lane.read(set * 2000, 2000);
            }
        }
        lane.read(100_000, 1000);
        assert_eq!(lane.read(100_000, 1000), 1000);
    }

    #[test]
    fn a_lane_that_loops_through_more_than_it_holds_keeps_a_part_of_it() {
        let mut lane = Lane::new();
        for _ in 0..20 {
            lane.read(0, 6000);
        }
        assert!(lane.read(0, 6000) > 2000);
    }

    #[test]
    fn it_weighs_less_than_three_bytes_for_a_block() {
        assert!(Admission::new(BLOCKS).bytes() < 3 * BLOCKS);
        assert!(Admission::new(1 << 20).bytes() < (5 << 20) / 2);
    }

    #[test]
    fn a_lane_of_no_blocks_to_speak_of_decides_too() {
        for blocks in [0, 1, 7, 12] {
            let mut admission = Admission::new(blocks);
            (0..100).for_each(|key| admission.note_read(key));
            assert!(!admission.is_worth(3));
            assert!(admission.is_worth(3));
        }
    }

    #[test]
    fn a_name_is_exchanged_for_nothing_and_back() {
        let mut names = Names::new(BLOCKS);
        assert_eq!(names.0.len(), 2 * BLOCKS);
        for key in [0, 1, 63, 64, 65, 1_000_000] {
            assert_eq!([(); 4].map(|()| names.exchange(key)), [false, true, false, true], "{key}");
        }
        assert!(names.0.iter().all(|name| *name == 0));
        // Neighbours have places of their own, in one line.
        (64..128).for_each(|key| assert!(!names.exchange(key)));
        let places: alloc::vec::Vec<usize> = (0..names.0.len()).filter(|at| names.0[*at] != 0).collect();
        assert!(places.len() == 64 && places[63] - places[0] == 63 && places[0].is_multiple_of(64));
        (64..128).for_each(|key| assert!(names.exchange(key)));
    }

    #[test]
    fn an_evicted_block_that_had_a_second_chance_is_worth_a_place_at_its_next_miss() {
        let mut admission = Admission::new(BLOCKS);
        for _ in 0..2 {
            // Whether or not it was missed before.
            admission.note_eviction(7);
            assert!(admission.is_worth(7));
        }
        assert!(!admission.is_worth(7));
        admission.note_eviction(7);
        assert!(admission.is_worth(7));
    }

    #[test]
    fn names_use_all_of_their_memory() {
        let mut names = Names::new(BLOCKS);
        (0..100_000).for_each(|key| {
            names.exchange(key * 64);
        });
        let lines = names.0.chunks(64).filter(|line| line.iter().any(|name| *name != 0)).count();
        assert!(lines > names.0.len() / 64 * 9 / 10, "{lines} of {}", names.0.len() / 64);
        assert_eq!([0, 1, 32, 33].map(|blocks| Names::new(blocks).0.len()), [64, 64, 64, 128]);
    }

    /// A model in plain lists: each set has at most eight blocks, the one that was read last in front.
    struct Lists {
        sets: alloc::vec::Vec<alloc::vec::Vec<u32>>,
        names: Option<Names>,
    }

    impl Lists {
        fn read(&mut self, key: u32) -> bool {
            let count = self.sets.len() as u64;
            let set = &mut self.sets[(((scatter(key) >> 16) % (1 << 32) * count) >> 32) as usize];
            let is_hit = set.contains(&key);
            if is_hit || set.len() < 8 || self.names.as_mut().is_none_or(|names| names.exchange(key)) {
                set.retain(|known| *known != key);
                set.insert(0, key);
                set.truncate(8);
            }
            is_hit
        }
    }

    #[test]
    fn the_models_agree_with_lists() {
        for is_strict in [false, true] {
            let mut model = Model::new(100, is_strict);
            assert_eq!(model.blocks.len(), 104);
            let names = is_strict.then(|| Names::new(104));
            let mut lists = Lists { sets: vec![alloc::vec::Vec::new(); 13], names };
            let mut random = 3_u64;
            for step in 0..20_000 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let key = ((random >> 33) % 300) as u32;
                assert_eq!(model.read(key, scatter(key)), lists.read(key), "step {step}");
            }
        }
    }

    #[test]
    fn the_sample_is_small_and_the_models_are_as_large_as_it() {
        for (blocks, one_of, held) in [
            (0, 1, 0),
            (100, 1, 88),
            (255, 1, 224),
            (256, 2, 112),
            (BLOCKS, 32, 112),
            (128 * 64, 64, 112),
            (128 * 1000, 64, 1752),
        ] {
            let admission = Admission::new(blocks);
            assert_eq!(admission.sample + 1, one_of, "{blocks} blocks");
            assert_eq!([&admission.open, &admission.strict].map(|model| model.blocks.len()), [held; 2]);
            assert!(admission.open.names.is_none() && admission.strict.names.is_some());
            let expected = 2 * 4 * held + (held * 2).max(1).next_multiple_of(64);
            assert_eq!(admission.bytes(), expected + Names::new(blocks).0.len(), "{blocks} blocks");
        }
    }

    #[test]
    fn only_blocks_of_the_sample_reach_the_models() {
        let mut admission = Admission::new(BLOCKS);
        (0..3200).for_each(|key| admission.note_read(key));
        let read = admission.open.blocks.iter().filter(|key| **key != u32::MAX);
        assert!(read.clone().all(|key| scatter(*key).is_multiple_of(32)));
        let sampled = (0..3200).filter(|key| scatter(*key).is_multiple_of(32)).count();
        assert!((70..130).contains(&sampled), "{sampled}");
        assert!(read.count() >= sampled * 8 / 10);
    }

    #[test]
    fn the_lead_is_the_difference_of_hits_within_its_limit() {
        let mut admission = Admission::new(BLOCKS);
        assert_eq!((admission.lead, admission.lead_max), (0, 112));
        // Blocks that are read once and once again soon: only the model that records all has them.
        let sample = admission.sample;
        let sampled = (0..).filter(|key| scatter(*key) & sample == 0);
        for (number, key) in sampled.take(20_000).enumerate() {
            let before = admission.lead;
            admission.note_read(key);
            admission.note_read(key);
            assert!((before - 2..=before).contains(&admission.lead) && admission.lead >= -112);
            assert!(number < 1000 || admission.lead < -100);
        }
        assert_eq!(admission.lead, -112);
        assert!(admission.is_worth(5) && admission.is_worth(5), "all is recorded at once");
        admission.lead = 0;
        assert!(!admission.is_worth(6) && admission.is_worth(6), "what was missed before is recorded");
    }
}
