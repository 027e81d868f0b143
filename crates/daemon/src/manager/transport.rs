//! Transports: opening a region, restoring its backends, and closing it.

use super::backend::BackendSlot;
use super::end::{CLOSE_LIMIT, NotSynced, end_of};
use super::probe::{StartTime, answers};
use super::remote_blkdevs::RemoteSlot;
use super::retry::Retry;
use super::slots::{TablesCopy, TransportHandle};
use super::tasks::run_until;
use super::{Fixed, Tables};
use crate::api::TransportInfo;
use crate::events::EventName;
use crate::size::format_size;
use crate::state::TransportEntry;
use cbd_backing::{Identity, after_predecessor, refuse_file_beneath_loop_device};
use cbd_engine::{BackendEntry, Mixed, Transport};
use cbd_pmem::{Info, Mapping, OpenOptions, is_of_others};
use cbd_remote::WakeListener;
use cbd_runtime::hosts::Living;
use cbd_runtime::presence::Presence;
use cbd_runtime::region::{
    OpenTransport, REGION_TIMEOUT, bytes_used, open_existing, require_persistent, sync_region,
    sync_region_at_end, with_tools,
};
use cbd_runtime::{Count, ProcessEnvironment};
use cbd_types::{BackendId, BlkdevId, Durability, Error, ErrorKind, HostId, Pmem, Region, Result, uuid_text};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A registered transport; it may have failed to come up.
#[derive(Debug)]
pub(super) struct TransportSlot {
    pub entry: TransportEntry,
    pub running: std::result::Result<Running, String>,
    /// The schedule of retries while it is not up.
    pub retry: Option<Retry>,
    /// Whether a command or the background thread works on it without the lock of the tables.
    pub is_taken: bool,
}

/// A transport that is up.
pub(super) struct Running {
    /// This daemon as a host of a region that several share. Dropped first: it uses the transport.
    pub living: Option<Arc<Living>>,
    /// Path of the region.
    pub path: String,
    pub host: HostId,
    pub mapping: Info,
    pub mapping_line: String,
    /// A cached copy of the region's tables.
    pub tables_copy: TablesCopy,
    /// Held from reading the region's tables to storing the copy in `tables_copy`.
    pub reading: Arc<Mutex<()>>,
    /// Disks for which backends are being created.
    pub pending: Vec<Identity>,
    /// The backend that a former process was taking over, and the number of its move: the host that had it waits for an answer.
    pub former_part: Option<(BackendId, u64)>,
    /// Rows that cannot be read.
    pub damaged: Vec<String>,
    /// How the region's file has changed since it was opened.
    pub file_change: Option<String>,
    /// Bytes of the region's file or device, as they were last seen.
    pub size_seen: Arc<AtomicU64>,
    /// The contents of the caches of other hosts, read when this host was registered.
    pub others: Vec<String>,
    pub backends: BTreeMap<BackendId, BackendSlot>,
    /// The block devices of this host on backends of other hosts.
    pub remotes: BTreeMap<BlkdevId, RemoteSlot>,
    /// Such devices that are being started.
    pub remote_starts: Count,
    /// Where other hosts connect that are processes of the same kernel; none while another process has the address.
    pub wakes: Option<WakeListener>,
    /// Dropped before the transport, and after what stores into it.
    pub presence: Option<Presence>,
    pub transport: Arc<Transport<ProcessEnvironment>>,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Running")
            .field("host", &self.host)
            .field("backends", &self.backends)
            .finish_non_exhaustive()
    }
}

/// The transport `id`, if it is up.
pub(super) fn running(tables: &Tables, id: u32) -> Result<&Running> {
    let slot = tables.get(&id).ok_or_else(|| unknown(id))?;
    slot.running.as_ref().map_err(|error| down(id, error))
}

/// As [`running`], to change it.
pub(super) fn running_mut(tables: &mut Tables, id: u32) -> Result<&mut Running> {
    let slot = tables.get_mut(&id).ok_or_else(|| unknown(id))?;
    slot.running.as_mut().map_err(|error| down(id, error))
}

pub(super) fn unknown(id: u32) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no transport {id}; tp-list shows which there are"))
}

