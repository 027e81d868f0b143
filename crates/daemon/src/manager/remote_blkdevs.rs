//! Block devices of this host on backends of other hosts: their rows, their channels, and their exports in this process.
//!
//! Invariants: a device is opened when the host that has the backend serves it, and opened again as long as it is not. While that host is
//! away, requests wait. Work that can wait for another host runs without the lock of the tables: the worker takes the device out, and a
//! placeholder shows it.
//!
//! Elsewhere: the channel (`cbd-remote`), the rows (`cbd-engine`, `transport/channels.rs`), the host that serves (`services`), what that
//! host does while a device is open (`watch`).

mod moved;
mod watch;

use super::blkdev::{BlkdevSlot, blkdev_identity, export_device, name_while_closed, unknown};
use super::conditions::{HostWait, Observed};
use super::figures::remote_operations;
use super::slots::TransportHandle;
use super::tasks::{Stage, Task, poll_until};
use super::transport::{Running, running, running_mut};
use super::{Fixed, Manager, stopping};
use crate::api::{BlkdevClass, BlkdevInfo, BlkdevStopped, RemoteBlkdevStatus, StartBlkdev, StopBlkdev};
use crate::events::EventName;
use crate::exports::{ExportChoice, device_name, labels};
use cbd_engine::{BackendEntry, BlkdevSpec, RemoteBlkdev, RemoteState};
use cbd_export::BlockDevice;
use cbd_pmem::Mapping;
use cbd_remote::RemoteDevice;
use cbd_runtime::Counted;
use cbd_types::{BackendId, BlkdevId, Context, Error, ErrorKind, Name, Result};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long a command waits for the other host, which looks for new devices each second.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Time between two attempts to open a device.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);
/// Timeout of a command for a device that another worker has.
const TAKE_LIMIT: Duration = Duration::from_secs(10);
/// Requests that wait for longer than this are shown.
const SHOWN_WAIT: Duration = Duration::from_secs(3);

/// A block device of this host on a backend of another one; it may have failed to open.
#[derive(Debug)]
pub(super) struct RemoteSlot {
    row: RemoteBlkdev,
    pub blkdev: BlkdevSlot,
    device: Option<Arc<RemoteDevice<Mapping>>>,
    /// Whether a worker has the device itself, and this is its placeholder.
    is_taken: bool,
    /// When it is to be opened again.
    due: Instant,
    /// Looks one after the other at which no host had its backend.
    gone: u32,
    /// Whether both hosts woke each other at the last look.
    woken: bool,
    /// Bytes of the device at the last look, or as its clients know it.
    size: Option<u64>,
    /// Whether requests waited for long at the last look.
    is_late: Arc<AtomicBool>,
}

/// A device that was taken out of the tables. The worker must put it back, or remove it.
pub(super) struct TakenRemote {
    handle: TransportHandle,
    pub id: BlkdevId,
    pub slot: RemoteSlot,
}

impl RemoteSlot {
    fn closed(fixed: &Fixed, transport: u32, row: RemoteBlkdev) -> Self {
        let name = name_while_closed(fixed, transport, row.entry.id);
        let mut blkdev = BlkdevSlot::closed(row.entry.clone(), name);
        blkdev.left = Some(fixed.context.left(&identity_of(&row)));
        Self::without_device(row, blkdev)
    }

    fn without_device(row: RemoteBlkdev, blkdev: BlkdevSlot) -> Self {
        let (device, due) = (None, Instant::now());
        // What the clients of one whose backend this host had know.
        let size = blkdev.switch.as_ref().map(|switch| switch.geometry().size);
        Self {
            row,
            blkdev,
            device,
            is_taken: false,
            due,
            gone: 0,
            woken: false,
            size,
            is_late: Arc::default(),
        }
    }

    /// The row of `dev-list`.
    pub fn info(&self, handle: &TransportHandle) -> BlkdevInfo {
        let host = handle.host_name(self.row.owner);
        let mut info = self.info_of_host(handle);
        let of_host = format!("on backend {} of host {host}", self.row.entry.backend);
        info.note = Some(info.note.map_or_else(|| of_host.clone(), |note| format!("{of_host}; {note}")));
        info
    }

