//! Block devices of other hosts on backends of this one: a thread for each executes its requests.
//!
//! Which devices there are, the tables of the other hosts say; this daemon looks there each second.
//!
//! Invariants: a backend has one block device, of this host or of another one, or several that share it. After a start the requests of
//! those wait until the changes that were in flight in channels are executed. A service begins only when no queue of a former one is
//! open, so no request of a former session reaches the device behind one of the present session. It ends before the backend does; with the
//! daemon it ends without an error for the other host, whose requests wait for the next daemon.
//!
//! Elsewhere: the thread (`cbd-remote`), the areas (`cbd-engine`, `transport/channels.rs`), the other side (`remote_blkdevs`).

use super::backend::BackendSlot;
use super::slots::{TakenSlot, TransportHandle};
use super::tasks::poll_until;
use super::transport::{running, running_mut};
use super::{Fixed, Manager};
use crate::api::BlkdevClass;
use crate::exports::{STOP_TIMEOUT, prepare_data_thread};
use cbd_channel::Areas;
use cbd_engine::{ChannelArea, Environment, RemoteBlkdev, ServedBlkdev};
use cbd_export::BlockDevice;
use cbd_remote::{Changes, ChannelUse, ServerWake, Service, ServiceOptions};
use cbd_runtime::RunningBackend;
use cbd_types::{BackendId, Class, Error, ErrorKind, Geometry, HostId, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the block devices of other hosts may take to be served before a move begins.
const SERVED_LIMIT: Duration = Duration::from_secs(4);

/// An error that a next attempt may not have.
const MOMENT: Duration = Duration::from_millis(800);

/// Why block devices of other hosts are not served.
#[derive(Clone, Debug)]
pub(super) struct ServiceError {
    line: String,
    since: Instant,
    is_logged: bool,
}

/// A block device of another host that is served.
#[derive(Debug)]
pub(super) struct ServedSlot {
    served: ServedBlkdev,
    /// The area of the other host.
    client: ChannelArea,
    /// The name of the other host.
    host: String,
    /// What the other host was told of the device.
    geometry: Geometry,
    /// The class of its requests that have none.
    class: Class,
    service: Service,
}

impl ServedSlot {
    fn is_for(&self, row: &RemoteBlkdev) -> bool {
        is_of(&self.served, row) && self.client == row.area
    }

    /// Whether one of these rows asks for it, and it can go on as it is; otherwise a new one is to follow it.
    fn is_wanted(&mut self, rows: &[&RemoteBlkdev], run: &RunningBackend) -> bool {
        rows.iter().any(|row| self.is_for(row)) && self.is_current(run)
    }

    /// Takes the class that the other host has given the block device.
    fn take_class(&mut self, rows: &[&RemoteBlkdev], run: &RunningBackend) {
        let class = rows.iter().find(|row| self.is_for(row)).map(|row| row.entry.class);
        if let Some(class) = class.filter(|class| *class != self.class) {
            self.class = class;
            run.device_of(self.served.blkdev).set_class(class);
            tracing::info!(
                blkdev = self.served.blkdev.0,
                "{self}: the class of its requests is {} now",
                BlkdevClass::from(class).name()
            );
        }
    }

    fn is_current(&mut self, run: &RunningBackend) -> bool {
        let failure = self.service.failure();
        if let Some(error) = &failure {
            tracing::error!(
                blkdev = self.served.blkdev.0,
                "the thread that serves {self} has ended: {error}"
            );
        }
        failure.is_none() && run.device().geometry() == self.geometry
    }

    /// Lets the other host wake the thread, and the thread that host, if that is its session.
    pub fn attach(&self, wake: ServerWake) {
        tracing::debug!(blkdev = self.served.blkdev.0, "{self}: it has connected for wake-ups");
        self.service.attach(wake);
    }

    /// Ends it; with `closes` the other host sees errors from now on.
    pub fn stop(self, closes: bool) -> Result<()> {
        let name = self.to_string();
        self.service
            .stop(closes, STOP_TIMEOUT)
            .map_err(|error| error.while_doing(format!("{name} does not end")))
    }

    /// The error of a command that would take the backend from it.
    pub fn in_use(&self) -> Error {
        let (id, backend) = (self.served.blkdev, self.served.backend);
        let text = format!("{self} stands on backend {backend}; stop it there first (dev-stop -d {id})");
        Error::new(ErrorKind::Busy, text)
    }
}

impl std::fmt::Display for ServedSlot {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "block device {} of host {}", self.served.blkdev, self.host)
    }
}

