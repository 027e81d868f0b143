//! Devices: synchronous calls from any number of threads; draining, settings, and closing.
//!
//! Invariants: a call whose data is in the cache makes no system call and only one copy. Up to [`STRIPES`] threads write no
//! shared state except the engine's lanes. After a panic in a request the device refuses all later requests.
//!
//! Elsewhere: queues with more than one request in flight ([`crate::Queue`]).

use crate::Queue;
use crate::queue::Waiting;
use crate::region::{Held, OpenDevices};
use cbd_engine::{CacheStatus, Settings};
use cbd_runtime::{DrainProgress, DrainRequest, RunningBackend, check_writeback_rate};
use cbd_types::{
    AlignedBuffer, BackendId, ByteRange, Error, ErrorKind, Geometry, Operation, Request, Result,
};
use parking_lot::Mutex;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// The default timeout of a drain without progress.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// The number of stripes that hold idle queues of synchronous calls.
const STRIPES: usize = 16;

/// Aligned to cache lines, so that threads do not share a line by chance.
#[repr(align(128))]
struct Stripe(Mutex<Vec<Waiting>>);

/// The state that a device and its queues share.
pub(crate) struct Running {
    pub(crate) run: RunningBackend,
    failed: AtomicBool,
    held: Arc<Held>,
}

impl Running {
    /// Fails the device after a panic in a request: no later request is executed, and no mark is written.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
        if let Some(cache) = self.run.cache() {
            cache.abandon();
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        // The background worker of the cache may have failed, too.
        let abandoned = self.run.cache().is_some_and(|cache| cache.is_abandoned());
        if abandoned || self.failed.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::Stopped,
                "a thread of this program failed inside the device: close it and open it again, which recovers all that was acknowledged",
            ));
        }
        Ok(())
    }

    /// Runs `work`; a panic in it stops the device.
    pub(crate) fn guarded<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        struct Guard<'a>(&'a Running);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.fail();
                }
            }
        }
        self.check()?;
        let _guard = Guard(self);
        work()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.run.stop();
    }
}

/// A disk behind its cache, open in this process.
pub struct Device {
    // Declared before `running`, so that the queues end first.
    stripes: Box<[Stripe]>,
    running: Arc<Running>,
    id: BackendId,
    path: String,
    warnings: Vec<String>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Device({} {})", self.id, self.path)
    }
}

impl Device {
    pub(crate) fn new(
        held: Arc<Held>,
        id: BackendId,
        path: &str,
        (run, warnings): (RunningBackend, Vec<String>),
        open: &mut OpenDevices,
    ) -> Self {
        let stripes = (0..STRIPES).map(|_| Stripe(Mutex::new(Vec::new()))).collect();
        let running = Arc::new(Running { run, failed: AtomicBool::new(false), held });
        open.push((id, Arc::downgrade(&running)));
        Self { stripes, running, id, path: path.to_owned(), warnings }
    }

    /// The row of its backend on the region.
    #[must_use]
    pub const fn id(&self) -> BackendId {
        self.id
    }

