//! A route that changes under open queues.

use super::*;
use cbd_types::TakeBack;

/// A second queue of the rig's device.
fn second(rig: &Rig) -> Queue<Still, Disk> {
    Queue::new(Arc::clone(&rig.queue.device), disk(), Waker::from(Arc::clone(&rig.bell)))
}

fn hold(rig: &Rig) -> crate::Hold<Still> {
    rig.queue.device.hold(Waker::noop().clone()).expect("no thread holds it")
}

fn done_by(queue: &mut Queue<Still, Disk>) -> Vec<u64> {
    let mut done = Vec::new();
    queue.poll(&mut done);
    done.into_iter().filter(|done| done.result.is_ok()).map(|done| done.id).collect()
}

#[test]
fn requests_that_arrive_while_the_route_is_held_wait_and_go_on_in_their_order() {
    let mut rig = rig();
    let hold = hold(&rig);
    rig.submit(write(1, 0, BLOCK, 1));
    rig.plug(write(2, BLOCK, BLOCK, 2));
    rig.submit(read(3, 0, 2 * BLOCK));
    assert_eq!(rig.poll(), []);
    assert_eq!((rig.queue.parked(), rig.queue.changes()), (3, 2));
    assert_eq!(hold.busy_queues(), 0);
    let rings = rig.rings();
    drop(hold);
    assert_eq!(rig.rings(), rings + 1, "the thread of the queue is woken");
    assert_eq!(rig.poll(), [(1, None), (2, None), (3, None)]);
    assert_eq!((rig.queue.parked(), rig.asked()), (0, vec![]));
}

#[test]
fn a_queue_is_busy_until_it_has_noticed_the_hold_and_everything_has_returned() {
    let mut rig = rig();
    rig.submit(read(1, 0, BLOCK));
    let mut other = second(&rig);
    let hold = hold(&rig);
    assert_eq!(hold.busy_queues(), 2);
    assert_eq!(done_by(&mut other), []);
    assert_eq!(hold.busy_queues(), 1, "the first one waits for the disk");
    rig.submit(write(2, 0, BLOCK, 1));
    assert_eq!(rig.poll(), [(1, None)]);
    let hold = hold.change(None).expect_err("the fill is not recorded yet");
    assert_eq!(hold.busy_queues(), 1);
    assert_eq!(rig.poll(), []);
    assert_eq!((hold.busy_queues(), rig.pending_fills()), (0, 0));
}

#[test]
fn a_queue_is_busy_while_the_disk_has_a_request_that_went_straight_to_it() {
    let rig = rig();
    let device = Arc::new(Device::uncached(rig.geometry));
    let mut queue = Queue::new(Arc::clone(&device), disk(), Waker::from(Arc::clone(&rig.bell)));
    let mut done = Vec::new();
    queue.submit(write(1, 0, BLOCK, 1), &mut done);
    let hold = device.hold(Waker::noop().clone()).expect("no thread holds it");
    // The queue notices the hold here, and the disk still has the first write.
    queue.submit(write(2, 0, BLOCK, 2), &mut done);
    assert_eq!(hold.busy_queues(), 1);
    let hold =
        hold.change(Some(Arc::clone(&rig.cache))).expect_err("the disk could write it over a later one");
    assert_eq!(done_by(&mut queue), [1]);
    assert_eq!(hold.busy_queues(), 0);
    assert!(hold.change(Some(Arc::clone(&rig.cache))).is_ok());
    assert_eq!((done_by(&mut queue), rig.cache.dirty_bytes()), (vec![2], BLOCK));
}

#[test]
fn a_hold_ends_with_its_value_and_there_is_one_at_a_time() {
    let rig = rig();
    let first = hold(&rig);
    assert!(rig.queue.device.hold(Waker::noop().clone()).is_none());
    drop(first);
    assert!(rig.queue.device.hold(Waker::noop().clone()).is_some());
}

#[test]
fn a_queue_that_is_closed_or_opened_meanwhile_holds_nothing_up() {
    let mut rig = rig();
    let other = second(&rig);
    let hold = hold(&rig);
    let mut late = second(&rig);
    let mut done = Vec::new();
    late.submit(write(7, 0, BLOCK, 7), &mut done);
    assert!(done.is_empty() && late.parked() == 1, "it waits as those of the other queues");
    rig.poll();
    assert_eq!(hold.busy_queues(), 1);
    drop(other);
    assert_eq!(hold.busy_queues(), 0);
    assert!(hold.change(None).is_ok());
    assert_eq!(done_by(&mut late), []);
    assert_eq!(late.backing.asked, [("write", 0, BLOCK)], "straight to the disk");
    assert_eq!(done_by(&mut late), [7]);
}

