//! Real threads over one cache: clients that submit one or several requests at once and sleep until they are woken, a
//! background worker that sleeps, too, and a checker that simulates the loss of the region at random moments. The
//! clock never wakes the worker while a client waits.

use cbd_device::{Device, Queue};
use cbd_engine::{
    BackendSpec, BackgroundWorker, Cache, Consistency, FormatOptions, Settings, Step, Transport,
};
use cbd_sim::{
    Content, CrashMemory, OpenChange, Oracle, Seeded, SimDisk, SimEnvironment, SimQueue, Watchdog, Wish,
    from_environment,
};
use cbd_types::{AlignedBuffer, ByteRange, Completion, ErrorKind, Operation, Pmem, Region, Request};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

const SEGMENT: u64 = 64 << 10;
const SIZE: u64 = (8 << 20) + 77 * 512;
/// The device is divided among the clients in shares of this size.
const SHARE: u64 = 24 << 10;
const CLIENTS: u64 = 3;

/// Unparks a thread, and remembers the call.
struct Bell {
    rung: AtomicBool,
    thread: Thread,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.rung.store(true, Ordering::SeqCst);
        self.thread.unpark();
    }
}

impl Bell {
    fn of_this_thread() -> Arc<Self> {
        Arc::new(Self { rung: AtomicBool::new(false), thread: thread::current() })
    }

    /// Sleeps until the bell rings; false if it does not ring in time.
    fn wait(&self, at_most: Duration) -> bool {
        let end = Instant::now() + at_most;
        // An unpark can remain from a ring that was already consumed.
        while !self.rung.load(Ordering::SeqCst) && Instant::now() < end {
            thread::park_timeout(end.saturating_duration_since(Instant::now()));
        }
        self.rung.swap(false, Ordering::SeqCst)
    }
}

/// The state of one client.
struct ClientQueue {
    queue: Queue<SimEnvironment, SimQueue>,
    disk_queue: u64,
    bell: Arc<Bell>,
}

/// A request in `share`, mostly small.
fn wish(random: &mut Seeded, share: u64) -> Wish {
    let operation = match random.below(20) {
        0..10 => Operation::Write,
        10..15 => Operation::Read,
        15..18 => Operation::Flush,
        18 => Operation::WriteZeroes,
        _ => Operation::Discard,
    };
    let sectors = SHARE / 512;
    let first = random.below(sectors);
    let count = random.between(1, sectors - first);
    let count = if random.chance(700) { count.min(8) } else { count };
    let range = match operation {
        Operation::Flush => ByteRange::at(0, 0),
        _ => ByteRange::at(share * SHARE + first * 512, count * 512),
    };
    let fua = random.chance(50) && !matches!(operation, Operation::Read | Operation::Flush);
    Wish { operation, range, fua }
}

struct Scene {
    environment: Arc<SimEnvironment>,
    cache: Arc<Cache<SimEnvironment>>,
    memory: CrashMemory,
    disk: SimDisk,
    oracle: Mutex<Oracle>,
    /// Clients that have not ended.
    working: AtomicU64,
    seed: u64,
    /// Whether a thread flips bits of the region meanwhile.
    is_damaged: bool,
}

impl Scene {
    fn new(seed: u64, consistency: Consistency, is_damaged: bool) -> Self {
        let environment = Arc::new(SimEnvironment::new(seed, 0));
        let memory = CrashMemory::new(18 * SEGMENT + (256 << 10));
        let format = FormatOptions {
            segment_size: Some(SEGMENT),
            force: false,
            host_rows: 1,
            backend_rows: 1,
            blkdev_rows: 1,
        };
        let transport = Transport::format(Arc::clone(&environment), Region::new(memory.clone()), &format)
            .expect("a fresh region");
        let host = transport.register_host("threads", None).expect("an empty table");
        let backend = transport
            .create_backend(&BackendSpec {
                host,
                path: String::from("/simulated/disk"),
                identity: String::from("simulated"),
                size: SIZE,
                sector: 512,
                cache_bytes: Some(17 * SEGMENT),
                lanes_max: 2,
                handlers: 1,
                data_crc: true,
                settings: Settings { consistency, ..Settings::default() },
            })
            .expect("there is room");
        Self {
            environment,
            cache: transport.open_cache(backend).expect("a fresh cache"),
            memory,
            disk: SimDisk::new(SimDisk::ordinary(SIZE, 512), seed),
            oracle: Mutex::new(Oracle::new(SIZE, 512, SEGMENT / 4)),
            working: AtomicU64::new(CLIENTS),
            seed,
            is_damaged,
        }
    }

