//! The hosts of a transport that several share, as this daemon sees them.
//!
//! Invariants: what a host left is cleared only if it gives no sign of life, and if the user has typed how much dirty data its caches
//! hold.
//!
//! Elsewhere: joining and leaving (`register`), signs of life and proofs (`cbd-runtime`, `hosts`).

use super::Manager;
use super::slots::TransportHandle;
use super::transport::running;
use crate::api::{BackendInfo, BlkdevInfo, ClearHost, HostInfo};
use crate::events::EventName;
use crate::size::format_size;
use cbd_engine::{Mixed, Transport};
use cbd_runtime::hosts::{Living, SeenHost};
use cbd_runtime::{Bytes, PrivateMemory, ProcessEnvironment};
use cbd_types::{BackendId, Error, ErrorKind, HostId, Region, Result};
use std::sync::Arc;

impl HostInfo {
    pub(super) fn of(seen: SeenHost) -> Self {
        Self {
            host_id: seen.host.id.0,
            alive: seen.is_alive(),
            this: seen.is_self,
            seen_ms: seen.since.map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX)),
            clearing: seen.host.is_being_cleared,
            hostname: seen.host.name,
        }
    }
}

impl TransportHandle {
    /// The hosts of the transport. In a region of one host, others have no process while this one has it locked.
    pub fn hosts(&self) -> Result<Vec<HostInfo>> {
        if let Some(living) = &self.living {
            return Ok(living.hosts()?.into_iter().map(HostInfo::of).collect());
        }
        let hosts = self.transport.hosts().into_iter();
        Ok(hosts
            .map(|host| {
                let this = host.id == self.host;
                HostInfo {
                    host_id: host.id.0,
                    alive: this,
                    this,
                    seen_ms: None,
                    clearing: false,
                    hostname: host.name,
                }
            })
            .collect())
    }

    /// Says of the backends of other hosts, of which this daemon knows no more, whose they are and whether that host is alive.
    pub fn tell_hosts_of_backends(&self, list: &mut [BackendInfo]) -> Result<()> {
        let hosts = self.others_if_shared()?;
        for info in list.iter_mut().filter(|info| info.host_id != self.host.0) {
            if let Some(host) = hosts.iter().find(|host| host.host_id == info.host_id) {
                info.alive = host.alive;
                let end = if host.alive { "" } else { ", not alive" };
                info.state = format!("of host {}{end}", host.hostname);
            }
        }
        Ok(())
    }

    /// As [`tell_hosts_of_backends`](Self::tell_hosts_of_backends), for block devices.
    pub fn tell_hosts_of_blkdevs(&self, list: &mut [BlkdevInfo]) -> Result<()> {
        let hosts = self.others_if_shared()?;
        for info in list.iter_mut().filter(|info| info.host_id != self.host.0) {
            if let Some(host) = hosts.iter().find(|host| host.host_id == info.host_id) {
                info.alive = host.alive;
                info.note = Some(format!("of host {}", host.hostname));
            }
        }
        Ok(())
    }

    /// The hosts of a region that several share; none for one of one host.
    fn others_if_shared(&self) -> Result<Vec<HostInfo>> {
        if self.living.is_some() { self.hosts() } else { Ok(Vec::new()) }
    }

    /// A host by its name or its number.
    pub fn host_by_name(&self, host: &str) -> Result<HostId> {
        let hosts = self.hosts()?;
        let by_name = hosts.iter().find(|info| info.hostname == host);
        let found = by_name.or_else(|| hosts.iter().find(|info| info.host_id.to_string() == host));
        found.map(|info| HostId(info.host_id)).ok_or_else(|| {
            let text = format!("transport {} has no host {host}; host-list shows which there are", self.id);
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// The host that has a backend, which is not this one.
    pub fn host_with(&self, id: BackendId) -> Result<HostId> {
        let others = self.entries_of_others();
        others
            .iter()
            .find(|entry| entry.id == id)
            .map(|entry| entry.host)
            .ok_or_else(|| super::backend::unknown(id))
    }

    fn living(&self) -> Result<&Arc<Living>> {
        self.living.as_ref().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!("transport {} has one host alone, so there is no other one to clear", self.id),
            )
        })
    }
}

