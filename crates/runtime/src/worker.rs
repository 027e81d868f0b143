//! The background worker of one cache: a thread for writeback, reclaim, and marks of idle lanes.
//!
//! Invariants: the thread sleeps until the backing device, the engine or a timeout wakes it; stopping it leaves dirty data in
//! the region. If it panics and the process continues, the cache refuses all requests, including waiting ones: no request
//! waits for space that no thread can free.
//!
//! Elsewhere: the thread's scheduling and signals (`prepare`).

use crate::queue::TaskWaker;
use cbd_backing::{Backing, PollableQueue};
use cbd_engine::{BackgroundWorker, Cache, Environment, Step};
use cbd_export::wake::{Event, Interest, WaitSet, Waker};
use cbd_types::{BackingQueue, Epoch, Error, ErrorKind, Origin, Result};
use parking_lot::{Condvar, Mutex};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::thread::JoinHandle;
use std::time::Duration;

/// Maximum number of writeback operations in flight to the backing device.
const DEPTH: usize = 64;

/// Notifies threads when a background worker has drained an epoch or has no work left.
#[derive(Debug, Default)]
pub struct Rounds {
    /// While no thread watches, a round ends with only a fence and a load.
    watching: AtomicUsize,
    ended: Mutex<u64>,
    changed: Condvar,
}

impl Rounds {
    /// Starts to count rounds, for a thread that waits for them.
    #[must_use]
    pub fn watch(&self) -> RoundsWatch<'_> {
        self.watching.fetch_add(1, Ordering::SeqCst);
        // If a round does not read this increment, its changes are visible to the thread that watches.
        fence(Ordering::SeqCst);
        RoundsWatch(self)
    }

    fn end_one(&self) {
        fence(Ordering::SeqCst);
        if self.watching.load(Ordering::SeqCst) > 0 {
            *self.ended.lock() += 1;
            self.changed.notify_all();
        }
    }
}

/// Makes the background worker count its rounds while this value lives.
#[derive(Debug)]
pub struct RoundsWatch<'a>(&'a Rounds);

impl RoundsWatch<'_> {
    /// The number of the last round that ended.
    #[must_use]
    pub fn ended(&self) -> u64 {
        *self.0.ended.lock()
    }

    /// Waits until a round after `last` has ended, or `timeout` has passed.
    pub fn wait_for_next(&self, last: u64, timeout: Duration) {
        let mut ended = self.0.ended.lock();
        self.0.changed.wait_while_for(&mut ended, |ended| *ended == last, timeout);
    }
}

