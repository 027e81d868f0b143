//! A stage: one cache with its maintainer and its clients, each a scheduled thread, over the simulator's memory and disk.
//!
//! Always true here: threads sleep until they are woken, and time passes only while the maintainer has nothing to do; what is
//! judged at the end is that all that was acknowledged is on the disk, without anybody having asked for it.

use crate::aftermath::{self, hold};
use crate::bell::Bell;
use crate::client::Client;
use crate::points::{self, spin};
use crate::ports::{ModelEnvironment, ModelMemory, ModelQueue};
use crate::setup::{Start, must};
use cbd_device::Device;
use cbd_engine::{Cache, Consistency, Maintainer, Step, Transport};
use cbd_sim::{CrashMemory, Oracle, Seeded, SimDisk, SimEnvironment};
use cbd_types::{BackendId, Region};
use parking_lot::{Mutex, MutexGuard};
use shuttle::thread::JoinHandle;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What was judged in an execution, by kind.
pub type Judged = BTreeMap<&'static str, u64>;

/// The stage.
pub struct Stage {
    pub(crate) clock: Arc<SimEnvironment>,
    pub(crate) memory: CrashMemory,
    pub(crate) disk: SimDisk,
    /// The cache that everybody uses.
    pub cache: Arc<Cache<ModelEnvironment>>,
    pub(crate) device: Arc<Device<ModelEnvironment>>,
    oracle: Mutex<Oracle>,
    backend: BackendId,
    seed: u64,
    /// Something on the region is broken: reads may fail, and the backing device may be no crash state.
    pub is_damaged: bool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    spawned: AtomicU64,
    maintainer_bell: Mutex<Option<Arc<Bell>>>,
    over: AtomicBool,
    judged: Mutex<Judged>,
}

impl Stage {
    /// A copy of `start` on which the execution with this seed plays.
    pub(crate) fn open(start: &Start, seed: u64, is_damaged: bool) -> Arc<Self> {
        let clock = Arc::new(SimEnvironment::new(seed, 0));
        let memory = start.memory.fork();
        let disk = start.disk.fork();
        disk.set_seed(seed);
        let environment = Arc::new(ModelEnvironment(Arc::clone(&clock)));
        let transport = must(Transport::open(environment, Region::new(ModelMemory(memory.clone()))));
        let cache = must(transport.open_cache(start.backend));
        Arc::new(Self {
            clock,
            device: Arc::new(Device::cached(Arc::clone(&cache), disk.geometry())),
            memory,
            disk,
            cache,
            oracle: Mutex::new(start.oracle.clone()),
            backend: start.backend,
            seed,
            is_damaged,
            threads: Mutex::new(Vec::new()),
            spawned: AtomicU64::new(0),
            maintainer_bell: Mutex::new(None),
            over: AtomicBool::new(false),
            judged: Mutex::new(Judged::new()),
        })
    }

