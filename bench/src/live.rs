//! A cache as a daemon runs it: its background worker runs concurrently with the clients.

use crate::instant_disk::InstantDisk;
use crate::rig;
use crate::scale::{Sources, random_places};
use cbd_engine::{Admission, Cache};
use cbd_runtime::{ProcessEnvironment, Worker};
use cbd_types::{ByteRange, Error, ErrorKind, Pmem, Result};
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// A write that waits longer than this for space has failed.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A cache with its background worker, in front of a disk that completes every operation at once.
pub struct Live<P: Pmem + 'static> {
    /// The cache.
    pub cache: Arc<Cache<ProcessEnvironment<P>>>,
    waker: Waker,
    _worker: Worker,
}

/// A thread that sleeps while its request waits for space.
struct Sleeper(Thread);

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<P: Pmem + 'static> Live<P> {
    /// Creates a cache in the whole `memory`, in front of a device of `device` bytes. Its background worker begins with
    /// `prepare`. Only the calling thread may write to the cache.
    ///
    /// # Errors
    /// The errors of the engine and of the system.
    pub fn new(memory: P, device: u64, prepare: impl FnOnce() + Send + 'static) -> Result<Self> {
        let surroundings = Arc::new(ProcessEnvironment::new());
        let cache = rig::format(&surroundings, memory, device, rig::lanes_of_a_daemon())?;
        let disk = InstantDisk::new(device)?;
        let worker = Worker::start("bench", surroundings, &cache, &disk, prepare)?;
        let waker = Arc::new(Sleeper(std::thread::current())).into();
        Ok(Self { cache, waker, _worker: worker })
    }

    /// Executes one write; returns false if it had to wait for space.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn write(&self, place: u64, data: &[u8]) -> Result<bool> {
        let range = ByteRange::at(place, data.len() as u64);
        if let Admission::Done(_) = self.cache.write(range, data, &self.waker)? {
            return Ok(true);
        }
        let begun = Instant::now();
        while begun.elapsed() < TIMEOUT {
            std::thread::park_timeout(TIMEOUT);
            if let Admission::Done(_) = self.cache.write(range, data, &self.waker)? {
                return Ok(false);
            }
        }
        Err(Error::new(ErrorKind::TimedOut, "background work frees no space"))
    }

    /// Waits until enough segments are free for a few writes that do not wait.
    ///
    /// # Errors
    /// When the wait takes too long.
    pub fn wait_for_space(&self) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < TIMEOUT {
            let status = self.cache.status();
            // Each lane may need a segment or two, the reserve has some, and reclaim may need some.
            if status.free_segments > 4 * status.lanes {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Error::new(ErrorKind::TimedOut, "background work frees no space"))
    }

    /// Writes `bytes` to random blocks of 4 KiB of a device of `device` bytes, with some flushes.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn age(&self, random: &mut SmallRng, device: u64, bytes: u64) -> Result<()> {
        const BETWEEN_FLUSHES: usize = 4096;
        let sources = Sources::new(4096);
        for _ in 0..bytes / 4096 / BETWEEN_FLUSHES as u64 {
            let places = random_places(random, device, 4096, BETWEEN_FLUSHES);
            for (number, &place) in places.iter().enumerate() {
                self.write(place, sources.get(number))?;
            }
            self.cache.flush()?;
        }
        Ok(())
    }
}
