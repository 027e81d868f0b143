//! Checks that the files of backing devices, regions and exports in use still exist at their paths.
//!
//! Invariants: each probe runs on a thread of its own and holds no lock, so a file system that does not respond delays
//! no other thread. A change is logged once when it begins and once when it ends. A drain or a stop succeeds only if
//! the file exists before and after it.
//!
//! Elsewhere: `cbd-backing` fails a flush to a file that was deleted or cut short, so the cache keeps the dirty data.

use super::probe::{BACKGROUND_TIMEOUT, Probe, Probes, probe_path};
use super::transport::Running;
use super::{Manager, Tables};
use crate::events::EventName;
use crate::exports::ExportFile;
use cbd_backing::Change;
use cbd_runtime::RunningBackend;
use cbd_types::{BackendId, Error, ErrorKind, Result};
use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Interval of the checks.
const INTERVAL: Duration = Duration::from_secs(5);

/// An export's socket or link, and how it changed.
type ExportProbe = (Arc<ExportFile>, Option<String>);

/// The probes of the files, and their schedule.
#[derive(Default)]
pub(super) struct Watching {
    probes: Probes<Option<Change>>,
    exports: Probes<ExportProbe>,
    control: Probes<Option<String>>,
    control_change: Option<String>,
    due: Option<Instant>,
}

impl Manager {
    /// Checks the files in use every [`INTERVAL`]. If a command holds the tables, the next pass of the background
    /// thread does it.
    pub(super) fn watch_files(&self, watching: &mut Watching) {
        if watching.due.is_some_and(|due| Instant::now() < due) {
            return;
        }
        let Some(tables) = self.tables_to_retry() else { return };
        let up = || tables.values().filter_map(|slot| slot.running.as_ref().ok());
        let (probes, exports) =
            (up().flat_map(file_probes).collect(), up().flat_map(export_probes).collect());
        drop(tables);
        let seen = watching.probes.run(probes, BACKGROUND_TIMEOUT);
        let seen_of_exports = watching.exports.run(exports, BACKGROUND_TIMEOUT);
        self.watch_control_socket(watching);
        self.fixed.seals.look_at_initramfs();
        let Some(mut tables) = self.tables_to_retry() else { return };
        watching.due = Some(Instant::now() + INTERVAL);
        for (&transport, slot) in tables.iter_mut() {
            let Ok(running) = &mut slot.running else { continue };
            if let Some(found) = seen.get(&running.path) {
                let words = found.as_ref().map(|change| of_region(change, &running.path));
                let whose = Whose { transport: Some(transport), ..Whose::default() };
                note(&mut running.file_change, words, whose, &format!("region of transport {transport}"));
            }
            for (id, backend) in running.backends.iter_mut().filter(|(_, backend)| backend.run.is_some()) {
                if let Some(found) = seen.get(&backend.path) {
                    let whose = Whose { transport: Some(transport), backend: Some(id.0), blkdev: None };
                    let words = format!("backing device of backend {id}");
                    note(&mut backend.file_change, found.clone(), whose, &words);
                }
                for (blkdev, slot) in &mut backend.blkdevs {
                    let Some(file) = slot.export.as_ref().and_then(|export| export.file.as_ref()) else {
                        continue;
                    };
                    // The device may have a new export at the same path since the check began.
                    let found = seen_of_exports.get(&key(file)).filter(|(of, _)| Arc::ptr_eq(of, file));
                    if let Some((_, change)) = found {
                        let device = format!("block device {blkdev} of transport {transport}");
                        let (backend, blkdev) = (Some(id.0), Some(blkdev.0));
                        let whose = Whose { transport: Some(transport), backend, blkdev };
                        note(&mut slot.file_change, change.clone(), whose, &device);
                    }
                }
            }
        }
    }
}

impl Manager {
    /// Starts to watch the control socket at `path`, if it exists.
    pub fn set_control_socket(&self, path: &Path) {
        *self.control_socket.lock() = ExportFile::at(path).map(Arc::new);
    }

    fn watch_control_socket(&self, watching: &mut Watching) {
        let Some(file) = self.control_socket.lock().clone() else { return };
        let path = key(&file);
        let probe: Probe<Option<String>> = Box::new(move || file.what_changed());
        let Some(found) =
            watching.control.run([(path.clone(), probe)].into(), BACKGROUND_TIMEOUT).remove(&path)
        else {
            return;
        };
        let words = found.map(|change| {
            format!("{change}: commands do not reach this daemon, its devices continue; restart it to create the socket again")
        });
        note(&mut watching.control_change, words, Whose::default(), "control socket");
    }
}

