//! Tools for offline recovery: the content of a region, its damage, the repairable part of the damage, and writing
//! dirty data to the backing device on a machine without a daemon and its configuration.
//!
//! Invariants:
//! - the engine's own recovery, over a private copy of the region ([`PrivateMemory`]), determines the result of
//!   recovery; the decoders of `cbd-format` determine the meaning of a structure. No tool has a second implementation
//!   of either;
//! - [`check`](check::check) and [`dump`] change nothing, not even in the region's memory: it is mapped read-only;
//! - the tools refuse a region that a daemon serves. Tools that store also refuse a region whose file is the backing
//!   file of a loop device;
//! - the tools accept any bytes, in time that is bounded by the region's size.
//!
//! Elsewhere: printing (`cbdctrl`).
#![forbid(unsafe_code)]

pub mod check;
pub mod dump;
pub mod finding;
pub mod names;
pub mod open;
pub mod pcache;
mod pins;
pub mod repair;
pub mod report;
pub mod rescue;

pub use cbd_runtime::{Bytes, PrivateMemory};
pub use finding::{Finding, Location, Repair, Severity, SlotKind, Structure};
pub use report::{BackendSummary, Outcome, Report};

/// The progress of a long operation.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The operation.
    pub doing: &'static str,
    /// The completed part, in the unit of `of`.
    pub done: u64,
    /// The total.
    pub of: u64,
}
