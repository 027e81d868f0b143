//! Regions and backends that are not up are tried again: a device may come later than the daemon.
//!
//! Always true here: what stands at the path is looked at every second, and tried when it is another thing than the last
//! time, else on a schedule that becomes slower; one attempt at a time, and none while a stop is under way.

use super::Manager;
use super::backend::BackendSlot;
use super::transport::Running;
use super::{Fixed, Tables};
use cbd_types::BackendId;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The first attempt comes after this time, each further one after twice the time, up to the limit.
const FIRST: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(60);

/// What stands at a path: device, inode, and of a device its number.
type Node = Option<(u64, u64, u64)>;

/// When a backend is tried again.
#[derive(Debug)]
pub(super) struct Retry {
    due: Instant,
    delay: Duration,
    seen: Node,
}

impl Retry {
    fn new(seen: Node) -> Self {
        Self { due: Instant::now() + FIRST, delay: FIRST, seen }
    }

    /// Seconds until then.
    pub(super) fn in_s(&self) -> u64 {
        self.due.saturating_duration_since(Instant::now()).as_secs()
    }

    /// Whether it is to be tried now; if so, when it is tried next.
    fn take(&mut self, now: Node) -> bool {
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

fn node(path: &str) -> Node {
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino(), found.rdev()))
}

impl Manager {
    /// Tries what is not up and is due. Commands go first: where one runs, it is tried a second later.
    pub(super) fn retry_what_is_down(&self) {
        let Some(mut tables) = self.tables.try_lock() else { return };
        // Until all is back, what is down has not been tried for the first time.
        if !self.restored.load(Ordering::SeqCst) {
            return;
        }
        let mut has_come = false;
        for slot in tables.values_mut().filter(|slot| slot.running.is_err()) {
            let now = node(&slot.entry.path);
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            if slot.retry.get_or_insert_with(|| Retry::new(now)).take(now) {
                slot.retry(&self.fixed);
                has_come |= slot.running.is_ok();
            }
        }
        if has_come {
            self.sweep_unwanted(&tables);
        }
        let down = down(&mut tables);
        for (transport, id) in down {
            if self.stopping.load(Ordering::SeqCst) {
                return;
            }
            if let Some(running) = tables.get_mut(&transport).and_then(|slot| slot.running.as_mut().ok()) {
                running.retry(&self.fixed, transport, id);
            }
        }
    }
}

/// The backends that are to be tried now.
fn down(tables: &mut Tables) -> Vec<(u32, BackendId)> {
    let mut due = Vec::new();
    for (&transport, slot) in tables {
        let Ok(running) = &mut slot.running else { continue };
        for (&id, backend) in &mut running.backends {
            if backend.run.is_some() || backend.stopping {
                continue;
            }
            let now = node(&backend.path);
            if backend.retry.get_or_insert_with(|| Retry::new(now)).take(now) {
                due.push((transport, id));
            }
        }
    }
    due
}

impl Running {
    fn retry(&mut self, fixed: &Fixed, transport: u32, id: BackendId) {
        let Some(mut slot) = self.backends.remove(&id) else { return };
        let before = slot.error.clone();
        match slot.start(fixed, self) {
            Ok(()) => {
                tracing::info!(transport, backend = id.0, "its disk is there now: {}", slot.path);
                self.open_doors(fixed, transport, &mut slot);
            }
            Err(error) if before.as_deref() != Some(error.line().as_str()) => {
                tracing::error!(transport, backend = id.0, "the backend is not up: {error}");
            }
            Err(_) => {}
        }
        self.backends.insert(id, slot);
    }

    /// Opens the doors of a backend that has come up, those that are not open.
    pub(super) fn open_doors(&self, fixed: &Fixed, transport: u32, slot: &mut BackendSlot) {
        let id = slot.entry.id;
        for entry in self.transport.blkdevs().iter().filter(|entry| entry.backend == id) {
            if slot.blkdevs.get(&entry.id).is_none_or(|blkdev| blkdev.export.is_none()) {
                slot.bring_blkdev_back(fixed, transport, entry);
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
