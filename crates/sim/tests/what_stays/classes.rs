//! Metadata of file systems keeps its minimum, and a full cache holds no more than its maximum of it for long.

use crate::{BLOCK, Rig, lane_of};
use cbd_engine::Settings;
use cbd_types::{Class, ErrorKind};

/// A block behind everything else that the tests read and write.
const FAR: u64 = 40_000;

fn settings(min: u8, max: u8) -> Settings {
    Settings { pin_percent: 20, metadata_min_percent: min, metadata_max_percent: max, ..Settings::default() }
}

/// Writes twelve times the cache at random, and reads half as much.
fn stir(rig: &mut Rig, block_of: impl Fn(u64) -> u64) -> usize {
    let mut waited = 0;
    for number in 0..12 * rig.cache_blocks() {
        let block = block_of(rig.random(15_000));
        waited += rig.write(block);
        if number % 2 == 0 {
            let block = FAR + rig.random(20_000);
            rig.read(block, 1);
        }
    }
    rig.settle();
    waited
}

fn keeps_its_minimum(lanes: u32, max: u8, count: impl Fn(&Rig) -> u64, chunks: impl Fn(u64) -> u64) {
    let mut rig = Rig::new(lanes, settings(30, max));
    let min = rig.cache.metadata_min() / BLOCK;
    assert!(min * 5 > rig.cache_blocks(), "{min} of {} blocks", rig.cache_blocks());
    let count = count(&rig);
    for number in 0..count {
        rig.read_marked(Class::Metadata, 20_000 + chunks(number), 1);
    }
    rig.settle();
    let before = rig.cache.status().metadata_bytes / BLOCK;
    let waited = stir(&mut rig, |random| random);
    let now = rig.cache.status().metadata_bytes / BLOCK;
    println!("{lanes} lanes: {before} blocks of metadata, then {now}; minimum {min}; {waited} steps waited");
    assert!(now * 100 >= min.min(before) * 99, "{now} blocks of {before} are left, and the minimum is {min}");
    assert!(now <= min + 64, "{now} blocks are left, and the minimum is {min}");
    let held = (0..count).filter(|number| rig.held(20_000 + chunks(*number), 1) == 1).count() as u64;
    assert_eq!(held, now, "what is counted is what the cache holds");
}

#[test]
fn metadata_up_to_the_minimum_stays_and_what_is_above_it_leaves() {
    keeps_its_minimum(1, 100, |rig| rig.cache.metadata_min() / BLOCK - 20, |number| number);
    keeps_its_minimum(4, 100, |rig| rig.cache.metadata_min() / BLOCK * 2, |number| number);
    keeps_its_minimum(1, 100, |rig| rig.cache.metadata_min() / BLOCK * 2, |number| number);
    // What is above the maximum leaves down to the minimum.
    keeps_its_minimum(2, 30, |rig| rig.cache.metadata_min() / BLOCK * 2, |number| number);
}

#[test]
fn writers_go_on_if_all_metadata_is_in_one_lane() {
    // Of each four chunks, the first: all of one lane.
    let chunk = (0..).find(|block| lane_of(20_000 + block, 4) != lane_of(20_000, 4)).expect("there are four");
    let in_one_lane = move |number: u64| {
        let mut chunks =
            (0..).map(|at| at * chunk).filter(|at| lane_of(20_000 + at, 4) == lane_of(20_000, 4));
        chunks.nth((number / chunk) as usize).expect("there are many") + number % chunk
    };
    let mut rig = Rig::new(4, settings(40, 100));
    let count = rig.cache.metadata_min() / BLOCK;
    for number in 0..count {
        rig.read_marked(Class::Metadata, 20_000 + in_one_lane(number), 1);
    }
    let waited = stir(&mut rig, |random| random);
    let now = rig.cache.status().metadata_bytes / BLOCK;
    println!("{count} blocks of metadata in one lane, then {now}; {waited} steps waited");
    assert!(now * 2 > count, "{now} of {count} are left");
}

#[test]
fn a_full_cache_takes_metadata_up_to_its_maximum_at_misses() {
    for (lanes, max) in [(1, 10), (4, 25)] {
        let mut rig = Rig::new(lanes, settings(0, max));
        stir(&mut rig, |random| random);
        for round in 0..4 {
            rig.read_marked(Class::Metadata, 20_000, 4000);
            let (now, most) = (rig.cache.status().metadata_bytes, rig.cache.metadata_max());
            assert!(now <= most + 16 * BLOCK, "round {round}: {now} bytes, at most {most}");
        }
        let held = rig.cache.status().metadata_bytes;
        assert!(held * 2 > rig.cache.metadata_max(), "{held} of {}", rig.cache.metadata_max());
    }
}

#[test]
fn metadata_that_is_written_above_its_maximum_leaves_at_reclaim() {
    let mut rig = Rig::new(2, settings(0, 10));
    let (most, cache) = (rig.cache.metadata_max() / BLOCK, rig.cache_blocks());
    for block in 0..cache / 2 {
        rig.read_marked(Class::Metadata, 20_000 + block, 1);
    }
    for block in 0..cache / 2 {
        // Read again: other data would get a second chance.
        rig.read_marked(Class::Metadata, 20_000 + block, 1);
    }
    assert!(rig.cache.status().metadata_bytes / BLOCK > 3 * most, "there is space: it is not full yet");
    stir(&mut rig, |random| random);
    let now = rig.cache.status().metadata_bytes / BLOCK;
    assert!(now <= most + 64, "{now} of at most {most}");
}

#[test]
fn bounds_that_contradict_each_other_are_refused() {
    let rig = Rig::new(1, Settings::default());
    let refused = |pins, min, max, why: &str| {
        let settings = Settings {
            pin_percent: pins,
            metadata_min_percent: min,
            metadata_max_percent: max,
            ..Settings::default()
        };
        let error = rig.cache.set_settings(settings).expect_err(why);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.line().contains(why), "{error}");
    };
    refused(50, 11, 100, "together they must be at most 60");
    refused(20, 30, 29, "must not be above the maximum");
    refused(20, 0, 0, "must be 1 to 100");
    refused(20, 0, 101, "must be 1 to 100");
    refused(255, 255, 100, "pin_percent is 255");
}

#[test]
fn writers_of_the_smallest_cache_go_on_beside_a_minimum() {
    let mut rig = Rig::with_segments(9, 4, settings(30, 100));
    let min = rig.cache.metadata_min();
    assert!(min * 6 < rig.cache.capacity(), "{min} of {}", rig.cache.capacity());
    rig.read_marked(Class::Metadata, 20_000, 64);
    let waited = stir(&mut rig, |random| random);
    let now = rig.cache.status().metadata_bytes;
    println!("{now} bytes of metadata, minimum {min}; {waited} steps waited");
    assert!(now >= min, "{now} bytes are left, and the minimum is {min}");
}
