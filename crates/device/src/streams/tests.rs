//! Streams: what begins, continues and ends one, and the steps of readahead.

use super::*;
use alloc::vec::Vec;

const KIB: u64 = 1 << 10;
const FAR: u64 = 1 << 40;

/// Reads `count` requests of `length` bytes from `start` on; the results.
fn read(streams: &mut Streams, queue: u32, start: u64, length: u64, count: u64) -> Vec<Followed> {
    let request = |number| ByteRange::at(start + number * length, length);
    (0..count).map(|number| streams.follow(queue, request(number).start, request(number), FAR)).collect()
}

fn steps(followed: &[Followed]) -> Vec<(u64, u64)> {
    let kib = |range: ByteRange| (range.start / KIB, range.end / KIB);
    followed.iter().filter_map(|followed| followed.step.map(|(range, _)| kib(range))).collect()
}

#[test]
fn a_stream_is_read_ahead_in_growing_steps_each_when_the_one_before_the_last_is_used() {
    let mut streams = Streams::new();
    let followed = read(&mut streams, 1, 0, 4 * KIB, 1024);
    assert_eq!(
        steps(&followed),
        [(128, 256), (256, 512), (512, 1024), (1024, 2048), (2048, 3072), (3072, 4096), (4096, 5120)]
    );
    for (number, followed) in followed.iter().enumerate() {
        assert_eq!(followed.before, number as u64 * 4 * KIB);
        if let Some((range, before)) = followed.step {
            assert_eq!(range.start, before, "the stream began at 0");
            assert!(number == 31 || range.start < (number as u64 + 1) * 4 * KIB + STEP_MAX);
        }
    }
}

#[test]
fn a_step_is_at_least_as_long_as_a_request() {
    let mut streams = Streams::new();
    let followed = read(&mut streams, 1, 0, 512 * KIB, 5);
    assert_eq!(steps(&followed), [(1536, 2048), (2048, 3072), (3072, 4096)]);
    let followed = read(&mut streams, 1, FAR / 2, 4096 * KIB, 3);
    assert_eq!(followed[2].step.map(|(range, _)| range.len()), Some(STEP_MAX));
}

#[test]
fn random_requests_and_short_runs_are_no_streams_and_displace_none() {
    let mut streams = Streams::new();
    read(&mut streams, 1, 0, 4 * KIB, 40);
    let mut random = 7_u64;
    for _ in 0..10_000 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let start = (1 << 30) + (random >> 30) % (1 << 32) / 4096 * 4096;
        let followed = read(&mut streams, 1, start, 4 * KIB, 8);
        assert!(followed.iter().all(|followed| followed.step.is_none() && followed.before < 32 * KIB));
    }
    assert_eq!(read(&mut streams, 1, 160 * KIB, 4 * KIB, 1)[0].before, 160 * KIB);
}

#[test]
fn a_stream_that_alternates_between_queues_is_one_stream_and_is_not_read_ahead() {
    let mut streams = Streams::new();
    for number in 0..1024 {
        let followed = read(&mut streams, number % 2, u64::from(number) * 4 * KIB, 4 * KIB, 1)[0];
        assert_eq!((followed.before, followed.step), (u64::from(number) * 4 * KIB, None));
    }
    let followed = read(&mut streams, 2, 4096 * KIB, 4 * KIB, 64);
    assert_eq!(steps(&followed), [(4224, 4352), (4352, 4608)], "from 128 KiB in one queue on");
}

#[test]
fn requests_of_a_stream_may_overtake_each_other() {
    let mut streams = Streams::new();
    read(&mut streams, 1, 0, 64 * KIB, 4);
    let order = [5, 4, 6, 8, 7, 9];
    let followed: Vec<_> =
        order.iter().flat_map(|number| read(&mut streams, 1, number * 64 * KIB, 64 * KIB, 1)).collect();
    assert!(followed.iter().all(|followed| followed.before >= 256 * KIB));
    assert_eq!(steps(&followed).len(), 2);
}

#[test]
fn hits_belong_to_the_stream_of_the_miss_behind_them() {
    let mut streams = Streams::new();
    let miss = ByteRange::at(1000 * KIB, 4 * KIB);
    let followed = streams.follow(1, 0, miss, FAR);
    assert_eq!(
        (followed.before, followed.step.map(|(range, _)| range.start)),
        (1000 * KIB, Some(1004 * KIB))
    );
    // More hits behind the miss.
    let followed = streams.follow(1, 1004 * KIB, ByteRange::at(3000 * KIB, 4 * KIB), FAR);
    assert_eq!(
        (followed.before, followed.step.map(|(range, _)| range.start)),
        (1004 * KIB, Some(3004 * KIB))
    );
}

#[test]
fn what_skips_more_than_it_reads_is_no_stream() {
    let mut streams = Streams::new();
    read(&mut streams, 1, 0, 4 * KIB, 64);
    let strided: Vec<_> =
        (0..100).flat_map(|number| read(&mut streams, 1, (256 + 64 * number) * KIB, 4 * KIB, 1)).collect();
    assert!(steps(&strided).len() <= 1, "{:?}", steps(&strided));
    assert!(strided[20..].iter().all(|followed| followed.before == 0));
}

#[test]
fn nothing_is_read_behind_the_end_of_the_device_or_where_nothing_may_be() {
    let mut streams = Streams::new();
    let end = 1000 * KIB + 512;
    let mut ends = Vec::new();
    for number in 0..250 {
        let followed = streams.follow(1, number * 4 * KIB, ByteRange::at(number * 4 * KIB, 4 * KIB), end);
        ends.extend(followed.step.map(|(range, _)| range.end));
    }
    assert_eq!(ends, [256 * KIB, 512 * KIB, end]);
    let mut streams = Streams::new();
    for number in 0..250 {
        let asked = ByteRange::at(number * 4 * KIB, 4 * KIB);
        assert_eq!(streams.follow(1, asked.start, asked, 0).step, None);
    }
    let next = streams.follow(1, 1000 * KIB, ByteRange::at(1000 * KIB, 4 * KIB), FAR);
    assert_eq!(next.step.map(|(range, _)| range.len()), Some(STEP_MIN), "steps grow only by use");
}

#[test]
fn the_least_recent_stream_is_forgotten() {
    let mut streams = Streams::new();
    for number in 0..STREAMS as u64 {
        read(&mut streams, 1, number << 30, 64 * KIB, 3);
    }
    assert_eq!(read(&mut streams, 1, 192 * KIB, 4 * KIB, 1)[0].before, 192 * KIB);
    read(&mut streams, 1, 1 << 39, 64 * KIB, 3);
    assert_eq!(read(&mut streams, 1, 196 * KIB, 4 * KIB, 1)[0].before, 196 * KIB);
    assert_eq!(read(&mut streams, 1, (1 << 30) + 192 * KIB, 4 * KIB, 1)[0].before, 0);
}
