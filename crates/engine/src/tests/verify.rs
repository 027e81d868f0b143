//! What a verification says of memory, checksum and disk, each good or bad, and what it repairs.

use super::rig::{Options, Rig, SECTOR};
use crate::{Comparison, Holding, OnWriteError, Part, Repair, Settings};
use alloc::{vec, vec::Vec};
use cbd_types::{ByteRange, ErrorKind};

const BLOCK: u64 = 4096;

fn blocks(first: u64, count: u64) -> ByteRange {
    ByteRange::at(first * BLOCK, count * BLOCK)
}

fn inspect(rig: &Rig, range: ByteRange) -> Vec<Part> {
    let (mut parts, mut scratch) = (Vec::new(), vec![0; 1 << 20]);
    rig.cache.inspect(range, &mut scratch, &mut parts).expect("it runs");
    assert_eq!(parts.iter().map(|part| part.range.len()).sum::<u64>(), range.len(), "no hole");
    parts
}

fn only(rig: &Rig, range: ByteRange) -> Part {
    let parts = inspect(rig, range);
    assert_eq!(parts.len(), 1, "{parts:?}");
    parts[0]
}

fn holdings(rig: &Rig, range: ByteRange) -> Vec<Holding> {
    inspect(rig, range).iter().map(|part| part.holding).collect()
}

fn on_disk(rig: &Rig, range: ByteRange) -> Vec<u8> {
    rig.disk.with(|state| state.bytes[range.start as usize..range.end as usize].to_vec())
}

/// Changes what the disk has of a sector, without the knowledge of the cache.
fn change_disk(rig: &Rig, at: u64) {
    rig.disk.with(|state| state.bytes[at as usize] ^= 1);
}

fn compare(rig: &Rig, part: &Part) -> Comparison {
    rig.cache.compare(part, &on_disk(rig, part.range), &mut vec![0; part.range.len() as usize])
}

/// Repairs the only part of `range` from the disk.
fn repair(rig: &Rig, range: ByteRange, is_confirmed: bool) -> Repair {
    let part = only(rig, range);
    assert_eq!(part.holding, Holding::CleanDamaged);
    let miss = rig.cache.begin_repair(&part).expect("it has not changed");
    rig.cache.end_repair(&part, miss, Some(&on_disk(rig, range)), is_confirmed, &mut vec![0; 8192])
}

fn read_error(rig: &Rig, range: ByteRange) -> Option<ErrorKind> {
    let (mut bytes, mut misses) = (vec![0; range.len() as usize], Vec::new());
    let result = rig.cache.read(range, &mut bytes, &mut misses);
    misses.into_iter().for_each(|miss| rig.cache.cancel_fill(miss));
    result.err().map(|error| error.kind())
}

#[test]
fn a_part_is_what_the_cache_holds_of_it() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 2), 1));
    assert!(rig.zero(blocks(2, 1), false));
    assert_eq!(holdings(&rig, blocks(0, 4)), [Holding::Dirty, Holding::Dirty, Holding::Nothing]);
    rig.drain();
    rig.read(blocks(3, 1));
    let parts = inspect(&rig, blocks(0, 4));
    assert!(parts.iter().all(|part| part.holding == Holding::Clean), "{parts:?}");
    assert_eq!(parts.iter().map(Part::is_written).collect::<Vec<_>>(), [true, true, false]);
    assert!(parts.iter().all(|part| compare(&rig, part) == Comparison::Same));
}

#[test]
fn an_inspection_counts_as_no_read_and_takes_no_space() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 4), 1));
    rig.drain();
    let before = rig.cache.status();
    inspect(&rig, blocks(0, 8)).iter().for_each(|part| {
        let _ = compare(&rig, part);
    });
    let after = rig.cache.status();
    let counted = |status: &crate::CacheStatus| {
        (status.read_hit_bytes, status.read_missed_bytes, status.free_segments, status.dirty_records)
    };
    assert_eq!(counted(&before), counted(&after));
}

#[test]
fn damage_of_dirty_data_is_listed_as_by_a_read_and_only_its_block_is_lost() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 3), 1));
    rig.damage(BLOCK);
    let expected = [Holding::Dirty, Holding::DirtyDamaged, Holding::Dirty];
    assert_eq!(holdings(&rig, blocks(0, 3)), expected);
    assert_eq!(
        rig.cache.status().damaged.iter().map(|damaged| damaged.range).collect::<Vec<_>>(),
        [blocks(1, 1)]
    );
    rig.drain();
    assert_eq!(inspect(&rig, blocks(1, 1))[0].holding, Holding::Quarantined);
    assert_eq!(read_error(&rig, blocks(1, 1)), Some(ErrorKind::Media));
}