    /// The path of its disk.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The size, the sectors, and the atomic unit of the device.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        use cbd_export::BlockDevice;
        self.running.run.device().geometry()
    }

    /// The status of the cache; `None` without a cache.
    #[must_use]
    pub fn status(&self) -> Option<CacheStatus> {
        self.running.run.cache().map(|cache| cache.status())
    }

    /// The present warnings: of the disk, of the cache, of the region's memory.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.warnings.clone();
        warnings.extend(self.running.held.failed().map(|error| error.line()));
        warnings.extend(self.running.check().err().map(|error| error.line()));
        let Some(status) = self.status() else { return warnings };
        if let Some(trouble) = &status.backing_trouble {
            warnings.push(format!("the disk fails ({} attempts): {}", trouble.attempts, trouble.error));
        }
        if let Some(reason) = &status.void_reason {
            warnings.push(format!("the disk alone is not consistent now: {reason}"));
        }
        if status.is_stalled {
            warnings.push(
                "writes that find no space fail, because the disk has refused writes for long".to_owned(),
            );
        }
        warnings
    }

    /// The present settings; the defaults without a cache.
    #[must_use]
    pub fn settings(&self) -> Settings {
        self.running.run.cache().map_or_else(Settings::default, |cache| cache.settings())
    }

    /// Changes settings, for this process and for later openers of the region.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a value out of its range, or without a cache.
    pub fn set_settings(&self, settings: Settings) -> Result<()> {
        let cache = self.running.run.cache().ok_or_else(|| self.has_no_cache())?;
        // A rate that an earlier version stored does not prevent a change of another setting.
        if settings.writeback_rate != cache.settings().writeback_rate {
            check_writeback_rate(settings.writeback_rate)?;
        }
        self.running.guarded(|| {
            self.running.held.transport.update_settings(self.id, settings)?;
            cache.set_settings(settings)
        })
    }

    /// Uses a disk that has become larger to its present end; [`geometry`](Self::geometry) shows it. Other threads may use the device
    /// meanwhile. Returns its size in bytes, which is the same as before if the disk has not become larger.
    ///
    /// # Errors
    /// Those of [`RunningBackend::grow`], such as [`ErrorKind::OutOfRange`] for a disk that has shrunk; nothing has changed then.
    pub fn grow(&self) -> Result<u64> {
        self.running.guarded(|| Ok(self.running.run.grow(&self.running.held.transport)?.now))
    }

    fn has_no_cache(&self) -> Error {
        Error::new(ErrorKind::InvalidArgument, format!("backend {} has no cache to set anything of", self.id))
    }

    /// Reads from `offset` into `buffer`, in whole sectors.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] and [`ErrorKind::InvalidArgument`] for a range that is not whole sectors of the device;
    /// [`ErrorKind::Media`] for a damaged range; [`ErrorKind::Backing`] when the disk fails. After an error the content of
    /// `buffer` is undefined.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let range = range_at(offset, buffer.len())?;
        self.with_queue(|queue| match queue.queue.read_into(0, range, buffer) {
            Some(result) => result,
            None => {
                let completed = queue.complete_one()?;
                buffer.copy_from_slice(&completed);
                Ok(())
            }
        })
    }

    /// Writes `data` to `offset`, in whole sectors. The data is durable in the region when the call returns. A write of up to
    /// [`Geometry::atomic_unit`] inside 4 MiB of the device is recovered completely or not at all.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at); after an error the range may hold any mix of old and new sectors. [`ErrorKind::Backing`]
    /// when there is no space and the disk refuses writes.
    pub fn write_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write_with(data, offset, false)
    }

    /// As [`write_at`](Self::write_at), as a FUA write: no later write reaches the disk before it.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn write_fua_at(&self, data: &[u8], offset: u64) -> Result<()> {
        self.write_with(data, offset, true)
    }

    pub(crate) fn write_with(&self, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        let range = range_at(offset, data.len())?;
        self.with_queue(|queue| match queue.queue.write_from(0, range, data, fua) {
            Some(result) => result,
            None => queue.complete_one().map(drop),
        })
    }

    /// A write barrier: no later write reaches the disk before the earlier ones. Writes are durable without it.
    ///
    /// # Errors
    /// When the cache was stopped, or a device without a cache fails.
    pub fn flush(&self) -> Result<()> {
        self.change(Operation::Flush, 0, 0, false)
    }

    /// Discards the range: it reads as zeroes from now on, and the disk frees its space where it can.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.change(Operation::Discard, offset, length, false)
    }

    /// Zeroes the range.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        self.change(Operation::WriteZeroes, offset, length, false)
    }

    pub(crate) fn change(&self, operation: Operation, offset: u64, length: u64, fua: bool) -> Result<()> {
        let range = ByteRange { start: offset, end: end_of(offset, length)? };
        let buffer = AlignedBuffer::default();
        self.with_queue(|queue| {
            queue.submit(Request::unmarked(0, operation, range, fua, buffer));
            queue.complete_one().map(drop)
        })
    }

    /// A queue for many requests at a time; one thread at a time may use it, and it keeps the device open.
    ///
    /// # Errors
    /// When the system refuses a resource (a ring, descriptors).
    pub fn queue(&self) -> Result<Queue> {
        self.running.check()?;
        Ok(Queue::new(Waiting::new(&self.running)?, Arc::clone(&self.running)))
    }

    /// The number of open queues of the device.
    #[must_use]
    pub fn queues_open(&self) -> usize {
        Arc::strong_count(&self.running) - 1
    }

    /// Writes all data that was written before the call to the disk; returns the number of bytes. `progress` is called at least
    /// every 200 ms, and can end the wait with an error of its own.
    ///
    /// # Errors
    /// [`ErrorKind::Backing`] or [`ErrorKind::TimedOut`] when there was no progress for `timeout`, or the disk refuses ranges
    /// permanently. The dirty data then stays in the region.
    pub fn drain(
        &self,
        timeout: Duration,
        progress: &mut dyn FnMut(&DrainProgress) -> ControlFlow<Error>,
    ) -> Result<u64> {
        let Some(cache) = self.running.run.cache() else { return Ok(0) };
        self.running.guarded(|| {
            self.running
                .run
                .until_drained(DrainRequest::new(&cache), timeout, progress)
                .map_err(|why| why.into_error(self.id, |_| String::new()))
        })
    }

    /// Closes the device: dirty data stays in the region, marked, for the next process that opens it. A drop has the same effect,
    /// but cannot report an error.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while queues of the device are open: it is closed with the last of them. [`ErrorKind::Media`] when the
    /// region's memory fails; [`ErrorKind::Stopped`] when another machine has taken the region.
    pub fn close(self) -> Result<()> {
        let held = Arc::clone(&self.running.held);
        match self.queues_open() {
            0 => {
                drop(self);
                held.failed().map_or(Ok(()), Err)
            }
            queues => Err(Error::new(
                ErrorKind::Busy,
                format!("{queues} queues of {} are open: it ends with the last of them", self.path),
            )),
        }
    }

    /// Drains the device and removes the disk from the region: it is a plain disk again, with all its data.
    ///
    /// # Errors
    /// The errors of [`drain`](Self::drain), and [`ErrorKind::Busy`] while queues of the device are open. The device is then
    /// returned, and stays usable. If its row cannot be removed, the device is closed, and the region still has the row.
    pub fn detach(self, timeout: Duration) -> std::result::Result<(), (Option<Self>, Error)> {
        let queues = self.queues_open();
        if queues > 0 {
            let text = format!("{queues} queues of {} are open: close them first", self.path);
            return Err((Some(self), Error::new(ErrorKind::Busy, text)));
        }
        if let Err(error) = self.drain(timeout, &mut |_| ControlFlow::Continue(())) {
            return Err((Some(self), error));
        }
        let (held, id) = (Arc::clone(&self.running.held), self.id);
        drop(self);
        held.remove(id).map_err(|error| (None, error))
    }

    /// Runs `work` with the backend; a panic in it stops the device.
    pub(crate) fn guarded_run<T>(&self, work: impl FnOnce(&RunningBackend) -> Result<T>) -> Result<T> {
        self.running.guarded(|| work(&self.running.run))
    }

    /// Runs `work` with a queue that no other thread uses at the same time.
    fn with_queue<T>(&self, work: impl FnOnce(&mut Waiting) -> Result<T>) -> Result<T> {
        self.running.guarded(|| {
            let stripe = &self.stripes[stripe_of_this_thread()];
            let kept = stripe.0.lock().pop();
            let mut queue = match kept {
                Some(queue) => queue,
                None => Waiting::new(&self.running)?,
            };
            let result = work(&mut queue);
            // A queue whose wait failed still has a request in flight, and is dropped.
            if queue.is_idle() {
                stripe.0.lock().push(queue);
            }
            result
        })
    }
}

