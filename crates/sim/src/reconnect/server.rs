//! The server of a simulated export, over a cache or over a disk without one. Connections are served, are closed
//! without notice, and end with requests in flight.
//!
//! Invariants: a connection is served as a thread of an export serves it, with the same queue
//! ([`cbd_device::Queue`]) and the same rule for clients that reconnect ([`cbd_export::Clients`]); a queue is
//! polled only when it was woken.
//!
//! Elsewhere: the requests of the clients, and the checks of the replies ([`super`]).

use crate::actor::act_as;
use crate::disk::SimDisk;
use crate::environment::SimEnvironment;
use crate::memory::CrashMemory;
use crate::process::{Client as ClientQueue, SimWorker, WakeFlag, recover};
use cbd_device::Device;
use cbd_export::clients::is_settled;
use cbd_export::{Client, Clients};
use cbd_types::{BackendId, Completion, Request, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Operations in progress of each queue at the disk.
const DEPTH: usize = 4;

/// The server's side of a connection.
pub(super) struct Connection {
    pub(super) number: u64,
    /// `None` when no request of the connection can change the device any more.
    client: Option<Client>,
    queue: ClientQueue,
    /// Set when the client has closed the connection.
    closed: Arc<AtomicBool>,
    /// Wakes the connection's thread.
    wake_flag: Arc<WakeFlag>,
    /// Requests in the socket.
    pub(super) unread: VecDeque<Request>,
    /// Answers that the client has not received.
    unsent: Vec<Completion>,
    pub(super) stage: Stage,
    /// The client announced the disconnection, so its requests are completed unless a new client waits for
    /// the connection's end.
    pub(super) in_order: bool,
    gave_up: bool,
}

/// The stage of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// No request has arrived.
    New,
    /// Its first request waits for connections that have ended.
    Waiting,
    Served,
    /// No further request begins.
    Ended,
}

/// The result of a step of a connection.
pub(super) enum Event {
    /// The first request of the connection arrived.
    Begun,
    /// The server may execute the first request of the connection.
    Admitted,
    /// The client of the connection receives these answers.
    Answers(Vec<Completion>),
    /// The connection has ended.
    Over,
}

/// The server process.
pub(super) struct Server {
    device: Arc<Device<SimEnvironment>>,
    disk: SimDisk,
    environment: Arc<SimEnvironment>,
    worker: Option<SimWorker>,
    clients: Clients,
    pub(super) connections: Vec<Connection>,
    next: u64,
}

impl Server {
    /// Recovers the cache of `backend` in `memory`, if the server has a cache, and serves it.
    pub(super) fn open(
        environment: &Arc<SimEnvironment>,
        cache: Option<(&CrashMemory, BackendId)>,
        disk: &SimDisk,
    ) -> Result<Self> {
        let cache = cache.map(|(memory, backend)| recover(environment, memory, backend)).transpose()?;
        let worker = cache.as_ref().map(|cache| SimWorker::new(cache, disk, DEPTH));
        let device = match cache {
            Some(cache) => Device::cached(cache, disk.geometry()),
            None => Device::uncached(disk.geometry()),
        };
        Ok(Self {
            device: Arc::new(device),
            disk: disk.clone(),
            environment: Arc::clone(environment),
            worker,
            clients: Clients::new(),
            connections: Vec::new(),
            next: 0,
        })
    }

    /// A queue that belongs to no connection.
    pub(super) fn queue(&self) -> ClientQueue {
        ClientQueue::new(&self.device, &self.disk, DEPTH)
    }

    /// A client connects; returns the number of its connection.
    pub(super) fn connect(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        let (closed, wake_flag) = (Arc::new(AtomicBool::new(false)), Arc::new(WakeFlag::default()));
        let (looked_at, teller) = (Arc::clone(&closed), Arc::clone(&wake_flag));
        let client = self
            .clients
            .connect(Box::new(move || looked_at.load(Ordering::SeqCst)), Box::new(move || teller.set()));
        self.connections.push(Connection {
            number,
            client: Some(client),
            queue: self.queue(),
            closed,
            wake_flag,
            unread: VecDeque::new(),
            unsent: Vec::new(),
            stage: Stage::New,
            in_order: false,
            gave_up: false,
        });
        number
    }

