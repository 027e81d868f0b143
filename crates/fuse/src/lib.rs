//! The export that makes a kernel block device where there is no ublk: a FUSE file system with a single file, a
//! loop device with direct I/O over it, and `/dev/cbdN` as a link to that.
//!
//! Always true here: this process serves the file with threads of its own, each with its own way to the kernel (io_uring with a
//! queue for each processor where the kernel offers that, else `/dev/fuse`) and its own queue of the device, and no page cache lies between the loop device and the queue. When the process dies, even by
//! SIGKILL, the connection ends, clients see errors, and the loop device is let go by itself once it is not
//! mounted; [`sweep()`] clears away the rest at the next start. Unless somebody [keeps](kept) its descriptors: then clients wait, and
//! the next process [goes on](FuseLoop::adopt). Nothing here waits without end for the device below.
//!
//! Left to others: what a request does ([`cbd_export::BlockDevice`]), and which devices there are.

mod call;
mod connection;
mod door;
mod errors;
pub mod export;
mod filesystem;
pub mod flusher;
mod handshake;
pub mod kept;
mod life;
mod link;
mod loop_device;
mod mounts;
mod probe;
mod ring;
mod serve;
mod service;
mod sweep;
mod system;
mod wire;
mod worker;

pub use export::{FuseLoop, Options, RING_DEPTH, StopMode, ThreadSetup};
pub use kept::{Keep, KeptState, Remains};
pub use loop_device::QueueLimits;
pub use probe::probe;
pub use serve::serve_connection;
pub use service::Way;
pub use sweep::{Swept, abort_connections, sweep};
