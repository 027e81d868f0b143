//! The objects of a daemon: transports, their backends, and the block devices on those; how they are created and
//! removed.
//!
//! Invariants: one lock protects the tables, and no thread on the data path takes it; work that can wait for a disk or
//! a file system runs without it (`slots`). A command that fails undoes its earlier steps. The region records which
//! backends and block devices exist; the tables here hold those that this process runs.
//!
//! Elsewhere: the wire protocol ([`crate::server`]), persistent state outside the region ([`crate::state`]), threads of
//! caches (`cbd-runtime`), exports of devices ([`crate::exports`]).

mod backend;
mod beneath;
mod blkdev;
#[cfg(test)]
mod condition_tests;
mod conditions;
mod control;
mod down;
mod drain;
mod end;
mod extend;
mod figures;
mod grow;
mod hosts;
mod live;
mod map;
mod moves;
mod names;
mod pins;
mod probe;
mod promise;
mod recorder;
mod register;
mod remote;
mod remote_blkdevs;
mod reopen;
mod retry;
mod scrubs;
mod services;
mod sharing;
mod slots;
mod start;
mod status;
mod stop;
mod tasks;
#[cfg(test)]
mod tests;
mod together;
mod transport;
mod users;
mod wakes;
mod watch;

use crate::config::Config;
use crate::events::Events;
use crate::exports::{ExportContext, ExportFile};
use crate::front_ends::FrontEnds;
use crate::guard::Guard;
use crate::handover::sessions::{PreservedSessions, StoreOptions};
use crate::remote::RemotePermissions;
use crate::run::Options;
use crate::seal::Seals;
use crate::state::StateDir;
use cbd_backing::Decorator;
use cbd_engine::Environment;
use cbd_runtime::{Count, Counted, ProcessEnvironment};
use cbd_types::{BootId, Context, Error, ErrorKind, Result};
use cbd_ublk::Tag;
pub use end::Ended;
use end::NotSynced;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use probe::{Probes, StartTime};
use recorder::Recorder;
use scrubs::Scrubs;
use sharing::Sharing;
use slots::TransportHandle;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use transport::TransportSlot;
use watch::Watching;

/// How often the background thread does its work.
const BACKGROUND_INTERVAL: Duration = Duration::from_secs(1);
/// How often it looks at other hosts right after the start, and the time between these looks: clients of all hosts may wait for it, and a
/// command may have the tables at one of them.
const FIRST_LOOKS: u32 = 10;
const FIRST_LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Settings and objects that do not change while the daemon runs.
#[derive(Debug)]
struct Fixed {
    config: Config,
    state: StateDir,
    context: ExportContext,
    guard: Guard,
    remote: RemotePermissions,
    decorator: Option<Decorator>,
    require_persistent: bool,
    environment: Arc<ProcessEnvironment>,
    started: Instant,
    warnings: Vec<String>,
    events: Arc<Events>,
    memory_locked: bool,
    seals: Seals,
    /// See [`Options::boot`].
    boot: Option<BootId>,
}

/// The transports by number.
type Tables = BTreeMap<u32, TransportSlot>;

/// The objects of a daemon and its background thread.
#[derive(Debug)]
pub struct Manager {
    fixed: Fixed,
    tables: Mutex<Tables>,
    /// Set when all former transports are restored. It changes only under the lock of the tables; `has_restored` wakes
    /// the threads that wait for it.
    restoring: AtomicBool,
    restored: AtomicBool,
    has_restored: Condvar,
    /// Notified when a slot was put back into the tables.
    slot_returned: Condvar,
    control_socket: Mutex<Option<Arc<ExportFile>>>,
    /// Held while the list of transports in the state folder is written.
    recording: Mutex<()>,
    /// Held for reading while a block device is opened, for writing while devices that a predecessor left are removed:
    /// the removal does not mistake a device that is being opened for one that was left.
    opening: RwLock<()>,
    /// Set when the devices that a predecessor left must be checked again.
    sweep_due: AtomicBool,
    stopping: AtomicBool,
    /// Counts the workers that open or close a region, or create a backend: their objects are not in the tables.
    workers: Count,
    /// Regions that such workers could not sync at the end.
    not_synced: NotSynced,
    background: Mutex<Option<Background>>,
    sharing: Sharing,
    scrubs: Scrubs,
    recorder: Mutex<Recorder>,
    moves: moves::Moves,
}

