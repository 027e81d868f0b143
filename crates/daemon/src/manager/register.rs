//! Registering and unregistering a region.
//!
//! Invariants: regions are opened, formatted and synced without the lock of the tables; the number of a transport is
//! reserved meanwhile. The state folder records a transport before its backends are started.

use super::probe::{Node, StartTime, is_same, nodes};
use super::transport::{
    EndedTransport, Running, TransportSlot, absolute, open_region, open_remembered, unknown, with_advice,
};
use super::{Manager, Tables, stopping};
use crate::api::{RegisterTransport, TransportRegistered};
use crate::events::EventName;
use crate::size::format_size;
use crate::state::TransportEntry;
use cbd_engine::FormatOptions;
use cbd_pmem::OpenOptions;
use cbd_runtime::region::{Before, Format, check_host_name, open_transport};
use cbd_types::{Error, ErrorKind, Result, uuid_text};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The error of formatting at the path of a recorded transport that is not up: its file system may merely not be
/// mounted.
fn refuse_overwrite(slot: &TransportSlot, path: &str) -> Error {
    let TransportEntry { transport_id: id, uuid, .. } = &slot.entry;
    let why = slot.running.as_ref().err().cloned().unwrap_or_default();
    Error::new(
        ErrorKind::AlreadyExists,
        format!(
            "{path} is the path of transport {id} ({uuid}), which is registered with this daemon and not up ({why}); dirty data in its \
             region is needed: restore the region (if it is on a file system of its own, mount that), or unregister it with \
             tp-unreg -t {id}, and format then"
        ),
    )
}

/// The paths of a transport's region and of its backing disks.
fn paths_of(slot: &TransportSlot) -> Vec<String> {
    let disks = slot.running.iter().flat_map(|running| running.backends.values());
    std::iter::once(slot.entry.path.clone()).chain(disks.map(|backend| backend.path.clone())).collect()
}

/// Refuses the path of a backing disk of this host, also of a backend that is not served: nothing locks its disk then.
fn refuse_backing_disk(tables: &Tables, path: &str, nodes: &BTreeMap<String, Node>) -> Result<()> {
    let node = |path: &str| nodes.get(path).copied().flatten();
    for (transport, slot) in tables {
        let Ok(running) = &slot.running else { continue };
        let is_it = |known: &str| known == path || is_same(node(known), node(path));
        if let Some((id, backend)) = running.backends.iter().find(|(_, backend)| is_it(&backend.path)) {
            let other_name =
                if backend.path == path { String::new() } else { format!(" ({})", backend.path) };
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{path} is the backing disk of backend {id} of transport {transport}{other_name}, and no region: as one it would \
                     lose its data; give another path"
                ),
            ));
        }
    }
    Ok(())
}

