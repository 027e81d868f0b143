//! Regions and backends that are not up are tried again: a device may come later than the daemon.
//!
//! Invariants: what stands at the path is looked at every second, and tried when it is another thing than the last
//! time, else on a schedule that becomes slower; one attempt at a time, and none while a stop is under way.

use super::Manager;
use super::backend::BackendSlot;
use super::lent::Ground;
use super::looks::{LOOK, Looks, Node, one};
use super::transport::Running;
use super::{Fixed, Tables};
use cbd_backing::DISK_TIMEOUT;
use cbd_runtime::Disk;
use cbd_types::{BackendId, ErrorKind};
use parking_lot::MutexGuard;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The first attempt comes after this time, each further one after twice the time, up to the limit.
const FIRST: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(60);

/// How often the start checks whether a disk that another process had is free.
const BUSY_AGAIN: Duration = Duration::from_millis(100);

/// When a backend is tried again.
#[derive(Debug)]
pub(super) struct Retry {
    due: Instant,
    delay: Duration,
    seen: Node,
}

impl Retry {
    pub(super) fn new(seen: Node) -> Self {
        Self { due: Instant::now() + FIRST, delay: FIRST, seen }
    }

    /// Seconds until then.
    pub(super) fn in_s(&self) -> u64 {
        self.due.saturating_duration_since(Instant::now()).as_secs()
    }

    /// Whether it is to be tried now; if so, when it is tried next.
    pub(super) fn take(&mut self, now: Node) -> bool {
        let is_new = now.is_some() && now != self.seen;
        if !is_new && Instant::now() < self.due {
            return false;
        }
        self.delay = if is_new { FIRST } else { (self.delay * 2).min(LIMIT) };
        self.due = Instant::now() + self.delay;
        self.seen = now;
        true
    }
}

impl Manager {
    /// Tries what is not up and is due. Commands go first: where one runs, it is tried a second later.
    pub(super) fn retry_what_is_down(self: &Arc<Self>, looks: &mut Looks) {
        let paths = match self.tables_to_retry() {
            Some(tables) => paths_of_what_is_down(&tables),
            None => return,
        };
        let seen = looks.at(paths, LOOK);
        let Some(mut tables) = self.tables_to_retry() else { return };
        let mut transports = Vec::new();
        for slot in tables.values_mut().filter(|slot| slot.running.is_err() && !slot.lent) {
            let Some(&now) = seen.get(&slot.entry.path) else { continue };
            if slot.retry.get_or_insert_with(|| Retry::new(now)).take(now) {
                transports.push(slot.entry.transport_id);
            }
        }
        let due = due(&mut tables, &seen);
        drop(tables);
        for id in transports {
            self.on_its_own(move |manager| manager.retry_transport(id));
        }
        for (transport, id) in due {
            self.on_its_own(move |manager| manager.retry_backend(transport, id));
        }
    }

    /// Tries to start a backend that is not up, unless another thread works on it.
    fn retry_backend(&self, transport: u32, id: BackendId) {
        let Some(mut lent) = self.try_lend(transport, id, "being started") else { return };
        if lent.slot.is_down() {
            let _opening = self.opening.read();
            lent.ground.retry(&self.fixed, &mut lent.slot);
        }
        self.put_back(lent);
    }

    /// Waits for disks that another process has: a killed process has them until its last write in the kernel has ended. Everything
    /// else is served meanwhile, and what is not free in time is tried with all else that is not up.
    pub(super) fn wait_for_busy_disks(&self) {
        let end = Instant::now() + DISK_TIMEOUT;
        while Instant::now() < end && !self.stopping.load(Ordering::SeqCst) {
            let busy = busy(&self.tables.lock());
            if busy.is_empty() {
                return;
            }
            for (transport, id, path) in busy {
                // Without the lock: finding the process that has a disk may take long.
                let look = path.clone();
                let looked = one(&path, Box::new(move || Disk::inspect(&look).map(drop)));
                if looked.map_or(true, |found| found.is_err_and(|error| error.kind() == ErrorKind::Busy)) {
                    continue;
                }
                self.retry_backend(transport, id);
            }
            // The kernel has no event for a lock that another process releases. A stop ends the wait.
            self.put_back.wait_for(&mut self.tables.lock(), BUSY_AGAIN);
        }
    }

