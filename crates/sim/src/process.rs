//! One simulated process: an engine over a simulated region and a simulated disk, the queues of its clients
//! and its background worker, driven step by step on one thread. A backend without a cache has no engine and no worker.
//!
//! Invariants: a client's queue is polled, and the background worker steps, only after an event (a waker, a completed
//! disk operation of its own, or its timer), as a sleeping thread would be woken. A lost wakeup is therefore
//! detected.
//!
//! Elsewhere: caches that come, go, grow and shrink (`change`).

mod change;

use crate::CrashNow;
use crate::actor::act_as;
use crate::baton::together;
use crate::disk::SimDisk;
use crate::disk_queue::SimQueue;
use crate::environment::SimEnvironment;
use crate::memory::CrashMemory;
use cbd_device::{BlkdevClass, Device, Queue};
use cbd_engine::{BackgroundWorker, Cache, Settings, Step, Transport};
use cbd_types::{BackendId, Class, Completion, Region, Request, Result, Verified, Verify};
pub use change::Advanced;
use change::{Change, Place};
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

/// The actor of administrative calls: opening, recovery, settings.
const ADMINISTRATOR: u32 = 0;
/// The actor of the background worker; clients are 1 and up.
const WORKER: u32 = 1000;

/// A flag that wakes a client or the background worker.
#[derive(Default, Debug)]
pub(crate) struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl WakeFlag {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A queue, and the flag that its waker sets.
pub(crate) struct Client {
    pub(crate) queue: Queue<SimEnvironment, SimQueue>,
    wake_flag: Arc<WakeFlag>,
    /// The number of the client's queue at the disk; `queue` owns the queue object itself.
    disk_queue: u64,
}

impl Client {
    pub(crate) fn new(device: &Arc<Device<SimEnvironment>>, disk: &SimDisk, depth: usize) -> Self {
        let wake_flag = Arc::new(WakeFlag::default());
        let queue = disk.queue(depth);
        let disk_queue = queue.number();
        let queue = Queue::new(Arc::clone(device), queue, Waker::from(Arc::clone(&wake_flag)));
        Self { queue, wake_flag, disk_queue }
    }

    fn of_class(mut self, class: &Arc<BlkdevClass>) -> Self {
        self.queue = self.queue.of_class(Arc::clone(class));
        self
    }

    fn has_work(&self, disk: &SimDisk) -> bool {
        self.wake_flag.is_set() || disk.in_flight_of(self.disk_queue) > 0
    }

    /// Polls the queue if it was woken; returns whether it was.
    pub(crate) fn poll(&mut self, disk: &SimDisk, done: &mut Vec<Completion>) -> bool {
        if !self.has_work(disk) {
            return false;
        }
        self.wake_flag.take();
        self.queue.poll(done);
        true
    }
}

/// The background worker of a cache.
pub(crate) struct SimWorker {
    worker: BackgroundWorker<SimEnvironment, SimQueue>,
    wake_flag: Arc<WakeFlag>,
    queue: u64,
    last_step: Step,
}

impl SimWorker {
    pub(crate) fn new(cache: &Arc<Cache<SimEnvironment>>, disk: &SimDisk, depth: usize) -> Self {
        let wake_flag = Arc::new(WakeFlag::default());
        cache.set_worker_waker(Waker::from(Arc::clone(&wake_flag)));
        let queue = disk.queue(depth);
        let number = queue.number();
        let worker = BackgroundWorker::new(Arc::clone(cache), queue, disk.geometry());
        Self { worker, wake_flag, queue: number, last_step: Step::Busy }
    }

    fn has_work(&self, disk: &SimDisk, clock_ms: u64) -> bool {
        self.wake_flag.is_set()
            || match self.last_step {
                Step::Busy => true,
                Step::WaitBacking => disk.in_flight_of(self.queue) > 0,
                Step::Idle { until_ms } => until_ms.is_some_and(|until| until <= clock_ms),
            }
    }

    pub(crate) fn step(&mut self) {
        act_as(WORKER);
        self.wake_flag.take();
        self.last_step = self.worker.step();
    }

    /// Takes a step if it was woken; returns whether it was.
    pub(crate) fn step_if_woken(&mut self, disk: &SimDisk, clock_ms: u64) -> bool {
        let has_work = self.has_work(disk, clock_ms);
        if has_work {
            self.step();
        }
        has_work
    }

    /// The time until which it sleeps unless it is woken.
    pub(crate) fn sleeps_until(&self) -> Option<u64> {
        match self.last_step {
            Step::Idle { until_ms } => until_ms,
            _ => None,
        }
    }
}

/// The next possible action of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outlook {
    /// A client or the background worker has been woken.
    Work,
    /// Nothing until the clock shows this time in milliseconds.
    Sleeps(u64),
    /// Nothing: no event is pending.
    Stuck,
}

