//! The side of a host that uses the device.

mod channel;
mod recall;

use crate::figures::OperationFigures;
use crate::pause::{Pause, WAIT_MAX};
use crate::wake::{ClientWake, Found, LOOK_AFTER, OF_QUEUE, WakeAddress};
use crate::{ChannelUse, shape_for};
use cbd_channel::Client;
use cbd_export::wake::Event;
use cbd_export::{BlockDevice, RequestQueue, system_error};
use cbd_sys::event::Poller;
use cbd_types::{BlkdevId, Completion, Error, ErrorKind, Geometry, Operation, Pmem, Region, Request, Result};
use channel::{Channel, Inbox, Origin};
use parking_lot::Mutex;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long after its last request a queue looks for the answer without a wait.
const SPIN: Duration = Duration::from_micros(10);

/// A block device that another host serves, through a channel in their region.
pub struct RemoteDevice<M: Pmem + 'static> {
    channel: Arc<Mutex<Channel<M>>>,
    first: Geometry,
}

impl<M: Pmem + 'static> std::fmt::Debug for RemoteDevice<M> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("RemoteDevice").field("geometry", &self.first).finish_non_exhaustive()
    }
}

impl<M: Pmem + 'static> RemoteDevice<M> {
    /// Begins a session. Waits up to `limit` for the other host to accept it. No other process stores in the client's area.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if the other host does not accept it in time; [`ErrorKind::NoSpace`] for areas that are too small;
    /// [`ErrorKind::System`] without memory or descriptors; [`ErrorKind::Stopped`] if this process is its host no more.
    pub fn open(region: Arc<Region<M>>, place: ChannelUse, limit: Duration) -> Result<Self> {
        place.refuse_lost()?;
        let mut client = Client::open(region, place.areas, shape_for(place.area_bytes)?, place.session)?;
        let (mut pause, end) = (Pause::new()?, Instant::now() + limit);
        let mut found = Vec::new();
        let first = loop {
            if let Err(lost) = place.refuse_lost() {
                client.abandon(&mut found);
                return Err(lost);
            }
            client.poll(&mut found);
            if let Some(geometry) = client.geometry() {
                break geometry;
            }
            if Instant::now() >= end {
                client.close();
                let text =
                    format!("the host that has the backend did not answer within {} s", limit.as_secs());
                return Err(Error::new(ErrorKind::TimedOut, text));
            }
            pause.begin(WAIT_MAX);
            cbd_export::wait_any(&[pause.descriptor()], Some(limit))?;
        };
        let channel = Channel::new(place, client, found)?;
        Ok(Self { channel: Arc::new(Mutex::new(channel)), first })
    }

    /// Requests that were submitted and are not complete.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.channel.lock().in_flight()
    }

    /// How long requests have been in flight without any completion; `None` if there are none.
    #[must_use]
    pub fn waiting(&self) -> Option<Duration> {
        let channel = self.channel.lock();
        (channel.in_flight() > 0).then(|| channel.progress.elapsed())
    }

    /// Whether the session has ended: each request fails.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.channel.lock().client.as_ref().is_none_or(Client::is_ended)
    }

    /// Offset of the server's area in use.
    #[must_use]
    pub fn server_area(&self) -> u64 {
        self.channel.lock().place.areas.server
    }

    /// Uses another area of the server from now on: the other host has ended its former service, and has begun another one. Requests in
    /// flight are submitted to that.
    pub fn follow(&self, server: u64) {
        let mut channel = self.channel.lock();
        channel.place.areas.server = server;
        if let Some(client) = &mut channel.client {
            client.follow(server);
        }
    }

    /// Begins another session where the former one has ended. Requests wait until the other host accepts that. False, and does nothing,
    /// while a session has not ended, and once the device was closed.
    ///
    /// # Errors
    /// As [`open`](Self::open), without the timeout.
    pub fn reopen(&self, region: Arc<Region<M>>, place: ChannelUse) -> Result<bool> {
        let mut channel = self.channel.lock();
        if !channel.client.as_ref().is_some_and(Client::is_ended) {
            return Ok(false);
        }
        place.refuse_lost()?;
        let client = Client::open(region, place.areas, shape_for(place.area_bytes)?, place.session)?;
        (channel.client, channel.place, channel.progress) = (Some(client), place, Instant::now());
        Ok(true)
    }

    /// Ends the session. Requests in flight complete with an error, and may still be executed; later ones fail until the device is
    /// [opened again](Self::reopen).
    pub fn end(&self) {
        let mut channel = self.channel.lock();
        channel.end();
        channel.deliver_to_all();
    }

    /// Lets the other host wake this one, and this one wake that, if both are processes of one kernel: without that, both look from time
    /// to time for what the other one has stored. To be called from time to time: connections end with the processes.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the process cannot open another descriptor, or if the system refuses the connection.
    pub fn connect_wake(&self, address: &WakeAddress, blkdev: BlkdevId) -> Result<()> {
        let mut channel = self.channel.lock();
        if channel.wake.has_ended() {
            channel.end_wake();
        }
        let can_connect = channel.client.as_ref().is_some_and(|client| !client.is_ended());
        if !can_connect || channel.wake.number().is_some() {
            return Ok(());
        }
        let session = channel.place.session.max(1);
        channel.wake.connect(address, blkdev, session)
    }

    /// Whether the other host wakes this one, and this one that.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.channel.lock().wake.is_attached()
    }

    /// The requests of this session that have ended, by operation.
    #[must_use]
    pub fn figures(&self) -> Vec<(Operation, OperationFigures)> {
        self.channel.lock().figures.read()
    }

    /// Ends the session. Requests in flight complete with an error, and may still be executed; later ones are refused.
    pub fn close(&self) {
        drop(self.take_client());
    }

    /// Ends the session, for good. Returns its client, if it had requests in flight.
    fn take_client(&self) -> Option<Client<M>> {
        let mut channel = self.channel.lock();
        let has_requests = channel.in_flight() > 0;
        channel.end();
        let client = channel.client.take();
        channel.deliver_to_all();
        client.filter(|_| has_requests)
    }

    /// As [`close`](Self::close), and waits up to `limit` until no request can be executed any more. False if that is not known: the other
    /// host has not said so.
    ///
    /// # Errors
    /// [`ErrorKind::System`] without a descriptor: it is not known either.
    pub fn close_and_wait(&self, limit: Duration) -> Result<bool> {
        let Some(client) = self.take_client() else { return Ok(true) };
        let (mut pause, end) = (Pause::new()?, Instant::now() + limit);
        while !client.is_over() {
            if Instant::now() >= end {
                return Ok(false);
            }
            pause.begin(WAIT_MAX);
            cbd_export::wait_any(&[pause.descriptor()], Some(limit))?;
        }
        Ok(true)
    }
}

