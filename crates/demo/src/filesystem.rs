//! The ext4 file system: its tools, its mounts, and a trial whether this machine permits them.
//!
//! Invariants: mounts are in a mount namespace and in folders of this process, so they end with it; loop devices
//! that `mount` creates release their file when they are unmounted.

use crate::interrupt::{self, Guarded};
use crate::target::system;
use crate::{folders, system as calls};
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Timeout of a tool; on the slow disk a file system is created in seconds.
const TOOL_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for udev, which probes new block devices, to close one.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of the file system that the trial creates.
const TRIAL_SIZE: u64 = 8 << 20;

/// The tools of the file system.
#[derive(Clone, Debug)]
pub struct Tools {
    mkfs: PathBuf,
    mount: PathBuf,
    /// Used if it is installed.
    fsck: Option<PathBuf>,
}

impl Tools {
    /// Searches the tools.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] with the missing tool.
    pub fn find() -> Result<Self> {
        let need = |name: &str| {
            program(name).ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no {name}")))
        };
        Ok(Self { mkfs: need("mkfs.ext4")?, mount: need("mount")?, fsck: program("e2fsck") })
    }

    /// Creates a file system on a device or in a file.
    ///
    /// # Errors
    /// The output of the tool.
    pub fn make_file_system(&self, device: &Path) -> Result<()> {
        let mut command = Command::new(&self.mkfs);
        command.args(["-q", "-F", "-b", "4096", "-m", "0"]);
        command.args(["-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"]).arg(device);
        run(command, "mkfs.ext4")
    }

    /// Checks a file system without changing it; false if no tool for it is installed.
    ///
    /// # Errors
    /// The output of the tool.
    pub fn check_file_system(&self, device: &Path) -> Result<bool> {
        let Some(fsck) = &self.fsck else { return Ok(false) };
        let mut command = Command::new(fsck);
        command.arg("-fn").arg(device);
        run(command, "e2fsck -fn").map(|()| true)
    }
}

fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders =
        std::env::split_paths(&path).chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Runs a tool to its end; an error contains its output.
fn run(mut command: Command, name: &str) -> Result<()> {
    interrupt::check()?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).env("LC_ALL", "C");
    let mut guarded =
        Guarded::start(&mut command).map_err(|error| system(format!("{name} cannot be run"), &error))?;
    // The tools print a few lines at most, which fit a pipe.
    let status = guarded.wait(TOOL_TIMEOUT);
    interrupt::check()?;
    let Some(status) = status else {
        let text = format!("{name} took more than {} s", TOOL_TIMEOUT.as_secs());
        return Err(Error::new(ErrorKind::TimedOut, text));
    };
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    if let Some(mut pipe) = guarded.child_mut().stderr.take() {
        let _ = pipe.read_to_string(&mut said);
    }
    if let Some(mut pipe) = guarded.child_mut().stdout.take() {
        let _ = pipe.read_to_string(&mut said);
    }
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    Err(Error::new(ErrorKind::System, format!("{name} failed ({status}): {said}")))
}

/// A mounted file system; unmounted when this is dropped.
#[derive(Debug)]
pub struct Mounted {
    path: PathBuf,
    is_mounted: bool,
}

impl Mounted {
    /// Mounts `device`, or a file if `options` has `loop`, at `path`, which is created if it does not exist.
    ///
    /// # Errors
    /// The output of `mount`.
    pub fn mount(device: &Path, path: &Path, options: &str) -> Result<Self> {
        fs::create_dir_all(path).map_err(|error| system(path.display().to_string(), &error))?;
        // The table of mounts would have the link to the device otherwise.
        let device =
            fs::canonicalize(device).map_err(|error| system(device.display().to_string(), &error))?;
        let mut command = Command::new(Tools::find()?.mount);
        command.args(["-t", "ext4", "-o", options]).arg(&device).arg(path);
        // Created before the mount: if `mount` is interrupted after it has mounted, the drop unmounts.
        let mut mounted = Self { path: path.to_owned(), is_mounted: true };
        if let Err(error) = run(command, "mount") {
            mounted.detach();
            return Err(error);
        }
        Ok(mounted)
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts the file system, even if the server of its device has ended.
    ///
    /// # Errors
    /// When a process uses it beyond the timeout.
    pub fn unmount(mut self) -> Result<()> {
        let end = Instant::now() + UNMOUNT_TIMEOUT;
        loop {
            match calls::unmount(&self.path, false) {
                Ok(()) => break,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => {
                    return Err(system(format!("{} cannot be unmounted", self.path.display()), &error));
                }
            }
        }
        self.is_mounted = false;
        Ok(())
    }

    fn detach(&mut self) {
        if self.is_mounted {
            let _ = calls::unmount(&self.path, true);
            self.is_mounted = false;
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.is_mounted {
            return;
        }
        // A clean unmount if it succeeds immediately, else a lazy one.
        let _watchdog = interrupt::Watchdog::new(UNMOUNT_TIMEOUT);
        if calls::unmount(&self.path, false).is_ok() {
            self.is_mounted = false;
        }
        self.detach();
    }
}

/// Tries all operations that a file system on a block device of CBD needs. This process has a mount namespace of its
/// own afterwards.
///
/// # Errors
/// The missing requirement, in one sentence.
pub fn try_file_system() -> std::result::Result<(), String> {
    let trial = || -> Result<()> {
        calls::unshare_own_mounts().map_err(|error| system("no mount namespace", &error))?;
        cbd_fuse::probe().map_err(|reason| Error::new(ErrorKind::Unsupported, reason))?;
        let tools = Tools::find()?;
        let folder = folders::Folder::create(&folders::temporary())?;
        let image = folder.path().join("trial");
        File::create(&image)
            .and_then(|file| file.set_len(TRIAL_SIZE))
            .map_err(|error| system(image.display().to_string(), &error))?;
        tools.make_file_system(&image)?;
        Mounted::mount(&image, &folder.path().join("mnt"), "loop,nosuid,nodev")?.unmount()
    };
    trial().map_err(|error| error.line())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_tool_is_in_the_error() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo it is broken >&2; exit 3"]);
        let error = run(command, "sh").unwrap_err().line();
        assert!(error.contains("it is broken") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_program_that_is_not_installed_is_an_error() {
        assert!(program("sh").is_some());
        assert!(program("no-such-program-anywhere").is_none());
    }
}
