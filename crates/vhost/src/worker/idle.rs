//! A ring with nothing to do: it is looked at for a while, then its thread sleeps.
//!
//! Always true here: the guest is asked to kick before the thread sleeps, and what it offered before it could know that is seen.
//! A kick descriptor that is readable again and again although the ring has nothing new costs a few wake-ups a second: after
//! [`EMPTY_KICKS`] of them in a row the ring is looked at every [`PAUSE`] instead, until a request comes or the kicks end.

use super::{Halt, Worker, ring_error};
use crate::malformed;
use cbd_export::wake::{Interest, WaitSet};
use cbd_types::Result;
use std::io::{self, Read};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio_queue::QueueT;

/// Looks at the ring between two looks at the clock.
const LOOKS: usize = 64;
/// After so long without a request, spare buffers are let go.
const IDLE: Duration = Duration::from_secs(1);
/// Kicks in a row without a request after which the descriptor is not waited for.
pub(super) const EMPTY_KICKS: u32 = 16;
/// How long it is not waited for.
const PAUSE: Duration = Duration::from_millis(10);
/// Place of the kick descriptor among those that are waited on: behind the order to pause, before the device's.
const KICK: usize = 1;

impl Worker {
    fn has_more(&self) -> Result<bool> {
        let index = self.queue.avail_idx(self.memory.memory(), Ordering::Acquire).map_err(ring_error)?;
        Ok(index.0 != self.queue.next_avail())
    }

    /// Waits until there may be something to do.
    pub(super) fn idle(&mut self, halt: &Halt, waits: &mut WaitSet) -> Result<()> {
        let began = Instant::now();
        let (full, alone) = (self.is_full(), self.taken == 0);
        if alone && self.look(began, halt)? {
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
                // One more look at the descriptor: with another empty kick it is passed over again.
                self.empty_kicks = EMPTY_KICKS - 1;
            } else {
                self.buffers.trim();
                self.device.trim();
            }
        }
        if waits.failed(KICK) {
            return Err(malformed("the front end's kick descriptor is closed at its other end"));
        }
        if waits.readable(KICK) {
            self.clear_kick()?;
            self.empty_kicks = self.empty_kicks.saturating_add(1);
        }
        // It may have work of its own, when all its requests are answered (`serve` polls it while some are not).
        if alone && (KICK + 1..KICK + 1 + self.descriptors).any(|place| waits.readable(place)) {
            self.device.poll(&mut self.done);
            self.settle()?;
        }
        if full {
            return Ok(());
        }
        // What ends a wait without a request says nothing of when requests come.
        if alone && self.empty_kicks <= 1 {
            self.spin.learn(began.elapsed());
        }
        self.queue.disable_notification(self.memory.memory()).map_err(ring_error)
    }

    /// Looks at the ring for a while; whether something came.
    fn look(&mut self, began: Instant, halt: &Halt) -> Result<bool> {
        let window = self.spin.window();
        if window.is_zero() {
            return Ok(false);
        }
        loop {
            for _ in 0..LOOKS {
                if self.has_more()? {
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if began.elapsed() >= window || halt.is_ordered() {
                return Ok(false);
            }
        }
    }

    fn clear_kick(&self) -> Result<()> {
        let mut count = [0; 8];
        match (&*self.kick).read(&mut count) {
            Ok(1..) => Ok(()),
            Ok(_) => Err(malformed("the front end's kick descriptor is none that can be waited on")),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(())
            }
            Err(error) => Err(malformed(format!("the front end's kick descriptor cannot be read: {error}"))),
        }
    }
}
