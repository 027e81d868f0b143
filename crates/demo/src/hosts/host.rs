//! One host: its daemon, and its block device on the backend that the hosts share.
//!
//! Invariants: the daemon listens at the same sockets after each restart, so clients connect again at the same path.
//!
//! Elsewhere: the process and its files (`servers`), what the requests do (`cbd-daemon`).

use super::{SEEN_TIMEOUT, until, untrue};
use crate::interrupt;
use crate::output::Bar;
use crate::servers::{Daemon, Started};
use crate::target::{ExportKind, Target};
use cbd_daemon::api::{
    BackendInfo, BlkdevInfo, Done, EventLine, HostInfo, MoveBackend, Progress, StartBlkdev, StopBlkdev,
};
use cbd_types::{ErrorKind, Result};
use std::ops::ControlFlow;
use std::path::Path;

/// One host.
#[derive(Debug)]
pub struct Host {
    name: &'static str,
    daemon: Daemon,
}

/// A move that the former host of a backend has reported.
#[derive(Clone, Debug)]
pub struct Moved {
    /// The host that has the backend now.
    pub to: String,
    /// For how long requests of its clients waited, in milliseconds.
    pub pause_ms: u64,
}

impl Host {
    /// Starts a daemon with its files in `folder`.
    ///
    /// # Errors
    /// When it does not start, with the end of its log.
    pub fn start(name: &'static str, folder: &Path, throttle: &str) -> Result<Self> {
        Ok(Self { name, daemon: Daemon::start(folder, throttle, ExportKind::Nbd)? })
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Its block device, for clients.
    pub fn target(&self) -> Target {
        Target::Nbd(self.daemon.nbd_socket())
    }

    /// Creates a region that several hosts share, and registers it.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn create_region(&self, region: &Path, bytes: u64) -> Result<()> {
        self.daemon.register_as(self.name, region, Some(bytes), true)
    }

