//! Everything that can block without end: reading a disk, a region on any file system, a command to the ublk driver.
//!
//! A child process (`cbdctrl doctor-look`) looks at one object after the other and prints one line of JSON for each. If
//! a line takes too long, the parent leaves that child behind and starts another one for the rest.
//!
//! Invariants: the parent never waits longer than [`LIMIT`] for an object and [`LIMIT_ALL`] for all; nothing is opened for
//! writing but the file of a region, through which nothing is stored. The parent has no thread in the kernel of which it
//! could not end: a process is not gone before all of its threads are.

use super::signature::{self, Signature};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::fs::FileType;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Timeout of one object.
pub const LIMIT: Duration = Duration::from_secs(2);
/// Timeout of all objects of one kind.
const LIMIT_ALL: Duration = Duration::from_secs(8);
/// Most bytes of a line of the child.
const LINE_MAX: u64 = 64 << 10;

/// What a look has shown.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Look<T> {
    /// This.
    Seen(T),
    /// Nothing: this user may not.
    NotPermitted,
    /// Nothing, for this reason.
    Failed(String),
    /// Nothing: it did not answer in time.
    Silent,
    /// It was not tried: others took too long.
    NotTried,
}

/// What would show what this user may not see: root, unless it is root already, whom a container or a security module
/// refuses. `command` is the one for root.
pub fn for_root(command: &str) -> String {
    permission(cbd_daemon::system::is_root(), command)
}

fn permission(is_root: bool, command: &str) -> String {
    if is_root {
        "the system refuses root, too: outside of the container, or without the security module, that keeps it from doing so".to_owned()
    } else {
        format!("sudo {command}")
    }
}

/// A disk.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Disk {
    /// What is on it.
    pub signatures: Vec<Signature>,
    /// The identity that the daemon would store, as text; absent if it cannot be had.
    pub identity: Option<String>,
    /// Whether nothing in that identity but the port distinguishes the disk from another one.
    pub is_weak: bool,
}

/// A region.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Region {
    /// `dax-file`, `devdax`, `file` or `tmpfs`.
    pub kind: String,
    /// `power-fail` or `process-crash`.
    pub durability: String,
    /// The type of its file system.
    pub file_system: String,
    /// Why it is no better.
    pub warnings: Vec<String>,
}

/// The kinds of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Kind {
    /// Block devices.
    Disks,
    /// Regions.
    Regions,
    /// The driver of ublk; the path is not used.
    Ublk,
}

/// Looks at `paths`; one result for each.
pub fn look<T: DeserializeOwned>(kind: Kind, paths: &[PathBuf]) -> Vec<Look<T>> {
    let end = Instant::now() + LIMIT_ALL;
    let mut looks = Vec::with_capacity(paths.len());
    while looks.len() < paths.len() {
        if Instant::now() >= end {
            looks.push(Look::NotTried);
            continue;
        }
        match Looker::start(kind, &paths[looks.len()..]) {
            Ok(looker) => looker.collect(paths.len(), end, &mut looks),
            Err(error) => {
                looks.push(Look::Failed(format!("no process could be started to look at it: {error}")))
            }
        }
    }
    looks
}

/// A child that looks.
struct Looker {
    child: Child,
    lines: Receiver<String>,
}

impl Looker {
    fn start(kind: Kind, paths: &[PathBuf]) -> std::io::Result<Self> {
        let kind =
            clap::ValueEnum::to_possible_value(&kind).map_or_else(String::new, |it| it.get_name().to_owned());
        let mut command = Command::new("/proc/self/exe");
        command.args(["doctor-look", &kind, "--"]).args(paths);
        // Not the output of this program: who reads that would wait for a child that hangs.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let output = child.stdout.take();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let Some(output) = output else { return };
            for line in limited_lines(output) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// Adds looks until there are `count`, or the child hangs or ends; always at least one.
    fn collect<T: DeserializeOwned>(mut self, count: usize, end: Instant, looks: &mut Vec<Look<T>>) {
        let before = looks.len();
        while looks.len() < count {
            let limit = LIMIT.min(end.saturating_duration_since(Instant::now()));
            match self.lines.recv_timeout(limit) {
                Ok(line) => looks.push(
                    serde_json::from_str(&line).unwrap_or_else(|error| Look::Failed(error.to_string())),
                ),
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    looks.push(Look::Silent);
                    // If the kernel does not let it end, it ends when the kernel does.
                    let _ = self.child.kill();
                    return;
                }
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    if looks.len() == before {
                        looks.push(Look::Failed("the process that looked at it ended".to_owned()));
                    }
                    break;
                }
            }
        }
        // It has closed its output, or is about to.
        let _ = self.child.wait();
    }
}

