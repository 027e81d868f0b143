//! The device below the ring: it notes what it is asked to change.
//!
//! Invariants: it accepts only requests for whole sectors of its own, which are durable at completion if the guest cannot flush.

use crate::wires::{SECTOR, SIZE};
use cbd_export::{BlockDevice, RequestQueue};
use cbd_types::{ByteRange, Completion, Geometry, Operation, Request, Result};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};

/// A change of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Change {
    Write(u64, Vec<u8>),
    Zero(ByteRange),
}

/// A device that records its requests.
pub(super) struct Watched {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) noted: Arc<Mutex<Vec<Change>>>,
    pub(super) can_flush: bool,
}

struct WatchedQueue {
    queue: Box<dyn RequestQueue>,
    noted: Arc<Mutex<Vec<Change>>>,
    can_flush: bool,
}

impl BlockDevice for Watched {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let (queue, noted) = (self.device.open_queue()?, Arc::clone(&self.noted));
        Ok(Box::new(WatchedQueue { queue, noted, can_flush: self.can_flush }))
    }
}

impl WatchedQueue {
    fn note(&self, request: &Request) {
        let Request { operation, range, fua, ref buffer, .. } = *request;
        let sector = u64::from(SECTOR);
        assert!(range.start <= range.end && range.end <= SIZE, "{operation:?} of {range}");
        assert!(range.start.is_multiple_of(sector) && range.end.is_multiple_of(sector), "{range}");
        let change = match operation {
            Operation::Read | Operation::Flush => None,
            Operation::Write => {
                assert_eq!(buffer.len() as u64, range.len());
                Some(Change::Write(range.start, buffer.to_vec()))
            }
            Operation::Discard | Operation::WriteZeroes => Some(Change::Zero(range)),
        };
        if let Some(change) = change {
            assert!(
                fua || self.can_flush,
                "{operation:?} of a guest that cannot flush is not durable at once"
            );
            self.noted.lock().unwrap_or_else(PoisonError::into_inner).push(change);
        }
    }
}

impl RequestQueue for WatchedQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.note(&request);
        self.queue.submit(request, done);
    }

    fn submit_plugged(&mut self, request: Request, done: &mut Vec<Completion>) {
        self.note(&request);
        self.queue.submit_plugged(request, done);
    }

    fn unplug(&mut self, done: &mut Vec<Completion>) {
        self.queue.unplug(done);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.queue.poll(done);
    }

    fn parked(&self) -> usize {
        self.queue.parked()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        self.queue.wait_descriptors()
    }
}
