//! Work on a backend that may wait for a disk or a file system: the worker takes the slot out of the tables meanwhile.
//!
//! Invariants: the lock of the tables is not held during such work, so a status and commands for other backends do not
//! wait. One worker at a time has a slot. The placeholder in the tables shows the former state of the slot, and the
//! work.

use super::backend::BackendSlot;
use super::blkdev::BlkdevSlot;
use super::conditions::SharedConditions;
use super::figures::SharedTrend;
use super::tasks::Stage;
use super::transport::{Running, running_mut};
use super::{Manager, Tables, stopping};
use cbd_engine::{BackendEntry, Transport, TransportInfo};
use cbd_runtime::hosts::Living;
use cbd_runtime::{Count, Counted, ProcessEnvironment, disk};
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, HostId, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Timeout of a command for a slot that another worker has.
const SLOT_LIMIT: Duration = Duration::from_secs(10);

/// A handle of a transport that works without the tables.
#[derive(Clone)]
pub(super) struct TransportHandle {
    /// Number of the transport in this daemon.
    pub id: u32,
    /// Path of the region.
    pub path: String,
    pub host: HostId,
    pub transport: Arc<Transport<ProcessEnvironment>>,
    /// This daemon as a host of a region that several share.
    pub living: Option<Arc<Living>>,
    /// Held from reading the region's tables to storing the result in `Running::tables_copy`.
    reading: Arc<Mutex<()>>,
}

/// A cached copy of a region's tables, so that a status does not wait for the engine.
#[derive(Clone, Debug)]
pub(super) struct TablesCopy {
    pub info: TransportInfo,
    /// Rows of block devices of which both copies are damaged.
    pub lost: Vec<BlkdevId>,
}

impl TablesCopy {
    /// Reads the region's tables. Waits for a thread that changes them or recovers a cache.
    pub fn of(transport: &Transport<ProcessEnvironment>) -> Self {
        Self { info: transport.info(), lost: transport.lost_blkdevs() }
    }
}

/// What is being done with a slot that is not in the tables, and the worker that has it.
#[derive(Clone, Debug)]
pub(super) struct SlotWork {
    pub why: &'static str,
    worker: Count,
    /// A stop of the backend has failed meanwhile.
    pub stop_ended: bool,
}

impl SlotWork {
    /// Waits until its worker no longer has it.
    pub fn wait_for_worker(&self) {
        self.worker.wait_for_none(None);
    }
}

/// A slot that was taken out of the tables. The worker must put it back, or remove the backend.
pub(super) struct TakenSlot {
    pub handle: TransportHandle,
    pub id: BackendId,
    pub slot: BackendSlot,
    /// As long as this lives the work is not done.
    _worker: Counted,
}

impl Running {
    pub(super) fn handle(&self, id: u32) -> TransportHandle {
        TransportHandle {
            id,
            path: self.path.clone(),
            host: self.host,
            transport: Arc::clone(&self.transport),
            living: self.living.clone(),
            reading: Arc::clone(&self.reading),
        }
    }
}

impl TransportHandle {
    /// The readable rows of the backend table, and a description of each damaged row.
    pub fn entries(&self) -> (Vec<BackendEntry>, Vec<String>) {
        disk::entries(&self.transport)
    }

    /// The readable rows of other hosts.
    pub fn entries_of_others(&self) -> Vec<BackendEntry> {
        if self.living.is_some() {
            // What cannot be read now is shown the next time.
            return self.transport.backends_of_others().unwrap_or_default();
        }
        self.entries().0.into_iter().filter(|entry| entry.host != self.host).collect()
    }
}

impl BackendSlot {
    /// Takes the slot and leaves a placeholder.
    fn take_slot(&mut self, work: SlotWork) -> Self {
        let shown = Self {
            path: self.path.clone(),
            entry: self.entry.clone(),
            run: self.run.clone(),
            conditions: SharedConditions::clone(&self.conditions),
            trend: SharedTrend::clone(&self.trend),
            error: self.error.clone(),
            warnings: self.warnings.clone(),
            moved_from: self.moved_from.clone(),
            file_change: self.file_change.clone(),
            is_busy: self.is_busy,
            held: self.held.clone(),
            retry: None,
            stopping: self.stopping,
            moving_to: self.moving_to.clone(),
            ending: self.ending.clone(),
            work: Some(work),
            unended: self.unended.clone(),
            services: BTreeMap::new(),
            changes: Arc::clone(&self.changes),
            service_error: self.service_error.clone(),
            trace: self.trace.clone(),
            blkdevs: self
                .blkdevs
                .iter()
                .map(|(&id, slot)| (id, slot.shown(id)))
                .collect::<BTreeMap<_, BlkdevSlot>>(),
        };
        std::mem::replace(self, shown)
    }
}

/// Takes the slot of a backend out of the tables.
///
/// # Errors
/// [`ErrorKind::Busy`] with the work of the worker that has it.
fn take_slot(tables: &mut Tables, transport: u32, id: BackendId, why: &'static str) -> Result<TakenSlot> {
    let running = running_mut(tables, transport)?;
    let handle = running.handle(transport);
    let slot = running.backend_mut(id)?;
    if let Some(SlotWork { why, .. }) = slot.work {
        return Err(Error::new(ErrorKind::Busy, format!("backend {id} ({}) is busy: {why}", slot.path)));
    }
    let workers = Count::default();
    let worker = workers.add();
    let slot = slot.take_slot(SlotWork { why, worker: workers, stop_ended: false });
    Ok(TakenSlot { handle, id, slot, _worker: worker })
}

