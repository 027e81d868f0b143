//! One ring without a front end, for callers that have mapped a guest's memory themselves and serve its requests on
//! their own thread. The code is that of a front end's ring (`worker`, `memory`).

use crate::memory::{GuestMap, Piece};
use crate::server::Options;
use crate::worker::{Common, Setup, Worker};
use cbd_export::BlockDevice;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::sync::Arc;
use vm_memory::GuestAddress;

/// A piece of a guest's memory.
#[derive(Debug)]
pub struct GuestPiece {
    /// The mapped file.
    pub file: File,
    /// Offset in the file in bytes.
    pub offset: u64,
    /// Guest physical address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// A ring as the guest's driver set it up.
#[derive(Clone, Copy, Debug)]
pub struct GuestRing {
    /// Number of descriptors: a power of two.
    pub size: u16,
    /// Guest address of the descriptor table.
    pub descriptors: u64,
    /// Guest address of the available ring.
    pub available: u64,
    /// Guest address of the used ring.
    pub used: u64,
    /// The features that the driver negotiated.
    pub features: u64,
}

/// Executes the requests in `ring` on the calling thread, until the ring is empty or about `most` requests were taken:
/// a guest could add requests forever.
///
/// # Errors
/// The memory cannot be mapped, or the guest violates the protocol; then the ring is not accessed any more.
pub fn serve_ring(
    device: &dyn BlockDevice,
    memory: Vec<GuestPiece>,
    ring: GuestRing,
    most: usize,
    options: &Options,
) -> Result<()> {
    let piece = |given: GuestPiece| {
        let GuestPiece { file, offset, address, size } = given;
        (Piece { guest: address, size, front_end: address, offset }, file)
    };
    let pieces = memory.into_iter().map(piece).collect();
    let memory = Arc::new(GuestMap::new(pieces, &options.memory_limits(), &Arc::default())?);
    let setup = Setup {
        index: 0,
        size: ring.size,
        addresses: [ring.descriptors, ring.available, ring.used].map(GuestAddress),
        base: 0,
        features: ring.features,
    };
    // No client kicks: only the requests that are in the ring at this moment are served.
    let silent = File::open("/dev/null").map_err(|error| {
        Error::new(ErrorKind::System, "cannot open /dev/null in place of a kick descriptor").caused_by(error)
    })?;
    let mut worker = Worker::new(
        setup,
        Common::of(device, options, Arc::new(device.geometry().size.into())),
        memory,
        Arc::new(silent),
        device.open_queue()?,
        None,
    )?;
    worker.run_until_empty(most)
}
