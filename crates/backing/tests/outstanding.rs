//! The age of operations that a backing device has not completed.

use cbd_backing::{Backing, BackingFile, Ended, Options, Outstanding};
use cbd_testkit::{FaultRule, Faulty};
use cbd_types::{AlignedBuffer, BackingOp, BackingQueue, OpToken, Origin};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn write(offset: u64) -> BackingOp {
    BackingOp::Write { offset, buffer: AlignedBuffer::from_slice(&[7; 4096]) }
}

#[test]
fn an_operation_that_hangs_is_reported_with_its_age_while_others_complete_and_until_it_is_answered() {
    let disk = tempfile::NamedTempFile::new().expect("a file");
    disk.as_file().set_len(1 << 20).expect("it grows");
    let file: Arc<dyn Backing> =
        Arc::new(BackingFile::open(disk.path(), Options::default()).expect("opened"));
    let rule = FaultRule::parse("op=write,how=stall").expect("a rule");
    let faulty = Faulty::new(file, vec![rule]);
    let (handle, describe) = (faulty.handle(), faulty.describe());
    let (measured, outstanding) = Outstanding::over(Arc::new(faulty));
    assert_eq!(measured.describe(), describe);
    let (mut hung, mut other) =
        (measured.open_queue(8).expect("a queue"), measured.open_queue(8).expect("a queue"));
    assert_eq!(outstanding.oldest(), None);
    let begun = Instant::now();
    hung.submit(OpToken(1), write(0));
    hung.submit(OpToken(2), BackingOp::Flush);
    let beside_a_newer_one = outstanding.oldest();
    other.submit(OpToken(1), BackingOp::Flush);
    let mut done = Vec::new();
    hung.wait(&mut done);
    other.wait(&mut done);
    let completed_beside_it = done.len();
    std::thread::sleep(Duration::from_millis(20));
    // An age is the difference of two times in whole milliseconds.
    let (oldest, at_most) = (outstanding.oldest(), begun.elapsed() + Duration::from_millis(1));
    // Before anything can panic: dropping the queue waits for the write.
    handle.clear();
    hung.wait(&mut done);
    assert_eq!(completed_beside_it, 2, "both flushes complete");
    let oldest = oldest.expect("the write is not complete");
    assert_eq!(oldest.name, "write");
    assert!(oldest.age >= Duration::from_millis(20) && oldest.age <= at_most, "{oldest:?}");
    assert_eq!(beside_a_newer_one.map(|oldest| oldest.name), Some("write"), "a newer operation hides it");
    assert_eq!((done.len(), outstanding.oldest()), (3, None));
}

#[test]
fn operations_are_counted_with_their_bytes_and_their_latency_and_stay_when_their_queue_ends() {
    let disk = tempfile::NamedTempFile::new().expect("a file");
    disk.as_file().set_len(1 << 20).expect("it grows");
    let file: Arc<dyn Backing> =
        Arc::new(BackingFile::open(disk.path(), Options::default()).expect("opened"));
    let rule = FaultRule::parse("op=write,range=65536-131072").expect("a rule");
    let (measured, outstanding) = Outstanding::over(Arc::new(Faulty::new(file, vec![rule])));
    let mut queues = [0, 1].map(|_| measured.open_queue(8).expect("a queue"));
    let mut done = Vec::new();
    for (number, offset) in [(0, 0), (1, 4096), (1, 64 << 10)] {
        let queue = &mut queues[number];
        if number == 1 {
            queue.set_origin(Origin::Writeback);
        }
        queue.submit(OpToken(1), write(offset));
        queue.submit(OpToken(2), BackingOp::Flush);
        while queue.in_flight() > 0 {
            queue.wait(&mut done);
        }
    }
    let before = outstanding.ended();
    let of = |name| &before.iter().find(|(of, _)| *of == name).expect("all are there").1;
    let (written, flushed, read) = (of("write"), of("flush"), of("read"));
    assert_eq!((written.operations, written.bytes, written.failed), (3, 2 * 4096, 1));
    assert_eq!((flushed.operations, flushed.bytes, flushed.failed), (3, 0, 0));
    assert_eq!((written.latency.buckets.iter().sum::<u64>(), read.operations), (3, 0));
    assert!(written.latency.sum_ns > 0);
    let origins = |of: &Ended| of.origins().map(|(_, of)| (of.operations, of.bytes)).collect::<Vec<_>>();
    assert_eq!(origins(written), [(1, 4096), (0, 0), (2, 4096), (0, 0)]);
    assert_eq!(origins(flushed), [(1, 0), (0, 0), (2, 0), (0, 0)]);
    let [first, second] = queues;
    drop(first);
    assert_eq!(outstanding.ended(), before);
    drop(second);
    assert_eq!(outstanding.ended(), before);
}
