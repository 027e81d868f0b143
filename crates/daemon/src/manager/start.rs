//! Starting backends: telling a new disk from one that is known, and undoing a start that fails.
//!
//! Invariants: a disk that has a row on a transport never gets a second one, under whatever path it comes, since the
//! first may hold dirty data of it; a start that fails leaves the transport as it was.

use super::backend::{BackendSlot, Older, unknown};
use super::down::Accepted;
use super::lent::{Ground, Lent};
use super::looks::{Node, is_same, nodes};
use super::stop::wait_until_unused;
use super::tasks::Stage;
use super::transport::{Running, absolute, running, running_mut};
use super::{Fixed, Manager, Tables, stopping};
use crate::api::{self, BackendStarted, StartBackend};
use crate::config::HANDLERS;
use crate::exports::ExportChoice;
use cbd_backing::Identity;
use cbd_engine::{BackendEntry, Settings};
use cbd_runtime::disk::{default_handlers, refuse_overlap};
use cbd_runtime::moved::{refuse_former, settle};
use cbd_runtime::{Disk, NewBackend, RequestedSettings};
use cbd_types::{BackendId, Context, Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// What a path leads to.
enum Place {
    /// The disk of a backend of this transport that did not come up.
    Down(BackendId),
    /// A disk that no transport knows.
    New(Disk),
}

/// Where the disks are that are served.
fn served(tables: &Tables) -> impl Iterator<Item = &String> {
    let up = tables.values().filter_map(|slot| slot.running.as_ref().ok());
    let backends = up.flat_map(|running| running.backends.values());
    backends.filter(|slot| slot.run.is_some()).map(|slot| &slot.path)
}

/// Refuses a path that leads to a disk that is served; `nodes` is what stands at the paths that answer.
fn refuse_served(tables: &Tables, path: &str, nodes: &BTreeMap<String, Node>) -> Result<()> {
    let node = |path: &str| nodes.get(path).copied().flatten();
    let is_it = |slot: &BackendSlot| slot.path == path || is_same(node(&slot.path), node(path));
    for (id, slot) in tables {
        let Ok(running) = &slot.running else { continue };
        if let Some((&backend, _)) =
            running.backends.iter().find(|(_, slot)| slot.run.is_some() && is_it(slot))
        {
            return Err(known(path, backend, *id, ""));
        }
    }
    Ok(())
}

fn known(path: &str, backend: BackendId, on: u32, more: &str) -> Error {
    Error::new(
        ErrorKind::AlreadyExists,
        format!("{path} is backend {backend} of transport {on} already{more}"),
    )
}

/// What the regions say that the tables do not have; found without their lock.
struct Elsewhere {
    /// The backends of other hosts, by transport.
    others: BTreeMap<u32, Vec<BackendEntry>>,
    /// Whether a rescue has moved a backend away from the disk.
    former: Result<()>,
}

impl Elsewhere {
    fn of(grounds: &[Ground], path: &str, looked: &Result<Disk>) -> Self {
        let former = looked.as_ref().map_or(Ok(()), |disk| {
            grounds.iter().try_for_each(|ground| refuse_former(&ground.transport, disk, path))
        });
        Self {
            others: grounds.iter().map(|ground| (ground.id, ground.entries_of_others())).collect(),
            former,
        }
    }

    /// The backends of a transport, of all hosts.
    fn entries(&self, id: u32, running: &Running) -> Vec<BackendEntry> {
        let ours = running.backends.values().map(|slot| slot.entry.clone());
        ours.chain(self.others.get(&id).into_iter().flatten().cloned()).collect()
    }
}

/// Looks for the disk at `path`, which `looked` was found to be, on all transports.
fn find(
    tables: &Tables,
    transport: u32,
    path: &str,
    looked: Result<Disk>,
    mut elsewhere: Elsewhere,
) -> Result<Place> {
    let recorded_here = |entry: &BackendEntry| looked.as_ref().is_ok_and(|disk| disk.is_of(entry));
    let up = tables.iter().filter_map(|(&id, slot)| Some((id, slot.running.as_ref().ok()?)));
    for (id, running) in up.clone() {
        let entries = elsewhere.entries(id, running);
        let Some(entry) = entries.iter().find(|entry| recorded_here(entry)) else { continue };
        if id != transport {
            return Err(known(path, entry.id, id, "; start it there (-t)"));
        }
        return match running.backends.get(&entry.id) {
            Some(slot) if slot.run.is_none() => Ok(Place::Down(entry.id)),
            _ => Err(known(path, entry.id, id, "")),
        };
    }
    std::mem::replace(&mut elsewhere.former, Ok(()))?;
    // Another disk than the recorded one: the caller reports what differs.
    let here = up.clone().filter(|(id, _)| *id == transport).flat_map(|(_, running)| &running.backends);
    if let Some((&backend, _)) = here.into_iter().find(|(_, slot)| slot.run.is_none() && slot.path == path) {
        return Ok(Place::Down(backend));
    }
    let disk = looked?;
    for (id, running) in up {
        refuse_overlap(path, &disk, &elsewhere.entries(id, running))
            .context(|| format!("looking on transport {id}"))?;
        let is_it =
            |other: &Identity| other.overlaps(&disk.identity) || other.same_disk(&disk.identity).is_ok();
        if running.pending.iter().any(is_it) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("{path} is being started already, on transport {id}"),
            ));
        }
    }
    Ok(Place::New(disk))
}

