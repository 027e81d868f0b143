//! Block devices: their rows in the region and their exports in this process.

mod held;

use super::backend::BackendSlot;
use super::probe::answers;
use super::retry::Retry;
use super::slots::{TakenSlot, TransportHandle};
use super::transport::{Running, running};
use super::{Fixed, Manager};
use crate::api::{BlkdevInfo, BlkdevStopped, StartBlkdev, StopBlkdev};
use crate::events::EventName;
use crate::exports::{Described, DeviceToExport, Export, ExportChoice, Labels, device_name, labels};
use crate::left::{LeftDevice, LeftDeviceByName};
use cbd_engine::{BackendEntry, BlkdevEntry, BlkdevSpec};
use cbd_export::BlockDevice;
use cbd_remote::{SharedDevice, SwitchDevice};
use cbd_runtime::RunningBackend;
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, Name, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout for the threads of an export that was closed to end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A block device of this host; its export may have failed to open.
#[derive(Debug)]
pub(super) struct BlkdevSlot {
    pub entry: BlkdevEntry,
    pub export: Option<Export>,
    /// The device below the export, which changes when the backend moves to another host; none in a region of one host.
    pub switch: Option<Arc<SwitchDevice>>,
    pub error: Option<String>,
    /// The device name that is shown while no export is open.
    pub name: String,
    /// The kernel devices and mounts that a predecessor may have left of it; none for a device of another host.
    pub left: Option<LeftDevice>,
    /// When to retry an export that did not open.
    pub retry: Option<Retry>,
    /// The row of `dev-list` while a worker has the device itself.
    shown: Option<BlkdevInfo>,
    /// How its socket or link has changed since its export was opened; none if it is unchanged.
    pub file_change: Option<String>,
}

impl BlkdevSlot {
    /// One without an export; `name` is the device name that is shown.
    pub const fn closed(entry: BlkdevEntry, name: String) -> Self {
        Self {
            entry,
            export: None,
            switch: None,
            error: None,
            name,
            left: None,
            retry: None,
            file_change: None,
            shown: None,
        }
    }

    /// The row of `dev-list`.
    pub fn info(&self, id: BlkdevId) -> BlkdevInfo {
        if let Some(shown) = &self.shown {
            return shown.clone();
        }
        let name =
            self.export.as_ref().map_or_else(|| self.name.clone(), |export| export.device_path.clone());
        let failure = self.export.as_ref().and_then(Export::failure);
        BlkdevInfo {
            blkdev_id: id.0,
            host_id: self.entry.host.0,
            backend_id: self.entry.backend.0,
            name: self.entry.shown_name().map(Name::to_string),
            class: self.entry.class.into(),
            shared: self.entry.shared,
            dev_name: name,
            alive: self.export.is_some() && failure.is_none(),
            export: self.entry.export.clone(),
            method: self.export.as_ref().map(|export| export.method()),
            error: self.error.clone().or(failure).or_else(|| self.held()),
            note: self.note(),
            operations: BTreeMap::new(),
        }
    }

    /// Whether a worker has the device itself, and this is its placeholder.
    pub const fn is_taken(&self) -> bool {
        self.shown.is_some()
    }

    /// The placeholder in the tables while a worker has the slot.
    pub fn shown(&self, id: BlkdevId) -> Self {
        Self {
            entry: self.entry.clone(),
            export: None,
            switch: self.switch.clone(),
            error: self.error.clone(),
            name: self.name.clone(),
            left: self.left.clone(),
            retry: None,
            file_change: None,
            shown: Some(self.info(id)),
        }
    }

    /// The note of a device that is served: its faults; without faults, why `auto` chose its export.
    fn note(&self) -> Option<String> {
        let export = self.export.as_ref()?;
        let no_label = export.labels().and_then(Labels::problem).map(str::to_owned);
        let faults: Vec<String> =
            self.file_change.iter().cloned().chain(export.wait_reason()).chain(no_label).collect();
        if faults.is_empty() { export.note.clone() } else { Some(faults.join("; ")) }
    }

    /// The kernel device that a predecessor may have left, if this process has no export open for it.
    const fn left_behind(&self) -> Option<&LeftDevice> {
        if self.export.is_some() { None } else { self.left.as_ref() }
    }

