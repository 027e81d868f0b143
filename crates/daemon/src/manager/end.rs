//! The end of a daemon: closes block devices and caches, then syncs the regions in ordinary files to their disks.
//!
//! Invariants: the end takes a bounded time even if a disk or a client hangs. A backend that hangs does not prevent
//! other caches from being closed and synced, and the log names it. Its own cache is not marked as synced: a thread may
//! still store into it.
//!
//! Elsewhere: ending a process whose regions cannot be synced in time ([`crate::run`]).

use super::backend::BackendSlot;
use super::conditions::{SharedConditions, log_unended};
use super::remote_blkdevs::RemoteSlot;
use super::tasks::{Stage, Task, run_until};
use super::transport::{EndedTransport, Running};
use super::{Manager, Tables, watch};
use cbd_types::BackendId;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Timeout for closing all block devices and caches together.
pub(super) const CLOSE_LIMIT: Duration = Duration::from_secs(12);

/// The part of that time that the background thread may take to end.
const BACKGROUND_LIMIT: Duration = Duration::from_secs(3);

/// Timeout for syncing all regions together, a little less than [`crate::run`] allows.
const SYNC_LIMIT: Duration = Duration::from_secs(85);

/// A daemon that has ended: its regions, which are still locked, and the tasks that hang.
#[must_use]
pub struct Ended {
    left: Vec<EndedTransport>,
    hung: Vec<String>,
    /// Waits for workers on a region or backend that was not in the tables.
    work: Task,
    /// The regions that were not synced, with reasons.
    not_synced: NotSynced,
}

/// Why regions were not synced at the end, each with the consequence.
pub(super) type NotSynced = Arc<Mutex<Vec<String>>>;

impl Ended {
    /// Syncs regions in ordinary files to their disks, so that the caches that are closed can be recovered after a
    /// restart of the machine. The result names the tasks that have not ended in time and the regions and caches that
    /// were not synced, with reasons.
    pub fn sync(self) -> Vec<String> {
        let tasks = self.left.into_iter().map(|left| {
            let not_synced = Arc::clone(&self.not_synced);
            Task::new(format!("region {}", left.path()), move |stage| {
                stage.set("it is not synced: its disk does not answer");
                left.sync_at_end(&not_synced);
            })
        });
        let late = run_until(Instant::now() + SYNC_LIMIT, tasks.chain([self.work]).collect());
        log(&late);
        let not_synced = std::mem::take(&mut *self.not_synced.lock());
        self.hung.into_iter().chain(late).chain(not_synced).collect()
    }
}

impl Manager {
    /// Closes block devices, then caches, then syncs the regions. Dirty data stays in the regions.
    pub fn stop(&self) {
        let _ = self.end().sync();
    }

    /// As [`stop`](Self::stop), but the caller syncs the regions, which can take long.
    pub fn end(&self) -> Ended {
        self.begin_stop();
        let deadline = Instant::now() + CLOSE_LIMIT;
        self.sharing.end_thread();
        self.scrubs.end();
        let mut hung = self.end_background(deadline.min(Instant::now() + BACKGROUND_LIMIT));
        let mut left = Vec::new();
        match self.tables.try_lock_until(deadline) {
            None => {
                hung.push("a command has not ended: no backend was stopped, and no region synced".to_owned())
            }
            Some(mut tables) => {
                if self.restoring.load(Ordering::SeqCst) {
                    let is_restoring = |_: &mut Tables| !self.restored.load(Ordering::SeqCst);
                    if self.has_restored.wait_while_until(&mut tables, is_restoring, deadline).timed_out() {
                        hung.push("the start: the regions that it has opened are not synced".to_owned());
                    }
                }
                watch::warn_of_lost_files(&tables);
                let taken = std::mem::take(&mut *tables);
                drop(tables);
                let (mut tasks, mut conditions) = (Vec::new(), Vec::new());
                for (transport, running) in
                    taken.into_iter().filter_map(|(id, slot)| Some((id, slot.running.ok()?)))
                {
                    let Running { path, transport: engine, presence, backends, remotes, .. } = running;
                    left.push(EndedTransport::new(path, engine, presence));
                    conditions
                        .extend(backends.values().map(|slot| SharedConditions::clone(&slot.conditions)));
                    tasks.extend(backends.into_iter().map(|(id, slot)| end_of(transport, id, slot)));
                    tasks.extend(remotes.into_values().map(RemoteSlot::end_task));
                }
                hung.extend(run_until(deadline, tasks));
                // The process may end before the stop of a backend that hangs.
                conditions.iter().for_each(log_unended);
            }
        }
        self.end_conditions_of_regions();
        log(&hung);
        Ended { left, hung, work: self.end_of_work(), not_synced: Arc::clone(&self.not_synced) }
    }

    /// Waits for workers on a region or backend that is not in the tables: a worker that finds the tables empty closes
    /// what it has opened.
    fn end_of_work(&self) -> Task {
        let workers = self.workers.clone();
        Task::new("a region or a backend".to_owned(), move |stage| {
            stage.set("it is being opened or closed: it is not synced");
            workers.wait_for_none(None);
        })
    }

    /// Ends the background thread, which logs the changes since its last pass.
    fn end_background(&self, deadline: Instant) -> Vec<String> {
        let Some(background) = self.background.lock().take() else {
            self.record_changes();
            return Vec::new();
        };
        let end = Task::new("the background thread".to_owned(), move |stage| {
            stage.set("it waits for a file system that does not answer");
            background.end();
        });
        run_until(deadline, vec![end])
    }
}

/// Ends a backend and its block devices.
pub(super) fn end_of(transport: u32, id: BackendId, slot: BackendSlot) -> Task {
    let name = format!("backend {id} of transport {transport} ({})", slot.path);
    Task::new(name, move |stage: &Stage| {
        let (work, ending) = (slot.work.clone(), slot.ending.clone());
        match &work {
            None => slot.end(transport, id, stage),
            // The worker that has the slot closes its block devices and then its cache.
            Some(_) => drop(slot),
        }
        if let Some(work) = &work {
            stage.set(work.why);
            work.wait_for_worker();
        }
        stage.set("its backing device does not complete requests; what is dirty stays in the region");
        ending.wait_for_none(None);
    })
}

fn log(hung: &[String]) {
    for what in hung {
        tracing::error!("not ended in time: {what}");
    }
}
