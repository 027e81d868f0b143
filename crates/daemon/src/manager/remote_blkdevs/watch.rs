//! What the host that has the backend does while a block device is open: it serves it again in another session, or removes the backend.
//!
//! Invariants: a device whose backend is gone gives errors, also if it was idle. What is shown and logged is said once.
//!
//! Elsewhere: devices that are not open (the parent module), sessions (`cbd-remote`).

use super::RemoteSlot;
use crate::api::HostInfo;
use crate::events::EventName;
use crate::manager::conditions::{self, HostWait, Observed};
use crate::manager::slots::TransportHandle;
use crate::manager::transport::{running, running_mut};
use crate::manager::{Fixed, Manager};
use cbd_engine::{ChannelArea, RemoteBlkdev, RemoteState};
use cbd_export::BlockDevice;
use cbd_pmem::Mapping;
use cbd_remote::RemoteDevice;
use cbd_types::{BlkdevId, Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Looks without the backend after which it counts as removed: one may fall between two stores of its host.
pub(super) const GONE_LOOKS: u32 = 3;

/// How long a block device that is stopped waits until its requests are executed no more.
const CONFIRM_LIMIT: Duration = Duration::from_secs(5);

impl Manager {
    /// Looks whether the hosts that have the backends still serve the open devices. If a command holds the tables, the next pass does it.
    pub(in crate::manager) fn watch_remotes(self: &Arc<Self>) {
        for handle in self.shared_handles() {
            let Some(tables) = self.tables_to_retry() else { return };
            let Ok(running) = running(&tables, handle.id) else { continue };
            let open: Vec<OpenRemote> =
                running.remotes.values().filter_map(RemoteSlot::open_device).collect();
            drop(tables);
            for mut open in open {
                // Without the lock: it may read the whole table of the other host. What cannot be read now is read in the next pass.
                let Ok(()) = open.look(&self.fixed, &handle) else { continue };
                let size = open.device.geometry().size;
                let mut tables = self.tables.lock();
                let slot = running_mut(&mut tables, handle.id)
                    .ok()
                    .and_then(|running| running.remotes.get_mut(&open.id()));
                if let Some(slot) = slot.filter(|slot| slot.has(&open.device)) {
                    (slot.gone, slot.woken, slot.blkdev.error) = (open.gone, open.woken, open.error);
                    if slot.size.replace(size).is_some_and(|before| before < size) {
                        let (transport, id) = (handle.id, open.row.entry.id);
                        self.spawn_retry(move |manager| manager.grow_remote(transport, id, size));
                    }
                }
            }
        }
    }
}

impl Manager {
    /// Lets the clients of a block device see that it has grown.
    fn grow_remote(&self, transport: u32, id: BlkdevId, size: u64) {
        let Ok(_work) = self.begin_work() else { return };
        let taken = match self.take_remote(transport, id) {
            Ok(taken) => taken,
            Err(error) => {
                let why = error.line();
                tracing::warn!(
                    transport,
                    blkdev = id.0,
                    "its clients do not see that it has grown to {size} bytes: {why}"
                );
                return;
            }
        };
        if let Some(export) = &taken.slot.blkdev.export {
            let (event, path) = (EventName::BackendGrown.name(), export.device_path.clone());
            match export.grow(size, true) {
                Ok(None) => tracing::info!(
                    transport,
                    blkdev = id.0,
                    event,
                    bytes = size,
                    "{path} has grown to {size} bytes"
                ),
                Ok(Some(when)) => {
                    tracing::info!(
                        transport,
                        blkdev = id.0,
                        event,
                        bytes = size,
                        "{path} has grown to {size} bytes: {when}"
                    );
                }
                Err(error) => {
                    tracing::warn!(
                        transport,
                        blkdev = id.0,
                        "the users of {path} do not see that it has grown to {size} bytes: {error}"
                    );
                }
            }
        }
        self.put_remote_back(taken);
    }
}

/// What a pass sees of an open device, and notes of it.
struct OpenRemote {
    row: RemoteBlkdev,
    device: Arc<RemoteDevice<Mapping>>,
    gone: u32,
    woken: bool,
    error: Option<String>,
    /// How clients reach it.
    path: String,
}

impl OpenRemote {
    fn id(&self) -> BlkdevId {
        self.row.entry.id
    }

    /// Follows a service that has begun again, and ends the session once the backend is gone: requests would wait without end.
    ///
    /// # Errors
    /// Errors of reading.
    fn look(&mut self, fixed: &Fixed, handle: &TransportHandle) -> Result<()> {
        let known = ChannelArea { at: self.device.server_area(), bytes: self.row.area.bytes };
        let state = handle.transport.server_area(&self.row, Some(known))?;
        self.gone = if state == RemoteState::Gone { self.gone.saturating_add(1) } else { 0 };
        match state {
            RemoteState::Served(area) if self.device.is_ended() => self.reopen(fixed, handle, area),
            RemoteState::Served(area) if area != known => self.device.follow(area.at),
            RemoteState::Gone if self.gone >= GONE_LOOKS => {
                if !self.device.is_ended() {
                    self.device.end();
                }
                self.fails(handle, &handle.gone(&self.row));
            }
            _ if self.device.is_ended() => {
                let (host, backend) = (handle.host_name(self.row.owner), self.row.entry.backend);
                let text = format!("host {host} has ended that it serves backend {backend} to this one");
                self.fails(handle, &Error::new(ErrorKind::Stopped, text));
            }
            _ => handle.connect_wake(&self.row, &self.device),
        }
        self.note_wake(handle);
        Ok(())
    }

    /// Logs that both hosts wake each other, and when that is over: a request takes longer then.
    fn note_wake(&mut self, handle: &TransportHandle) {
        let woken = self.device.is_woken();
        if std::mem::replace(&mut self.woken, woken) == woken {
            return;
        }
        let (transport, blkdev, host) = (handle.id, self.id().0, handle.host_name(self.row.owner));
        let how = if woken { "wake each other" } else { "look from time to time for requests" };
        tracing::info!(transport, blkdev, "{}: host {host} and this one {how}", self.path);
    }

    /// Begins another session with a host that serves the device again.
    fn reopen(&mut self, fixed: &Fixed, handle: &TransportHandle, area: ChannelArea) {
        let place = handle.channel_use(fixed, self.row.area, area);
        match self.device.reopen(handle.transport.shared_region(), place) {
            Ok(true) => {
                let (transport, blkdev, backend) = (handle.id, self.id().0, self.row.entry.backend.0);
                let (event, device) = (EventName::BlkdevStarted.name(), &self.path);
                let host = handle.host_name(self.row.owner);
                tracing::info!(
                    transport,
                    blkdev,
                    event,
                    backend,
                    device,
                    "host {host} serves {device} again"
                );
                self.error = None;
            }
            // It was closed meanwhile.
            Ok(false) => {}
            Err(error) => self.fails(handle, &error),
        }
    }

    /// Each request fails. Logs it once.
    fn fails(&mut self, handle: &TransportHandle, error: &Error) {
        let line = error.line();
        if self.error.as_ref() != Some(&line) {
            let (transport, blkdev) = (handle.id, self.id().0);
            let event = EventName::BlkdevFailed.name();
            tracing::error!(transport, blkdev, event, "requests fail: {error}");
        }
        self.error = Some(line);
    }
}

impl RemoteSlot {
    fn open_device(&self) -> Option<OpenRemote> {
        let device = self.device.as_ref().filter(|_| !self.is_taken)?;
        let info = self.blkdev.info(self.row.entry.id);
        Some(OpenRemote {
            row: self.row.clone(),
            device: Arc::clone(device),
            gone: self.gone,
            woken: self.woken,
            error: self.blkdev.error.clone(),
            path: info.dev_name,
        })
    }

    /// For how long requests have waited for the other host, also those that are held until another one serves the backend.
    pub(super) fn waiting(&self) -> Option<Duration> {
        let in_flight = self.device.as_ref().and_then(|device| device.waiting());
        in_flight.max(self.held_requests().map(|(_, age)| age))
    }

    /// The sample of its requests, for the log.
    pub(super) fn observed(&self, handle: &TransportHandle, path: &str) -> Observed {
        // Seen twice: the first time it may be this process that did not run.
        let waiting = self.waits_too_long();
        let was_late = self.is_late.swap(waiting.is_some(), Ordering::Relaxed);
        let waiting = waiting
            .filter(|_| was_late)
            .map(|age| (age, handle.host_name(self.row.owner), self.host_wait(handle)));
        let (id, backend) = (self.row.entry.id, self.row.entry.backend);
        conditions::of_remote_blkdev((handle.id, path), id, backend, waiting)
    }

    pub(super) fn host_wait(&self, handle: &TransportHandle) -> HostWait {
        let in_flight = self.device.as_ref().map_or(0, |device| device.in_flight());
        match self.is_owner_alive(handle) {
            false => HostWait::Away,
            true if in_flight == 0 && self.held_requests().is_some() => HostWait::Held,
            true => HostWait::Alive,
        }
    }

    fn is_owner_alive(&self, handle: &TransportHandle) -> bool {
        let is_it = |host: &HostInfo| host.host_id == self.row.owner.0 && host.alive;
        handle.hosts().is_ok_and(|hosts| hosts.iter().any(is_it))
    }

    /// How many requests are held, and for how long the oldest of them has been.
    pub(super) fn held_requests(&self) -> Option<(usize, Duration)> {
        self.blkdev.switch.as_ref().and_then(|switch| switch.waiting())
    }

    /// Ends the session, and waits until the other host executes no more requests of it. Returns a warning if it does not say so.
    pub(super) fn end_session(&self, handle: &TransportHandle) -> Option<String> {
        let device = self.device.as_ref()?;
        if device.close_and_wait(CONFIRM_LIMIT).unwrap_or(false) {
            return None;
        }
        let warning = format!(
            "host {} has not said that it executes no more requests of this block device: those that were in flight may still be \
             executed there, also after later ones of others; see whether it is alive (host-list)",
            handle.host_name(self.row.owner)
        );
        tracing::warn!(transport = handle.id, blkdev = self.row.entry.id.0, "{warning}");
        Some(warning)
    }

    fn has(&self, device: &Arc<RemoteDevice<Mapping>>) -> bool {
        !self.is_taken && self.device.as_ref().is_some_and(|own| Arc::ptr_eq(own, device))
    }
}
