//! Shared by the end-to-end tests: folders with a daemon of their own, and timeouts.
//!
//! Invariants: a test leaves no process, no file and no mount, whether it passes, panics or takes too long.
//! The daemon dies with the thread that started it; its files are in folders that are removed with [`Fixture`].
#![allow(dead_code, missing_docs)]

pub mod child;
pub mod manager;
pub mod pattern;
pub mod prometheus;
pub mod region;
pub mod sandbox;

use cbd_nbd::Listen;
use cbd_testkit::{Client, ClientOptions};
use serde_json::Value;
use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// Timeout for a daemon to be ready, or for a command to end.
const TIMEOUT: Duration = Duration::from_secs(40);

/// The output of a command.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Folders for a daemon, its region and its disks, and the daemon.
#[derive(Debug)]
pub struct Fixture {
    folder: tempfile::TempDir,
    memory: tempfile::TempDir,
    daemon: Option<Child>,
    preserves: bool,
    /// The service manager that starts the daemon, if not the test itself.
    pub manager: Option<manager::Manager>,
    /// The decorator of backing devices from the next start on.
    pub decorate: Option<String>,
    /// The user of the daemon, if not that of the test.
    pub user: Option<u32>,
    /// The umask of the daemon, if not that of the test.
    pub umask: Option<u32>,
}

impl Fixture {
    pub fn new() -> Self {
        Self::under(&std::env::temp_dir())
    }

    pub fn under(folder: &Path) -> Self {
        let made = tempfile::Builder::new().prefix("cbd-").tempdir_in(folder).expect("a folder");
        std::fs::create_dir(made.path().join("dev")).expect("a folder");
        // Most tests expect devices to end with the daemon; those of preserved devices set the option.
        std::fs::write(made.path().join("cbd.toml"), "[daemon]\npreserve_fuse = false\n").expect("a file");
        let places = [folder.join(sandbox::MEMORY), PathBuf::from("/dev/shm"), folder.to_owned()];
        let shared = places.into_iter().find(|fixture| fixture.is_dir()).expect("the folder is there");
        let memory = tempfile::Builder::new().prefix("cbd-test-").tempdir_in(shared).expect("a folder");
        let (manager, decorate, user, umask) = (None, None, None, None);
        Self { folder: made, memory, daemon: None, preserves: false, manager, decorate, user, umask }
    }

    /// A fixture whose FUSE devices outlive the daemon, as by default. They end with the fixture.
    pub fn preserving(folder: &Path) -> Self {
        let mut fixture = Self::under(folder);
        std::fs::write(fixture.path("cbd.toml"), "").expect("a file");
        fixture.preserves = true;
        fixture
    }

    /// A daemon with a region of 64 MiB.
    pub fn with_region() -> Self {
        let mut fixture = Self::new();
        fixture.start();
        fixture.register("64M");
        fixture
    }

    /// The folders of the fixture.
    pub fn folders(&self) -> [PathBuf; 2] {
        [self.folder.path().to_owned(), self.memory.path().to_owned()]
    }

    pub fn register(&self, size: &str) {
        let region = self.region();
        self.ok(&["tp-reg", "--path", &region, "--size", size, "--host", "node0", "--format"]);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        text_of(&self.path(name))
    }

    pub fn region(&self) -> String {
        self.in_memory("region")
    }

    pub fn in_memory(&self, name: &str) -> String {
        text_of(&self.memory.path().join(name))
    }

    pub fn disk(&self, name: &str, size: u64) -> String {
        File::create(self.path(name)).and_then(|file| file.set_len(size)).expect("a disk");
        self.text(name)
    }

    pub fn socket(&self) -> String {
        self.text("run/control.sock")
    }

    pub fn nbd(&self) -> String {
        format!("nbd:unix:{}", self.text("nbd.sock"))
    }

