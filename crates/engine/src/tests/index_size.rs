//! The index of a running cache gets another size.

use super::rig::{Options, Rig, SEGMENT};
use crate::{IndexResize, Settings};
use alloc::vec::Vec;
use cbd_types::{ByteRange, CHUNK, ErrorKind};

const BLOCK: u64 = 4096;
/// Blocks that are written before each resize, in several chunks.
const BLOCKS: u64 = 200;

/// Block `number`, of 64 chunks in turn.
fn block(number: u64) -> ByteRange {
    ByteRange::at(number % 64 * CHUNK + number / 64 * BLOCK, BLOCK)
}

fn rig(lanes: u32) -> Rig {
    let options = Options { device: 64 * CHUNK, lanes, segments: 33, ..Options::default() };
    let rig = Rig::new(options);
    (0..BLOCKS).for_each(|number| assert!(rig.write(block(number), number as u8)));
    rig
}

fn check(rig: &Rig) {
    for number in 0..BLOCKS {
        assert_eq!(rig.read(block(number)), [number as u8; BLOCK as usize], "block {number}");
    }
    let status = rig.cache.status();
    assert_eq!((status.index_blocks, status.read_missed_bytes), (BLOCKS, 0));
}

#[test]
fn every_block_is_there_at_each_step_to_each_size() {
    for lanes in [1, 2] {
        let rig = rig(lanes);
        for blocks in [9000, 1, 300, 300, 4000] {
            let mut resize = IndexResize::new(blocks);
            while rig.cache.step_index_resize(&mut resize).unwrap() {
                check(&rig);
            }
            check(&rig);
            assert!(!rig.cache.step_index_resize(&mut resize).unwrap(), "it is done");
            let bytes = rig.cache.status().index_bytes;
            // Buckets, a slab of nodes and one of sides for each lane, and admission.
            let own = lanes as u64 * (blocks.div_ceil(3).max(16) as u64 * 64 + blocks as u64 * 3);
            assert!((own * 8 / 10..own + lanes as u64 * 32_000).contains(&bytes), "{blocks}: {bytes}");
        }
    }
}

#[test]
fn a_resize_that_was_left_is_completed_by_the_next() {
    let rig = rig(2);
    let mut left = IndexResize::new(9000);
    for _ in 0..5 {
        assert!(rig.cache.step_index_resize(&mut left).unwrap());
    }
    let half = rig.cache.status().index_bytes;
    drop(left);
    check(&rig);
    rig.cache.resize_index(3000, || check(&rig)).unwrap();
    check(&rig);
    let done = rig.cache.status().index_bytes;
    assert!(done < half && done > 2 * 3000 * 21, "{done}");
    // Of two at once, each completes what the other has begun.
    let mut resizes = [IndexResize::new(500), IndexResize::new(7000)];
    while resizes.each_mut().map(|resize| rig.cache.step_index_resize(resize).unwrap()) != [false; 2] {
        check(&rig);
    }
    check(&rig);
}

#[test]
fn a_resize_to_the_present_size_allocates_no_table() {
    let rig = rig(1);
    rig.cache.resize_index(5000, || {}).unwrap();
    let (bytes, mut steps) = (rig.cache.status().index_bytes, 0);
    rig.cache
        .resize_index(5000, || {
            steps += 1;
            assert_eq!(rig.cache.status().index_bytes, bytes);
        })
        .unwrap();
    assert!(steps < 3, "{steps}");
}

#[test]
fn a_stop_ends_a_resize() {
    let rig = rig(1);
    let mut steps = 0;
    let result = rig.cache.resize_index(9000, || {
        steps += 1;
        if steps == 3 {
            rig.cache.stop();
        }
    });
    assert_eq!((result.map_err(|error| error.kind()), steps), (Err(ErrorKind::Stopped), 3));
}

#[test]
fn a_new_cache_has_the_index_that_a_resize_to_its_segments_makes() {
    let rig = rig(2);
    let before = rig.cache.status().index_bytes;
    let blocks = rig.cache.index_blocks_per_lane(32);
    assert_eq!(blocks as u64, 32 * SEGMENT / (4096 + 128) / 2);
    rig.cache.resize_index(blocks, || assert_eq!(rig.cache.status().index_bytes, before)).unwrap();
    assert_eq!(rig.cache.status().index_bytes, before);
}

#[test]
fn what_is_read_again_and_again_stays_cached_when_the_index_grows_and_shrinks() {
    let settings = Settings { gc_percent: 70, ..Settings::default() };
    let mut rig = Rig::new(Options { device: 64 * CHUNK, segments: 33, settings, ..Options::default() });
    let blocks = rig.cache.index_blocks_per_lane(32);
    let hot: Vec<u64> = (0..150).collect();
    let mut scanned = 1000;
    let mut round = |rig: &mut Rig| {
        let before = rig.cache.status().read_hit_bytes;
        hot.iter().for_each(|number| drop(rig.read(block(*number))));
        let hits = (rig.cache.status().read_hit_bytes - before) / BLOCK;
        // A scan between the rounds, which admission keeps out.
        for number in scanned..scanned + 300 {
            rig.read(block(number));
        }
        scanned += 300;
        rig.settle();
        hits
    };
    (0..12).for_each(|_| {
        round(&mut rig);
    });
    let usual = (0..4).map(|_| round(&mut rig)).min().unwrap();
    assert!(usual > 100, "{usual} hits before");
    for size in [2 * blocks, blocks, 2 * blocks, 4 * blocks, blocks] {
        rig.cache.resize_index(size, || {}).unwrap();
        for _ in 0..4 {
            let hits = round(&mut rig);
            assert!(hits * 10 >= usual * 9, "{hits} hits of {usual} with {size} blocks");
        }
    }
}
