use super::*;
use crate::Content;
use cbd_types::backing::BackingDone;
use cbd_types::{AlignedBuffer, BackingQueue};
use std::collections::BTreeSet;

const SECTOR: u32 = 512;

fn disk(sectors: u64) -> SimDisk {
    SimDisk::new(SimDisk::ordinary(sectors * u64::from(SECTOR), SECTOR), 1)
}

fn write(sector: u64, sectors: usize, value: u8) -> BackingOp {
    BackingOp::Write { offset: sector * 512, buffer: AlignedBuffer::from_slice(&vec![value; sectors * 512]) }
}

fn all(image: &DiskImage) -> Vec<u8> {
    let mut bytes = vec![0; image.size() as usize];
    image.read(0, &mut bytes);
    bytes
}

fn finish(queue: &mut SimQueue) -> Vec<BackingDone> {
    let mut done = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(&mut done);
    }
    done
}

#[test]
fn a_flush_makes_durable_what_had_completed() {
    let disk = disk(8);
    let mut queue = disk.queue(4);
    queue.submit(OpToken(1), write(0, 1, 7));
    finish(&mut queue);
    queue.submit(OpToken(2), BackingOp::Flush);
    finish(&mut queue);
    queue.submit(OpToken(3), write(1, 1, 8));
    finish(&mut queue);
    assert_eq!(all(&disk.contents())[512..1024], [8; 512]);
    for seed in 0..50 {
        let image = all(&disk.image_after_power_cut(seed));
        assert_eq!(image[..512], [7; 512]);
        assert!(image[512..1024] == [8; 512] || Content::of(1, &image[512..1024]) == Some(Content::INITIAL));
    }
}

#[test]
fn a_flush_does_not_cover_a_write_that_completed_after_its_submission() {
    let lost = (0..200).any(|seed| {
        let disk = SimDisk::new(SimDisk::ordinary(4096, SECTOR), seed);
        let mut queue = disk.queue(4);
        queue.submit(OpToken(1), BackingOp::Flush);
        queue.submit(OpToken(2), write(0, 1, 7));
        finish(&mut queue);
        all(&disk.durable())[..512] != [7; 512]
    });
    assert!(lost);
}

#[test]
fn a_power_cut_keeps_any_subset_of_the_sectors() {
    let disk = disk(8);
    let mut queue = disk.queue(4);
    queue.submit(OpToken(1), write(0, 2, 7));
    finish(&mut queue);
    let seen: BTreeSet<(bool, bool)> = (0..200)
        .map(|seed| {
            let image = all(&disk.image_after_power_cut(seed));
            (image[0] == 7, image[512] == 7)
        })
        .collect();
    assert_eq!(seen.len(), 4);
}

#[test]
fn operations_complete_in_any_order() {
    let orders: BTreeSet<Vec<u64>> = (0..100)
        .map(|seed| {
            let disk = SimDisk::new(SimDisk::ordinary(4096, SECTOR), seed);
            let mut queue = disk.queue(3);
            (0..3).for_each(|at| queue.submit(OpToken(at), write(at, 1, 1)));
            finish(&mut queue).iter().map(|done| done.token.0).collect()
        })
        .collect();
    assert_eq!(orders.len(), 6);
}

#[test]
#[should_panic(expected = "is in flight")]
fn overlapping_changes_are_a_panic() {
    let disk = disk(8);
    let mut queues = [disk.queue(4), disk.queue(4)];
    queues[0].submit(OpToken(1), write(0, 2, 1));
    queues[1].submit(OpToken(1), write(1, 2, 1));
}

#[test]
#[should_panic(expected = "reaches past")]
fn a_write_past_the_end_is_a_panic() {
    disk(8).queue(4).submit(OpToken(1), write(7, 2, 1));
}

#[test]
fn a_failed_flush_loses_what_a_later_flush_cannot_bring_back() {
    let lost = (0..20).filter(|&seed| {
        let disk = SimDisk::new(SimDisk::ordinary(64 * 512, SECTOR), seed);
        let mut queue = disk.queue(1);
        queue.submit(OpToken(1), write(0, 64, 7));
        finish(&mut queue);
        disk.set_faults(DiskFaults { flush_permille: 1000, ..DiskFaults::default() });
        queue.submit(OpToken(2), BackingOp::Flush);
        assert!(finish(&mut queue)[0].result.is_err());
        disk.set_faults(DiskFaults::default());
        queue.submit(OpToken(3), BackingOp::Flush);
        assert!(finish(&mut queue)[0].result.is_ok());
        assert!(all(&disk.contents()).chunks(512).all(|sector| sector == [7; 512]));
        all(&disk.durable()).chunks(512).any(|sector| sector != [7; 512])
    });
    assert!(lost.count() >= 5);
}

#[test]
fn a_read_of_a_bad_range_fails_and_returns_nothing_of_use() {
    let disk = disk(8);
    disk.set_faults(DiskFaults { unreadable: vec![ByteRange::at(512, 512)], ..DiskFaults::default() });
    let mut queue = disk.queue(1);
    queue.submit(OpToken(1), BackingOp::Read { offset: 0, buffer: AlignedBuffer::zeroed(1024) });
    assert!(finish(&mut queue)[0].result.is_err());
}

#[test]
fn a_dropped_queue_leaves_nothing_in_flight() {
    let disk = disk(8);
    let mut queue = disk.queue(1);
    queue.submit(OpToken(1), write(0, 1, 7));
    drop(queue);
    disk.queue(1).submit(OpToken(1), write(0, 1, 8));
    assert_eq!(all(&disk.contents())[..512], [8; 512]);
}

#[test]
fn after_a_process_crash_old_queues_do_nothing() {
    let disk = disk(8);
    let mut queue = disk.queue(1);
    queue.submit(OpToken(1), write(0, 1, 7));
    disk.process_crash(3);
    assert_eq!(queue.in_flight(), 0);
    queue.submit(OpToken(2), write(1, 1, 9));
    finish(&mut queue);
    assert_eq!(Content::of(1, &all(&disk.contents())[512..1024]), Some(Content::INITIAL));
}

#[test]
fn a_verification_obeys_the_faults_of_reads() {
    let disk = disk(8);
    disk.set_faults(DiskFaults { unreadable: vec![ByteRange::at(1024, 512)], ..DiskFaults::default() });
    let mut queue = disk.queue(4);
    for (token, start) in [(1, 0), (2, 1024)] {
        let range = ByteRange::at(start, 1024);
        queue.submit(OpToken(token), BackingOp::Verify { range });
        queue.submit(OpToken(token + 2), BackingOp::Compare { range, expected: Expected::Zeroes });
    }
    for one in finish(&mut queue) {
        assert_eq!(one.result.is_ok(), one.token.0 % 2 == 1, "{one:?}");
    }
}

#[test]
fn a_comparison_names_what_differs() {
    let disk = disk(8);
    let mut queue = disk.queue(4);
    queue.submit(OpToken(1), write(3, 2, 7));
    finish(&mut queue);
    let op = BackingOp::Compare { range: ByteRange::at(0, 4096), expected: Expected::Zeroes };
    queue.submit(OpToken(2), op);
    let error = finish(&mut queue).remove(0).result.expect_err("it differs");
    assert_eq!((error.kind(), error.range()), (ErrorKind::Mismatch, Some(ByteRange::at(3 * 512, 1024))));
}
