//! A device that clients of several hosts use at the same time.
//!
//! A client on another host whose request was in flight when the process of the server ended gets it executed again by the next one.
//! So that no client can tell:
//! - of requests that overlap and one of which changes the device, the later one is executed once the completion of the earlier one is
//!   stored: no one has seen a change without a completion;
//! - after a restart all changes that were in flight in channels are executed first, in any order; other requests wait for them.
//!
//! Invariants: what a queue of a channel has executed excludes others until its completion is stored, or until the next service of the
//! blkdev begins, for which others wait. Flushes wait for nothing.
//!
//! Elsewhere: which request waits for which (`cbd-channel`, `exclusion.rs`), requests that were in flight (`cbd-channel`, `resume.rs`).

use cbd_channel::Exclusion;
use cbd_export::wake::{Event, Waker};
use cbd_export::{BlockDevice, Extent, RequestQueue};
use cbd_types::{
    BlkdevId, ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Request, Result, TakeBack,
    Verified, Verify,
};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The requests in flight on a device, of all its blkdevs.
#[derive(Default)]
pub struct Changes(Mutex<State>);

#[derive(Default)]
struct State {
    exclusion: Exclusion,
    last_ticket: u64,
    /// The queues whose requests wait, by ticket.
    waiting: HashMap<u64, Arc<Ready>>,
    /// Channels in which changes may be in flight that a former process has taken.
    unsettled: BTreeSet<BlkdevId>,
    /// Tickets of requests without a stored completion whose queues have ended.
    left: BTreeMap<BlkdevId, Vec<u64>>,
    /// Queues whose requests wait until all channels have settled.
    held: Vec<Arc<Ready>>,
}

/// What a queue may execute now.
struct Ready {
    tickets: Mutex<Vec<u64>>,
    is_awake: AtomicBool,
    waker: Waker,
}

impl Ready {
    fn wake(&self) {
        if !self.is_awake.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }
}

impl std::fmt::Debug for Changes {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Changes({} channels to settle)", self.0.lock().unsettled.len())
    }
}

impl State {
    fn end(&mut self, ticket: u64) {
        let Self { exclusion, waiting, .. } = self;
        exclusion.end(ticket, |ready| {
            if let Some(queue) = waiting.remove(&ready) {
                queue.tickets.lock().push(ready);
                queue.wake();
            }
        });
    }

    fn end_left(&mut self, blkdev: BlkdevId) {
        for ticket in self.left.remove(&blkdev).unwrap_or_default() {
            self.end(ticket);
        }
    }
}

impl Changes {
    /// Lets requests wait until the channel of a blkdev has [settled](Self::settle).
    pub fn wait_for(&self, blkdev: BlkdevId) {
        self.0.lock().unsettled.insert(blkdev);
    }

    /// Whether requests wait until a channel has settled.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.0.lock().held.is_empty()
    }

    /// In the channel of a blkdev no change is in flight any more that a former process has taken; or the blkdev is gone.
    pub fn settle(&self, blkdev: BlkdevId) {
        let mut state = self.0.lock();
        state.end_left(blkdev);
        state.unsettled.remove(&blkdev);
        if state.unsettled.is_empty() {
            std::mem::take(&mut state.held).iter().for_each(|queue| queue.wake());
        }
    }

    /// A queue for the channel of a blkdev begins. What the former one has left is executed again before others begin.
    fn begin_channel(&self, blkdev: BlkdevId) {
        let mut state = self.0.lock();
        state.unsettled.insert(blkdev);
        state.end_left(blkdev);
    }
}

/// The device of one blkdev, whose requests and those of the other blkdevs exclude each other.
pub struct SharedDevice {
    device: Arc<dyn BlockDevice>,
    changes: Arc<Changes>,
}

impl SharedDevice {
    /// A blkdev on `device`.
    #[must_use]
    pub fn new(device: Arc<dyn BlockDevice>, changes: Arc<Changes>) -> Self {
        Self { device, changes }
    }
}

impl BlockDevice for SharedDevice {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        Ok(Box::new(SharedQueue::new(self.device.open_queue()?, Arc::clone(&self.changes), None)?))
    }

    fn verifies(&self) -> bool {
        self.device.verifies()
    }

    fn extents(&self, range: ByteRange) -> Result<Vec<Extent>> {
        self.device.extents(range)
    }
}

