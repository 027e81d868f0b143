//! Where descriptors outlive the daemon: what is put here under a name is there for the next daemon, however this one ends.
//!
//! Always true here: a store answers within seconds or is given up, and nothing on the data path asks it for anything; what is taken out is
//! only a copy, so a daemon that dies while it takes something over loses nothing.
//!
//! Left to others: what is put into it, and whether what comes out is to be believed ([`shelf`]).

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

/// Holds descriptors beyond the life of this process.
pub trait DescriptorStore: Send + Sync + std::fmt::Debug {
    /// Holds these under a name, in the place of what was there. The name is of printable ASCII, without blanks and colons.
    ///
    /// # Errors
    /// When nobody holds them.
    fn put(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<()>;

    /// Holds nothing under the name any more.
    fn remove(&self, name: &str);

    /// Puts right what has gone wrong by itself; to be called every now and then.
    fn tend(&self) {}

    /// Who holds them, in a word or two.
    fn store_name(&self) -> &'static str;
}

/// Whether a name can be put into every store.
fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}
