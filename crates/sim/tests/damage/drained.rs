//! Whether a drained backing device is complete: the cache reports it as complete exactly when it holds all
//! acknowledged data.

use crate::rig::{BLOCK, Rig, SECTOR, Seen, Shape};
use cbd_types::{ByteRange, CHUNK};

#[test]
fn a_drained_disk_is_not_complete_while_damaged_data_is_missing_on_it() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 4);
    rig.lose_data(rig.first_log(), 1);
    rig.drain();
    let status = rig.cache.status();
    assert_eq!((status.dirty_bytes, status.dirty_records), (0, 0));
    assert_eq!((status.quarantined_bytes, status.missing_bytes()), (4 * SECTOR, 4 * SECTOR));
    assert!(!status.is_all_on_backing());
    let rig = rig.restart();
    assert_eq!(rig.cache.status().missing_bytes(), 4 * SECTOR, "after a restart");
}

#[test]
fn a_healed_part_of_damaged_data_is_not_missing() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 4);
    rig.lose_data(rig.first_log(), 1);
    rig.drain();
    rig.leave_the_segment(1 << 20);
    rig.zero(ByteRange::at(SECTOR, SECTOR));
    rig.drain();
    assert_eq!(rig.cache.status().missing_bytes(), 3 * SECTOR);
    rig.zero(ByteRange::at(0, BLOCK));
    rig.drain();
    assert!(rig.cache.status().is_all_on_backing());
    assert_eq!(rig.on_disk(3 * SECTOR), Seen::All(0));
}

#[test]
fn what_a_lane_has_lost_without_a_trace_is_missing_with_all_of_its_own_chunks() {
    let rig = Rig::of(Shape { device: 4 * CHUNK, lanes_max: 2, segments: 17, ..Shape::default() });
    rig.write_sectors(0, 3);
    rig.cache.flush().unwrap();
    rig.lose_slots(rig.first_log(), &[1]);
    let mut rig = rig.restart();
    rig.drain();
    // Two of the four chunks, except for the sector behind the lost record.
    assert_eq!(rig.cache.status().missing_bytes(), 2 * CHUNK - SECTOR);
}

/// Random sectors are written and some of their data is damaged. After a drain the cache reports the disk as
/// complete exactly if every sector on it is the newest.
#[test]
fn a_disk_is_reported_as_complete_exactly_if_it_shows_what_was_acknowledged() {
    let (mut complete, mut lacking) = (0, 0);
    for seed in 0..64_u64 {
        let mut rig = Rig::new();
        let mut written = [None; 64];
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for number in 0..40 {
            let (sector, value) = (next(64), (number % 250 + 2) as u8);
            assert!(rig.try_write(sector * SECTOR, SECTOR, value));
            written[sector as usize] = Some(value);
            if next(8) == 0 {
                rig.cache.flush().unwrap();
            }
        }
        // Damages a random sector among the data of the first segment, or nothing.
        let log = rig.first_log();
        if next(4) > 0 {
            rig.memory.flip(log.base + log.size - 4096 - 1 - next(40) * SECTOR, 3);
        }
        rig.drain();
        let is_complete = (0..64).zip(written).all(|(sector, value)| match value {
            Some(value) => rig.on_disk(sector * SECTOR) == Seen::All(value),
            None => true,
        });
        assert_eq!(rig.cache.status().is_all_on_backing(), is_complete, "seed {seed}");
        (complete, lacking) = (complete + u32::from(is_complete), lacking + u32::from(!is_complete));
    }
    assert!(complete > 4 && lacking > 4, "{complete} complete, {lacking} lacking");
}
