//! The operations of a daemon, behind the control socket.
//!
//! Invariants: the operations block; an async runtime must call them on a thread of their own. An operation that
//! fails has changed nothing, unless its error says what it did.
//!
//! Elsewhere: the wire protocol ([`crate::server`]), the implementation ([`crate::manager`]).

use crate::api::{
    AddPins, AttachCache, BackendGrown, BackendInfo, BackendStarted, BlkdevChange, BlkdevInfo, BlkdevStopped,
    BlkdevUser, ClearHost, CommonCheckpoint, DetachCache, DeviceMap, Done, Drain, GrowTransport, HostInfo,
    MoveBackend, NumberOrName, PinsInfo, Progress, RegisterTransport, RemovePins, RequestSample, ResizeCache,
    ScrubInfo, ScrubRequest, Settings, SettingsChange, StartBackend, StartBlkdev, Status, StopBackend,
    StopBlkdev, TransportGrown, TransportInfo, TransportRegistered, VerifyRange,
};
use crate::events::Events;
use cbd_types::Result;
use std::sync::Arc;

/// Whether a long operation continues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    /// It continues.
    Continue,
    /// The client has disconnected: the operation ends early.
    Cancel,
}

/// Receives the progress of a long operation; returns whether the operation continues.
pub type Report<'a> = &'a mut dyn FnMut(Progress) -> Flow;

/// The operations of a daemon.
#[expect(clippy::missing_errors_doc, reason = "each fails with the kinds that its object can have")]
pub trait Control: Send + Sync + 'static {
    /// Registers this host on a region.
    fn register_transport(&self, request: &RegisterTransport) -> Result<TransportRegistered>;
    /// Unregisters this host from a transport on which it has no backend.
    fn unregister_transport(&self, transport: u32) -> Result<()>;
    /// The transports.
    fn transports(&self) -> Result<Vec<TransportInfo>>;
    /// Takes everything from a dead host of a transport that several hosts share.
    fn clear_host(&self, transport: u32, host: u32, request: &ClearHost) -> Result<()>;
    /// The hosts of a transport.
    fn hosts(&self, transport: u32) -> Result<Vec<HostInfo>>;
    /// Adds a backing device to a transport, or starts one that is not up.
    fn start_backend(&self, transport: u32, request: &StartBackend) -> Result<BackendStarted>;
    /// Drains a backend and removes it from the transport.
    fn stop_backend(
        &self,
        transport: u32,
        backend: u32,
        request: &StopBackend,
        report: Report<'_>,
    ) -> Result<Done>;
    /// Gives a backend a cache while it is in use.
    fn attach_cache(&self, transport: u32, backend: u32, request: &AttachCache) -> Result<Done>;
    /// Moves a backend to another host of a region that several share, while it is in use.
    fn move_backend(
        &self,
        transport: u32,
        backend: u32,
        request: &MoveBackend,
        report: Report<'_>,
    ) -> Result<Done>;
    /// Drains the cache of a backend and takes it away, while it is in use.
    fn detach_cache(
        &self,
        transport: u32,
        backend: u32,
        request: &DetachCache,
        report: Report<'_>,
    ) -> Result<Done>;
    /// Changes the size of the cache of a backend while it is in use.
    fn resize_cache(
        &self,
        transport: u32,
        backend: u32,
        request: &ResizeCache,
        report: Report<'_>,
    ) -> Result<Done>;
    /// Uses the region of a transport to the present end of its file or device, while it is in use; extends its file before, if a
    /// size is given.
    fn grow_transport(&self, transport: u32, request: GrowTransport) -> Result<TransportGrown>;
    /// The pins of the cache of a backend.
    fn pins(&self, transport: u32, backend: u32) -> Result<PinsInfo>;
    /// Pins ranges of the device of a backend in its cache.
    fn add_pins(&self, transport: u32, backend: u32, request: AddPins) -> Result<PinsInfo>;
    /// Ends pins.
    fn remove_pins(&self, transport: u32, backend: u32, request: &RemovePins) -> Result<PinsInfo>;
    /// What the cache of a backend holds of its device, in at most `cells` equal parts of it.
    fn map(&self, transport: u32, backend: u32, cells: Option<usize>) -> Result<DeviceMap>;
    /// Uses the backing device of a backend to its present end, if it has become larger.
    fn grow_backend(&self, transport: u32, backend: u32) -> Result<BackendGrown>;
    /// The backends of this host, or of all hosts.
    fn backends(&self, transport: u32, all: bool) -> Result<Vec<BackendInfo>>;
    /// Changes settings of a backend.
    fn set(&self, transport: u32, backend: u32, change: &SettingsChange) -> Result<Settings>;
    /// Writes all data that was written so far to the backing devices.
    fn checkpoint(&self, transport: u32, request: &Drain, report: Report<'_>) -> Result<Done>;
    /// Writes what was written up to one moment to the backing devices of several backends, which then stay there for a time.
    fn checkpoint_together(
        &self,
        transport: u32,
        request: &CommonCheckpoint,
        report: Report<'_>,
    ) -> Result<Done>;
    /// Writes all dirty data to the backing devices.
    fn drain(&self, transport: u32, request: &Drain, report: Report<'_>) -> Result<Done>;
    /// Verifies a range of a backend once.
    fn verify(&self, transport: u32, backend: u32, request: VerifyRange, report: Report<'_>) -> Result<Done>;
    /// The sample of the requests of a backend.
    fn sample(&self, transport: u32, backend: u32) -> Result<RequestSample>;
    /// The scrub of a backend.
    fn scrub(&self, transport: u32, backend: u32) -> Result<ScrubInfo>;
    /// Begins, pauses, continues or stops the scrub of a backend.
    fn set_scrub(
        &self,
        transport: u32,
        backend: u32,
        request: &ScrubRequest,
        report: Report<'_>,
    ) -> Result<Done>;
    /// Creates a block device.
    fn start_blkdev(&self, transport: u32, request: &StartBlkdev) -> Result<BlkdevInfo>;
    /// Changes a block device.
    fn set_blkdev(&self, transport: u32, blkdev: u32, change: &BlkdevChange) -> Result<BlkdevInfo>;
    /// Stops and removes a block device. The warnings name the parts that did not end properly.
    fn stop_blkdev(&self, transport: u32, blkdev: u32, request: StopBlkdev) -> Result<BlkdevStopped>;
    /// The block devices of this host, or of all hosts.
    fn blkdevs(&self, transport: u32, all: bool) -> Result<Vec<BlkdevInfo>>;
    /// The number of the backend of this host that the user names. A number is not looked up.
    fn backend_number(&self, transport: u32, backend: &NumberOrName) -> Result<u32>;
    /// The number of the backend of any host that the user names, for a block device on it. A number is not looked up.
    fn any_backend_number(&self, transport: u32, backend: &NumberOrName) -> Result<u32>;
    /// The number of the block device of this host that the user names. A number is not looked up.
    fn blkdev_number(&self, transport: u32, blkdev: &NumberOrName) -> Result<u32>;
    /// Refuses a transport, or a backend of it, that is not there.
    fn check_object(&self, transport: u32, backend: Option<u32>) -> Result<()>;
    /// The record of events.
    fn events(&self) -> Arc<Events>;
    /// The block devices of this host that are in use.
    fn blkdev_users(&self) -> Result<Vec<BlkdevUser>>;
    /// The status of the daemon and its objects.
    fn status(&self) -> Result<Status>;
}
