//! A stage: one cache with its background worker and its clients, each a scheduled thread, over the
//! simulator's memory and disk.
//!
//! Invariants: threads sleep until they are woken, and time advances only while the background worker is idle. The
//! check at the end requires that all acknowledged data is on the disk without an explicit request.

use crate::aftermath::{self, hold};
use crate::bell::Bell;
use crate::client::Client;
use crate::points::{self, spin};
use crate::ports::{ModelEnvironment, ModelMemory, ModelQueue};
use crate::setup::{Start, must};
use cbd_device::Device;
use cbd_engine::{BackgroundWorker, Cache, MetadataPlace, Step, Transport};
use cbd_sim::oracle::Moment;
use cbd_sim::{Content, CrashMemory, Oracle, Seeded, SimDisk, SimEnvironment};
use cbd_types::{BackendId, ByteRange, Region, VerifiedMetadata};
use parking_lot::{Mutex, MutexGuard};
use shuttle::thread::JoinHandle;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Number of checks in an execution, by kind.
pub type Checked = BTreeMap<&'static str, u64>;

/// Writes that completed, and those of them that a flush has covered.
#[derive(Default)]
struct Flushed {
    completed: Vec<(Moment, Written)>,
    certain: Vec<Written>,
}

/// A write that completed: its range and its content.
pub(crate) type Written = (ByteRange, Content);

/// The stage.
pub struct Stage {
    pub(crate) clock: Arc<SimEnvironment>,
    pub(crate) memory: CrashMemory,
    pub(crate) disk: SimDisk,
    transport: Arc<Transport<ModelEnvironment>>,
    /// The cache that all threads use.
    pub cache: Arc<Cache<ModelEnvironment>>,
    pub(crate) device: Arc<Device<ModelEnvironment>>,
    oracle: Mutex<Oracle>,
    backend: BackendId,
    seed: u64,
    /// Whether data in the region is damaged: reads may fail, and the backing device may not be crash-consistent.
    pub is_damaged: bool,
    flushed: Mutex<Flushed>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    spawned: AtomicU64,
    worker_bell: Mutex<Option<Arc<Bell>>>,
    over: AtomicBool,
    checked: Mutex<Checked>,
}

impl Stage {
    /// A copy of `start` for the execution with this seed.
    pub(crate) fn open(start: &Start, seed: u64, is_damaged: bool, is_uncached: bool) -> Arc<Self> {
        let clock = Arc::new(SimEnvironment::new(seed, 0));
        let memory = start.memory.fork();
        let disk = start.disk.fork();
        disk.set_seed(seed);
        let environment = Arc::new(ModelEnvironment(Arc::clone(&clock)));
        let transport = must(Transport::open(environment, Region::new(ModelMemory(memory.clone()))));
        let cache = must(transport.open_cache(start.backend));
        Arc::new(Self {
            clock,
            device: Arc::new(match is_uncached {
                true => Device::uncached(disk.geometry()),
                false => Device::cached(Arc::clone(&cache), disk.geometry()),
            }),
            memory,
            disk,
            transport,
            cache,
            oracle: Mutex::new(start.oracle.clone()),
            backend: start.backend,
            seed,
            is_damaged,
            flushed: Mutex::new(Flushed::default()),
            threads: Mutex::new(Vec::new()),
            spawned: AtomicU64::new(0),
            worker_bell: Mutex::new(None),
            over: AtomicBool::new(false),
            checked: Mutex::new(Checked::new()),
        })
    }