#[test]
fn what_was_read_ahead_leaves_nothing_in_a_cache_that_the_route_leaves() {
    let mut rig = rig();
    let is_ahead = |rig: &Rig| rig.queue.parked() == 0 && rig.queue.backing.in_flight() > 0;
    for number in 0..64 {
        rig.submit(read(number, number * 16 * BLOCK, 16 * BLOCK));
        if is_ahead(&rig) {
            break;
        }
        while rig.queue.parked() > 0 {
            rig.poll();
        }
    }
    assert!(rig.queue.ahead.held().0 > 0, "the stream is read ahead");
    assert!(is_ahead(&rig), "no request waits for what the disk reads");
    let hold = hold(&rig);
    rig.submit(read(99, 0, BLOCK));
    rig.queue.backing.is_hung = true;
    rig.poll();
    assert_eq!(hold.busy_queues(), 1, "the disk still reads ahead");
    rig.queue.backing.is_hung = false;
    while hold.busy_queues() > 0 {
        rig.poll();
    }
    assert_eq!((rig.queue.ahead.held().0, rig.pending_fills()), (0, 0));
    assert!(hold.change(None).is_ok());
    rig.asked();
    rig.poll();
    assert_eq!(rig.asked(), [("read", 0, BLOCK)]);
}

#[test]
fn requests_that_wait_for_the_route_are_given_up_with_their_client() {
    let mut rig = rig();
    let hold = hold(&rig);
    rig.submit(write(1, 0, BLOCK, 1));
    let mut done = Vec::new();
    rig.queue.give_up(&mut done);
    assert_eq!(done[0].result.as_ref().map_err(Error::kind), Err(ErrorKind::Stopped));
    drop(hold);
    assert_eq!(rig.poll(), []);
    assert_eq!(rig.cache.dirty_bytes(), 0, "it does not happen later");
}

#[test]
fn requests_that_wait_for_the_route_are_returned() {
    let mut rig = rig();
    let hold = hold(&rig);
    rig.submit(write(1, 0, BLOCK, 1));
    let mut returned = Vec::new();
    rig.queue.take_back(TakeBack { begun_writes: true, is_given_up: &|_| false }, &mut returned);
    assert_eq!((returned.len(), returned[0].id, rig.queue.parked()), (1, 1, 0));
    drop(hold);
    assert_eq!(rig.poll(), []);
    assert_eq!(rig.cache.dirty_bytes(), 0, "it does not happen later");
}

#[test]
fn requests_from_the_callers_memory_are_copied_while_the_route_is_held() {
    let mut rig = rig();
    let range = ByteRange::at(0, BLOCK);
    assert!(matches!(rig.queue.write_from(1, range, &[1; BLOCK as usize], false), Some(Ok(()))));
    let hold = hold(&rig);
    let mut bytes = [2; BLOCK as usize];
    assert!(rig.queue.write_from(2, range, &bytes, false).is_none());
    assert!(rig.queue.read_into(3, range, &mut bytes).is_none());
    drop(hold);
    // A request that comes before the next poll waits as well: what was held comes before it.
    assert!(rig.queue.read_into(4, range, &mut bytes).is_none());
    assert_eq!(rig.poll(), [(2, None), (3, None), (4, None)]);
    assert!(matches!(rig.queue.read_into(5, range, &mut bytes), Some(Ok(()))));
    assert_eq!(bytes, [2; BLOCK as usize]);
}

