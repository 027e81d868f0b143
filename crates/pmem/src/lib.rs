//! Persistent memory: map it, copy to it, make it durable, survive its failures.
//!
//! Invariants:
//! - The durability of a region is what the kernel and the platform report, never what a user assumes:
//!   [`Mapping::info`] reports it, with warnings.
//! - A region has one daemon at a time as its owner, and its space is allocated before it is mapped.
//! - Stores use the method that was measured to be the fastest for their size; each byte of the source is
//!   loaded once, and the checksum is that of the stored bytes.
//! - Failing memory (poison, a truncated file) becomes an error of a load and a lasting mark of a store
//!   ([`Mapping::failed`]); the process continues. (On x86-64; see `portable.rs` for other processors.)
//!
//! Elsewhere: the content of stores and their order (`cbd-engine`), the bytes on media (`cbd-format`).
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
mod extend;
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
mod promise;
mod reader;
#[cfg(test)]
mod recorder;
mod routines;
mod sharing;
mod space;
mod sysfs;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use blank::Look;
pub use boot::this_boot;
pub use cbd_sys::DeviceNumber;
pub use file::HostLocks;
pub use identity::{Identity, Layer, backing_identity};
pub use mapping::{Coherence, Info, Kind, Mapping, SizeMethod};
pub use methods::CopyMethod;
pub use open::{MINIMUM_SIZE, OpenOptions, Opening, is_of_others};
pub use processor::{Flush, Processor};
pub use promise::{Promise, promise};
pub use reader::Reader;
pub use routines::processor::prefetch;
