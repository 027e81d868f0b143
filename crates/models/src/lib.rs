//! The engine's threads under a scheduler that chooses every step.
//!
//! The real engine, device layer and background worker run as coroutines of
//! [shuttle](https://docs.rs/shuttle). Before every lock, every access to a number that threads share, every
//! store, fence and load of the region and every operation on the disk, the scheduler may let another thread
//! continue. A seed chooses the schedule. Memory, disk and oracle are the simulator's. At random points of an
//! execution a copy of the world ends by a power cut or a process crash, and is recovered and checked.
//!
//! Invariants:
//! - the models contain no second implementation of the engine: they run the code of the daemon;
//! - one seed is one execution, and a failing execution is printed with the command that repeats it;
//! - a thread that is never woken is a deadlock, and a deadlock is a failure.
//!
//! Elsewhere: the order in which a processor makes stores visible to other processors (shuttle's memory is
//! sequentially consistent; comments at the shared numbers justify their orderings), and single-threaded
//! histories (`cbd-sim`).

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
pub use stage::{Checked, Stage};
