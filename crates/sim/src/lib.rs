//! Simulated worlds for tests: memory that crashes at any store, disks that reorder and fail operations and lose
//! unflushed data, and oracles that decide which outcomes are legal.
//!
//! Invariants: seeds decide everything, so the seed of a failure repeats it; a simulated world is at least as
//! hostile as the contracts in `cbd-types` allow, and never more.
//!
//! Elsewhere: the engine under test (`cbd-engine`), and real memory and disks (`cbd-pmem`, `cbd-backing`).
#![deny(unsafe_code)]

pub mod actor;
pub mod baton;
pub mod campaign;
pub mod channels;
pub mod crash;
pub mod disk;
mod disk_queue;
pub mod environment;
pub mod explorer;
pub mod flips;
pub mod group;
pub mod hosts;
pub mod image;
pub mod memory;
pub mod moves;
pub mod oracle;
pub mod pattern;
pub mod process;
pub mod random;
pub mod reconnect;
pub mod sequences;
pub mod watchdog;
pub mod workload;
pub mod world;

pub use actor::act_as;
pub use crash::{CrashNow, until_crash};
pub use disk::{DiskCounters, DiskFaults, SimDisk};
pub use disk_queue::SimQueue;
pub use environment::SimEnvironment;
pub use image::DiskImage;
pub use memory::{CrashMemory, Keep, MemoryCounters, MemoryKind};
pub use oracle::{OpenChange, Oracle, Violation};
pub use pattern::Content;
pub use random::{Seeded, from_environment};
pub use watchdog::Watchdog;
pub use workload::{Mix, Wish};
pub use world::{Happened, World, WorldOptions};