    /// The tables, unless they are needed elsewhere, or not all is back: until then, what is down has not been tried for the first time.
    pub(super) fn tables_to_retry(&self) -> Option<MutexGuard<'_, Tables>> {
        self.tables.try_lock().filter(|_| self.restored.load(Ordering::SeqCst))
    }
}

/// The backends that are not up because another process has their disks, and the paths of those.
fn busy(tables: &Tables) -> Vec<(u32, BackendId, String)> {
    let up = tables.iter().filter_map(|(&id, slot)| Some((id, slot.running.as_ref().ok()?)));
    let busy = |(transport, running): (u32, &Running)| {
        let slots = running.backends.iter().filter(|(_, slot)| slot.is_busy && slot.is_down());
        slots.map(|(&id, slot)| (transport, id, slot.path.clone())).collect::<Vec<_>>()
    };
    up.flat_map(busy).collect()
}

/// Where that stands which is not up.
fn paths_of_what_is_down(tables: &Tables) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for slot in tables.values() {
        match &slot.running {
            Err(_) => drop(paths.insert(slot.entry.path.clone())),
            Ok(running) => {
                let down = running.backends.values().filter(|backend| backend.is_down());
                paths.extend(down.map(|backend| backend.path.clone()));
            }
        }
    }
    paths
}

/// The backends that are to be tried now.
fn due(tables: &mut Tables, seen: &BTreeMap<String, Node>) -> Vec<(u32, BackendId)> {
    let mut due = Vec::new();
    for (&transport, slot) in tables {
        let Ok(running) = &mut slot.running else { continue };
        for (&id, backend) in running.backends.iter_mut().filter(|(_, backend)| backend.is_down()) {
            let Some(&now) = seen.get(&backend.path) else { continue };
            if backend.retry.get_or_insert_with(|| Retry::new(now)).take(now) {
                due.push((transport, id));
            }
        }
    }
    due
}

impl BackendSlot {
    /// Whether it is to be tried again.
    pub(super) fn is_down(&self) -> bool {
        self.run.is_none() && !self.stopping && self.lent.is_none() && self.ending.get() == 0
    }
}

impl Ground {
    fn retry(&self, fixed: &Fixed, slot: &mut BackendSlot) {
        let (transport, id) = (self.id, slot.entry.id);
        let before = slot.error.clone();
        match slot.start(fixed, self) {
            Ok(()) => {
                tracing::info!(transport, backend = id.0, "its disk is there now: {}", slot.path);
                self.open_exports(fixed, slot);
            }
            Err(error) if before.as_deref() != Some(error.line().as_str()) => {
                tracing::error!(transport, backend = id.0, "the backend is not up: {error}");
            }
            Err(_) => {}
        }
    }

    /// Opens the exports of a backend that has come up, those that are not open.
    pub(super) fn open_exports(&self, fixed: &Fixed, slot: &mut BackendSlot) {
        let id = slot.entry.id;
        for entry in self.transport.blkdevs().iter().filter(|entry| entry.backend == id) {
            if slot.blkdevs.get(&entry.id).is_none_or(|blkdev| blkdev.export.is_none()) {
                slot.bring_blkdev_back(fixed, self.id, entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_at_the_path_is_tried_at_once_and_anything_else_when_it_is_due() {
        let (one, other) = (Some((1, 2, 0)), Some((1, 3, 0)));
        let mut retry = Retry::new(None);
        assert!(!retry.take(None));
        assert!(retry.take(one));
        assert!(!retry.take(one));
        assert!(retry.take(other));
        assert!(!retry.take(None));
        retry.due = Instant::now();
        assert!(retry.take(None));
        assert_eq!(retry.delay, FIRST * 2);
        for _ in 0..10 {
            retry.due = Instant::now();
            assert!(retry.take(None));
        }
        assert_eq!(retry.delay, LIMIT);
    }
}
