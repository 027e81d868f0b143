//! Descriptor stores: they hold named descriptors for the next daemon, however this one ends.
//!
//! Invariants: a store responds within seconds or is regarded as unresponsive, and no thread of the data path waits for
//! it. A daemon reads duplicates of the descriptors, so one that dies while it takes a device over loses nothing.
//!
//! Elsewhere: the contents of entries and their validation ([`sessions`]).

mod process;
pub mod process_store;
pub mod sessions;
pub mod systemd_store;

pub use process::run as run_store_process;
pub use sessions::PreservedSessions;

use cbd_types::Result;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Most descriptors under one name: those of a message.
pub use cbd_sys::passing::DESCRIPTORS_MAX;
/// Most bytes of a name.
pub const NAME_BYTES_MAX: usize = 128;

/// The descriptors that were stored under one name.
#[derive(Debug)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// Copies of the descriptors, in any order.
    pub descriptors: Vec<OwnedFd>,
}

/// Holds descriptors that outlive this process.
pub trait DescriptorStore: Send + Sync + std::fmt::Debug {
    /// Stores the descriptors under a name and replaces earlier ones of that name. The name is printable ASCII without
    /// blanks and colons.
    ///
    /// # Errors
    /// When the store did not confirm them.
    fn put(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<()>;

    /// Removes the entry with this name.
    fn remove(&self, name: &str);

    /// Repairs the store if it has failed; to be called regularly.
    fn maintain(&self) {}

    /// The name of the store, for status and log.
    fn store_name(&self) -> &'static str;
}

/// Whether a name can be put into every store.
fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}
