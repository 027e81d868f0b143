//! The daemon: it maps regions, runs caches, serves block devices, and executes commands from a unix socket.
//!
//! Invariants: the data path (export threads, one background worker per cache) never waits for the control plane and
//! never takes the manager's lock; no action of the control plane loses acknowledged data. A start restores the
//! transports, backends and block devices of the previous daemon; `status` shows those that cannot be restored, with
//! the reasons.
//!
//! Elsewhere: requests of block devices (`cbd-device`, `cbd-engine`), export protocols (`cbd-nbd`, `cbd-fuse`), the
//! command line (`cbdctrl`).

pub mod api;
pub mod client;
pub mod config;
pub mod connections;
pub mod control;
pub mod events;
pub mod exports;
pub mod front_ends;
pub mod guard;
pub mod handover;
#[cfg(feature = "page")]
pub mod history;
pub mod left;
pub mod logging;
pub mod manager;
pub mod metrics;
pub mod notify;
pub mod paths;
pub mod remote;
pub mod run;
pub mod scrub;
pub mod seal;
pub mod server;
pub mod settings;
pub mod socket;
pub mod state;
pub mod system;
pub mod web;

pub use cbd_runtime::size;