fn down(id: u32, error: &str) -> Error {
    Error::new(
        ErrorKind::Stopped,
        format!(
            "transport {id} is not up ({error}); correct that: the daemon retries within a minute, tp-reg retries immediately"
        ),
    )
}

/// A region that was opened and not yet read.
pub(super) struct Opened {
    pub region: Region<Mapping>,
    pub info: Info,
    pub line: String,
}

pub(super) fn open_region(fixed: &Fixed, path: &str, options: &OpenOptions) -> Result<Opened> {
    answers(path)?;
    fixed.guard.check(Path::new(path), "a region")?;
    refuse_file_beneath_loop_device(Path::new(path))?;
    let only_own = !fixed.config.daemon.allow_shared_regions;
    let needed = bytes_used(Path::new(path));
    let coherence = fixed.config.daemon.coherence.of_mapping();
    let options = OpenOptions { boot: fixed.boot, only_own, needed, coherence, ..options.clone() };
    let opened = Mapping::open(path, &options).or_else(|error| open_with_hosts(path, &options, error));
    let mapping = opened.map_err(|error| match error.kind() {
        ErrorKind::Permission if only_own && is_of_others(Path::new(path)) => Error::new(
            ErrorKind::Permission,
            format!("{}, or set allow_shared_regions = true in the configuration", error.line()),
        ),
        _ => error,
    })?;
    let info = mapping.info();
    if fixed.require_persistent {
        require_persistent(path, &info)?;
    }
    if fixed.memory_locked {
        leave_unlocked(path);
    }
    let line = mapping.describe();
    Ok(Opened { region: Region::new(mapping), info, line })
}

/// Opens a region that other hosts have open, if they share it; else this is the `error` of opening it alone.
fn open_with_hosts(path: &str, options: &OpenOptions, error: Error) -> Result<Mapping> {
    // A format needs the region alone.
    if error.kind() != ErrorKind::Busy || options.create {
        return Err(error);
    }
    let Ok(mapping) = Mapping::open(path, &OpenOptions { with_hosts: true, ..options.clone() }) else {
        return Err(error);
    };
    let region = Region::new(mapping);
    match Transport::<ProcessEnvironment>::is_shared(&region) {
        Ok(true) => Ok(region.into_memory()),
        _ => Err(error),
    }
}

/// Adds advice to the error of the region of a registered transport. It must not be formatted where it is missing, and
/// where something else is at its path.
pub(super) fn with_advice(error: Error, entry: &TransportEntry) -> Error {
    match error.kind() {
        ErrorKind::NotFound => Error::new(ErrorKind::NotFound, missing(entry)),
        ErrorKind::Foreign | ErrorKind::InvalidArgument => Error::new(error.kind(), replaced(entry, &error)),
        _ => with_tools(error, &entry.path),
    }
}

/// The text for something at the path of a registered transport that is no region: `found` says what it is.
fn replaced(entry: &TransportEntry, found: &Error) -> String {
    let TransportEntry { transport_id: id, path, uuid, .. } = entry;
    format!(
        "the file at {path} is not the region of transport {id} ({uuid}), which is registered with this daemon ({}); dirty data in \
         that region is needed: restore it (if it is on a file system of its own, mount that), or unregister it with \
         tp-unreg -t {id}. If this should be the region, cbdctrl check {path} examines it",
        found.line()
    )
}

fn missing(entry: &TransportEntry) -> String {
    format!(
        "the region {} of transport {} ({}) is not there: if it is on a file system of its own, mount that; dirty data in it is \
         needed, so do not create a new region in its place",
        entry.path, entry.transport_id, entry.uuid
    )
}

/// Opens the transport in the region of the registered transport `entry`.
///
/// # Errors
/// [`ErrorKind::Exchanged`] for another transport, and those of [`open_existing`].
pub(super) fn open_remembered(
    fixed: &Fixed,
    entry: &TransportEntry,
    region: Region<Mapping>,
) -> Result<OpenTransport> {
    let opened = open_existing(Arc::clone(&fixed.environment), region, &entry.path, &entry.host)?;
    let transport = &opened.transport;
    let uuid = uuid_text(transport.info().uuid);
    if uuid == entry.uuid {
        return Ok(opened);
    }
    Err(Error::new(
        ErrorKind::Exchanged,
        format!(
            "the region {} holds transport {uuid}, not {} as before; put the right region there, or tp-unreg -t {} and register \
             the new one",
            entry.path, entry.uuid, entry.transport_id
        ),
    ))
}