/// Logs the files without a name when the daemon ends: their contents are lost with the last descriptor, so the dirty
/// data in a deleted region is lost.
pub(super) fn warn_of_lost_files(tables: &Tables) {
    for (transport, running) in tables.iter().filter_map(|(id, slot)| Some((id, slot.running.as_ref().ok()?)))
    {
        let caches = running.backends.values().filter_map(|slot| slot.run.as_ref()?.cache());
        let dirty: u64 = caches.map(|cache| cache.status().dirty_bytes).sum();
        if let Some(change) = running.file_change.as_ref().filter(|_| dirty > 0) {
            tracing::error!("region of transport {transport}, with {dirty} dirty bytes at the end: {change}");
        }
        for (id, slot) in &running.backends {
            if let Some(change) = &slot.file_change {
                tracing::error!("backing device of backend {id}, at the end: {change}");
            }
        }
    }
}

/// The probes of all files of a transport, by path.
fn file_probes(running: &Running) -> Vec<(String, Probe<Option<Change>>)> {
    let (transport, path) = (Arc::downgrade(&running.transport), running.path.clone());
    let size_seen = Arc::clone(&running.size_seen);
    let region: Probe<Option<Change>> = Box::new(move || {
        let transport = transport.upgrade()?;
        let memory = transport.region().memory();
        size_seen.store(memory.size_of_file(Path::new(&path)).unwrap_or(0), Ordering::Relaxed);
        memory.change(Path::new(&path))
    });
    let backend = |slot: &super::backend::BackendSlot| Some((slot.path.clone(), probe(slot.run.as_ref()?)));
    let backends = running.backends.values().filter_map(backend);
    std::iter::once((running.path.clone(), region)).chain(backends).collect()
}

/// The probes of the sockets and links of a transport's block devices, by path.
fn export_probes(running: &Running) -> Vec<(String, Probe<ExportProbe>)> {
    let slots = running.backends.values().flat_map(|backend| backend.blkdevs.values());
    let files = slots.filter_map(|slot| slot.export.as_ref()?.file.clone());
    let probe = |file: Arc<ExportFile>| {
        let path = key(&file);
        let probe = move || {
            let change = file.change();
            (file, change)
        };
        (path, Box::new(probe) as Probe<ExportProbe>)
    };
    files.map(probe).collect()
}

fn key(file: &ExportFile) -> String {
    file.path().display().to_string()
}

fn probe(run: &RunningBackend) -> Probe<Option<Change>> {
    let watch = run.watch().clone();
    Box::new(move || watch.check())
}

/// The objects to which a file belongs.
#[derive(Clone, Copy, Default)]
struct Whose {
    transport: Option<u32>,
    backend: Option<u32>,
    blkdev: Option<u32>,
}

/// Stores the present change of a file, and logs it if it is new.
fn note<T: Display + PartialEq>(known: &mut Option<T>, now: Option<T>, whose: Whose, words: &str) {
    if *known == now {
        return;
    }
    let Whose { transport, backend, blkdev } = whose;
    match &now {
        Some(change) => {
            let event = EventName::FileChanged.name();
            tracing::error!(event, transport, backend, blkdev, "{words}: {change}");
        }
        None => {
            let event = EventName::FileRestored.name();
            tracing::info!(event, transport, backend, blkdev, "{words}: its file is restored");
        }
    }
    *known = now;
}

/// The message for a change of a region's file, with the advice to drain while the daemon runs.
fn of_region(change: &Change, path: &str) -> String {
    match change {
        Change::Deleted { .. } => format!(
            "the region {path} was deleted while it is in use: what is dirty in it is lost when process {} ends. Write it to the \
             disks now (cbdctrl drain), then stop the backends and register another region",
            std::process::id()
        ),
        Change::Linked { .. } | Change::Moved { .. } | Change::Short { .. } => format!(
            "the region's file is not where it was: {change}; put it back before the daemon ends, or it is not found by the next one"
        ),
    }
}

/// Refuses a drain or stop if the file was deleted or cut short. Returns a warning if the file has another name.
///
/// # Errors
/// [`ErrorKind::Backing`] with how to save the data; [`Probes::no_answer`] if the file system does not respond.
pub(super) fn check_file(id: BackendId, run: &RunningBackend) -> Result<Option<String>> {
    let path = run.watch().path().display().to_string();
    let found = probe_path(&path, probe(run))
        .map_err(|error| error.while_doing(format!("looking at the file of backend {id}")))?;
    match found {
        None => Ok(None),
        Some(change) if !change.is_loss() => Ok(Some(format!("backend {id}: {change}"))),
        Some(change) => {
            let (dirty, missing) = run
                .cache()
                .map(|cache| cache.status())
                .map_or((0, 0), |status| (status.dirty_bytes, status.missing_bytes()));
            let save = match change {
                Change::Deleted { .. } => {
                    "; to save all data copy its block device while the daemon runs; cp from that name copies the data that \
                     the file has"
                }
                Change::Short { .. } | Change::Linked { .. } | Change::Moved { .. } => "",
            };
            Err(Error::new(
                ErrorKind::Backing,
                format!(
                    "backend {id}: {change}{save}. {dirty} bytes are dirty and stay in the cache, and the backend continues; to \
                     remove it and drop them type backend-stop -b {id} --discard-dirty {missing}"
                ),
            ))
        }
    }
}