/// Opens the cache of `backend` as a starting process does: it recovers.
///
/// # Errors
/// The error of the engine.
pub fn recover(
    environment: &Arc<SimEnvironment>,
    memory: &CrashMemory,
    backend: BackendId,
) -> Result<Arc<Cache<SimEnvironment>>> {
    recover_both(environment, memory, backend).map(|(_, cache)| cache)
}

/// A transport, and a cache on it.
type Opened<C> = (Arc<Transport<SimEnvironment>>, C);

/// As [`recover`], with the transport.
fn recover_both(
    environment: &Arc<SimEnvironment>,
    memory: &CrashMemory,
    backend: BackendId,
) -> Result<Opened<Arc<Cache<SimEnvironment>>>> {
    act_as(ADMINISTRATOR);
    let transport = Transport::open(Arc::clone(environment), Region::new(memory.clone()))?;
    let cache = transport.open_cache(backend)?;
    Ok((transport, cache))
}

/// As [`recover`], with the transport, for a backend that may have no cache.
pub(crate) fn recover_if_cached(
    environment: &Arc<SimEnvironment>,
    memory: &CrashMemory,
    backend: BackendId,
) -> Result<Opened<Option<Arc<Cache<SimEnvironment>>>>> {
    act_as(ADMINISTRATOR);
    let transport = Transport::open(Arc::clone(environment), Region::new(memory.clone()))?;
    let is_cached = transport.backend(backend)?.cache_segments > 0;
    let cache = is_cached.then(|| transport.open_cache(backend)).transpose()?;
    Ok((transport, cache))
}

/// A cache, and its background worker.
pub(crate) struct Caching {
    worker: SimWorker,
    cache: Arc<Cache<SimEnvironment>>,
}

impl Caching {
    pub(crate) fn new(cache: Arc<Cache<SimEnvironment>>, disk: &SimDisk, depth: usize) -> Self {
        Self { worker: SimWorker::new(&cache, disk, depth), cache }
    }

    pub(crate) const fn cache(&self) -> &Arc<Cache<SimEnvironment>> {
        &self.cache
    }

    /// The background worker takes a step if it was woken; returns whether it was.
    pub(crate) fn step_if_woken(&mut self, disk: &SimDisk, clock_ms: u64) -> bool {
        self.worker.step_if_woken(disk, clock_ms)
    }
}

/// The process.
pub struct Process {
    environment: Arc<SimEnvironment>,
    transport: Arc<Transport<SimEnvironment>>,
    backend: BackendId,
    /// The cache that requests go through, if there is one.
    caching: Option<Caching>,
    /// The change of the cache that is going on.
    change: Option<Change>,
    device: Arc<Device<SimEnvironment>>,
    class: Arc<BlkdevClass>,
    depth: usize,
    clients: Vec<Client>,
    disk: SimDisk,
}

