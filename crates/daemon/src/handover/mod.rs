//! Descriptor stores: descriptors that are put into one under a name are there for the next daemon, however this one ends.
//!
//! Invariants: a store answers within seconds or counts as silent, and no thread of the data path waits for it. What is read from it is a
//! copy, so a daemon that dies while it takes a device over loses nothing.
//!
//! Elsewhere: what is put into it, and whether what comes out is valid ([`sessions`]).

pub mod passing;
mod process;
pub mod process_store;
pub mod sessions;
pub mod systemd_store;

pub use process::run as run_store_process;
pub use sessions::PreservedSessions;

use cbd_types::Result;
use std::os::fd::{BorrowedFd, OwnedFd};

/// The most descriptors under one name: what the kernel passes in one message.
pub const DESCRIPTORS_MAX: usize = 253;
/// The longest name.
pub const NAME_BYTES_MAX: usize = 128;

/// What was put under a name.
#[derive(Debug)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// Copies of the descriptors, in any order.
    pub descriptors: Vec<OwnedFd>,
}

/// Holds descriptors that outlive this process.
pub trait DescriptorStore: Send + Sync + std::fmt::Debug {
    /// Holds these under a name, and replaces what it held under that name. The name is of printable ASCII, without blanks and colons.
    ///
    /// # Errors
    /// When the store does not hold them.
    fn put(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<()>;

    /// Holds nothing under the name any more.
    fn remove(&self, name: &str);

    /// Repairs the store if it has failed; to be called regularly.
    fn tend(&self) {}

    /// The name of the store, for status and log.
    fn store_name(&self) -> &'static str;
}

/// Whether a name can be put into every store.
fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}