    /// The same without a note of the host that has the backend.
    fn info_of_host(&self, handle: &TransportHandle) -> BlkdevInfo {
        let mut info = self.blkdev.info(self.row.entry.id);
        info.alive &= !self.device.as_ref().is_some_and(|device| device.is_ended());
        // What else says that they are held says for how long.
        let is_said = self.device.is_none() && self.blkdev.error.is_none() && self.blkdev.is_held();
        if let Some(waiting) = self.waits_too_long().filter(|_| !is_said) {
            let host = handle.host_name(self.row.owner);
            let why = match self.host_wait(handle) {
                HostWait::Away => "it gives no sign of life",
                HostWait::Alive => "it is alive: its status says why",
                HostWait::Held => "they are held while the backend is moved",
            };
            let text = format!("requests have waited for host {host} for {} s: {why}", waiting.as_secs());
            info.error = Some(info.error.map_or_else(|| text.clone(), |error| format!("{error}; {text}")));
        }
        info
    }

    /// For how long requests have waited, if that is shown.
    fn waits_too_long(&self) -> Option<Duration> {
        self.waiting().filter(|waiting| *waiting > SHOWN_WAIT)
    }

    fn status(&self, handle: &TransportHandle) -> RemoteBlkdevStatus {
        let device = self.device.as_ref();
        let backend_host = handle.host_name(self.row.owner);
        let mut info = self.info_of_host(handle);
        info.operations = device.map(|device| remote_operations(device)).unwrap_or_default();
        let waiting = self.waiting().unwrap_or_default();
        let held = self.held_requests().map_or(0, |(count, _)| count);
        RemoteBlkdevStatus {
            info,
            backend_host_id: self.row.owner.0,
            backend_host,
            in_flight: (device.map_or(0, |device| device.in_flight()) + held) as u64,
            waiting_ms: u64::try_from(waiting.as_millis()).unwrap_or(u64::MAX),
            atomic_unit: device.map(|device| device.geometry().atomic_unit),
            woken: device.is_some_and(|device| device.is_woken()),
        }
    }

    fn take(&mut self) -> Self {
        let shown = Self {
            row: self.row.clone(),
            blkdev: self.blkdev.shown(self.row.entry.id),
            device: self.device.clone(),
            is_taken: true,
            due: self.due,
            gone: self.gone,
            woken: self.woken,
            size: self.size,
            is_late: Arc::clone(&self.is_late),
        };
        std::mem::replace(self, shown)
    }

    fn open(&mut self, fixed: &Fixed, handle: &TransportHandle) -> Result<()> {
        if let Some(former) = self.device.take() {
            // Before the next session: nothing else may store in the area.
            former.close();
        }
        // Neither host would serve a new session.
        handle.refuse_held(self.row.entry.backend)?;
        let backend = handle.backend_below(&self.row)?;
        let device = Arc::new(connect(fixed, handle, &self.row)?);
        handle.connect_wake(&self.row, &device);
        let exported: Arc<dyn BlockDevice> = Arc::clone(&device) as _;
        if self.blkdev.export.is_some()
            && let Some(switch) = &self.blkdev.switch
        {
            // Its backend was moved: the requests that were held continue.
            switch.resume(exported);
            (self.blkdev.error, self.device) = (None, Some(device));
            return Ok(());
        }
        let (exported, switch) = handle.switchable(exported);
        // Before the export: it has this size at least.
        self.size = Some(exported.geometry().size);
        let identity = identity_of(&self.row);
        match export_device(fixed, handle, (&backend, &identity), &self.row.entry, &exported) {
            Ok(export) => {
                (self.blkdev.export, self.blkdev.error, self.device) = (Some(export), None, Some(device));
                self.blkdev.switch = switch;
                Ok(())
            }
            Err(error) => {
                device.close();
                Err(error)
            }
        }
    }

