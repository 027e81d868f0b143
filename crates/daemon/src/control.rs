//! What can be asked of a daemon: the operations behind the control socket.
//!
//! Invariants: the operations block; an async runtime must call them on a thread of their own. An operation that
//! fails has changed nothing, unless its error says what it did.
//!
//! Elsewhere: the wire ([`crate::server`]), the work ([`crate::manager`]).

use crate::api::{
    BackendInfo, BackendStarted, BlkdevInfo, BlkdevStopped, Done, Drain, HostInfo, Progress,
    RegisterTransport, Settings, SettingsChange, StartBackend, StartBlkdev, Status, StopBackend, StopBlkdev,
    TransportInfo, TransportRegistered,
};
use cbd_types::Result;

/// Whether a long operation continues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flow {
    /// It continues.
    Continue,
    /// The client has disconnected: the operation ends without its last steps.
    Cancel,
}

/// Takes the progress of a long operation and says whether it continues.
pub type Report<'a> = &'a mut dyn FnMut(Progress) -> Flow;

/// The operations of a daemon.
#[expect(clippy::missing_errors_doc, reason = "each fails with the kinds that its object can have")]
pub trait Control: Send + Sync + 'static {
    /// Registers this host on a region.
    fn register_transport(&self, request: &RegisterTransport) -> Result<TransportRegistered>;
    /// Takes this host off a transport that has no backend of its own any more.
    fn unregister_transport(&self, transport: u32) -> Result<()>;
    /// The transports.
    fn transports(&self) -> Result<Vec<TransportInfo>>;
    /// The hosts of a transport.
    fn hosts(&self, transport: u32) -> Result<Vec<HostInfo>>;
    /// Brings a backing device onto a transport.
    fn start_backend(&self, transport: u32, request: &StartBackend) -> Result<BackendStarted>;
    /// Drains a backend and takes it off the transport.
    fn stop_backend(
        &self,
        transport: u32,
        backend: u32,
        request: &StopBackend,
        report: Report<'_>,
    ) -> Result<Done>;
    /// The backends of this host, or of all hosts.
    fn backends(&self, transport: u32, all: bool) -> Result<Vec<BackendInfo>>;
    /// Changes settings of a backend.
    fn set(&self, transport: u32, backend: u32, change: &SettingsChange) -> Result<Settings>;
    /// Brings the backing devices to a checkpoint: all that has been written so far is on them.
    fn checkpoint(&self, transport: u32, request: &Drain, report: Report<'_>) -> Result<Done>;
    /// Writes all that is dirty to the backing devices.
    fn drain(&self, transport: u32, request: &Drain, report: Report<'_>) -> Result<Done>;
    /// Makes a block device.
    fn start_blkdev(&self, transport: u32, request: &StartBlkdev) -> Result<BlkdevInfo>;
    /// Stops and removes a block device. The warnings of the answer name what did not end in order.
    fn stop_blkdev(&self, transport: u32, blkdev: u32, request: StopBlkdev) -> Result<BlkdevStopped>;
    /// The block devices of this host, or of all hosts.
    fn blkdevs(&self, transport: u32, all: bool) -> Result<Vec<BlkdevInfo>>;
    /// All that there is to know.
    fn status(&self) -> Result<Status>;
}
