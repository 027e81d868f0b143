//! Starting backends: tells a new disk from a recorded one, and undoes a start that fails.
//!
//! Invariants: a disk that has a row on a transport never gets a second one, by whatever path the user names it, since
//! the cache of the first row may hold dirty data of the disk; a start that fails leaves the transport unchanged.

use super::backend::{BackendSlot, unknown};
use super::beneath::{Accepts, forget};
use super::down::Accepted;
use super::probe::{Node, is_same, nodes};
use super::sharing::{bounds_of, too_large};
use super::slots::{TakenSlot, TransportHandle};
use super::stop::wait_until_unused;
use super::tasks::Stage;
use super::transport::{Running, absolute, running, running_mut};
use super::{Fixed, Manager, Tables, stopping};
use crate::api::{self, BackendStarted, StartBackend};
use crate::config::HANDLERS;
use crate::events::EventName;
use crate::exports::ExportChoice;
use cbd_backing::Identity;
use cbd_engine::{BackendEntry, CacheMode, Settings};
use cbd_runtime::disk::{default_handlers, refuse_overlap};
use cbd_runtime::moved::{refuse_former, settle};
use cbd_runtime::{Disk, NewBackend, RequestedSettings};
use cbd_types::{BackendId, Context, Durability, Error, ErrorKind, Name, Pmem, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The disk at a path.
enum Found {
    /// The disk of a backend of this transport that did not come up.
    Down(BackendId),
    /// A disk that no transport knows.
    New(Disk),
}

/// The paths of the disks that are served.
fn served(tables: &Tables) -> impl Iterator<Item = &String> {
    let up = tables.values().filter_map(|slot| slot.running.as_ref().ok());
    let backends = up.flat_map(|running| running.backends.values());
    backends.filter(|slot| slot.run.is_some()).map(|slot| &slot.path)
}

/// Refuses the path of a disk that is served; `nodes` are the nodes at the paths that respond.
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

/// Facts that are in the regions and not in the tables; read without the lock of the tables.
struct RegionFacts {
    /// The backends of other hosts, by transport.
    others: BTreeMap<u32, Vec<BackendEntry>>,
    /// Whether a rescue has moved a backend away from the disk.
    former: Result<()>,
}

/// The backends of other hosts whose disks can be compared with those of this machine. On another machine another disk has the same
/// path and the same numbers of the kernel; one disk that two hosts of one machine name is refused by its lock.
fn comparable(handle: &TransportHandle) -> Result<Vec<BackendEntry>> {
    if handle.living.is_none() {
        return Ok(handle.entries_of_others());
    }
    let mut others = handle
        .transport
        .backends_of_others()
        .context(|| format!("looking for the disk among the backends of other hosts of {}", handle.path))?;
    // Behind the others: one that was moved here meanwhile is not among those any more.
    others.extend(handle.transport.arriving_backends()?);
    others.retain(|entry| Identity::parse(&entry.identity).is_ok_and(|identity| !identity.is_weak()));
    Ok(others)
}

/// Whether two hosts cache one disk, or overlapping parts of one. A disk without marks looks like any other one at its place on another
/// machine; of two hosts on one machine the lock of the disk refuses the second one.
fn is_known_as_same(own: &Identity, other: &Identity) -> bool {
    let is_same = own.same_disk(other).is_ok() || own.overlaps(other);
    is_same && !own.is_weak() && !other.is_weak()
}

impl TransportHandle {
    /// Refuses a backend whose disk another host caches as well: both began at the same moment. Called once the row of the backend is
    /// stored, so that at least the later one of two hosts sees the other one's.
    pub fn refuse_elsewhere(&self, own: &BackendEntry) -> Result<()> {
        if self.living.is_none() {
            return Ok(());
        }
        let Ok(identity) = Identity::parse(&own.identity) else { return Ok(()) };
        let is_same = |other: &&BackendEntry| {
            let found = Identity::parse(&other.identity);
            other.uuid != own.uuid && found.is_ok_and(|found| is_known_as_same(&identity, &found))
        };
        let others = comparable(self)?;
        let Some(other) = others.iter().find(is_same) else { return Ok(()) };
        let text = format!(
            "{} is backend {} of host {} as well: stop one of the two (backend-stop); the other one starts then",
            own.path,
            other.id,
            self.host_name(other.host)
        );
        Err(Error::new(ErrorKind::AlreadyExists, text))
    }
}

impl RegionFacts {
    fn of(transport_handles: &[TransportHandle], path: &str, looked: &Result<Disk>) -> Result<Self> {
        let former = looked.as_ref().map_or(Ok(()), |disk| {
            transport_handles.iter().try_for_each(|handle| refuse_former(&handle.transport, disk, path))
        });
        let others = transport_handles.iter().map(|handle| Ok((handle.id, comparable(handle)?)));
        Ok(Self { others: others.collect::<Result<_>>()?, former })
    }

    /// The backends of a transport, of all hosts.
    fn entries(&self, id: u32, running: &Running) -> Vec<BackendEntry> {
        let ours = running.backends.values().map(|slot| slot.entry.clone());
        ours.chain(self.others.get(&id).into_iter().flatten().cloned()).collect()
    }
}

/// Searches all transports for the disk at `path`, which inspection found to be `looked`.
fn find(
    tables: &Tables,
    transport: u32,
    path: &str,
    looked: Result<Disk>,
    mut elsewhere: RegionFacts,
) -> Result<Found> {
    let recorded_here = |entry: &BackendEntry| looked.as_ref().is_ok_and(|disk| disk.is_of(entry));
    let up = tables.iter().filter_map(|(&id, slot)| Some((id, slot.running.as_ref().ok()?)));
    for (id, running) in up.clone() {
        let entries = elsewhere.entries(id, running);
        let Some(entry) = entries.iter().find(|entry| recorded_here(entry)) else { continue };
        if id != transport {
            return Err(known(path, entry.id, id, "; start it there (-t)"));
        }
        return match running.backends.get(&entry.id) {
            Some(slot) if slot.run.is_none() => Ok(Found::Down(entry.id)),
            _ => Err(known(path, entry.id, id, "")),
        };
    }
    std::mem::replace(&mut elsewhere.former, Ok(()))?;
    // Another disk than the recorded one: the caller reports what differs.
    let here = up.clone().filter(|(id, _)| *id == transport).flat_map(|(_, running)| &running.backends);
    if let Some((&backend, _)) = here.into_iter().find(|(_, slot)| slot.run.is_none() && slot.path == path) {
        return Ok(Found::Down(backend));
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
    Ok(Found::New(disk))
}

/// The parameters of a request, with the defaults of the configuration.
struct StartParameters {
    cache_bytes: Option<u64>,
    /// The maximum and the weight of a cache that shares space.
    cache_max: Option<u64>,
    weight: Option<u16>,
    handlers: u32,
    data_crc: bool,
    settings: Settings,
    export: Option<ExportChoice>,
    name: Option<Name>,
}

impl StartParameters {
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
        let cache_mode = request.cache_mode.or(defaults.cache_mode).unwrap_or(api::CacheMode::Writeback);
        Ok(Self {
            cache_bytes: request.cache_size.or(defaults.cache_size).filter(|&bytes| bytes > 0),
            cache_max: request.cache_max,
            weight: request.weight,
            handlers,
            data_crc: request.data_crc.or(defaults.data_crc).unwrap_or(true),
            settings: Settings {
                consistency: consistency.into(),
                cache_mode: cache_mode.into(),
                ..Settings::default()
            },
            export: request.start_dev.then(|| allowed(export, request.allow_remote)).transpose()?,
            name: request.name.as_deref().map(Name::new).transpose()?,
        })
    }
}

/// A warning for a cache in a region that does not survive a power failure, if writes are complete when they are in it.
pub(super) fn loses_writes(handle: &TransportHandle, id: u32, settings: Settings) -> Option<String> {
    let is_safe = handle.transport.region().memory().durability() == Durability::PowerFail;
    (settings.cache_mode == CacheMode::Writeback && !is_safe).then(|| {
        format!(
            "this region does not survive a power failure: what is dirty in it is lost with the machine; with \
             cache_mode=writethrough nothing is (cbdctrl set -b {id} cache_mode=writethrough)"
        )
    })
}

fn too_large_of(handle: &TransportHandle, wanted: &StartParameters) -> Option<String> {
    let bounds = bounds_of(handle, wanted.cache_bytes?, wanted.cache_max, wanted.weight).ok()?;
    too_large(handle, bounds)
}

impl TransportHandle {
    /// Records the path by which the disk was found if it differs from the recorded one: the next start opens that
    /// path.
    fn record_path(&self, slot: &mut BackendSlot) {
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

/// Parses the export; refuses one that other machines can reach unless the user has allowed it.
fn allowed(export: &str, allow_remote: bool) -> Result<ExportChoice> {
    let choice: ExportChoice = export.parse()?;
    choice.refuse_remote(allow_remote)?;
    Ok(choice)
}

impl Manager {
    pub(super) fn backend_start(&self, transport: u32, request: &StartBackend) -> Result<BackendStarted> {
        absolute(&request.path, "a backing device")?;
        let wanted = StartParameters::of(request, &self.fixed)?;
        let path = request.path.as_str();
        let others = {
            let tables = self.tables()?;
            running(&tables, transport)?;
            served(&tables).cloned().collect()
        };
        // Without the lock of the tables, so that no other command waits for this file system or disk.
        let nodes = nodes(path, others)?;
        self.fixed.guard.check(Path::new(path), "a backing device")?;
        refuse_served(&*self.tables()?, path, &nodes)?;
        let looked = Disk::inspect(path);
        let elsewhere = RegionFacts::of(&self.transport_handles()?, path, &looked)?;
        let mut tables = self.tables()?;
        running(&tables, transport)?;
        refuse_served(&tables, path, &nodes)?;
        match find(&tables, transport, path, looked, elsewhere)? {
            Found::Down(id) => {
                drop(tables);
                let mut taken = self.take_slot(transport, id, "being started")?;
                let result = self.backend_resume(&mut taken, request, &wanted);
                self.put_back(taken);
                result
            }
            Found::New(disk) => {
                let _work = self.begin_work()?;
                if tables.get(&transport).is_some_and(|slot| slot.is_taken) {
                    let text = format!("transport {transport} is being unregistered or grown");
                    return Err(Error::new(ErrorKind::Busy, text));
                }
                let running = running_mut(&mut tables, transport)?;
                running.pending.push(disk.identity.clone());
                let handle = running.handle(transport);
                drop(tables);
                let created = self.backend_create(&handle, path, &disk, &wanted);
                let mut started = self.insert_created(&handle, &disk, created)?;
                started.warnings.extend(too_large_of(&handle, &wanted));
                // No warning if the user gave 0 explicitly.
                if wanted.cache_bytes.is_none() && request.cache_size.is_none() {
                    started.warnings.push(format!(
                        "backend {} has no cache: every request goes to {}; for a cache stop it and start it with --cache-size SIZE",
                        started.backend_id, request.path
                    ));
                }
                if wanted.cache_bytes.is_some() {
                    started.warnings.extend(loses_writes(&handle, started.backend_id, wanted.settings));
                }
                Ok(started)
            }
        }
    }

    /// Starts a backend that has a row on the transport and is not up.
    fn backend_resume(
        &self,
        taken: &mut TakenSlot,
        request: &StartBackend,
        wanted: &StartParameters,
    ) -> Result<BackendStarted> {
        let TakenSlot { handle, id, slot, .. } = taken;
        let id = *id;
        if slot.run.is_some() {
            return Err(known(&request.path, id, handle.id, ""));
        }
        if slot.stopping {
            return Err(slot.being_stopped());
        }
        let before = std::mem::replace(&mut slot.path, request.path.clone());
        let requested = RequestedSettings {
            data_crc: request.data_crc,
            cache_bytes: request.cache_size,
            shared: request.cache_max.map(|max| (max, request.weight.unwrap_or(1))),
            handlers: request.handlers,
            consistency: request.consistency.map(Into::into),
            cache_mode: request.cache_mode.map(Into::into),
            name: wanted.name.clone(),
        };
        let accepted =
            request.older_region.then(|| Accepted::find(&self.fixed, handle, &slot.entry)).flatten();
        let accepts = Accepts { older_region: request.older_region, changed_disk: request.changed_disk };
        let result = requested
            .check(&slot.entry, handle.transport.info().layout.segment_size)
            .and_then(|()| settle(&handle.transport, &mut slot.entry, &request.path))
            .and_then(|()| slot.start_if(&self.fixed, handle, accepts));
        if result.is_ok() {
            // After the start: a start that fails accepts no older region.
            if let Some(Err(error)) = accepted.map(|accepted| accepted.log(&self.fixed, handle)) {
                let text = format!(
                    "it could not be logged that the region may be older than its disk: the next start refuses it ({error})"
                );
                tracing::warn!(backend = id.0, "{text}");
                slot.warnings.push(text);
            }
            let _opening = self.opening.read();
            if let Some(export) = &wanted.export {
                slot.allow_row(&self.fixed, handle, export);
            }
            handle.open_exports(&self.fixed, slot);
            handle.record_path(slot);
        } else {
            slot.path = before;
        }
        let blkdev = slot.blkdevs.iter().next().map(|(&blkdev, blkdev_slot)| blkdev_slot.info(blkdev));
        let warnings = slot.warnings.clone();
        result?;
        let blkdev = match (&wanted.export, blkdev) {
            (Some(export), None) => Some(self.blkdev_create(handle, slot, export, None, false)?),
            (Some(_), there) => there,
            (None, _) => None,
        };
        Ok(BackendStarted { backend_id: id.0, blkdev, warnings })
    }

    /// Inserts a backend that was created into the tables, and removes its disk from the pending ones.
    fn insert_created(
        &self,
        handle: &TransportHandle,
        disk: &Disk,
        created: Result<(BackendSlot, BackendStarted)>,
    ) -> Result<BackendStarted> {
        self.refresh_tables_copy(handle);
        let mut tables = self.tables.lock();
        let running = running_mut(&mut tables, handle.id);
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
        // The daemon ended meanwhile.
        let (slot, _) = created?;
        let id = slot.entry.id;
        slot.end(handle.id, id, &Stage::nowhere());
        Err(stopping())
    }

    fn backend_create(
        &self,
        handle: &TransportHandle,
        path: &str,
        disk: &Disk,
        wanted: &StartParameters,
    ) -> Result<(BackendSlot, BackendStarted)> {
        let new = NewBackend {
            host: handle.host,
            path: path.to_owned(),
            cache_bytes: wanted.cache_bytes,
            handlers: wanted.handlers,
            data_crc: wanted.data_crc,
            settings: wanted.settings,
            name: wanted.name.clone(),
        };
        let starting = || format!("starting {path}");
        let bytes = wanted.cache_bytes.unwrap_or(0);
        let bounds = bounds_of(handle, bytes, wanted.cache_max, wanted.weight).context(starting)?;
        let space = self.make_room(handle, bytes).context(starting)?;
        let id = new.create_sharing(&handle.transport, disk, bounds).context(starting)?;
        drop(space);
        let mut made = None;
        let started = handle
            .transport
            .backend(id)
            .and_then(|entry| self.backend_first_start(handle, made.insert(BackendSlot::new(entry)), wanted));
        match (made, started) {
            (Some(slot), Ok(started)) => Ok((slot, started)),
            (slot, started) => {
                // No client has written anything yet.
                let error = started.err().unwrap_or_else(|| unknown(id));
                let cache = slot
                    .as_ref()
                    .and_then(|slot| slot.run.as_ref()?.cache().map(|cache| Arc::downgrade(&cache)));
                let entry = slot.as_ref().map(|slot| slot.entry.clone());
                if let Some(slot) = slot {
                    slot.stop(handle.id, id);
                }
                wait_until_unused(&cache.unwrap_or_default());
                let removed = handle.transport.remove_backend(id);
                if let Some(entry) = entry.filter(|_| removed.is_ok()) {
                    forget(&self.fixed, &entry);
                }
                if let Err(left) = removed {
                    tracing::error!(
                        backend = id.0,
                        "the backend that did not start cannot be removed: {left}"
                    );
                    self.insert_failed(handle, id, &error);
                }
                Err(error)
            }
        }
    }

    /// Inserts a backend that did not start and whose row could not be removed, so that its disk gets no second row.
    fn insert_failed(&self, handle: &TransportHandle, id: BackendId, why: &Error) {
        let Ok(entry) = handle.transport.backend(id) else { return };
        let mut slot = BackendSlot::new(entry);
        slot.error = Some(why.line());
        if let Ok(running) = running_mut(&mut self.tables.lock(), handle.id) {
            running.backends.insert(id, slot);
        }
    }

    fn backend_first_start(
        &self,
        handle: &TransportHandle,
        slot: &mut BackendSlot,
        wanted: &StartParameters,
    ) -> Result<BackendStarted> {
        let id = slot.entry.id;
        slot.start(&self.fixed, handle)?;
        let warnings = slot.warnings.clone();
        let name = slot.entry.name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        let (event, path) = (EventName::BackendStarted.name(), &slot.path);
        tracing::info!(transport = handle.id, backend = id.0, event, path, "started: {path}{name}");
        let blkdev = match &wanted.export {
            Some(export) => Some(self.blkdev_create(handle, slot, export, None, false)?),
            None => None,
        };
        Ok(BackendStarted { backend_id: id.0, blkdev, warnings })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_disks_with_marks_are_known_as_the_same_on_two_machines() {
        let of = |token: &str| Identity::parse(token).unwrap();
        let unmarked = of("block;size=1048576;boot=one;place=pci-1");
        let marked = of("block;size=1048576;serial=S1;boot=two;place=pci-1");
        let same = of("block;size=1048576;serial=S1;boot=one;place=pci-9");
        let part = of("block;size=524288;serial=S1;boot=one;slice=1@0");
        let behind = of("block;size=524288;serial=S1;boot=two;slice=2@1024");
        assert!(unmarked.is_weak() && !marked.is_weak());
        for (one, another, is_same) in [
            (&unmarked, &marked, false),
            (&unmarked, &unmarked, false),
            (&marked, &same, true),
            (&marked, &part, true),
            (&part, &behind, false),
        ] {
            assert_eq!(is_known_as_same(one, another), is_same, "{one:?} {another:?}");
            assert_eq!(is_known_as_same(another, one), is_same, "{another:?} {one:?}");
        }
    }
}
