//! A daemon on this machine, for guests whose disks it serves.
//!
//! Invariants: it has folders and a socket of its own, reads no configuration of this machine, and ends with its [`Daemon`].

use crate::guest::cbdctrl;
use crate::shell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Limit of a command, and of the time until a daemon answers.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A daemon on this machine, with files of its own.
pub struct Daemon {
    program: PathBuf,
    folder: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    /// In a folder that exists.
    pub fn new(folder: &Path) -> Result<Self, String> {
        let dev = folder.join("dev");
        std::fs::create_dir(&dev).map_err(|error| format!("cannot make {}: {error}", dev.display()))?;
        Ok(Self { program: cbdctrl()?, folder: folder.to_owned(), child: None })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(&self.folder).stdin(Stdio::null());
        command.env("CBD_SOCKET", self.folder.join("run/control.sock"));
        command
    }

    /// Starts it and waits until it answers.
    pub fn start(&mut self) -> Result<(), String> {
        let place = |name: &str| self.folder.join(name);
        let log = File::options().create(true).append(true).open(place("log"));
        let log = log.map_err(|error| format!("cannot open the daemon's log: {error}"))?;
        // An empty configuration, not that of this machine.
        std::fs::write(place("cbd.toml"), "")
            .map_err(|error| format!("cannot make a configuration: {error}"))?;
        let mut command = self.command();
        command.arg("daemon").arg("--config").arg(place("cbd.toml"));
        command.arg("--state-dir").arg(place("state"));
        command.arg("--run-dir").arg(place("run")).arg("--dev-dir").arg(place("dev"));
        command.stdout(Stdio::null()).stderr(log);
        let child = command.spawn().map_err(|error| format!("the daemon cannot be started: {error}"))?;
        self.child = Some(child);
        let end = Instant::now() + TIMEOUT;
        while self.control(&["tp-list"]).is_err() {
            if Instant::now() > end {
                return Err(format!("the daemon does not answer:\n{}", self.log()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) -> Result<(), String> {
        let Some(mut child) = self.child.take() else { return Err("no daemon runs".to_owned()) };
        child
            .kill()
            .and_then(|()| child.wait())
            .map_err(|error| format!("the daemon cannot be killed: {error}"))?;
        Ok(())
    }

    /// Executes a command.
    pub fn control(&self, arguments: &[&str]) -> Result<(), String> {
        let mut said = String::new();
        let end =
            shell::run(self.command().args(arguments), TIMEOUT, |_, line| said = format!("{said}{line}\n"));
        if end.is_success() {
            Ok(())
        } else {
            Err(format!("cbdctrl {}: {end}\n{said}{}", arguments.join(" "), self.log()))
        }
    }

    /// Its log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Whether a daemon was running does not matter here.
        let _ = self.kill();
    }
}
