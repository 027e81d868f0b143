//! Code that tests, benchmarks and fuzz targets share. No product crate depends on it, except for its own tests.
//!
//! - [`Faulty`] and [`Traced`] are decorators of the [`Backing`](cbd_backing::Backing) trait; [`decorator`] builds them, and the
//!   product's [`Throttle`](cbd_backing::Throttle), from text.
//! - [`Client`] is an NBD client, for any server. Its constants come from the protocol's specification, not from `cbd-nbd`, so
//!   that a wrong constant of the server fails its tests.
//! - [`loop_devices`] keeps tests that bind loop devices apart.
//! - [`pty::Pty`] is a program on a pseudo terminal.
//! - [`other_machine::OtherMachine`] is a host of another machine that has a region.
//! - [`pcache::Sample`] writes images in the layout of dm-pcache, valid or not.
//!
//! Elsewhere: the simulated memory and disks of the engine's tests (`cbd-sim`).

mod decorate;
pub mod fault;
pub mod loop_devices;
pub mod nbd;
mod ops;
pub mod other_machine;
pub mod pcache;
pub mod pty;
pub mod trace;

pub use decorate::{decorate, decorator};
pub use fault::{Fault, FaultHandle, FaultRule, Faulty};
pub use nbd::{BlockStatus, Client, ClientOptions, Command, Completed};
pub use ops::OpKind;
pub use trace::{TraceEntry, TraceHandle, Traced};