#[test]
fn clean_data_that_is_damaged_in_the_cache_is_cached_again_from_the_disk() {
    for is_filled in [false, true] {
        let mut rig = Rig::new(Options::default());
        if is_filled {
            rig.read(blocks(0, 3));
        } else {
            assert!(rig.write(blocks(0, 3), 1));
            rig.drain();
        }
        let before = rig.read(blocks(0, 3));
        rig.damage(BLOCK);
        assert_eq!(holdings(&rig, blocks(0, 3)), [Holding::Clean, Holding::CleanDamaged, Holding::Clean]);
        assert_eq!(repair(&rig, blocks(1, 1), false), Repair::Done);
        assert_eq!(only(&rig, blocks(1, 1)).holding, Holding::Clean);
        assert_eq!(rig.read(blocks(0, 3)), before);
        assert_eq!(rig.cache.status().damage_healed, 1);
    }
}

#[test]
fn what_fails_the_checksum_on_the_disk_too_is_quarantined_once_it_is_confirmed() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 2), 1));
    rig.drain();
    rig.damage(0);
    change_disk(&rig, 100);
    assert_eq!(repair(&rig, blocks(0, 1), false), Repair::Changed, "it is read a second time");
    assert_eq!(repair(&rig, blocks(0, 1), true), Repair::Lost);
    assert_eq!(only(&rig, blocks(0, 1)).holding, Holding::Quarantined);
    assert_eq!(read_error(&rig, blocks(0, 1)), Some(ErrorKind::Media), "wrong data is not returned");
    assert_eq!(rig.cache.quarantined_bytes(), BLOCK);
    let rig = rig.reopened();
    assert_eq!(read_error(&rig, blocks(0, 1)), Some(ErrorKind::Media), "after a restart, too");
    assert_eq!(rig.read(blocks(1, 1)), [1; BLOCK as usize]);
    assert!(rig.write(blocks(0, 1), 3));
    assert_eq!(rig.read(blocks(0, 1)), [3; BLOCK as usize], "an overwrite heals");
}

#[test]
fn a_disk_that_cannot_be_read_at_this_moment_loses_nothing() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 1), 1));
    rig.drain();
    rig.damage(0);
    let part = only(&rig, blocks(0, 1));
    let miss = rig.cache.begin_repair(&part).expect("it has not changed");
    assert_eq!(rig.cache.end_repair(&part, miss, None, true, &mut vec![0; 4096]), Repair::Lost);
    assert_eq!(rig.cache.quarantined_bytes(), 0);
    assert_eq!(rig.read(blocks(0, 1)), [1; BLOCK as usize], "the disk can be read again");
}

#[test]
fn the_rest_of_a_block_helps_to_prove_a_part_of_it() {
    // The rest is what a later write has replaced: it is good, or it is what is damaged.
    for damaged in [0, 1024] {
        let mut rig = Rig::new(Options::default());
        assert!(rig.write(blocks(0, 1), 1));
        let (segment, _, record) = rig.newest(0);
        rig.drain();
        assert!(rig.write(ByteRange::at(1024, SECTOR), 2));
        rig.drain();
        rig.flip(segment.base + u64::from(record.data_offset.get()) + damaged);
        let part = inspect(&rig, blocks(0, 1))[0];
        assert_eq!((part.range, part.holding), (ByteRange::at(0, 1024), Holding::CleanDamaged));
        assert_eq!(repair(&rig, part.range, false), Repair::Done, "damaged at {damaged}");
        let mut expected = [1; BLOCK as usize];
        expected[1024..1536].fill(2);
        assert_eq!(rig.read(blocks(0, 1)), expected);
    }
}

#[test]
fn a_part_that_neither_the_checksum_nor_a_second_copy_proves_is_lost() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 1), 1));
    rig.drain();
    assert!(rig.write(ByteRange::at(1024, SECTOR), 2));
    rig.drain();
    rig.damage(0);
    change_disk(&rig, 7);
    assert_eq!(repair(&rig, ByteRange::at(0, 1024), true), Repair::Lost);
    assert_eq!(read_error(&rig, ByteRange::at(0, 1024)), Some(ErrorKind::Media));
    assert_eq!(rig.read(ByteRange::at(1024, SECTOR)), [2; SECTOR as usize]);
}

#[test]
fn a_lost_record_of_a_clean_segment_is_replaced_from_the_disk() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 1), 1));
    rig.drain();
    rig.lose_record(0);
    assert_eq!(repair(&rig, blocks(0, 1), false), Repair::Done);
    assert_eq!(only(&rig, blocks(0, 1)).holding, Holding::Clean);
}

#[test]
fn a_damaged_copy_of_a_record_is_repaired() {
    for copy in [0, 1] {
        let rig = Rig::new(Options::default());
        assert!(rig.write(blocks(0, 4), 1));
        let (segment, slot, record) = rig.newest(0);
        assert!(record.lines > 0, "it has checksums in a continuation line");
        for line in 0..=u32::from(record.lines) {
            let copies = rig.cache.log().shape().slot(slot + line).map(|at| segment.base + at);
            rig.flip(copies[copy] + 20);
            assert!(only(&rig, blocks(0, 4)).repaired_record);
            assert!(!only(&rig, blocks(0, 4)).repaired_record);
            // The other one is not needed any more.
            rig.flip(copies[1 - copy] + 20);
            assert_eq!(only(&rig, blocks(0, 4)).holding, Holding::Dirty);
        }
    }
}

