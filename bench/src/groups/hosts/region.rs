//! Regions in files of memory, opened as daemons open them: one of one host, and one that several hosts share.
//!
//! Invariants: each host of a shared region has a mapping, a transport and a thread of heartbeats of its own, as each of several
//! daemons has.

use crate::instant_disk::InstantDisk;
use crate::rig::{self, Rig};
use crate::scale::{Sources, random_places};
use cbd_engine::{FormatOptions, Transport};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_runtime::ProcessEnvironment;
use cbd_runtime::hosts::Living;
use cbd_runtime::region::{Format, OpenTransport, open_transport};
use cbd_types::{Error, ErrorKind, Region, Result};
use rand::rngs::SmallRng;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

/// The folder of the regions.
const FOLDER: &str = "/dev/shm";

/// How many times the size of a cache is written to age it.
const AGE: u64 = 3;

/// A region and its hosts.
pub struct OpenRegion {
    hosts: Vec<OpenTransport>,
    _folder: TempDir,
}

impl OpenRegion {
    /// Formats a region of `bytes` for one host, and opens it.
    ///
    /// # Errors
    /// The errors of the engine and of the system.
    pub fn of_one_host(bytes: u64) -> Result<Self> {
        let folder = folder()?;
        let host = format(&folder.path().join("region"), bytes, false)?;
        Ok(Self { hosts: vec![host], _folder: folder })
    }

    /// Formats a region of `bytes` that `hosts` hosts share, and opens it as each of them.
    ///
    /// # Errors
    /// The errors of the engine and of the system.
    pub fn shared(bytes: u64, hosts: usize) -> Result<Self> {
        let folder = folder()?;
        let path = folder.path().join("region");
        let mut opened = vec![format(&path, bytes, true)?];
        while opened.len() < hosts {
            let how = OpenOptions { with_hosts: true, ..OpenOptions::default() };
            opened.push(open(&path, &how, &format!("host{}", opened.len()), None)?);
        }
        Ok(Self { hosts: opened, _folder: folder })
    }

    /// The transport of a host.
    pub fn transport(&self, host: usize) -> &Arc<Transport<ProcessEnvironment>> {
        &self.hosts[host].transport
    }

    /// A flag that is set when this process is a host no more.
    pub fn loss(&self, host: usize) -> Arc<AtomicBool> {
        self.hosts[host].living.as_ref().map(Living::loss).unwrap_or_default()
    }

    /// Creates a cache of the first host of so many segments in front of a device of `device` bytes, and writes to random blocks until
    /// it is aged.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn aged_cache(&self, segments: u32, device: u64, random: &mut SmallRng) -> Result<Rig<Mapping>> {
        let transport = self.transport(0);
        let host = transport.register_host("host0", None)?;
        let cache = rig::create(transport, host, segments, device, rig::lanes_of_a_daemon())?;
        let mut rig = Rig::over(cache, Arc::new(InstantDisk::new(device)?))?;
        let bytes = u64::from(segments) * transport.info().layout.segment_size;
        let around = usize::try_from(AGE * bytes / 4096).unwrap_or(usize::MAX);
        rig.write_all(&random_places(random, device, 4096, around), &Sources::new(4096))?;
        rig.settle()?;
        Ok(rig)
    }

    /// Refuses figures of a region of which a host does not see that all of them are alive.
    ///
    /// # Errors
    /// [`ErrorKind::Stopped`]; errors of reading.
    pub fn require_all_alive(&self) -> Result<()> {
        for living in self.hosts.iter().filter_map(|host| host.living.as_ref()) {
            let alive = living.hosts()?.iter().filter(|seen| seen.is_alive()).count();
            if alive < self.hosts.len() {
                let text = format!("{alive} of {} hosts give signs of life", self.hosts.len());
                return Err(Error::new(ErrorKind::Stopped, text));
            }
        }
        Ok(())
    }
}

fn folder() -> Result<TempDir> {
    let failed =
        |error: std::io::Error| Error::new(ErrorKind::System, format!("no folder in {FOLDER}: {error}"));
    tempfile::Builder::new().prefix("cbd-bench-").tempdir_in(FOLDER).map_err(failed)
}

fn format(path: &Path, bytes: u64, shared: bool) -> Result<OpenTransport> {
    let how = OpenOptions { size: Some(bytes), create: true, populate: true, ..OpenOptions::default() };
    open(path, &how, "host0", Some(&Format { options: FormatOptions::default(), shared }))
}

fn open(path: &Path, how: &OpenOptions, name: &str, format: Option<&Format>) -> Result<OpenTransport> {
    let region = Region::new(Mapping::open(path, how)?);
    open_transport(Arc::new(ProcessEnvironment::new()), region, &path.display().to_string(), name, format)
}
