//! What becomes of a backing file while it is in use.
//!
//! Always true here: a watch does not keep the hold; when the backing device is closed there is nothing to tell.
//!
//! Left to others: when to look, and on which thread: a look asks the file system, which may not answer.

use crate::job::Target;
use cbd_holder::Change;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

/// Looks at the file of a backing device, or at the files that it stands on.
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

    /// What has become of it since it was opened. May wait for its file system.
    #[must_use]
    pub fn look(&self) -> Option<Change> {
        self.target.upgrade()?.change()
    }
}