/// The thread that logs recovery points and errors, and retries backends that are not up.
#[derive(Debug)]
struct Background {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Manager {
    /// A manager without transports; [`restore`](Self::restore) restores those of the previous daemon, and each command
    /// waits until it has finished.
    ///
    /// # Errors
    /// When the state folder is on a device that this daemon serves.
    pub fn new(options: &Options, config: Config, state: StateDir) -> Result<Self> {
        let environment = Arc::new(ProcessEnvironment::new());
        let daemon_id = state.daemon_id(|| environment.random())?;
        let run_dir = cbd_export::folders::own_folder(&options.paths.run_dir, 0o755)
            .context(|| format!("the run folder {}", options.paths.run_dir.display()))?;
        let preserved = PreservedSessions::open(StoreOptions {
            daemon_id,
            run_dir: &run_dir,
            store_program: options.store_program.as_deref(),
            preserves_new: config.daemon.preserve_fuse.unwrap_or(true),
        });
        let preserved = Arc::new(preserved);
        preserved.start_maintenance();
        let context = ExportContext {
            run_dir: run_dir.clone(),
            dev_dir: options.paths.dev_dir.clone(),
            daemon_id,
            preserved,
            front_ends: Arc::new(FrontEnds::new(&config.daemon)),
            vhost_spin: config.daemon.vhost_spin_us.map(|us| Duration::from_micros(us.into())),
        };
        let state_dir = state.path().canonicalize().unwrap_or_else(|_| state.path().to_owned());
        let seals =
            Seals::new(options.paths.rules_dir.as_deref(), config.daemon.seal.unwrap_or(true), &state_dir);
        let guard = Guard { fuse_dir: context.fuse_dir(), ublk_dir: context.ublk_dir(), state_dir };
        guard.check(state.path(), "the state folder")?;
        let remote = RemotePermissions::open(&state);
        let mut warnings = Vec::new();
        let locked = lock_memory();
        if let Err(reason) = &locked {
            warnings.push(reason.clone());
        }
        warnings.extend(crate::exports::io_flusher_error());
        if options.decorator.is_some() {
            warnings.push("backing devices are decorated: for demonstrations and tests only".to_owned());
        }
        for warning in warnings.iter().chain(&remote.warning()) {
            tracing::warn!("{warning}");
        }
        Ok(Self {
            fixed: Fixed {
                require_persistent: options.require_persistent || config.daemon.require_persistent,
                config,
                state,
                context,
                guard,
                remote,
                decorator: options.decorator.clone(),
                environment,
                started: Instant::now(),
                warnings,
                events: Arc::clone(&options.events),
                memory_locked: locked.is_ok(),
                seals,
                boot: options.boot,
            },
            tables: Mutex::new(Tables::new()),
            restoring: AtomicBool::new(false),
            restored: AtomicBool::new(false),
            has_restored: Condvar::new(),
            slot_returned: Condvar::new(),
            control_socket: Mutex::default(),
            recording: Mutex::new(()),
            opening: RwLock::new(()),
            sweep_due: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            workers: Count::default(),
            not_synced: NotSynced::default(),
            background: Mutex::new(None),
            sharing: Sharing::default(),
            scrubs: Scrubs::default(),
            recorder: Mutex::default(),
            moves: moves::Moves::default(),
        })
    }

    /// Restores the transports, backends and block devices of the previous daemon, and returns a summary of one line.
    /// An object that cannot be restored remains in the tables with the reason, which `status` shows.
    ///
    /// # Errors
    /// When the state cannot be read, or a region does not survive a power failure although persistence is required.
    pub fn restore(self: &Arc<Self>) -> Result<String> {
        // Without the lock, so that a signal can end the daemon meanwhile; commands wait until everything is restored.
        self.restoring.store(true, Ordering::SeqCst);
        let mut found = Tables::new();
        let result = self.restore_transports(&mut found);
        if result.is_err() {
            self.begin_stop();
        }
        let mut tables = self.tables.lock();
        *tables = found;
        self.restored.store(true, Ordering::SeqCst);
        self.has_restored.notify_all();
        drop(tables);
        if result.is_ok() {
            *self.background.lock() = Background::start(self);
            self.start_balancer();
            // Commands are executed from here on.
            self.wait_for_busy_disks();
        }
        result.map(|()| summary(&self.tables.lock()))
    }

