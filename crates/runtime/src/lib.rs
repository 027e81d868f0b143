//! The engine in a process: its environment, regions and backing devices by path, the background worker of a cache, and
//! queues that a thread can wait on. The daemon, the library, the tools and the benchmarks all run the engine through this
//! crate.
//!
//! Invariants: a region that one of these programs created can be opened by the others, since the same code creates and opens
//! it; the end of a run leaves dirty data in the region.
//!
//! Elsewhere: the execution of requests (`cbd-device`, `cbd-engine`), the choice of the backends to run (`cbd-daemon`,
//! `libcbd`).
#![forbid(unsafe_code)]

pub mod attach;
pub mod backend;
pub mod bytes;
pub mod count;
pub mod disk;
pub mod drain;
pub mod environment;
pub mod grow;
pub mod hosts;
pub mod moved;
pub mod presence;
pub mod private;
pub mod queue;
pub mod region;
pub mod resize;
pub mod sampled;
pub mod share;
pub mod size;
pub mod verify;
pub mod worker;

pub use attach::NotDetached;
pub use backend::{RunOptions, RunningBackend};
pub use bytes::Bytes;
pub use count::{Count, Counted};
pub use disk::{Disk, NewBackend, RequestedSettings};
pub use drain::{
    DrainProgress, DrainRequest, NotDrained, WRITEBACK_RATE_MIN, check_writeback_rate, lacking, until_drained,
};
pub use environment::{ProcessEnvironment, wall_ms};
pub use grow::Grown;
pub use private::PrivateMemory;
pub use queue::{DeviceQueue, ServedDevice, TaskWaker};
pub use resize::{Resized, ShrinkProgress};
pub use verify::{Sweep, Verifier};
pub use worker::{Rounds, RoundsWatch, Worker};
