//! Tests admission against plain lists and on patterns of reads.

use super::*;

const BLOCKS: usize = 4096;
/// A resize that is done.
const ALL: u64 = 1 << 32;

/// A full lane of `BLOCKS` blocks that records what admission accepts, and evicts the block that it has held longest.
struct Lane {
    admission: Admission,
    held: alloc::collections::VecDeque<u32>,
}

impl Lane {
    fn new() -> Self {
        let held = (0..BLOCKS as u32).map(|block| 1_000_000 + block).collect();
        Self { admission: Admission::new(BLOCKS).unwrap(), held }
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
    let mut names = Names::new(BLOCKS).unwrap();
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
fn a_resize_keeps_the_lead_and_the_names() {
    for (to, steps) in [(2 * BLOCKS, 7), (BLOCKS / 2, 7), (BLOCKS * 3, 100), (BLOCKS, 1), (10, 3)] {
        let mut admission = Admission::new(BLOCKS).unwrap();
        admission.lead = -56;
        (0..1000).for_each(|key| assert!(!admission.names(key).exchange(key)));
        let mut fresh = Admission::for_resize(to).unwrap();
        let (lead_max, names) = (fresh.lead_max, Names::new(to).unwrap().0.len());
        admission.begin_resize(&mut fresh);
        assert!(fresh.missed.0.is_empty() && fresh.left.is_none(), "they stay until they have moved");
        assert_eq!((admission.lead, admission.lead_max), (-lead_max / 2, lead_max));
        let share = |admission: &mut Admission, from: u32| {
            let known = (from..from + 100).filter(|key| admission.names(*key).exchange(*key)).count();
            // As it was.
            for key in from..from + 100 {
                admission.names(key).exchange(key);
            }
            known
        };
        for step in 1..=steps {
            assert!(admission.resize_step(ALL * (step - 1) / steps).is_none());
            assert!(to < BLOCKS || share(&mut admission, 0) == 100, "{to}: step {step}");
            assert!(to < BLOCKS || share(&mut admission, 900) == 100, "{to}: step {step}");
        }
        let former = admission.resize_step(ALL).0.unwrap();
        assert_eq!(former[0].names.0.len(), 2 * BLOCKS, "the old names are dropped");
        assert!(admission.missed.0.len() == names && admission.left.is_none());
        let known = share(&mut admission, 0) + share(&mut admission, 900);
        assert!(to < BLOCKS / 2 || known >= 150, "{to}: {known} of 200");
        assert_eq!(admission.sample, fresh_sample(to));
    }
}

fn fresh_sample(blocks: usize) -> u64 {
    Admission::new(blocks).unwrap().sample
}

#[test]
fn a_step_of_a_resize_visits_its_share_of_the_names() {
    // Lines of 64 names: as many as there are in both sizes, and one more for each.
    let mut left = Left { names: Names::new(64 * 100).unwrap(), first: 0 };
    let mut names = Names::new(64 * 200).unwrap();
    left.names.0.fill(7);
    for step in 1..=10 {
        left.move_to(&mut names, ALL * step / 10);
        let moved = names.0.iter().filter(|name| **name == 7).count() as u64;
        assert!((moved / 64).abs_diff(40 * step) <= 1, "step {step}: {moved}");
    }
    assert_eq!(left.first, ALL);
}

#[test]
fn it_weighs_less_than_three_bytes_for_a_block() {
    assert!(Admission::new(BLOCKS).unwrap().bytes() < 3 * BLOCKS);
    assert!(Admission::new(1 << 20).unwrap().bytes() < (5 << 20) / 2);
}

#[test]
fn a_lane_of_no_blocks_to_speak_of_decides_too() {
    for blocks in [0, 1, 7, 12] {
        let mut admission = Admission::new(blocks).unwrap();
        (0..100).for_each(|key| admission.note_read(key));
        assert!(!admission.is_worth(3));
        assert!(admission.is_worth(3));
    }
}

#[test]
fn a_name_is_exchanged_for_nothing_and_back() {
    let mut names = Names::new(BLOCKS).unwrap();
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
    let mut admission = Admission::new(BLOCKS).unwrap();
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
    let mut names = Names::new(BLOCKS).unwrap();
    (0..100_000).for_each(|key| {
        names.exchange(key * 64);
    });
    let lines = names.0.chunks(64).filter(|line| line.iter().any(|name| *name != 0)).count();
    assert!(lines > names.0.len() / 64 * 9 / 10, "{lines} of {}", names.0.len() / 64);
    assert_eq!([0, 1, 32, 33].map(|blocks| Names::new(blocks).unwrap().0.len()), [64, 64, 64, 128]);
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
        let mut model = Model::new(100, is_strict).unwrap();
        assert_eq!(model.blocks.len(), 104);
        let names = is_strict.then(|| Names::new(104).unwrap());
        let mut lists = Lists { sets: alloc::vec![alloc::vec::Vec::new(); 13], names };
        let mut random = 3_u64;
        for step in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
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
        let admission = Admission::new(blocks).unwrap();
        assert_eq!(admission.sample + 1, one_of, "{blocks} blocks");
        assert_eq!(admission.models.each_ref().map(|model| model.blocks.len()), [held; 2]);
        let [open, strict] = &*admission.models;
        assert!(open.names.is_none() && strict.names.is_some());
        let expected = 2 * 4 * held + (held * 2).max(1).next_multiple_of(64);
        assert_eq!(admission.bytes(), expected + Names::new(blocks).unwrap().0.len(), "{blocks} blocks");
    }
}

#[test]
fn only_blocks_of_the_sample_reach_the_models() {
    let mut admission = Admission::new(BLOCKS).unwrap();
    (0..3200).for_each(|key| admission.note_read(key));
    let read = admission.models[0].blocks.iter().filter(|key| **key != u32::MAX);
    assert!(read.clone().all(|key| scatter(*key).is_multiple_of(32)));
    let sampled = (0..3200).filter(|key| scatter(*key).is_multiple_of(32)).count();
    assert!((70..130).contains(&sampled), "{sampled}");
    assert!(read.count() >= sampled * 8 / 10);
}

#[test]
fn the_lead_is_the_difference_of_hits_within_its_limit() {
    let mut admission = Admission::new(BLOCKS).unwrap();
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