    /// Refuses if the device is in use.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] that names the user of the device.
    pub fn refuse_if_used(&self) -> Result<()> {
        if let Some(export) = &self.export {
            return export.refuse_if_used();
        }
        match self.left_behind().map(LeftDevice::user).transpose()?.flatten() {
            Some(user) => Err(Error::new(ErrorKind::Busy, format!("{user}; end that first, or use --force"))),
            None => Ok(()),
        }
    }

    /// Closes the export because the device is removed; returns a warning if its threads did not end.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is in use and `force` is not set; the export remains open.
    pub fn close_for_good(&mut self, force: bool) -> Result<Option<String>> {
        if self.export.is_none() && !force {
            self.refuse_if_used()?;
        }
        let unended = self.close(force)?;
        self.left_behind().map_or(Ok(()), LeftDevice::remove)?;
        Ok(unended)
    }

    /// Closes the export at the end of the daemon, or leaves it to the next daemon.
    pub fn end(&mut self) {
        let Some(export) = self.export.take() else { return };
        self.switch = None;
        let name = export.name().to_owned();
        if let Err(error) = export.end() {
            tracing::warn!("{name} did not close completely: {error}");
        }
    }

    /// Closes the export, with `force` even while it is in use; the row remains. Returns a warning if its threads did
    /// not end.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is in use and `force` is not set; the export remains open.
    pub fn close(&mut self, force: bool) -> Result<Option<String>> {
        let Some(export) = self.export.take() else { return Ok(None) };
        let name = export.name().to_owned();
        match export.stop(force) {
            Ok(()) => {
                self.switch = None;
                Ok(None)
            }
            Err((Some(export), error)) => {
                self.export = Some(*export);
                Err(error)
            }
            Err((None, error)) => {
                self.switch = None;
                let unended = format!("{name} did not close completely: {}", error.line());
                tracing::warn!("{unended}");
                Ok(Some(unended))
            }
        }
    }
}

impl BackendSlot {
    /// Opens the export of a block device that has a row already; on failure the slot stores the reason.
    pub(super) fn restore_blkdev(&mut self, fixed: &Fixed, handle: &TransportHandle, entry: &BlkdevEntry) {
        let before = self.blkdevs.remove(&entry.id);
        let (error_before, retry) = before.map_or((None, None), |slot| (slot.error, slot.retry));
        let (opened, error) = match self.open_export(fixed, handle, entry) {
            Ok(opened) => (Some(opened), None),
            Err(error) => {
                let line = error.line();
                // Retries repeat the same error: only a change of it is logged.
                if error_before.as_ref() != Some(&line) {
                    let (event, transport) = (EventName::BlkdevFailed.name(), handle.id);
                    tracing::error!(
                        blkdev = entry.id.0,
                        event,
                        transport,
                        backend = entry.backend.0,
                        "the block device is not served: {error}"
                    );
                }
                (None, Some(line))
            }
        };
        let retry = if opened.is_some() { None } else { retry };
        let (export, switch) = opened.map_or((None, None), |(export, switch)| (Some(export), switch));
        let name = name_while_closed(fixed, handle.id, entry.id);
        let left = Some(fixed.context.left(&self.identity(entry.id)));
        self.blkdevs.insert(
            entry.id,
            BlkdevSlot { export, switch, error, left, retry, ..BlkdevSlot::closed(entry.clone(), name) },
        );
    }

