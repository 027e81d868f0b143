//! Retries of regions and backends that are not up: a device may appear after the daemon has started.
//!
//! Invariants: the node at the path is probed every second. A new node is tried immediately, the same node with
//! exponential backoff. A backend has one attempt at a time, and none while it is being stopped.

use super::Manager;
use super::backend::BackendSlot;
use super::probe::{BACKGROUND_TIMEOUT, Node, Probes, probe_path};
use super::slots::TransportHandle;
use super::transport::Running;
use super::{Fixed, Tables};
use crate::events::EventName;
use cbd_backing::DISK_TIMEOUT;
use cbd_runtime::Disk;
use cbd_types::{BackendId, ErrorKind};
use parking_lot::MutexGuard;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Delay of the first retry; each further delay is twice as long, up to [`LIMIT`].
const FIRST: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(60);

/// How often the start checks whether a disk that another process held is free.
const BUSY_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The schedule of retries of one object.
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

    /// Seconds until the next retry.
    pub(super) fn in_s(&self) -> u64 {
        self.due.saturating_duration_since(Instant::now()).as_secs()
    }

    /// Whether to retry now, given the node at the path; if so, schedules the next retry.
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
    /// Retries the regions and backends that are due. If a command holds the tables, the next pass retries them.
    pub(super) fn retry_down(self: &Arc<Self>, probes: &mut Probes) {
        let paths = match self.tables_to_retry() {
            Some(tables) => down_paths(&tables),
            None => return,
        };
        let seen = probes.nodes(paths, BACKGROUND_TIMEOUT);
        let Some(mut tables) = self.tables_to_retry() else { return };
        let mut transports = Vec::new();
        for slot in tables.values_mut().filter(|slot| slot.running.is_err() && !slot.is_taken) {
            let Some(&now) = seen.get(&slot.entry.path) else { continue };
            if slot.retry.get_or_insert_with(|| Retry::new(now)).take(now) {
                transports.push(slot.entry.transport_id);
            }
        }
        let due = due(&mut tables, &seen);
        drop(tables);
        for id in transports {
            self.spawn_retry(move |manager| manager.retry_transport(id));
        }
        for (transport, id) in due {
            self.spawn_retry(move |manager| manager.retry_backend(transport, id));
        }
    }

    /// Retries a backend that is not up, unless another thread works on it.
    fn retry_backend(&self, transport: u32, id: BackendId) {
        let Some(mut taken) = self.try_take_slot(transport, id, "being started") else { return };
        if taken.slot.is_down() {
            let _opening = self.opening.read();
            taken.handle.retry(&self.fixed, &mut taken.slot);
        }
        self.put_back(taken);
    }

    /// Waits for disks that another process holds: a killed process holds them until its last write in the kernel has
    /// ended. All other backends are served meanwhile; a disk that is not free in time is retried as any other that is
    /// not up.
    pub(super) fn wait_for_busy_disks(&self) {
        let end = Instant::now() + DISK_TIMEOUT;
        while Instant::now() < end && !self.stopping.load(Ordering::SeqCst) {
            let busy = busy(&self.tables.lock());
            if busy.is_empty() {
                return;
            }
            for (transport, id, path) in busy {
                // Without the lock of the tables: finding the process that holds a disk may take long.
                let probed = path.clone();
                let found = probe_path(&path, Box::new(move || Disk::inspect(&probed).map(drop)));
                if found.map_or(true, |found| found.is_err_and(|error| error.kind() == ErrorKind::Busy)) {
                    continue;
                }
                self.retry_backend(transport, id);
            }
            // The kernel has no event for a lock that another process releases. A stop ends the wait.
            self.slot_returned.wait_for(&mut self.tables.lock(), BUSY_RETRY_INTERVAL);
        }
    }

    /// The tables; none if another thread holds them, or if the restore has not finished and so has not tried every
    /// backend once.
    pub(super) fn tables_to_retry(&self) -> Option<MutexGuard<'_, Tables>> {
        self.tables.try_lock().filter(|_| self.restored.load(Ordering::SeqCst))
    }
}

/// The backends that are not up because another process holds their disks, with the paths of the disks.
fn busy(tables: &Tables) -> Vec<(u32, BackendId, String)> {
    let up = tables.iter().filter_map(|(&id, slot)| Some((id, slot.running.as_ref().ok()?)));
    let busy = |(transport, running): (u32, &Running)| {
        let slots = running.backends.iter().filter(|(_, slot)| slot.is_busy && slot.is_down());
        slots.map(|(&id, slot)| (transport, id, slot.path.clone())).collect::<Vec<_>>()
    };
    up.flat_map(busy).collect()
}

/// The paths of the regions and disks that are not up.
fn down_paths(tables: &Tables) -> BTreeSet<String> {
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

/// The backends that are due for a retry.
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
    /// Whether the backend is not up and no thread works on it.
    pub(super) fn is_down(&self) -> bool {
        self.run.is_none() && !self.stopping && self.work.is_none() && self.ending.get() == 0
    }
}

impl TransportHandle {
    fn retry(&self, fixed: &Fixed, slot: &mut BackendSlot) {
        let (transport, id) = (self.id, slot.entry.id);
        let before = slot.error.clone();
        match slot.start(fixed, self) {
            Ok(()) => {
                let (event, path) = (EventName::BackendUp.name(), &slot.path);
                tracing::info!(transport, backend = id.0, event, path, "its disk is there now: {path}");
                self.open_exports(fixed, slot);
            }
            Err(error) if before.as_deref() != Some(error.line().as_str()) => {
                let (event, path) = (EventName::BackendDown.name(), &slot.path);
                tracing::error!(transport, backend = id.0, event, path, "the backend is not up: {error}");
            }
            Err(_) => {}
        }
    }

    /// Opens the exports of a backend that has come up, except those that are open.
    pub(super) fn open_exports(&self, fixed: &Fixed, slot: &mut BackendSlot) {
        let id = slot.entry.id;
        for entry in self.transport.blkdevs().iter().filter(|entry| entry.backend == id) {
            if slot.blkdevs.get(&entry.id).is_none_or(|blkdev| blkdev.export.is_none()) {
                slot.restore_blkdev(fixed, self, entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_node_at_the_path_is_tried_immediately_and_a_known_node_when_it_is_due() {
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