impl Drop for RoundsWatch<'_> {
    fn drop(&mut self) {
        self.0.watching.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The running thread; dropping it stops it.
#[derive(Debug)]
pub struct Worker {
    stop: Arc<AtomicBool>,
    waker: Waker,
    rounds: Arc<Rounds>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread of `cache`; it calls `prepare` first.
    ///
    /// # Errors
    /// If the system refuses a thread, a descriptor or a ring.
    pub fn start<E: Environment>(
        name: &str,
        environment: Arc<E>,
        cache: &Arc<Cache<E>>,
        backing: &dyn Backing,
        prepare: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let event = Event::new()?;
        let waker = event.waker();
        cache.set_worker_waker(Arc::new(TaskWaker(event.waker())).into());
        let mut queue = backing.open_queue(DEPTH)?;
        queue.set_origin(Origin::Writeback);
        let descriptor = queue.wait_descriptor();
        let worker = BackgroundWorker::new(Arc::clone(cache), queue, backing.geometry());
        let stop = Arc::new(AtomicBool::new(false));
        let cache = Arc::clone(cache);
        let rounds = Arc::new(Rounds::default());
        let mut main = WorkerLoop {
            environment,
            cache: Arc::clone(&cache),
            worker,
            event,
            descriptor,
            stop: Arc::clone(&stop),
            rounds: Arc::clone(&rounds),
            drained: Epoch(0),
        };
        let thread = std::thread::Builder::new()
            .name(format!("cbd-worker-{name}"))
            .spawn(move || {
                prepare();
                let ended = std::panic::catch_unwind(AssertUnwindSafe(|| main.run()));
                if ended.is_err() {
                    tracing::error!("the background worker of a cache failed: it takes no more requests");
                    cache.abandon();
                }
            })
            .map_err(|error| {
                Error::new(ErrorKind::System, format!("no thread for {name}")).caused_by(error)
            })?;
        Ok(Self { stop, waker, rounds, thread: Some(thread) })
    }

    /// The notifier of the worker's progress.
    #[must_use]
    pub const fn rounds(&self) -> &Arc<Rounds> {
        &self.rounds
    }

    /// Stops the thread and waits for it; it waits only for its operations in flight.
    pub fn stop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

struct WorkerLoop<E: Environment> {
    environment: Arc<E>,
    cache: Arc<Cache<E>>,
    worker: BackgroundWorker<E, Box<dyn PollableQueue>>,
    event: Event,
    descriptor: i32,
    stop: Arc<AtomicBool>,
    rounds: Arc<Rounds>,
    /// The drained epoch after the last step.
    drained: Epoch,
}

impl<E: Environment> WorkerLoop<E> {
    fn run(&mut self) {
        let mut waiting = WaitSet::new();
        waiting.add(self.event.descriptor(), Interest::Read);
        waiting.add(self.descriptor, Interest::Read);
        loop {
            // Cleared before any state is read, including `stop`, so that any later signal ends the next wait.
            self.event.clear();
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let step = self.worker.step();
            let drained = self.cache.drained_epoch();
            if drained != self.drained || matches!(step, Step::Idle { .. }) {
                self.drained = drained;
                self.rounds.end_one();
            }
            let timeout = match step {
                Step::Busy => continue,
                Step::WaitBacking => None,
                Step::Idle { until_ms } => until_ms.map(|until| {
                    let left = until.saturating_sub(self.environment.monotonic_ms());
                    Duration::from_millis(left.max(1))
                }),
            };
            if let Err(error) = waiting.wait(timeout) {
                tracing::error!("the background worker cannot wait: {error}");
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ProcessEnvironment;
    use cbd_backing::{BackingFile, Identity, Options};
    use cbd_engine::{Admission, BackendSpec, FormatOptions, Settings, Transport};
    use cbd_export::wait_any;
    use cbd_pmem::Mapping;
    use cbd_types::backing::BackingDone;
    use cbd_types::{BackingGeometry, BackingOp, ByteRange, HostId, OpToken, Region};
    use std::sync::mpsc;
    use std::time::Instant;

    /// An empty cache without a background worker.
    pub(crate) fn cache(
        environment: &Arc<ProcessEnvironment>,
        settings: Settings,
    ) -> Arc<Cache<ProcessEnvironment>> {
        let region = Region::new(Mapping::anonymous(4 << 20).unwrap());
        let options = FormatOptions { segment_size: Some(64 << 10), ..FormatOptions::default() };
        let transport = Transport::format(Arc::clone(environment), region, &options).unwrap();
        let backend = transport
            .create_backend(&BackendSpec {
                host: HostId(0),
                path: "disk".to_owned(),
                identity: "disk".to_owned(),
                size: 1 << 20,
                sector: 512,
                cache_bytes: Some(1 << 20),
                lanes_max: 1,
                handlers: 1,
                data_crc: true,
                settings,
            })
            .unwrap();
        transport.open_cache(backend).unwrap()
    }

    /// A disk whose queues panic.
    struct Panicking(BackingFile);

    struct PanickingQueue(Box<dyn PollableQueue>);

    impl Backing for Panicking {
        fn geometry(&self) -> BackingGeometry {
            self.0.geometry()
        }

        fn identity(&self) -> Identity {
            self.0.identity()
        }

        fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>> {
            Ok(Box::new(PanickingQueue(self.0.open_queue(depth)?)))
        }

        fn describe(&self) -> String {
            "a disk that panics".to_owned()
        }
    }

    impl BackingQueue for PanickingQueue {
        fn submit(&mut self, _token: OpToken, _op: BackingOp) {
            panic!("on purpose");
        }

        fn poll(&mut self, done: &mut Vec<BackingDone>) {
            self.0.poll(done);
        }

        fn wait(&mut self, done: &mut Vec<BackingDone>) {
            self.0.wait(done);
        }

        fn in_flight(&self) -> usize {
            0
        }

        fn depth(&self) -> usize {
            self.0.depth()
        }
    }

    impl PollableQueue for PanickingQueue {
        fn wait_descriptor(&self) -> i32 {
            self.0.wait_descriptor()
        }
    }

    #[test]
    fn when_the_background_worker_panics_a_write_that_waits_for_space_ends_with_an_error() {
        let environment = Arc::new(ProcessEnvironment::new());
        let cache = cache(&environment, Settings::default());
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let backing = Panicking(BackingFile::open(disk.path(), Options::default()).unwrap());
        let mut worker = Worker::start("test", environment, &cache, &backing, || ()).unwrap();
        let event = Event::new().unwrap();
        let waker = Arc::new(TaskWaker(event.waker())).into();
        let end = Instant::now() + Duration::from_secs(60);
        let error = loop {
            assert!(Instant::now() < end, "the write waits for ever");
            match cache.write(ByteRange::at(0, 4096), &[7; 4096], &waker) {
                Ok(Admission::Done(_)) => {}
                Ok(Admission::Full) => {
                    let woken = wait_any(&[event.descriptor()], Some(Duration::from_secs(60)));
                    assert_eq!(woken.unwrap(), Some(0), "the waiting write was not woken");
                }
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::Stopped);
        assert!(cache.is_abandoned());
        worker.stop();
    }

    #[test]
    fn a_thread_that_watches_the_rounds_learns_that_an_epoch_is_drained() {
        let environment = Arc::new(ProcessEnvironment::new());
        let cache = cache(&environment, Settings::default());
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(1 << 20).unwrap();
        let backing = BackingFile::open(disk.path(), Options::default()).unwrap();
        let mut worker = Worker::start("test", environment, &cache, &backing, || ()).unwrap();
        let event = Event::new().unwrap();
        let waker = Arc::new(TaskWaker(event.waker())).into();
        let limit = Duration::from_secs(60);
        for _ in 0..50 {
            let written = cache.write(ByteRange::at(0, 4096), &[7; 4096], &waker).unwrap();
            assert!(matches!(written, Admission::Done(_)));
            let epoch = cache.request_drain();
            let watch = worker.rounds().watch();
            loop {
                let last = watch.ended();
                if cache.is_drained(epoch) {
                    break;
                }
                let begun = Instant::now();
                watch.wait_for_next(last, limit);
                assert!(begun.elapsed() < limit, "no round of the worker has woken the thread");
            }
        }
        worker.stop();
    }

    #[test]
    fn a_worker_that_is_stopped_at_any_moment_ends() {
        let (ended, end) = mpsc::channel();
        std::thread::spawn(move || {
            let environment = Arc::new(ProcessEnvironment::new());
            let cache = cache(&environment, Settings::default());
            let disk = tempfile::NamedTempFile::new().unwrap();
            disk.as_file().set_len(1 << 20).unwrap();
            let backing = BackingFile::open(disk.path(), Options::default()).unwrap();
            for _ in 0..400 {
                let mut worker =
                    Worker::start("test", Arc::clone(&environment), &cache, &backing, || ()).unwrap();
                // Keeps the worker busy, so that the stop can occur at any point of its loop.
                for _ in 0..200 {
                    worker.waker.wake();
                }
                worker.stop();
            }
            ended.send(()).unwrap();
        });
        assert_eq!(end.recv_timeout(Duration::from_secs(60)), Ok(()), "a worker did not stop");
    }
}