    /// Refuses while requests of an export that was closed by force, or that did not open completely, still wait for
    /// the disk: a late write must not overwrite data that a new export has acknowledged.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if they do not end within [`CLOSE_TIMEOUT`].
    pub(super) fn refuse_while_served(&self) -> Result<()> {
        let queues = self.former_queues(Instant::now() + CLOSE_TIMEOUT);
        if queues == 0 {
            return Ok(());
        }
        let text = format!(
            "{queues} threads of an export that was closed by force still have requests that wait for {}: they end when it answers, with \
             backend-stop, or with the daemon",
            self.path
        );
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// Queues of block devices that are closed, and of services that have ended, which are still there at `end`.
    pub(super) fn former_queues(&self, end: Instant) -> usize {
        let is_open = |id| {
            self.blkdevs.get(&id).is_some_and(|slot| slot.export.is_some()) || self.services.contains_key(&id)
        };
        self.run.as_ref().map_or(0, |run| run.former_queues(&is_open, end))
    }

    /// The identity by which a block device on this backend is recognized after a restart.
    fn identity(&self, id: BlkdevId) -> Vec<u8> {
        blkdev_identity(&self.entry.uuid, id)
    }

    fn open_export(
        &self,
        fixed: &Fixed,
        handle: &TransportHandle,
        entry: &BlkdevEntry,
    ) -> Result<(Export, Option<Arc<SwitchDevice>>)> {
        let run = self.run.as_ref().ok_or_else(|| {
            Error::new(
                ErrorKind::Stopped,
                format!(
                    "backend {} is not up ({}); correct that and start it again with backend-start",
                    entry.backend,
                    self.error.as_deref().unwrap_or("stopped")
                ),
            )
        })?;
        self.refuse_while_served()?;
        let device = self.device_of(run, entry);
        let (device, switch) = handle.switchable(device);
        let export = export_device(fixed, handle, (&self.entry, &self.identity(entry.id)), entry, &device)?;
        Ok((export, switch))
    }

    /// The device of a block device in this run.
    fn device_of(&self, run: &RunningBackend, entry: &BlkdevEntry) -> Arc<dyn BlockDevice> {
        let device = run.device_of(entry.id);
        device.set_class(entry.class);
        if entry.shared { Arc::new(SharedDevice::new(device, Arc::clone(&self.changes))) } else { device }
    }
}

/// Opens the export of a block device of this host, with the backend and the identity that it has.
pub(super) fn export_device(
    fixed: &Fixed,
    handle: &TransportHandle,
    (below, identity): (&BackendEntry, &[u8]),
    entry: &BlkdevEntry,
    device: &Arc<dyn BlockDevice>,
) -> Result<Export> {
    let choice = ExportChoice::of_row(&entry.export)?;
    handle.refuse_unallowed(fixed, below, entry.id, &choice)?;
    socket_answers(&choice)?;
    let transport = handle.id;
    let name = device_name(transport, entry.id.0);
    let queues = usize::try_from(below.handlers).unwrap_or(1).clamp(1, 128);
    let place = DeviceToExport { name: &name, identity, queues };
    let may_be_kernel = !matches!(choice, ExportChoice::Nbd(_) | ExportChoice::VhostUser(_));
    let described = described(transport, &below.uuid, entry);
    let labels = may_be_kernel.then(|| Labels::announce(&fixed.context, &name, described));
    let export = Export::start(&choice, place, device, &fixed.context)?;
    let export = match labels {
        Some(labels) => export.with_labels(labels),
        None => export,
    };
    let shown = entry.shown_name().map(|name| format!(" ({name})")).unwrap_or_default();
    let (event, device) = (EventName::BlkdevStarted.name(), &export.device_path);
    let backend = below.id.0;
    tracing::info!(transport, blkdev = entry.id.0, event, backend, device, "serving {device}{shown}");
    if let Some(note) = &export.note {
        tracing::warn!(transport, blkdev = entry.id.0, "{note}");
    }
    Ok(export)
}

/// What the labels of a block device say, with the UUID of its backend if that is its own.
pub(super) fn described(transport: u32, uuid: &[u8; 16], entry: &BlkdevEntry) -> Described {
    Described {
        transport,
        backend: entry.backend.0,
        blkdev: entry.id.0,
        name: entry.shown_name().cloned(),
        uuid: (!entry.further).then_some(*uuid),
    }
}

/// Checks that the file system of the export's socket responds.
fn socket_answers(choice: &ExportChoice) -> Result<()> {
    choice.socket().and_then(|path| path.to_str()).map_or(Ok(()), answers)
}

/// The identity of a block device across restarts: the random UUID of its backend, and its number.
pub(super) fn blkdev_identity(backend: &[u8; 16], id: BlkdevId) -> Vec<u8> {
    [backend.as_slice(), &id.0.to_le_bytes()].concat()
}

impl TransportHandle {
    /// The block devices of other hosts.
    pub(super) fn blkdevs_of_others(&self) -> Vec<BlkdevEntry> {
        if self.living.is_some() {
            return self.transport.blkdevs_of_others().unwrap_or_default();
        }
        self.transport.blkdevs().into_iter().filter(|entry| entry.host != self.host).collect()
    }