    /// The oracle. To be let go before the next point.
    pub(crate) fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock()
    }

    /// Plans `crashes` ends of the world and `looks` at the bare disk at points of the execution, which usually has `usual`.
    pub(crate) fn plan(self: &Arc<Self>, crashes: u64, looks: u64, usual: u64) {
        let mut random = Seeded::new(self.seed ^ 0x6375_7473);
        for number in 0..crashes + looks {
            let (stage, seed) = (Arc::clone(self), random.next());
            points::plan(1 + random.below(usual), move || {
                if number < crashes { stage.judge_end(seed) } else { stage.judge_disk(seed) }
            });
        }
    }

    fn judge_end(&self, seed: u64) {
        let oracle = self.oracle().clone();
        let kind = aftermath::judge(&self.memory, &self.disk, &oracle, self.backend, seed);
        *self.judged.lock().entry(kind).or_default() += 1;
    }

    /// The disk alone, as a power cut would leave it now. Only `strict` promises something at every moment.
    fn judge_disk(&self, seed: u64) {
        let image = self.disk.image_after_power_cut(seed);
        hold(self.oracle().moment_of(&image, 0).map(|_| ()));
        *self.judged.lock().entry("disks").or_default() += 1;
    }

    /// A thread of the scene; `random` is its own.
    pub fn spawn(self: &Arc<Self>, work: impl FnOnce(&Arc<Self>, &mut Seeded) + Send + 'static) {
        let number = self.spawned.fetch_add(1, Ordering::Relaxed);
        let (stage, mut random) = (Arc::clone(self), Seeded::new(self.seed * 100 + number));
        let thread = shuttle::thread::spawn(move || work(&stage, &mut random));
        self.threads.lock().push(thread);
    }

    /// A thread with a queue to the device.
    pub fn client(self: &Arc<Self>, work: impl FnOnce(&mut Client, &mut Seeded) + Send + 'static) {
        self.spawn(move |stage, random| work(&mut Client::new(stage), random));
    }

    /// Begins writeback and reclaim. Returns when the maintainer can be woken.
    pub(crate) fn start_maintainer(self: &Arc<Self>) -> JoinHandle<()> {
        let bell = Bell::new();
        self.cache.set_maintenance_waker(bell.waker());
        *self.maintainer_bell.lock() = Some(Arc::clone(&bell));
        let stage = Arc::clone(self);
        shuttle::thread::spawn(move || stage.maintain(&bell))
    }

    fn maintain(&self, bell: &Bell) {
        let queue = ModelQueue(self.disk.queue(2));
        let mut maintainer = Maintainer::new(Arc::clone(&self.cache), queue, self.disk.geometry());
        while !self.over.load(Ordering::SeqCst) {
            match maintainer.step() {
                Step::Busy => {}
                Step::WaitBacking => spin(),
                Step::Idle { until_ms } => {
                    if bell.take() {
                        continue;
                    }
                    match until_ms {
                        // Time passes, but it must never be what helps a client that waits.
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

    /// Waits for the threads of the scene, and then until the maintainer sleeps.
    pub(crate) fn wait(&self) {
        loop {
            let Some(thread) = self.threads.lock().pop() else { break };
            if thread.join().is_err() {
                panic!("a thread of the scene panicked");
            }
        }
        let bell = self.maintainer_bell.lock().clone();
        let Some(bell) = bell else { return };
        while !bell.sleeps() {
            spin();
        }
    }

    /// Ends the maintainer.
    pub(crate) fn end(&self, maintainer: JoinHandle<()>) {
        self.over.store(true, Ordering::SeqCst);
        let bell = self.maintainer_bell.lock().clone();
        if let Some(bell) = bell {
            bell.waker().wake();
        }
        if maintainer.join().is_err() {
            panic!("the maintainer panicked");
        }
    }

    /// Everything is at rest: holds it against the oracle. Returns what was judged in this execution.
    pub(crate) fn judge_rest(&self) -> Judged {
        let status = self.cache.status();
        assert_eq!(status.dirty_records, 0, "the maintainer sleeps over dirty data: {status:?}");
        let counters = self.memory.counters();
        assert_eq!(
            (counters.loads_of_unfenced, counters.stores_over_unfenced),
            (0, 0),
            "loads of what was not fenced, stores over what another thread had not fenced"
        );
        assert!(status.damaged.is_empty(), "damage: {:?}", status.damaged);
        hold(self.oracle().check_everything(&self.disk.durable()));
        self.judge_end(self.seed);
        self.judged.lock().clone()
    }

    /// Everything is at rest but what was damaged in the beginning, and that is known.
    pub(crate) fn judge_damage(&self) -> Judged {
        let status = self.cache.status();
        assert_eq!(status.dirty_records, 0, "the maintainer sleeps over dirty data: {status:?}");
        assert!(!status.damaged.is_empty(), "damage is not known: {status:?}");
        self.judged.lock().clone()
    }

    /// Whether every moment of the disk has to be a crash state.
    pub(crate) fn is_strict(&self) -> bool {
        self.cache.settings().consistency == Consistency::Strict && !self.is_damaged
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Stage").field("seed", &self.seed).finish_non_exhaustive()
    }
}
