//! A block device of one host on a backend of another one, with both sides as daemons have them: a thread that serves the device at the
//! host of the backend, and a [`RemoteDevice`] at the other host.
//!
//! Both look from time to time for what the other one has stored, as on two machines, until they [wake](Connected::wake) each other, as
//! on one.
//!
//! Invariants: both hosts have mappings of their own. Only the caller runs background work of the cache, while nothing is in flight.

use super::region::OpenRegion;
use super::threads::Threads;
use crate::processors::Processors;
use crate::rig::Rig;
use crate::scale::{Scale, random_places};
use cbd_channel::Areas;
use cbd_device::Device;
use cbd_engine::{BlkdevSpec, ChannelArea, RemoteBlkdev, RemoteState};
use cbd_export::wait_any;
use cbd_pmem::Mapping;
use cbd_remote::{ChannelUse, RemoteDevice, Service, ServiceOptions, WakeAddress, WakeListener};
use cbd_runtime::{ProcessEnvironment, ServedDevice};
use cbd_types::{BlkdevId, Error, ErrorKind, HostId, Result};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The host of the backend.
const OWNER: usize = 0;
/// The host that uses it.
const USER: usize = 1;

/// How long either side may take to begin or to end.
const LIMIT: Duration = Duration::from_secs(10);

/// The share of the free space that the cache does not get: three quarters of it are enough, and the channel needs some.
const PARTS: u32 = 4;

/// The share of the cache that is written between two rests, in which background work cleans and reclaims it.
const SHARE_BETWEEN_RESTS: u64 = 8;

/// Both hosts.
pub struct Connected {
    /// The device at the host that uses it.
    pub device: Arc<RemoteDevice<Mapping>>,
    /// The device at the host of the backend.
    pub served: Arc<ServedDevice<ProcessEnvironment>>,
    /// The threads that the host of the backend has for the channel.
    pub server_threads: Threads,
    rig: Rig<Mapping>,
    size: u64,
    written: u64,
    random: SmallRng,
    service: Service,
    blkdev: BlkdevId,
    _region: OpenRegion,
}

impl Connected {
    /// Ages a cache of a host, and opens a block device of another host on it.
    ///
    /// # Errors
    /// The errors of the engine, of the channel and of the system.
    pub fn new(scale: &Scale) -> Result<Self> {
        let (size, region) = (scale.export_size, OpenRegion::shared(scale.export_size, 2)?);
        let free = region.transport(OWNER).info().free_segments;
        let mut random = SmallRng::seed_from_u64(7);
        let rig = region.aged_cache(free - free.div_ceil(PARTS), size, &mut random)?;
        let device = Arc::new(Device::cached(rig.share(), rig.disk().geometry()));
        let served = Arc::new(ServedDevice::new(device, Arc::clone(rig.disk())));
        let row = create_blkdev(&region)?;
        let before = Threads::now()?;
        let service = serve(&region, &row, &served)?;
        let server_threads = Threads::now()?.without(&before);
        let device = Arc::new(open(&region)?);
        let (written, blkdev) = (size, row.entry.id);
        Ok(Self {
            device,
            served,
            server_threads,
            rig,
            size,
            written,
            random,
            service,
            blkdev,
            _region: region,
        })
    }

    /// Lets both hosts wake each other from now on.
    ///
    /// # Errors
    /// Those of the system; [`ErrorKind::TimedOut`] if the service does not take the connection.
    pub fn wake(&self) -> Result<()> {
        let failed = |error| Error::new(ErrorKind::System, "no socket for the wake-up").caused_by(error);
        let address = WakeAddress { region: rand::random(), host: HostId(OWNER as u32) };
        let mut listener = WakeListener::bind(&address).map_err(failed)?;
        self.device.connect_wake(&address, self.blkdev)?;
        let wake = listener.accept().pop();
        self.service.attach(wake.ok_or_else(|| Error::new(ErrorKind::NotFound, "no connection came"))?);
        let end = Instant::now() + LIMIT;
        while !self.device.is_woken() {
            if Instant::now() > end {
                return Err(Error::new(ErrorKind::TimedOut, "the service does not take the connection"));
            }
            wait_any(&[], Some(Duration::from_millis(1)))?;
        }
        Ok(())
    }

    /// Random blocks to write to. Background work runs before, if the free part of the cache may be too small.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn places_to_write(&mut self, count: usize) -> Result<Vec<u64>> {
        let next = count as u64 * 4096;
        if self.written + next > self.size / SHARE_BETWEEN_RESTS {
            self.rig.settle()?;
            self.written = 0;
        }
        self.written += next;
        Ok(random_places(&mut self.random, self.size, 4096, count))
    }

    /// The blocks that are in the cache.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn cached_places(&mut self) -> Result<Vec<u64>> {
        self.rig.settle()?;
        Ok(self.rig.held_blocks().iter().map(|held| held.place).collect())
    }

    /// Ends both sides.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if the service does not end.
    pub fn close(self) -> Result<()> {
        self.device.close();
        self.service.stop(true, LIMIT)
    }
}

/// Creates the block device at the host that uses it; returns it as the other host sees it.
fn create_blkdev(region: &OpenRegion) -> Result<RemoteBlkdev> {
    let (owner, user) = (region.transport(OWNER), region.transport(USER));
    let missing = |what: &str| Error::new(ErrorKind::NotFound, format!("there is no {what}"));
    let backend = owner.backends()?.first().ok_or_else(|| missing("backend"))?.id;
    let host = user.register_host("host1", None)?;
    user.create_remote_blkdev(&BlkdevSpec { backend, host, export: "nbd".to_owned(), shared: false }, None)?;
    owner.remote_blkdevs_of_others()?.pop().ok_or_else(|| missing("block device of another host"))
}

fn serve(
    region: &OpenRegion,
    row: &RemoteBlkdev,
    served: &Arc<ServedDevice<ProcessEnvironment>>,
) -> Result<Service> {
    let owner = region.transport(OWNER);
    let area = owner.serve_remote(row)?;
    let options = ServiceOptions {
        name: "bench-host",
        place: channel_use(region, OWNER, row.area, area),
        blkdev: row.entry.id,
        changes: Arc::default(),
        is_exclusive: true,
        thread_setup: take_second_processor,
    };
    Service::start(owner.shared_region(), Arc::clone(served) as _, &options)
}

/// If the thread cannot be pinned, it runs wherever the system schedules it.
fn take_second_processor() {
    let _ = Processors::new().and_then(|processors| processors.pin(1));
}

fn open(region: &OpenRegion) -> Result<RemoteDevice<Mapping>> {
    let user = region.transport(USER);
    let not_served = || Error::new(ErrorKind::NotFound, "the other host does not serve the block device");
    let row = user.remote_blkdevs().pop().ok_or_else(not_served)?;
    let RemoteState::Served(area) = user.server_area(&row, None)? else { return Err(not_served()) };
    let place = channel_use(region, USER, row.area, area);
    RemoteDevice::open(user.shared_region(), place, LIMIT)
}

fn channel_use(region: &OpenRegion, host: usize, client: ChannelArea, server: ChannelArea) -> ChannelUse {
    ChannelUse {
        areas: Areas { client: client.at, server: server.at },
        area_bytes: server.bytes.min(client.bytes),
        session: rand::random(),
        is_lost: region.loss(host),
    }
}
