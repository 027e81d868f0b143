//! The steps of a thread that is about to sleep, taken one by one.

use super::*;
use crate::shape_for;
use crate::wake::ClientWake;
use crate::wake::testing::listener;
use cbd_channel::{Areas, Client};
use cbd_export::MemoryDevice;
use cbd_pmem::Mapping;

const AREA: u64 = 1 << 20;
const SESSION: u64 = 7;

/// A thread's state with a client, which is woken by it.
fn serving() -> (Serving<Mapping>, Client<Mapping>, ClientWake) {
    let region = Arc::new(Region::new(Mapping::anonymous(2 * AREA).expect("memory")));
    let areas = Areas { client: 0, server: AREA };
    let place = ChannelUse { areas, area_bytes: AREA, session: 9, is_lost: Arc::default() };
    let memory = Arc::new(Mapping::anonymous(AREA).expect("memory"));
    let device = MemoryDevice::new(memory, 512).expect("a device");
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
        event: Event::new().expect("an eventfd"),
        pause: Pause::new().expect("a timer"),
        wake: listener.accept().pop(),
        is_attached: false,
        set: WaitSet::new(),
        stores: 0,
        has_woken: false,
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