/// A request that is not executed yet.
struct Held {
    /// `None` while it waits until all channels have settled.
    ticket: Option<u64>,
    request: Request,
}

/// A queue of a [`SharedDevice`], or of a service.
pub(crate) struct SharedQueue {
    queue: Box<dyn RequestQueue>,
    event: Event,
    ready: Arc<Ready>,
    held: Vec<Held>,
    /// Declared after the queue, whose drop may still execute requests.
    executed: Executed,
}

/// The requests that a queue executes.
struct Executed {
    changes: Arc<Changes>,
    /// The blkdev of the channel: there [`stored`](SharedQueue::stored) ends a request, not its completion.
    channel: Option<BlkdevId>,
    /// By identifier.
    tickets: HashMap<u64, u64>,
}

impl Drop for Executed {
    fn drop(&mut self) {
        let tickets = self.tickets.drain().map(|(_, ticket)| ticket);
        let mut state = self.changes.0.lock();
        match self.channel {
            // A later service may execute them again.
            Some(blkdev) if tickets.len() > 0 => state.left.entry(blkdev).or_default().extend(tickets),
            _ => tickets.into_iter().for_each(|ticket| state.end(ticket)),
        }
    }
}

fn is_change(request: &Request) -> bool {
    !matches!(request.operation, Operation::Read | Operation::Flush)
}

impl SharedQueue {
    pub(crate) fn new(
        queue: Box<dyn RequestQueue>,
        changes: Arc<Changes>,
        channel: Option<BlkdevId>,
    ) -> Result<Self> {
        let event = Event::new()?;
        let (tickets, is_awake) = (Mutex::default(), AtomicBool::default());
        let ready = Arc::new(Ready { tickets, is_awake, waker: event.waker() });
        if let Some(blkdev) = channel {
            changes.begin_channel(blkdev);
        }
        let executed = Executed { changes, channel, tickets: HashMap::new() };
        Ok(Self { queue, event, ready, held: Vec::new(), executed })
    }

    /// As [`submit_plugged`](RequestQueue::submit_plugged). A change that `is_former`, which a former process has taken, does not wait until
    /// all channels have settled.
    pub(crate) fn plug(&mut self, request: Request, is_former: bool, done: &mut Vec<Completion>) {
        if let Some(request) = self.admit(request, is_former, done) {
            self.queue.submit_plugged(request, done);
        }
    }

    /// Returns a request that may be executed now. Another one is held, or has failed.
    fn admit(&mut self, request: Request, is_former: bool, done: &mut Vec<Completion>) -> Option<Request> {
        if request.operation == Operation::Flush || request.range.is_empty() {
            return Some(request);
        }
        let mut state = self.executed.changes.0.lock();
        let is_first = is_former && is_change(&request);
        if !is_first && !state.unsettled.is_empty() {
            // Once for each queue: clients may come and go for as long as it takes.
            if !state.held.iter().any(|queue| Arc::ptr_eq(queue, &self.ready)) {
                state.held.push(Arc::clone(&self.ready));
            }
            self.held.push(Held { ticket: None, request });
            return None;
        }
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        match state.exclusion.begin(ticket, request.range, is_change(&request)) {
            Ok(true) => {
                self.executed.tickets.insert(request.id, ticket);
                return Some(request);
            }
            Ok(false) => {
                state.waiting.insert(ticket, Arc::clone(&self.ready));
                self.held.push(Held { ticket: Some(ticket), request });
            }
            Err(error) => {
                done.push(Completion { id: request.id, result: Err(error), buffer: request.buffer });
            }
        }
        None
    }

    /// Executes what need not wait any longer.
    fn begin_held(&mut self, done: &mut Vec<Completion>) {
        let ready = std::mem::take(&mut *self.ready.tickets.lock());
        let is_settled = self.executed.changes.0.lock().unsettled.is_empty();
        for Held { ticket, request } in std::mem::take(&mut self.held) {
            let admitted = match ticket {
                None if is_settled => self.admit(request, false, done),
                Some(ticket) if ready.contains(&ticket) => {
                    self.executed.tickets.insert(request.id, ticket);
                    Some(request)
                }
                _ => {
                    self.held.push(Held { ticket, request });
                    None
                }
            };
            if let Some(request) = admitted {
                self.queue.submit_plugged(request, done);
            }
        }
        self.queue.unplug(done);
    }