impl Process {
    /// Opens the cache of `backend`, if it has one, which recovers it, and the queues of `clients` clients.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn open(
        environment: Arc<SimEnvironment>,
        memory: &CrashMemory,
        disk: &SimDisk,
        backend: BackendId,
        clients: usize,
        depth: usize,
    ) -> Result<Self> {
        let (transport, cache) = recover_if_cached(&environment, memory, backend)?;
        disk.used_by(memory);
        let device = Arc::new(match &cache {
            Some(cache) => Device::cached(Arc::clone(cache), disk.geometry()),
            None => Device::uncached(disk.geometry()),
        });
        let class = Arc::default();
        let clients = (0..clients).map(|_| Client::new(&device, disk, depth).of_class(&class)).collect();
        let caching = cache.map(|cache| Caching::new(cache, disk, depth));
        let disk = disk.clone();
        Ok(Self {
            environment,
            transport,
            backend,
            caching,
            change: None,
            device,
            class,
            depth,
            clients,
            disk,
        })
    }

    /// Sets the class of requests that have none.
    pub fn set_class(&self, class: Class) {
        self.class.set(class);
    }

    /// The engine's cache, in a process that has one.
    pub fn cache(&self) -> &Cache<SimEnvironment> {
        match self.cached() {
            Some(cache) => cache,
            None => unreachable!("the backend has no cache"),
        }
    }

    /// The engine's cache, if requests go through one.
    pub fn cached(&self) -> Option<&Cache<SimEnvironment>> {
        act_as(ADMINISTRATOR);
        self.caching.as_ref().map(|caching| &*caching.cache)
    }

    /// Stops the cache, if there is one, as an orderly end does. A change that goes on ends where it is.
    pub fn stop(&mut self) {
        self.change = None;
        if let Some(cache) = self.cached() {
            cache.stop();
        }
    }

    /// The region grows to the end of its memory, and the cache gets all segments that are free then.
    ///
    /// # Errors
    /// The error of the engine.
    pub(crate) fn grow_region(&self) -> Result<()> {
        self.transport.grow_region()?;
        let Some(caching) = &self.caching else { return Ok(()) };
        let free = self.transport.info().free_segments;
        self.transport.grow_cache(self.backend, &caching.cache, free)
    }

    /// The tables of the region.
    pub(crate) const fn transport(&self) -> &Arc<Transport<SimEnvironment>> {
        &self.transport
    }

    /// Changes the settings, in the region and then in the running cache.
    ///
    /// # Errors
    /// The error of the engine.
    pub fn change_settings(&self, settings: Settings) -> Result<()> {
        act_as(ADMINISTRATOR);
        self.transport.update_settings(self.backend, settings)?;
        self.cache().set_settings(settings)
    }

    /// Number of clients.
    pub fn clients(&self) -> usize {
        self.clients.len()
    }

    /// Client `client` submits a request.
    pub fn submit(&mut self, client: usize, request: Request, done: &mut Vec<Completion>) {
        act_as(1 + client as u32);
        self.clients[client].queue.submit(request, done);
    }

    /// Client `client` submits several requests at once.
    pub fn submit_at_once(&mut self, client: usize, requests: Vec<Request>, done: &mut Vec<Completion>) {
        act_as(1 + client as u32);
        submit_at_once(&mut self.clients[client].queue, requests, done);
    }

    /// Client `client` verifies a range.
    pub fn verify(&mut self, client: usize, verify: Verify) {
        act_as(1 + client as u32);
        self.clients[client].queue.verify(0, verify);
    }

    /// The results of the verifications of `client` that have ended.
    pub fn take_verified(&mut self, client: usize) -> Vec<Result<Verified>> {
        let verified = self.clients[client].queue.take_verified();
        verified.into_iter().map(|(_, result)| result).collect()
    }

    /// Client `client` disconnects with its open requests; a new client replaces it.
    pub fn replace_client(&mut self, client: usize) {
        act_as(1 + client as u32);
        self.clients[client] = Client::new(&self.device, &self.disk, self.depth).of_class(&self.class);
    }

    fn client_has_work(&self, client: usize) -> bool {
        self.clients[client].has_work(&self.disk)
    }

    /// Client `client` polls its queue if it was woken; returns whether it was.
    pub fn poll(&mut self, client: usize, done: &mut Vec<Completion>) -> bool {
        act_as(1 + client as u32);
        self.clients[client].poll(&self.disk, done)
    }

    /// Runs several clients and, if it has work, the background worker as interleaved threads. Each client submits
    /// its `requests` at once and polls its queue; `seed` decides the schedule. With `advances`, the change of the cache that is
    /// going on takes a step beside them.
    ///
    /// # Panics
    /// With [`CrashNow`] when the process crashed in one of them, and with the panic of any of them.
    pub fn together(
        &mut self,
        seed: u64,
        switch_permille: u64,
        requests: BTreeMap<usize, Vec<Request>>,
        advances: bool,
    ) -> Vec<Completion> {
        let has_work = self.worker_has_work();
        let mut requests = requests;
        let place = Place::of(&self.transport, &self.device);
        let mut works: Vec<Box<dyn FnOnce() -> Vec<Completion> + Send + '_>> = Vec::new();
        for (number, client) in self.clients.iter_mut().enumerate() {
            let Some(requests) = requests.remove(&number) else { continue };
            works.push(Box::new(move || {
                act_as(1 + number as u32);
                let mut done = Vec::new();
                submit_at_once(&mut client.queue, requests, &mut done);
                client.wake_flag.take();
                client.queue.poll(&mut done);
                done
            }));
        }
        if let (true, Some(caching)) = (has_work, &mut self.caching) {
            let worker = &mut caching.worker;
            works.push(Box::new(move || {
                worker.step();
                Vec::new()
            }));
        }
        if let (true, Some(change)) = (advances, &mut self.change) {
            works.push(Box::new(move || {
                act_as(ADMINISTRATOR);
                change.advance_beside(&place);
                Vec::new()
            }));
        }
        let ended = together(seed, switch_permille, works);
        let mut done = Vec::new();
        // A panic with a message is more specific than the crash of another thread, so it is reported first.
        let mut crash = None;
        for outcome in ended {
            match outcome {
                Ok(completed) => done.extend(completed),
                Err(payload) if payload.is::<CrashNow>() => crash = Some(payload),
                Err(payload) => resume_unwind(payload),
            }
        }
        if let Some(payload) = crash {
            resume_unwind(payload);
        }
        done
    }

    fn worker_has_work(&self) -> bool {
        let now_ms = self.environment.clock_ms();
        self.caching.as_ref().is_some_and(|caching| caching.worker.has_work(&self.disk, now_ms))
    }

    /// The background worker takes a step if it was woken; returns whether it was.
    pub fn maintain(&mut self) -> bool {
        let now_ms = self.environment.clock_ms();
        let mut went_on = false;
        if let Some(Change::Attaching { caching, .. }) = &mut self.change {
            went_on |= caching.worker.step_if_woken(&self.disk, now_ms);
        }
        if let Some(caching) = &mut self.caching {
            went_on |= caching.worker.step_if_woken(&self.disk, now_ms);
        }
        went_on
    }

    /// The next possible action of the process.
    pub fn outlook(&self) -> Outlook {
        if (0..self.clients.len()).any(|client| self.client_has_work(client)) || self.worker_has_work() {
            return Outlook::Work;
        }
        let until = self.caching.as_ref().and_then(|caching| caching.worker.sleeps_until());
        until.map_or(Outlook::Stuck, Outlook::Sleeps)
    }

    /// The state in which the clients and the background worker wait, for a report.
    pub fn describe(&self) -> String {
        let parked: Vec<usize> = self.clients.iter().map(|client| client.queue.parked()).collect();
        let worker = self.caching.as_ref().map(|Caching { worker, cache }| {
            (worker.last_step, self.disk.in_flight_of(worker.queue), cache.status())
        });
        format!(
            "parked requests by client {parked:?}, {}, the worker's last step, its disk operations and the status {worker:?}",
            self.change.as_ref().map_or("no change goes on", Change::name)
        )
    }
}

fn submit_at_once(
    queue: &mut Queue<SimEnvironment, SimQueue>,
    requests: Vec<Request>,
    done: &mut Vec<Completion>,
) {
    for request in requests {
        queue.submit_plugged(request, done);
    }
    queue.unplug(done);
}
