//! The last write before a power cut counts as torn if it was never acknowledged, and as damaged if it was. Both
//! leave the same bytes. These tests cover the cases that other evidence distinguishes, and the one case that nothing
//! distinguishes and for which nothing is guaranteed.

use crate::outside::RigEnvironment;
use crate::rig::{BLOCK, Log, Rig, Seen};
use cbd_engine::Cache;
use cbd_sim::{DiskFaults, Keep};
use cbd_types::{ByteRange, ErrorKind};

const BEFORE: u8 = 5;
const AFTER: u8 = 6;

/// A block that was written, and drained if `drained` is set.
fn with_a_block(drained: bool) -> Rig {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, 4 * BLOCK, BEFORE));
    if drained {
        rig.drain();
    }
    rig
}

/// The byte that all four blocks hold; `None` if the cache does not have them.
fn value_of_all(cache: &Cache<RigEnvironment>) -> Option<u8> {
    let (mut bytes, mut misses) = (vec![0xee; 4 * BLOCK as usize], Vec::new());
    cache.read(ByteRange::at(0, 4 * BLOCK), &mut bytes, &mut misses).expect("nothing is damaged");
    let missed: u64 = misses.iter().map(|miss| miss.range.len()).sum();
    misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
    if missed > 0 {
        assert_eq!(missed, 4 * BLOCK, "whole or not at all");
        return None;
    }
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "whole or not at all");
    Some(bytes[0])
}

#[test]
fn a_torn_write_that_was_never_acknowledged_is_there_whole_or_not_at_all() {
    let (mut old, mut new) = (0, 0);
    for drained in [false, true] {
        let mut rig = with_a_block(drained);
        let moments = rig.moments_of(|rig| assert!(rig.try_write(0, 4 * BLOCK, AFTER)));
        assert!(moments.len() > 3, "{} moments", moments.len());
        for moment in moments {
            for seed in 0..20 {
                let keep = [Keep::Random, Keep::Prefix, Keep::Everything, Keep::Nothing][seed as usize % 4];
                let cache = rig.opened(&moment.fork().power_cut(seed, keep));
                match value_of_all(&cache) {
                    Some(AFTER) => new += 1,
                    Some(BEFORE) => old += 1,
                    other => panic!("{other:?} after {keep:?} with seed {seed}"),
                }
                let status = cache.status();
                assert_eq!(status.damaged, [], "a write that was never acknowledged is no damage");
            }
        }
    }
    assert!(old > 20 && new > 20, "{old} times the old data, {new} times the new");
}

/// The quarantine of a damaged block is the last record of its lane for a moment, and is marked soon after.
#[test]
fn a_power_cut_while_damage_is_noted_costs_nothing_else() {
    let mut rig = Rig::new();
    for block in 0..4 {
        assert!(rig.try_write(block * BLOCK, BLOCK, BEFORE));
    }
    let log = rig.first_log();
    // Two blocks: when the first is noted, *drained* already says that the backing device is incomplete.
    for block in [1, 2] {
        rig.memory.flip(log.base + log.size - BLOCK - block * BLOCK + 100, 1);
    }
    let moments = rig.moments_of(Rig::drain);
    assert!(moments.len() > 5, "{} moments", moments.len());
    for (number, moment) in moments.iter().enumerate() {
        for fate in 0..40 {
            let cache = rig.opened(&moment.fork().power_cut(fate, Keep::Random));
            for block in 0..4 {
                let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
                let read = cache.read(ByteRange::at(block * BLOCK, BLOCK), &mut bytes, &mut misses);
                let case = format!("block {block} after moment {number} with fate {fate}");
                assert!(misses.is_empty(), "{case}: it was forgotten");
                match read {
                    Ok(()) => assert!(block > 1 && bytes.iter().all(|byte| *byte == BEFORE), "{case}"),
                    Err(error) => {
                        assert!(block < 2 && error.kind() == ErrorKind::Media, "{case}: {error}");
                    }
                }
            }
        }
    }
}