fn is_of(served: &ServedBlkdev, row: &RemoteBlkdev) -> bool {
    served.backend == row.entry.backend
        && served.blkdev == row.entry.id
        && served.host == row.entry.host
        && served.ownership == row.ownership
}

impl TransportHandle {
    /// The channel between these areas, in a new session.
    pub(super) fn channel_use(&self, fixed: &Fixed, client: ChannelArea, server: ChannelArea) -> ChannelUse {
        ChannelUse {
            areas: Areas { client: client.at, server: server.at },
            area_bytes: server.bytes.min(client.bytes),
            session: fixed.environment.random(),
            is_lost: self.living.as_ref().map(|living| living.loss()).unwrap_or_default(),
        }
    }

    /// Whether this process is its host no more: then it stores nothing into tables that may be another host's.
    pub(super) fn is_lost(&self) -> bool {
        self.living.as_ref().is_some_and(|living| living.loss().load(Ordering::SeqCst))
    }

    /// Refuses if another host has a block device on a backend.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with that device.
    pub(super) fn refuse_used_by_others(&self, id: BackendId) -> Result<()> {
        // A region that cannot be read is no reason to keep a backend.
        let rows = self.transport.remote_blkdevs_of_others().unwrap_or_default();
        let Some(row) = rows.iter().find(|row| row.entry.backend == id) else { return Ok(()) };
        let (blkdev, host) = (row.entry.id, self.host_name(row.entry.host));
        let text = format!(
            "block device {blkdev} of host {host} stands on backend {id}; stop it there first (dev-stop -d {blkdev})"
        );
        Err(Error::new(ErrorKind::Busy, text))
    }

    /// The block devices of other hosts that use backends of this one. Those of a host that has not followed a backend here yet get other
    /// rows when it does.
    fn followers(&self) -> Result<Vec<RemoteBlkdev>> {
        let mut rows = self.transport.remote_blkdevs_of_others()?;
        rows.retain(|row| row.owner == self.host);
        Ok(rows)
    }

    /// The name of a host, for messages.
    pub(super) fn host_name(&self, id: HostId) -> String {
        let members = self.transport.members();
        let host = members.and_then(|(members, _)| members.host(id).ok().flatten());
        host.map_or_else(|| id.to_string(), |host| host.name)
    }
}

impl Manager {
    /// Begins and ends services as the tables of the other hosts say. If a command holds the tables of this daemon, the next pass does it.
    pub(super) fn serve_other_hosts(self: &Arc<Self>) {
        for handle in self.shared_handles().into_iter().filter(|handle| !handle.is_lost()) {
            // What cannot be read now is read in the next pass.
            let Ok(rows) = handle.followers() else { continue };
            let served = handle.transport.served_blkdevs();
            let Some(mut tables) = self.tables_to_retry() else { return };
            let Ok(running) = running_mut(&mut tables, handle.id) else { continue };
            let backends = running.backends.iter_mut();
            let due =
                backends.filter_map(|(id, slot)| slot.needs_service(*id, &rows, &served).then_some(*id));
            let due: Vec<BackendId> = due.collect();
            drop(tables);
            let transport = handle.id;
            for id in due {
                self.spawn_retry(move |manager| manager.serve_backend(transport, id));
            }
        }
    }

    /// The block devices of other hosts on a backend that are not served. None if that cannot be known at this moment.
    fn unserved(&self, handle: &TransportHandle, id: BackendId) -> Option<Vec<RemoteBlkdev>> {
        let mut rows = handle.transport.remote_blkdevs_of_others().ok()?;
        let tables = self.tables.lock();
        let slot = running(&tables, handle.id).ok()?.backends.get(&id).filter(|slot| slot.work.is_none())?;
        if slot.stopping || slot.run.is_none() {
            return Some(Vec::new());
        }
        let is_served = |row: &RemoteBlkdev| {
            let service = slot.services.get(&row.entry.id);
            service.is_some_and(|service| is_of(&service.served, row))
        };
        rows.retain(|row| row.entry.backend == id && !is_served(row));
        Some(rows)
    }

