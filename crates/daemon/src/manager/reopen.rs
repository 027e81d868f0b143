//! Retries exports that failed to open: the cause may have disappeared, or the sessions of a predecessor were found
//! late.
//!
//! Invariants: no thread waits here for requests of an export that was closed; while such requests exist, no export of
//! that backend is opened. No export is opened while its backend is being stopped.

use super::retry::Retry;
use super::slots::TakenSlot;
use super::{Manager, Tables};
use cbd_types::{BackendId, BlkdevId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Manager {
    /// Retries the exports that are due; retries all closed exports if sessions of a predecessor were found after the
    /// start.
    pub(super) fn reopen_exports(self: &Arc<Self>) {
        let more_is_left = self.fixed.context.preserved.take_late_sessions();
        if more_is_left {
            self.sweep_due.store(true, Ordering::SeqCst);
        }
        if self.sweep_due.load(Ordering::SeqCst) && self.sweep_unwanted() {
            self.sweep_due.store(false, Ordering::SeqCst);
        }
        let closed = match self.tables_to_retry() {
            Some(mut tables) => closed(&mut tables, more_is_left),
            None => return,
        };
        for (transport, id, blkdev) in closed {
            self.spawn_retry(move |manager| manager.reopen_export(transport, id, blkdev));
        }
    }

    fn reopen_export(&self, transport: u32, id: BackendId, blkdev: BlkdevId) {
        let Some(mut taken) = self.try_take_slot(transport, id, "its block device is being opened") else {
            return;
        };
        let entry = taken
            .slot
            .blkdevs
            .get(&blkdev)
            .filter(|slot| slot.export.is_none())
            .map(|slot| slot.entry.clone());
        if let Some(entry) = entry.filter(|_| !taken.slot.stopping) {
            let _opening = self.opening.read();
            let TakenSlot { handle, slot, .. } = &mut taken;
            slot.restore_blkdev(&self.fixed, handle, &entry);
        }
        self.put_back(taken);
    }

    /// Runs an attempt on a thread of its own, since it may wait for a disk. If no thread can be started, a later pass
    /// retries it.
    pub(super) fn spawn_retry(self: &Arc<Self>, attempt: impl FnOnce(&Self) + Send + 'static) {
        if self.stopping.load(Ordering::SeqCst) {
            return;
        }
        let manager = Arc::clone(self);
        let spawned =
            std::thread::Builder::new().name("cbd-retry".to_owned()).spawn(move || attempt(&manager));
        if let Err(error) = spawned {
            tracing::warn!("a retry is postponed: no thread can be started ({error})");
        }
    }
}

/// The block devices of backends that are up whose closed exports are due, or with `all` those whose exports are
/// closed.
fn closed(tables: &mut Tables, all: bool) -> Vec<(u32, BackendId, BlkdevId)> {
    let mut found = Vec::new();
    for (&transport, slot) in tables {
        let Ok(running) = &mut slot.running else { continue };
        for (&id, backend) in &mut running.backends {
            let is_free = backend.run.is_some() && backend.former_queues(Instant::now()) == 0;
            if !is_free || backend.stopping || backend.work.is_some() {
                continue;
            }
            for (&blkdev, slot) in backend.blkdevs.iter_mut().filter(|(_, slot)| slot.export.is_none()) {
                if slot.retry.get_or_insert_with(|| Retry::new(None)).take(None) || all {
                    found.push((transport, id, blkdev));
                }
            }
        }
    }
    found
}
