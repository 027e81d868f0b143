//! Helpers of the tests: memory, devices, a server in a temporary directory.
#![allow(dead_code)]

pub mod raw;
pub mod verifying;

use cbd_export::{BlockDevice, Event, MemoryDevice, RequestQueue, Waker};
use cbd_nbd::{Listen, Options, Server};
use cbd_types::{Completion, Durability, Error, ErrorKind, Geometry, MediaError, Pmem, Request, Result};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PAGE: usize = 4096;

/// Memory on the heap, with a lock for each page: safe code that does not slow a measurement.
pub struct Heap(Vec<Mutex<Box<[u8; PAGE]>>>);

impl Heap {
    pub fn new(size: usize) -> Arc<Self> {
        assert_eq!(size % PAGE, 0);
        Arc::new(Self((0..size / PAGE).map(|_| Mutex::new(Box::new([0; PAGE]))).collect()))
    }

    fn pieces(at: u64, length: usize, mut each: impl FnMut(usize, usize, std::ops::Range<usize>)) {
        let (mut at, mut done) = (at as usize, 0);
        while done < length {
            let inside = at % PAGE;
            let count = (PAGE - inside).min(length - done);
            each(at / PAGE, inside, done..done + count);
            at += count;
            done += count;
        }
    }
}

impl Pmem for Heap {
    fn len(&self) -> u64 {
        (self.0.len() * PAGE) as u64
    }

    fn durability(&self) -> Durability {
        Durability::ProcessCrash
    }

    fn store(&self, at: u64, from: &[u8]) {
        Self::pieces(at, from.len(), |page, inside, piece| {
            let mut page = self.0[page].lock().expect("no thread panicked with the lock");
            page[inside..inside + piece.len()].copy_from_slice(&from[piece]);
        });
    }

    fn store_summed(&self, _at: u64, _from: &[u8], _first: usize, _checksums: &mut [u32]) {
        unreachable!("a bare copy computes no checksum");
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.store(at, line);
    }

    fn fence(&self) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        Self::pieces(at, into.len(), |page, inside, piece| {
            let page = self.0[page].lock().expect("no thread panicked with the lock");
            let length = piece.len();
            into[piece].copy_from_slice(&page[inside..inside + length]);
        });
        Ok(())
    }

    fn load_summed(&self, _at: u64, _into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        unreachable!("a bare copy computes no checksum");
    }

    fn write_back(&self, _at: u64, _length: u64) {}
}

/// A device over memory of `size` bytes.
pub fn memory(size: usize) -> Arc<dyn BlockDevice> {
    Arc::new(MemoryDevice::new(Heap::new(size), 512).expect("a device"))
}

/// How long a request is parked before it is executed; `None` means forever.
pub type Delay = Arc<dyn Fn(&Request) -> Option<Duration> + Send + Sync>;

/// A device that parks each request, executes it after a delay, and then signals.
pub struct Slow {
    inner: Arc<dyn BlockDevice>,
    delay: Delay,
}

impl Slow {
    pub fn over(
        inner: Arc<dyn BlockDevice>,
        delay: impl Fn(&Request) -> Option<Duration> + Send + Sync + 'static,
    ) -> Arc<dyn BlockDevice> {
        Arc::new(Self { inner, delay: Arc::new(delay) })
    }
}

impl BlockDevice for Slow {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let (due, when_due) = channel();
        Ok(Box::new(SlowQueue {
            inner: self.inner.open_queue()?,
            delay: Arc::clone(&self.delay),
            event: Event::new()?,
            due,
            when_due,
            parked: 0,
        }))
    }
}

struct SlowQueue {
    inner: Box<dyn RequestQueue>,
    delay: Delay,
    event: Event,
    due: Sender<Request>,
    when_due: Receiver<Request>,
    parked: usize,
}

impl RequestQueue for SlowQueue {
    fn submit(&mut self, request: Request, _done: &mut Vec<Completion>) {
        self.parked += 1;
        let Some(delay) = (self.delay)(&request) else { return };
        let (due, waker): (_, Waker) = (self.due.clone(), self.event.waker());
        thread::spawn(move || {
            thread::sleep(delay);
            // The queue may already be dropped; then no thread waits for the request.
            let _ = due.send(request);
            waker.wake();
        });
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.event.clear();
        while let Ok(request) = self.when_due.try_recv() {
            self.parked -= 1;
            self.inner.submit(request, done);
        }
    }

    fn parked(&self) -> usize {
        self.parked
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        vec![self.event.descriptor()]
    }
}

/// Whether a request is executed.
type Selects = Box<dyn Fn(&Request) -> bool + Send>;

/// A device that holds all requests until `release` selects those to execute; shorter ones are executed first.
pub struct Gate {
    inner: Arc<dyn BlockDevice>,
    state: Arc<Mutex<GateState>>,
}

#[derive(Default)]
struct GateState {
    selects: Option<Selects>,
    held: usize,
    queues: Vec<Waker>,
}

