//! The engine, devices and the format, built without std as a kernel would build them.
//!
//! `cargo xtask test` builds this crate for `x86_64-unknown-none` (the step `freestanding`), or for this machine if that target
//! cannot be installed. The functions below are the entry points of a host. Together they instantiate the generic code of the
//! engine, so that its machine code exists and the stack frames of its functions can be measured.
//!
//! Invariants: memory, backing device and clock are behind trait objects, so the compiler cannot omit engine code because of the
//! behaviour of a host.
//!
//! Elsewhere: hosts with threads (`cbd-runtime`).
#![no_std]

extern crate alloc;

use alloc::{boxed::Box, string::String, sync::Arc, vec::Vec};
use cbd_channel::{Client, Server};
use cbd_device::{Device, Queue};
use cbd_engine::{
    BackendSpec, BackgroundWorker, Cache, CacheStatus, Environment, FormatOptions, MetadataPlace, Settings,
    Step, Transport,
    owner::{self, Beat, Ownership, Seen},
};
use cbd_types::backing::BackingDone;
use cbd_types::{
    BackendId, BackingGeometry, BackingOp, BackingQueue, BootId, ByteRange, Completion, Durability, Epoch,
    MediaError, OpToken, Pmem, Region, Request, Result, VerifiedMetadata,
};
use core::sync::atomic::{AtomicBool, Ordering};
use core::task::Waker;

/// Clock and random numbers of a host.
pub trait Host: Send + Sync {
    /// A random number.
    fn random(&self) -> u64;
    /// Milliseconds since 1970 UTC.
    fn wall_ms(&self) -> u64;
    /// Milliseconds since an arbitrary moment.
    fn monotonic_ms(&self) -> u64;
}

/// The memory of a host.
pub struct Memory(pub Box<dyn Pmem>);

impl Pmem for Memory {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn store(&self, at: u64, from: &[u8]) {
        self.0.store(at, from);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        self.0.store_summed(at, from, first, checksums);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.0.store_line(at, line);
    }

    fn fence(&self) {
        self.0.fence();
    }

    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        self.0.load(at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        self.0.load_summed(at, into)
    }

    fn write_back(&self, at: u64, length: u64) {
        self.0.write_back(at, length);
    }

    fn prefetch(&self, at: u64) {
        self.0.prefetch(at);
    }

    fn failed_at(&self) -> Option<u64> {
        self.0.failed_at()
    }

    fn boot(&self) -> BootId {
        self.0.boot()
    }

    fn mixes_pages(&self) -> bool {
        self.0.mixes_pages()
    }

