//! The device below a [`SwitchDevice`] changes while queues are in use.

use super::*;
use cbd_export::{MemoryDevice, Waker, wait_any};
use cbd_pmem::Mapping;
use cbd_types::{AlignedBuffer, VerifyLevel};
use std::sync::atomic::AtomicUsize;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(20);

/// A device whose queues complete nothing while its gate is closed, and otherwise in the next poll.
struct Gated {
    memory: Arc<dyn BlockDevice>,
    is_open: AtomicBool,
    refuses: AtomicBool,
    queues: AtomicUsize,
    wakers: Mutex<Vec<Waker>>,
    begun: Mutex<Vec<u64>>,
}

struct GatedQueue(Arc<Gated>, Box<dyn RequestQueue>, Event, Vec<Request>, Vec<u64>);

#[derive(Clone)]
struct Handle(Arc<Gated>);

fn memory() -> Arc<dyn BlockDevice> {
    let memory = Arc::new(Mapping::anonymous(1 << 20).expect("memory"));
    Arc::new(MemoryDevice::new(memory, 512).expect("a device"))
}

fn gated(memory: &Arc<dyn BlockDevice>, is_open: bool) -> Handle {
    Handle(Arc::new(Gated {
        memory: Arc::clone(memory),
        is_open: AtomicBool::new(is_open),
        refuses: AtomicBool::default(),
        queues: AtomicUsize::default(),
        wakers: Mutex::default(),
        begun: Mutex::default(),
    }))
}

impl Handle {
    fn open_gate(&self) {
        self.0.is_open.store(true, Ordering::SeqCst);
        self.0.wakers.lock().iter().for_each(Waker::wake);
    }

    fn queues(&self) -> usize {
        self.0.queues.load(Ordering::SeqCst)
    }

    fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::new(self.clone())
    }
}

impl BlockDevice for Handle {
    fn geometry(&self) -> Geometry {
        self.0.memory.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        if self.0.refuses.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::System, "no queue"));
        }
        let event = Event::new()?;
        self.0.wakers.lock().push(event.waker());
        self.0.queues.fetch_add(1, Ordering::SeqCst);
        let queue = self.0.memory.open_queue()?;
        Ok(Box::new(GatedQueue(Arc::clone(&self.0), queue, event, Vec::new(), Vec::new())))
    }

    fn verifies(&self) -> bool {
        true
    }
}

impl RequestQueue for GatedQueue {
    fn submit(&mut self, request: Request, _: &mut Vec<Completion>) {
        self.0.begun.lock().push(request.id);
        self.3.push(request);
        self.2.signal();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.2.clear();
        if self.0.is_open.load(Ordering::SeqCst) {
            self.3.drain(..).for_each(|request| self.1.submit(request, done));
        }
    }

    fn parked(&self) -> usize {
        self.3.len()
    }

    fn verify(&mut self, id: u64, _: Verify) -> Result<()> {
        self.4.push(id);
        Ok(())
    }

    fn take_verified(&mut self) -> Vec<(u64, Result<Verified>)> {
        self.4.drain(..).map(|id| (id, Err(Error::new(ErrorKind::Media, "x")))).collect()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        vec![self.2.descriptor()]
    }
}

impl Drop for GatedQueue {
    fn drop(&mut self) {
        assert!(self.3.is_empty() || std::thread::panicking(), "requests are lost");
        self.0.queues.fetch_sub(1, Ordering::SeqCst);
    }
}

fn request(id: u64, operation: Operation, block: u64, value: u8) -> Request {
    let (at, length) = if operation == Operation::Flush { (0, 0) } else { (block * 4096, 4096) };
    let mut buffer = AlignedBuffer::zeroed(length);
    buffer.fill(value);
    Request::unmarked(id, operation, ByteRange::at(at, length as u64), false, buffer)
}

fn submit(queue: &mut Box<dyn RequestQueue>, ids: std::ops::Range<u64>) {
    let mut done = Vec::new();
    for id in ids {
        let operation = if id % 4 == 3 { Operation::Flush } else { Operation::Write };
        queue.submit_plugged(request(id, operation, id, 1), &mut done);
    }
    queue.unplug(&mut done);
    assert!(done.is_empty(), "it completes in a poll");
}

fn poll(queue: &mut Box<dyn RequestQueue>) -> Vec<(u64, bool)> {
    let mut done = Vec::new();
    queue.poll(&mut done);
    done.into_iter().map(|done| (done.id, done.result.is_ok())).collect()
}

fn is_awake(queue: &dyn RequestQueue) -> bool {
    wait_any(&queue.wait_descriptors(), Some(Duration::ZERO)).expect("a wait").is_some()
}

fn all(ids: std::ops::Range<u64>, is_ok: bool) -> Vec<(u64, bool)> {
    ids.map(|id| (id, is_ok)).collect()
}