    /// Takes the requests that are held.
    fn take_held(&mut self) -> Vec<Request> {
        let take = |Held { ticket, request }| {
            if let Some(ticket) = ticket {
                let mut state = self.executed.changes.0.lock();
                state.waiting.remove(&ticket);
                state.end(ticket);
            }
            request
        };
        std::mem::take(&mut self.held).into_iter().map(take).collect()
    }

    /// Completes with an error what is held.
    fn end_held(&mut self, done: &mut Vec<Completion>) {
        for request in self.take_held() {
            let error = Error::new(ErrorKind::Stopped, "the client has disconnected");
            done.push(Completion { id: request.id, result: Err(error), buffer: request.buffer });
        }
    }

    /// Requests that are executed now.
    pub(crate) fn begun(&self) -> usize {
        self.queue.parked()
    }

    /// The completion of a request is stored, or that it was sent back.
    pub(crate) fn stored(&mut self, id: u64) {
        if let Some(ticket) = self.executed.tickets.remove(&id) {
            self.executed.changes.0.lock().end(ticket);
        }
    }

    fn note(&mut self, done: &[Completion]) {
        if self.executed.channel.is_none() && !self.executed.tickets.is_empty() {
            done.iter().for_each(|completion| self.stored(completion.id));
        }
    }
}

impl RequestQueue for SharedQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        let before = done.len();
        if let Some(request) = self.admit(request, false, done) {
            self.queue.submit(request, done);
        }
        self.note(&done[before..]);
    }

    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        let before = done.len();
        self.plug(request, false, done);
        self.note(&done[before..]);
    }

    fn unplug(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        self.queue.unplug(done);
        self.note(&done[before..]);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        if self.ready.is_awake.load(Ordering::Acquire) {
            // Cleared first, so that the next wait sees any later signal.
            self.event.clear();
            self.ready.is_awake.store(false, Ordering::Release);
            self.begin_held(done);
        }
        self.queue.poll(done);
        self.note(&done[before..]);
    }

    fn parked(&self) -> usize {
        self.queue.parked() + self.held.len()
    }

    fn changes(&self) -> usize {
        self.queue.changes() + self.held.len()
    }

    fn verify(&mut self, id: u64, verify: Verify) -> Result<()> {
        self.queue.verify(id, verify)
    }

    fn take_verified(&mut self) -> Vec<(u64, Result<Verified>)> {
        self.queue.take_verified()
    }

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        self.end_held(done);
        self.queue.give_up(done);
        self.note(&done[before..]);
    }

    /// Those that the queue has executed in part exclude others until they are [`stored`](Self::stored) as sent back.
    fn take_back(&mut self, which: TakeBack<'_>, returned: &mut Vec<Request>) {
        self.queue.take_back(which, returned);
        returned.extend(self.take_held());
    }

    fn trim(&mut self) {
        self.queue.trim();
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        let mut descriptors = self.queue.wait_descriptors();
        descriptors.push(self.event.descriptor());
        descriptors
    }
}

