//! The channel of a device, which all its queues share under a lock: each request goes to the other host, and its completion to the queue
//! that has submitted it.

use super::recall::Recalls;
use crate::ChannelUse;
use crate::figures::{Begun, Figures};
use crate::wake::ClientWake;
use cbd_channel::Client;
use cbd_export::wake::Waker;
use cbd_sys::event::Poller;
use cbd_types::{Completion, Error, ErrorKind, Pmem, Request, Result};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long requests wait without a completion before everything in flight is stored again.
const NUDGE_AFTER: Duration = Duration::from_secs(1);

/// The queue of a request in the channel, and its identifier there.
#[derive(Clone, Copy)]
pub(super) struct Origin {
    pub(super) queue: usize,
    pub(super) id: u64,
    pub(super) begun: Begun,
}

/// What a queue gets from the others that poll the channel.
pub(super) struct Inbox {
    pub(super) completions: Vec<Completion>,
    /// Whether the waker was used since the queue has looked.
    pub(super) is_called: bool,
    pub(super) waker: Waker,
    /// What the queue waits on.
    pub(super) poller: Arc<Poller>,
}

impl Inbox {
    pub(super) fn call(&mut self) {
        if !self.is_called {
            self.is_called = true;
            self.waker.wake();
        }
    }
}

/// The channel, with what its queues have in flight.
pub(super) struct Channel<M: Pmem> {
    pub(super) place: ChannelUse,
    /// None once the device has been closed.
    pub(super) client: Option<Client<M>>,
    /// By the identifier in the channel; those that are free are in `free`.
    pub(super) origins: Vec<Option<Origin>>,
    pub(super) free: Vec<usize>,
    /// By the number of the queue; none for one that was closed.
    pub(super) inboxes: Vec<Option<Inbox>>,
    pub(super) found: Vec<Completion>,
    pub(super) wake: ClientWake,
    /// What the client has stored when the other host was woken last.
    told: u64,
    /// Whether the other host slept then: its answer takes longer than to begin a wait.
    pub(super) has_woken: bool,
    pub(super) figures: Figures,
    /// When a request completed last, or the first one began to wait.
    pub(super) progress: Instant,
    /// When everything was stored again last.
    nudged: Instant,
    recalls: Recalls,
}

impl<M: Pmem> Channel<M> {
    /// A channel whose client has a session; `found` are its completions so far.
    ///
    /// # Errors
    /// [`ErrorKind::System`] without a descriptor.
    pub(super) fn new(place: ChannelUse, client: Client<M>, found: Vec<Completion>) -> Result<Self> {
        Ok(Self {
            place,
            client: Some(client),
            origins: Vec::new(),
            free: Vec::new(),
            inboxes: Vec::new(),
            found,
            wake: ClientWake::new()?,
            told: 0,
            has_woken: false,
            figures: Figures::default(),
            progress: Instant::now(),
            nudged: Instant::now(),
            recalls: Recalls::default(),
        })
    }

    /// Moves the requests that are complete to their queues: to `done` those of `queue`.
    pub(super) fn deliver(&mut self, queue: usize, done: &mut Vec<Completion>) {
        let mut found = std::mem::take(&mut self.found);
        if !found.is_empty() {
            self.progress = Instant::now();
        }
        for mut completion in found.drain(..) {
            let place = usize::try_from(completion.id).unwrap_or(usize::MAX);
            let Some(origin) = self.origins.get_mut(place).and_then(Option::take) else { continue };
            self.free.push(place);
            self.figures.count(origin.begun, completion.result.is_ok());
            completion.id = origin.id;
            if origin.queue == queue {
                done.push(completion);
            } else if let Some(Some(inbox)) = self.inboxes.get_mut(origin.queue) {
                inbox.completions.push(completion);
                inbox.call();
            }
        }
        self.found = found;
    }

    pub(super) fn deliver_to_all(&mut self) {
        // There is no queue of this number: each request goes to the inbox of its own.
        self.deliver(usize::MAX, &mut Vec::new());
    }

