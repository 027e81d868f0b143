//! One ring without a front end, for whoever has a guest's memory already and wants its requests served on his own thread.
//!
//! Always true here: it is the ring that a front end's would be (`worker`), over the same memory (`memory`).

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
    /// What it is a mapping of.
    pub file: File,
    /// Where it begins in the file, in bytes.
    pub offset: u64,
    /// Where the guest sees it.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// A ring as its driver set it up.
#[derive(Clone, Copy, Debug)]
pub struct GuestRing {
    /// Descriptors: a power of two.
    pub size: u16,
    /// Where the guest has the table of descriptors.
    pub descriptors: u64,
    /// And the ring of what is offered.
    pub available: u64,
    /// And that of what is answered.
    pub used: u64,
    /// The features that the driver agreed to.
    pub features: u64,
}

/// Takes what `ring` offers and answers it, on the calling thread, until nothing is left or about `most` requests were taken: a
/// guest can go on offering for ever.
///
/// # Errors
/// When the memory cannot be mapped, and where the guest breaks the rules; the ring is not touched any more then.
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
    let memory = Arc::new(GuestMap::new(memory.into_iter().map(piece).collect(), &options.bounds())?);
    let setup = Setup {
        index: 0,
        size: ring.size,
        places: [ring.descriptors, ring.available, ring.used].map(GuestAddress),
        base: 0,
        features: ring.features,
    };
    // Nobody kicks: what is there is what is served.
    let silent = File::open("/dev/null").map_err(|error| {
        Error::new(ErrorKind::System, format!("cannot open /dev/null in place of a kick descriptor: {error}"))
    })?;
    let mut worker = Worker::new(
        setup,
        Common::of(device, options),
        memory,
        Arc::new(silent),
        device.open_queue()?,
        None,
    )?;
    worker.run_dry(most)
}