    fn oracle(&self) -> std::sync::MutexGuard<'_, Oracle> {
        self.oracle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits requests at once, and returns when all have completed.
    fn ask(&self, queue: &mut ClientQueue, wishes: &[Wish]) {
        let mut asked = Vec::new();
        let mut done: Vec<Completion> = Vec::new();
        for &Wish { operation, range, fua } in wishes {
            let (buffer, change, submitted) = {
                let mut oracle = self.oracle();
                let (buffer, change) = match operation {
                    Operation::Write => {
                        let content = oracle.fresh_content();
                        let payload = AlignedBuffer::from_slice(&oracle.payload(range, content));
                        (payload, Some(oracle.submit(range, content)))
                    }
                    Operation::Discard | Operation::WriteZeroes => {
                        (AlignedBuffer::default(), Some(oracle.submit(range, Content::ZEROES)))
                    }
                    Operation::Read => (AlignedBuffer::zeroed(range.len() as usize), None),
                    Operation::Flush => (AlignedBuffer::default(), None),
                };
                (buffer, change, oracle.now())
            };
            let id = asked.len() as u64;
            asked.push((change, submitted));
            queue.queue.submit_plugged(Request::unmarked(id, operation, range, fua, buffer), &mut done);
        }
        queue.queue.unplug(&mut done);
        let mut ended = 0;
        loop {
            for completion in done.drain(..) {
                let number = completion.id as usize;
                let (change, submitted) = &mut asked[number];
                self.answered(&wishes[number], change.take(), *submitted, completion);
                ended += 1;
            }
            if ended == wishes.len() {
                return;
            }
            if self.disk.in_flight_of(queue.disk_queue) > 0 {
                thread::yield_now();
            } else {
                assert!(
                    queue.bell.wait(Duration::from_secs(20)),
                    "seed {}: a client is never woken",
                    self.seed
                );
            }
            queue.queue.poll(&mut done);
        }
    }

    fn answered(&self, wish: &Wish, change: Option<OpenChange>, submitted: u64, completion: Completion) {
        let &Wish { operation, range, fua } = wish;
        let Completion { result, buffer, .. } = completion;
        if let Err(error) = result {
            let is_damage = matches!(error.kind(), ErrorKind::Media | ErrorKind::Damaged);
            let may_fail = self.is_damaged && is_damage && operation == Operation::Read;
            assert!(may_fail, "seed {}: {operation:?} of {range}: {error}", self.seed);
            return;
        }
        let mut oracle = self.oracle();
        match (operation, change) {
            (Operation::Read, _) => {
                let verdict = oracle.check_read(range, submitted, &buffer);
                verdict.unwrap_or_else(|violation| panic!("seed {}: {violation}", self.seed));
            }
            (Operation::Flush, _) => oracle.flushed(submitted),
            (_, Some(change)) => oracle.complete(change, fua),
            _ => {}
        }
    }

    fn client(&self, number: u64, requests: u64) {
        let mut random = Seeded::new(self.seed * 1000 + number);
        let bell = Bell::of_this_thread();
        let device = Arc::new(Device::cached(Arc::clone(&self.cache), self.disk.geometry()));
        let disk_queue = self.disk.queue(4);
        let number_of_disk_queue = disk_queue.number();
        let queue = Queue::new(device, disk_queue, Waker::from(Arc::clone(&bell)));
        let mut queue = ClientQueue { queue, disk_queue: number_of_disk_queue, bell };
        let shares = SIZE / SHARE / CLIENTS;
        let mut asked = 0;
        while asked < requests {
            let first = random.below(shares);
            let at_once = if random.chance(300) { random.between(2, 12) } else { 1 };
            // Changes go to the client's own shares only, at most one to each share; reads go anywhere.
            let own = (0..at_once).map(|more| (first + more) % shares * CLIENTS + number);
            let wishes: Vec<Wish> = own
                .map(|share| {
                    let mut wish = wish(&mut random, share);
                    if wish.operation == Operation::Read {
                        let elsewhere = random.below(shares * CLIENTS) * SHARE;
                        wish.range = ByteRange::at(elsewhere + wish.range.start % SHARE, wish.range.len());
                    }
                    wish
                })
                .collect();
            self.ask(&mut queue, &wishes);
            asked += at_once;
        }
        self.working.fetch_sub(1, Ordering::SeqCst);
        self.cache.request_drain();
    }

    /// Runs until the clients have ended and nothing is dirty; returns how often a client could continue only
    /// because the clock advanced.
    fn maintain(&self) -> u64 {
        let bell = Bell::of_this_thread();
        self.cache.set_worker_waker(Waker::from(Arc::clone(&bell)));
        let mut worker =
            BackgroundWorker::new(Arc::clone(&self.cache), self.disk.queue(4), self.disk.geometry());
        let mut rescued = 0;
        loop {
            match worker.step() {
                Step::Busy => {}
                Step::WaitBacking => thread::yield_now(),
                Step::Idle { until_ms } => {
                    if self.working.load(Ordering::SeqCst) == 0 && self.cache.status().dirty_records == 0 {
                        return rescued;
                    }
                    if !bell.wait(Duration::from_millis(200)) {
                        rescued += u64::from(self.cache.status().writers_waiting);
                        let now = self.environment.clock_ms();
                        self.environment.advance(until_ms.map_or(0, |until| until.saturating_sub(now)));
                    }
                }
            }
        }
    }