#[test]
fn a_difference_is_named_in_sectors_and_only_if_nothing_changed_meanwhile() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 2), 1));
    rig.drain();
    let part = only(&rig, blocks(0, 2));
    change_disk(&rig, 700);
    change_disk(&rig, 5000);
    let differs = Comparison::Differs(ByteRange { start: 512, end: 5120 });
    assert_eq!(compare(&rig, &part), differs);
    let old = on_disk(&rig, blocks(0, 2));
    assert!(rig.write(ByteRange::at(4096, SECTOR), 1));
    assert_eq!(rig.cache.compare(&part, &old, &mut vec![0; 8192]), Comparison::Changed);
    assert!(!rig.cache.is_unchanged(&part) && rig.cache.begin_repair(&part).is_none());
    rig.drain();
    let part = only(&rig, blocks(0, 1));
    assert!(rig.zero(blocks(0, 1), true));
    assert_eq!(rig.cache.compare(&part, &old[..4096], &mut vec![0; 4096]), Comparison::Changed);
}

#[test]
fn the_same_bytes_written_again_are_another_content() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 1), 1));
    rig.drain();
    let part = only(&rig, blocks(0, 1));
    assert!(rig.write(blocks(0, 1), 1));
    rig.drain();
    assert!(!rig.cache.is_unchanged(&part));
}

#[test]
fn zeroes_are_compared_once_the_disk_has_them() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 1), 1) && rig.zero(blocks(0, 2), false));
    assert_eq!(only(&rig, blocks(0, 2)).holding, Holding::Dirty);
    rig.drain();
    let part = only(&rig, blocks(0, 2));
    assert_eq!((part.holding, compare(&rig, &part)), (Holding::Clean, Comparison::Same));
    change_disk(&rig, 4600);
    assert_eq!(compare(&rig, &part), Comparison::Differs(ByteRange::at(4608 - 512, 512)));
    let lost = part.narrowed(ByteRange::at(4096, 512));
    assert_eq!(rig.cache.write_again(&lost, &mut [], &rig.waker).expect("it runs"), Repair::Done);
    rig.drain();
    assert_eq!(on_disk(&rig, blocks(0, 2)), [0; 8192]);
}

#[test]
fn what_the_disk_has_lost_is_dirty_again_and_written_back() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 4), 1));
    rig.drain();
    change_disk(&rig, 2 * BLOCK + 9);
    let part = only(&rig, blocks(0, 4)).narrowed(ByteRange::at(2 * BLOCK, SECTOR));
    let mut scratch = vec![0; 8192];
    assert_eq!(rig.cache.write_again(&part, &mut scratch, &rig.waker).expect("it runs"), Repair::Done);
    assert_eq!(rig.cache.dirty_bytes(), SECTOR);
    assert_eq!(rig.cache.write_again(&part, &mut scratch, &rig.waker).expect("it runs"), Repair::Changed);
    rig.drain();
    assert_eq!(on_disk(&rig, blocks(0, 4)), [1; 4 * BLOCK as usize]);
    assert_eq!(rig.read(blocks(0, 4)), [1; 4 * BLOCK as usize]);
}

#[test]
fn a_full_cache_writes_again_when_there_is_space() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(900, 1), 7));
    rig.drain();
    let part = only(&rig, blocks(900, 1));
    rig.fill_up();
    let mut scratch = vec![0; 4096];
    let again = |rig: &Rig, scratch: &mut [u8]| rig.cache.write_again(&part, scratch, &rig.waker);
    assert_eq!(again(&rig, &mut scratch).expect("it runs"), Repair::Full);
    rig.drain();
    assert!(rig.room.rings() > 0, "the request is woken");
    assert!(matches!(again(&rig, &mut scratch).expect("it runs"), Repair::Done | Repair::Changed));
}

#[test]
fn what_the_disk_refuses_is_not_compared() {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let mut rig = Rig::new(Options { settings, ..Options::default() });
    rig.disk.with(|state| state.unwritable = vec![ByteRange::at(0, SECTOR)]);
    assert!(rig.write(blocks(0, 1), 1));
    rig.drain_without_clock();
    assert!(rig.cache.status().parked_bytes > 0);
    assert!(holdings(&rig, ByteRange::at(0, SECTOR)).iter().all(|holding| *holding == Holding::Dirty));
    rig.damage(0);
    assert_eq!(only(&rig, ByteRange::at(0, SECTOR)).holding, Holding::DirtyDamaged);
}
