//! How large a cache should be: the hit ratio, the disk's reads and the dirty data of caches of several sizes, for the requests of a
//! trace.
//!
//! The engine itself serves the requests, over memory of the process and a disk that stores nothing, in the time of the trace. So its
//! admission, reclaim and writeback decide, and not a model of them. What does not fit in the memory for a size is simulated on a
//! sample of the blocks.
//!
//! Invariants: the same trace gives the same figures; memory is bounded whatever the trace and the sizes.
//!
//! Elsewhere: the command (`cbdctrl`), how far the figures are from those of real caches (`bench`).

mod advice;
mod ahead;
mod cache;
mod disk;
mod live;
mod memory;
mod sample;
pub mod simulated_time;
mod simulation;
mod size;
mod survey;
mod trace;

pub use advice::{knee, sentence, sizes_around, time_to_full_s};
pub use cache::SimulatedCache;
pub use cbd_runtime::sampled::earlier::EarlierRequest;
pub use disk::geometry;
pub use live::{Foretold, Seen, SeenRequest};
pub use sample::Sample;
pub use simulation::{BLOCKS_MAX, MEMORY_MAX, Options, Outcome, Simulation};
pub use size::CacheForm;
pub use survey::Survey;
pub use trace::{Action, Format, Request, Trace};
