//! Decorators around real files.
#![allow(missing_docs)]

mod common;

use cbd_backing::{Backing, PollableQueue, Throttle, ThrottleParameters};
use cbd_testkit::{Fault, FaultRule, Faulty, OpKind, Traced, decorate};
use cbd_types::{BackingOp, BackingQueue, ErrorKind, OpToken};
use common::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn rule(text: &str) -> FaultRule {
    FaultRule::parse(text).expect("a rule")
}

fn fails(queue: &mut dyn PollableQueue, op: BackingOp) -> bool {
    run(queue, op).result.is_err()
}

#[test]
fn a_throttled_device_takes_the_time_of_its_model_and_changes_nothing() {
    in_time(|| {
        let directory = directory();
        let inner = open(&file(directory.path(), "disk", 8 * MIB));
        let parameters = ThrottleParameters { latency_us: 20_000.0, ..ThrottleParameters::NONE };
        let disk = Throttle::new(inner, parameters);
        let mut queue = queue(&disk, 8);
        let begin = Instant::now();
        for index in 0..5 {
            queue.submit(OpToken(index), write(index * 4096, &[index as u8 + 1; 4096]));
        }
        let mut done = Vec::new();
        queue.poll(&mut done);
        assert!(done.is_empty() && queue.in_flight() == 5);
        while queue.in_flight() > 0 {
            queue.wait(&mut done);
        }
        assert!(begin.elapsed() >= Duration::from_millis(100), "one after the other");
        let order: Vec<_> = done.iter().map(|one| one.token.0).collect();
        assert_eq!(order, [0, 1, 2, 3, 4]);
        assert!(run_ok(&mut *queue, read(8192, 4096)).iter().all(|byte| *byte == 3));
    });
}

#[test]
fn two_queues_share_one_arm() {
    in_time(|| {
        let directory = directory();
        let inner = open(&file(directory.path(), "disk", 8 * MIB));
        let disk =
            Throttle::new(inner, ThrottleParameters { latency_us: 30_000.0, ..ThrottleParameters::NONE });
        let (mut one, mut other) = (queue(&disk, 8), queue(&disk, 8));
        let begin = Instant::now();
        one.submit(OpToken(1), read(0, 4096));
        other.submit(OpToken(2), read(0, 4096));
        let mut done = Vec::new();
        other.wait(&mut done);
        assert!(begin.elapsed() >= Duration::from_millis(60));
        one.wait(&mut done);
        assert_eq!(done.len(), 2);
    });
}

#[test]
fn the_wait_descriptor_of_a_throttled_queue_wakes_when_the_model_is_done() {
    in_time(|| {
        let directory = directory();
        let inner = open(&file(directory.path(), "disk", 8 * MIB));
        let disk =
            Throttle::new(inner, ThrottleParameters { latency_us: 50_000.0, ..ThrottleParameters::NONE });
        let mut queue = queue(&disk, 8);
        let (begin, mut done) = (Instant::now(), Vec::new());
        queue.submit(OpToken(1), write(0, &[1; 4096]));
        let mut wakes = 0;
        while done.is_empty() {
            let _ = readable(queue.wait_descriptor(), 1000);
            queue.poll(&mut done);
            wakes += 1;
        }
        assert!(begin.elapsed() >= Duration::from_millis(50) && begin.elapsed() < Duration::from_millis(900));
        assert!(wakes < 10, "the thread sleeps in between: {wakes}");
        assert!(!readable(queue.wait_descriptor(), 0));
    });
}

#[test]
fn the_nth_write_fails_once_and_nothing_of_it_is_done() {
    in_time(|| {
        let directory = directory();
        let disk =
            Faulty::new(open(&file(directory.path(), "disk", MIB)), vec![rule("op=write,after=2,times=1")]);
        let mut queue = queue(&disk, 8);
        let failed: Vec<_> =
            (0..5).map(|index| fails(&mut *queue, write(index * 4096, &[7; 4096]))).collect();
        assert_eq!(failed, [false, false, true, false, false]);
        assert_eq!(run_ok(&mut *queue, read(8192, 4096))[0], 0);
        assert_eq!(disk.handle().failed(), 1);
    });
}

#[test]
fn a_lasting_fault_ends_when_the_rules_change() {
    in_time(|| {
        let directory = directory();
        let disk = Faulty::new(open(&file(directory.path(), "disk", MIB)), Vec::new());
        let (mut queue, handle) = (queue(&disk, 8), disk.handle());
        assert!(!fails(&mut *queue, BackingOp::Flush));
        handle.add(rule("op=flush"));
        assert!(fails(&mut *queue, BackingOp::Flush) && fails(&mut *queue, BackingOp::Flush));
        assert!(!fails(&mut *queue, write(0, &[1; 512])));
        handle.clear();
        assert!(!fails(&mut *queue, BackingOp::Flush));
    });
}

#[test]
fn only_operations_that_touch_the_range_fail() {
    in_time(|| {
        let directory = directory();
        let disk = Faulty::new(
            open(&file(directory.path(), "disk", MIB)),
            vec![rule("range=4096-8192,error=no_space")],
        );
        let mut queue = queue(&disk, 8);
        assert!(!fails(&mut *queue, read(0, 4096)) && !fails(&mut *queue, zero(8192, 4096)));
        let error = run(&mut *queue, write(7680, &[1; 1024])).result.expect_err("in the range");
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    });
}

#[test]
fn a_rule_with_a_share_of_one_half_fails_half_of_the_operations() {
    in_time(|| {
        let directory = directory();
        let disk = Faulty::new(open(&file(directory.path(), "disk", MIB)), vec![rule("percent=50")]);
        let mut queue = queue(&disk, 8);
        let failed = (0..400).filter(|_| fails(&mut *queue, read(0, 512))).count();
        assert!((140..260).contains(&failed), "{failed}");
    });
}