    /// The address for NBD clients of other projects.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///cbd0?socket={}", self.text("nbd.sock"))
    }

    pub fn client(&self) -> Client {
        self.client_of("nbd.sock")
    }

    pub fn client_of(&self, socket: &str) -> Client {
        let options = ClientOptions { timeout: TIMEOUT, ..ClientOptions::default() };
        let end = Instant::now() + TIMEOUT;
        loop {
            match Client::connect_with(&Listen::Unix(self.path(socket)), &options) {
                Ok(client) => return client,
                // A killed daemon that is not gone yet may hold the lock of the disk: its successor serves it when it has it.
                Err(error) if Instant::now() > end => panic!("the device does not answer: {error}"),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    pub fn link(&self, number: u32) -> PathBuf {
        self.path("dev").join(format!("cbd{number}"))
    }

    pub fn daemon_command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        command.arg("daemon").env("CBD_SOCKET", self.socket()).stdin(Stdio::null());
        command.args(["--config", &self.text("cbd.toml"), "--state-dir", &self.text("state")]);
        command.args(["--run-dir", &self.text("run"), "--dev-dir", &self.text("dev")]);
        command.args(["--rules-dir", &self.text("rules.d")]);
        if let Some(decorate) = &self.decorate {
            command.args(["--decorate", decorate]);
        }
        command
    }

    /// Starts the daemon and waits until it responds, and until a killed daemon that is not gone yet has released the disks: the new
    /// one serves them when it has their locks.
    pub fn start(&mut self) {
        self.start_without_waiting();
        let end = Instant::now() + TIMEOUT;
        loop {
            let ran = self.run(&["status"]);
            if ran.code == 0 && !ran.stdout.contains("holds a lock on it") {
                return;
            }
            if let Some(status) = self.daemon.as_mut().and_then(|daemon| daemon.try_wait().ok().flatten()) {
                panic!("the daemon ended: {status}\n{}", self.log());
            }
            assert!(Instant::now() < end, "the daemon does not answer:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts the daemon.
    pub fn start_without_waiting(&mut self) {
        assert!(self.daemon.is_none(), "there is a daemon already");
        let log = File::options().create(true).append(true).open(self.path("log")).expect("a log");
        let mut command = self.daemon_command();
        if let Some(manager) = &self.manager {
            command = manager.launch(&command);
        }
        command.stderr(log.try_clone().expect("a log")).stdout(log);
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        if let Some(umask) = self.umask {
            child::has_umask(&mut command, umask);
        }
        child::dies_with_the_test(&mut command);
        self.daemon = Some(command.spawn().expect("the daemon"));
    }

    pub fn is_running(&self) -> bool {
        self.daemon.is_some()
    }

    pub fn pid(&self) -> u32 {
        self.daemon.as_ref().expect("a daemon").id()
    }

    /// Stops the daemon by SIGSTOP.
    pub fn pause(&self) {
        child::stop(self.daemon.as_ref().expect("a daemon"));
    }

    /// Continues a paused daemon.
    pub fn resume(&self) {
        child::resume(self.daemon.as_ref().expect("a daemon"));
    }

    /// Kills the daemon by SIGKILL.
    pub fn kill(&mut self) {
        let mut daemon = self.daemon.take().expect("a daemon");
        daemon.kill().expect("it can be killed");
        let status = daemon.wait().expect("it is ours");
        assert_eq!(status.signal(), Some(9), "it ended before it was killed: {status}\n{}", self.log());
    }

    /// Ends the daemon by SIGTERM; returns the time that it took.
    pub fn terminate(&mut self) -> Duration {
        let began = Instant::now();
        child::terminate(self.daemon.as_ref().expect("a daemon"));
        let status = self.ended(TIMEOUT);
        assert!(status.success(), "it ended with an error after SIGTERM: {status}\n{}", self.log());
        began.elapsed()
    }

    /// As [`terminate`](Self::terminate), for a daemon that may end with an error because a disk hangs.
    pub fn terminate_with_a_disk_that_hangs(&mut self) -> Duration {
        let began = Instant::now();
        child::terminate(self.daemon.as_ref().expect("a daemon"));
        self.ended(TIMEOUT);
        began.elapsed()
    }

    fn ended(&mut self, timeout: Duration) -> ExitStatus {
        let mut daemon = self.daemon.take().expect("a daemon");
        wait(&mut daemon, timeout).unwrap_or_else(|| {
            let _ = daemon.kill();
            panic!("the daemon does not end:\n{}", self.log());
        })
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Runs `cbdctrl` with these arguments.
    pub fn run(&self, arguments: &[&str]) -> Ran {
        self.run_at(&self.socket(), arguments)
    }

    pub fn run_at(&self, socket: &str, arguments: &[&str]) -> Ran {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
        command.args(arguments).env("CBD_SOCKET", socket);
        run_for(command, TIMEOUT + Duration::from_secs(50))
    }

    /// Runs `cbdctrl`, which must succeed; returns its output.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let ran = self.run(arguments);
        assert_eq!(ran.code, 0, "cbdctrl {arguments:?}: {}\n{}", ran.stderr, self.log());
        ran.stdout
    }

    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(arguments)).expect("JSON")
    }

    /// The cache of backend 0 of transport 0, as the status shows it.
    #[track_caller]
    pub fn cache(&self) -> Value {
        self.json(&["status", "--json"])["transports"][0]["backends"][0]["cache"].clone()
    }

    /// Starts backend 0 with a cache of 16 MiB and an NBD server.
    #[track_caller]
    pub fn start_backend(&self, disk: &str) -> String {
        self.ok(&[
            "backend-start",
            "--path",
            disk,
            "--cache-size",
            "16M",
            "--start-dev",
            "--export",
            &self.nbd(),
        ])
    }

    /// Starts backend 0 with a kernel block device; returns the path of the device.
    #[track_caller]
    pub fn start_block_device(&self, disk: &str, cache: &str) -> String {
        let printed =
            self.ok(&["backend-start", "-p", disk, "-c", cache, "--start-dev", "--export", "fuse-loop"]);
        assert_eq!(printed, format!("{}\n", self.link(0).display()), "the path, and only that");
        printed.trim().to_owned()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        if self.preserves {
            // A store process ends with its connections; the loop devices remain until they are removed here.
            let _ = cbd_fuse::abort_connections(&self.path("run"));
            let _ = cbd_fuse::sweep(&self.path("run"), &self.path("dev"), &[]);
        }
        if std::thread::panicking() {
            eprintln!("the daemon's log ended with:\n{}", tail(&self.log(), 30));
        }
    }
}

/// The last lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

pub fn text_of(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// Waits until the process ends; `None` at the timeout.
pub fn wait(process: &mut Child, timeout: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + timeout;
    loop {
        match process.try_wait().expect("it is ours") {
            Some(status) => return Some(status),
            None if Instant::now() > end => return None,
            None => std::thread::sleep(Duration::from_millis(3)),
        }
    }
}

/// Runs a command to its end, with a timeout.
#[track_caller]
pub fn run_for(mut command: Command, timeout: Duration) -> Ran {
    child::dies_with_the_test(&mut command);
    let (mut out, mut err) = (tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("a file"));
    command.stdin(Stdio::null());
    command.stdout(out.try_clone().expect("a file")).stderr(err.try_clone().expect("a file"));
    let name = format!("{command:?}");
    let mut process = command.spawn().unwrap_or_else(|error| panic!("{name}: {error}"));
    let status = wait(&mut process, timeout);
    if status.is_none() {
        let _ = process.kill();
        let _ = process.wait();
    }
    let (stdout, stderr) = (content_of(&mut out), content_of(&mut err));
    let Some(status) = status else {
        panic!("{name} took more than {timeout:?}\n{stdout}\n{stderr}");
    };
    Ran { code: status.code().unwrap_or(-1), stdout, stderr }
}

fn content_of(file: &mut File) -> String {
    use std::io::{Read, Seek};
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).expect("what was written");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs a tool of the system, which must succeed; returns its output.
#[track_caller]
pub fn tool(name: &str, arguments: &[&str]) -> String {
    let ran = try_tool(name, arguments);
    assert_eq!(ran.code, 0, "{name} {arguments:?}:\n{}\n{}", ran.stdout, ran.stderr);
    ran.stdout + &ran.stderr
}

/// Runs a tool of the system; returns its result.
#[track_caller]
pub fn try_tool(name: &str, arguments: &[&str]) -> Ran {
    let mut command = Command::new(name);
    command.args(arguments).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    run_for(command, Duration::from_secs(90))
}

/// Whether tests that need root and foreign tools are enabled; prints a line if not.
pub fn system_tests(test: &str) -> bool {
    let wanted = std::env::var_os("CBD_SYSTEM_TESTS").is_some_and(|value| value == "1");
    if !wanted {
        println!("not run: {test} needs root and foreign tools; CBD_SYSTEM_TESTS=1 runs it");
    }
    wanted
}

/// The process whose standard input is the socket that listens at this path: a store process.
pub fn store_process_at(socket: &Path) -> Option<String> {
    /// The fields of a listening socket in /proc/net/unix.
    const LISTENS: &str = "00010000";
    let table = std::fs::read_to_string("/proc/net/unix").expect("the sockets");
    let inode = table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let found = fields.get(3) == Some(&LISTENS) && fields.get(7) == Some(&text_of(socket).as_str());
        found.then(|| fields[6].to_owned())
    })?;
    let name = PathBuf::from(format!("socket:[{inode}]"));
    let has_it = |process: &std::fs::DirEntry| {
        std::fs::read_link(process.path().join("fd/0")).is_ok_and(|file| file == name)
    };
    let process = std::fs::read_dir("/proc").expect("processes").flatten().find(has_it)?;
    process.file_name().into_string().ok()
}

/// Waits until `reached`, or panics with `what` at the timeout.
#[track_caller]
pub fn until(what: &str, reached: impl FnMut() -> bool) {
    until_within(TIMEOUT, what, reached);
}

/// As [`until`], with another timeout.
#[track_caller]
pub fn until_within(timeout: Duration, what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + timeout;
    while !reached() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}