/// Excludes the region from locked memory: each page of it would stay in RAM once it is touched.
pub(super) fn leave_unlocked(path: &str) {
    let Ok(real) = std::fs::canonicalize(path) else { return };
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
    for line in maps.lines().filter(|line| line.ends_with(real.to_string_lossy().as_ref())) {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        if let Some((Some(start), Some(end))) = range.map(|(start, end)| (number(start), number(end)))
            && let Err(reason) = cbd_fuse::flusher::exclude_from_lock(start as *const u8, end - start)
        {
            tracing::warn!("the region {path} is locked in RAM: {reason}");
        }
    }
}

impl TransportSlot {
    /// Opens a transport; one that cannot be opened stays in the table with the reason.
    pub fn restore(fixed: &Fixed, entry: TransportEntry, time: &mut StartTime) -> Result<Self> {
        let open = || open_region(fixed, &entry.path, &OpenOptions::default());
        let running = time
            .answers(&entry.path)
            .and_then(|()| after_predecessor(REGION_TIMEOUT, open))
            .and_then(|opened| Running::come_back(fixed, &entry, opened, time));
        match running {
            Ok(running) => Ok(Self { entry, running: Ok(running), retry: None, is_taken: false }),
            // The user requires persistence: the daemon must not start without it.
            Err(error) if fixed.require_persistent && error.kind() == ErrorKind::Unsupported => Err(error),
            Err(error) => {
                let error = with_advice(error, &entry);
                let (transport, event) = (entry.transport_id, EventName::TransportFailed.name());
                tracing::error!(transport, event, path = entry.path, "the transport is not up: {error}");
                Ok(Self { entry, running: Err(error.line()), retry: None, is_taken: false })
            }
        }
    }

    /// Stores the result of a retry.
    pub fn store_result(&mut self, result: std::result::Result<Running, String>) {
        let transport = self.entry.transport_id;
        match &result {
            Ok(_) => {
                let (event, path) = (EventName::TransportUp.name(), &self.entry.path);
                tracing::info!(transport, event, path, "its region is there now: {path}");
                self.retry = None;
            }
            Err(line) if self.running.as_ref().err() != Some(line) => {
                let (event, path) = (EventName::TransportFailed.name(), &self.entry.path);
                tracing::error!(transport, event, path, "the transport is not up: {line}");
            }
            Err(_) => {}
        }
        (self.running, self.is_taken) = (result, false);
    }

    /// The row of `tp-list`.
    pub fn info(&self) -> TransportInfo {
        let base = TransportInfo {
            transport_id: self.entry.transport_id,
            host_id: self.entry.host_id,
            host: self.entry.host.clone(),
            path: self.entry.path.clone(),
            uuid: self.entry.uuid.clone(),
            ..TransportInfo::default()
        };
        match &self.running {
            Err(error) => {
                let retry_in_s = self.retry.as_ref().map(Retry::in_s);
                TransportInfo { error: Some(error.clone()), retry_in_s, ..base }
            }
            Ok(running) => running.info(base),
        }
    }
}

/// A transport that has ended and still has its region locked.
pub(super) struct EndedTransport {
    path: String,
    /// Dropped first: the region is released after the last store.
    _presence: Option<Presence>,
    transport: Arc<Transport<ProcessEnvironment>>,
}

impl EndedTransport {
    pub fn new(
        path: String,
        transport: Arc<Transport<ProcessEnvironment>>,
        presence: Option<Presence>,
    ) -> Self {
        Self { path, _presence: presence, transport }
    }

    /// Path of the region.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Syncs a region in an ordinary file to its disk, so that it can be recovered after a restart of the machine.
    pub fn sync(self) {
        sync_region_at_end(&self.transport, &self.path);
    }

    /// As [`sync`](Self::sync) at the end of the daemon; a failure is added to `not_synced`.
    pub fn sync_at_end(self, not_synced: &NotSynced) {
        if let Err(error) = sync_region(&self.transport, &self.path) {
            tracing::error!("{}", error.line());
            not_synced.lock().push(error.line());
        }
    }
}

