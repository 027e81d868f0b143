//! Detects changes of a backing file while it is in use.
//!
//! Invariants: a watch does not keep the device locked; after the backing device was closed it reports nothing. A check
//! queries the file system, which may hang, so it needs a thread of its own.

use crate::job::Target;
use cbd_holder::Change;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

/// Checks the file of a backing device, or the files beneath it.
#[derive(Clone, Debug)]
pub struct Watch {
    target: Weak<Target>,
    path: PathBuf,
}

impl Watch {
    pub(crate) fn new(target: &Arc<Target>) -> Self {
        Self { target: Arc::downgrade(target), path: target.path.clone() }
    }

    /// The path that the backing device was opened by.
    #[must_use]
    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// The change of the file since it was opened. May block on its file system.
    #[must_use]
    pub fn check(&self) -> Option<Change> {
        self.target.upgrade()?.change()
    }
}