/// Damages the data of the second write, which was acknowledged, or its record, and restarts.
fn damaged_after(then: impl Fn(&mut Rig), record: bool) -> Rig {
    let mut rig = with_a_block(false);
    assert!(rig.try_write(0, 4 * BLOCK, AFTER));
    then(&mut rig);
    let log = rig.first_log();
    if record {
        rig.lose_slots(log, &[2]);
    } else {
        // Data grows down from the last page: the data of the second write lies below that of the first.
        rig.memory.flip(log.base + log.size - BLOCK - 8 * BLOCK + 100, 1);
    }
    rig.restart()
}

/// Expects an error, now and after another restart, for damaged data and for a damaged record.
fn expect_that_it_is_noticed(then: impl Fn(&mut Rig)) {
    for record in [false, true] {
        let rig = damaged_after(&then, record);
        rig.expect_lost(0);
        rig.restart().expect_lost(0);
    }
}

#[test]
fn a_damaged_write_behind_which_another_was_made_is_noticed() {
    expect_that_it_is_noticed(|rig| assert!(rig.try_write(1 << 20, BLOCK, 9)));
}

#[test]
fn a_damaged_write_behind_which_a_flush_completed_is_noticed() {
    expect_that_it_is_noticed(|rig| rig.cache.flush().unwrap());
}

#[test]
fn a_damaged_write_behind_which_the_cache_was_stopped_is_noticed() {
    expect_that_it_is_noticed(|rig| rig.cache.stop());
}

#[test]
fn a_damaged_write_behind_which_the_lane_was_idle_is_noticed() {
    expect_that_it_is_noticed(|rig| {
        // The idle lane gets its mark in this time. The disk refuses writes meanwhile, so that everything stays
        // dirty.
        rig.disk.set_faults(DiskFaults { change_permille: 1000, ..DiskFaults::default() });
        for _ in 0..200 {
            rig.step();
        }
        assert!(rig.cache.status().dirty_bytes > 0, "it is not on the disk");
    });
}

#[test]
fn limit_damage_of_the_very_last_write_cannot_be_told_from_an_unacknowledged_write() {
    for record in [false, true] {
        let rig = damaged_after(|_| (), record);
        assert_eq!(rig.see(0), Seen::All(BEFORE), "as documented: older data, which cannot be detected");
        assert_eq!(rig.cache.status().damaged, []);
    }
}

#[test]
fn a_damaged_last_write_is_noticed_while_the_cache_runs() {
    let rig = with_a_block(false);
    assert!(rig.try_write(0, 4 * BLOCK, AFTER));
    let log = rig.first_log();
    rig.memory.flip(log.base + log.size - BLOCK - 8 * BLOCK + 100, 1);
    let mut bytes = vec![0; BLOCK as usize];
    let error =
        rig.cache.read(ByteRange::at(0, BLOCK), &mut bytes, &mut Vec::new()).expect_err("it is damaged");
    assert_eq!(error.kind(), ErrorKind::Media, "{}", error.line());
}

/// The header of the first segment that is opened after recovery contains the last sequence number that recovery
/// accepted in the earlier segments.
#[test]
fn the_next_segment_says_where_recovery_cut_the_log() {
    let rig = Rig::new();
    for block in 0..3 {
        assert!(rig.try_write(block * BLOCK, BLOCK, 1), "there is space");
    }
    rig.flip_slots(rig.first_log(), &[2]);
    let rig = rig.restart();
    assert!(rig.try_write(0, BLOCK, 2), "there is space");
    let [first, second] = rig.logs()[..] else { panic!("two segments") };
    let image = rig.memory.image();
    let number = |at: u64| u64::from_le_bytes(image[at as usize..][..8].try_into().unwrap());
    // `cut` and `first_sequence` of the header.
    let header = |log: Log| (number(log.base + 64), number(log.base + 72));
    assert_eq!(header(first), (0, 1));
    assert_eq!(header(second), (2, 3), "the third record was never acknowledged");
}