impl Manager {
    pub(super) fn register(&self, request: &RegisterTransport) -> Result<TransportRegistered> {
        let path = &request.path;
        check_host_name(&request.host)?;
        absolute(path, "a region")?;
        if request.size.is_some_and(|size| size == 0) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a region of size 0 holds nothing: give {path} another size"),
            ));
        }
        if !request.format && (request.force || request.segment_size.is_some() || request.shared) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "force, shared and segment-size go with format only",
            ));
        }
        // Without the lock of the tables, so that no other command waits for this file system.
        let others = self.tables()?.values().flat_map(paths_of).collect();
        let nodes = nodes(path, others)?;
        refuse_backing_disk(&*self.tables()?, path, &nodes)?;
        let before = Before::look(path);
        refuse_smaller(path, request.size, &before)?;
        let _work = self.begin_work()?;
        let id = self.reserve(request, &nodes)?;
        let result = self.register_at(id, request);
        if result.is_err() {
            self.unreserve(id);
            if request.format {
                before.restore(path);
            }
        }
        result
    }

    /// Reserves the number of a transport that is being registered; no other command can register it meanwhile.
    fn reserve(&self, request: &RegisterTransport, nodes: &BTreeMap<String, Node>) -> Result<u32> {
        let path = &request.path;
        let node = |path: &String| nodes.get(path).copied().flatten();
        let mut tables = self.tables()?;
        let is_it = |known: &String| known == path || is_same(node(known), node(path));
        let known = tables.values_mut().find(|slot| is_it(&slot.entry.path));
        // A transport that is not up is retried under its number.
        if let Some(slot) = known {
            if slot.running.is_ok() {
                return Err(Error::new(
                    ErrorKind::AlreadyExists,
                    format!("{path} is registered already, as transport {}", slot.entry.transport_id),
                ));
            }
            if slot.is_taken {
                let text =
                    format!("{path} is being opened already, as transport {}", slot.entry.transport_id);
                return Err(Error::new(ErrorKind::Busy, text));
            }
            if request.format && !request.force {
                return Err(refuse_overwrite(slot, path));
            }
            slot.is_taken = true;
            return Ok(slot.entry.transport_id);
        }
        let id = (0..).find(|id| !tables.contains_key(id)).unwrap_or(u32::MAX);
        let (path, host) = (path.clone(), request.host.clone());
        let entry = TransportEntry { transport_id: id, path, uuid: String::new(), host_id: 0, host };
        let running = Err("it is being registered".to_owned());
        tables.insert(id, TransportSlot { entry, running, retry: None, is_taken: true });
        Ok(id)
    }

    /// Releases the reservation of a transport that was not registered.
    fn unreserve(&self, id: u32) {
        let mut tables = self.tables.lock();
        if tables.get(&id).is_some_and(|slot| slot.entry.uuid.is_empty()) {
            tables.remove(&id);
        } else if let Some(slot) = tables.get_mut(&id) {
            slot.is_taken = false;
        }
    }

    fn register_at(&self, id: u32, request: &RegisterTransport) -> Result<TransportRegistered> {
        let path = &request.path;
        let options = OpenOptions { size: request.size, create: request.format, ..OpenOptions::default() };
        let remembered = self.tables.lock().get(&id).map(|slot| slot.entry.clone());
        // A format replaces the registered transport.
        let remembered = remembered.filter(|entry| !request.format && !entry.uuid.is_empty());
        let opened =
            open_region(&self.fixed, path, &options).map_err(|error| match (error.kind(), &remembered) {
                // A wrong size does not mean that another file is at the path.
                (ErrorKind::InvalidArgument, Some(_)) if request.size.is_some() => error,
                (_, Some(entry)) => with_advice(error, entry),
                (ErrorKind::NotFound, None) if !request.format => Error::new(
                    ErrorKind::NotFound,
                    format!("there is no region at {path}; make one with --format --size SIZE"),
                ),
                _ => error,
            })?;
        let format = request.format.then(|| Format {
            options: FormatOptions {
                segment_size: request.segment_size,
                force: request.force,
                ..FormatOptions::default()
            },
            shared: request.shared,
        });
        let environment = Arc::clone(&self.fixed.environment);
        let (info, line) = (opened.info, opened.line);
        let opened = match &remembered {
            Some(entry) => open_remembered(&self.fixed, entry, opened.region)
                .map_err(|error| with_advice(error, entry))?,
            None => open_transport(environment, opened.region, path, &request.host, format.as_ref())?,
        };
        let transport = &opened.transport;
        let host = transport.register_host(&request.host, None)?;
        let entry = TransportEntry {
            transport_id: id,
            path: path.clone(),
            uuid: uuid_text(transport.info().uuid),
            host_id: host.0,
            host: request.host.clone(),
        };
        self.record(id, Some(&entry))?;
        let mapping = (info, line);
        let mut running = {
            let _opening = self.opening.read();
            Running::with_backends(&self.fixed, &entry, opened, host, mapping, &mut StartTime::new())
        };
        running.others = running.handle(id).of_others();
        let event = EventName::TransportRegistered.name();
        tracing::info!(transport = id, host = host.0, event, path, "registered on {path}");
        let mut tables = self.tables.lock();
        let Some(slot) = tables.get_mut(&id) else {
            drop(tables);
            running.end(id, &self.not_synced);
            return Err(stopping());
        };
        (slot.running, slot.retry, slot.is_taken) = (Ok(running), None, false);
        let mut warnings = slot.info().warnings;
        warnings.extend(slot.running.iter().flat_map(Running::unserved));
        Ok(TransportRegistered { transport_id: id, host_id: host.0, warnings })
    }

    /// Changes the entry of a transport in the state folder and in the tables, or removes it. `recording` serializes
    /// the changes.
    pub(super) fn record(&self, id: u32, entry: Option<&TransportEntry>) -> Result<()> {
        let _alone = self.recording.lock();
        let others = |slot: &&TransportSlot| slot.entry.transport_id != id && !slot.entry.uuid.is_empty();
        let mut entries: Vec<TransportEntry> = {
            let tables = self.tables.lock();
            // The end of the daemon empties the tables; the transports must remain in the state folder.
            if !tables.contains_key(&id) {
                return Err(stopping());
            }
            tables.values().filter(others).map(|slot| slot.entry.clone()).collect()
        };
        entries.extend(entry.cloned());
        self.fixed.state.set_transports(&entries)?;
        let mut tables = self.tables.lock();
        let Some(slot) = tables.get_mut(&id) else { return Ok(()) };
        let former = slot.entry.uuid.clone();
        if let Some(entry) = entry {
            slot.entry = entry.clone();
        }
        drop(tables);
        if entry.is_none_or(|entry| entry.uuid != former) && !former.is_empty() {
            self.revoke_transport(id, &former);
            self.fixed.seals.sweep(&former, &[]);
        }
        Ok(())
    }

    /// Retries a transport that is not up, unless another thread works on it.
    pub(super) fn retry_transport(&self, id: u32) {
        let Ok(_work) = self.begin_work() else { return };
        let entry = {
            let mut tables = self.tables.lock();
            let slot = tables.get_mut(&id).filter(|slot| slot.running.is_err() && !slot.is_taken);
            let Some(slot) = slot else { return };
            slot.is_taken = true;
            slot.entry.clone()
        };
        let opened = open_region(&self.fixed, &entry.path, &OpenOptions::default());
        let result = opened.and_then(|opened| {
            let _opening = self.opening.read();
            Running::come_back(&self.fixed, &entry, opened, &mut StartTime::new())
        });
        let result = result.map_err(|error| with_advice(error, &entry).line());
        if result.is_ok() {
            self.sweep_due.store(true, Ordering::SeqCst);
        }
        let mut tables = self.tables.lock();
        match tables.get_mut(&id) {
            Some(slot) => slot.store_result(result),
            None => {
                drop(tables);
                // The daemon ended meanwhile.
                if let Ok(running) = result {
                    running.end(id, &self.not_synced);
                }
            }
        }
    }

    pub(super) fn unregister(&self, id: u32) -> Result<()> {
        let _work = self.begin_work()?;
        let handle = {
            let mut tables = self.tables()?;
            let slot = tables.get_mut(&id).ok_or_else(|| unknown(id))?;
            let busy =
                |text: String| Err(Error::new(ErrorKind::Busy, format!("transport {id} is in use: {text}")));
            if slot.is_taken {
                return busy("it is being opened, unregistered or grown".to_owned());
            }
            if let Ok(running) = &slot.running {
                if let Some(backend) = running.transport.incoming_backends(&|_| true)?.first() {
                    return busy(format!("backend {} is being moved to this host", backend.0));
                }
                if let Some((backend, slot)) = running.backends.first_key_value() {
                    return busy(format!(
                        "backend {backend} ({}) is on it; stop its backends first",
                        slot.path
                    ));
                }
                if let Some(remote) = running.first_remote() {
                    return busy(format!("{remote}; stop its block devices first"));
                }
                if !running.pending.is_empty() {
                    return busy("a backend is being started on it".to_owned());
                }
            }
            slot.is_taken = true;
            slot.running.as_ref().ok().map(|running| running.handle(id))
        };
        let left = handle.as_ref().map_or(Ok(()), |handle| {
            let leave = || handle.transport.unregister_host(handle.host);
            handle.living.as_ref().map_or_else(leave, |living| living.leave(leave))
        });
        if let Err(error) = left.and_then(|()| self.record(id, None)) {
            self.unreserve(id);
            return Err(error);
        }
        let slot = self.tables.lock().remove(&id);
        if let Some(slot) = slot {
            let (event, path) = (EventName::TransportUnregistered.name(), &slot.entry.path);
            tracing::info!(transport = id, event, path, "unregistered from {path}");
            drop(handle);
            if let Ok(running) = slot.running {
                EndedTransport::new(running.path, running.transport, running.presence).sync();
            }
        }
        Ok(())
    }
}

/// Refuses a region size below the length of its file.
fn refuse_smaller(path: &str, size: Option<u64>, before: &Before) -> Result<()> {
    match (size, before.length()) {
        (Some(size), Some(length)) if size < length => Err(Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "{path} has {}, more than the {} that --size says; a region is always all of its file: leave --size out, or cut the \
                 file first",
                format_size(length),
                format_size(size)
            ),
        )),
        _ => Ok(()),
    }
}