impl Drop for SharedQueue {
    fn drop(&mut self) {
        self.end_held(&mut Vec::new());
        self.executed.changes.0.lock().held.retain(|queue| !Arc::ptr_eq(queue, &self.ready));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_export::MemoryDevice;
    use cbd_pmem::Mapping;
    use cbd_types::AlignedBuffer;

    const BLKDEV: BlkdevId = BlkdevId(3);
    const NONE: [u64; 0] = [];

    struct Rig {
        device: Arc<dyn BlockDevice>,
        changes: Arc<Changes>,
        done: Vec<Completion>,
    }

    impl Rig {
        fn new() -> Self {
            let memory = Arc::new(Mapping::anonymous(1 << 20).expect("memory"));
            let device = MemoryDevice::new(memory, 512).expect("a device");
            Self { device: Arc::new(device), changes: Arc::default(), done: Vec::new() }
        }

        fn queue(&self, channel: Option<BlkdevId>) -> SharedQueue {
            let queue = self.device.open_queue().expect("a queue");
            SharedQueue::new(queue, Arc::clone(&self.changes), channel).expect("a queue")
        }

        /// Submits a request for a block; those that are complete.
        fn submit(
            &mut self,
            queue: &mut SharedQueue,
            id: u64,
            operation: Operation,
            block: u64,
            is_former: bool,
        ) -> Vec<u64> {
            let has_data = matches!(operation, Operation::Read | Operation::Write);
            let range = if operation == Operation::Flush { (0, 0) } else { (block * 4096, 4096) };
            let buffer = AlignedBuffer::zeroed(if has_data { 4096 } else { 0 });
            let request = Request::unmarked(id, operation, ByteRange::at(range.0, range.1), false, buffer);
            queue.plug(request, is_former, &mut self.done);
            queue.unplug(&mut self.done);
            let before = self.done.len();
            queue.note(&self.done[..before]);
            self.done()
        }

        fn poll(&mut self, queue: &mut SharedQueue) -> Vec<u64> {
            queue.poll(&mut self.done);
            self.done()
        }

        fn done(&mut self) -> Vec<u64> {
            self.done.drain(..).map(|done| done.id).collect()
        }
    }

    #[test]
    fn what_overlaps_waits_until_a_completion_is_stored() {
        let mut rig = Rig::new();
        let (mut channel, mut local) = (rig.queue(Some(BLKDEV)), rig.queue(None));
        rig.changes.settle(BLKDEV);
        assert_eq!(rig.submit(&mut channel, 7, Operation::Write, 0, false), [7]);
        for (id, operation) in [(1, Operation::Write), (2, Operation::Read), (3, Operation::Discard)] {
            assert_eq!(rig.submit(&mut local, id, operation, 0, false), NONE, "its completion is not stored");
        }
        assert_eq!(rig.submit(&mut local, 4, Operation::Write, 1, false), [4], "it is beside it");
        assert_eq!(rig.submit(&mut local, 5, Operation::Flush, 0, false), [5]);
        assert_eq!((rig.poll(&mut local), local.parked(), local.changes()), (vec![], 3, 3));
        channel.stored(7);
        assert_eq!(rig.poll(&mut local), [1]);
        assert_eq!(rig.poll(&mut local), [2], "one after the other");
        assert_eq!((rig.poll(&mut local), rig.poll(&mut local)), (vec![3], vec![]));
        assert_eq!(local.parked(), 0);
    }

    #[test]
    fn former_changes_are_first_and_a_queue_that_ends_is_followed() {
        let mut rig = Rig::new();
        let (mut channel, mut local) = (rig.queue(Some(BLKDEV)), rig.queue(None));
        assert_eq!(
            rig.submit(&mut local, 1, Operation::Write, 0, false),
            NONE,
            "the channel has not settled"
        );
        assert_eq!(rig.submit(&mut channel, 5, Operation::Read, 0, true), NONE);
        assert_eq!(rig.submit(&mut channel, 7, Operation::Write, 0, true), [7]);
        assert_eq!(rig.submit(&mut channel, 8, Operation::Write, 0, false), NONE);
        // It ends before it has stored the completion.
        drop(channel);
        assert_eq!(rig.poll(&mut local), NONE);
        let mut channel = rig.queue(Some(BLKDEV));
        assert_eq!(rig.submit(&mut channel, 7, Operation::Write, 0, true), [7], "it is executed again");
        channel.stored(7);
        assert_eq!(rig.poll(&mut local), NONE);
        rig.changes.settle(BLKDEV);
        assert_eq!(rig.poll(&mut local), [1]);

        // A blkdev that is gone, with what its last queue has left.
        assert_eq!(rig.submit(&mut channel, 9, Operation::Write, 0, false), [9]);
        assert_eq!(rig.submit(&mut local, 2, Operation::Write, 0, false), NONE);
        drop(channel);
        assert_eq!(rig.poll(&mut local), NONE);
        rig.changes.settle(BLKDEV);
        assert_eq!(rig.poll(&mut local), [2]);
        // A client that disconnects takes with it what waits.
        rig.changes.wait_for(BLKDEV);
        for id in 3..10 {
            assert_eq!(rig.submit(&mut local, id, Operation::Write, 0, false), NONE);
        }
        let mut done = Vec::new();
        local.give_up(&mut done);
        assert_eq!((done.len(), local.parked()), (7, 0));
        assert_eq!(rig.submit(&mut local, 10, Operation::Write, 0, false), NONE);
        assert_eq!(rig.changes.0.lock().held.len(), 1, "one for each queue");
        drop(local);
        let state = rig.changes.0.lock();
        assert!(state.waiting.is_empty() && state.left.is_empty() && state.held.is_empty());
    }
}
