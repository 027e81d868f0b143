//! The engine in a process: what it needs from the outside, the thread that keeps a cache, and queues that a thread can sleep
//! on. The daemon, the library, the tools and the benchmarks all run the engine with this.
//!
//! Always true here: a thread waits for events, never for time to pass; ending what runs leaves what is dirty in the region.
//!
//! Left to others: what a request does (`cbd-device`, `cbd-engine`), what there is to run and who asked for it (`cbd-daemon`,
//! `libcbd`).
#![forbid(unsafe_code)]

pub mod environment;
pub mod queue;
pub mod worker;

pub use environment::{ProcessEnvironment, wall_ms};
pub use queue::{ServedDevice, TaskWaker};
pub use worker::Worker;