/// What a request asks for, with the defaults of the configuration.
struct Wanted {
    cache_bytes: Option<u64>,
    handlers: u32,
    data_crc: bool,
    settings: Settings,
    export: Option<ExportChoice>,
}

impl Wanted {
    fn of(request: &StartBackend, fixed: &Fixed) -> Result<Self> {
        let defaults = &fixed.config.defaults;
        let handlers = request.handlers.or(defaults.handlers).unwrap_or_else(default_handlers);
        if !HANDLERS.contains(&handlers) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("handlers is {} to {}, not {handlers}", HANDLERS.start(), HANDLERS.end()),
            ));
        }
        let export = request.export.as_deref().or(defaults.export.as_deref()).unwrap_or("auto");
        let consistency = request.consistency.or(defaults.consistency).unwrap_or(api::Consistency::Strict);
        Ok(Self {
            cache_bytes: request.cache_size.or(defaults.cache_size).filter(|&bytes| bytes > 0),
            handlers,
            data_crc: request.data_crc.or(defaults.data_crc).unwrap_or(true),
            settings: Settings { consistency: consistency.into(), ..Settings::default() },
            export: request.start_dev.then(|| allowed(export, request.allow_remote)).transpose()?,
        })
    }
}

impl Ground {
    /// The disk was found by another path than the recorded one: the next start looks for it there.
    fn keep_path(&self, slot: &mut BackendSlot) {
        if slot.path == slot.entry.path {
            return;
        }
        let id = slot.entry.id;
        match self.transport.update_path(id, &slot.path) {
            Ok(()) => {
                tracing::info!(backend = id.0, "its disk is {} from now on, not {}", slot.path, slot.entry.path);
                slot.entry.path.clone_from(&slot.path);
            }
            Err(error) => slot.warnings.push(format!(
                "the disk of backend {id} is recorded as {}, and that could not be changed ({error}); after a restart start \
                 it by its path again",
                slot.entry.path
            )),
        }
    }
}

/// The export, unless other machines would reach it and the user has not allowed that.
fn allowed(export: &str, allow_remote: bool) -> Result<ExportChoice> {
    let choice: ExportChoice = export.parse()?;
    choice.refuse_remote(allow_remote)?;
    Ok(choice)
}

impl Manager {
    pub(super) fn backend_start(&self, transport: u32, request: &StartBackend) -> Result<BackendStarted> {
        absolute(&request.path, "a backing device")?;
        let wanted = Wanted::of(request, &self.fixed)?;
        let path = request.path.as_str();
        let others = {
            let tables = self.tables()?;
            running(&tables, transport)?;
            served(&tables).cloned().collect()
        };
        // Without the lock: no other command may wait for a file system or a disk here.
        let nodes = nodes(path, others)?;
        self.fixed.guard.check(Path::new(path), "a backing device")?;
        refuse_served(&*self.tables()?, path, &nodes)?;
        let looked = Disk::inspect(path);
        let elsewhere = Elsewhere::of(&self.grounds()?, path, &looked);
        let mut tables = self.tables()?;
        running(&tables, transport)?;
        refuse_served(&tables, path, &nodes)?;
        match find(&tables, transport, path, looked, elsewhere)? {
            Place::Down(id) => {
                drop(tables);
                let mut lent = self.lend(transport, id, "being started")?;
                let result = self.backend_resume(&mut lent, request, &wanted);
                self.put_back(lent);
                result
            }
            Place::New(disk) => {
                let _work = self.begin_work()?;
                if tables.get(&transport).is_some_and(|slot| slot.lent) {
                    let text = format!("transport {transport} is being left");
                    return Err(Error::new(ErrorKind::Busy, text));
                }
                let running = running_mut(&mut tables, transport)?;
                running.pending.push(disk.identity.clone());
                let ground = running.ground(transport);
                drop(tables);
                let created = self.backend_create(&ground, path, &disk, &wanted);
                let mut started = self.settle_new(&ground, &disk, created)?;
                // The user has given 0 explicitly.
                if wanted.cache_bytes.is_none() && request.cache_size.is_none() {
                    started.warnings.push(format!(
                        "backend {} has no cache: every request goes to {}; for a cache stop it and start it with --cache-size SIZE",
                        started.backend_id, request.path
                    ));
                }
                Ok(started)
            }
        }
    }