impl<M: Pmem + 'static> Drop for RemoteDevice<M> {
    fn drop(&mut self) {
        if Arc::strong_count(&self.channel) == 1 {
            self.close();
        }
    }
}

impl<M: Pmem + 'static> BlockDevice for RemoteDevice<M> {
    fn geometry(&self) -> Geometry {
        // Only the size of a device changes, also while there are no requests.
        let mut channel = self.channel.lock();
        channel.look_for_loss();
        let Channel { client, found, .. } = &mut *channel;
        if let Some(client) = client {
            client.look_closely();
            client.poll(found);
        }
        channel.deliver_to_all();
        let now = channel.client.as_ref().and_then(Client::geometry);
        Geometry { size: now.map_or(self.first.size, |now| now.size), ..self.first }
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        Ok(Box::new(RemoteQueue::open(&self.channel)?))
    }
}

/// One thread's queue to a [`RemoteDevice`].
struct RemoteQueue<M: Pmem> {
    channel: Arc<Mutex<Channel<M>>>,
    number: usize,
    pause: Pause,
    event: Event,
    /// What the queue waits on.
    poller: Arc<Poller>,
    /// The connection to the other host that it waits on, too.
    joined: Option<u64>,
    /// Whether the other host wakes this queue.
    is_woken: bool,
    /// Whether requests waited here at the last look.
    has_waiting: bool,
    parked: usize,
    /// When a request was submitted last.
    submitted: Instant,
}

impl<M: Pmem> RemoteQueue<M> {
    fn open(shared: &Arc<Mutex<Channel<M>>>) -> Result<Self> {
        let (pause, event) = (Pause::new()?, Event::new()?);
        let set = || {
            let poller = Poller::new()?;
            poller.add(pause.descriptor(), OF_QUEUE, false)?;
            poller.add(event.descriptor(), OF_QUEUE, false)?;
            Ok(Arc::new(poller))
        };
        let poller = set().map_err(|error| system_error("a queue cannot wait for the device", &error))?;
        let inbox = Inbox {
            completions: Vec::new(),
            is_called: false,
            waker: event.waker(),
            poller: Arc::clone(&poller),
        };
        let mut channel = shared.lock();
        let number = channel.inboxes.iter().position(Option::is_none).unwrap_or(channel.inboxes.len());
        match channel.inboxes.get_mut(number) {
            Some(place) => *place = Some(inbox),
            None => channel.inboxes.push(Some(inbox)),
        }
        drop(channel);
        let (channel, submitted) = (Arc::clone(shared), Instant::now());
        Ok(Self {
            channel,
            number,
            pause,
            event,
            poller,
            joined: None,
            is_woken: false,
            has_waiting: false,
            parked: 0,
            submitted,
        })
    }