    /// Ends the session if this process may store in its area no more.
    pub(super) fn look_for_loss(&mut self) {
        if self.place.is_lost()
            && let Some(client) = self.client.take()
        {
            client.abandon(&mut self.found);
        }
    }

    pub(super) fn submit(&mut self, queue: usize, mut request: Request, done: &mut Vec<Completion>) {
        self.look_for_loss();
        let begun = Begun::now(request.operation, request.range.len());
        let Some(client) = &mut self.client else {
            self.figures.count(begun, false);
            let (id, buffer) = (request.id, request.buffer);
            done.push(Completion { id, result: Err(closed()), buffer });
            return self.deliver(queue, done);
        };
        if client.in_flight() == 0 {
            self.progress = Instant::now();
        }
        let place = self.free.pop().unwrap_or(self.origins.len());
        let origin = Some(Origin { queue, id: request.id, begun });
        match self.origins.get_mut(place) {
            Some(slot) => *slot = origin,
            None => self.origins.push(origin),
        }
        request.id = place as u64;
        // The queue may be waited on as soon as this returns.
        if self.wake.is_attached() && !self.wake.is_announced() {
            self.wake.announce();
            if client.in_flight() > 0 {
                // What has completed before the server was told.
                client.look_closely();
                client.poll(&mut self.found);
                self.deliver_to_all();
            }
        }
        let Some(client) = &mut self.client else { return };
        client.submit(request, &mut self.found);
        self.wake_server();
        self.deliver(queue, done);
    }

    /// Wakes the other host if it sleeps, and something was stored for it.
    fn wake_server(&mut self) {
        let stores = self.client.as_ref().map_or(0, Client::stores);
        if stores != self.told {
            self.told = stores;
            self.has_woken = self.wake.wake_server();
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.client.as_ref().map_or(0, Client::in_flight)
    }

    /// Whether the event of the queue was signalled.
    pub(super) fn poll(&mut self, queue: usize, done: &mut Vec<Completion>) -> bool {
        let mut is_called = false;
        if let Some(Some(inbox)) = self.inboxes.get_mut(queue) {
            is_called = std::mem::take(&mut inbox.is_called);
            done.append(&mut inbox.completions);
        }
        self.look_for_loss();
        if let Some(client) = &mut self.client {
            client.poll(&mut self.found);
            let waits = client.in_flight() > 0 && self.progress.elapsed() >= NUDGE_AFTER;
            if waits && self.nudged.elapsed() >= NUDGE_AFTER {
                self.nudged = Instant::now();
                client.nudge();
            }
            self.recalls.look(client);
        }
        self.wake_server();
        self.deliver(queue, done);
        is_called
    }

    /// Gives up the requests of a queue that the other host has not begun.
    pub(super) fn give_up(&mut self, queue: usize) {
        let Self { client, origins, found, .. } = self;
        if let Some(client) = client {
            let origin = |id| origins.get(usize::try_from(id).ok()?)?.as_ref();
            client.give_up(|id| origin(id).is_some_and(|origin| origin.queue == queue), found);
        }
        self.wake_server();
    }

    /// Whether requests wait here, and not on the other host.
    pub(super) fn has_waiting(&self) -> bool {
        self.client.as_ref().is_some_and(Client::has_waiting)
    }

    /// Whether a thread that is about to sleep has to say so.
    pub(super) fn wants_announcement(&self) -> bool {
        self.in_flight() > 0 && self.wake.is_attached() && !self.wake.is_announced()
    }

    /// The other host wakes this one no more: all queues look from time to time.
    pub(super) fn end_wake(&mut self) {
        self.wake.disconnect(self.inboxes.iter().flatten().map(|inbox| &*inbox.poller));
        self.inboxes.iter_mut().flatten().for_each(Inbox::call);
    }

    /// Ends the session. Requests in flight complete with an error.
    pub(super) fn end(&mut self) {
        self.look_for_loss();
        if let Some(client) = &mut self.client {
            client.end(&mut self.found);
        }
        // The server sees that, too.
        self.end_wake();
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Stopped, "the block device was closed")
}