    /// Starts a backend that is on the transport but did not come up.
    fn backend_resume(
        &self,
        lent: &mut Lent,
        request: &StartBackend,
        wanted: &Wanted,
    ) -> Result<BackendStarted> {
        let Lent { ground, id, slot, .. } = lent;
        let id = *id;
        if slot.run.is_some() {
            return Err(known(&request.path, id, ground.id, ""));
        }
        if slot.stopping {
            return Err(Error::new(ErrorKind::Busy, format!("backend {id} is being stopped")));
        }
        let before = std::mem::replace(&mut slot.path, request.path.clone());
        let requested = RequestedSettings {
            data_crc: request.data_crc,
            cache_bytes: request.cache_size,
            handlers: request.handlers,
            consistency: request.consistency.map(Into::into),
        };
        let accepted =
            request.older_region.then(|| Accepted::find(&self.fixed, ground, &slot.entry)).flatten();
        let older = if request.older_region { Older::Accept } else { Older::Refuse };
        let result = requested
            .check(&slot.entry, ground.transport.info().layout.segment_size)
            .and_then(|()| settle(&ground.transport, &mut slot.entry, &request.path))
            .and_then(|()| slot.start_if(&self.fixed, ground, older));
        if result.is_ok() {
            // Only now: a start that fails accepts nothing.
            if let Some(Err(error)) = accepted.map(|accepted| accepted.log(&self.fixed, ground)) {
                let text = format!(
                    "it could not be logged that the region may be older than its disk: the next start refuses it ({error})"
                );
                tracing::warn!(backend = id.0, "{text}");
                slot.warnings.push(text);
            }
            let _opening = self.opening.read();
            ground.open_exports(&self.fixed, slot);
            ground.keep_path(slot);
        } else {
            slot.path = before;
        }
        let blkdev = slot.blkdevs.iter().next().map(|(&blkdev, blkdev_slot)| blkdev_slot.info(blkdev));
        let warnings = slot.warnings.clone();
        result?;
        let blkdev = match (&wanted.export, blkdev) {
            (Some(export), None) => Some(self.blkdev_create(ground, slot, export)?),
            (Some(_), there) => there,
            (None, _) => None,
        };
        Ok(BackendStarted { backend_id: id.0, blkdev, warnings })
    }

    /// Puts a backend that was made into the tables, if it was.
    fn settle_new(
        &self,
        ground: &Ground,
        disk: &Disk,
        created: Result<(BackendSlot, BackendStarted)>,
    ) -> Result<BackendStarted> {
        self.look_again(ground);
        let mut tables = self.tables.lock();
        let running = running_mut(&mut tables, ground.id);
        if let Ok(running) = running {
            let is_it = |pending: &Identity| *pending == disk.identity;
            if let Some(at) = running.pending.iter().position(is_it) {
                running.pending.swap_remove(at);
            }
            let (slot, started) = created?;
            running.backends.insert(slot.entry.id, slot);
            return Ok(started);
        }
        drop(tables);
        // The daemon has ended meanwhile.
        let (slot, _) = created?;
        let id = slot.entry.id;
        slot.end(id, &Stage::nowhere());
        Err(stopping())
    }

    fn backend_create(
        &self,
        ground: &Ground,
        path: &str,
        disk: &Disk,
        wanted: &Wanted,
    ) -> Result<(BackendSlot, BackendStarted)> {
        let new = NewBackend {
            host: ground.host,
            path: path.to_owned(),
            cache_bytes: wanted.cache_bytes,
            handlers: wanted.handlers,
            data_crc: wanted.data_crc,
            settings: wanted.settings,
        };
        let id = new.create(&ground.transport, disk).context(|| format!("starting {path}"))?;
        let mut made = None;
        let started = ground
            .transport
            .backend(id)
            .and_then(|entry| self.backend_first_start(ground, made.insert(BackendSlot::new(entry)), wanted));
        match (made, started) {
            (Some(slot), Ok(started)) => Ok((slot, started)),
            (slot, started) => {
                // No client has written anything yet.
                let error = started.err().unwrap_or_else(|| unknown(id));
                let cache = slot.as_ref().and_then(|slot| slot.run.as_ref()?.cache().map(Arc::downgrade));
                if let Some(slot) = slot {
                    slot.stop(id);
                }
                wait_until_unused(&cache.unwrap_or_default());
                if let Err(left) = ground.transport.remove_backend(id) {
                    tracing::error!(
                        backend = id.0,
                        "the backend that did not start cannot be removed: {left}"
                    );
                    self.keep_row(ground, id, &error);
                }
                Err(error)
            }
        }
    }

    /// The row of a backend that did not start has stayed in the region: it is shown, so that its disk gets no second row.
    fn keep_row(&self, ground: &Ground, id: BackendId, why: &Error) {
        let Ok(entry) = ground.transport.backend(id) else { return };
        let mut slot = BackendSlot::new(entry);
        slot.error = Some(why.line());
        if let Ok(running) = running_mut(&mut self.tables.lock(), ground.id) {
            running.backends.insert(id, slot);
        }
    }

    fn backend_first_start(
        &self,
        ground: &Ground,
        slot: &mut BackendSlot,
        wanted: &Wanted,
    ) -> Result<BackendStarted> {
        let id = slot.entry.id;
        slot.start(&self.fixed, ground)?;
        let warnings = slot.warnings.clone();
        tracing::info!(transport = ground.id, backend = id.0, "started: {}", slot.path);
        let blkdev = match &wanted.export {
            Some(export) => Some(self.blkdev_create(ground, slot, export)?),
            None => None,
        };
        Ok(BackendStarted { backend_id: id.0, blkdev, warnings })
    }
}
