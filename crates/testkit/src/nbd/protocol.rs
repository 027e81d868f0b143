//! The constants and messages of the NBD protocol that a client needs.
//!
//! They follow the specification in the NetworkBlockDevice/nbd repository, `doc/proto.md`. The constants have the names of the
//! specification without their prefixes. All numbers on the wire are big-endian. The server has its own constants.
//!
//! Invariants: no I/O; decoding accepts any bytes and never panics.

use cbd_types::{Error, ErrorKind, Result};

/// First magic number of a server.
pub(crate) const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second magic number of a newstyle server, and magic number of each option.
pub(crate) const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Magic number of the reply to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic number of a request.
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic number of a simple reply.
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic number of a chunk of a structured reply.
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags; those of the client have the same values as those of the server.
pub(crate) mod handshake_flag {
    pub(crate) const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub(crate) const NO_ZEROES: u16 = 1 << 1;
}

/// Options of the handshake.
pub(crate) mod option {
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub(crate) mod option_reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERROR: u32 = 1 << 31;
    pub(crate) const ERR_UNSUP: u32 = ERROR | 1;
    pub(crate) const ERR_UNKNOWN: u32 = ERROR | 6;
}

/// Kinds of information about an export.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Commands.
pub(crate) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISC: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const CACHE: u16 = 5;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub(crate) mod command_flag {
    pub(crate) const FUA: u16 = 1 << 0;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of a structured reply.
pub(crate) mod chunk {
    pub(crate) const FLAG_DONE: u16 = 1;
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const ERROR_BIT: u16 = 1 << 15;
}

/// Longest name or other string that the protocol allows, in bytes.
pub(crate) const STRING_MAX: usize = 4096;

/// The header of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RequestHeader {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    /// The client's own number for the request; replies carry it.
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

impl RequestHeader {
    pub(crate) const SIZE: usize = 28;

    pub(crate) fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// Decodes numbers from the front of a slice; `None` if the slice is too short.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(front)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The errors that the protocol defines.
pub(crate) mod wire_error {
    pub(crate) const EPERM: u32 = 1;
    pub(crate) const EIO: u32 = 5;
    pub(crate) const ENOMEM: u32 = 12;
    pub(crate) const EINVAL: u32 = 22;
    pub(crate) const ENOSPC: u32 = 28;
    pub(crate) const EOVERFLOW: u32 = 75;
    pub(crate) const ENOTSUP: u32 = 95;
    pub(crate) const ESHUTDOWN: u32 = 108;
}

/// The client's result for an error number on the wire.
pub(crate) fn result_of_wire(number: u32, text: &str) -> Result<()> {
    let (kind, name) = match number {
        0 => return Ok(()),
        wire_error::EPERM => (ErrorKind::Permission, "EPERM"),
        wire_error::EIO => (ErrorKind::Backing, "EIO"),
        wire_error::ENOMEM => (ErrorKind::System, "ENOMEM"),
        wire_error::EINVAL => (ErrorKind::InvalidArgument, "EINVAL"),
        wire_error::ENOSPC => (ErrorKind::NoSpace, "ENOSPC"),
        wire_error::EOVERFLOW => (ErrorKind::OutOfRange, "EOVERFLOW"),
        wire_error::ENOTSUP => (ErrorKind::Unsupported, "ENOTSUP"),
        wire_error::ESHUTDOWN => (ErrorKind::Stopped, "ESHUTDOWN"),
        _ => (ErrorKind::Backing, "an unknown error"),
    };
    let text = if text.is_empty() { String::new() } else { format!(": {text}") };
    Err(Error::new(kind, format!("the NBD server answered {name} ({number}){text}")))
}
