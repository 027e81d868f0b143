//! The engine in a process: what it needs from the outside, regions and backing devices by path, the thread that keeps a cache,
//! and queues that a thread can sleep on. The daemon, the library, the tools and the benchmarks all run the engine with this.
//!
//! Always true here: a region that the one has made can be opened by the other, since one code makes and opens it; ending what
//! runs leaves what is dirty in the region.
//!
//! Left to others: what a request does (`cbd-device`, `cbd-engine`), what there is to run and who asked for it (`cbd-daemon`,
//! `libcbd`).
#![forbid(unsafe_code)]

pub mod backend;
pub mod disk;
pub mod drain;
pub mod environment;
pub mod moved;
pub mod queue;
pub mod region;
pub mod size;
pub mod worker;

pub use backend::{Manner, RunningBackend};
pub use disk::{Asked, Disk, NewBackend};
pub use drain::{DrainProgress, NotDrained, lacking, until_drained};
pub use environment::{ProcessEnvironment, wall_ms};
pub use queue::{DeviceQueue, ServedDevice, TaskWaker};
pub use worker::Worker;