impl Manager {
    /// Takes everything from a dead host.
    pub(super) fn host_clear(&self, transport: u32, host: u32, request: &ClearHost) -> Result<()> {
        let _work = self.begin_work()?;
        let handle = running(&*self.tables()?, transport)?.handle(transport);
        let (living, id) = (handle.living()?, HostId(host));
        let known = living.hosts()?.into_iter().find(|seen| seen.host.id == id).ok_or_else(|| {
            let text = format!("transport {transport} has no host {host}; host-list shows which there are");
            Error::new(ErrorKind::NotFound, text)
        })?;
        // Before its data is counted: of a host whose process lives, none is to be given up.
        let dead = living.prove_dead(&known.host)?;
        let dirty = if known.host.is_being_cleared { Held::default() } else { held_by(&handle, id) };
        dirty.refuse_unless(request.discard_dirty, &known.host.name)?;
        dead.clear()?;
        self.refresh_tables_copy(&handle);
        let (event, name) = (EventName::HostCleared.name(), &known.host.name);
        tracing::warn!(
            transport,
            host,
            event,
            dropped = dirty.bytes,
            "host {name} was cleared: what it had is free"
        );
        Ok(())
    }
}

/// What the caches of a dead host hold that their disks lack.
#[derive(Default)]
struct Held {
    bytes: u64,
    /// Each backend with dirty data.
    backends: Vec<String>,
    /// Each backend of which it is not known.
    unknown: Vec<String>,
}

impl Held {
    fn refuse_unless(&self, typed: Option<u64>, name: &str) -> Result<()> {
        if self.bytes == 0 && self.unknown.is_empty() && typed.is_none_or(|typed| typed == 0) {
            return Ok(());
        }
        if typed == Some(self.bytes) {
            return Ok(());
        }
        let lines = self.backends.iter().chain(&self.unknown).cloned().collect::<Vec<_>>().join("; ");
        Err(Error::new(
            ErrorKind::Busy,
            format!(
                "host {name} has {}{} of dirty data that its disks lack ({lines}): start its daemon again to write it back, or give it up \
                 with --discard-dirty {}",
                if self.unknown.is_empty() { "" } else { "at least " },
                format_size(self.bytes),
                self.bytes
            ),
        ))
    }
}

/// Recovers the caches of a host in private memory; the region stays as it is.
fn held_by(handle: &TransportHandle, id: HostId) -> Held {
    let mut held = Held::default();
    let Some((members, _)) = handle.transport.members() else { return held };
    let bytes: Arc<dyn Bytes> = Arc::clone(members.region()) as Arc<dyn Bytes>;
    let environment = Arc::new(ProcessEnvironment::<PrivateMemory>::new());
    let memory = Arc::new(Region::new(PrivateMemory::new(bytes)));
    let looked = Transport::open_of_host(environment, memory, id).and_then(|transport| {
        for entry in transport.backends()?.into_iter().filter(|entry| entry.cache_segments > 0) {
            let what = format!("backend {} ({})", entry.id, entry.path);
            match transport.open_cache_if(entry.id, Mixed::Look) {
                Ok(cache) => {
                    let dirty = cache.dirty_bytes() + cache.status().quarantined_bytes;
                    if dirty > 0 {
                        held.backends.push(format!("{what}: {}", format_size(dirty)));
                    }
                    held.bytes += dirty;
                }
                Err(error) => held.unknown.push(format!("{what}: not known, {}", error.line())),
            }
        }
        Ok(())
    });
    if let Err(error) = looked {
        held.unknown.push(format!("its tables cannot be read: {}", error.line()));
    }
    held
}
