//! Events: what happened in the daemon, each with a stable name, for `cbdctrl events`, the journal, metrics and a
//! command.
//!
//! Invariants: an event is a line of the log with the field `event` ([`EventLayer`]); nothing else makes one. The
//! number of kept events and their bytes are bounded: the oldest make way, and are counted. Recording an event never
//! waits for a follower or a command.
//!
//! Elsewhere: the journal ([`crate::logging`]), the wire protocol ([`crate::api::Event`], [`crate::server`]).

pub mod command;
mod layer;
mod names;
mod record;

pub(crate) use layer::EVENT;
pub use layer::EventLayer;
pub use names::EventName;
pub use record::{Batch, Events, Follower, KEPT_BYTES_MAX, NewEvent};
