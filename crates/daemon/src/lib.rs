//! The daemon: it maps regions, runs caches, serves block devices, and is told what to do over a unix socket.
//!
//! Invariants: the data path (export threads, one background worker for each cache) never waits for the control plane and
//! never takes the manager's lock; whatever the control plane does, what was acknowledged stays in the region. On start
//! everything that was there before comes back, as far as it can; what cannot is shown with its reason.
//!
//! Elsewhere: what a request does (`cbd-device`, `cbd-engine`), the wires (`cbd-nbd`, `cbd-fuse`), the commands that people
//! type (`cbdctrl`).

pub mod api;
pub mod client;
pub mod config;
pub mod connections;
pub mod control;
pub mod exports;
pub mod front_ends;
pub mod guard;
pub mod handover;
pub mod left;
pub mod logging;
pub mod manager;
pub mod metrics;
pub mod notify;
pub mod paths;
pub mod run;
pub mod server;
pub mod settings;
pub mod socket;
pub mod state;
pub mod system;

pub use cbd_runtime::size;
