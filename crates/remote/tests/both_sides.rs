//! Both sides of a channel in one process: a service over memory, and threads that use its device through a region.

mod support;

use cbd_channel::Client;
use cbd_export::{BlockDevice, RequestQueue, wait_any};
use cbd_remote::SharedDevice;
use cbd_types::{BlkdevId, ErrorKind, Operation};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{AREA, BLKDEV, LIMIT, Rig, SIZE, read, wait_for, write};

fn bytes_of(rig: &Rig) -> Vec<u8> {
    let mut bytes = vec![0; 3 * AREA as usize];
    rig.region.load(0, &mut bytes).expect("memory");
    bytes
}

#[test]
fn threads_write_and_read_all_bytes_while_the_service_is_replaced() {
    let rig = Rig::new();
    let mut service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    assert_eq!(device.geometry(), rig.device.geometry());
    let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let _service = std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let (device, is_over, rounds) = (&device, &is_over, &rounds);
            scope.spawn(move || {
                let mut queue = device.open_queue().expect("a queue");
                let first = thread * (2 << 20);
                for round in 0_u64.. {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    let byte = |index: u64| (round + thread + index) as u8;
                    // More than one data place each, and together more than the channel has.
                    let mut missing = 0;
                    for index in 0..8 {
                        let at = first + index * (200 << 10);
                        missing += 1 - write(&mut *queue, at, byte(index), 200 << 10).len();
                    }
                    for completion in wait_for(&mut *queue, missing) {
                        completion.result.expect("it is written");
                    }
                    for index in 0..8 {
                        let found = read(&mut *queue, first + index * (200 << 10), 200 << 10);
                        assert!(found.iter().all(|found| *found == byte(index)), "thread {thread}, {round}");
                    }
                    assert_eq!(queue.parked(), 0);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut seen = 0;
        for _ in 0..20 {
            let end = Instant::now() + LIMIT;
            while rounds.load(Ordering::Relaxed) < seen + 3 {
                assert!(Instant::now() < end, "no progress");
                std::thread::sleep(Duration::from_millis(1));
            }
            seen = rounds.load(Ordering::Relaxed);
            assert!(service.is_used());
            service.stop(false, LIMIT).expect("it ends");
            service = rig.serve();
        }
        is_over.store(true, Ordering::Relaxed);
        service
    });
    assert_eq!(device.in_flight(), 0);
}

#[test]
fn requests_wait_while_there_is_no_service_and_fail_when_the_session_is_closed() {
    let rig = Rig::new();
    let service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    let (mut queue, mut other) =
        (device.open_queue().expect("a queue"), device.open_queue().expect("a queue"));
    service.stop(false, LIMIT).expect("it ends");
    assert_eq!(write(&mut *queue, 0, 7, 4096).len(), 0);
    assert!(wait_any(&queue.wait_descriptors(), Some(LIMIT)).expect("a wait").is_some());
    assert_eq!((queue.parked(), device.in_flight()), (1, 1));
    // It is stored again each second meanwhile, and still waits.
    let end = Instant::now() + Duration::from_millis(1300);
    while Instant::now() < end {
        queue.poll(&mut Vec::new());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(device.waiting().is_some_and(|waiting| waiting > Duration::from_millis(1200)));

    let service = rig.serve();
    wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
    assert_eq!(read(&mut *other, 0, 4096)[..], [7; 4096]);
    assert_eq!(device.waiting(), None);

    // The owner ends the session: what is in flight fails, and so does what follows.
    service.stop(true, LIMIT).expect("it ends");
    assert_eq!(write(&mut *queue, 0, 8, 4096).len(), 0);
    let failed = wait_for(&mut *queue, 1).pop().expect("one");
    assert_eq!(failed.result.map_err(|error| error.kind()), Err(ErrorKind::Stopped));
    let failed = write(&mut *other, 0, 8, 4096).pop().expect("it fails at once");
    assert_eq!(failed.result.map_err(|error| error.kind()), Err(ErrorKind::Stopped));

    // All of them are counted, the write with the time that it waited.
    let figures = device.figures();
    let of = |operation| &figures.iter().find(|(of, _)| *of == operation).expect("each is there").1;
    let counts = |operation| (of(operation).succeeded, of(operation).bytes, of(operation).failed);
    assert_eq!((counts(Operation::Write), counts(Operation::Read)), ((1, 4096, 2), (1, 4096, 0)));
    assert_eq!(counts(Operation::Flush), (0, 0, 0));
    let latency = &of(Operation::Write).latency;
    assert!(latency.sum_ns > 1_200_000_000 && latency.buckets.iter().sum::<u64>() == 1, "{latency:?}");
}

#[test]
fn a_device_that_is_closed_ends_the_requests_of_all_queues_and_another_session_follows() {
    let rig = Rig::new();
    let service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    let (mut queue, mut other) =
        (device.open_queue().expect("a queue"), device.open_queue().expect("a queue"));
    service.stop(false, LIMIT).expect("it ends");
    write(&mut *queue, 0, 7, 4096);
    write(&mut *other, 8192, 7, 4096);
    drop(other);
    device.close();
    // The other thread sleeps until its descriptor wakes it.
    let failed = wait_for(&mut *queue, 1).pop().expect("one");
    assert_eq!(failed.result.map_err(|error| error.kind()), Err(ErrorKind::Stopped));
    assert!(write(&mut *queue, 0, 7, 4096).pop().expect("one").result.is_err());
    drop((queue, device));

    let _service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    let mut queue = device.open_queue().expect("a queue");
    write(&mut *queue, 4096, 9, 4096);
    wait_for(&mut *queue, 1);
    assert_eq!(read(&mut *queue, 0, 8192)[4096..], [9; 4096]);
}

#[test]
fn requests_go_on_with_a_service_that_has_another_area() {
    let rig = Rig::new();
    let service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    let mut queue = device.open_queue().expect("a queue");
    service.stop(false, LIMIT).expect("it ends");
    write(&mut *queue, 0, 7, 4096);
    rig.server.store(2 * AREA, Ordering::Relaxed);
    let _service = rig.serve();
    assert_eq!(device.server_area(), AREA);
    device.follow(2 * AREA);
    assert_eq!((device.server_area(), device.is_ended()), (2 * AREA, false));
    wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
    assert_eq!(read(&mut *queue, 0, 4096)[..], [7; 4096]);
}

#[test]
fn a_device_whose_session_was_ended_serves_again_once_it_was_reopened() {
    let rig = Rig::new();
    let service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    let mut queue = device.open_queue().expect("a queue");
    let reopen = || device.reopen(Arc::clone(&rig.region), rig.place());
    assert!(!reopen().expect("it does nothing"));
    write(&mut *queue, 0, 1, 4096);
    wait_for(&mut *queue, 1).pop().expect("one").result.expect("the session goes on");
    service.stop(true, LIMIT).expect("it ends");
    assert_eq!(write(&mut *queue, 0, 2, 4096).len(), 0);
    wait_for(&mut *queue, 1).pop().expect("one").result.expect_err("the session has ended");
    assert!(device.is_ended());

    assert!(reopen().expect("there is memory") && !device.is_ended());
    assert_eq!(write(&mut *queue, 0, 3, 4096).len(), 0, "it waits for a service");
    let service = rig.serve();
    wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
    assert_eq!(read(&mut *queue, 0, 4096)[..], [3; 4096]);
    // This side can end a session, too: what waits fails.
    service.stop(false, LIMIT).expect("it ends");
    assert_eq!(write(&mut *queue, 0, 4, 4096).len(), 0);
    device.end();
    wait_for(&mut *queue, 1).pop().expect("one").result.expect_err("the session has ended");
    assert!(device.is_ended() && write(&mut *queue, 0, 4, 4096).pop().expect("one").result.is_err());
    let _service = rig.serve();
    assert!(reopen().expect("there is memory"));
    assert_eq!(read(&mut *queue, 0, 4096)[..], [3; 4096]);
    // What was closed here remains closed.
    device.close();
    assert!(!reopen().expect("it does nothing"));
    assert!(device.is_ended() && write(&mut *queue, 0, 4, 4096).pop().expect("one").result.is_err());
}

#[test]
fn a_session_that_was_followed_by_another_one_does_not_begin_again() {
    let rig = Rig::new();
    let service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    let mut queue = device.open_queue().expect("a queue");
    write(&mut *queue, 0, 1, 4096);
    wait_for(&mut *queue, 1);
    // Another session begins and ends in the same area.
    let (place, shape) = (rig.place(), cbd_remote::shape_for(AREA).expect("there is one"));
    Client::open(Arc::clone(&rig.region), place.areas, shape, place.session).expect("a client").close();
    let end = Instant::now() + LIMIT;
    while service.is_used() {
        assert!(Instant::now() < end, "the service does not notice the end");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The former one stores its header again after a second. Its requests are still in the ring: taken from the first one on again, they
    // would be executed behind later ones.
    write(&mut *queue, 0, 2, 4096);
    let end = Instant::now() + Duration::from_millis(1300);
    while Instant::now() < end {
        let mut done = Vec::new();
        queue.poll(&mut done);
        assert!(done.is_empty() && !service.is_used());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_device_that_is_not_served_is_an_error_in_time() {
    let rig = Rig::new();
    let begun = Instant::now();
    let error = rig.open(Duration::from_millis(50)).map(drop).expect_err("it is not served");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(begun.elapsed() >= Duration::from_millis(50));
}

#[test]
fn a_request_that_makes_no_sense_fails_alone() {
    let rig = Rig::new();
    let _service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    let mut queue = device.open_queue().expect("a queue");
    write(&mut *queue, SIZE, 1, 4096);
    let failed = wait_for(&mut *queue, 1).pop().expect("one");
    assert_eq!(failed.result.map_err(|error| error.kind()), Err(ErrorKind::OutOfRange));
    write(&mut *queue, 0, 1, 4096);
    wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
}

#[test]
fn a_process_that_is_its_host_no_more_stores_nothing() {
    let rig = Rig::new();
    let mut service = rig.serve();
    let device = rig.open(LIMIT).expect("a device");
    let mut queue = device.open_queue().expect("a queue");
    write(&mut *queue, 0, 1, 4096);
    wait_for(&mut *queue, 1);
    rig.is_lost.store(true, Ordering::SeqCst);
    let end = Instant::now() + LIMIT;
    let failure = loop {
        assert!(Instant::now() < end, "the service goes on");
        if let Some(failure) = service.failure() {
            break failure;
        }
    };
    assert_eq!(failure.kind(), ErrorKind::Stopped);
    assert!(service.failure().is_some(), "it stays so");
    let before = bytes_of(&rig);
    let refused = write(&mut *queue, 0, 2, 4096).pop().expect("it fails at once");
    assert_eq!(refused.result.map_err(|error| error.kind()), Err(ErrorKind::Stopped));
    drop(service);
    device.close();
    drop((queue, device));
    assert_eq!(rig.open(LIMIT).map(drop).map_err(|error| error.kind()), Err(ErrorKind::Stopped));
    assert!(bytes_of(&rig) == before, "the region is another host's");
}

#[test]
fn requests_wait_until_a_channel_has_settled() {
    let rig = Rig::new();
    let local = SharedDevice::new(Arc::clone(&rig.device), Arc::clone(&rig.changes));
    let mut queue = local.open_queue().expect("a queue");
    rig.changes.wait_for(BLKDEV);
    assert_eq!(write(&mut *queue, 0, 1, 4096).len(), 0);
    let service = rig.serve();
    wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
    assert_eq!((read(&mut *queue, 0, 4096)[..] == [1; 4096], queue.parked()), (true, 0));
    // A service that is followed by another one.
    service.stop(false, LIMIT).expect("it ends");
    assert_eq!(write(&mut *queue, 0, 2, 4096).len(), 1, "it has settled");
    let _service = rig.serve();
    assert_eq!(write(&mut *queue, 0, 3, 4096).len() + wait_for_all(&mut *queue), 1);
}

#[test]
fn a_service_ends_while_requests_wait_for_another_channel_and_the_next_one_executes_them() {
    let rig = Rig::new();
    let service = rig.serve();
    let remote = rig.open(LIMIT).expect("a device");
    let mut queue = remote.open_queue().expect("a queue");
    assert_eq!(write(&mut *queue, 0, 1, 4096).len() + wait_for_all(&mut *queue), 1);
    let other = BlkdevId(BLKDEV.0 + 1);
    rig.changes.wait_for(other);
    assert_eq!(write(&mut *queue, 0, 2, 4096).len(), 0);
    wait_any(&[], Some(Duration::from_millis(50))).expect("a wait");
    service.stop(false, LIMIT).expect("it ends");
    let mut local = rig.device.open_queue().expect("a queue");
    assert_eq!(read(&mut *local, 0, 4096)[..], [1; 4096], "the other channel has not settled");
    // The next one may execute it at once: it cannot know that its predecessor has not.
    let _service = rig.serve();
    rig.changes.settle(other);
    assert_eq!(wait_for_all(&mut *queue), 1);
    assert_eq!(read(&mut *local, 0, 4096)[..], [2; 4096]);
}

/// Waits until nothing is in flight; returns how many requests have completed.
fn wait_for_all(queue: &mut dyn RequestQueue) -> usize {
    let parked = queue.parked();
    wait_for(queue, parked).len()
}

#[test]
fn two_hosts_see_one_order_of_their_writes() {
    let rig = Rig::new();
    let local = SharedDevice::new(Arc::clone(&rig.device), Arc::clone(&rig.changes));
    let mut queue = local.open_queue().expect("a queue");
    let mut service = rig.serve();
    let remote = rig.open(LIMIT).expect("a device");
    let mut other = remote.open_queue().expect("a queue");
    for round in 1..=100_u8 {
        let mut done = write(&mut *other, 0, round, 4096);
        if round % 10 == 0 {
            service.stop(false, LIMIT).expect("it ends");
            service = rig.serve();
        }
        if done.is_empty() {
            done = wait_for(&mut *other, 1);
        }
        done.pop().expect("one").result.expect("it is written");
        assert_eq!(read(&mut *queue, 0, 4096)[..], [round; 4096], "{round}");
        write(&mut *queue, 0, round ^ 0x80, 4096);
        wait_for_all(&mut *queue);
        assert_eq!(read(&mut *other, 0, 4096)[..], [round ^ 0x80; 4096], "{round}");
    }
}
