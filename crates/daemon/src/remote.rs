//! Permissions to serve block devices at network addresses that other machines can reach.
//!
//! Invariants: the permission belongs to this machine, not to the region: it is in the state folder, and only a command
//! with `--allow-remote` adds one. It names the transport, the backend and the address, and ends with the block device.
//! What cannot be read allows nothing.
//!
//! A state folder of a version without this file has no permissions: then the transports that it lists are *inherited*.
//! The addresses that the region of an inherited transport names when it is opened for the first time were served
//! before the upgrade, so they are recorded as allowed.

use crate::state::{StateDir, read_own, replace};
use cbd_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A block device at an address that other machines can reach.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RemoteExport {
    /// UUID of the transport.
    pub transport: String,
    /// UUID of the backend.
    pub backend: String,
    /// The export with its address, as the row of the block device has it.
    pub export: String,
}

#[derive(Clone, Default, Debug, Serialize, Deserialize)]
struct Document {
    version: u32,
    allowed: Vec<RemoteExport>,
    /// UUIDs of the transports whose addresses are taken over when they are opened for the first time.
    inherited: Vec<String>,
}

/// The permissions of one daemon.
#[derive(Debug)]
pub struct RemotePermissions {
    file: PathBuf,
    document: Mutex<Document>,
    /// Why the file could not be read or written; none once it was replaced.
    warning: Mutex<Option<String>>,
}

impl RemotePermissions {
    /// Reads the permissions; there are none if they cannot be read, and [`warning`](Self::warning) says so.
    #[must_use]
    pub fn open(state: &StateDir) -> Self {
        let file = state.path().join("remote-exports.json");
        let empty = Document { version: 1, ..Document::default() };
        let (document, warning) = match read_own(&file) {
            Ok(text) => parse(&text).map_or_else(
                |reason| (empty.clone(), Some(unreadable(&file, &reason))),
                |document| (document, None),
            ),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let transports = state.transports().unwrap_or_default();
                let inherited = transports.into_iter().map(|entry| entry.uuid).collect();
                let document = Document { inherited, ..empty };
                let warning = write(&file, &document).err().map(|error| error.line());
                (document, warning)
            }
            Err(error) => (empty, Some(unreadable(&file, &error.to_string()))),
        };
        Self { file, document: Mutex::new(document), warning: Mutex::new(warning) }
    }

    /// A warning if the file could not be read or written and was not replaced since.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        self.warning.lock().clone()
    }

    /// Whether a command on this machine has allowed the export.
    #[must_use]
    pub fn is_allowed(&self, export: &RemoteExport) -> bool {
        self.document.lock().allowed.contains(export)
    }

    /// Allows the export; the permission is durable when this returns.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when it cannot be written; it is not allowed then.
    pub fn allow(&self, export: RemoteExport) -> Result<()> {
        self.change(|document| {
            if !document.allowed.contains(&export) {
                document.allowed.push(export);
            }
        })
    }

    /// Ends the permissions of a backend, but those of these exports.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the file cannot be written.
    pub fn revoke(&self, transport: &str, backend: &str, kept: &[String]) -> Result<()> {
        self.keep(|allowed| {
            allowed.transport != transport || allowed.backend != backend || kept.contains(&allowed.export)
        })
    }

    /// Ends all permissions of a transport.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the file cannot be written.
    pub fn revoke_transport(&self, transport: &str) -> Result<()> {
        if self.document.lock().inherited.iter().any(|uuid| uuid == transport) {
            self.change(|document| document.inherited.retain(|uuid| uuid != transport))?;
        }
        self.keep(|allowed| allowed.transport != transport)
    }

    /// Allows the exports that the region of an inherited transport names, and returns them. Does nothing for other
    /// transports.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the file cannot be written; nothing is allowed then.
    pub fn inherit(&self, transport: &str, exports: Vec<RemoteExport>) -> Result<Vec<RemoteExport>> {
        if !self.document.lock().inherited.iter().any(|uuid| uuid == transport) {
            return Ok(Vec::new());
        }
        self.change(|document| {
            document.inherited.retain(|uuid| uuid != transport);
            document.allowed.extend(exports.iter().cloned());
        })?;
        Ok(exports)
    }

    /// Ends the permissions for which `is_kept` is false; without one, the file is not written.
    fn keep(&self, is_kept: impl Fn(&RemoteExport) -> bool) -> Result<()> {
        if self.document.lock().allowed.iter().all(&is_kept) {
            return Ok(());
        }
        self.change(|document| document.allowed.retain(is_kept))
    }

    fn change(&self, change: impl FnOnce(&mut Document)) -> Result<()> {
        let mut document = self.document.lock();
        let mut changed = document.clone();
        change(&mut changed);
        write(&self.file, &changed)?;
        *document = changed;
        *self.warning.lock() = None;
        Ok(())
    }
}

fn parse(text: &str) -> std::result::Result<Document, String> {
    let document: Document = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if document.version == 1 {
        Ok(document)
    } else {
        Err(format!("it is of version {}, this program knows 1", document.version))
    }
}

fn write(file: &Path, document: &Document) -> Result<()> {
    let cannot = |error: &dyn std::fmt::Display| {
        Error::new(
            ErrorKind::System,
            format!(
                "{} cannot be written ({error}); it records which network addresses other machines may reach",
                file.display()
            ),
        )
    };
    let text = serde_json::to_string_pretty(document).map_err(|error| cannot(&error))?;
    replace(file, text.as_bytes()).map_err(|error| cannot(&error))
}

fn unreadable(file: &Path, reason: &str) -> String {
    format!(
        "{} cannot be used ({reason}): no block device is served at an address that other machines can reach before dev-start \
         --allow-remote allows it again, which replaces the file",
        file.display()
    )
}
