//! The adapter between a device of the engine and exports.
//!
//! Invariants: a queue and the backing queue beneath it belong to one thread. A descriptor that a thread waits on is
//! signalled whenever [`RequestQueue::poll`] can make progress with a waiting request: by the backing device when an
//! operation has completed, by the engine when a request that waited for space may continue. Plugged requests are not
//! signalled: their thread unplugs or polls before it waits.
//!
//! Elsewhere: the execution of requests (`cbd-device`).

use crate::{Count, Counted};
use cbd_backing::{Backing, PollableQueue};
use cbd_device::{BlkdevClass, Device, DeviceFigures, LastSampled, Queue, Sampled};
use cbd_engine::Environment;
use cbd_export::wake::{self, Event};
use cbd_export::{BlockDevice, Extent, ExtentState, RequestQueue};
use cbd_types::{
    BlkdevId, ByteRange, Class, Completion, ErrorKind, Geometry, Request, Result, TakeBack, Verified, Verify,
};
use parking_lot::Mutex;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Wake;
use std::time::Instant;

/// Maximum number of operations of one queue in flight to the backing device.
const DEPTH: usize = 64;

/// Adapts an event to the waker that the engine calls.
#[derive(Debug)]
pub struct TaskWaker(pub wake::Waker);

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.0.wake();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake();
    }
}

/// Requests that completed with an error of the medium or the backing device. Only a failing request accesses it.
#[derive(Default, Debug)]
pub struct Failures {
    count: AtomicU64,
    last: Mutex<Option<(ErrorKind, String)>>,
}

impl Failures {
    /// Number of these requests.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The last error: its kind, and its text in one line.
    #[must_use]
    pub fn last(&self) -> Option<(ErrorKind, String)> {
        self.last.lock().clone()
    }

    fn note(&self, done: &[Completion]) {
        for error in done.iter().filter_map(|completion| completion.result.as_ref().err()) {
            let is_theirs = matches!(
                error.kind(),
                ErrorKind::InvalidArgument | ErrorKind::OutOfRange | ErrorKind::ReadOnly | ErrorKind::Stopped
            );
            if !is_theirs {
                self.count.fetch_add(1, Ordering::Relaxed);
                *self.last.lock() = Some((error.kind(), error.line()));
            }
        }
    }
}

/// A device with its backing device, for exports.
pub struct ServedDevice<E: Environment> {
    // Declared before the backing device, whose close may block: the cache is closed first.
    device: Arc<Device<E>>,
    backing: Arc<dyn Backing>,
    class: Arc<BlkdevClass>,
    /// The blkdev whose clients it serves; none for the device itself.
    blkdev: Option<BlkdevId>,
    queues: Count,
    /// The queues of the device itself and of all its blkdevs.
    all_queues: Count,
    failures: Arc<Failures>,
}

impl<E: Environment> std::fmt::Debug for ServedDevice<E> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "ServedDevice({})", self.backing.describe())
    }
}

impl<E: Environment> ServedDevice<E> {
    /// Serves `device`, with `backing` for misses and bypasses.
    #[must_use]
    pub fn new(device: Arc<Device<E>>, backing: Arc<dyn Backing>) -> Self {
        let (queues, all_queues) = (Count::default(), Count::default());
        let (class, failures) = (Arc::default(), Arc::default());
        Self { device, backing, class, blkdev: None, queues, all_queues, failures }
    }

    /// The same device for one blkdev, with queues, figures and a class of its own.
    #[must_use]
    pub fn for_blkdev(&self, blkdev: BlkdevId) -> Self {
        Self {
            blkdev: Some(blkdev),
            device: Arc::clone(&self.device),
            backing: Arc::clone(&self.backing),
            class: Arc::default(),
            queues: Count::default(),
            all_queues: self.all_queues.clone(),
            failures: Arc::clone(&self.failures),
        }
    }

    /// Sets the class of requests that have none, from the next one on.
    pub fn set_class(&self, class: Class) {
        self.class.set(class);
    }

    /// The engine's device.
    pub(crate) const fn device(&self) -> &Arc<Device<E>> {
        &self.device
    }

    /// The requests of clients that failed.
    #[must_use]
    pub fn failures(&self) -> &Failures {
        &self.failures
    }

    /// The requests of its queues, ended ones included: those of its blkdev, or of all.
    #[must_use]
    pub fn figures(&self) -> DeviceFigures {
        self.blkdev.map_or_else(|| self.device.figures(), |blkdev| self.device.figures_of(blkdev))
    }

    /// Notes a sample of the requests, for a cache of `bytes`; 0: notes nothing.
    pub fn sample_for(&self, bytes: u64) {
        self.device.sample_for(bytes);
    }

    /// The last requests of the sample, from number `from` on.
    #[must_use]
    pub fn last_sampled(&self, from: u64) -> LastSampled {
        self.device.last_sampled(from)
    }

    /// Calls `visit` with the requests of the sample of these numbers, as far as they are kept, in order. Returns the blocks of a
    /// group; 0 if nothing is noted.
    pub fn visit_sampled(&self, numbers: Range<u64>, visit: &mut dyn FnMut(Sampled)) -> u64 {
        self.device.visit_sampled(numbers, visit)
    }

    /// The number of requests that the sample has had.
    #[must_use]
    pub fn sampled_count(&self) -> u64 {
        self.device.sampled_count()
    }

