//! Work on a backend that may wait for a disk or a file system: the worker takes the slot out of the tables meanwhile.
//!
//! Invariants: the lock of the tables is not held during such work, so a status and commands for other backends do not wait.
//! One worker at a time has a slot. The placeholder in the tables shows the former state of the slot, and the work.

use super::backend::BackendSlot;
use super::blkdev::BlkdevSlot;
use super::conditions::OfRun;
use super::tasks::Stage;
use super::transport::{Running, running_mut};
use super::{Manager, Tables, stopping};
use cbd_engine::{BackendEntry, Transport, TransportInfo};
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
pub(super) struct Ground {
    /// Number of the transport in this daemon.
    pub id: u32,
    /// Path of the region.
    pub path: String,
    pub host: HostId,
    pub transport: Arc<Transport<ProcessEnvironment>>,
    /// Held from reading the region's tables to storing the result in `Running::known`.
    reading: Arc<Mutex<()>>,
}

/// A cached copy of a region's tables, so that a status does not wait for the engine.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub info: TransportInfo,
    /// Rows of block devices of which both copies are damaged.
    pub lost: Vec<BlkdevId>,
}

impl Known {
    /// Reads the region's tables. Waits for a thread that changes them or recovers a cache.
    pub fn of(transport: &Transport<ProcessEnvironment>) -> Self {
        Self { info: transport.info(), lost: transport.lost_blkdevs() }
    }
}

/// What is being done with a slot that is not in the tables, and the worker that has it.
#[derive(Clone, Debug)]
pub(super) struct Borrowed {
    pub why: &'static str,
    worker: Count,
    /// A stop of the backend has failed meanwhile.
    pub stop_ended: bool,
}

impl Borrowed {
    /// Waits until its worker no longer has it.
    pub fn wait_for_worker(&self) {
        self.worker.wait_for_none(None);
    }
}

/// A slot that was taken out of the tables. The worker must put it back, or forget the backend.
pub(super) struct Lent {
    pub ground: Ground,
    pub id: BackendId,
    pub slot: BackendSlot,
    /// As long as this lives the work is not done.
    _worker: Counted,
}

impl Running {
    pub(super) fn ground(&self, id: u32) -> Ground {
        Ground {
            id,
            path: self.path.clone(),
            host: self.host,
            transport: Arc::clone(&self.transport),
            reading: Arc::clone(&self.reading),
        }
    }
}

impl Ground {
    /// The readable rows of the backend table, and a description of each damaged row.
    pub fn entries(&self) -> (Vec<BackendEntry>, Vec<String>) {
        disk::entries(&self.transport)
    }

    /// The readable rows of other hosts.
    pub fn entries_of_others(&self) -> Vec<BackendEntry> {
        self.entries().0.into_iter().filter(|entry| entry.host != self.host).collect()
    }
}