    /// Opens a device that has a row already; on failure it stores the reason.
    fn open_again(&mut self, fixed: &Fixed, handle: &TransportHandle) {
        let Err(error) = self.open(fixed, handle) else { return };
        if error.kind() == ErrorKind::NotFound {
            self.gone = self.gone.saturating_add(1);
            self.fail_held();
        }
        let line = error.line();
        // Attempts repeat the same error: only a change of it is logged.
        if self.blkdev.error.as_ref() != Some(&line) && error.kind() == ErrorKind::Busy {
            tracing::info!(transport = handle.id, blkdev = self.row.entry.id.0, "{error}");
        } else if self.blkdev.error.as_ref() != Some(&line) {
            let (event, transport, id) = (EventName::BlkdevFailed.name(), handle.id, self.row.entry.id);
            tracing::error!(transport, blkdev = id.0, event, "the block device is not served: {error}");
        }
        self.blkdev.error = Some(line);
    }

    /// Ends it with the daemon: its export is closed, or left to the next daemon. Requests that still wait for the other host get no
    /// error, since their clients wait for the next daemon, which ends their session.
    pub fn end(mut self) {
        self.blkdev.end();
    }

    /// As a task of the end of the daemon.
    pub fn end_task(self) -> Task {
        let name = format!("block device {} on a backend of another host", self.row.entry.id);
        Task::new(name, move |stage: &Stage| {
            stage.set("it does not close");
            self.end();
        })
    }
}

impl TransportHandle {
    /// The backend of another host below a device.
    fn backend_below(&self, row: &RemoteBlkdev) -> Result<BackendEntry> {
        let is_it = |entry: &BackendEntry| entry.id == row.entry.backend && entry.uuid == row.backend_uuid;
        if let Some(found) = self.entries_of_others().into_iter().find(is_it) {
            return Ok(found);
        }
        if matches!(self.transport.server_area(row, None), Ok(RemoteState::Gone)) {
            return Err(self.gone(row));
        }
        let (backend, host) = (row.entry.backend, self.host_name(row.owner));
        let text =
            format!("it waits until backend {backend} of host {host}, which is being moved, is served again");
        Err(Error::new(ErrorKind::Busy, text))
    }

    fn gone(&self, row: &RemoteBlkdev) -> Error {
        let (backend, host, id) = (row.entry.backend, self.host_name(row.owner), row.entry.id);
        let text = format!(
            "backend {backend} of host {host}, on which it was made, is gone; dev-stop -d {id} removes it"
        );
        Error::new(ErrorKind::NotFound, text)
    }
}

