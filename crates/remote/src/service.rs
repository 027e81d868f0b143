//! The side of the host that has the backend.

use crate::ChannelUse;
use crate::pause::{Pause, wait_max};
use crate::shared::{Changes, SharedQueue};
use crate::wake::{LOOK_AFTER_WHEN_IDLE, ServerWake};
use cbd_channel::{Server, ServerState};
use cbd_export::wake::{Event, Interest, WaitSet, Waker};
use cbd_export::{BlockDevice, RequestQueue, start_thread};
use cbd_types::{BlkdevId, Completion, Error, ErrorKind, Pmem, Region, Request, Result, TakeBack};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the thread looks for the next request without a wait.
const SPIN: Duration = Duration::from_micros(50);

/// The places of the eventfd and of the connection to the other host in the set of descriptors, if there is one.
const EVENT: usize = 0;
const CONNECTION: usize = 1;

/// How a [`Service`] begins.
#[derive(Clone, Debug)]
pub struct ServiceOptions<'a> {
    /// The name of its thread.
    pub name: &'a str,
    /// The channel.
    pub place: ChannelUse,
    /// The blkdev of the other host.
    pub blkdev: BlkdevId,
    /// The requests of all blkdevs of the device.
    pub changes: Arc<Changes>,
    /// Whether the device has no other blkdev: no client sees what was done of a request that is executed once more later.
    pub is_exclusive: bool,
    /// Called first in the thread.
    pub thread_setup: fn(),
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// Whether the session ends with the thread: the other host sees errors then, and no pause.
    closes: AtomicBool,
    is_used: AtomicBool,
    /// A connection that the thread is to take.
    wake: Mutex<Option<ServerWake>>,
}