    /// Whether the block devices of other hosts on a backend are served. Begins that for hosts that have followed the backend here.
    pub(super) fn serves_all(&self, handle: &TransportHandle, id: BackendId) -> bool {
        let is_all = |unserved: Option<Vec<RemoteBlkdev>>| unserved.is_some_and(|rows| rows.is_empty());
        let unserved = self.unserved(handle, id);
        if unserved.iter().flatten().any(|row| row.owner == handle.host) {
            self.serve_backend(handle.id, id);
            return is_all(self.unserved(handle, id));
        }
        is_all(unserved)
    }

    /// Waits until the block devices of other hosts are served: requests that wait for that do not complete. The host of one that has not
    /// followed the backend here gives no sign of life, or is late: it has no requests here.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if one of a host that has followed the backend here is not served in time.
    pub(super) fn wait_for_services(&self, handle: &TransportHandle, id: BackendId) -> Result<()> {
        let is_late = !poll_until(Instant::now() + SERVED_LIMIT, || self.serves_all(handle, id));
        let unserved = if is_late { self.unserved(handle, id) } else { None };
        let Some(row) = unserved.iter().flatten().find(|row| row.owner == handle.host) else { return Ok(()) };
        let (blkdev, host) = (row.entry.id, handle.host_name(row.entry.host));
        let text = format!(
            "block device {blkdev} of host {host} on backend {id} is not served yet, the log says why: move the backend after that"
        );
        Err(Error::new(ErrorKind::Busy, text))
    }

    pub(super) fn serve_backend(&self, transport: u32, id: BackendId) {
        let Some(mut taken) =
            self.try_take_slot(transport, id, "a block device of another host is being opened")
        else {
            return;
        };
        let line = taken.serve(&self.fixed).err().map(|error| error.line());
        let former = taken.slot.service_error.take();
        let error = line.map(|line| {
            let former = former.filter(|former| former.line == line);
            former.unwrap_or_else(|| ServiceError { line, since: Instant::now(), is_logged: false })
        });
        // Another host may be following the backend at this moment. Each attempt has the same error, which is logged once.
        let lasts = |error: &ServiceError| !error.is_logged && error.since.elapsed() > MOMENT;
        let is_due = error.as_ref().is_some_and(lasts);
        if let Some(ServiceError { line, .. }) = error.as_ref().filter(|_| is_due) {
            let waiting = if taken.slot.changes.is_waiting() {
                "; requests of the block devices that share the backend wait for it"
            } else {
                ""
            };
            tracing::error!(
                transport,
                backend = id.0,
                "the block device of another host is not served: {line}{waiting}"
            );
        }
        taken.slot.service_error =
            error.map(|error| ServiceError { is_logged: error.is_logged || is_due, ..error });
        self.put_back(taken);
    }
}

impl BackendSlot {
    /// Whether a service is to begin or to end. One that goes on takes changes of its row.
    fn needs_service(&mut self, id: BackendId, rows: &[RemoteBlkdev], served: &[ServedBlkdev]) -> bool {
        let Some(run) = self.run.as_ref().filter(|_| self.work.is_none() && !self.stopping) else {
            return false;
        };
        let rows: Vec<&RemoteBlkdev> = rows.iter().filter(|row| row.entry.backend == id).collect();
        let is_missing = rows.iter().any(|row| !self.services.contains_key(&row.entry.id));
        let mut held = served.iter().filter(|served| served.backend == id);
        self.services.values_mut().for_each(|service| service.take_class(&rows, run));
        is_missing
            || held.any(|served| !rows.iter().any(|row| is_of(served, row)))
            || self.services.values_mut().any(|service| !service.is_wanted(&rows, run))
    }

    /// Lets the requests of all clients wait until the changes of other hosts are executed that a former process has taken.
    pub(super) fn wait_for_channels(&self, handle: &TransportHandle) {
        let served = handle.transport.served_blkdevs();
        for served in served.iter().filter(|served| served.backend == self.entry.id) {
            self.changes.wait_for(served.blkdev);
        }
    }

    /// Refuses if a block device of another host is served.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with that device.
    pub(super) fn refuse_served(&self) -> Result<()> {
        self.services.first_key_value().map_or(Ok(()), |(_, service)| Err(service.in_use()))
    }

