//! The structures and numbers of the FUSE protocol that a file system of one file needs.
//!
//! Invariants: every structure is laid out as in the kernel's `include/uapi/linux/fuse.h`, in native byte
//! order, with explicit padding, and its size is asserted at compile time.
//!
//! Elsewhere: the meaning of a message ([`crate::call`]) and the reply ([`crate::filesystem`]).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The protocol's major version.
pub const MAJOR: u32 = 7;
/// The minor version that these structures follow.
pub const MINOR: u32 = 38;
/// The oldest minor version that is served (Linux 5.4); loop devices need an even newer kernel.
pub const MINOR_OLDEST: u32 = 31;
/// The node of the root directory.
pub const ROOT_NODE: u64 = 1;

/// Reads may be sent while others are not answered yet.
pub const ASYNC_READ: u32 = 1 << 0;
/// Writes may be larger than a page.
pub const BIG_WRITES: u32 = 1 << 5;
/// Direct I/O is sent as asynchronously as it was submitted.
pub const ASYNC_DIO: u32 = 1 << 15;
/// Lookups may be sent concurrently.
pub const PARALLEL_DIROPS: u32 = 1 << 18;
/// The field `max_pages` of the reply is valid.
pub const MAX_PAGES: u32 = 1 << 22;
/// The field `flags2` is valid.
pub const INIT_EXTENDED: u32 = 1 << 30;
/// In `flags2`: on request, the kernel sends messages again that were read and not answered (bit 39 of all
/// flags; Linux 6.9).
pub const HAS_RESEND: u32 = 1 << 7;
/// In place of an errno, in a message with `unique` 0: send messages again that were read and not answered.
pub const NOTIFY_RESEND: i32 = 7;

/// Reads and writes bypass the page cache.
pub const OPEN_DIRECT_IO: u32 = 1 << 0;
/// A close sends no message; a dying process so never waits for its own file.
pub const OPEN_NO_FLUSH: u32 = 1 << 5;
/// Direct writes may be sent concurrently.
pub const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

/// In [`SetAttrIn::valid`]: set the mode.
pub const SET_MODE: u32 = 1 << 0;
/// In [`SetAttrIn::valid`]: set the owner.
pub const SET_USER: u32 = 1 << 1;
/// In [`SetAttrIn::valid`]: set the group.
pub const SET_GROUP: u32 = 1 << 2;
/// In [`SetAttrIn::valid`]: set the size.
pub const SET_SIZE: u32 = 1 << 3;

/// The opcodes.
pub mod opcode {
    #![allow(missing_docs, reason = "the names are those of the kernel's header and of the system calls")]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
}

macro_rules! wire {
    ($(#[$doc:meta])* $name:ident, $size:literal, { $($field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[allow(missing_docs, reason = "the names are those of the kernel's header")]
        pub struct $name { $(pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

wire!(
    /// The header of every message of the kernel.
    InHeader, 40, {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32,
        total_extlen: u16, padding: u16,
    }
);
wire!(
    /// The header of every reply.
    OutHeader, 16, { len: u32, error: i32, unique: u64, }
);
wire!(
    /// The part of INIT that every kernel sends.
    InitIn, 16, { major: u32, minor: u32, max_readahead: u32, flags: u32, }
);
wire!(
    /// The continuation that newer kernels send.
    InitInExtended, 4, { flags2: u32, }
);
wire!(
    /// The reply to INIT.
    InitOut, 64, {
        major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16,
        congestion_threshold: u16, max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16,
        flags2: u32, unused: [u32; 7],
    }
);
wire!(
    /// The attributes of a node.
    Attr, 88, {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32,
        mtimensec: u32, ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32,
        blksize: u32, flags: u32,
    }
);
wire!(
    /// The reply to LOOKUP.
    EntryOut, 128, {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32,
        attr_valid_nsec: u32, attr: Attr,
    }
);
wire!(
    /// The reply to GETATTR and SETATTR.
    AttrOut, 104, { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attr, }
);
wire!(
    /// SETATTR.
    SetAttrIn, 88, {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64,
        ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32, mode: u32, unused4: u32, uid: u32,
        gid: u32, unused5: u32,
    }
);
wire!(
    /// OPEN.
    OpenIn, 8, { flags: u32, open_flags: u32, }
);
wire!(
    /// The reply to OPEN and OPENDIR.
    OpenOut, 16, { fh: u64, open_flags: u32, padding: u32, }
);
wire!(
    /// READ and READDIR.
    ReadIn, 40, {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
);
wire!(
    /// WRITE; the data follows.
    WriteIn, 40, {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
);
wire!(
    /// The reply to WRITE.
    WriteOut, 8, { size: u32, padding: u32, }
);
wire!(
    /// FALLOCATE.
    FallocateIn, 32, { fh: u64, offset: u64, length: u64, mode: u32, padding: u32, }
);
wire!(
    /// The reply to STATFS.
    StatfsOut, 80, {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32,
        frsize: u32, padding: u32, spare: [u32; 6],
    }
);
wire!(
    /// One entry of READDIR; the name follows, padded with zeroes to a multiple of eight.
    Dirent, 24, { ino: u64, off: u64, namelen: u32, kind: u32, }
);

/// The bytes of a message before the data of a WRITE: header and arguments. With a page-aligned receive
/// buffer behind them, the data is page-aligned.
pub const HEAD: usize = size_of::<InHeader>() + size_of::<WriteIn>();