#[test]
fn held_requests_go_to_the_next_device_in_order_and_wake_their_queue() {
    let (one, other) = (gated(&memory(), true), gated(&memory(), false));
    let switch = SwitchDevice::new(one.device());
    let (mut queue, idle) = (switch.open_queue().expect("a queue"), switch.open_queue().expect("a queue"));
    submit(&mut queue, 0..1);
    assert!(is_awake(&*queue), "the device has an event");
    assert_eq!((poll(&mut queue), is_awake(&*queue), one.queues()), (all(0..1, true), false, 2));
    switch.resume(other.device());
    assert!(!switch.is_held() && switch.held_for().is_none(), "there was no hold");
    switch.hold(LONG).expect("all are idle");
    switch.hold(LONG).expect("once more");
    assert_eq!((one.queues(), switch.is_held(), switch.held_for().is_some()), (0, true, true));
    assert_eq!(switch.waiting(), None);
    submit(&mut queue, 1..6);
    assert_eq!(switch.waiting().map(|(count, _)| count), Some(5));
    assert_eq!((poll(&mut queue), queue.parked(), queue.changes(), is_awake(&*queue)), (vec![], 5, 4, false));
    let verify = Verify { range: ByteRange::at(0, 4096), level: VerifyLevel::All, repair: false };
    assert_eq!(queue.verify(1, verify).map_err(|error| error.kind()), Err(ErrorKind::Busy));
    switch.release();
    assert_eq!(
        (Arc::strong_count(&one.0), switch.verifies(), switch.geometry()),
        (1, false, other.geometry())
    );
    assert_eq!(switch.extents(ByteRange::at(0, 512)).expect("an extent").len(), 1);
    switch.resume_former();
    assert!(switch.is_held(), "there is no former device");
    switch.resume(other.device());
    assert!(!switch.is_held() && is_awake(&*queue) && !is_awake(&*idle));
    submit(&mut queue, 6..8);
    assert_eq!(*other.0.begun.lock(), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((poll(&mut queue), is_awake(&*queue)), (vec![], false), "the gate is closed");
    other.open_gate();
    assert!(is_awake(&*queue), "the event of the other device");
    assert_eq!((poll(&mut queue), is_awake(&*queue), queue.parked()), (all(1..8, true), false, 0));
    assert_eq!(one.0.begun.lock().len(), 1);
    drop((queue, idle));
    assert_eq!((other.queues(), switch.0.state.lock().slots.len()), (0, 0));
}

#[test]
fn a_hold_waits_for_what_is_in_flight_and_can_be_cancelled() {
    let device = gated(&memory(), false);
    let switch = Arc::new(SwitchDevice::new(device.device()));
    let mut queue = switch.open_queue().expect("a queue");
    submit(&mut queue, 0..2);
    let timed_out = |error: Error| error.kind() == ErrorKind::TimedOut;
    assert!(switch.hold(SHORT).is_err_and(timed_out));
    submit(&mut queue, 2..4);
    switch.resume(gated(&memory(), true).device());
    switch.release();
    assert!(switch.is_held(), "the device has requests");
    switch.resume_former();
    assert_eq!((poll(&mut queue), queue.parked()), (vec![], 4));
    device.open_gate();
    assert_eq!((poll(&mut queue), device.0.begun.lock().len()), (all(0..4, true), 4));
    let verify = Verify { range: ByteRange::at(0, 4096), level: VerifyLevel::All, repair: false };
    queue.verify(1, verify).expect("it can");
    assert!(switch.hold(SHORT).is_err_and(timed_out), "it verifies");
    let waiter = std::thread::spawn({
        let switch = Arc::clone(&switch);
        move || switch.hold(LONG).map_err(|error| error.kind())
    });
    while !waiter.is_finished() {
        switch.resume_former();
        std::thread::yield_now();
    }
    assert_eq!(waiter.join().expect("it ends"), Err(ErrorKind::Stopped));
    assert_eq!(queue.take_verified().len(), 1);
    switch.hold(LONG).expect("nothing is in flight");
    assert_eq!(device.queues(), 0);
}

#[test]
fn a_client_that_disconnects_takes_what_is_held_with_it() {
    let device = gated(&memory(), true);
    let switch = SwitchDevice::new(device.device());
    let mut queues = [(); 2].map(|()| switch.open_queue().expect("a queue"));
    switch.hold(LONG).expect("all are idle");
    queues.iter_mut().for_each(|queue| submit(queue, 0..3));
    let [mut queue, dropped] = queues;
    drop(dropped);
    let mut done = Vec::new();
    queue.give_up(&mut done);
    let kinds = done.into_iter().map(|done| done.result.map_err(|error| error.kind()));
    assert_eq!(kinds.collect::<Vec<_>>(), [Err(ErrorKind::Stopped); 3]);
    let late = switch.open_queue().expect("a queue without one of the device");
    assert_eq!((queue.parked(), device.queues(), switch.0.state.lock().slots.len()), (0, 0, 2));
    switch.resume_former();
    assert_eq!((poll(&mut queue), is_awake(&*queue), is_awake(&*late)), (vec![], false, false));
    assert!(device.0.begun.lock().is_empty());
}

#[test]
fn a_queue_that_cannot_be_opened_fails_its_requests_until_it_can() {
    let device = gated(&memory(), true);
    let switch = SwitchDevice::new(device.device());
    let mut queue = switch.open_queue().expect("a queue");
    switch.hold(LONG).expect("all are idle");
    submit(&mut queue, 0..2);
    device.0.refuses.store(true, Ordering::SeqCst);
    switch.resume_former();
    assert!(switch.open_queue().is_err());
    assert_eq!((poll(&mut queue), switch.0.state.lock().slots.len()), (all(0..2, false), 1));
    device.0.refuses.store(false, Ordering::SeqCst);
    submit(&mut queue, 2..3);
    assert_eq!(poll(&mut queue), all(2..3, true));
}

/// Writes, reads and flushes its own blocks until `stop`; returns the number of requests.
fn client(switch: &SwitchDevice, first: u64, stop: &AtomicBool) -> u64 {
    let mut queue = switch.open_queue().expect("a queue");
    let (mut values, mut requests, mut done) = ([0; 4], 0, Vec::new());
    while !stop.load(Ordering::SeqCst) {
        let round = (requests / 12) as u8;
        for operation in [Operation::Write, Operation::Flush, Operation::Read] {
            for block in 0..4 {
                queue.submit_plugged(request(block, operation, first + block, round), &mut done);
                requests += 1;
            }
            queue.unplug(&mut done);
            values = if operation == Operation::Write { [round; 4] } else { values };
            while done.len() < 4 {
                queue.poll(&mut done);
                if done.len() < 4 {
                    let woken = wait_any(&queue.wait_descriptors(), Some(LONG)).expect("a wait");
                    assert!(woken.is_some(), "{operation:?} is lost");
                }
            }
            for done in done.drain(..) {
                done.result.expect("it succeeds");
                let is_read = operation == Operation::Read;
                assert!(!is_read || done.buffer.iter().all(|byte| *byte == values[done.id as usize]));
            }
            assert_eq!(queue.parked(), 0);
        }
    }
    requests
}

#[test]
fn clients_of_many_threads_lose_nothing_while_the_device_is_switched() {
    let memory = memory();
    let devices = [gated(&memory, true), gated(&memory, true)];
    let (switch, stop) = (SwitchDevice::new(devices[0].device()), AtomicBool::default());
    std::thread::scope(|scope| {
        let clients = [0, 1, 2, 3].map(|client_number| {
            let (switch, stop) = (&switch, &stop);
            scope.spawn(move || client(switch, client_number * 4, stop))
        });
        // Counted, since clients end only after `stop`.
        let mut in_use = 0;
        for round in 1..=200 {
            if switch.hold(LONG).is_err() {
                switch.resume_former();
                in_use += 1;
                break;
            }
            in_use += devices.iter().map(Handle::queues).sum::<usize>();
            switch.resume(devices[round % 2].device());
            std::thread::sleep(Duration::from_micros(200));
            // A request that passed the hold would have opened a queue of the former device, and that stays open.
            in_use += devices[(round + 1) % 2].queues();
        }
        stop.store(true, Ordering::SeqCst);
        assert_eq!(in_use, 0, "a device is in use that was left");
        let requests = clients.map(|client| client.join().expect("no client failed"));
        let begun: usize = devices.iter().map(|device| device.0.begun.lock().len()).sum();
        assert_eq!(requests.iter().sum::<u64>(), begun as u64, "each request is executed once");
    });
}

/// A device whose size changes.
struct Growing(Arc<dyn BlockDevice>, std::sync::atomic::AtomicU64);

impl BlockDevice for Growing {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.1.load(Ordering::SeqCst), ..self.0.geometry() }
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        self.0.open_queue()
    }
}

#[test]
fn a_device_that_has_grown_keeps_its_size_while_there_is_none_below() {
    let growing = Arc::new(Growing(memory(), (1 << 20).into()));
    let device = SwitchDevice::new(Arc::clone(&growing) as _);
    growing.1.store(2 << 20, Ordering::SeqCst);
    assert_eq!(device.geometry().size, 2 << 20);
    device.hold(LONG).expect("nothing is in flight");
    device.release();
    drop(growing);
    assert_eq!(device.geometry().size, 2 << 20);
}
