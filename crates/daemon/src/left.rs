//! The ublk device or FUSE session that a predecessor left of a block device, while no process serves it.
//!
//! Invariant: an examination changes nothing, and does not wait for a process that does not serve.

use crate::exports::ExportContext;
use crate::handover::PreservedSessions;
use cbd_fuse::Session;
use cbd_types::Result;
use cbd_ublk::{LeftBehind, Tag};
use std::sync::Arc;

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
