//! The steps of a thread that is about to sleep, taken one by one.

use super::*;
use crate::shape_for;
use crate::wake::ClientWake;
use crate::wake::testing::listener;
use cbd_channel::{Areas, Client};
use cbd_export::MemoryDevice;
use cbd_pmem::Mapping;
use cbd_types::{AlignedBuffer, ByteRange, Geometry, Operation};

const AREA: u64 = 1 << 20;
const SESSION: u64 = 7;

/// A thread's state with a client, which is woken by it.
fn serving() -> (Serving<Mapping>, Client<Mapping>, ClientWake) {
    let memory = Arc::new(Mapping::anonymous(AREA).expect("memory"));
    serving_of(&MemoryDevice::new(memory, 512).expect("a device"))
}

fn serving_of(device: &dyn BlockDevice) -> (Serving<Mapping>, Client<Mapping>, ClientWake) {
    let region = Arc::new(Region::new(Mapping::anonymous(2 * AREA).expect("memory")));
    let areas = Areas { client: 0, server: AREA };
    let place = ChannelUse { areas, area_bytes: AREA, session: 9, is_lost: Arc::default() };
    let shape = shape_for(AREA).expect("there is one");
    let client = Client::open(Arc::clone(&region), areas, shape, SESSION).expect("memory");
    let (blkdev, changes) = (BlkdevId(0), Arc::<Changes>::default());
    let queue = device.open_queue().expect("a queue");
    let (address, mut listener) = listener();
    let mut wake = ClientWake::new().expect("an eventfd");
    wake.connect(&address, blkdev, SESSION).expect("a socket");
    let mut serving = Serving {
        server: Server::open(region, areas, AREA, 9, device.geometry()),
        place,
        queue: SharedQueue::new(queue, Arc::clone(&changes), Some(blkdev)).expect("a queue"),
        blkdev,
        changes,
        is_exclusive: true,
        event: Event::new().expect("an eventfd"),
        pause: Pause::new().expect("a timer"),
        wake: listener.accept().pop(),
        is_attached: false,
        set: WaitSet::new(),
        stores: 0,
        has_woken: false,
        has_given_up: false,
        shared: Arc::default(),
    };
    serving.fill_set();
    poll(&mut serving);
    assert!(serving.is_woken());
    (serving, client, wake)
}

fn poll(serving: &mut Serving<Mapping>) -> ServerState {
    let mut requests = Vec::new();
    serving.server.poll(&mut requests).expect("memory");
    assert!(requests.is_empty());
    serving.server.state()
}

#[test]
fn a_thread_that_is_about_to_sleep_sees_the_end_of_a_session() {
    let (mut serving, client, _wake) = serving();
    assert_eq!(poll(&mut serving), ServerState::Serving);
    // Without a wake-up: the thread is awake.
    client.close();
    assert!(serving.announce());
    assert_eq!(poll(&mut serving), ServerState::Alone);
    assert!(!serving.announce(), "no one would wake it");
}

#[test]
fn a_thread_that_is_woken_by_the_end_of_a_connection_sees_that_of_the_session() {
    let (mut serving, client, wake) = serving();
    assert_eq!(poll(&mut serving), ServerState::Serving);
    client.close();
    drop(wake);
    serving.sleep(false, Duration::ZERO).expect("a wait");
    assert!(serving.wake.is_none());
    assert_eq!(poll(&mut serving), ServerState::Alone);
}

/// A device whose requests wait until they are given up.
struct Full(Geometry);

impl BlockDevice for Full {
    fn geometry(&self) -> Geometry {
        self.0
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        Ok(Box::new(FullQueue(Vec::new())))
    }
}

struct FullQueue(Vec<Request>);

impl RequestQueue for FullQueue {
    fn submit(&mut self, request: Request, _: &mut Vec<Completion>) {
        self.0.push(request);
    }

    fn poll(&mut self, _: &mut Vec<Completion>) {}

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        let given_up = || Err(Error::new(ErrorKind::Stopped, "given up"));
        done.extend(self.0.drain(..).map(|Request { id, buffer, .. }| Completion {
            id,
            result: given_up(),
            buffer,
        }));
    }

    fn take_back(&mut self, _: TakeBack<'_>, returned: &mut Vec<Request>) {
        returned.append(&mut self.0);
    }

    fn parked(&self) -> usize {
        self.0.len()
    }

    fn wait_descriptors(&self) -> Vec<std::os::fd::RawFd> {
        Vec::new()
    }
}

#[test]
fn requests_that_wait_for_space_are_given_up_when_their_client_has_left() {
    let memory = Arc::new(Mapping::anonymous(AREA).expect("memory"));
    let full = Full(MemoryDevice::new(memory, 512).expect("a device").geometry());
    for closes in [false, true] {
        let (mut serving, mut client, _wake) = serving_of(&full);
        let (mut requests, mut done) = (Vec::new(), Vec::new());
        client.poll(&mut done);
        let (range, buffer) = (ByteRange::at(0, 512), AlignedBuffer::zeroed(512));
        client.submit(Request::unmarked(1, Operation::Write, range, false, buffer), &mut done);
        let turn =
            |serving: &mut Serving<Mapping>, requests: &mut Vec<Request>, done: &mut Vec<Completion>| {
                serving.server.look_closely();
                serving.server.poll(requests).expect("memory");
                serving.give_up_left(done);
                serving.execute(requests, done);
            };
        for _ in 0..3 {
            turn(&mut serving, &mut requests, &mut done);
        }
        assert_eq!((serving.server.in_flight(), done.len()), (1, 0), "it waits");
        if closes {
            serving.shared.closes.store(true, Ordering::Relaxed);
            serving.shared.stop.store(true, Ordering::Release);
        } else {
            client.end(&mut done);
            done.clear();
        }
        for _ in 0..3 {
            turn(&mut serving, &mut requests, &mut done);
        }
        assert_eq!(serving.server.in_flight(), 0, "closes: {closes}");
        assert_eq!(serving.queue.begun(), 0);
    }
}

#[test]
fn what_was_sent_back_keeps_no_other_queue_waiting() {
    let memory = Arc::new(Mapping::anonymous(AREA).expect("memory"));
    let device = MemoryDevice::new(memory, 512).expect("a device");
    let (mut serving, mut client, _wake) = serving_of(&Full(device.geometry()));
    serving.changes.settle(serving.blkdev);
    let queue = device.open_queue().expect("a queue");
    let mut local = SharedQueue::new(queue, Arc::clone(&serving.changes), None).expect("a queue");
    let write = |id| {
        let (range, buffer) = (ByteRange::at(0, 512), AlignedBuffer::zeroed(512));
        Request::unmarked(id, Operation::Write, range, false, buffer)
    };
    let (mut requests, mut done) = (Vec::new(), Vec::new());
    client.poll(&mut done);
    client.submit(write(1), &mut done);
    serving.server.poll(&mut requests).expect("memory");
    serving.execute(&mut requests, &mut done);
    local.submit(write(2), &mut done);
    assert_eq!(
        (serving.server.in_flight(), local.parked(), done.len()),
        (1, 1, 0),
        "it waits for the first one"
    );
    client.give_up(|_| true, &mut done);
    serving.server.look_closely();
    serving.server.poll(&mut requests).expect("memory");
    serving.send_back();
    assert_eq!((serving.server.in_flight(), serving.queue.begun()), (0, 0));
    local.poll(&mut done);
    assert_eq!(done.iter().map(|done| (done.id, done.result.is_ok())).collect::<Vec<_>>(), [(2, true)]);
}