impl Running {
    pub fn come_back(
        fixed: &Fixed,
        entry: &TransportEntry,
        opened: Opened,
        time: &mut StartTime,
    ) -> Result<Self> {
        let (info, line) = (opened.info, opened.line);
        let opened = open_remembered(fixed, entry, opened.region)?;
        let host = opened.transport.register_host(&entry.host, Some(HostId(entry.host_id)))?;
        Ok(Self::with_backends(fixed, entry, opened, host, (info, line), time))
    }

    pub fn with_backends(
        fixed: &Fixed,
        entry: &TransportEntry,
        OpenTransport { transport, living, presence }: OpenTransport,
        host: HostId,
        (mapping, mapping_line): (Info, String),
        time: &mut StartTime,
    ) -> Self {
        let path = entry.path.clone();
        let tables_copy = TablesCopy::of(&transport);
        let mut running = Self {
            living: living.map(Arc::new),
            path,
            host,
            mapping,
            mapping_line,
            tables_copy,
            reading: Arc::default(),
            pending: Vec::new(),
            former_part: None,
            damaged: Vec::new(),
            file_change: None,
            size_seen: Arc::default(),
            others: Vec::new(),
            backends: BTreeMap::new(),
            remotes: BTreeMap::new(),
            remote_starts: Count::default(),
            wakes: None,
            presence,
            transport,
        };
        running.restore_backends(fixed, entry.transport_id, time);
        running.restore_remotes(fixed, entry.transport_id);
        running
    }

    /// Ends all backends of the transport and closes it, for a daemon that has ended meanwhile.
    pub fn end(self, id: u32, not_synced: &NotSynced) {
        let tasks = self.backends.into_iter().map(|(backend, slot)| end_of(id, backend, slot));
        let tasks = tasks.chain(self.remotes.into_values().map(RemoteSlot::end_task));
        let late = run_until(Instant::now() + CLOSE_LIMIT, tasks.collect());
        for what in late {
            tracing::error!("not ended in time: {what}");
            not_synced.lock().push(what);
        }
        EndedTransport::new(self.path, self.transport, self.presence).sync_at_end(not_synced);
    }
}

impl TransportHandle {
    /// Describes the caches of other hosts in the region: no process serves them while this host has the region locked.
    pub fn of_others(&self) -> Vec<String> {
        if self.living.is_some() {
            // Other hosts serve what they have.
            return Vec::new();
        }
        let hosts = self.transport.hosts();
        let others = self.entries_of_others().into_iter();
        let say = |entry: BackendEntry| {
            let name = hosts.iter().find(|host| host.id == entry.host).map(|host| host.name.clone());
            let name = name.unwrap_or_else(|| entry.host.to_string());
            let holds = if entry.cache_segments == 0 {
                "has no cache".to_owned()
            } else {
                match self.transport.open_cache_if(entry.id, Mixed::Look) {
                    Ok(cache) => match cache.dirty_bytes() {
                        0 => "has nothing dirty here".to_owned(),
                        dirty => {
                            format!("has {} of dirty data here, which its disk lacks", format_size(dirty))
                        }
                    },
                    Err(error) => format!("has a cache here that cannot be opened ({error})"),
                }
            };
            format!(
                "backend {} ({}) belongs to host {name} and {holds}; it is served only by a daemon that registers with --host {name}",
                entry.id, entry.path
            )
        };
        others.map(say).collect()
    }
}

impl Running {
    /// The failure of the region's memory, or the loss of the region to another host, if any.
    pub(super) fn failed(&self) -> Option<String> {
        if let Some(lost) = self.living.as_ref().and_then(|living| living.lost()) {
            return Some(lost);
        }
        let region = self.transport.region();
        region.memory().failed().map(|at| match region.taken() {
            Some(taken) => taken.line(),
            None => format!(
                "the region's memory failed at byte {at}: what is written from now on may not be durable; replace it"
            ),
        })
    }

