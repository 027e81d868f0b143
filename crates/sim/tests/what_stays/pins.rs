//! What is pinned stays.

use crate::{BLOCK, DEVICE, Rig, lane_of};
use cbd_engine::{Pin, PinKind, Settings};
use cbd_types::{ByteRange, CHUNK, ErrorKind};

/// Pins as much as possible from block `first` on, and then reads and writes many times the cache elsewhere: writes at
/// `blocks_written`.
fn stays(lanes: u32, first: u64, blocks_written: impl Fn(&mut Rig, u64) -> u64) {
    let mut rig = Rig::new(lanes, Settings::default());
    let pinned = rig.most();
    assert!(pinned * 3 > rig.cache_blocks(), "{pinned} of {} blocks", rig.cache_blocks());
    rig.pin(ByteRange::at(first * BLOCK, pinned * BLOCK));
    rig.read(first, pinned);
    assert_eq!(rig.held(first, pinned), pinned);
    let (mut waited, count) = (0, 12 * rig.cache_blocks());
    for number in 0..count {
        let block = blocks_written(&mut rig, number);
        waited += rig.write(block);
        if number % 3 == 0 {
            let block = 40_000 + rig.random(20_000);
            rig.read(block, 1);
        }
    }
    rig.settle();
    let held = rig.held(first, pinned);
    let stored = rig.cache.status().stored_bytes / BLOCK;
    println!(
        "{lanes} lanes: {held} of {pinned} pinned blocks; {waited} steps waited; {stored} blocks stored for {count}"
    );
    assert!(held * 100 >= pinned * 99, "{held} of {pinned} pinned blocks are left");
    assert_eq!(rig.read(first, pinned), held, "they are hits");
}

#[test]
fn what_is_pinned_stays_under_random_writes_and_a_scan() {
    for lanes in [1, 2, 4] {
        stays(lanes, 0, |rig, _| 10_000 + rig.random(20_000));
    }
}

#[test]
fn what_is_pinned_stays_if_all_of_it_is_in_one_lane_and_all_lanes_are_written() {
    for lanes in [2, 4] {
        stays(
            lanes,
            5,
            |rig, number| if number % 7 == 0 { rig.random(300) } else { 10_000 + rig.random(20_000) },
        );
    }
}

/// The lane of a block, as docs/format.md says.

#[test]
fn writers_of_other_lanes_go_on_if_pins_are_all_that_the_longest_lane_has() {
    for lanes in [2, 4] {
        stays(lanes, 0, |rig, _| {
            loop {
                let block = 10_000 + rig.random(20_000);
                if lane_of(block, lanes.into()) != 0 {
                    return block;
                }
            }
        });
    }
}

#[test]
fn writers_of_a_lane_full_of_pins_go_on() {
    // The pins are in the first chunk, and all writes go to the rest of it.
    let in_chunk = CHUNK / BLOCK;
    stays(4, 0, |rig, _| in_chunk - 1 - rig.random(in_chunk / 3));
}

#[test]
fn pinned_blocks_that_are_written_again_and_again_stay() {
    let mut rig = Rig::new(2, Settings::default());
    let pinned = rig.most();
    rig.pin(ByteRange::at(0, pinned * BLOCK));
    for _ in 0..10 * rig.cache_blocks() {
        let block = rig.random(pinned);
        rig.write(block);
        let block = 10_000 + rig.random(20_000);
        rig.write(block);
    }
    rig.settle();
    let held = rig.held(0, pinned);
    assert!(held * 100 >= pinned * 99, "{held} of {pinned}");
}

#[test]
fn a_pinned_block_is_recorded_at_its_first_miss_in_a_full_cache_also_behind_the_cutoff() {
    let mut rig = Rig::new(1, Settings::default());
    rig.read(10_000, 4 * rig.cache_blocks());
    rig.settle();
    rig.pin(ByteRange::at(0, 64 * BLOCK));
    for block in 0..64 {
        let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
        rig.cache.read(ByteRange::at(block * BLOCK, BLOCK), &mut bytes, &mut misses).unwrap();
        misses.into_iter().for_each(|miss| rig.cache.complete_fill_behind_cutoff(miss, &bytes));
        rig.settle();
    }
    assert_eq!(rig.held(0, 64), 64);
}

#[test]
fn what_is_not_pinned_any_more_leaves() {
    let mut rig = Rig::new(1, Settings::default());
    let pinned = rig.most();
    rig.pin(ByteRange::at(0, pinned * BLOCK));
    rig.read(0, pinned);
    rig.transport.set_pins(rig.backend, &[]).unwrap();
    assert_eq!(rig.cache.pinned_bytes(), 0);
    for _ in 0..4 * rig.cache_blocks() {
        let block = 10_000 + rig.random(20_000);
        rig.write(block);
    }
    rig.settle();
    assert!(rig.held(0, pinned) * 10 < pinned, "{} of {pinned}", rig.held(0, pinned));
}

#[test]
fn more_than_the_share_is_refused_and_so_is_a_cache_or_a_share_too_small_for_what_is_pinned() {
    let rig = Rig::new(1, Settings::default());
    let limit = rig.cache.pin_limit();
    let pin = |bytes| Pin { kind: PinKind::Range, text: "0".into(), ranges: vec![ByteRange::at(0, bytes)] };
    let refused = rig.transport.set_pins(rig.backend, &[pin(limit + BLOCK)]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::NoSpace);
    assert!(refused.line().contains(&format!("({} bytes) do not fit", limit + BLOCK)), "{refused}");
    assert!(refused.line().contains(&format!("({limit} bytes)")), "{refused}");
    assert_eq!(rig.cache.pinned_bytes(), 0);
    rig.transport.set_pins(rig.backend, &[pin(limit)]).unwrap();
    let refused = rig.cache.begin_shrink(8).map(drop).unwrap_err();
    assert!(refused.kind() == ErrorKind::NoSpace && refused.line().contains("do not fit"), "{refused}");
    assert!(rig.transport.check_pins(rig.backend, None, Some(40)).is_err());
    rig.transport.check_pins(rig.backend, None, Some(50)).unwrap();
    rig.transport.set_pins(rig.backend, &[pin(limit / 2)]).unwrap();
    rig.cache.begin_shrink(8).map(drop).unwrap();
    // Beyond the end of the device.
    let beyond = Pin { ranges: vec![ByteRange::at(DEVICE, BLOCK)], ..pin(BLOCK) };
    let refused = rig.transport.set_pins(rig.backend, &[beyond]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    // A list that is too long.
    let many = Pin { ranges: (0..1024).map(|n| ByteRange::at(n * 2 * BLOCK, 1)).collect(), ..pin(BLOCK) };
    let refused = rig.transport.set_pins(rig.backend, &[many]).unwrap_err();
    assert!(refused.line().contains("1024 ranges"), "{refused}");
}
