//! A folder with the files of a daemon, a daemon in it, and helpers of its tests.

use cbd_daemon::api::{CacheInfo, Done, RegisterTransport, StartBackend, StopBackend};
use cbd_daemon::config::Config;
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::manager::Manager;
use cbd_daemon::run::Options;
use cbd_daemon::state::StateDir;
use cbd_nbd::Listen;
use cbd_testkit::Client;
use cbd_types::{BootId, Error, ErrorKind, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) struct Fixture {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) decorate: Option<String>,
    pub(crate) require_persistent: bool,
    /// The boot ID that daemons in this folder use.
    pub(crate) boot: Option<BootId>,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), decorate: None, require_persistent: false, boot: None }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn disk(&self, name: &str, size: u64) -> String {
        let file = std::fs::File::create(self.path(name)).unwrap();
        file.set_len(size).unwrap();
        self.text(name)
    }

    pub(crate) fn options(&self) -> Options {
        Options {
            require_persistent: self.require_persistent,
            decorator: self.decorate.as_deref().map(|text| cbd_testkit::decorator(text).unwrap()),
            boot: self.boot,
            ..Options::below(self.folder.path())
        }
    }

    pub(crate) fn try_daemon(&self) -> Result<Running> {
        std::fs::create_dir_all(self.path("dev")).unwrap();
        let options = self.options();
        let state = StateDir::open(&options.paths.state_dir)?;
        let manager = Arc::new(Manager::new(&options, Config::default(), state)?);
        let summary = manager.restore()?;
        Ok(Running { manager, summary })
    }

    pub(crate) fn daemon(&self) -> Running {
        self.try_daemon().unwrap()
    }

    /// A daemon with a region of 32 MiB.
    pub(crate) fn daemon_with_region(&self) -> Running {
        let daemon = self.daemon();
        daemon.register_transport(&self.region(32 * MIB)).unwrap();
        daemon
    }

    /// A disk of 8 MiB, and a daemon with a region that caches it.
    pub(crate) fn disk_and_daemon(&self) -> (String, Running) {
        let disk = self.disk("disk", 8 * MIB);
        let daemon = self.daemon_with_region();
        daemon.start_backend(0, &self.backend(&disk)).unwrap();
        (disk, daemon)
    }

    /// A disk of 8 MiB whose cache was left with the first block written.
    pub(crate) fn disk_left_with_a_block(&self) -> String {
        let (disk, _daemon) = self.disk_and_daemon();
        self.write_block();
        disk
    }

    /// As [`disk_left_with_a_block`](Self::disk_left_with_a_block), but the block has not reached the disk.
    pub(crate) fn disk_left_with_a_dirty_block(&mut self) {
        let before = self.decorate.replace("fault:op=write".into());
        self.disk_left_with_a_block();
        self.decorate = before;
    }

    /// Writes the block that [`block_is_there`](Self::block_is_there) expects.
    pub(crate) fn write_block(&self) {
        self.client().write(0, &[9; 4096], true).unwrap();
    }

    #[track_caller]
    pub(crate) fn block_is_there(&self) {
        let mut data = [0; 4096];
        self.client().read(0, &mut data).unwrap();
        assert_eq!(data, [9; 4096]);
    }

    pub(crate) fn region(&self, size: u64) -> RegisterTransport {
        RegisterTransport {
            host: "node0".into(),
            path: self.text("region"),
            size: Some(size),
            segment_size: None,
            format: true,
            force: false,
            shared: false,
        }
    }

    pub(crate) fn backend(&self, disk: &str) -> StartBackend {
        StartBackend {
            path: disk.to_owned(),
            cache_size: Some(16 * MIB),
            start_dev: true,
            export: Some(self.export()),
            ..StartBackend::default()
        }
    }

    pub(crate) fn export(&self) -> String {
        format!("nbd:unix:{}", self.text("nbd.sock"))
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&Listen::Unix(self.path("nbd.sock"))).unwrap()
    }
}

/// A daemon that ends with its test.
pub(crate) struct Running {
    pub(crate) manager: Arc<Manager>,
    pub(crate) summary: String,
}

impl std::ops::Deref for Running {
    type Target = Manager;

    fn deref(&self) -> &Manager {
        &self.manager
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.manager.stop();
    }
}

pub(crate) fn stop(daemon: &Manager, request: StopBackend) -> Result<Done> {
    daemon.stop_backend(0, 0, &request, &mut |_| Flow::Continue)
}

pub(crate) fn dirty(daemon: &Manager) -> u64 {
    let status = daemon.status().unwrap();
    status.transports[0].backends[0].cache.as_ref().unwrap().dirty_bytes
}

/// The status of the first cache.
pub(crate) fn cache_of(daemon: &Manager) -> CacheInfo {
    daemon.status().unwrap().transports[0].backends[0].cache.clone().unwrap()
}

/// Waits until the first backend is served, at most ten seconds.
pub(crate) fn wait_until_served(daemon: &Manager) {
    let end = Instant::now() + Duration::from_secs(10);
    while !daemon.backends(0, false).unwrap()[0].alive {
        assert!(Instant::now() < end, "{:?}", daemon.backends(0, false));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[track_caller]
pub(crate) fn refused<T>(result: Result<T>, kind: ErrorKind, part: &str) -> Error {
    let error = result.err().expect("it was not refused");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.line().contains(part), "{error}");
    error
}
