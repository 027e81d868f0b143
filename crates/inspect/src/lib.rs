//! Tools for the day after: what a region holds, what is wrong with it, what of that can be put right, and how its dirty data
//! reaches the backing device on a machine without daemon and configuration.
//!
//! Always true here:
//! - what recovery would do is found out by the engine's own recovery, over a private copy of the region ([`PrivateMemory`]);
//!   what a structure says, by `cbd-format`'s decoders. No tool has an opinion of its own about either;
//! - [`check`](check::check) and [`dump`] change nothing, not even in the region's memory: it is mapped without the right to
//!   store;
//! - a region that a daemon serves is refused;
//! - any bytes give an answer, in time that is bounded by the region's size.
//!
//! Left to others: what is printed (`cbdctrl`).
#![forbid(unsafe_code)]

pub mod bytes;
pub mod check;
pub mod dump;
pub mod finding;
pub mod pcache;
pub mod private;
pub mod repair;
pub mod report;
pub mod rescue;

pub use bytes::Bytes;
pub use finding::{Finding, Mend, Place, Severity, SlotKind, Structure};
pub use private::PrivateMemory;
pub use report::{BackendSummary, Outcome, Report};

/// How far a tool is with what takes long.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// What it does.
    pub doing: &'static str,
    /// How much of it is done, in the unit of `of`.
    pub done: u64,
    /// How much there is to do.
    pub of: u64,
}
