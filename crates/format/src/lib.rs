//! The format of all data on media: its meaning, encoding and validation. No I/O.
//!
//! Invariants:
//! - little-endian, fixed width, naturally aligned, explicit zeroed padding; sizes and offsets are asserted at compile
//!   time and compared with `docs/format.md` by a test;
//! - decoding accepts any bytes and never panics: bytes that were read are [`Unverified`] until `verify` returns a value;
//! - all updates in place use one implementation of "two slots, newest valid wins" ([`slot`]).
//!
//! Elsewhere: the order of stores and fences (`cbd-engine`), and their execution (`cbd-pmem`).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod channel;
pub mod checksum;
pub mod layout;
pub mod owner;
pub mod pins;
pub mod record;
pub mod segment;
pub mod shared;
pub mod slot;
pub mod state;
pub mod superblock;
pub mod tables;
mod unverified;

pub use channel::{ChannelCompletion, ChannelShape, ClientHeader, ServerHeader, Submission};
pub use checksum::{crc32c, crc32c_joined};
pub use layout::{Layout, StructLayout};
pub use owner::OwnerNote;
pub use pins::{Pin, PinKind};
pub use record::{
    CHECKSUMS_PER_LINE, ChecksumLine, MAX_CHECKSUM_LINES, Record, RecordClass, RecordKind, RecordPlace,
};
pub use segment::{SegmentHeader, SegmentShape};
pub use shared::{AreaHeader, Holding, HostBeat, Object, SharedLayout, Vote};
pub use slot::{Slot, SlotContent, zeroed};
pub use state::{Drained, FormerDisk, LaneMark, LaneTail, StateShape};
pub use superblock::Superblock;
pub use tables::{BackendEntry, BlkdevEntry, FieldText, HostEntry, SegmentEntry};
pub use unverified::Unverified;

/// Version of the format that this program writes; every later program can open it. Regions of version 0 were created before
/// the format was final.
pub const FORMAT_VERSION: u32 = 1;

/// Copies of a structure are in different units of this size: a failed page destroys one copy at most.
pub const PAGE: u64 = 4096;

/// A cache line: the unit in which a processor writes memory, and the size of a record.
pub const LINE: u64 = 64;

/// Sequence numbers, ordinals, epochs and runs stay below this limit. No machine reaches it; a region with larger numbers is
/// damaged or forged, and counting from them would overflow.
pub const COUNTER_END: u64 = 1 << 62;

/// The description of every structure with fields in `docs/format.md`.
#[must_use]
pub fn structures() -> [StructLayout; 25] {
    [
        Superblock::layout(),
        OwnerNote::layout(),
        slot::SlotHeader::layout(),
        HostEntry::layout(),
        BackendEntry::layout(),
        BlkdevEntry::layout(),
        SegmentEntry::layout(),
        SegmentHeader::layout(),
        Record::layout(),
        ChecksumLine::layout(),
        Drained::layout(),
        FormerDisk::layout(),
        LaneTail::layout(),
        LaneMark::layout(),
        pins::PinListHeader::layout(),
        pins::PinHeader::layout(),
        pins::PinnedRange::layout(),
        Holding::layout(),
        Vote::layout(),
        HostBeat::layout(),
        AreaHeader::layout(),
        ClientHeader::layout(),
        ServerHeader::layout(),
        Submission::layout(),
        ChannelCompletion::layout(),
    ]
}
