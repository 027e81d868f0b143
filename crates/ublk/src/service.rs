//! The threads of a device: one for each of its queues.
//!
//! Invariants: a thread offers its slots itself, since the kernel binds them to it, and acquires all its
//! resources before that; a thread that ends with an error reports it; memory that the kernel may write to is
//! freed only after its thread.
//!
//! Elsewhere: the work of a thread ([`crate::worker`]), the start of the device ([`crate::export`]).

use crate::device::Device;
use crate::life::{Life, Order};
use crate::ring::{self, Lent, Ring};
use crate::system;
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
struct Duty {
    queue: u16,
    depth: usize,
    capacity: usize,
    processors: Vec<usize>,
    file: Arc<File>,
    device: Arc<dyn BlockDevice>,
    read_only: bool,
    setup: Option<ThreadSetup>,
    life: Arc<Life>,
}

/// The threads of a device.
pub struct Service {
    life: Arc<Life>,
    threads: Vec<JoinHandle<Lent>>,
}

impl Service {
    /// Starts a thread for each queue, and waits until all have offered their slots.
    ///
    /// # Errors
    /// When one of them cannot start; then none serves.
    pub fn start(
        kernel: &Device,
        device: &Arc<dyn BlockDevice>,
        read_only: bool,
        setup: Option<&ThreadSetup>,
    ) -> Result<Self> {
        let file = Arc::new(kernel.open()?);
        let (queues, depth, capacity) = kernel.shape();
        let mut service = Self { life: Arc::new(Life::new()?), threads: Vec::new() };
        let (begun, beginning) = mpsc::channel();
        for queue in 0..queues {
            let duty = Duty {
                queue,
                depth: usize::from(depth),
                capacity,
                processors: kernel.processors(queue),
                file: Arc::clone(&file),
                device: Arc::clone(device),
                read_only,
                setup: setup.cloned(),
                life: Arc::clone(&service.life),
            };
            let begun = begun.clone();
            let thread =
                start_thread(format!("cbd-ublk{}.{queue}", kernel.number()), move || run(duty, &begun))?;
            service.threads.push(thread);
        }
        drop(begun);
        let end = Instant::now() + START_TIMEOUT;
        for _ in 0..queues {
            let left = end.saturating_duration_since(Instant::now());
            beginning.recv_timeout(left).unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::TimedOut, "the threads of a ublk device do not come up"))
            })?;
        }
        Ok(service)
    }

    /// Passes an order to all threads.
    pub fn order(&self, order: Order) {
        self.life.order(order);
    }

    /// Waits for all threads; returns whether they ended by `end`. Threads that did not are detached, with
    /// their memory.
    pub fn join(&mut self, end: Instant) -> bool {
        let ended = self.life.wait_until_none_serves(end);
        for thread in self.threads.drain(..) {
            if ended {
                ring::join(thread);
            }
        }
        ended
    }

    /// Why a thread ended that was not asked to.
    pub fn failure(&self) -> Option<String> {
        self.life.look().failure.as_ref().map(Error::line)
    }
}

impl Drop for Service {
    /// For a start that failed: the slots that were offered end with the threads.
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.life.order(Order::Leave);
            self.join(Instant::now() + START_TIMEOUT);
        }
    }
}

/// The body of a thread.
fn run(duty: Duty, begun: &Sender<Result<()>>) -> Lent {
    if let Some(setup) = &duty.setup {
        setup();
    }
    // If the affinity cannot be set, the scheduler chooses.
    let _ = system::run_on(&duty.processors);
    let life = Arc::clone(&duty.life);
    life.change(|state| state.serving += 1);
    let mut worker = match begin(duty) {
        Ok(worker) => worker,
        Err(error) => {
            life.change(|state| state.serving -= 1);
            let _ = begun.send(Err(error));
            return Lent::default();
        }
    };
    let _ = begun.send(Ok(()));
    let served = worker.serve();
    // The ring is closed before the thread is reported as ended.
    let lent = worker.into_ring().into_lent();
    life.change(|state| {
        state.serving -= 1;
        if let Err(error) = served {
            state.failure.get_or_insert(error);
        }
    });
    lent
}

fn begin(duty: Duty) -> Result<Worker> {
    let what = || format!("queue {} of a ublk device", duty.queue);
    let queue = duty.device.open_queue().context(what)?;
    let watches = WATCHES + queue.wait_descriptors().len();
    let mut ring = Ring::new(&duty.file, duty.queue, duty.depth, duty.capacity, watches)
        .map_err(|error| system_error("its ring", &error))
        .context(what)?;
    ring.offer_all().map_err(|error| system_error("its slots are not taken", &error)).context(what)?;
    Ok(Worker::new(ring, queue, duty.device.geometry(), duty.read_only, duty.life))
}
