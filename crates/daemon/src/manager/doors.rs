//! Block devices whose doors did not open are tried again: what stood in the way may go, and what a predecessor left may be found late.
//!
//! Always true here: nothing waits here for requests of a door that was closed; as long as there are some, no other is tried. None is tried
//! while its backend is being stopped.

use super::retry::Retry;
use super::{Manager, Tables};
use cbd_types::{BackendId, BlkdevId};
use std::sync::atomic::Ordering;

impl Manager {
    /// Tries the doors that are due, and all of them when more turns out to be left than the start has seen.
    pub(super) fn open_closed_doors(&self) {
        let Some(mut tables) = self.tables_to_retry() else { return };
        let more_is_left = self.fixed.places.shelf.has_come();
        if more_is_left {
            self.sweep_unwanted(&tables);
        }
        for (transport, id, blkdev) in closed(&mut tables, more_is_left) {
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            let running = tables.get_mut(&transport).and_then(|slot| slot.running.as_mut().ok());
            let Some(slot) = running.and_then(|running| running.backends.get_mut(&id)) else { continue };
            let Some(entry) = slot.blkdevs.get(&blkdev).map(|slot| slot.entry.clone()) else { continue };
            slot.bring_blkdev_back(&self.fixed, transport, &entry);
        }
    }
}

/// The block devices whose doors are to be tried now, of backends that are up: those that are due, or all.
fn closed(tables: &mut Tables, all: bool) -> Vec<(u32, BackendId, BlkdevId)> {
    let mut found = Vec::new();
    for (&transport, slot) in tables {
        let Ok(running) = &mut slot.running else { continue };
        for (&id, backend) in &mut running.backends {
            let is_free = backend.run.as_ref().is_some_and(|run| run.device().queues() == 0);
            if !is_free || backend.stopping {
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
