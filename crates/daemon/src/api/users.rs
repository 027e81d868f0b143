//! The users of block devices, and what the end of the daemon means for them.

use serde::{Deserialize, Serialize};

/// A block device that is in use.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BlkdevUser {
    /// Number of its transport.
    pub transport_id: u32,
    /// Its number.
    pub blkdev_id: u32,
    /// How clients reach it: a path or an NBD URI; of one of another host its number and that host.
    pub dev_name: String,
    /// Its user, as a sentence.
    pub user: String,
    /// Whether its users wait while no daemon runs; otherwise they see errors.
    pub outlives_daemon: bool,
}
