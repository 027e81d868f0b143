//! The processes that serve devices: a real daemon, and one that serves plain memory through the same export.
//!
//! Invariants: both run this program, as children that end with this process; their output goes to a file, whose end is
//! part of the error when they fail.

use crate::Arguments;
use crate::interrupt::{self, Guarded};
use crate::system as calls;
use crate::target::{ExportKind, system};
use cbd_daemon::api::{
    BackendStarted, BackendStatus, Consistency, Done, Progress, RegisterTransport, Settings, SettingsChange,
    StartBackend, StopBackend, TransportRegistered,
};
use cbd_daemon::client::Client;
use cbd_daemon::config::DaemonConfig;
use cbd_daemon::exports::{DeviceToExport, Export, ExportChoice, ExportContext};
use cbd_daemon::front_ends::FrontEnds;
use cbd_daemon::handover::PreservedSessions;
use cbd_export::{BlockDevice, MemoryDevice};
use cbd_pmem::Mapping;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout of a server's start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of its end after a request to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);
/// Threads that serve a device: the default of a daemon.
const QUEUES: usize = 2;

fn own_program(export: ExportKind) -> Command {
    // By its path if the path still leads to a file, so that lists of processes show its name.
    let path = std::env::current_exe().ok().filter(|path| path.is_file());
    let mut command = Command::new(path.unwrap_or_else(|| PathBuf::from("/proc/self/exe")));
    command.arg0("cbdctrl").stdin(Stdio::null()).stdout(Stdio::null());
    command.env_remove("NOTIFY_SOCKET").env_remove("CBD_SOCKET");
    if export == ExportKind::FuseLoop {
        calls::unshare_mounts(&mut command);
    }
    command
}

fn log_file(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .map_err(|error| system(path.display().to_string(), &error))
}

fn with_log(text: String, log: &Path) -> Error {
    let said = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = said.lines().rev().take(5).collect();
    let last = lines.into_iter().rev().collect::<Vec<_>>().join(" | ");
    Error::new(ErrorKind::System, format!("{text}; it said: {last}"))
}

/// A running daemon whose files all belong to the demonstration.
#[derive(Debug)]
pub struct Daemon {
    guarded: Guarded,
    client: Client,
    folder: PathBuf,
    throttle: String,
    export: ExportKind,
}