    /// The identities of the block devices of this host across restarts.
    pub(super) fn identities(&self) -> Vec<Vec<u8>> {
        let ours = self.transport.blkdevs().into_iter().filter(|entry| entry.host == self.host);
        let identity = |entry: BlkdevEntry| {
            let backend = self.transport.backend(entry.backend).ok()?;
            Some(blkdev_identity(&backend.uuid, entry.id))
        };
        ours.filter_map(identity).chain(self.remote_identities()).collect()
    }
}

impl Running {
    /// Rows for the block devices of this host and for `others`, those of other hosts.
    pub(super) fn blkdev_infos(&self, transport: u32, others: Vec<BlkdevEntry>) -> Vec<BlkdevInfo> {
        let mut list: Vec<BlkdevInfo> = self
            .backends
            .values()
            .flat_map(|slot| slot.blkdevs.iter().map(|(&id, blkdev)| blkdev.info(id)))
            .collect();
        list.extend(self.remote_infos(transport));
        list.extend(others.into_iter().map(|entry| {
            let (id, name) = (entry.id, device_name(transport, entry.id.0));
            BlkdevSlot::closed(entry, name).info(id)
        }));
        list.sort_by_key(|info| info.blkdev_id);
        list
    }
}

impl Manager {
    pub(super) fn blkdev_start(&self, transport: u32, request: &StartBlkdev) -> Result<BlkdevInfo> {
        let default = self.fixed.config.defaults.export.as_deref();
        let choice: ExportChoice = request.export.as_deref().or(default).unwrap_or("auto").parse()?;
        choice.refuse_remote(request.allow_remote)?;
        let name = request.name.as_deref().map(Name::new).transpose()?;
        // Without the lock: no other command may wait for a file system here.
        socket_answers(&choice)?;
        if self.is_of_another_host(transport, BackendId(request.backend))? {
            return self.remote_start(transport, request, &choice, name.as_ref());
        }
        let mut taken =
            self.take_slot(transport, BackendId(request.backend), "its block device is being opened")?;
        let TakenSlot { handle, slot, .. } = &mut taken;
        let existing = {
            let _opening = self.opening.read();
            slot.allow_existing(&self.fixed, handle, request, &choice)
        };
        let result = existing.unwrap_or_else(|| {
            if request.shared {
                // Of others it ends what was stopped since the last pass. An error is that of another one.
                drop(taken.serve(&self.fixed));
            } else {
                taken.refuse_served(&self.fixed)?;
            }
            self.blkdev_create(&taken.handle, &mut taken.slot, &choice, name.as_ref(), request.shared)
        });
        self.put_back(taken);
        result
    }

    /// Creates the row, then opens the export; on failure the row is removed.
    pub(super) fn blkdev_create(
        &self,
        handle: &TransportHandle,
        slot: &mut BackendSlot,
        choice: &ExportChoice,
        name: Option<&Name>,
        shared: bool,
    ) -> Result<BlkdevInfo> {
        let TransportHandle { id: transport, host, transport: engine, .. } = handle;
        let (transport, host, backend) = (*transport, *host, slot.entry.id);
        if slot.stopping {
            return Err(slot.being_stopped());
        }
        let shares = |blkdev: &BlkdevSlot| shared && blkdev.entry.shared;
        if let Some((other, blkdev)) = slot.blkdevs.iter().find(|(_, blkdev)| !shares(blkdev)) {
            let device = blkdev.info(*other).dev_name;
            let text = format!("backend {backend} has a block device already: {device} ({other})");
            let what_to_do = match (shared, blkdev.entry.shared) {
                (true, false) => "; stop that first, and start it with --shared, too",
                (false, true) => "; beside it others are started with --shared",
                _ => "; stop that first",
            };
            return Err(Error::new(ErrorKind::Busy, text + what_to_do));
        }
        let _opening = self.opening.read();
        // Before its row is created.
        slot.refuse_while_served()?;
        let spec = BlkdevSpec { backend, host, export: choice.to_string(), shared };
        let id = engine.create_named_blkdev(&spec, name)?;
        let entry = engine.blkdevs().into_iter().find(|entry| entry.id == id);
        let opened = entry.ok_or_else(|| unknown(id)).and_then(|entry| {
            handle.allow(&self.fixed, &slot.entry, choice)?;
            Ok((slot.open_export(&self.fixed, handle, &entry)?, entry))
        });
        match opened {
            Ok(((export, switch), entry)) => {
                let name = name_while_closed(&self.fixed, transport, id);
                let left = Some(self.fixed.context.left(&slot.identity(id)));
                let export = Some(export);
                let blkdev = BlkdevSlot { export, switch, left, ..BlkdevSlot::closed(entry, name) };
                let info = blkdev.info(id);
                slot.blkdevs.insert(id, blkdev);
                Ok(info)
            }
            Err(error) => {
                handle.revoke(&self.fixed, &slot.entry, Some(id));
                if let Err(second) = engine.remove_blkdev(id) {
                    tracing::error!(
                        blkdev = id.0,
                        "the block device that did not start cannot be removed: {second}"
                    );
                }
                Err(error)
            }
        }
    }

