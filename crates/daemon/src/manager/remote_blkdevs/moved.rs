//! Block devices whose backends move from this host or to it: their exports stay open, and their requests are held.
//!
//! Invariants: a session ends only while requests are held, with none in flight.
//!
//! Elsewhere: the steps of a move (`moves`), how requests are held (`cbd-remote`, `SwitchDevice`).

use super::{RemoteSlot, watch::GONE_LOOKS};
use crate::manager::blkdev::BlkdevSlot;
use crate::manager::slots::TransportHandle;
use cbd_engine::RemoteBlkdev;
use cbd_export::BlockDevice;
use cbd_remote::EndedDevice;
use cbd_types::HostId;
use std::sync::Arc;
use std::time::Instant;

impl RemoteSlot {
    /// One whose backend this host had; its requests are held.
    pub fn moved(row: RemoteBlkdev, mut blkdev: BlkdevSlot) -> Self {
        blkdev.entry = row.entry.clone();
        Self::without_device(row, blkdev)
    }

    /// Ends the session with the host that had the backend; requests are held.
    pub fn close_channel(&mut self) {
        self.blkdev.release();
        if let Some(device) = self.device.take() {
            device.close();
        }
        (self.due, self.gone, self.blkdev.error) = (Instant::now(), 0, None);
    }

    /// Lets requests that were held for a move fail once the backend is gone: its new host was cleared.
    pub fn fail_held(&mut self) {
        let Some(switch) = self.blkdev.switch.as_ref().filter(|switch| switch.is_held()) else { return };
        if self.gone >= GONE_LOOKS && self.device.is_none() {
            switch.resume(Arc::new(EndedDevice::new(switch.geometry())));
        }
    }

    /// Reads the row again after it was changed.
    pub fn take_row(&mut self, handle: &TransportHandle) {
        let id = self.row.entry.id;
        if let Some(row) = handle.transport.remote_blkdevs().into_iter().find(|row| row.entry.id == id) {
            self.blkdev.entry = row.entry.clone();
            self.row = row;
        }
    }

    /// Its block device, whose backend this host has now.
    pub fn take_blkdev(&mut self) -> BlkdevSlot {
        let id = self.row.entry.id;
        let closed = BlkdevSlot::closed(self.blkdev.entry.clone(), self.blkdev.info(id).dev_name);
        std::mem::replace(&mut self.blkdev, closed)
    }

    /// Whether a worker has the device itself.
    pub const fn is_taken(&self) -> bool {
        self.is_taken
    }

    /// The host that had the backend when its channel was opened.
    pub const fn owner(&self) -> HostId {
        self.row.owner
    }

    /// The identity of the backend.
    pub const fn backend_uuid(&self) -> [u8; 16] {
        self.row.backend_uuid
    }

    /// Whether its requests are held although it has a session.
    pub fn has_held_session(&self) -> bool {
        let is_held = self.blkdev.switch.as_ref().is_some_and(|switch| switch.is_held());
        is_held && self.device.is_some() && !self.is_taken
    }
}