impl Daemon {
    /// Starts a daemon with its files in `folder` and with throttled backing devices, and waits until it has
    /// restored its backends.
    ///
    /// # Errors
    /// When it ends or is not ready in time, with the end of its log.
    pub fn start(folder: &Path, throttle: &str, export: ExportKind) -> Result<Self> {
        let run = folder.join("run");
        fs::create_dir_all(folder.join("dev"))
            .map_err(|error| system(folder.display().to_string(), &error))?;
        let socket = run.join("control.sock");
        let mut command = own_program(export);
        command.arg("daemon");
        // No configuration of the machine. FUSE devices end with the daemon, so that with every export the clients of a
        // killed daemon see errors.
        let config = folder.join("cbd.toml");
        fs::write(&config, "[daemon]\nkeep_fuse = false\n")
            .map_err(|error| system(config.display().to_string(), &error))?;
        command.arg("--config").arg(config);
        command.arg("--state-dir").arg(folder.join("state")).arg("--run-dir").arg(run);
        command.arg("--dev-dir").arg(folder.join("dev")).arg("--socket").arg(&socket);
        command.arg("--throttle").arg(throttle);
        command.stderr(log_file(&folder.join("daemon.log"))?);
        let guarded =
            Guarded::start(&mut command).map_err(|error| system("the daemon cannot be started", &error))?;
        let client = Client::new(&socket);
        let mut daemon =
            Self { guarded, client, folder: folder.to_owned(), throttle: throttle.to_owned(), export };
        daemon.wait_until_ready()?;
        Ok(daemon)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let end = Instant::now() + START_TIMEOUT;
        loop {
            interrupt::check()?;
            match self.client.status() {
                Ok(_) => return Ok(()),
                Err(error) => {
                    if let Some(status) = self.guarded.ended() {
                        return Err(self.failed(format!("the daemon ended ({status})")));
                    }
                    if Instant::now() > end {
                        return Err(self.failed(format!("the daemon is not ready: {error}")));
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    fn failed(&self, text: String) -> Error {
        with_log(text, &self.folder.join("daemon.log"))
    }

    /// Creates the region.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn register(&self, region: &Path, size: u64) -> Result<()> {
        self.register_as("demo", region, Some(size), false)
    }

    /// Registers the region as `host`; with a size it is created. With `shared` other hosts can register, too.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn register_as(&self, host: &str, region: &Path, size: Option<u64>, shared: bool) -> Result<()> {
        let request = RegisterTransport {
            host: host.to_owned(),
            path: text(region)?,
            size,
            segment_size: None,
            format: size.is_some(),
            force: false,
            shared: shared && size.is_some(),
        };
        self.client.post::<_, TransportRegistered>("/v1/transports", &request).map(drop)
    }

    /// Starts a backend on `disk` with a device, and returns their number and path.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn start_backend(&self, disk: &Path, cache: Option<u64>) -> Result<Started> {
        let socket = self.nbd_socket();
        let started = self.add_backend(disk, cache, Some(self.export.option(&socket)))?;
        let blkdev = started.blkdev.ok_or_else(|| self.failed("the daemon created no device".to_owned()))?;
        if let Some(error) = blkdev.error {
            return Err(self.failed(format!("the device is not served: {error}")));
        }
        let device = if self.export == ExportKind::Nbd { socket } else { PathBuf::from(blkdev.dev_name) };
        Ok(Started { backend: started.backend_id, device })
    }

    /// Starts a backend on `disk`, with a device if there is an export for it.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn add_backend(
        &self,
        disk: &Path,
        cache: Option<u64>,
        export: Option<String>,
    ) -> Result<BackendStarted> {
        let request = StartBackend {
            path: text(disk)?,
            cache_size: cache,
            start_dev: export.is_some(),
            export,
            // Writeback merges epochs, so the slow disk catches up soon, however many flushes there were.
            consistency: Some(Consistency::Checkpoint),
            ..StartBackend::default()
        };
        let started: BackendStarted = self.client.post("/v1/transports/0/backends", &request)?;
        if cache.is_some() {
            // A full cache does not record sequential reads, and the measurement reads everything in order to have it cached.
            let change = SettingsChange { sequential_read_cutoff: Some(0), ..SettingsChange::default() };
            let settings = format!("/v1/transports/0/backends/{}/settings", started.backend_id);
            self.client.patch::<_, Settings>(&settings, &change)?;
        }
        Ok(started)
    }

    /// The socket of its NBD export.
    pub fn nbd_socket(&self) -> PathBuf {
        self.folder.join("nbd.sock")
    }

    /// A client of its control socket.
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// The status of a backend; after a restart, an error unless the backend and its device are served.
    ///
    /// # Errors
    /// The object that is not served, and why.
    pub fn backend(&self, backend: u32) -> Result<BackendStatus> {
        let status = self.client.status()?;
        let found = status
            .transports
            .into_iter()
            .flat_map(|transport| transport.backends)
            .find(|found| found.info.backend_id == backend)
            .ok_or_else(|| self.failed("the daemon has lost the backend".to_owned()))?;
        let down = found.info.blkdevs.iter().find(|blkdev| !blkdev.alive);
        let reason = found.info.error.as_ref().or_else(|| down.and_then(|blkdev| blkdev.error.as_ref()));
        match (reason, down) {
            (Some(reason), _) => Err(self.failed(format!("not served: {reason}"))),
            (None, Some(_)) => Err(self.failed("the device is not served".to_owned())),
            (None, None) => Ok(found),
        }
    }

    /// Dirty bytes of a backend.
    ///
    /// # Errors
    /// As [`backend`](Self::backend).
    pub fn dirty_bytes(&self, backend: u32) -> Result<u64> {
        Ok(self.backend(backend)?.cache.map_or(0, |cache| cache.dirty_bytes))
    }

    /// Bytes that were read through a backend and were not in its cache.
    ///
    /// # Errors
    /// As [`backend`](Self::backend).
    pub fn read_missed_bytes(&self, backend: u32) -> Result<u64> {
        Ok(self.backend(backend)?.cache.map_or(0, |cache| cache.read_miss_bytes))
    }

    /// Drains a backend and removes it.
    ///
    /// # Errors
    /// The daemon's error.
    pub fn stop_backend(&self, backend: u32, progress: impl FnMut(&Progress)) -> Result<Done> {
        let path = format!("/v1/transports/0/backends/{backend}/stop");
        let request = StopBackend { timeout_s: Some(30), ..StopBackend::default() };
        self.client.post_long(&path, &request, progress)
    }

    /// Sends SIGKILL, and returns when the process has ended.
    ///
    /// # Errors
    /// When it has not ended within the timeout.
    pub fn kill(&mut self) -> Result<()> {
        if self.guarded.kill(STOP_TIMEOUT) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::TimedOut, "the daemon does not end after SIGKILL"))
    }

    /// Starts the daemon again with the same arguments.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn restart(&mut self) -> Result<()> {
        *self = Self::start(&self.folder, &self.throttle, self.export)?;
        Ok(())
    }

    /// Ends the daemon with SIGTERM.
    ///
    /// # Errors
    /// When it does not end, or ends with an error.
    pub fn stop(mut self) -> Result<()> {
        self.guarded.signal(libc::SIGTERM);
        match self.guarded.wait(STOP_TIMEOUT) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.failed(format!("the daemon ended with {status}"))),
            None => Err(self.failed("the daemon does not end".to_owned())),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After SIGTERM the daemon removes its mount and its loop device; a kill follows.
        self.guarded.signal(libc::SIGTERM);
        self.guarded.wait(Duration::from_secs(4));
    }
}