#[test]
fn a_device_without_a_cache_gets_one_and_its_next_flush_covers_what_went_past() {
    let rig = rig();
    let device = Arc::new(Device::uncached(rig.geometry));
    let before = device.geometry();
    let mut queue = Queue::new(Arc::clone(&device), disk(), Waker::from(Arc::clone(&rig.bell)));
    let mut done = Vec::new();
    queue.submit(write(1, 0, BLOCK, 1), &mut done);
    assert_eq!(done_by(&mut queue), [1]);
    rig.cache.note_unflushed();
    let hold = device.hold(Waker::noop().clone()).expect("no thread holds it");
    assert_eq!(done_by(&mut queue), []);
    assert!(hold.change(Some(Arc::clone(&rig.cache))).is_ok());
    assert_eq!(device.geometry(), before, "what clients saw stays");
    queue.submit(write(2, 0, BLOCK, 2), &mut done);
    assert_eq!((done.len(), rig.cache.dirty_bytes()), (1, BLOCK), "it is in the cache");
    queue.submit(request(Operation::Flush, 0, 0, false), &mut done);
    assert_eq!((done.len(), queue.parked()), (1, 1), "the flush waits for the disk");
    rig.make_room();
    assert_eq!(done_by(&mut queue), [9]);
}

#[test]
fn a_device_grows_and_does_not_shrink() {
    let mut rig = rig();
    let beyond = || request(Operation::Write, DEVICE, BLOCK, false);
    rig.submit(beyond());
    assert_eq!(rig.completed(), [(9, Some(ErrorKind::OutOfRange))]);
    rig.queue.device.grow(DEVICE - BLOCK);
    assert_eq!(rig.queue.device.geometry().size, DEVICE);
    rig.queue.device.grow(DEVICE + BLOCK);
    assert_eq!(rig.queue.device.geometry().size, DEVICE + BLOCK);
}

/// The background worker sends a flush of the backing device, which fails.
fn fail_a_flush(rig: &Rig) {
    let broken = Disk { bad: 0, ..disk() };
    let mut worker = BackgroundWorker::new(Arc::clone(&rig.cache), broken, rig.geometry);
    let failures = rig.cache.reported_failures();
    let _ = rig.cache.request_backing_flush();
    for _ in 0..100 {
        worker.step();
    }
    assert!(rig.cache.reported_failures() > failures, "it has lost something");
}

/// The result of a flush by this queue, which completes at the second poll at the latest.
fn flushed(queue: &mut Queue<Still, Disk>) -> Option<Option<ErrorKind>> {
    let mut done = Vec::new();
    queue.submit(request(Operation::Flush, 0, 0, false), &mut done);
    queue.poll(&mut done);
    queue.poll(&mut done);
    done.pop().map(|done| done.result.err().map(|error| error.kind()))
}

#[test]
fn a_failed_flush_of_a_cache_that_the_route_has_left_is_reported_by_each_queue_once() {
    let mut rig = rig();
    let mut other = second(&rig);
    rig.cache.note_unflushed();
    fail_a_flush(&rig);
    assert_eq!(flushed(&mut other), Some(Some(ErrorKind::Backing)));
    let hold = hold(&rig);
    rig.poll();
    assert_eq!(done_by(&mut other), []);
    assert!(hold.change(None).is_ok());
    assert_eq!(flushed(&mut rig.queue), Some(Some(ErrorKind::Backing)), "what it wrote may be lost");
    assert_eq!(flushed(&mut rig.queue), Some(None));
    assert_eq!(flushed(&mut other), Some(None), "it has reported it before");
}

#[test]
fn a_flush_that_fails_before_a_queue_has_noticed_its_new_cache_is_reported_by_it() {
    let rig = rig();
    let device = Arc::new(Device::uncached(rig.geometry));
    let mut queue = Queue::new(Arc::clone(&device), disk(), Waker::from(Arc::clone(&rig.bell)));
    let mut done = Vec::new();
    queue.submit(write(1, 0, BLOCK, 1), &mut done);
    assert_eq!(done_by(&mut queue), [1]);
    rig.cache.note_unflushed();
    fail_a_flush(&rig);
    let hold = device.hold(Waker::noop().clone()).expect("no thread holds it");
    assert_eq!(done_by(&mut queue), []);
    // What failed before the change was of no request of this queue that the cache knows.
    rig.cache.note_unflushed();
    assert!(hold.change(Some(Arc::clone(&rig.cache))).is_ok());
    // Another queue of the device has asked for this flush, while this one sleeps.
    fail_a_flush(&rig);
    assert_eq!(flushed(&mut queue), Some(Some(ErrorKind::Backing)), "its write may be lost");
    let mut late = Queue::new(device, disk(), Waker::from(Arc::clone(&rig.bell)));
    assert_ne!(flushed(&mut late), Some(Some(ErrorKind::Backing)), "it has written nothing");
}