    /// Registers a region that another host has created.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn join_region(&self, region: &Path) -> Result<()> {
        self.daemon.register_as(self.name, region, None, true)
    }

    /// Starts a backend without a cache, with a block device.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn start_uncached(&self, disk: &Path) -> Result<Started> {
        self.daemon.start_backend(disk, None)
    }

    /// Removes a backend without a cache.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn stop_uncached(&self, started: &Started) -> Result<()> {
        self.daemon.stop_backend(started.backend, |_| {}).map(drop)
    }

    /// Starts a backend with a cache and without a block device; returns its number.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn start_backend(&self, disk: &Path, cache: u64) -> Result<u32> {
        Ok(self.daemon.add_backend(disk, Some(cache), None)?.backend_id)
    }

    /// Starts a block device on `backend`, of this host or of another one.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn start_blkdev(&self, backend: u32) -> Result<()> {
        let request = StartBlkdev {
            backend,
            export: Some(ExportKind::Nbd.option(&self.daemon.nbd_socket())),
            shared: true,
            ..StartBlkdev::default()
        };
        self.daemon.client().post::<_, BlkdevInfo>("/v1/transports/0/blkdevs", &request)?;
        self.until_served()
    }

    /// Removes its block device.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn stop_blkdev(&self) -> Result<()> {
        for blkdev in self.blkdevs()? {
            let path = format!("/v1/transports/0/blkdevs/{}/stop", blkdev.blkdev_id);
            self.daemon.client().post::<_, serde_json::Value>(&path, &StopBlkdev { force: false })?;
        }
        Ok(())
    }

    fn blkdevs(&self) -> Result<Vec<BlkdevInfo>> {
        self.daemon.client().get("/v1/transports/0/blkdevs")
    }

    /// Waits until its block device is served.
    ///
    /// # Errors
    /// When it is not served in time.
    pub fn until_served(&self) -> Result<()> {
        until(&format!("that the block device of host {} is served", self.name), || {
            Ok(matches!(&*self.blkdevs()?, [blkdev] if blkdev.alive))
        })
    }

    /// Whether it has the backend, and serves it.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn has_backend(&self, backend: u32) -> Result<bool> {
        let list: Vec<BackendInfo> = self.daemon.client().get("/v1/transports/0/backends")?;
        Ok(list.iter().any(|it| it.backend_id == backend && it.alive))
    }

    /// The hosts of the region, once this one sees that all of `names` are alive, and no other one.
    ///
    /// # Errors
    /// When it does not see that in time.
    pub fn see_all(&self, names: &[&str]) -> Result<Vec<HostInfo>> {
        let mut seen = Vec::new();
        until(&format!("that host {} sees that hosts {} are alive", self.name, names.join(", ")), || {
            seen = self.daemon.client().get::<Vec<HostInfo>>("/v1/transports/0/hosts")?;
            let alive = seen.iter().filter(|host| host.alive).map(|host| host.hostname.as_str());
            Ok(alive.eq(names.iter().copied()))
        })?;
        Ok(seen)
    }

    /// Dirty bytes of a backend that it has.
    ///
    /// # Errors
    /// The object that is not served, and why.
    pub fn dirty_bytes(&self, backend: u32) -> Result<u64> {
        self.daemon.dirty_bytes(backend)
    }

    /// Bytes that were read through a backend that it has and were not in its cache.
    ///
    /// # Errors
    /// The object that is not served, and why.
    pub fn read_missed_bytes(&self, backend: u32) -> Result<u64> {
        self.daemon.read_missed_bytes(backend)
    }

    /// Moves a backend to the host `to`; this host has it, or gets it.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn move_backend(&self, backend: u32, to: &str, bar: &Bar) -> Result<Done> {
        let request = MoveBackend { to: to.to_owned(), timeout_s: Some(20) };
        let path = format!("/v1/transports/0/backends/{backend}/move");
        self.daemon.client().post_long(&path, &request, |progress| show(bar, progress))
    }

    /// The moves of backends away from it since its daemon was started.
    ///
    /// # Errors
    /// The daemon's error, or an event without its fields.
    pub fn moves(&self) -> Result<Vec<Moved>> {
        let mut moves = Vec::new();
        self.daemon.client().lines("/v1/events?severity=info", |line: EventLine| {
            match line {
                EventLine::Event(event) if event.name == "backend.moved" => {
                    let to = event.fields.get("host").and_then(serde_json::Value::as_str);
                    let pause_ms = event.fields.get("pause_ms").and_then(serde_json::Value::as_u64);
                    let (Some(to), Some(pause_ms)) = (to, pause_ms) else {
                        return Err(untrue("the event backend.moved lacks its host or its pause"));
                    };
                    moves.push(Moved { to: to.to_owned(), pause_ms });
                }
                EventLine::End(_) => return Ok(ControlFlow::Break(())),
                _ => {}
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(moves)
    }

    /// Drains a backend and removes it, as soon as this host has noticed that no other one has a block device on it.
    ///
    /// # Errors
    /// The daemon's last error.
    pub fn stop_backend(&self, backend: u32, bar: &Bar) -> Result<Done> {
        let mut result = Ok(Done::default());
        interrupt::poll_until(SEEN_TIMEOUT, || {
            result = self.daemon.stop_backend(backend, |progress| show(bar, progress));
            result.is_ok()
                || result.as_ref().is_err_and(|error| error.kind() != ErrorKind::Busy)
                || interrupt::requested()
        });
        result
    }

    /// Kills its daemon with SIGKILL.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn kill(&mut self) -> Result<()> {
        self.daemon.kill()
    }

    /// Starts its daemon again, and waits until its block device is served.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart(&mut self) -> Result<()> {
        self.daemon.restart()?;
        self.until_served()
    }

    /// Ends its daemon with SIGTERM.
    ///
    /// # Errors
    /// When it does not end properly.
    pub fn stop(self) -> Result<()> {
        self.daemon.stop()
    }
}

fn show(bar: &Bar, progress: &Progress) {
    let all = progress.dirty_bytes_at_start.max(1);
    bar.set(1.0 - progress.dirty_bytes as f64 / all as f64);
}
