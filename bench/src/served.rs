//! A backend as the daemon runs it, over a file in memory.

use cbd_backing::Backing;
use cbd_engine::{FormatOptions, Settings, Transport};
use cbd_export::{RequestQueue, wait_any};
use cbd_pmem::Mapping;
use cbd_runtime::{DeviceQueue, Disk, NewBackend, ProcessEnvironment, RunOptions, RunningBackend};
use cbd_types::{AlignedBuffer, Error, ErrorKind, Region, Result};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a segment.
const SEGMENT: u64 = 1 << 20;

/// The longest wait for a request.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A backend and what it needs.
pub struct Served {
    /// The transport in memory.
    pub transport: Arc<Transport<ProcessEnvironment>>,
    /// Its environment.
    pub environment: Arc<ProcessEnvironment>,
    /// The backend.
    pub run: RunningBackend,
    _disk: tempfile::NamedTempFile,
}

impl Served {
    /// A backend with a device of `size` bytes, a region of `region` bytes, and a cache of `cache` bytes if any. `decorate` wraps the
    /// backing device.
    ///
    /// # Errors
    /// The errors of the engine and of the system.
    pub fn new(
        size: u64,
        region: u64,
        cache: Option<u64>,
        decorate: &dyn Fn(Arc<dyn Backing>) -> Arc<dyn Backing>,
    ) -> Result<Self> {
        let system =
            |error: std::io::Error| Error::new(ErrorKind::System, "no file in /dev/shm").caused_by(error);
        let disk = tempfile::NamedTempFile::new_in("/dev/shm").map_err(system)?;
        disk.as_file().set_len(size).map_err(system)?;
        let environment = Arc::new(ProcessEnvironment::new());
        let region = Region::new(Mapping::anonymous(region)?);
        let options = FormatOptions { segment_size: Some(SEGMENT), ..FormatOptions::default() };
        let transport = Transport::format(Arc::clone(&environment), region, &options)?;
        let path = disk.path().display().to_string();
        let new = NewBackend {
            host: transport.register_host("bench", None)?,
            path: path.clone(),
            name: None,
            cache_bytes: cache,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        };
        let id = new.create(&transport, &Disk::inspect(&path)?)?;
        let entry = transport.backend(id)?;
        let options = RunOptions { decorate, ..RunOptions::plain("the region") };
        let (run, _) = RunningBackend::start(&transport, &environment, &entry, &path, options)?;
        Ok(Self { transport, environment, run, _disk: disk })
    }
}

/// Waits for request `id`, the only one; returns its buffer.
///
/// # Errors
/// That of the request.
pub fn complete(queue: &mut DeviceQueue<ProcessEnvironment>, id: u64) -> Result<AlignedBuffer> {
    let mut done = Vec::new();
    loop {
        queue.poll(&mut done);
        if let Some(completion) = done.drain(..).find(|completion| completion.id == id) {
            return completion.result.map(|()| completion.buffer);
        }
        wait_any(&queue.wait_descriptors(), Some(TIMEOUT))?;
    }
}