    /// A warning about damaged rows of block devices, while a backend has no block device.
    fn lost_blkdevs(&self) -> Option<String> {
        let rows: Vec<String> = self.tables_copy.lost.iter().map(ToString::to_string).collect();
        let without: Vec<String> = self
            .backends
            .iter()
            .filter(|(_, slot)| slot.blkdevs.is_empty())
            .map(|(id, slot)| format!("{id} ({})", slot.path))
            .collect();
        if rows.is_empty() || without.is_empty() {
            return None;
        }
        Some(format!(
            "both copies of row {} of the block devices are damaged: a block device in that row is not served, and no data \
             is lost with it; without a block device: backend {}; dev-start -b ID makes one, under another number",
            rows.join(", "),
            without.join(", ")
        ))
    }

    /// A warning about a device that machines cannot share.
    fn pages_in_device(&self) -> Option<String> {
        let is_shared = self.living.is_some() && self.mapping.pages_in_device;
        is_shared.then(|| {
            format!(
                "the kernel keeps its descriptions of the pages of {} in the device itself: another machine that maps it overwrites \
                 them, and both kernels panic. For hosts of one machine that is no matter; for several machines it is made with \
                 ndctl create-namespace --mode devdax --map mem",
                self.path
            )
        })
    }

    /// A warning about a file or device that is larger than the region.
    fn unused_end(&self, id: u32) -> Option<String> {
        let layout = &self.tables_copy.info.layout;
        let size = self.size_seen.load(Ordering::Relaxed).max(self.mapping.size);
        if size <= layout.region_size || layout.grown_to(size).is_err() {
            return None;
        }
        Some(format!(
            "{} has {}, and the region uses {} of it: cbdctrl tp-grow -t {id} uses all",
            self.path,
            format_size(size),
            format_size(layout.region_size)
        ))
    }

    fn info(&self, base: TransportInfo) -> TransportInfo {
        let info = &self.tables_copy.info;
        let (layout, [hosts, backends, blkdevs, _]) = (info.layout, info.bytes_per_row);
        let mut warnings = self.mapping.warnings.clone();
        warnings.extend(self.damaged.iter().cloned());
        warnings.extend(self.others.iter().cloned());
        warnings.extend(self.lost_blkdevs());
        warnings.extend(self.unused_end(base.transport_id));
        warnings.extend(self.pages_in_device());
        if self.mapping.durability != Durability::PowerFail {
            warnings.push(
                "this region does not survive a power failure: what is dirty in it is lost with the machine"
                    .to_owned(),
            );
        }
        TransportInfo {
            magic: format!("{:#x}", info.magic),
            version: info.version,
            flags: format!("{:#010x}", info.features[2]),
            host_area_off: layout.host_area,
            bytes_per_host_info: u64::from(hosts),
            host_num: u64::from(layout.host_rows),
            backend_area_off: layout.backend_area,
            bytes_per_backend_info: u64::from(backends),
            backend_num: u64::from(layout.backend_rows),
            blkdev_area_off: layout.blkdev_area,
            bytes_per_blkdev_info: u64::from(blkdevs),
            blkdev_num: u64::from(layout.blkdev_rows),
            segment_area_off: layout.segment_area,
            bytes_per_segment: layout.segment_size,
            segment_num: u64::from(layout.segment_count),
            alive: true,
            uuid: uuid_text(info.uuid),
            free_segments: u64::from(info.free_segments),
            host_id: self.host.0,
            error: self.failed().or_else(|| self.file_change.clone()),
            durability: self.mapping.durability.name().to_owned(),
            copy: self.mapping_line.clone(),
            warnings,
            ..base
        }
    }
}

/// Refuses a path that the daemon resolves differently from the user's shell.
pub(super) fn absolute(path: &str, what: &str) -> Result<()> {
    if path.is_empty() {
        return Err(Error::new(ErrorKind::InvalidArgument, format!("the path of {what} is empty")));
    }
    if !path.starts_with('/') || path.bytes().any(|byte| byte.is_ascii_control()) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "\"{}\" is no path of {what}: it is to be absolute and without control characters",
                path.escape_debug()
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_path_is_refused() {
        for path in ["", "r", "./r", "/a\nb"] {
            assert!(absolute(path, "a region").is_err(), "{path}");
        }
        assert!(absolute("/dev/sdb", "a region").is_ok());
    }
}