    fn sync(&self, at: u64, length: u64) -> Result<()> {
        self.0.sync(at, length)
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

/// A lock that spins.
#[derive(Debug)]
pub struct Spinlock(AtomicBool);

// SAFETY: only the thread that changed the flag from false to true holds the lock. Only `unlock` changes the flag back, and its
// contract restricts it to the holder.
#[allow(unsafe_code)]
unsafe impl lock_api::RawMutex for Spinlock {
    // An initial value, copied into each new mutex.
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: Self = Self(AtomicBool::new(false));

    type GuardMarker = lock_api::GuardSend;

    fn lock(&self) {
        while !self.try_lock() {
            core::hint::spin_loop();
        }
    }

    fn try_lock(&self) -> bool {
        !self.0.swap(true, Ordering::Acquire)
    }

    unsafe fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The environment of an engine in a kernel.
pub struct Kernel(pub Box<dyn Host>);

impl Environment for Kernel {
    type Memory = Memory;
    type Lock = Spinlock;

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn wall_ms(&self) -> u64 {
        self.0.wall_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.0.monotonic_ms()
    }
}

/// The backing device of a host.
pub struct Disk(pub Box<dyn BackingQueue>);

impl BackingQueue for Disk {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        self.0.submit(token, op);
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        self.0.poll(done);
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        self.0.wait(done);
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn depth(&self) -> usize {
        self.0.depth()
    }
}

/// The entry points of the data path; each makes one call of a queue.
pub mod data_path {
    use super::{ByteRange, Completion, Disk, Kernel, Queue, Request, Result, Vec};

    /// A queue of requests.
    pub type HostQueue = Queue<Kernel, Disk>;

    /// Submits a request.
    #[inline(never)]
    pub fn submit(queue: &mut HostQueue, request: Request, done: &mut Vec<Completion>) {
        queue.submit(request, done);
    }

    /// Submits a request that may be executed in a batch with others.
    #[inline(never)]
    pub fn submit_plugged(queue: &mut HostQueue, request: Request, done: &mut Vec<Completion>) {
        queue.submit_plugged(request, done);
    }

    /// Executes the requests that were held back.
    #[inline(never)]
    pub fn unplug(queue: &mut HostQueue, done: &mut Vec<Completion>) {
        queue.unplug(done);
    }

    /// Writes directly from a buffer, without a [`Request`].
    #[inline(never)]
    pub fn write_from(
        queue: &mut HostQueue,
        id: u64,
        range: ByteRange,
        data: &[u8],
        fua: bool,
    ) -> Option<Result<()>> {
        queue.write_from(id, range, data, fua)
    }

    /// Reads directly into a buffer, without a [`Request`].
    #[inline(never)]
    pub fn read_into(queue: &mut HostQueue, id: u64, range: ByteRange, out: &mut [u8]) -> Option<Result<()>> {
        queue.read_into(id, range, out)
    }

    /// Continues the requests that waited.
    #[inline(never)]
    pub fn poll(queue: &mut HostQueue, done: &mut Vec<Completion>) {
        queue.poll(done);
    }
}

/// The entry points of the background worker, of recovery and of administration.
pub mod background {
    use super::*;

    /// Writeback and reclaim.
    pub type Worker = BackgroundWorker<Kernel, Disk>;

    /// The background worker of a cache.
    #[inline(never)]
    pub fn worker(cache: Arc<Cache<Kernel>>, queue: Disk, geometry: BackingGeometry) -> Worker {
        Worker::new(cache, queue, geometry)
    }

    /// One step of writeback and reclaim.
    #[inline(never)]
    pub fn step(worker: &mut Worker) -> Step {
        worker.step()
    }

    /// Formats a region.
    ///
    /// # Errors
    /// The errors of [`Transport::format`].
    #[inline(never)]
    pub fn format(
        environment: Arc<Kernel>,
        region: Region<Memory>,
        options: &FormatOptions,
    ) -> Result<Arc<Transport<Kernel>>> {
        Transport::format(environment, region, options)
    }

    /// Opens a region.
    ///
    /// # Errors
    /// The errors of [`Transport::open`].
    #[inline(never)]
    pub fn open(environment: Arc<Kernel>, region: Region<Memory>) -> Result<Arc<Transport<Kernel>>> {
        Transport::open(environment, region)
    }

    /// Brings a backing device onto a transport.
    ///
    /// # Errors
    /// The errors of [`Transport::create_backend`].
    #[inline(never)]
    pub fn create_backend(transport: &Transport<Kernel>, spec: &BackendSpec) -> Result<BackendId> {
        transport.create_backend(spec)
    }

    /// Uses memory that has become larger, while caches are open.
    ///
    /// # Errors
    /// The errors of [`Transport::grow_region`].
    #[inline(never)]
    pub fn grow_region(transport: &Transport<Kernel>) -> Result<()> {
        transport.grow_region().map(drop)
    }

    /// Gives an open cache segments that are free.
    ///
    /// # Errors
    /// The errors of [`Transport::grow_cache`].
    #[inline(never)]
    pub fn grow_cache(
        transport: &Transport<Kernel>,
        id: BackendId,
        cache: &Arc<Cache<Kernel>>,
        segments: u32,
    ) -> Result<()> {
        transport.grow_cache(id, cache, segments)
    }

    /// Syncs the file of the region, if the region is a file.
    ///
    /// # Errors
    /// The errors of [`Transport::sync`].
    #[inline(never)]
    pub fn sync(transport: &Transport<Kernel>) -> Result<usize> {
        transport.sync()
    }

    /// Opens a cache, which recovers it.
    ///
    /// # Errors
    /// The errors of [`Transport::open_cache`].
    #[inline(never)]
    pub fn open_cache(transport: &Arc<Transport<Kernel>>, id: BackendId) -> Result<Arc<Cache<Kernel>>> {
        transport.open_cache(id)
    }

    /// What the note in a region says of the host that has it, if it may be stored.
    #[inline(never)]
    pub fn look_at_owner(region: &Region<Memory>) -> Option<Seen> {
        owner::may_announce(region).then(|| owner::look(region))
    }

    /// Announces a host in the note of a region.
    ///
    /// # Errors
    /// The errors of [`Ownership::announce`] and [`Ownership::confirm`].
    #[inline(never)]
    pub fn announce(ownership: &Ownership, region: &Region<Memory>) -> Result<()> {
        ownership.announce(region)?;
        ownership.confirm(region)
    }

    /// Renews the note of a host, and gives the region up if another one has taken it.
    #[inline(never)]
    pub fn beat(ownership: &mut Ownership, transport: &Transport<Kernel>) {
        let region = transport.region();
        if let Beat::Taken(by) = ownership.beat(region) {
            region.give_up_to("another host", by.process.get());
            transport.abandon();
        }
    }

    /// Notes that a host has closed a region.
    #[inline(never)]
    pub fn release(ownership: Ownership, region: &Region<Memory>) {
        ownership.release(region);
    }

    /// One step of a verification of the metadata of a region in use.
    ///
    /// # Errors
    /// The errors of [`Transport::verify_metadata`].
    #[inline(never)]
    pub fn verify_metadata(
        transport: &Transport<Kernel>,
        id: BackendId,
        place: &mut MetadataPlace,
        found: &mut VerifiedMetadata,
    ) -> Result<()> {
        transport.verify_metadata(id, place, found)
    }

    /// The status of a cache.
    #[inline(never)]
    pub fn status(cache: &Cache<Kernel>) -> CacheStatus {
        cache.status()
    }

    /// Requests a drain of all dirty data.
    #[inline(never)]
    pub fn request_drain(cache: &Cache<Kernel>) -> Epoch {
        cache.request_drain()
    }

    /// Changes settings.
    ///
    /// # Errors
    /// The errors of [`Cache::set_settings`].
    #[inline(never)]
    pub fn set_settings(cache: &Cache<Kernel>, settings: Settings) -> Result<()> {
        cache.set_settings(settings)
    }

    /// Stops a cache.
    #[inline(never)]
    pub fn stop(cache: &Cache<Kernel>) {
        cache.stop();
    }

    /// A queue of a device.
    #[inline(never)]
    pub fn queue(device: Arc<Device<Kernel>>, disk: Disk, waker: Waker) -> data_path::HostQueue {
        Queue::new(device, disk, waker)
    }
}

/// Uses a device that another host serves.
pub fn use_channel(client: &mut Client<Memory>, request: Request, done: &mut Vec<Completion>) {
    client.submit(request, done);
    client.poll(done);
    client.nudge();
}

/// Serves a device to another host.
///
/// # Errors
/// Those of [`Server::poll`].
pub fn serve_channel(
    server: &mut Server<Memory>,
    completion: Completion,
    requests: &mut Vec<Request>,
) -> Result<()> {
    server.complete(completion);
    server.poll(requests)
}