    fn restore_transports(&self, tables: &mut Tables) -> Result<()> {
        let context = &self.fixed.context;
        match cbd_fuse::sweep(&context.fuse_dir(), &context.dev_dir, &context.preserved.mounts()) {
            Ok(swept) => tracing::debug!("{swept:?}"),
            Err(error) => tracing::warn!("the mounts that a predecessor left cannot be removed: {error}"),
        }
        crate::exports::labels::sweep(context);
        let mut time = StartTime::new();
        for entry in self.fixed.state.transports()? {
            if self.stopping.load(Ordering::SeqCst) {
                return Err(stopping());
            }
            let id = entry.transport_id;
            let slot = TransportSlot::restore(&self.fixed, entry, &mut time)?;
            tables.insert(id, slot);
        }
        let is_known =
            |slot: &TransportSlot| slot.running.as_ref().is_ok_and(|running| running.damaged.is_empty());
        if tables.values().all(is_known) {
            let transport_handles: Vec<TransportHandle> = tables
                .iter()
                .filter_map(|(&id, slot)| Some(slot.running.as_ref().ok()?.handle(id)))
                .collect();
            self.sweep(&transport_handles);
        }
        Ok(())
    }

    /// Removes devices that a predecessor left and that belong to no block device; true if no further call is needed.
    /// While a transport is not up, or rows of its tables cannot be read, the devices in use are not known and nothing
    /// is removed. While a device is being opened, the removal is postponed.
    fn sweep_unwanted(&self) -> bool {
        let Some(_alone) = self.opening.try_write() else { return false };
        let transport_handles = {
            let Some(tables) = self.tables_to_retry() else { return false };
            let is_known =
                |slot: &TransportSlot| slot.running.as_ref().is_ok_and(|running| running.damaged.is_empty());
            if tables.values().any(|slot| slot.is_taken) {
                return false;
            }
            if !tables.values().all(is_known) {
                return true;
            }
            tables
                .iter()
                .filter_map(|(&id, slot)| Some(slot.running.as_ref().ok()?.handle(id)))
                .collect::<Vec<_>>()
        };
        self.sweep(&transport_handles);
        true
    }

    /// Removes the devices that belong to no block device of `transport_handles`, which must be all transports.
    fn sweep(&self, transport_handles: &[TransportHandle]) {
        if transport_handles.iter().any(|handle| !handle.transport.lost_blkdevs().is_empty()) {
            return;
        }
        let wanted: Vec<Vec<u8>> = transport_handles.iter().flat_map(TransportHandle::identities).collect();
        for device in self.fixed.context.preserved.sweep(&wanted) {
            tracing::info!(
                "{device} was left by a predecessor and belongs to no block device: it is removed"
            );
        }
        let wanted: Vec<Tag> = wanted.iter().map(|identity| self.fixed.context.tag(identity)).collect();
        match cbd_ublk::sweep(self.fixed.context.daemon_id, &wanted, &self.fixed.context.ublk_dir()) {
            Ok(swept) => swept.iter().for_each(|disk| {
                tracing::info!(
                    "{disk} was left by a predecessor and belongs to no block device: it is removed"
                );
            }),
            Err(error) => tracing::debug!("{error}"),
        }
    }

    /// The state that all front ends share.
    #[must_use]
    pub fn front_ends(&self) -> Arc<FrontEnds> {
        Arc::clone(&self.fixed.context.front_ends)
    }

    /// Ends operations that wait, and refuses new operations.
    pub fn begin_stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.fixed.events.end_followers();
        // Without the tables, which a command may have for long: a thread that begins to wait at this moment waits for
        // its timeout.
        self.slot_returned.notify_all();
    }