    /// Number of its own queues. A queue with requests that wait for the backing device outlives an export that was stopped by force,
    /// and executes them when the device responds.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.queues.get()
    }

    /// Number of queues of all blkdevs.
    #[must_use]
    pub fn all_queues(&self) -> usize {
        self.all_queues.get()
    }

    /// Waits until its own queues are closed; false if one is still open at `end`.
    pub fn wait_for_queues(&self, end: Instant) -> bool {
        self.queues.wait_for_none(Some(end))
    }

    /// Waits until the queues of all blkdevs are closed.
    pub fn wait_for_all_queues(&self) {
        self.all_queues.wait_for_none(None);
    }

    /// A queue for the calling thread.
    ///
    /// # Errors
    /// If the system refuses a resource of the queue (a ring, a descriptor).
    pub fn device_queue(&self) -> Result<DeviceQueue<E>> {
        let event = Event::new()?;
        let waker = Arc::new(TaskWaker(event.waker())).into();
        let backing = self.backing.open_queue(DEPTH)?;
        let backing_descriptor = backing.wait_descriptor();
        let queue = Queue::new(Arc::clone(&self.device), backing, waker).of_class(Arc::clone(&self.class));
        let queue = match self.blkdev {
            Some(blkdev) => queue.of_blkdev(blkdev),
            None => queue,
        };
        let (failures, _counted) = (Arc::clone(&self.failures), [self.queues.add(), self.all_queues.add()]);
        Ok(DeviceQueue { queue, event, backing_descriptor, failures, _counted })
    }
}

impl<E: Environment> BlockDevice for ServedDevice<E> {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        Ok(Box::new(self.device_queue()?))
    }

    fn verifies(&self) -> bool {
        true
    }

    fn extents(&self, range: ByteRange) -> Result<Vec<Extent>> {
        Ok(self
            .device
            .extents(range)
            .into_iter()
            .map(|known| Extent {
                range: known.range,
                state: ExtentState { hole: known.zeroes, cached: known.cached, dirty: known.dirty },
            })
            .collect())
    }
}

/// One thread's queue to a [`ServedDevice`].
pub struct DeviceQueue<E: Environment> {
    queue: Queue<E, Box<dyn PollableQueue>>,
    event: Event,
    backing_descriptor: RawFd,
    failures: Arc<Failures>,
    /// Declared after the queue, so that it is dropped last.
    _counted: [Counted; 2],
}

impl<E: Environment> std::fmt::Debug for DeviceQueue<E> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "DeviceQueue({} parked)", self.queue.parked())
    }
}

impl<E: Environment> DeviceQueue<E> {
    /// As [`Queue::write_from`].
    pub fn write_from(&mut self, id: u64, range: ByteRange, data: &[u8], fua: bool) -> Option<Result<()>> {
        self.queue.write_from(id, range, data, fua)
    }

    /// As [`Queue::read_into`].
    pub fn read_into(&mut self, id: u64, range: ByteRange, out: &mut [u8]) -> Option<Result<()>> {
        self.queue.read_into(id, range, out)
    }

    /// As [`Queue::verify`].
    pub(crate) fn start_verification(&mut self, id: u64, verify: Verify) {
        self.queue.verify(id, verify);
    }
}

impl<E: Environment> RequestQueue for DeviceQueue<E> {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        let before = done.len();
        self.queue.submit(request, done);
        self.failures.note(&done[before..]);
    }

    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        let before = done.len();
        self.queue.submit_plugged(request, done);
        self.failures.note(&done[before..]);
    }

    fn unplug(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        self.queue.unplug(done);
        self.failures.note(&done[before..]);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        // Cleared before the queue is polled, so that the next wait sees any later signal.
        self.event.clear();
        let before = done.len();
        self.queue.poll(done);
        self.failures.note(&done[before..]);
    }

    fn verify(&mut self, id: u64, verify: Verify) -> Result<()> {
        self.start_verification(id, verify);
        Ok(())
    }

    fn take_verified(&mut self) -> Vec<(u64, Result<Verified>)> {
        self.queue.take_verified()
    }

    fn parked(&self) -> usize {
        self.queue.parked()
    }

    fn changes(&self) -> usize {
        self.queue.changes()
    }

    fn give_up(&mut self, done: &mut Vec<Completion>) {
        self.queue.give_up(done);
    }

    fn take_back(&mut self, which: TakeBack<'_>, returned: &mut Vec<Request>) {
        self.queue.take_back(which, returned);
    }

    fn trim(&mut self) {
        self.queue.trim();
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        vec![self.event.descriptor(), self.backing_descriptor]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ProcessEnvironment;
    use cbd_backing::{BackingFile, Options};
    use cbd_types::BackingGeometry;

    #[test]
    fn discard_is_offered_only_where_the_disk_promises_zeroes() {
        for discard_zeroes in [false, true] {
            let disk = BackingGeometry {
                size: 1 << 20,
                sector: 512,
                physical_sector: 4096,
                rotational: false,
                volatile_cache: true,
                discard_zeroes,
                discard_granularity: 4096,
            };
            let device: Device<ProcessEnvironment> = Device::uncached(disk);
            assert_eq!(device.geometry().discard, discard_zeroes);
        }
    }

    #[test]
    fn the_queues_of_each_blkdev_are_counted_apart_and_together() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let backing = Arc::new(BackingFile::open(file.path(), Options::default()).unwrap());
        let device: Device<ProcessEnvironment> = Device::uncached(backing.geometry());
        let device = ServedDevice::new(Arc::new(device), backing);
        let (first, second) = (device.for_blkdev(BlkdevId(0)), device.for_blkdev(BlkdevId(1)));
        let counts = || [device.queues(), first.queues(), second.queues(), second.all_queues()];
        let queue = first.open_queue().unwrap();
        let _other = second.open_queue().unwrap();
        assert_eq!(counts(), [0, 1, 1, 2]);
        drop(queue);
        assert_eq!(counts(), [0, 0, 1, 1]);
        assert!(first.wait_for_queues(Instant::now()) && !second.wait_for_queues(Instant::now()));
    }
}