    /// Ends the services of other hosts' block devices.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if requests do not complete: the thread ends with them.
    pub(super) fn end_services(&mut self, closes: bool) -> Result<()> {
        let services = std::mem::take(&mut self.services).into_values();
        services.map(|service| service.stop(closes)).fold(Ok(()), Result::and)
    }
}

impl TakenSlot {
    /// Refuses if another host has a block device on the backend, also one that no pass has seen yet.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with that device.
    pub(super) fn refuse_served(&mut self, fixed: &Fixed) -> Result<()> {
        drop(self.serve(fixed));
        self.slot.refuse_served()?;
        // Also of one that is not served: it could not be, or its host has not followed the backend here.
        self.handle.refuse_used_by_others(self.id)
    }

    /// Ends what no other host asks for any more, and begins what one does.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while a former service has not ended, or if this host has a block device on the backend; errors of the areas.
    pub(super) fn serve(&mut self, fixed: &Fixed) -> Result<()> {
        let Self { handle, id, slot, .. } = self;
        let is_up = !slot.stopping && !handle.is_lost();
        let Some(run) = slot.run.clone().filter(|_| is_up) else { return Ok(()) };
        let rows: Vec<RemoteBlkdev> =
            handle.followers()?.into_iter().filter(|row| row.entry.backend == *id).collect();
        let mut wanted: Vec<&RemoteBlkdev> = rows.iter().collect();
        // 1. What no other host asks for any more.
        let ended = slot.services.iter_mut().filter_map(|(id, service)| {
            let is_wanted = service.is_wanted(&wanted, &run);
            (!is_wanted).then_some(*id)
        });
        for ended in ended.collect::<Vec<_>>() {
            if let Some(service) = slot.services.remove(&ended) {
                tracing::info!(transport = handle.id, backend = id.0, "{service} is not served any more");
                service.stop(false)?;
            }
        }
        let held = handle.transport.served_blkdevs().into_iter().filter(|served| served.backend == *id);
        let held: Vec<ServedBlkdev> = held.collect();
        let former: Vec<&ServedBlkdev> =
            held.iter().filter(|served| !rows.iter().any(|row| is_of(served, row))).collect();
        if !former.is_empty() {
            // The thread of a service that did not end in time still stores into its area.
            slot.refuse_while_served()?;
        }
        for served in former {
            handle.transport.end_serving(served)?;
            slot.changes.settle(served.blkdev);
        }
        // 2. What one asks for. Of two that were created at the same moment the one that was served keeps the backend.
        wanted.retain(|row| !slot.services.contains_key(&row.entry.id));
        wanted.sort_by_key(|row| !held.iter().any(|served| is_of(served, row)));
        if !wanted.is_empty() {
            slot.refuse_while_served()?;
        }
        let mut result = Ok(());
        for row in wanted {
            match handle.start_service(fixed, row, &run, &slot.changes) {
                Ok(service) => drop(slot.services.insert(row.entry.id, service)),
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

impl TransportHandle {
    fn start_service(
        &self,
        fixed: &Fixed,
        row: &RemoteBlkdev,
        run: &RunningBackend,
        changes: &Arc<Changes>,
    ) -> Result<ServedSlot> {
        let area = self.transport.serve_remote(row)?;
        let class = row.entry.class;
        let device = run.device_of(row.entry.id);
        device.set_class(class);
        let device: Arc<dyn BlockDevice> = device;
        let geometry = device.geometry();
        let (id, backend) = (row.entry.id, row.entry.backend);
        let options = ServiceOptions {
            name: &format!("cbd-host-{id}"),
            place: self.channel_use(fixed, row.area, area),
            blkdev: id,
            changes: Arc::clone(changes),
            is_exclusive: !row.entry.shared,
            thread_setup: prepare_data_thread,
        };
        let service = Service::start(self.transport.shared_region(), device, &options)?;
        let served =
            ServedBlkdev { backend, blkdev: id, host: row.entry.host, ownership: row.ownership, area };
        let host = self.host_name(row.entry.host);
        let slot = ServedSlot { served, client: row.area, host, geometry, class, service };
        tracing::info!(transport = self.id, backend = backend.0, blkdev = id.0, "serving {slot}");
        Ok(slot)
    }
}