impl Shared {
    fn take_wake(&self) -> Option<ServerWake> {
        self.wake.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A thread that executes the requests of another host.
#[derive(Debug)]
pub struct Service {
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<Result<()>>>,
    /// Disconnected when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

impl Service {
    /// Serves `device` in a channel of `region`.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the system refuses a thread, or a resource of the queue; [`ErrorKind::Stopped`] if this process is its
    /// host no more.
    pub fn start<M: Pmem + 'static>(
        region: Arc<Region<M>>,
        device: Arc<dyn BlockDevice>,
        options: &ServiceOptions<'_>,
    ) -> Result<Self> {
        let (shared, event) = (Arc::new(Shared::default()), Event::new()?);
        let (place, thread_setup) = (options.place.clone(), options.thread_setup);
        place.refuse_lost()?;
        let server = Server::open(region, place.areas, place.area_bytes, place.session, device.geometry());
        let (waker, pause) = (event.waker(), Pause::new()?);
        let of_thread = Arc::clone(&shared);
        let (blkdev, is_exclusive) = (options.blkdev, options.is_exclusive);
        let changes = Arc::clone(&options.changes);
        let (running, ended) = sync_channel(0);
        let thread = start_thread(options.name, move || {
            let _running: SyncSender<()> = running;
            thread_setup();
            let queue = SharedQueue::new(device.open_queue()?, Arc::clone(&changes), Some(blkdev))?;
            Serving {
                place,
                server,
                queue,
                blkdev,
                changes,
                is_exclusive,
                event,
                pause,
                wake: None,
                is_attached: false,
                set: WaitSet::new(),
                stores: 0,
                has_woken: false,
                has_given_up: false,
                shared: of_thread,
            }
            .run()
        })?;
        Ok(Self { shared, waker, thread: Some(thread), ended: Mutex::new(ended) })
    }

    /// Whether another host has a session.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.shared.is_used.load(Ordering::Relaxed)
    }

    /// Lets the other host wake the thread, and the thread that host.
    pub fn attach(&self, wake: ServerWake) {
        *self.shared.wake.lock().unwrap_or_else(PoisonError::into_inner) = Some(wake);
        self.waker.wake();
    }

    /// Why the thread has ended without a command; `None` while it runs.
    #[must_use]
    pub fn failure(&mut self) -> Option<Error> {
        let ended = || Some(Error::new(ErrorKind::Stopped, "the thread has ended"));
        if self.thread.is_none() {
            // It was said before why.
            return ended();
        }
        let thread = self.thread.take_if(|thread| thread.is_finished())?;
        match thread.join() {
            Ok(Ok(())) => ended(),
            Ok(Err(error)) => Some(error),
            Err(_) => Some(Error::new(ErrorKind::System, "the thread has panicked")),
        }
    }

    /// Ends the thread once the requests that it has begun are complete, and with `closes` the session of the other host, whose requests
    /// fail from then on. Without it they wait for a later service.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if they take longer than `limit`: the thread ends with the last one.
    pub fn stop(mut self, closes: bool, limit: Duration) -> Result<()> {
        self.begin_stop(closes);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            let text = format!("requests of another host did not complete within {} s", limit.as_secs());
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
        thread.join().map_err(|_| Error::new(ErrorKind::System, "the thread has panicked"))?
    }

    fn begin_stop(&self, closes: bool) {
        self.shared.closes.store(closes, Ordering::Relaxed);
        self.shared.stop.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // One that was stopped may still wait for its last requests.
        if self.thread.is_some() {
            self.begin_stop(false);
        }
    }
}

/// What the thread has.
struct Serving<M: Pmem> {
    place: ChannelUse,
    server: Server<M>,
    queue: SharedQueue,
    blkdev: BlkdevId,
    changes: Arc<Changes>,
    is_exclusive: bool,
    event: Event,
    pause: Pause,
    /// By which the other host wakes the thread, and the thread that host.
    wake: Option<ServerWake>,
    /// Whether the other host knows that.
    is_attached: bool,
    /// What the thread sleeps on.
    set: WaitSet,
    /// What the server has stored when the other host was woken last.
    stores: u64,
    /// Whether that host slept then.
    has_woken: bool,
    /// Whether requests of a client that has left were cancelled.
    has_given_up: bool,
    shared: Arc<Shared>,
}

impl<M: Pmem> Serving<M> {
    fn run(mut self) -> Result<()> {
        self.fill_set();
        let (mut requests, mut done) = (Vec::new(), Vec::new());
        let mut last = Instant::now();
        let mut is_settled = false;
        // Whether the other host was told that the thread is about to sleep.
        let mut is_announced = false;
        loop {
            self.place.refuse_lost()?;
            let is_stopping = self.shared.stop.load(Ordering::Acquire);
            if !is_stopping {
                self.server.poll(&mut requests)?;
            }
            self.give_up_left(&mut done);
            let has_worked = self.execute(&mut requests, &mut done);
            self.send_back();
            if !is_settled && self.server.is_settled() {
                is_settled = true;
                self.changes.settle(self.blkdev);
            }
            self.shared.is_used.store(self.server.state() != ServerState::Alone, Ordering::Relaxed);
            if !self.is_attached && self.is_woken() {
                self.is_attached = true;
                self.wake.iter().for_each(ServerWake::attach);
            }
            self.wake_client();
            if has_worked {
                last = Instant::now();
                self.pause.shorten();
                if std::mem::take(&mut is_announced) {
                    self.wake.iter().for_each(ServerWake::retract);
                }
                continue;
            }
            // What has not begun is executed by the next service.
            if is_stopping && self.queue.begun() == 0 {
                break;
            }
            if last.elapsed() < SPIN {
                if self.has_woken {
                    // The thread that was woken may be the next one of this processor.
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
                continue;
            }
            if !is_announced && self.announce() {
                is_announced = true;
                continue;
            }
            self.sleep(is_announced, last.elapsed())?;
            is_announced = false;
            // Also without a request: another blkdev's may have woken it.
            self.queue.poll(&mut done);
        }
        if self.shared.closes.load(Ordering::Relaxed) && !self.place.is_lost() {
            self.server.close();
        }
        Ok(())
    }

    /// Executes requests, and stores completions. Whether there were some.
    fn execute(&mut self, requests: &mut Vec<Request>, done: &mut Vec<Completion>) -> bool {
        let mut has_worked = !requests.is_empty();
        for request in requests.drain(..) {
            let is_former = self.server.is_former(request.id);
            self.queue.plug(request, is_former, done);
        }
        self.queue.unplug(done);
        if self.queue.parked() > 0 {
            self.queue.poll(done);
        }
        has_worked |= !done.is_empty();
        for completion in done.drain(..) {
            // Its result can be that this process has lost its caches.
            if !self.place.is_lost() {
                let id = completion.id;
                self.server.complete(completion);
                self.queue.stored(id);
            }
        }
        has_worked
    }

    /// Cancels requests that wait for space once their client has left.
    fn give_up_left(&mut self, done: &mut Vec<Completion>) {
        let is_closing =
            self.shared.stop.load(Ordering::Acquire) && self.shared.closes.load(Ordering::Relaxed);
        let is_left = is_closing || self.server.state() == ServerState::Settling;
        if is_left && !std::mem::replace(&mut self.has_given_up, is_left) {
            self.queue.give_up(done);
        } else if !is_left {
            self.has_given_up = false;
        }
    }

    /// Sends back what the client asks for.
    fn send_back(&mut self) {
        if self.server.take_recall() {
            let mut returned = Vec::new();
            let Self { server, queue, is_exclusive, .. } = self;
            let is_given_up = |request| server.is_given_up(request);
            let which = TakeBack { begun_writes: *is_exclusive, is_given_up: &is_given_up };
            queue.take_back(which, &mut returned);
            for request in returned {
                let id = request.id;
                self.server.send_back(request);
                self.queue.stored(id);
            }
        }
    }

    /// Whether the client of the session wakes the thread.
    fn is_woken(&self) -> bool {
        self.wake.as_ref().is_some_and(|wake| self.server.client() == Some(wake.session()))
    }

    /// Tells the other host that the thread is about to sleep, if that wakes it. The thread is to look once more.
    fn announce(&mut self) -> bool {
        let Some(wake) = self.wake.as_ref().filter(|_| self.is_woken()) else { return false };
        wake.announce();
        self.server.look_closely();
        true
    }

    /// Wakes the other host if it sleeps, and something was stored for it.
    fn wake_client(&mut self) {
        let stores = self.server.stores();
        if stores != self.stores {
            self.stores = stores;
            self.has_woken = self.wake.as_ref().is_some_and(ServerWake::wake_client);
        }
    }

    /// Sleeps until there may be something to do.
    fn sleep(&mut self, is_announced: bool, quiet: Duration) -> Result<()> {
        if is_announced {
            self.pause.end();
            self.set.wait(Some(LOOK_AFTER_WHEN_IDLE))?;
        } else {
            self.pause.begin(wait_max(quiet));
            self.set.wait(None)?;
            if self.server.in_flight() > 0 {
                // The client may ask for what waits here.
                self.server.look_closely();
            }
        }
        self.event.clear();
        let has_ended = self.wake.as_ref().is_some_and(|wake| {
            wake.retract();
            if self.set.readable(EVENT) {
                wake.clear();
            }
            self.set.readable(CONNECTION)
        });
        // Another one is for a later session, or for none: the one that is used stays until it has ended.
        let next = self.shared.take_wake().filter(|_| has_ended || !self.is_woken());
        if has_ended || next.is_some() {
            (self.wake, self.is_attached) = (next, false);
            self.fill_set();
            // The client may have ended its session.
            self.server.look_closely();
        }
        Ok(())
    }

    fn fill_set(&mut self) {
        self.set = WaitSet::new();
        let wake = self.wake.as_ref().map(ServerWake::descriptors);
        let own = [self.event.descriptor(), self.pause.descriptor()];
        // They have their places: see `EVENT`.
        let all = wake.into_iter().flatten().chain(own).chain(self.queue.wait_descriptors());
        for descriptor in all {
            self.set.add(descriptor, Interest::Read);
        }
    }
}

#[cfg(test)]
mod tests;
