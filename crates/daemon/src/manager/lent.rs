//! Work on a backend that may wait for a disk or a file system: its slot is taken out of the tables meanwhile.
//!
//! Invariants: the lock of the tables is free while such work runs, so a status and commands about other backends are answered at
//! once; a slot is with one worker at a time; what stands in the tables meanwhile shows what the slot was, and what is being done.

use super::backend::BackendSlot;
use super::blkdev::BlkdevSlot;
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

/// How long a command waits for a slot that is with another worker.
const SLOT_LIMIT: Duration = Duration::from_secs(10);

/// What can be reached of a transport without the tables.
#[derive(Clone)]
pub(super) struct Ground {
    /// Number of the transport in this daemon.
    pub id: u32,
    /// Of the region.
    pub path: String,
    pub host: HostId,
    pub transport: Arc<Transport<ProcessEnvironment>>,
    /// Held from a look at what the region says to its being remembered.
    looking: Arc<Mutex<()>>,
}

/// What the tables remember of a region, so that a status does not wait for the engine.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub info: TransportInfo,
    /// Rows of block devices that are lost.
    pub lost: Vec<BlkdevId>,
}

impl Known {
    /// What the region says now. Waits for a thread that changes its tables or recovers a cache.
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

/// A slot that was taken out of the tables. It is to be put back, or the backend to be forgotten.
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
            looking: Arc::clone(&self.looking),
        }
    }
}

impl Ground {
    /// The rows of the backend table, one by one, so that a damaged one hides no other; and what is damaged.
    pub fn entries(&self) -> (Vec<BackendEntry>, Vec<String>) {
        disk::entries(&self.transport)
    }

    /// Those of other hosts.
    pub fn entries_of_others(&self) -> Vec<BackendEntry> {
        self.entries().0.into_iter().filter(|entry| entry.host != self.host).collect()
    }
}

impl BackendSlot {
    /// Takes the slot; what stays shows it.
    fn lend(&mut self, borrowed: Borrowed) -> Self {
        let shown = Self {
            path: self.path.clone(),
            entry: self.entry.clone(),
            run: self.run.clone(),
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
/// [`ErrorKind::Busy`] with what is being done with it.
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
    /// Takes the slot of a backend for a command, to do `why`; waits a while for the worker that has it.
    ///
    /// # Errors
    /// Where there is no such backend, or the transport is not up; [`ErrorKind::Busy`] with what is being done with it.
    pub(super) fn lend(&self, transport: u32, id: BackendId, why: &'static str) -> Result<Lent> {
        self.lend_until(Instant::now() + SLOT_LIMIT, transport, id, why)
    }

    /// The same, waiting until `end`.
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

    /// The same for the background thread and for what happens at the end of a command: it does not wait.
    pub(super) fn try_lend(&self, transport: u32, id: BackendId, why: &'static str) -> Option<Lent> {
        lend(&mut self.tables.lock(), transport, id, why).ok()
    }

    /// Puts a slot back. Where the daemon has ended meanwhile, the backend ends, too.
    pub(super) fn put_back(&self, lent: Lent) {
        let Lent { ground, id, mut slot, _worker: worker } = lent;
        let mut tables = self.tables.lock();
        let there =
            running_mut(&mut tables, ground.id).ok().and_then(|running| running.backends.get_mut(&id));
        let Some(there) = there else {
            drop(tables);
            // The end of the daemon waits for this worker, so for a stop that has taken too long as well.
            let ending = slot.ending.clone();
            slot.end(id, &Stage::nowhere());
            ending.wait_for_none(None);
            return drop(worker);
        };
        if slot.run.is_some() && there.run.is_some() {
            // It may have been seen meanwhile.
            slot.file_change = there.file_change.take();
        }
        if there.lent.as_ref().is_some_and(|borrowed| borrowed.stop_ended) {
            slot.stopping = false;
        }
        let shown = std::mem::replace(there, slot);
        self.put_back.notify_all();
        drop(tables);
        // Without the lock: it may have been the last one to have the backing device open.
        drop(shown);
        self.look_again(&ground);
    }

    /// Remembers what the region says now.
    pub(super) fn look_again(&self, ground: &Ground) {
        // Until it is remembered: an older look could replace a newer one.
        let _in_order = ground.looking.lock();
        let known = Known::of(&ground.transport);
        if let Ok(running) = running_mut(&mut self.tables.lock(), ground.id) {
            running.known = known;
        }
    }

    /// The backend is no longer on the transport.
    pub(super) fn forget(&self, lent: Lent) {
        let mut tables = self.tables.lock();
        let shown = running_mut(&mut tables, lent.ground.id)
            .ok()
            .and_then(|running| running.backends.remove(&lent.id));
        self.put_back.notify_all();
        drop(tables);
        let ground = lent.ground.clone();
        drop((shown, lent));
        self.look_again(&ground);
    }

    /// What stands in the tables for a lent slot no longer has the backend's run.
    pub(super) fn hide_run(&self, lent: &Lent) {
        let mut tables = self.tables.lock();
        let there = running_mut(&mut tables, lent.ground.id).ok();
        let shown =
            there.and_then(|running| running.backends.get_mut(&lent.id)).and_then(|slot| slot.run.take());
        drop(tables);
        drop(shown);
    }

    /// What can be reached of all transports that are up.
    pub(super) fn grounds(&self) -> Result<Vec<Ground>> {
        let tables = self.tables()?;
        Ok(tables.iter().filter_map(|(&id, slot)| Some(slot.running.as_ref().ok()?.ground(id))).collect())
    }

    /// What can be reached of one transport.
    ///
    /// # Errors
    /// Where it is not there or not up.
    pub(super) fn ground(&self, transport: u32) -> Result<Ground> {
        let tables = self.tables()?;
        Ok(super::transport::running(&tables, transport)?.ground(transport))
    }
}
