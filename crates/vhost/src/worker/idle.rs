//! Waiting for requests: the thread polls the ring for a while, then sleeps.
//!
//! Invariants: before the thread sleeps it enables notifications and then checks the ring again, so it does not miss a
//! request that the guest added before it could see that. A kick descriptor that is always readable although the ring
//! has no new request costs a bounded number of wake-ups: after [`EMPTY_KICKS`] consecutive empty kicks the thread
//! polls the ring every [`PAUSE`] instead, until a request arrives or the kicks end.

use super::{PauseEvent, Worker, ring_error};
use crate::malformed;
use cbd_export::wake::{Interest, WaitSet};
use cbd_types::Result;
use std::io::{self, Read};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio_queue::QueueT;

/// Polls of the ring between two reads of the clock.
const POLLS: usize = 64;
/// After this time without a request, spare buffers are freed.
const IDLE: Duration = Duration::from_secs(1);
/// Number of consecutive kicks without a request after which the thread does not wait for the descriptor.
pub(super) const EMPTY_KICKS: u32 = 16;
/// How long the thread then does not wait for the descriptor.
const PAUSE: Duration = Duration::from_millis(10);
/// Index of the kick descriptor in the wait set: after the pause event, before the device's descriptors.
const KICK: usize = 1;

impl Worker {
    fn has_more(&self) -> Result<bool> {
        let index = self.queue.avail_idx(self.memory.memory(), Ordering::Acquire).map_err(ring_error)?;
        Ok(index.0 != self.queue.next_avail())
    }

    /// Waits until a request may have arrived or completed.
    pub(super) fn idle(&mut self, pause: &PauseEvent, waits: &mut WaitSet) -> Result<()> {
        let began = Instant::now();
        let (full, alone) = (self.is_full(), self.taken == 0);
        if alone && self.poll_ring(began, pause)? {
            return Ok(());
        }
        self.check_memory()?;
        let memory = self.memory.memory();
        if !full && self.queue.enable_notification(memory).map_err(ring_error)? {
            return self.queue.disable_notification(memory).map_err(ring_error);
        }
        let paused = !full && self.empty_kicks >= EMPTY_KICKS;
        waits.set(KICK, if full || paused { Interest::Nothing } else { Interest::Read });
        let idle = (alone && self.buffers.held() > 0).then_some(IDLE);
        waits.wait(if paused { Some(PAUSE) } else { idle })?;
        if waits.none_ready() {
            if paused {
                // Reads the descriptor once more: after another empty kick the thread again does not wait for the
                // descriptor.
                self.empty_kicks = EMPTY_KICKS - 1;
            } else {
                self.buffers.trim();
                self.device.trim();
            }
        }
        if waits.failed(KICK) {
            return Err(malformed("the other end of the front end's kick descriptor is closed"));
        }
        if waits.readable(KICK) {
            self.clear_kick()?;
            self.empty_kicks = self.empty_kicks.saturating_add(1);
        }
        // The device may have work of its own even when all requests are answered (`serve` polls the device only while
        // a request is unanswered).
        if alone && (KICK + 1..KICK + 1 + self.descriptors).any(|index| waits.readable(index)) {
            self.device.poll(&mut self.done);
            self.process_completions()?;
        }
        if full {
            return Ok(());
        }
        // A wait that ended without a request does not change the spin time.
        if alone && self.empty_kicks <= 1 {
            self.spin.adapt(began.elapsed());
        }
        self.queue.disable_notification(self.memory.memory()).map_err(ring_error)
    }

    /// Polls the ring for the spin time; true if a request may have arrived or completed.
    fn poll_ring(&mut self, began: Instant, pause: &PauseEvent) -> Result<bool> {
        let window = self.spin.time();
        if window.is_zero() {
            return Ok(false);
        }
        loop {
            for _ in 0..POLLS {
                if self.has_more()? {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if began.elapsed() >= window || pause.is_signalled() {
                return Ok(false);
            }
        }
    }

    fn clear_kick(&self) -> Result<()> {
        let mut count = [0; 8];
        match (&*self.kick).read(&mut count) {
            Ok(1..) => Ok(()),
            Ok(_) => Err(malformed("the front end's kick descriptor cannot be waited on")),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(())
            }
            Err(error) => Err(malformed(format!("the front end's kick descriptor cannot be read: {error}"))),
        }
    }
}