#[test]
fn a_partial_write_stores_its_first_half_and_returns_the_whole_buffer() {
    in_time(|| {
        let directory = directory();
        let disk =
            Faulty::new(open(&file(directory.path(), "disk", MIB)), vec![rule("op=write,how=partial")]);
        let mut queue = queue(&disk, 8);
        let done = run(&mut *queue, write(0, &[9; 16384]));
        assert!(done.result.is_err());
        assert!(
            matches!(&done.op, BackingOp::Write { buffer, .. } if buffer.len() == 16384 && buffer[9000] == 9)
        );
        let bytes = run_ok(&mut *queue, read(0, 16384));
        assert!(bytes[..8192].iter().all(|byte| *byte == 9) && bytes[8192..].iter().all(|byte| *byte == 0));
    });
}

#[test]
fn a_write_that_fails_after_it_was_done_is_on_the_disk() {
    in_time(|| {
        let directory = directory();
        let disk =
            Faulty::new(open(&file(directory.path(), "disk", MIB)), vec![rule("op=write,how=fail_after")]);
        let mut queue = queue(&disk, 8);
        assert!(fails(&mut *queue, write(0, &[9; 4096])));
        assert_eq!(run_ok(&mut *queue, read(0, 4096))[4095], 9);
    });
}

#[test]
fn a_stalled_operation_completes_after_its_release() {
    in_time(|| {
        let directory = directory();
        let disk = Faulty::new(open(&file(directory.path(), "disk", MIB)), vec![rule("op=write,how=stall")]);
        assert_eq!(rule("how=stall").how, Fault::Stall);
        let (mut queue, handle) = (queue(&disk, 8), disk.handle());
        queue.submit(OpToken(1), write(0, &[9; 4096]));
        run_other(&mut *queue);
        assert!(!readable(queue.wait_descriptor(), 20));
        let waker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            handle.clear();
        });
        let mut done = Vec::new();
        queue.wait(&mut done);
        assert!(done.len() == 1 && done[0].token == OpToken(1) && done[0].result.is_ok());
        waker.join().expect("woken");
    });
}

/// Runs a read while a write is stalled.
fn run_other(queue: &mut dyn PollableQueue) {
    let mut done = Vec::new();
    queue.submit(OpToken(2), read(0, 4096));
    queue.wait(&mut done);
    assert!(done.len() == 1 && done[0].token == OpToken(2) && queue.in_flight() == 1);
}

#[test]
fn a_trace_lists_the_operations_in_order() {
    in_time(|| {
        let directory = directory();
        let disk = Traced::new(open(&file(directory.path(), "disk", MIB)));
        let mut queue = queue(&disk, 8);
        run_ok(&mut *queue, write(4096, &[1; 512]));
        run_ok(&mut *queue, BackingOp::Flush);
        assert!(fails(&mut *queue, read(MIB, 512)));
        let events: Vec<_> = disk.handle().entries().iter().map(|entry| (entry.kind, entry.ended)).collect();
        let expected = [
            (OpKind::Write, None),
            (OpKind::Write, Some(Ok(()))),
            (OpKind::Flush, None),
            (OpKind::Flush, Some(Ok(()))),
            (OpKind::Read, None),
            (OpKind::Read, Some(Err(ErrorKind::OutOfRange))),
        ];
        assert_eq!(events, expected);
        assert_eq!(disk.handle().entries()[0].range.start, 4096);
    });
}

#[test]
fn a_trace_records_overlapping_changes_in_flight() {
    in_time(|| {
        let directory = directory();
        let disk = Traced::with_capacity(open(&file(directory.path(), "disk", MIB)), 3);
        let (mut queue, handle) = (queue(&disk, 8), disk.handle());
        let mut done = Vec::new();
        queue.submit(OpToken(1), read(0, 4096));
        queue.submit(OpToken(2), read(0, 8192));
        assert!(handle.conflict().is_none());
        queue.submit(OpToken(3), write(4096, &[1; 512]));
        let (first, second) = handle.conflict().expect("a conflict");
        assert_eq!((first.number, second.number), (1, 2));
        while queue.in_flight() > 0 {
            queue.wait(&mut done);
        }
        assert_eq!((handle.entries().len(), handle.forgotten()), (3, 3));
    });
}

#[test]
fn decorators_stack_as_their_specification_says() {
    in_time(|| {
        let directory = directory();
        let inner: Arc<dyn Backing> = Arc::new(open(&file(directory.path(), "disk", MIB)));
        let disk = decorate("throttle:hdd,rpm=5400;fault:op=read,after=1;trace", inner).expect("understood");
        assert!(disk.geometry().rotational);
        let words = disk.describe();
        assert!(words.contains("seek_ms=8,rpm=5400,mib_per_s=150") && words.ends_with("traced"), "{words}");
        let mut queue = queue(&*disk, 8);
        run_ok(&mut *queue, read(0, 512));
        assert!(fails(&mut *queue, read(0, 512)));
    });
}

#[test]
fn an_invalid_specification_is_refused() {
    let directory = directory();
    let inner: Arc<dyn Backing> = Arc::new(open(&file(directory.path(), "disk", MIB)));
    for text in ["", "slow", "trace:x", "throttle:rpm", "throttle:hdd;;trace", "fault:op=x"] {
        let error = decorate(text, Arc::clone(&inner)).map(|disk| disk.describe()).expect_err(text);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{text}");
    }
}