fn limited_lines(output: ChildStdout) -> impl Iterator<Item = String> {
    let mut output = BufReader::new(output);
    std::iter::from_fn(move || {
        let mut line = Vec::new();
        let read = output.by_ref().take(LINE_MAX).read_until(b'\n', &mut line).ok()?;
        (read > 0).then(|| String::from_utf8_lossy(&line).into_owned())
    })
}

/// The child.
pub fn run_child(kind: Kind, paths: &[OsString]) -> ExitCode {
    for path in paths {
        let line = match kind {
            Kind::Disks => serde_json::to_string(&of_result(disk(path))),
            Kind::Regions => serde_json::to_string(&of_result(region(path))),
            Kind::Ublk => serde_json::to_string(&ublk()),
        };
        let Ok(line) = line else { return ExitCode::FAILURE };
        if writeln!(std::io::stdout(), "{line}").is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Whether the driver of ublk can serve devices of CBD.
fn ublk() -> Look<()> {
    match cbd_ublk::probe() {
        Ok(()) => Look::Seen(()),
        Err(why) => Look::Failed(why),
    }
}

fn of_result<T>(result: cbd_types::Result<T>) -> Look<T> {
    match result {
        Ok(seen) => Look::Seen(seen),
        Err(error) if error.kind() == cbd_types::ErrorKind::Permission => Look::NotPermitted,
        Err(error) => Look::Failed(error.line().replace('\n', " ")),
    }
}

fn disk(path: &OsStr) -> cbd_types::Result<Disk> {
    let path = Path::new(path);
    let failed = |error: std::io::Error| {
        let kind = match error.kind() {
            std::io::ErrorKind::PermissionDenied => cbd_types::ErrorKind::Permission,
            _ => cbd_types::ErrorKind::System,
        };
        cbd_types::Error::new(kind, format!("{} cannot be read", path.display())).caused_by(error)
    };
    let opened = cbd_sys::files::open_if(path, 0, FileType::is_block_device).map_err(failed)?;
    let Some((file, _)) = opened else {
        let text = format!("{} is no block device", path.display());
        return Err(cbd_types::Error::new(cbd_types::ErrorKind::InvalidArgument, text));
    };
    let mut first = vec![0; signature::LENGTH];
    let mut length = 0;
    while length < first.len() {
        match file.read_at(&mut first[length..], length as u64).map_err(failed)? {
            0 => break,
            read => length += read,
        }
    }
    let identity = cbd_backing::identity_of(path).ok();
    Ok(Disk {
        signatures: signature::recognise(&first[..length]),
        is_weak: identity.as_ref().is_some_and(cbd_backing::Identity::is_weak),
        identity: identity.map(|identity| identity.to_token()),
    })
}

fn region(path: &OsStr) -> cbd_types::Result<Region> {
    let promise = cbd_pmem::promise(Path::new(path))?;
    Ok(Region {
        kind: promise.kind.name().to_owned(),
        durability: promise.durability.name().to_owned(),
        file_system: promise.file_system,
        warnings: promise.warnings,
    })
}

#[cfg(test)]
mod tests {
    use super::permission;

    #[test]
    fn root_is_not_told_to_become_root() {
        assert_eq!(permission(false, "cbdctrl doctor"), "sudo cbdctrl doctor");
        assert!(!permission(true, "cbdctrl doctor").contains("sudo"));
    }
}