    pub(super) fn connection(&mut self, number: u64) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|connection| connection.number == number)
    }

    /// The numbers of the connections that their clients closed.
    pub(super) fn closed(&self) -> impl Iterator<Item = u64> {
        self.connections
            .iter()
            .filter(|connection| connection.is_closed())
            .map(|connection| connection.number)
    }

    /// Continues the thread of the connection at index `index`; the thread executes at most `most` requests. `notices` is true
    /// if the thread notices that its connection was closed. Returns `None` if the thread has nothing to do.
    pub(super) fn step(&mut self, index: usize, most: usize, notices: bool) -> Option<Event> {
        let connection = &mut self.connections[index];
        act_as(1 + connection.number as u32 % 900);
        let event = connection.step(&self.disk, most, notices);
        if matches!(event, Some(Event::Over)) {
            self.connections.remove(index);
        }
        event
    }

    /// The background worker takes a step if it was woken.
    pub(super) fn maintain(&mut self) -> bool {
        let clock_ms = self.environment.clock_ms();
        self.worker.as_mut().is_some_and(|worker| worker.step_if_woken(&self.disk, clock_ms))
    }

    /// The time until which the background worker sleeps, if it does.
    pub(super) fn sleeps_until(&self) -> Option<u64> {
        self.worker.as_ref().and_then(SimWorker::sleeps_until)
    }

    /// Polls a queue of [`queue`](Self::queue); returns whether it was woken.
    pub(super) fn poll(&self, queue: &mut ClientQueue, done: &mut Vec<Completion>) -> bool {
        queue.poll(&self.disk, done)
    }
}

impl Connection {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// The client closes the connection.
    pub(super) fn close(&mut self, in_order: bool) {
        self.in_order = in_order;
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Number of requests that the device has parked.
    pub(super) fn parked(&self) -> usize {
        self.queue.queue.parked()
    }

    fn step(&mut self, disk: &SimDisk, most: usize, notices: bool) -> Option<Event> {
        if !self.unsent.is_empty() {
            let answers = std::mem::take(&mut self.unsent);
            return Some(Event::Answers(if self.is_closed() { Vec::new() } else { answers }));
        }
        let was_woken = self.wake_flag.take();
        let is_awaited = self.client.as_ref().is_some_and(Client::is_awaited);
        let is_at_its_end = self.is_closed() && notices && (!self.in_order || self.unread.is_empty());
        if self.stage != Stage::Ended && (is_awaited || is_at_its_end) {
            self.stage = Stage::Ended;
            self.unread.clear();
            self.client.iter().for_each(Client::leave);
        }
        match self.stage {
            Stage::New if !self.unread.is_empty() => self.begin(),
            Stage::Waiting => self.wait(was_woken),
            Stage::Served => self.serve(disk, most),
            Stage::Ended => self.end(disk, is_awaited),
            Stage::New => None,
        }
    }

    fn begin(&mut self) -> Option<Event> {
        if self.client.as_ref().is_some_and(Client::begin) {
            self.stage = Stage::Waiting;
            // The first check for a wait needs no wakeup.
            self.wake_flag.set();
            return Some(Event::Begun);
        }
        self.client = None;
        Some(Event::Over)
    }

    fn wait(&mut self, was_woken: bool) -> Option<Event> {
        if !was_woken || self.client.as_ref().is_some_and(|client| client.waits_for() > 0) {
            return None;
        }
        self.stage = Stage::Served;
        Some(Event::Admitted)
    }

    fn serve(&mut self, disk: &SimDisk, most: usize) -> Option<Event> {
        let count = most.min(self.unread.len());
        for request in self.unread.drain(..count) {
            self.queue.queue.submit_plugged(request, &mut self.unsent);
        }
        self.queue.queue.unplug(&mut self.unsent);
        let polled = self.queue.poll(disk, &mut self.unsent);
        (count > 0 || polled).then(|| Event::Answers(Vec::new()))
    }

    fn end(&mut self, disk: &SimDisk, is_awaited: bool) -> Option<Event> {
        let gives_up = !self.gave_up && (is_awaited || !self.in_order);
        if gives_up {
            self.gave_up = true;
            self.queue.queue.give_up(&mut self.unsent);
        }
        let polled = self.queue.poll(disk, &mut self.unsent);
        if is_settled(self.queue.queue.changes()) {
            self.client = None;
        }
        if self.queue.queue.parked() == 0 {
            return Some(Event::Over);
        }
        (gives_up || polled).then(|| Event::Answers(Vec::new()))
    }
}