    /// The oracle. Release it before the next point.
    pub(crate) fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock()
    }

    /// Plans `crashes` ends of the world at random points of the execution, which usually has `usual` points. If `looks` is set,
    /// the content of the disk alone is checked at each step of the disk. Only a `strict` cache guarantees a consistent disk at
    /// every moment.
    pub(crate) fn plan(self: &Arc<Self>, crashes: u64, looks: bool, usual: u64) {
        let mut random = Seeded::new(self.seed ^ 0x6375_7473);
        for _ in 0..crashes {
            let (stage, seed) = (Arc::clone(self), random.next());
            points::plan(1 + random.below(usual), move || stage.check_end(seed));
        }
        if looks {
            let (stage, random) = (Arc::clone(self), Mutex::new(random));
            points::set_disk_check(move || {
                let seed = random.lock().next();
                stage.check_disk(seed);
            });
        }
    }

    /// Verifies the metadata of the region and of the cache. Returns the number of copies that it has repaired.
    pub fn verify_metadata(&self) -> u64 {
        let (mut place, mut found) = (MetadataPlace::default(), VerifiedMetadata::default());
        while !place.is_at_end() {
            must(self.transport.verify_metadata(self.backend, &mut place, &mut found));
        }
        assert!(found.unrepaired == 0 && found.error.is_none(), "{found:?}");
        found.repaired
    }

    fn check_end(&self, seed: u64) {
        let oracle = self.oracle().clone();
        let flushed = self.flushed.lock().certain.clone();
        let kind = aftermath::check(&self.memory, &self.disk, &oracle, self.backend, &flushed, seed);
        *self.checked.lock().entry(kind).or_default() += 1;
    }

    /// Checks the content of the disk alone after a power cut at this moment.
    fn check_disk(&self, seed: u64) {
        let image = self.disk.image_after_power_cut(seed);
        hold(self.oracle().moment_of(&image, 0).map(|_| ()));
        *self.checked.lock().entry("disks").or_default() += 1;
    }

    /// Records a write that completed at `now`; with `fua` it counts as flushed.
    pub(crate) fn note_written(&self, now: Moment, written: Written, fua: bool) {
        let mut flushed = self.flushed.lock();
        if fua {
            flushed.certain.push(written);
        } else {
            flushed.completed.push((now, written));
        }
    }

    /// Records the completion of a flush that was submitted at `submitted`.
    pub(crate) fn note_flushed(&self, submitted: Moment) {
        let mut flushed = self.flushed.lock();
        let (certain, rest) =
            std::mem::take(&mut flushed.completed).into_iter().partition(|(now, _)| *now < submitted);
        flushed.completed = rest;
        let certain: Vec<(Moment, Written)> = certain;
        flushed.certain.extend(certain.into_iter().map(|(_, written)| written));
    }

    /// Starts a thread of the scene; it has its own `random`.
    pub fn spawn(self: &Arc<Self>, work: impl FnOnce(&Arc<Self>, &mut Seeded) + Send + 'static) {
        let number = self.spawned.fetch_add(1, Ordering::Relaxed);
        let (stage, mut random) = (Arc::clone(self), Seeded::new(self.seed * 100 + number));
        let thread = shuttle::thread::spawn(move || work(&stage, &mut random));
        self.threads.lock().push(thread);
    }

    /// Starts a thread with a queue to the device.
    pub fn client(self: &Arc<Self>, work: impl FnOnce(&mut Client, &mut Seeded) + Send + 'static) {
        self.spawn(move |stage, random| work(&mut Client::new(stage), random));
    }

    /// Holds the route of the device until all queues are quiet. Then requests go through the cache, if `changes` is set, and as
    /// before if not.
    ///
    /// # Panics
    /// If a queue is quiet and then is not.
    pub fn hold_route(&self, changes: bool) {
        let bell = Bell::new();
        let Some(held) = self.device.hold(bell.waker()) else { panic!("another thread holds the route") };
        while held.busy_queues() > 0 {
            bell.wait();
        }
        if changes {
            // What went straight to the disk is flushed by the next flush of a client.
            self.cache.note_unflushed();
            let changed = held.change(Some(Arc::clone(&self.cache)));
            assert!(changed.is_ok(), "a queue was quiet and is no more");
        }
    }

    /// Starts writeback and reclaim. Returns when the background worker can be woken.
    pub(crate) fn start_worker(self: &Arc<Self>) -> JoinHandle<()> {
        let bell = Bell::new();
        self.cache.set_worker_waker(bell.waker());
        *self.worker_bell.lock() = Some(Arc::clone(&bell));
        let stage = Arc::clone(self);
        shuttle::thread::spawn(move || stage.maintain(&bell))
    }

    fn maintain(&self, bell: &Bell) {
        let queue = ModelQueue(self.disk.queue(2));
        let mut worker = BackgroundWorker::new(Arc::clone(&self.cache), queue, self.disk.geometry());
        while !self.over.load(Ordering::SeqCst) {
            match worker.step() {
                Step::Busy => {}
                Step::WaitBacking => spin(),
                Step::Idle { until_ms } => {
                    if bell.take() {
                        continue;
                    }
                    match until_ms {
                        // Time passes. A waiting client must never depend on that.
                        Some(until) if !self.cache.status().writers_waiting => {
                            let now = self.clock.clock_ms();
                            self.clock.advance(until.saturating_sub(now));
                        }
                        _ => bell.wait(),
                    }
                }
            }
        }
    }

    /// Waits for the threads of the scene, and then until the background worker sleeps.
    pub(crate) fn wait(&self) {
        loop {
            let Some(thread) = self.threads.lock().pop() else { break };
            if thread.join().is_err() {
                panic!("a thread of the scene panicked");
            }
        }
        let bell = self.worker_bell.lock().clone();
        let Some(bell) = bell else { return };
        while !self.over.load(Ordering::SeqCst) && !bell.sleeps() {
            spin();
        }
    }

    /// Makes the background worker end after its next step.
    pub fn end_worker(&self) {
        self.over.store(true, Ordering::SeqCst);
        let bell = self.worker_bell.lock().clone();
        if let Some(bell) = bell {
            bell.waker().wake();
        }
    }

    /// Ends the background worker.
    pub(crate) fn end(&self, worker: JoinHandle<()>) {
        self.end_worker();
        if worker.join().is_err() {
            panic!("the background worker panicked");
        }
    }

    /// Compares the world at rest with the oracle. Returns the number of checks of this execution.
    pub(crate) fn check_rest(&self) -> Checked {
        let status = self.cache.status();
        assert_eq!(status.dirty_records, 0, "the worker sleeps despite dirty data: {status:?}");
        let counters = self.memory.counters();
        assert_eq!(
            (counters.loads_of_unfenced, counters.stores_over_unfenced),
            (0, 0),
            "loads of what was not fenced, stores over what another thread had not fenced"
        );
        assert!(status.damaged.is_empty(), "damage: {:?}", status.damaged);
        hold(self.oracle().check_everything(&self.disk.durable()));
        self.check_end(self.seed);
        self.checked.lock().clone()
    }

    /// The cache was stopped: checks that the next process recovers all acknowledged data.
    pub(crate) fn check_stopped(&self) -> Checked {
        self.check_end(self.seed);
        self.checked.lock().clone()
    }

    /// The world is at rest: checks that no data is dirty, and that the cache has recorded the damage from the beginning.
    pub(crate) fn check_damage(&self) -> Checked {
        let status = self.cache.status();
        assert_eq!(status.dirty_records, 0, "the worker sleeps despite dirty data: {status:?}");
        assert!(!status.damaged.is_empty(), "damage is not known: {status:?}");
        self.checked.lock().clone()
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Stage").field("seed", &self.seed).finish_non_exhaustive()
    }
}