    /// Registers the caller as a worker on an object that is not in the tables: the end of the daemon waits until the
    /// result is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Stopped`](cbd_types::ErrorKind::Stopped) when the daemon ends.
    fn begin_work(&self) -> Result<Counted> {
        let work = self.workers.add();
        // In this order: the end of the daemon sets `stopping` first and counts the workers afterwards.
        if self.stopping.load(Ordering::SeqCst) { Err(stopping()) } else { Ok(work) }
    }

    /// Waits until all transports are restored and locks the tables; an error while the daemon is stopping.
    fn tables(&self) -> Result<MutexGuard<'_, Tables>> {
        let mut tables = self.tables.lock();
        self.has_restored.wait_while(&mut tables, |_| !self.restored.load(Ordering::SeqCst));
        if self.stopping.load(Ordering::SeqCst) { Err(stopping()) } else { Ok(tables) }
    }
}

impl Manager {
    /// Does what other hosts of shared regions ask for, and uses what they serve.
    fn follow_hosts(self: &Arc<Self>) {
        self.follow_moves();
        self.serve_other_hosts();
        self.accept_wakes();
        self.reopen_remotes();
    }
}

impl Background {
    /// Tells the thread to end, and waits for it.
    fn end(self) {
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }

    fn start(manager: &Arc<Manager>) -> Option<Self> {
        let (stop, stopped): (Sender<()>, Receiver<()>) = channel();
        let manager = Arc::downgrade(manager);
        let work = move || {
            let mut probes = Probes::default();
            let mut watching = Watching::default();
            let mut first_looks = 0..FIRST_LOOKS;
            loop {
                let is_first = first_looks.next().is_some();
                let interval = if is_first { FIRST_LOOK_INTERVAL } else { BACKGROUND_INTERVAL };
                if stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
                match manager.upgrade() {
                    Some(manager) if is_first => manager.follow_hosts(),
                    Some(manager) => {
                        manager.record_changes();
                        manager.refresh_shared();
                        manager.retry_down(&mut probes);
                        manager.examine_one_that_is_down();
                        manager.reopen_exports();
                        manager.follow_hosts();
                        manager.watch_remotes();
                        manager.schedule_scrubs();
                        manager.watch_files(&mut watching);
                    }
                    None => return,
                }
            }
            // Logs the changes since the last pass.
            if let Some(manager) = manager.upgrade() {
                manager.record_changes();
            }
        };
        match std::thread::Builder::new().name("cbd-background".to_owned()).spawn(work) {
            Ok(thread) => Some(Self { stop, thread }),
            Err(error) => {
                tracing::warn!(
                    "recovery points and conditions are not logged, and backends that are not up are not retried: {error}"
                );
                None
            }
        }
    }
}

/// Locks the memory of the process, unless a limit would make later mappings fail, those of regions included.
fn lock_memory() -> std::result::Result<(), String> {
    if crate::system::may_lock_without_limit() {
        return cbd_fuse::flusher::lock_memory();
    }
    Err("the daemon's memory is not locked: that needs CAP_IPC_LOCK or LimitMEMLOCK=infinity; a page of the daemon that was \
         paged out can stall the device"
        .to_owned())
}

fn stopping() -> Error {
    Error::new(ErrorKind::Stopped, "the daemon is stopping; dirty data stays in the region")
}

fn summary(tables: &Tables) -> String {
    let (mut backends, mut blkdevs, mut failed) = (0, 0, 0);
    for slot in tables.values() {
        match &slot.running {
            Err(_) => failed += 1,
            Ok(running) => {
                let served = running.remotes.values().filter(|slot| slot.blkdev.export.is_some()).count();
                blkdevs += served;
                failed += running.remotes.len() - served;
                for backend in running.backends.values() {
                    backends += usize::from(backend.run.is_some());
                    failed += usize::from(backend.run.is_none());
                    // A slot that a worker has taken counts, too.
                    let served =
                        backend.blkdevs.iter().filter(|(id, blkdev)| blkdev.info(**id).alive).count();
                    blkdevs += served;
                    failed += backend.blkdevs.len() - served;
                }
            }
        }
    }
    let failed =
        if failed == 0 { String::new() } else { format!(", {failed} NOT SERVED (see cbdctrl status)") };
    format!("{} transports, {backends} backends, {blkdevs} block devices{failed}", tables.len())
}
