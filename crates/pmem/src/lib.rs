//! Persistent memory: map it, copy to it, make it durable, survive its failures.
//!
//! Always true here:
//! - What a region survives is what the kernel and the platform say, never what a user hopes: [`Mapping::info`]
//!   tells, with warnings.
//! - A region is held by one daemon at a time, and its space is allocated before it is mapped.
//! - Stores go through the method that was measured to be the fastest for their size; each byte of the source
//!   is loaded once, and what is summed is what is stored.
//! - Memory that fails (poison, a file cut short under us) becomes an error for who loads and a lasting mark
//!   for who stores ([`Mapping::failed`]); the process goes on. (On x86-64; see `portable.rs` for others.)
//!
//! Left to others: what is stored and in which order (`cbd-engine`), the bytes on media (`cbd-format`).
//!
//! ```
//! use cbd_pmem::Mapping;
//! use cbd_types::Pmem;
//!
//! let region = Mapping::anonymous(1 << 20)?;
//! region.store(4096, b"a line or two");
//! region.fence();
//! assert_eq!(region.failed(), None);
//! let mut read = [0; 13];
//! region.load(4096, &mut read)?;
//! assert_eq!(&read, b"a line or two");
//! # Ok::<(), cbd_types::Error>(())
//! ```

mod blank;
mod boot;
mod calibrate;
mod collapse;
mod copy;
mod device_lock;
mod errors;
mod file;
mod identity;
mod keys;
mod mapping;
mod memory;
mod methods;
mod open;
#[cfg(not(target_arch = "x86_64"))]
mod portable;
mod processor;
mod reader;
#[cfg(test)]
mod recorder;
mod routines;
mod sysfs;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use blank::Look;
pub use boot::this_boot;
pub use identity::{Identity, Layer, backing_identity};
pub use mapping::{Info, Kind, Mapping, SizeMethod};
pub use methods::CopyMethod;
pub use open::{MINIMUM_SIZE, OpenOptions, Opening};
pub use processor::{Flush, Processor};
pub use reader::Reader;
pub use routines::processor::prefetch;
pub use sysfs::DeviceNumber;
