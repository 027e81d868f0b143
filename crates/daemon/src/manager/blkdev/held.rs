//! Requests that are held while the backend of their block device moves to another host.
//!
//! Invariants: requests that are held continue with one device, or fail: a move that has ended leaves none held.
//!
//! Elsewhere: the steps of a move (`moves`), the device that is exchanged (`cbd-remote`, `SwitchDevice`).

use super::BlkdevSlot;
use crate::manager::backend::BackendSlot;
use crate::manager::slots::TransportHandle;
use cbd_export::BlockDevice;
use cbd_remote::SwitchDevice;
use cbd_types::Result;
use std::sync::Arc;
use std::time::Duration;

/// Requests that are held for longer than this are shown.
const SHOWN_HOLD: Duration = Duration::from_secs(3);

impl BlkdevSlot {
    /// For how long its requests have been held for a move, if that is shown.
    pub(super) fn held(&self) -> Option<String> {
        let held = self.switch.as_ref()?.held_for().filter(|held| *held > SHOWN_HOLD)?;
        Some(format!(
            "requests have been held for {} s while its backend moves to another host",
            held.as_secs()
        ))
    }

    /// Whether its requests are held for a move.
    pub fn is_held(&self) -> bool {
        self.switch.as_ref().is_some_and(|switch| switch.is_held())
    }

    /// Holds its requests, and waits until none is in flight.
    ///
    /// # Errors
    /// [`cbd_types::ErrorKind::TimedOut`] if some do not complete in time.
    pub fn hold(&self, limit: Duration) -> Result<()> {
        self.switch.as_ref().map_or(Ok(()), |switch| switch.hold(limit))
    }

    /// Closes the device below it; its requests are held.
    pub fn release(&self) {
        if let Some(switch) = &self.switch {
            switch.release();
        }
    }

    /// Continues with the device that it has.
    pub fn resume_former(&self) {
        if let Some(switch) = &self.switch {
            switch.resume_former();
        }
    }
}

impl BackendSlot {
    /// Continues the requests that were held for a move of the backend.
    pub(in crate::manager) fn resume_blkdevs(&self) {
        let Some(run) = &self.run else { return };
        for blkdev in self.blkdevs.values() {
            // Where the device of this run was not released.
            blkdev.resume_former();
            if let Some(switch) = blkdev.switch.as_ref().filter(|switch| switch.is_held()) {
                switch.resume(self.device_of(run, &blkdev.entry));
            }
        }
    }
}

impl TransportHandle {
    /// A device below an export. In a region that several hosts share it changes when the backend moves.
    pub(in crate::manager) fn switchable(
        &self,
        device: Arc<dyn BlockDevice>,
    ) -> (Arc<dyn BlockDevice>, Option<Arc<SwitchDevice>>) {
        if self.living.is_none() {
            return (device, None);
        }
        let switch = Arc::new(SwitchDevice::new(device));
        (Arc::clone(&switch) as _, Some(switch))
    }
}