fn stripe_of_this_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES;
    }
    MINE.with(|mine| *mine)
}

pub(crate) fn range_at(offset: u64, length: usize) -> Result<ByteRange> {
    Ok(ByteRange { start: offset, end: end_of(offset, length as u64)? })
}

fn end_of(offset: u64, length: u64) -> Result<u64> {
    offset.checked_add(length).ok_or_else(|| {
        Error::new(
            ErrorKind::OutOfRange,
            format!("{length} bytes at {offset} reach past the end of any device"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceOptions, Region, RegionOptions};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn a_panic_stops_the_device_and_the_next_opener_finds_every_acknowledged_write() {
        let folder = tempfile::tempdir().unwrap();
        let (path, disk) = (folder.path().join("region"), folder.path().join("disk"));
        std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
        let region = Region::open(&path, &RegionOptions::format(32 << 20)).unwrap();
        let device = region.attach(&disk, &DeviceOptions::default()).unwrap();
        let mut queue = device.queue().unwrap();
        device.write_at(&[7; 4096], 0).unwrap();
        let fails = || device.running.guarded::<()>(|| panic!("on purpose"));
        assert!(catch_unwind(AssertUnwindSafe(fails)).is_err());
        let stopped = |result: Result<()>| assert_eq!(result.unwrap_err().kind(), ErrorKind::Stopped);
        stopped(device.write_at(&[8; 4096], 0));
        stopped(device.read_at(&mut [0; 4096], 0));
        stopped(device.flush());
        stopped(queue.write_at(1, &[8; 4096], 0, false));
        stopped(queue.poll(&mut Vec::new()));
        stopped(device.queue().map(drop));
        assert!(device.warnings().iter().any(|warning| warning.contains("failed inside")));
        drop(queue);
        device.close().unwrap();
        let device = region.attach(&disk, &DeviceOptions::default()).unwrap();
        let mut read = [0; 4096];
        device.read_at(&mut read, 0).unwrap();
        assert_eq!(read, [7; 4096]);
    }
}
