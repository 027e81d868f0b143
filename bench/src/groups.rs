//! The groups of measurements.

mod cockpit;
mod engine;
mod export;
mod hosts;
mod live;
mod memory;
mod policy;
mod recovery;
pub mod restart;
mod tail;
mod verify;
mod writeback;

use crate::Figures;
use crate::options::Options;
use cbd_types::Result;

/// Figures that belong together.
pub struct Group {
    /// Its name.
    pub name: &'static str,
    /// A description of the measurement and its duration, for the help text, split into lines.
    pub what: &'static str,
    /// Runs the measurement.
    pub run: fn(&Options, &mut Figures) -> Result<()>,
}

/// All groups.
pub const GROUPS: [Group; 11] = [
    Group {
        name: "engine",
        what: "reads, writes, scaling, flushes in process, against a bare persistent copy (30 s)",
        run: engine::run,
    },
    Group {
        name: "export",
        what: "4 KiB writes through each export, against the export on bare memory; FUSE as root (30 s)",
        run: export::run,
    },
    Group {
        name: "policy",
        what: "hit ratio on seven kinds of trace, against LRU, ARC and S3-FIFO, and in 4 GiB against LRU; scans and readahead (4 min)",
        run: policy::run,
    },
    Group {
        name: "cockpit",
        what: "requests counted, against a queue that counts none; what advise foretells for other sizes, against such caches (4 min)",
        run: cockpit::run,
    },
    Group {
        name: "hosts",
        what: "4 KiB requests through a channel to a thread that serves them, against the cache itself and NBD; an idle one; writes on a shared region (90 s)",
        run: hosts::run,
    },
    Group {
        name: "live",
        what: "the longest request while a cache is attached, resized and detached; caches that share space (2 min)",
        run: live::run,
    },
    Group {
        name: "recovery",
        what: "records a second when a full cache of 4 GiB is opened (10 s)",
        run: recovery::run,
    },
    Group {
        name: "writeback",
        what: "drains of adjacent dirty blocks to models of disks, against the disk's own rate (30 s)",
        run: writeback::run,
    },
    Group {
        name: "verify",
        what: "verification of a cache against reading it, and of a device against its disk's sequential rate (20 s)",
        run: verify::run,
    },
    Group {
        name: "tail",
        what: "the slowest of 4 KiB writes while writeback and reclaim run, against the copy's slowest (20 s)",
        run: tail::run,
    },
    // The last group, because every allocation is counted from then on.
    Group {
        name: "memory",
        what: "the index of a full cache, and a daemon with two devices after mixed requests, as root (40 s)",
        run: memory::run,
    },
];