/// Begins a session in the channel to the host that has the backend.
fn connect(fixed: &Fixed, handle: &TransportHandle, row: &RemoteBlkdev) -> Result<RemoteDevice<Mapping>> {
    let end = Instant::now() + CONNECT_LIMIT;
    let found = RefCell::new(Ok(RemoteState::NotServed));
    poll_until(end, || {
        *found.borrow_mut() = handle.transport.server_area(row, None);
        !matches!(*found.borrow(), Ok(RemoteState::NotServed))
    });
    let host = handle.host_name(row.owner);
    let server = match found.into_inner()? {
        RemoteState::Served(area) => area,
        RemoteState::Gone => return Err(handle.gone(row)),
        RemoteState::NotServed => {
            let text = format!(
                "host {host} did not open backend {} for this one within {} s",
                row.entry.backend,
                CONNECT_LIMIT.as_secs()
            );
            let text = format!("{text}: see whether it is alive (host-list), and its log");
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
    };
    let place = handle.channel_use(fixed, row.area, server);
    let left = end.saturating_duration_since(Instant::now()).max(RETRY_INTERVAL);
    RemoteDevice::open(handle.transport.shared_region(), place, left)
        .context(|| format!("the channel to host {host}"))
}

impl Running {
    /// Adds the block devices of this host on backends of other hosts. The background thread opens them.
    pub(super) fn restore_remotes(&mut self, fixed: &Fixed, transport: u32) {
        for row in self.transport.remote_blkdevs() {
            let mut slot = RemoteSlot::closed(fixed, transport, row);
            slot.blkdev.error = Some("it waits for the host that has its backend".to_owned());
            self.remotes.insert(slot.row.entry.id, slot);
        }
    }

    /// The rows of `dev-list`.
    pub(super) fn remote_infos(&self, transport: u32) -> Vec<BlkdevInfo> {
        let handle = self.handle(transport);
        self.remotes.values().map(|slot| slot.info(&handle)).collect()
    }

    /// The part of the status.
    pub(super) fn remote_status(&self, transport: u32) -> Vec<RemoteBlkdevStatus> {
        let handle = self.handle(transport);
        self.remotes.values().map(|slot| slot.status(&handle)).collect()
    }

    /// The samples of their requests, for the log.
    pub(super) fn observe_remotes(&self, transport: u32, path: &str) -> Vec<Observed> {
        let handle = self.handle(transport);
        self.remotes.values().map(|slot| slot.observed(&handle, path)).collect()
    }

    /// A block device that keeps the transport in use.
    pub(super) fn first_remote(&self) -> Option<String> {
        if self.remote_starts.get() > 0 {
            return Some("a block device is being started on it".to_owned());
        }
        let (id, slot) = self.remotes.first_key_value()?;
        Some(format!("block device {id} stands on backend {} of another host", slot.row.entry.backend))
    }
}

impl TransportHandle {
    /// The identities across restarts of the block devices on backends of other hosts.
    pub(super) fn remote_identities(&self) -> Vec<Vec<u8>> {
        self.transport.remote_blkdevs().iter().map(identity_of).collect()
    }
}

/// The identity of a block device across restarts.
fn identity_of(row: &RemoteBlkdev) -> Vec<u8> {
    blkdev_identity(&row.backend_uuid, row.entry.id)
}

impl Manager {
    /// Whether this backend is one of another host of a shared region.
    pub(super) fn is_of_another_host(&self, transport: u32, backend: BackendId) -> Result<bool> {
        let handle = {
            let tables = self.tables()?;
            let running = running(&tables, transport)?;
            if running.living.is_none() || running.backends.contains_key(&backend) {
                return Ok(false);
            }
            running.handle(transport)
        };
        Ok(handle.entries_of_others().iter().any(|entry| entry.id == backend))
    }

    /// Creates the row, waits for the other host, then opens the export; on failure the row is removed.
    pub(super) fn remote_start(
        &self,
        transport: u32,
        request: &StartBlkdev,
        choice: &ExportChoice,
        name: Option<&Name>,
    ) -> Result<BlkdevInfo> {
        let _work = self.begin_work()?;
        let _starting = self.begin_remote_start(transport)?;
        let handle = self.handle(transport)?;
        let backend = BackendId(request.backend);
        handle.refuse_moving(backend)?;
        let spec =
            BlkdevSpec { backend, host: handle.host, export: choice.to_string(), shared: request.shared };
        let id = handle.transport.create_remote_blkdev(&spec, name)?;
        let opened = self.open_new_remote(&handle, id, choice);
        match opened {
            Ok(slot) => {
                // Without the note of `dev-list`, which is no warning.
                let info = slot.blkdev.info(id);
                let mut tables = self.tables.lock();
                match running_mut(&mut tables, transport) {
                    Ok(running) => drop(running.remotes.insert(id, slot)),
                    Err(_) => {
                        drop(tables);
                        slot.end();
                        return Err(stopping());
                    }
                }
                drop(tables);
                self.refresh_tables_copy(&handle);
                Ok(info)
            }
            Err(error) => {
                if let Err(second) = handle.transport.remove_blkdev(id) {
                    tracing::error!(
                        blkdev = id.0,
                        "the block device that did not start cannot be removed: {second}"
                    );
                }
                Err(error)
            }
        }
    }

    /// Counts a start, so that the transport is not unregistered meanwhile.
    fn begin_remote_start(&self, transport: u32) -> Result<Counted> {
        let tables = self.tables()?;
        if tables.get(&transport).is_some_and(|slot| slot.is_taken) {
            let text = format!("transport {transport} is being opened, unregistered or grown");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Ok(running(&tables, transport)?.remote_starts.add())
    }

    fn open_new_remote(
        &self,
        handle: &TransportHandle,
        id: BlkdevId,
        choice: &ExportChoice,
    ) -> Result<RemoteSlot> {
        let row = handle.transport.remote_blkdevs().into_iter().find(|row| row.entry.id == id);
        let mut slot = RemoteSlot::closed(&self.fixed, handle.id, row.ok_or_else(|| unknown(id))?);
        let backend = handle.backend_below(&slot.row)?;
        handle.allow(&self.fixed, &backend, choice)?;
        let _opening = self.opening.read();
        slot.open(&self.fixed, handle)
            .inspect_err(|_| drop(handle.revoke(&self.fixed, &backend, Some(id))))?;
        Ok(slot)
    }

    /// Closes a block device on a backend of another host, and removes its row.
    pub(super) fn remote_stop(
        &self,
        transport: u32,
        id: BlkdevId,
        request: StopBlkdev,
    ) -> Result<BlkdevStopped> {
        let _work = self.begin_work()?;
        let mut taken = self.take_remote(transport, id)?;
        let stopped = taken.stop(&self.fixed, request);
        if stopped.is_err() {
            self.put_remote_back(taken);
            return stopped;
        }
        let handle = taken.handle.clone();
        self.remove_remote(taken);
        self.refresh_tables_copy(&handle);
        stopped
    }

    /// Removes a device that was taken from the tables.
    pub(super) fn remove_remote(&self, taken: TakenRemote) {
        let mut tables = self.tables.lock();
        let shown = running_mut(&mut tables, taken.handle.id)
            .ok()
            .and_then(|running| running.remotes.remove(&taken.id));
        self.slot_returned.notify_all();
        drop(tables);
        drop(shown);
    }

    /// Changes a block device on a backend of another host. That host takes its class from the row.
    pub(super) fn remote_change(
        &self,
        transport: u32,
        id: BlkdevId,
        name: Option<Option<Name>>,
        class: Option<BlkdevClass>,
    ) -> Result<BlkdevInfo> {
        let _work = self.begin_work()?;
        let mut taken = self.take_remote(transport, id)?;
        let changed = taken.change(name, class);
        // Without the note of `dev-list`, which is no warning.
        let (handle, info) = (taken.handle.clone(), taken.slot.blkdev.info(id));
        self.put_remote_back(taken);
        self.refresh_tables_copy(&handle);
        changed.map(|()| info)
    }

    /// Takes a device out of the tables, and leaves a placeholder. Waits for another worker that has it.
    pub(super) fn take_remote(&self, transport: u32, id: BlkdevId) -> Result<TakenRemote> {
        let end = Instant::now() + TAKE_LIMIT;
        let mut tables = self.tables()?;
        loop {
            let running = running_mut(&mut tables, transport)?;
            let handle = running.handle(transport);
            let slot = running.remotes.get_mut(&id).ok_or_else(|| unknown(id))?;
            if !slot.is_taken {
                return Ok(TakenRemote { handle, id, slot: slot.take() });
            }
            if Instant::now() >= end {
                let text = format!("block device {id} is busy: it is being opened or closed");
                return Err(Error::new(ErrorKind::Busy, text));
            }
            self.slot_returned.wait_until(&mut tables, end);
            if self.stopping.load(Ordering::SeqCst) {
                return Err(stopping());
            }
        }
    }

    /// Puts a device back. If the daemon has ended meanwhile, ends it.
    pub(super) fn put_remote_back(&self, taken: TakenRemote) {
        let TakenRemote { handle, id, slot } = taken;
        let mut tables = self.tables.lock();
        let there = running_mut(&mut tables, handle.id).ok().and_then(|running| running.remotes.get_mut(&id));
        let Some(there) = there else {
            drop(tables);
            return slot.end();
        };
        let shown = std::mem::replace(there, slot);
        self.slot_returned.notify_all();
        drop(tables);
        drop(shown);
    }

    /// Opens the devices that are not open and are due. If a command holds the tables, the next pass does it.
    pub(super) fn reopen_remotes(self: &Arc<Self>) {
        let Some(mut tables) = self.tables_to_retry() else { return };
        let mut due = Vec::new();
        for (&transport, slot) in tables.iter_mut() {
            let Ok(running) = &mut slot.running else { continue };
            let closed = running.remotes.iter_mut().filter(|(_, slot)| slot.is_due());
            due.extend(closed.map(|(&id, slot)| {
                slot.due = Instant::now() + RETRY_INTERVAL;
                (transport, id)
            }));
        }
        drop(tables);
        for (transport, id) in due {
            self.spawn_retry(move |manager| manager.reopen_remote(transport, id));
        }
    }

    pub(super) fn reopen_remote(&self, transport: u32, id: BlkdevId) {
        let Ok(_work) = self.begin_work() else { return };
        let Ok(mut taken) = self.take_remote(transport, id) else { return };
        if taken.slot.is_waiting() {
            let _opening = self.opening.read();
            taken.slot.open_again(&self.fixed, &taken.handle);
        }
        self.put_remote_back(taken);
    }
}

impl RemoteSlot {
    fn is_due(&self) -> bool {
        self.is_waiting() && !self.is_taken && self.due <= Instant::now()
    }

    /// Whether it is to be opened: it has no export, or one whose backend was moved.
    pub fn is_waiting(&self) -> bool {
        self.blkdev.export.is_none() || (self.device.is_none() && self.blkdev.switch.is_some())
    }
}

impl TakenRemote {
    fn change(&mut self, name: Option<Option<Name>>, class: Option<BlkdevClass>) -> Result<()> {
        let Self { handle, id, slot } = self;
        // 1. The row. 2. The links.
        let stored = name
            .map_or(Ok(()), |name| handle.store_blkdev_name(*id, name.as_ref()))
            .and_then(|()| class.map_or(Ok(()), |class| handle.store_blkdev_class(*id, class)));
        if let Some(row) = handle.transport.remote_blkdevs().into_iter().find(|row| row.entry.id == *id) {
            slot.blkdev.take_entry(handle.id, row.entry.clone());
            slot.row = row;
        }
        stored
    }

    fn stop(&mut self, fixed: &Fixed, request: StopBlkdev) -> Result<BlkdevStopped> {
        let Self { handle, id, slot } = self;
        let has_ended = slot.device.as_ref().is_some_and(|device| device.is_ended());
        if has_ended && !request.force {
            slot.blkdev.refuse_if_used()?;
        }
        // With force its clients see errors, and the threads of its export end.
        let first = if request.force { slot.end_session(handle) } else { None };
        // Where each request fails, no close can wait until the kernel has written its dirty pages.
        let unended = slot.blkdev.close_for_good(request.force || has_ended)?;
        let lost = has_ended
            .then(|| "its requests had failed before: what its clients had not flushed is lost".to_owned());
        // Without force requests can be in flight whose client has disconnected.
        let unconfirmed = first.or_else(|| slot.end_session(handle));
        slot.device = None;
        labels::remove(&fixed.context, &device_name(handle.id, id.0));
        // Only while the other host has the backend is there anything to revoke.
        let below = handle.backend_below(&slot.row).ok();
        let still_allowed = below.and_then(|backend| handle.revoke(fixed, &backend, Some(*id)));
        handle.transport.remove_blkdev(*id)?;
        let (event, backend) = (EventName::BlkdevStopped.name(), slot.row.entry.backend.0);
        tracing::info!(transport = handle.id, blkdev = id.0, event, backend, "stopped");
        let warnings = unconfirmed.into_iter().chain(lost).chain(unended).chain(still_allowed);
        Ok(BlkdevStopped { warnings: warnings.collect() })
    }
}