impl BackendSlot {
    /// Takes the slot and leaves a placeholder.
    fn lend(&mut self, borrowed: Borrowed) -> Self {
        let shown = Self {
            path: self.path.clone(),
            entry: self.entry.clone(),
            run: self.run.clone(),
            conditions: OfRun::clone(&self.conditions),
            error: self.error.clone(),
            warnings: self.warnings.clone(),
            moved_from: self.moved_from.clone(),
            file_change: self.file_change.clone(),
            is_busy: self.is_busy,
            held: self.held.clone(),
            retry: None,
            stopping: self.stopping,
            ending: self.ending.clone(),
            lent: Some(borrowed),
            unended: self.unended.clone(),
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
fn lend(tables: &mut Tables, transport: u32, id: BackendId, why: &'static str) -> Result<Lent> {
    let running = running_mut(tables, transport)?;
    let ground = running.ground(transport);
    let slot = running.backend_mut(id)?;
    if let Some(Borrowed { why, .. }) = slot.lent {
        return Err(Error::new(ErrorKind::Busy, format!("backend {id} ({}) is busy: {why}", slot.path)));
    }
    let at_work = Count::default();
    let worker = at_work.add();
    let slot = slot.lend(Borrowed { why, worker: at_work, stop_ended: false });
    Ok(Lent { ground, id, slot, _worker: worker })
}

impl Manager {
    /// Takes the slot of a backend for a command; `why` names the work. Waits up to [`SLOT_LIMIT`] for another worker.
    ///
    /// # Errors
    /// If there is no such backend, or the transport is not up; [`ErrorKind::Busy`] with the work of the worker that has it.
    pub(super) fn lend(&self, transport: u32, id: BackendId, why: &'static str) -> Result<Lent> {
        self.lend_until(Instant::now() + SLOT_LIMIT, transport, id, why)
    }

    /// As [`lend`](Self::lend), waiting until `end`.
    pub(super) fn lend_until(
        &self,
        end: Instant,
        transport: u32,
        id: BackendId,
        why: &'static str,
    ) -> Result<Lent> {
        let mut tables = self.tables()?;
        loop {
            match lend(&mut tables, transport, id, why) {
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < end => {
                    self.put_back.wait_until(&mut tables, end);
                    if self.stopping.load(Ordering::SeqCst) {
                        return Err(stopping());
                    }
                }
                result => return result,
            }
        }
    }

    /// As [`lend`](Self::lend), without waiting, for the background thread and for retries.
    pub(super) fn try_lend(&self, transport: u32, id: BackendId, why: &'static str) -> Option<Lent> {
        lend(&mut self.tables.lock(), transport, id, why).ok()
    }

    /// Puts a slot back. If the daemon has ended meanwhile, ends the backend.
    pub(super) fn put_back(&self, lent: Lent) {
        let Lent { ground, id, mut slot, _worker: worker } = lent;
        let mut tables = self.tables.lock();
        let there =
            running_mut(&mut tables, ground.id).ok().and_then(|running| running.backends.get_mut(&id));
        let Some(there) = there else {
            drop(tables);
            // The end of the daemon waits for this worker, so this waits for an earlier stop that has timed out.
            let ending = slot.ending.clone();
            slot.end(ground.id, id, &Stage::nowhere());
            ending.wait_for_none(None);
            return drop(worker);
        };
        if slot.run.is_some() && there.run.is_some() {
            // The background thread may have detected a change meanwhile.
            slot.file_change = there.file_change.take();
        }
        if there.lent.as_ref().is_some_and(|borrowed| borrowed.stop_ended) {
            slot.stopping = false;
        }
        let shown = std::mem::replace(there, slot);
        self.put_back.notify_all();
        drop(tables);
        // Without the lock of the tables: this may drop the last reference to the backing device, whose close can block.
        drop(shown);
        self.refresh_known(&ground);
    }

    /// Updates the cached copy of the region's tables.
    pub(super) fn refresh_known(&self, ground: &Ground) {
        // Held until the copy is stored: otherwise an older copy could replace a newer one.
        let _in_order = ground.reading.lock();
        let known = Known::of(&ground.transport);
        if let Ok(running) = running_mut(&mut self.tables.lock(), ground.id) {
            running.known = known;
        }
    }

    /// Removes the backend from the tables, after its row was removed from the region.
    pub(super) fn forget(&self, lent: Lent) {
        let mut tables = self.tables.lock();
        let shown = running_mut(&mut tables, lent.ground.id)
            .ok()
            .and_then(|running| running.backends.remove(&lent.id));
        self.put_back.notify_all();
        drop(tables);
        let ground = lent.ground.clone();
        drop((shown, lent));
        self.refresh_known(&ground);
    }

    /// Drops the run from the placeholder of a lent slot.
    pub(super) fn hide_run(&self, lent: &Lent) {
        let mut tables = self.tables.lock();
        let there = running_mut(&mut tables, lent.ground.id).ok();
        let shown =
            there.and_then(|running| running.backends.get_mut(&lent.id)).and_then(|slot| slot.run.take());
        drop(tables);
        drop(shown);
    }

    /// Handles of all transports that are up.
    pub(super) fn grounds(&self) -> Result<Vec<Ground>> {
        let tables = self.tables()?;
        Ok(tables.iter().filter_map(|(&id, slot)| Some(slot.running.as_ref().ok()?.ground(id))).collect())
    }

    /// The handle of one transport.
    ///
    /// # Errors
    /// If the transport does not exist or is not up.
    pub(super) fn ground(&self, transport: u32) -> Result<Ground> {
        let tables = self.tables()?;
        Ok(super::transport::running(&tables, transport)?.ground(transport))
    }
}
