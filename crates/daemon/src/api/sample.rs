//! The sample of the requests of a backend: what `cbdctrl advise` foretells other sizes of the cache by.
//!
//! Elsewhere: the sample (`cbd-device`), what is made of it (`cbd-advise`).

use serde::{Deserialize, Serialize};

/// The last requests of the sample, oldest first. One block of each group of neighbouring blocks of the device is in the sample.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct RequestSample {
    /// The backend.
    pub backend_id: u32,
    /// Blocks of 4 KiB of a group; 0 while nothing is sampled.
    pub one_of: u64,
    /// The groups of requests before the others, oldest first: of older ones only the first of each group.
    pub earlier_groups: Vec<u64>,
    /// Whether each of them was a write.
    pub earlier_writes: Vec<bool>,
    /// Whether no group is missing there, and the cache held hardly anything before.
    pub earlier_is_all: bool,
    /// The time after which `times_ms` begin again at 0.
    pub period_ms: u32,
    /// When each request came, in milliseconds, modulo `period_ms`.
    pub times_ms: Vec<u32>,
    /// Whether each request was a write; otherwise it was a read.
    pub writes: Vec<bool>,
    /// The group of each request: its number is that of its first block, divided by `one_of`.
    pub groups: Vec<u64>,
    /// The number of the first request behind which `read_bytes` and `hit_bytes` were counted, from 0.
    pub counted_from: u64,
    /// Bytes that clients have read since then, in the sample or not.
    pub read_bytes: u64,
    /// Bytes of these that the cache had.
    pub hit_bytes: u64,
    /// The mean bytes of all requests that read or write.
    pub request_bytes: u64,
}