impl Manager {
    /// Takes the slot of a backend for a command; `why` names the work. Waits up to [`SLOT_LIMIT`] for another worker.
    ///
    /// # Errors
    /// If there is no such backend, or the transport is not up; [`ErrorKind::Busy`] with the work of the worker that
    /// has it.
    pub(super) fn take_slot(&self, transport: u32, id: BackendId, why: &'static str) -> Result<TakenSlot> {
        self.take_slot_until(Instant::now() + SLOT_LIMIT, transport, id, why)
    }

    /// As [`take_slot`](Self::take_slot), waiting until `end`.
    pub(super) fn take_slot_until(
        &self,
        end: Instant,
        transport: u32,
        id: BackendId,
        why: &'static str,
    ) -> Result<TakenSlot> {
        let mut tables = self.tables()?;
        loop {
            match take_slot(&mut tables, transport, id, why) {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < end => {
                    self.slot_returned.wait_until(&mut tables, end);
                    if self.stopping.load(Ordering::SeqCst) {
                        return Err(stopping());
                    }
                }
                result => return result,
            }
        }
    }

    /// As [`take_slot`](Self::take_slot), without waiting, for the background thread and for retries.
    pub(super) fn try_take_slot(
        &self,
        transport: u32,
        id: BackendId,
        why: &'static str,
    ) -> Option<TakenSlot> {
        take_slot(&mut self.tables.lock(), transport, id, why).ok()
    }

    /// Puts a slot back. If the daemon has ended meanwhile, ends the backend.
    pub(super) fn put_back(&self, taken: TakenSlot) {
        let TakenSlot { handle, id, mut slot, _worker: worker } = taken;
        let mut tables = self.tables.lock();
        let there =
            running_mut(&mut tables, handle.id).ok().and_then(|running| running.backends.get_mut(&id));
        let Some(there) = there else {
            drop(tables);
            // The end of the daemon waits for this worker, so this waits for an earlier stop that has timed out.
            let ending = slot.ending.clone();
            slot.end(handle.id, id, &Stage::nowhere());
            ending.wait_for_none(None);
            return drop(worker);
        };
        if slot.run.is_some() && there.run.is_some() {
            // The background thread may have detected a change meanwhile.
            slot.file_change = there.file_change.take();
        }
        if there.work.as_ref().is_some_and(|work| work.stop_ended) {
            (slot.stopping, slot.moving_to) = (false, None);
            slot.resume_blkdevs();
        }
        let shown = std::mem::replace(there, slot);
        self.slot_returned.notify_all();
        drop(tables);
        // Without the lock of the tables: this may drop the last reference to the backing device, whose close can
        // block.
        drop(shown);
        self.refresh_tables_copy(&handle);
    }

    /// Reads again how much space is free where other hosts take and release some.
    pub(super) fn refresh_shared(&self) {
        self.shared_handles().iter().for_each(|handle| self.refresh_tables_copy(handle));
    }

    /// Handles of the transports that are up and whose regions several hosts share; none if a command holds the tables.
    pub(super) fn shared_handles(&self) -> Vec<TransportHandle> {
        let Some(tables) = self.tables.try_lock() else { return Vec::new() };
        let running = tables.iter().filter_map(|(id, slot)| Some((*id, slot.running.as_ref().ok()?)));
        let shared = running.filter(|(_, running)| running.living.is_some());
        shared.map(|(id, running)| running.handle(id)).collect()
    }

    /// Updates the cached copy of the region's tables.
    pub(super) fn refresh_tables_copy(&self, handle: &TransportHandle) {
        // Held until the copy is stored: otherwise an older copy could replace a newer one.
        let _in_order = handle.reading.lock();
        let tables_copy = TablesCopy::of(&handle.transport);
        if let Ok(running) = running_mut(&mut self.tables.lock(), handle.id) {
            running.tables_copy = tables_copy;
        }
    }

    /// Removes the backend from the tables, after its row was removed from the region.
    pub(super) fn remove_backend(&self, taken: TakenSlot) {
        let mut tables = self.tables.lock();
        let shown = running_mut(&mut tables, taken.handle.id)
            .ok()
            .and_then(|running| running.backends.remove(&taken.id));
        self.slot_returned.notify_all();
        drop(tables);
        let handle = taken.handle.clone();
        drop((shown, taken));
        self.refresh_tables_copy(&handle);
    }

    /// Drops the run, and the devices of its block devices, from the placeholder of a slot that was taken.
    pub(super) fn drop_run_of_placeholder(&self, taken: &TakenSlot) {
        let mut tables = self.tables.lock();
        let there = running_mut(&mut tables, taken.handle.id).ok();
        let shown = there.and_then(|running| running.backends.get_mut(&taken.id)).map(|slot| {
            let switches: Vec<_> = slot.blkdevs.values_mut().map(|blkdev| blkdev.switch.take()).collect();
            (slot.run.take(), switches)
        });
        drop(tables);
        drop(shown);
    }

    /// Handles of all transports that are up.
    pub(super) fn transport_handles(&self) -> Result<Vec<TransportHandle>> {
        let tables = self.tables()?;
        Ok(tables.iter().filter_map(|(&id, slot)| Some(slot.running.as_ref().ok()?.handle(id))).collect())
    }

    /// The handle of one transport.
    ///
    /// # Errors
    /// If the transport does not exist or is not up.
    pub(super) fn handle(&self, transport: u32) -> Result<TransportHandle> {
        let tables = self.tables()?;
        Ok(super::transport::running(&tables, transport)?.handle(transport))
    }
}