    /// Counts what has completed, and looks again later if something has not.
    fn note(&mut self, completed: usize) {
        self.parked -= completed.min(self.parked);
        if completed > 0 {
            self.pause.shorten();
        }
        match self.parked {
            0 => self.pause.end(),
            _ if !self.is_woken => self.pause.begin(WAIT_MAX),
            // The next look may be the one at which it asks for what waits there.
            _ if self.has_waiting => self.pause.begin_long(recall::AFTER),
            _ => self.pause.begin_long(LOOK_AFTER),
        }
    }

    /// Whether the other host was awake when something was stored for it last.
    fn look(&mut self, done: &mut Vec<Completion>) -> bool {
        let mut channel = self.channel.lock();
        // Under the lock, so that the next wait sees any later signal.
        if channel.poll(self.number, done) {
            self.event.clear();
        }
        self.has_waiting = channel.has_waiting();
        !channel.has_woken
    }

    /// Waits for the other host as well, which may have connected just now.
    fn join(&mut self, wake: &ClientWake) {
        let number = wake.number();
        if number != self.joined {
            self.joined = number.filter(|_| wake.join(&self.poller));
        }
        self.is_woken = self.joined.is_some() && wake.is_attached();
    }

    /// The thread is about to sleep. It has looked, and has found completions or not; so many requests are left.
    fn before_sleep(&mut self, done: &mut Vec<Completion>, has_found: bool, left: usize) {
        let channel = Arc::clone(&self.channel);
        let mut channel = channel.lock();
        if left > 0 {
            self.join(&channel.wake);
        } else if !has_found && self.joined.take().is_some() {
            // The other host wakes only queues with requests.
            channel.wake.leave(&self.poller);
        }
        if has_found && !channel.wants_announcement() && !channel.wake.is_taken() {
            return;
        }
        #[cfg(test)]
        tests::before_the_clear();
        let found = self.joined.map_or(Found::Nothing, |_| channel.wake.clear(&self.poller));
        if found == Found::Ended {
            channel.wake.leave(&self.poller);
            channel.end_wake();
            (self.joined, self.is_woken) = (None, false);
        }
        // Behind the clear, which may have taken what the last announcement has brought.
        let announces = channel.wants_announcement();
        if announces {
            channel.wake.announce();
        }
        if announces || found != Found::Nothing {
            if let Some(client) = &mut channel.client {
                client.look_closely();
            }
            if channel.poll(self.number, done) {
                self.event.clear();
            }
        }
    }

    /// Looks for the answer without a wait: a host that is awake answers in less time than it takes to begin one.
    fn spin(&mut self, done: &mut Vec<Completion>) {
        self.channel.lock().wake.retract();
        let before = done.len();
        while done.len() == before && self.submitted.elapsed() < SPIN {
            std::hint::spin_loop();
            self.look(done);
        }
    }
}

impl<M: Pmem> RequestQueue for RemoteQueue<M> {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        let before = done.len();
        self.parked += 1;
        let channel = Arc::clone(&self.channel);
        let mut channel = channel.lock();
        self.join(&channel.wake);
        channel.submit(self.number, request, done);
        self.has_waiting = channel.has_waiting();
        drop(channel);
        self.submitted = Instant::now();
        self.pause.shorten();
        self.note(done.len() - before);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        let is_awake = self.look(done);
        if is_awake && done.len() == before && self.parked > 0 && self.submitted.elapsed() < SPIN {
            self.spin(done);
        }
        let left = self.parked.saturating_sub(done.len() - before);
        self.before_sleep(done, done.len() > before, left);
        self.note(done.len() - before);
    }

    fn parked(&self) -> usize {
        self.parked
    }

    fn changes(&self) -> usize {
        let channel = self.channel.lock();
        let is_own = |origin: &&Origin| origin.queue == self.number && origin.begun.is_change();
        channel.origins.iter().flatten().filter(is_own).count()
    }

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        let channel = Arc::clone(&self.channel);
        let mut channel = channel.lock();
        channel.give_up(self.number);
        channel.deliver(self.number, done);
        drop(channel);
        self.note(done.len() - before);
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        vec![self.poller.as_raw_fd()]
    }
}

impl<M: Pmem> Drop for RemoteQueue<M> {
    fn drop(&mut self) {
        let mut channel = self.channel.lock();
        channel.give_up(self.number);
        // The rest of what it has in flight completes in the channel, for no one.
        for origin in channel.origins.iter_mut().flatten().filter(|origin| origin.queue == self.number) {
            origin.queue = usize::MAX;
        }
        if let Some(place) = channel.inboxes.get_mut(self.number) {
            *place = None;
        }
    }
}

#[cfg(test)]
mod tests;
