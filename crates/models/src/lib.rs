//! The engine's threads under a scheduler that chooses every step.
//!
//! The real engine, device layer and maintainer run as coroutines of [shuttle](https://docs.rs/shuttle): before every lock, every
//! access to a number that threads share, every store, fence and load of the region and every operation on the disk the scheduler
//! may let another thread go on. A seed chooses the schedule. Memory and disk are the simulator's, and so is the oracle; at points
//! of an execution the world ends in a copy of it, by a power cut or a process crash, and is recovered and judged.
//!
//! Always true here:
//! - nothing of the engine is written a second time: what runs is what the daemon runs;
//! - one seed is one execution, and a failing one is printed with the command that plays it again;
//! - a thread that is never woken is a deadlock, and a deadlock is a failure.
//!
//! Left to others: the order in which a processor makes stores visible to other processors (shuttle's memory is sequentially
//! consistent; orders of the shared numbers are reasoned about where they stand), and single-threaded histories (`cbd-sim`).

mod aftermath;
mod bell;
mod client;
mod lock;
mod points;
mod ports;
mod run;
pub mod scenes;
mod schedule;
mod setup;
mod stage;

pub use client::Client;
pub use ports::{ModelEnvironment, ModelMemory, ModelQueue};
pub use run::{Budget, Outcome, run};
pub use scenes::Scene;
pub use setup::{Setup, Shape};
pub use stage::{Judged, Stage};
