//! The threads of a device: one for each of its queues.
//!
//! Invariants: a thread offers its slots itself, since the kernel binds them to it, and acquires all its resources
//! before that; a thread that ends with an error reports it; memory that the kernel may write to is freed only after
//! its thread has ended.
//!
//! Elsewhere: the work of a thread ([`crate::worker`]), the start of the device ([`crate::export`]).

use crate::device::Device;
use crate::ring::{self, LentMemory, Ring};
use crate::system;
use crate::thread_control::{Order, ThreadControl};
use crate::worker::{WATCHES, Worker};
use cbd_export::{BlockDevice, start_thread, system_error};
use cbd_types::{Context, Error, ErrorKind, Result};
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Runs at the beginning of each thread that serves a queue.
pub type ThreadSetup = Arc<dyn Fn() + Send + Sync>;

/// Timeout of the start of all threads.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// The parameters of a starting thread.
struct ThreadParameters {
    queue: u16,
    depth: usize,
    capacity: usize,
    processors: Vec<usize>,
    file: Arc<File>,
    device: Arc<dyn BlockDevice>,
    read_only: bool,
    setup: Option<ThreadSetup>,
    thread_control: Arc<ThreadControl>,
}

/// The threads of a device.
pub struct Service {
    thread_control: Arc<ThreadControl>,
    threads: Vec<JoinHandle<LentMemory>>,
}

impl Service {
    /// Starts a thread for each queue, and waits until all have offered their slots.
    ///
    /// # Errors
    /// If one of them cannot start; then none serves.
    pub fn start(
        kernel: &Device,
        device: &Arc<dyn BlockDevice>,
        read_only: bool,
        setup: Option<&ThreadSetup>,
    ) -> Result<Self> {
        let file = Arc::new(kernel.open()?);
        let (queues, depth, capacity) = kernel.dimensions();
        let mut service = Self { thread_control: Arc::new(ThreadControl::new()?), threads: Vec::new() };
        let (started, starts) = mpsc::channel();
        for queue in 0..queues {
            let parameters = ThreadParameters {
                queue,
                depth: usize::from(depth),
                capacity,
                processors: kernel.processors(queue),
                file: Arc::clone(&file),
                device: Arc::clone(device),
                read_only,
                setup: setup.cloned(),
                thread_control: Arc::clone(&service.thread_control),
            };
            let started = started.clone();
            let thread = start_thread(format!("cbd-ublk{}.{queue}", kernel.number()), move || {
                run(parameters, &started)
            })?;
            service.threads.push(thread);
        }
        drop(started);
        let end = Instant::now() + START_TIMEOUT;
        for _ in 0..queues {
            let left = end.saturating_duration_since(Instant::now());
            starts.recv_timeout(left).unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::TimedOut, "the threads of a ublk device did not start in time"))
            })?;
        }
        Ok(service)
    }

    /// Lets requests reach to `size`, as the device does already.
    pub fn grow(&self, size: u64) {
        self.thread_control.grow(size);
    }

    /// Passes an order to all threads.
    pub fn order(&self, order: Order) {
        self.thread_control.order(order);
    }

    /// Waits for all threads; returns whether they ended by `end`. Otherwise they are detached, with their memory.
    pub fn join(&mut self, end: Instant) -> bool {
        let ended = self.thread_control.wait_until_none_serves(end);
        for thread in self.threads.drain(..) {
            if ended {
                ring::join(thread);
            }
        }
        ended
    }

    /// The error of a thread that ended without an order.
    pub fn failure(&self) -> Option<String> {
        self.thread_control.lock().failure.as_ref().map(Error::line)
    }
}

impl Drop for Service {
    /// For a start that failed: the slots that were offered end with the threads.
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.thread_control.order(Order::Leave);
            self.join(Instant::now() + START_TIMEOUT);
        }
    }
}

/// The body of a thread.
fn run(parameters: ThreadParameters, started: &Sender<Result<()>>) -> LentMemory {
    if let Some(setup) = &parameters.setup {
        setup();
    }
    // If the affinity cannot be set, the scheduler chooses.
    let _ = system::run_on(&parameters.processors);
    let thread_control = Arc::clone(&parameters.thread_control);
    thread_control.change(|state| state.serving += 1);
    let mut worker = match prepare(parameters) {
        Ok(worker) => worker,
        Err(error) => {
            thread_control.change(|state| state.serving -= 1);
            let _ = started.send(Err(error));
            return LentMemory::default();
        }
    };
    let _ = started.send(Ok(()));
    let served = worker.serve();
    // The ring is closed before the thread is reported as ended.
    let lent = worker.into_ring().into_memory();
    thread_control.change(|state| {
        state.serving -= 1;
        if let Err(error) = served {
            state.failure.get_or_insert(error);
        }
    });
    lent
}

fn prepare(parameters: ThreadParameters) -> Result<Worker> {
    let what = || format!("queue {} of a ublk device", parameters.queue);
    let queue = parameters.device.open_queue().context(what)?;
    let watches = WATCHES + queue.wait_descriptors().len();
    let mut ring =
        Ring::new(&parameters.file, parameters.queue, parameters.depth, parameters.capacity, watches)
            .map_err(|error| system_error("its ring", &error))
            .context(what)?;
    ring.offer_all()
        .map_err(|error| system_error("the kernel does not take its slots", &error))
        .context(what)?;
    Ok(Worker::new(
        ring,
        queue,
        parameters.device.geometry(),
        parameters.read_only,
        parameters.thread_control,
    ))
}
