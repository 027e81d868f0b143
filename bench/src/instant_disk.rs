//! A backing device that is done before it began: it keeps nothing and reads as zeroes.
//!
//! For measurements of the engine alone, in which the disk must not matter.

use cbd_types::backing::BackingDone;
use cbd_types::{BackingGeometry, BackingOp, BackingQueue, OpToken};

/// What it is, at `size` bytes.
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

/// A queue to that device.
#[derive(Debug, Default)]
pub struct InstantDisk {
    done: Vec<BackingDone>,
}

impl BackingQueue for InstantDisk {
    fn submit(&mut self, token: OpToken, mut op: BackingOp) {
        if let BackingOp::Read { buffer, .. } = &mut op {
            buffer.fill(0);
        }
        self.done.push(BackingDone { token, op, result: Ok(()) });
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        done.append(&mut self.done);
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

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::AlignedBuffer;

    #[test]
    fn what_is_submitted_comes_back_at_the_next_poll() {
        let mut disk = InstantDisk::default();
        let buffer = AlignedBuffer::from_slice(&[7; 512]);
        disk.submit(OpToken(9), BackingOp::Read { offset: 0, buffer });
        assert_eq!(disk.in_flight(), 1);
        let mut done = Vec::new();
        disk.poll(&mut done);
        assert_eq!(disk.in_flight(), 0);
        assert_eq!(done.len(), 1);
        assert_eq!(done[0].token, OpToken(9));
        assert!(
            matches!(&done[0].op, BackingOp::Read { buffer, .. } if buffer.iter().all(|&byte| byte == 0))
        );
    }
}
