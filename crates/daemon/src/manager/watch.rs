//! Files that are in use, of backing devices, of regions and of exports: whether they are still there.
//!
//! Invariants: a look runs on a thread of its own and holds no lock, so a file system that does not answer delays no other thread. A
//! change is in the log once when it begins and once when it ends. A drain or a stop succeeds only if the file is there before and
//! after it.
//!
//! Elsewhere: what a file's change means to a flush (`cbd-backing` fails it), so what is dirty is kept.

use super::looks::{LOOK, Look, Looks, one};
use super::transport::Running;
use super::{Manager, Tables};
use crate::exports::ExportFile;
use cbd_backing::Change;
use cbd_runtime::RunningBackend;
use cbd_types::{BackendId, Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the files are looked at.
const INTERVAL: Duration = Duration::from_secs(5);

/// An export's socket or link, and how it changed.
type ExportLook = (Arc<ExportFile>, Option<String>);

/// What watches the files.
#[derive(Default)]
pub(super) struct Watching {
    looks: Looks<Option<Change>>,
    exports: Looks<ExportLook>,
    control: Looks<Option<String>>,
    control_change: Option<String>,
    due: Option<Instant>,
}

impl Manager {
    /// Looks at the files in use, now and then. Commands go first: where one runs, it is done a second later.
    pub(super) fn watch_files(&self, watching: &mut Watching) {
        if watching.due.is_some_and(|due| Instant::now() < due) {
            return;
        }
        let Some(tables) = self.tables_to_retry() else { return };
        let up = || tables.values().filter_map(|slot| slot.running.as_ref().ok());
        let (looks, exports) = (up().flat_map(looks_at).collect(), up().flat_map(looks_at_exports).collect());
        drop(tables);
        let seen = watching.looks.by(looks, LOOK);
        let seen_of_exports = watching.exports.by(exports, LOOK);
        self.watch_control_socket(watching);
        let Some(mut tables) = self.tables_to_retry() else { return };
        watching.due = Some(Instant::now() + INTERVAL);
        for (&transport, slot) in tables.iter_mut() {
            let Ok(running) = &mut slot.running else { continue };
            if let Some(found) = seen.get(&running.path) {
                let words = found.as_ref().map(|change| of_region(change, &running.path));
                note(&mut running.file_change, words, &format!("region of transport {transport}"));
            }
            for (id, backend) in running.backends.iter_mut().filter(|(_, backend)| backend.run.is_some()) {
                if let Some(found) = seen.get(&backend.path) {
                    let words = found.as_ref().map(ToString::to_string);
                    note(&mut backend.file_change, words, &format!("backing device of backend {id}"));
                }
                for (blkdev, slot) in &mut backend.blkdevs {
                    let Some(file) = slot.export.as_ref().and_then(|export| export.file.as_ref()) else {
                        continue;
                    };
                    // The device may have a new export at the same path since the check began.
                    let found = seen_of_exports.get(&key(file)).filter(|(of, _)| Arc::ptr_eq(of, file));
                    if let Some((_, change)) = found {
                        let device = format!("block device {blkdev} of transport {transport}");
                        note(&mut slot.file_change, change.clone(), &device);
                    }
                }
            }
        }
    }
}

impl Manager {
    /// The control socket at `path` is watched from now on, if it is there.
    pub fn set_control_socket(&self, path: &Path) {
        *self.control_socket.lock() = ExportFile::at(path).map(Arc::new);
    }

    fn watch_control_socket(&self, watching: &mut Watching) {
        let Some(file) = self.control_socket.lock().clone() else { return };
        let path = key(&file);
        let look: Look<Option<String>> = Box::new(move || file.what_changed());
        let Some(found) = watching.control.by([(path.clone(), look)].into(), LOOK).remove(&path) else {
            return;
        };
        let words = found.map(|change| {
            format!("{change}: commands do not reach this daemon, its devices continue; restart it to create the socket again")
        });
        note(&mut watching.control_change, words, "control socket");
    }
}

/// The daemon ends, and with it what has no name any more: what is dirty stays in the regions, but not in those without a file.
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

/// The looks at all files of a transport, by their paths.
fn looks_at(running: &Running) -> Vec<(String, Look<Option<Change>>)> {
    let (transport, path) = (Arc::downgrade(&running.transport), running.path.clone());
    let region: Look<Option<Change>> =
        Box::new(move || transport.upgrade()?.region().memory().change(Path::new(&path)));
    let backend = |slot: &super::backend::BackendSlot| Some((slot.path.clone(), look(slot.run.as_ref()?)));
    let backends = running.backends.values().filter_map(backend);
    std::iter::once((running.path.clone(), region)).chain(backends).collect()
}

/// The checks of the sockets and links of a transport's block devices, by path.
fn looks_at_exports(running: &Running) -> Vec<(String, Look<ExportLook>)> {
    let slots = running.backends.values().flat_map(|backend| backend.blkdevs.values());
    let files = slots.filter_map(|slot| slot.export.as_ref()?.file.clone());
    let look = |file: Arc<ExportFile>| {
        let path = key(&file);
        let look = move || {
            let change = file.change();
            (file, change)
        };
        (path, Box::new(look) as Look<ExportLook>)
    };
    files.map(look).collect()
}

fn key(file: &ExportFile) -> String {
    file.path().display().to_string()
}

fn look(run: &RunningBackend) -> Look<Option<Change>> {
    let watch = run.watch().clone();
    Box::new(move || watch.look())
}

/// What is known of a file now; the log has it where it is new.
fn note(known: &mut Option<String>, now: Option<String>, whose: &str) {
    if *known == now {
        return;
    }
    match &now {
        Some(change) => tracing::error!("{whose}: {change}"),
        None => tracing::info!("{whose}: its file is as it was"),
    }
    *known = now;
}

/// The same words for a region: its dirty data is brought to the disks while it can be.
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

/// Refuses to call a disk complete whose file is gone or cut short. What the user should know besides comes back: that the file has
/// another name.
///
/// # Errors
/// [`ErrorKind::Backing`] with how to save the bytes; [`Looks::no_answer`] where it is not known.
pub(super) fn check_file(id: BackendId, run: &RunningBackend) -> Result<Option<String>> {
    let path = run.watch().path().display().to_string();
    let found = one(&path, look(run))
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
                    "; to save everything copy its block device while the daemon runs, or what the file has of it by cp from \
                     that name"
                }
                Change::Short { .. } | Change::Linked { .. } | Change::Moved { .. } => "",
            };
            Err(Error::new(
                ErrorKind::Backing,
                format!(
                    "backend {id}: {change}{save}. {dirty} bytes are dirty and stay in the cache, and the backend continues; to give \
                     both up type backend-stop -b {id} --discard-dirty {missing}"
                ),
            ))
        }
    }
}