impl Gate {
    pub fn over(inner: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Self { inner, state: Arc::default() })
    }

    /// Number of requests that were submitted and not executed.
    pub fn held(&self) -> usize {
        self.state.lock().expect("no thread panicked with the lock").held
    }

    pub fn wait_until_held(&self, count: usize) {
        until("requests are held", || self.held() >= count);
    }

    /// Executes the requests that `selects` selects, from now on.
    pub fn release(&self, selects: impl Fn(&Request) -> bool + Send + 'static) {
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        state.selects = Some(Box::new(selects));
        state.queues.iter().for_each(Waker::wake);
    }
}

impl BlockDevice for Gate {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let event = Event::new()?;
        self.state.lock().expect("no thread panicked with the lock").queues.push(event.waker());
        let (inner, state) = (self.inner.open_queue()?, Arc::clone(&self.state));
        Ok(Box::new(GateQueue { inner, state, held: Vec::new(), event }))
    }
}

struct GateQueue {
    inner: Box<dyn RequestQueue>,
    state: Arc<Mutex<GateState>>,
    held: Vec<Request>,
    event: Event,
}

impl RequestQueue for GateQueue {
    fn submit(&mut self, request: Request, _done: &mut Vec<Completion>) {
        self.held.push(request);
        self.state.lock().expect("no thread panicked with the lock").held += 1;
        self.event.signal();
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.event.clear();
        let mut state = self.state.lock().expect("no thread panicked with the lock");
        let Some(selects) = &state.selects else { return };
        let mut released: Vec<Request> = self.held.extract_if(.., |request| selects(request)).collect();
        released.sort_by_key(|request| request.range.len());
        state.held -= released.len();
        drop(state);
        released.into_iter().for_each(|request| self.inner.submit(request, done));
    }

    fn parked(&self) -> usize {
        self.held.len()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        vec![self.event.descriptor()]
    }
}

/// A device that fails every request with an error of one kind.
pub struct Failing(pub ErrorKind);

impl BlockDevice for Failing {
    fn geometry(&self) -> Geometry {
        memory(1 << 20).geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        Ok(Box::new(FailingQueue(self.0)))
    }
}

struct FailingQueue(ErrorKind);

impl RequestQueue for FailingQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        let result = Err(Error::new(self.0, "a fault of the test"));
        done.push(Completion { id: request.id, result, buffer: request.buffer });
    }

    fn poll(&mut self, _done: &mut Vec<Completion>) {}

    fn parked(&self) -> usize {
        0
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }
}

/// How often queues were called.
#[derive(Default)]
pub struct Calls {
    pub submit: AtomicUsize,
    pub submit_plugged: AtomicUsize,
    pub poll: AtomicUsize,
}

/// A device that counts the calls of its queues; a queue holds plugged requests back until the unplug, as the engine
/// does.
pub struct Counting {
    pub inner: Arc<dyn BlockDevice>,
    pub calls: Arc<Calls>,
}

impl BlockDevice for Counting {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let (inner, calls) = (self.inner.open_queue()?, Arc::clone(&self.calls));
        Ok(Box::new(CountingQueue { inner, calls, plugged: Vec::new() }))
    }
}

struct CountingQueue {
    inner: Box<dyn RequestQueue>,
    calls: Arc<Calls>,
    plugged: Vec<Request>,
}

impl RequestQueue for CountingQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.calls.submit.fetch_add(1, Ordering::SeqCst);
        self.inner.submit(request, done);
    }

    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.calls.submit_plugged.fetch_add(1, Ordering::SeqCst);
        self.plugged.push(request);
        if self.plugged.len() == 8 {
            self.unplug(done);
        }
    }

    fn unplug(&mut self, done: &mut Vec<Completion>) {
        self.plugged.drain(..).for_each(|request| self.inner.submit(request, done));
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.calls.poll.fetch_add(1, Ordering::SeqCst);
        self.unplug(done);
        self.inner.poll(done);
    }

    fn parked(&self) -> usize {
        self.inner.parked() + self.plugged.len()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        self.inner.wait_descriptors()
    }
}

/// A server on a unix socket in a temporary directory.
pub struct Served {
    pub server: Server,
    pub listen: Listen,
    pub path: PathBuf,
    pub directory: TempDir,
}

pub fn serve(device: Arc<dyn BlockDevice>) -> Served {
    serve_with(
        device,
        Options { export_name: "disk".into(), description: "a test".into(), ..Options::default() },
    )
}

pub fn serve_with(device: Arc<dyn BlockDevice>, options: Options) -> Served {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("nbd.sock");
    let listen = Listen::Unix(path.clone());
    let server = Server::start(device, listen.clone(), options).expect("a server");
    Served { server, listen, path, directory }
}

/// Waits for a condition.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Runs `test` and fails if it has not ended after half a minute, so that no test can hang.
pub fn in_time(test: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = channel();
    let worker = thread::spawn(move || {
        test();
        let _ = sender.send(());
    });
    match receiver.recv_timeout(Duration::from_secs(30)) {
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("the test did not end in time"),
        _ => {
            if let Err(panic) = worker.join() {
                std::panic::resume_unwind(panic);
            }
        }
    }
}
