//! Queues and a server that the test drives step by step, so that one of them stores between two steps of another one.

use super::*;
use crate::wake::ServerWake;
use crate::wake::testing::listener;
use cbd_channel::{Areas, Server};
use cbd_export::{MemoryDevice, wait_any};
use cbd_pmem::Mapping;
use cbd_types::{AlignedBuffer, ByteRange, Region};
use std::cell::RefCell;
use std::rc::Rc;

const AREA: u64 = 1 << 20;

thread_local! {
    /// What happens next before a queue clears what has woken it.
    static BEFORE_THE_CLEAR: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

pub(super) fn before_the_clear() {
    let next = BEFORE_THE_CLEAR.with_borrow_mut(Option::take);
    next.into_iter().for_each(|next| next());
}

/// The other host.
struct Peer {
    server: Server<Mapping>,
    wake: ServerWake,
    requests: Vec<Request>,
}

impl Peer {
    /// Completes the request that was submitted first; whether the client was asleep.
    fn complete(&mut self) -> bool {
        self.server.poll(&mut self.requests).expect("memory");
        let request = self.requests.remove(0);
        self.server.complete(Completion { id: request.id, result: Ok(()), buffer: request.buffer });
        self.wake.wake_client()
    }
}

/// A device, and the host that serves it; both wake each other.
fn connected() -> (RemoteDevice<Mapping>, Peer) {
    let region = Arc::new(Region::new(Mapping::anonymous(2 * AREA).expect("memory")));
    let areas = Areas { client: 0, server: AREA };
    let place = |session| ChannelUse { areas, area_bytes: AREA, session, is_lost: Arc::default() };
    let memory = Arc::new(Mapping::anonymous(AREA).expect("memory"));
    let geometry = MemoryDevice::new(memory, 512).expect("a device").geometry();
    let mut server = Server::open(Arc::clone(&region), areas, AREA, 9, geometry);
    let (device, server) = std::thread::scope(|scope| {
        let accepts = scope.spawn(move || {
            let mut requests = Vec::new();
            while server.client().is_none() {
                server.poll(&mut requests).expect("memory");
            }
            server
        });
        let device = RemoteDevice::open(region, place(7), Duration::from_secs(20)).expect("a device");
        (device, accepts.join().expect("no panic"))
    });
    let (address, mut listener) = listener();
    device.connect_wake(&address, BlkdevId(0)).expect("a connection");
    let wake = listener.accept().pop().expect("one has come");
    wake.attach();
    (device, Peer { server, wake, requests: Vec::new() })
}

fn queue(device: &RemoteDevice<Mapping>) -> RemoteQueue<Mapping> {
    RemoteQueue::open(&device.channel).expect("a queue")
}

fn submit(queue: &mut RemoteQueue<Mapping>, id: u64) {
    let (range, mut done) = (ByteRange::at(id * 4096, 4096), Vec::new());
    let buffer = AlignedBuffer::zeroed(4096);
    queue.submit(Request::unmarked(id, Operation::Write, range, false, buffer), &mut done);
    assert!(done.is_empty());
}

fn is_readable(queue: &RemoteQueue<Mapping>) -> bool {
    wait_any(&queue.wait_descriptors(), Some(Duration::from_millis(20))).expect("a wait").is_some()
}

fn poll(queue: &mut RemoteQueue<Mapping>) -> Vec<u64> {
    let mut done = Vec::new();
    queue.poll(&mut done);
    done.into_iter().map(|done| done.id).collect()
}

#[test]
fn a_queue_that_clears_what_a_completion_has_raised_is_woken_by_the_next_one() {
    let (device, peer) = connected();
    let peer = Rc::new(RefCell::new(peer));
    let mut queue = queue(&device);
    submit(&mut queue, 1);
    submit(&mut queue, 2);
    assert!(poll(&mut queue).is_empty());
    // It has looked, and the completion comes before it clears what has woken it.
    let other = Rc::clone(&peer);
    let completes = move || assert!(other.borrow_mut().complete());
    BEFORE_THE_CLEAR.set(Some(Box::new(completes)));
    assert_eq!(poll(&mut queue), [1]);
    assert!(peer.borrow_mut().complete(), "it sleeps");
    assert!(is_readable(&queue));
    assert_eq!(poll(&mut queue), [2]);
}

#[test]
fn what_completes_while_another_queue_looks_wakes_a_queue_that_submits() {
    let (device, mut peer) = connected();
    let (mut queue, mut other) = (queue(&device), queue(&device));
    submit(&mut queue, 1);
    submit(&mut other, 2);
    // What the beginning of the wake-up has raised.
    assert!(poll(&mut queue).is_empty() && !is_readable(&queue));
    // The other queue looks without a wait, has looked for the last time, and has not said yet that it sleeps.
    other.channel.lock().wake.retract();
    let mut done = Vec::new();
    other.look(&mut done);
    assert!(!peer.complete(), "a queue looks");
    submit(&mut queue, 3);
    assert!(is_readable(&queue));
    assert_eq!(poll(&mut queue), [1]);
    other.before_sleep(&mut done, false, 1);
    assert!(done.is_empty() && peer.complete() && is_readable(&other));
    assert_eq!(poll(&mut other), [2]);
}

#[test]
fn a_queue_that_is_about_to_sleep_sees_the_end_of_the_session() {
    let (device, peer) = connected();
    let mut queue = queue(&device);
    submit(&mut queue, 1);
    assert!(poll(&mut queue).is_empty());
    queue.channel.lock().wake.retract();
    let Peer { server, wake, .. } = peer;
    server.close();
    assert!(!wake.wake_client(), "the queue looks");
    let mut done = Vec::new();
    queue.before_sleep(&mut done, false, 1);
    let ended = done.pop().expect("it has ended");
    assert_eq!((ended.id, ended.result.map_err(|error| error.kind())), (1, Err(ErrorKind::Stopped)));
}

#[test]
fn a_device_that_is_closed_waits_until_no_request_is_executed_any_more() {
    let short = Duration::from_millis(20);
    let (device, _peer) = connected();
    assert_eq!(device.close_and_wait(short).map_err(|error| error.kind()), Ok(true), "nothing is in flight");
    let (device, mut peer) = connected();
    let mut first = queue(&device);
    submit(&mut first, 1);
    peer.server.poll(&mut peer.requests).expect("memory");
    submit(&mut first, 2);
    let later = Duration::from_secs(20);
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| device.close_and_wait(later));
        while device.channel.lock().client.is_some() {
            std::thread::yield_now();
        }
        peer.server.poll(&mut peer.requests).expect("memory");
        peer.server.poll(&mut peer.requests).expect("memory");
        assert_eq!(peer.requests.len(), 1, "the second one has not begun");
        assert!(!closing.is_finished(), "the first one has");
        peer.complete();
        peer.server.poll(&mut peer.requests).expect("memory");
        assert!(closing.join().expect("no panic").expect("a descriptor"));
    });
    assert_eq!(poll(&mut first).len(), 2, "each has its completion");
    // The other host is paused.
    let (device, _peer) = connected();
    let mut second = queue(&device);
    submit(&mut second, 1);
    assert_eq!(device.close_and_wait(short).map_err(|error| error.kind()), Ok(false));
}