    /// Flips bits in the log.
    fn vandalize(&self) {
        let mut random = Seeded::new(self.seed + 1);
        let area = self.memory.len() - 18 * SEGMENT;
        while self.working.load(Ordering::SeqCst) > 0 {
            thread::sleep(Duration::from_millis(2));
            self.memory.flip(random.between(area + SEGMENT, self.memory.len() - 1), random.below(8) as u32);
        }
    }

    /// Resizes the index, again and again.
    fn resize(&self) -> u64 {
        let mut random = Seeded::new(self.seed + 2);
        let mut resized = 0;
        while self.working.load(Ordering::SeqCst) > 0 {
            let blocks = *random.pick(&[1, 130, 1000, 10_000]);
            self.cache.resize_index(blocks, thread::yield_now).expect("the cache runs");
            resized += 1;
        }
        resized
    }

    /// Checks the case that the region is lost at a random moment.
    fn check(&self) -> u64 {
        let mut random = Seeded::new(self.seed);
        let mut checked = 0;
        while self.working.load(Ordering::SeqCst) > 0 {
            thread::sleep(Duration::from_millis(5));
            let before = self.cache.status().backing_is_consistent;
            let image = self.disk.image_after_power_cut(random.next());
            // If a batch began or ended meanwhile, the image proves nothing.
            if before && self.cache.status().backing_is_consistent {
                let verdict = self.oracle().moment_of(&image, 0);
                verdict.unwrap_or_else(|violation| panic!("seed {}: {violation}", self.seed));
                checked += 1;
            }
        }
        checked
    }
}

fn run(consistency: Consistency, rounds: u64, is_damaged: bool) {
    run_beside(consistency, rounds, is_damaged, |_| 0);
}

/// Runs with a further thread that does `beside`; returns the sum of its results.
fn run_beside(consistency: Consistency, rounds: u64, is_damaged: bool, beside: fn(&Scene) -> u64) -> u64 {
    let mut sum = 0;
    let first = from_environment("CBD_SEED", 1);
    for seed in first..first + from_environment("CBD_ROUNDS", rounds) {
        let _watchdog = Watchdog::new(Duration::from_secs(120), format!("threads, seed {seed}"));
        let scene = Scene::new(seed, consistency, is_damaged);
        let requests = from_environment("CBD_REQUESTS", 1500);
        let (checked, rescued) = thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|number| {
                    scope.spawn({
                        let scene = &scene;
                        move || scene.client(number, requests)
                    })
                })
                .collect();
            let check = scope.spawn(|| if is_damaged { 0 } else { scene.check() });
            if is_damaged {
                scope.spawn(|| scene.vandalize());
            }
            let worker = scope.spawn(|| scene.maintain());
            let other = scope.spawn(|| beside(&scene));
            for client in clients {
                if client.join().is_err() {
                    // The other threads would wait for a client that has ended.
                    std::process::abort();
                }
            }
            sum += other.join().expect("it ends with the clients");
            (check.join().expect("no violation"), worker.join().expect("the worker ends"))
        });
        let counters = scene.memory.counters();
        assert_eq!((counters.loads_of_unfenced, counters.stores_over_unfenced), (0, 0), "seed {seed}");
        assert_eq!(rescued, 0, "seed {seed}: a client continued only because of the clock");
        if is_damaged {
            println!("damaged, seed {seed}: {:?}", scene.cache.status());
            continue;
        }
        let verdict = scene.oracle().check_everything(&scene.disk.durable());
        verdict.unwrap_or_else(|violation| panic!("seed {seed}: drained, and {violation}"));
        println!("{consistency:?}, seed {seed}: {checked} images checked, {:?}", scene.disk.counters());
        assert!(consistency != Consistency::Strict || checked > 0);
    }
    sum
}

#[test]
fn strict() {
    run(Consistency::Strict, 2, false);
}

#[test]
fn checkpoint() {
    run(Consistency::Checkpoint, 2, false);
}

#[test]
fn strict_while_bits_flip() {
    run(Consistency::Strict, 2, true);
}

#[test]
fn strict_while_the_index_is_resized() {
    let resized = run_beside(Consistency::Strict, 2, false, Scene::resize);
    assert!(resized > 10, "{resized}");
}