    pub(super) fn blkdev_stop(
        &self,
        transport: u32,
        id: BlkdevId,
        request: StopBlkdev,
    ) -> Result<BlkdevStopped> {
        let found = {
            let tables = self.tables()?;
            if tables.get(&transport).is_some_and(|slot| slot.is_taken) {
                let text = format!("transport {transport} is being opened, unregistered or grown");
                return Err(Error::new(ErrorKind::Busy, text));
            }
            if running(&tables, transport).is_ok_and(|running| running.remotes.contains_key(&id)) {
                drop(tables);
                return self.remote_stop(transport, id, request);
            }
            running(&tables, transport).map(|running| {
                let has_it = |(_, slot): &(&BackendId, &BackendSlot)| slot.blkdevs.contains_key(&id);
                running.backends.iter().find(has_it).map(|(&backend, _)| backend)
            })
        };
        let backend = match found {
            Err(down) if down.kind() == ErrorKind::Stopped => {
                self.stop_without_region(transport, id, request, &down)?;
                return Ok(BlkdevStopped::default());
            }
            found => found?.ok_or_else(|| unknown(id))?,
        };
        let mut taken = self.take_slot(transport, backend, "its block device is being stopped")?;
        let result = taken.blkdev_stop(&self.fixed, id, request);
        self.put_back(taken);
        result
    }
}

impl TakenSlot {
    fn blkdev_stop(&mut self, fixed: &Fixed, id: BlkdevId, request: StopBlkdev) -> Result<BlkdevStopped> {
        let unended =
            self.slot.blkdevs.get_mut(&id).ok_or_else(|| unknown(id))?.close_for_good(request.force)?;
        // Those of a device that a predecessor left, too.
        labels::remove(&fixed.context, &device_name(self.handle.id, id.0));
        let still_allowed = self.handle.revoke(fixed, &self.slot.entry, Some(id));
        self.handle.transport.remove_blkdev(id)?;
        self.slot.blkdevs.remove(&id);
        let (event, backend) = (EventName::BlkdevStopped.name(), self.id.0);
        tracing::info!(transport = self.handle.id, blkdev = id.0, event, backend, "stopped");
        Ok(BlkdevStopped { warnings: unended.into_iter().chain(still_allowed).collect() })
    }
}

impl Manager {
    /// Removes the kernel device that a previous daemon left of a block device whose region is not up. Its row remains
    /// in the region, so a new kernel device is created when the region is up again.
    fn stop_without_region(
        &self,
        transport: u32,
        id: BlkdevId,
        request: StopBlkdev,
        down: &Error,
    ) -> Result<()> {
        let context = &self.fixed.context;
        let name = device_name(transport, id.0);
        let Some(left) = LeftDeviceByName::find(context, &name) else {
            let text = format!("no device {name} waits, and {}", down.line());
            return Err(Error::new(ErrorKind::Stopped, text));
        };
        if !request.force
            && let Some(user) = left.user()?
        {
            let text =
                format!("{user}; end that first, or give its users errors with --force: {}", down.line());
            return Err(Error::new(ErrorKind::Busy, text));
        }
        left.remove()?;
        labels::remove(context, &name);
        tracing::warn!(
            transport,
            blkdev = id.0,
            "{name} was stopped while its region is not up, and its users see errors; a new {name} comes with the region"
        );
        Ok(())
    }
}

pub(super) fn name_while_closed(fixed: &Fixed, transport: u32, id: BlkdevId) -> String {
    fixed.context.dev_dir.join(device_name(transport, id.0)).display().to_string()
}

pub(super) fn unknown(id: BlkdevId) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!(
            "there is no block device {id} of this host on the transport; dev-list shows which there are"
        ),
    )
}
