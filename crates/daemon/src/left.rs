//! The ublk device or FUSE session that a predecessor left of a block device, while no process serves it.
//!
//! Invariants: an examination changes nothing, and does not wait for a process that does not serve. All devices together are
//! removed only while no daemon uses the folders.

use crate::exports::ExportContext;
use crate::handover::PreservedSessions;
use crate::paths::Paths;
use crate::socket::Lock;
use crate::state::StateDir;
use cbd_fuse::Session;
use cbd_types::Result;
use cbd_ublk::{LeftBehind, Tag};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Removes all devices that a daemon with these folders left, so that requests of their users fail instead of waiting for
/// the next daemon: for a machine that stops. Returns the names of the removed devices.
///
/// # Errors
/// [`cbd_types::ErrorKind::Busy`] if a daemon uses the state folder after `timeout`; otherwise when the system does not
/// report the devices.
pub fn remove_all(paths: &Paths, timeout: Duration) -> Result<Vec<String>> {
    if !paths.state_dir.join("daemon-id").exists() {
        return Ok(Vec::new());
    }
    let state = StateDir::open(&paths.state_dir)?;
    let what = format!("the state folder {}", paths.state_dir.display());
    // No daemon can start and take a device over meanwhile.
    let _lock = Lock::take(&paths.state_dir.join("lock"), &what, timeout)?;
    let mut removed = Vec::new();
    if Path::new("/dev/ublk-control").exists() {
        removed = cbd_ublk::sweep(state.daemon_id(|| 0)?, &[], &paths.run_dir.join("ublk"))?;
    }
    cbd_fuse::abort_connections(&paths.run_dir)?;
    let swept = cbd_fuse::sweep(&paths.run_dir, &paths.dev_dir, &[])?;
    removed.extend(swept.loops.iter().map(|path| path.display().to_string()));
    Ok(removed)
}

/// How to find the device that a predecessor left of one block device.
#[derive(Clone, Debug)]
pub struct LeftDevice {
    /// The tag of its ublk device.
    pub tag: Tag,
    /// The preserved sessions of FUSE devices.
    pub preserved: Arc<PreservedSessions>,
    /// The identity of the device in the store.
    pub identity: Vec<u8>,
}

impl LeftDevice {
    /// The user of the device, as a sentence; none while it is not in use.
    ///
    /// # Errors
    /// When the system does not report the users, or the session cannot be read.
    pub fn user(&self) -> Result<Option<String>> {
        if let Some(left) = LeftBehind::find(self.tag) {
            return left.user();
        }
        self.preserved.session(&self.identity)?.map_or(Ok(None), |session| session.user())
    }

    /// Removes the device: requests of its users fail.
    ///
    /// # Errors
    /// When the kernel does not remove it.
    pub fn remove(&self) -> Result<()> {
        self.preserved.end(&self.identity);
        LeftBehind::find(self.tag).map_or(Ok(()), LeftBehind::remove)
    }
}

/// The device that a predecessor left of a block device whose region is not up: only its name is known.
#[derive(Debug)]
pub struct LeftDeviceByName {
    ublk: Option<LeftBehind>,
    fuse: Option<(String, Session)>,
    preserved: Arc<PreservedSessions>,
}

impl LeftDeviceByName {
    /// The device named `name` that a predecessor left; none if there is none.
    #[must_use]
    pub fn find(context: &ExportContext, name: &str) -> Option<Self> {
        let ublk = LeftBehind::named(context.daemon_id, &context.ublk_dir(), &context.dev_dir.join(name));
        let fuse = context.preserved.named(name);
        let is_left = ublk.is_some() || fuse.is_some();
        is_left.then(|| Self { ublk, fuse, preserved: Arc::clone(&context.preserved) })
    }

    /// The user of the device, as a sentence; none while it is not in use.
    ///
    /// # Errors
    /// When the system does not report the users.
    pub fn user(&self) -> Result<Option<String>> {
        match (&self.ublk, &self.fuse) {
            (Some(left), _) => left.user(),
            (None, Some((_, session))) => session.user(),
            (None, None) => Ok(None),
        }
    }

    /// Removes the device: requests of its users fail.
    ///
    /// # Errors
    /// When the kernel does not remove it.
    pub fn remove(self) -> Result<()> {
        if let Some((name, session)) = self.fuse {
            // Its descriptors would keep the connection open.
            drop(session);
            self.preserved.end_entry(&name);
        }
        self.ublk.map_or(Ok(()), LeftBehind::remove)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::PathChoices;
    use cbd_types::ErrorKind;

    #[test]
    fn nothing_is_removed_while_a_daemon_uses_the_folders() {
        let folder = tempfile::tempdir().expect("a folder");
        let within = |name: &str| Some(folder.path().join(name));
        let paths = Paths::choose(PathChoices {
            state_dir: within("state"),
            run_dir: within("run"),
            dev_dir: within("dev"),
            ..PathChoices::default()
        });
        assert_eq!(remove_all(&paths, Duration::ZERO).expect("no daemon was ever there"), [""; 0]);
        assert!(!paths.state_dir.exists());
        let state = StateDir::open(&paths.state_dir).expect("it is made");
        state.daemon_id(|| 7).expect("it is written");
        let lock = Lock::take(&paths.state_dir.join("lock"), "it", Duration::ZERO).expect("free");
        let error = remove_all(&paths, Duration::ZERO).expect_err("the lock is held");
        assert_eq!(error.kind(), ErrorKind::Busy);
        drop(lock);
    }
}
