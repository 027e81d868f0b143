//! A device whose backend is gone: each request fails.
//!
//! Invariants: a request completes with an error when it is submitted.
//!
//! Elsewhere: when a backend counts as gone (`cbd-daemon`).

use cbd_export::{BlockDevice, RequestQueue};
use cbd_types::{Completion, Error, ErrorKind, Geometry, Request, Result};
use std::os::fd::RawFd;

/// A block device of which each request fails.
#[derive(Debug)]
pub struct EndedDevice(Geometry);

impl EndedDevice {
    /// One of the geometry that clients know.
    #[must_use]
    pub const fn new(geometry: Geometry) -> Self {
        Self(geometry)
    }
}

impl BlockDevice for EndedDevice {
    fn geometry(&self) -> Geometry {
        self.0
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        Ok(Box::new(EndedQueue))
    }
}

struct EndedQueue;

impl RequestQueue for EndedQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        let error = Error::new(ErrorKind::Stopped, "the backend of the block device is gone");
        done.push(Completion { id: request.id, result: Err(error), buffer: request.buffer });
    }

    fn poll(&mut self, _: &mut Vec<Completion>) {}

    fn parked(&self) -> usize {
        0
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }
}