/// A backend with its device.
#[derive(Clone, Debug)]
pub struct Started {
    /// Number of the backend.
    pub backend: u32,
    /// Path of the block device or socket.
    pub device: PathBuf,
}

fn text(path: &Path) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Error::new(ErrorKind::InvalidArgument, format!("the path {} is not UTF-8", path.display()))
    })
}

/// A process that serves plain memory.
#[derive(Debug)]
pub struct MemoryServer {
    guarded: Guarded,
    folder: PathBuf,
    export: ExportKind,
}

impl MemoryServer {
    /// Starts the server, with its files in `folder`.
    ///
    /// # Errors
    /// When it cannot serve, with the end of its log.
    pub fn start(folder: &Path, size: u64, export: ExportKind) -> Result<Self> {
        let log = folder.join("memory.log");
        let mut command = own_program(export);
        command.arg("demo").arg("--serve-memory").arg(folder).arg("--serve-bytes").arg(size.to_string());
        command.arg("--path").arg(match export {
            ExportKind::FuseLoop => "fuse-loop",
            ExportKind::Nbd => "nbd",
        });
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log_file(&log)?);
        let mut guarded =
            Guarded::start(&mut command).map_err(|error| system("no server for memory", &error))?;
        let mut line = String::new();
        if let Some(pipe) = guarded.child_mut().stdout.take() {
            let _watchdog = interrupt::Watchdog::new(START_TIMEOUT);
            let _ = BufReader::new(pipe).read_line(&mut line);
        }
        interrupt::check()?;
        if line.trim() != READY {
            guarded.kill(STOP_TIMEOUT);
            return Err(with_log("the server for memory did not start".to_owned(), &log));
        }
        Ok(Self { guarded, folder: folder.to_owned(), export })
    }

    /// Path of the block device or socket.
    pub fn device(&self) -> PathBuf {
        match self.export {
            ExportKind::FuseLoop => self.folder.join("dev").join(MEMORY),
            ExportKind::Nbd => self.folder.join(SOCKET),
        }
    }

    /// Ends the server.
    ///
    /// # Errors
    /// When its export did not end properly.
    pub fn stop(mut self) -> Result<()> {
        // The server ends when its standard input ends.
        drop(self.guarded.child_mut().stdin.take());
        match self.guarded.wait(STOP_TIMEOUT) {
            Some(status) if status.success() => Ok(()),
            _ => Err(with_log(
                "the server for memory did not end properly".to_owned(),
                &self.folder.join("memory.log"),
            )),
        }
    }
}

impl Drop for MemoryServer {
    fn drop(&mut self) {
        drop(self.guarded.child_mut().stdin.take());
        self.guarded.wait(Duration::from_secs(4));
    }
}

const READY: &str = "ready";
const MEMORY: &str = "cbd0";
const SOCKET: &str = "memory.sock";

/// The process behind [`MemoryServer`]: serves until its standard input ends.
///
/// # Errors
/// The error of the export.
pub fn serve_memory(folder: &Path, arguments: &Arguments) -> Result<()> {
    let export = arguments.path.unwrap_or(ExportKind::Nbd);
    let memory = Mapping::anonymous(arguments.serve_bytes)?;
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(Arc::new(memory), 512)?);
    let places = ExportContext {
        run_dir: folder.join("run"),
        dev_dir: folder.join("dev"),
        daemon_id: 0,
        preserved: Arc::new(PreservedSessions::closed("it ends with the demonstration")),
        front_ends: Arc::new(FrontEnds::new(&DaemonConfig::default())),
        vhost_spin: None,
    };
    fs::create_dir_all(&places.dev_dir).map_err(|error| system(folder.display().to_string(), &error))?;
    let choice: ExportChoice = export.option(&folder.join(SOCKET)).parse()?;
    let place = DeviceToExport { name: MEMORY, identity: MEMORY.as_bytes(), queues: QUEUES };
    let export = Export::start(&choice, place, &device, &places)?;
    println!("{READY}");
    let _ = std::io::stdout().flush();
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    export.stop(true).map_err(|(_, error)| error)
}
