//! What a predecessor left of a block device, by whichever way it was served, while nobody serves it.
//!
//! Always true here: looking changes nothing, and waits for nobody who does not serve.

use crate::keeping::Shelf;
use cbd_types::Result;
use cbd_ublk::{LeftBehind, Tag};
use std::sync::Arc;

/// By what the remains of one block device are found.
#[derive(Clone, Debug)]
pub struct Left {
    /// The mark of its ublk device.
    pub tag: Tag,
    /// Where those of its FUSE device are.
    pub shelf: Arc<Shelf>,
    /// By what it is known there.
    pub identity: Vec<u8>,
}

impl Left {
    /// By whom the device is used, as a sentence.
    ///
    /// # Errors
    /// When the system cannot be asked, or what is left cannot be read: then it is not known.
    pub fn user(&self) -> Result<Option<String>> {
        if let Some(left) = LeftBehind::find(self.tag) {
            return left.user();
        }
        self.shelf.remains(&self.identity)?.map_or(Ok(None), |remains| remains.user())
    }

    /// Takes it away: whoever uses it sees errors.
    ///
    /// # Errors
    /// When the kernel does not let it go.
    pub fn remove(&self) -> Result<()> {
        self.shelf.end(&self.identity);
        LeftBehind::find(self.tag).map_or(Ok(()), LeftBehind::remove)
    }
}
