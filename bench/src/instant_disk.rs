//! A backing device that completes every operation at once: it stores nothing and reads as zeroes.
//!
//! It is for measurements of the engine alone, on which the disk must have no influence.

use cbd_backing::{Backing, Identity, PollableQueue};
use cbd_export::Event;
use cbd_types::backing::BackingDone;
use cbd_types::{BackingGeometry, BackingOp, BackingQueue, OpToken, Result};
use std::os::fd::RawFd;

/// The geometry of a disk of `size` bytes with a volatile cache, as the engine sees it.
#[must_use]
pub const fn geometry(size: u64) -> BackingGeometry {
    BackingGeometry {
        size,
        sector: 512,
        physical_sector: 4096,
        rotational: false,
        volatile_cache: true,
        discard_zeroes: true,
        discard_granularity: 512,
    }
}

/// The device.
#[derive(Debug)]
pub struct InstantDisk {
    geometry: BackingGeometry,
    identity: Identity,
}

impl InstantDisk {
    /// Creates a device of `size` bytes.
    ///
    /// # Errors
    /// None for a size that a disk can have.
    pub fn new(size: u64) -> Result<Self> {
        Ok(Self { geometry: geometry(size), identity: Identity::parse(&format!("file;size={size}"))? })
    }
}

impl Backing for InstantDisk {
    fn geometry(&self) -> BackingGeometry {
        self.geometry
    }

    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn open_queue(&self, _depth: usize) -> Result<Box<dyn PollableQueue>> {
        Ok(Box::new(InstantQueue { done: Vec::new(), event: Event::new()? }))
    }

    fn describe(&self) -> String {
        "instant".to_owned()
    }
}

struct InstantQueue {
    done: Vec<BackingDone>,
    event: Event,
}

impl BackingQueue for InstantQueue {
    fn submit(&mut self, token: OpToken, mut op: BackingOp) {
        if let BackingOp::Read { buffer, .. } = &mut op {
            buffer.fill(0);
        }
        if self.done.is_empty() {
            self.event.signal();
        }
        self.done.push(BackingDone { token, op, result: Ok(()) });
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        if !self.done.is_empty() {
            self.event.clear();
            done.append(&mut self.done);
        }
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        self.poll(done);
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn depth(&self) -> usize {
        32
    }
}

impl PollableQueue for InstantQueue {
    fn wait_descriptor(&self) -> RawFd {
        self.event.descriptor()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_export::wait_any;
    use cbd_types::AlignedBuffer;
    use std::time::Duration;

    #[test]
    fn an_operation_completes_at_the_next_poll() {
        let mut disk = InstantDisk::new(1 << 20).and_then(|disk| disk.open_queue(1)).expect("a queue");
        let is_readable = |disk: &dyn PollableQueue| {
            wait_any(&[disk.wait_descriptor()], Some(Duration::ZERO)).expect("a descriptor").is_some()
        };
        let buffer = AlignedBuffer::from_slice(&[7; 512]);
        disk.submit(OpToken(9), BackingOp::Read { offset: 0, buffer });
        assert_eq!(disk.in_flight(), 1);
        assert!(is_readable(&*disk));
        let mut done = Vec::new();
        disk.poll(&mut done);
        assert_eq!(disk.in_flight(), 0);
        assert!(!is_readable(&*disk));
        assert_eq!(done.len(), 1);
        assert_eq!(done[0].token, OpToken(9));
        assert!(
            matches!(&done[0].op, BackingOp::Read { buffer, .. } if buffer.iter().all(|&byte| byte == 0))
        );
    }
}
