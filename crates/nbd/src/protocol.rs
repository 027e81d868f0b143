//! The constants and headers of the NBD protocol, and the table of its errors.
//!
//! After the specification in the NetworkBlockDevice/nbd repository, `doc/proto.md`, whose names the constants have
//! without their prefixes. All numbers on the wire are big-endian.
//!
//! Invariants: no I/O; decoding accepts any bytes and never panics. `server::request` decides whether a request is
//! valid for a device.

use cbd_types::Error;

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
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub(crate) mod option_reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERROR: u32 = 1 << 31;
    pub(crate) const ERR_UNSUP: u32 = ERROR | 1;
    pub(crate) const ERR_INVALID: u32 = ERROR | 3;
    pub(crate) const ERR_UNKNOWN: u32 = ERROR | 6;
    pub(crate) const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Kinds of information about an export.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: the capabilities of an export.
pub mod transmission_flag {
    /// The flags are valid; always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// FUA (forced unit access) is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The device is rotational: seeks are expensive.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// TRIM is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// DF ("do not fragment") is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers what completed on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE (prefetch) is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// FAST_ZERO is supported: WRITE_ZEROES fails if zeroing is not faster than writing.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
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
    pub(crate) const DF: u16 = 1 << 2;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
}

/// Chunks of a structured reply.
pub(crate) mod chunk {
    pub(crate) const FLAG_DONE: u16 = 1;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const ERROR_BIT: u16 = 1 << 15;
    pub(crate) const ERROR: u16 = ERROR_BIT | 1;
}

/// The metadata context that every client knows: holes and zeroes.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";
/// CBD's metadata context: bit 0 is set if the newest bytes are in the cache, bit 1 if they are dirty.
pub const CONTEXT_STATE: &str = "cbd:state";
/// CBD's metadata context for verification: block status in it checks that the newest data can be read and is right, which
/// reads the disk for what is not in the cache. Bit 0 is set for what was checked, bit 1 if it is damaged, bit 2 if the disk
/// cannot read it; 1 alone means right. Nothing is said about a range without bits: clients wrote to it meanwhile. A reply may
/// cover less than its request. Further bits may be added; a client ignores those that it does not know.
pub const CONTEXT_VERIFY: &str = "cbd:verify";

/// Flags in the descriptors of block status.
pub mod status_flag {
    /// `base:allocation`: nothing is allocated.
    pub const HOLE: u32 = 1 << 0;
    /// `base:allocation`: reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
    /// `cbd:state`: the newest bytes are in the cache.
    pub const CACHED: u32 = 1 << 0;
    /// `cbd:state`: they are not on the backing device yet.
    pub const DIRTY: u32 = 1 << 1;
    /// `cbd:verify`: the newest data was checked. Right if no other bit is set.
    pub const CHECKED: u32 = 1 << 0;
    /// `cbd:verify`: no undamaged copy of the data is left. Reads fail until it is overwritten.
    pub const DAMAGED: u32 = 1 << 1;
    /// `cbd:verify`: only the disk has the data, and cannot read it.
    pub const UNREADABLE: u32 = 1 << 2;
}

/// Longest name or other string that the protocol allows, in bytes.
pub(crate) const STRING_MAX: usize = 4096;

/// The head of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RequestHeader {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    /// The client's identifier of the request; replies carry it.
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

impl RequestHeader {
    pub(crate) const SIZE: usize = 28;

    /// `None` if the magic number is wrong: then client and server disagree about where a request begins.
    pub(crate) fn decode(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let mut reader = Reader(bytes);
        (reader.u32()? == REQUEST_MAGIC).then_some(())?;
        Some(Self {
            flags: reader.u16()?,
            command: reader.u16()?,
            cookie: reader.u64()?,
            offset: reader.u64()?,
            length: reader.u32()?,
        })
    }
}

/// Decodes numbers from the front of a slice; `None` if it is too short.
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

    /// A string: its length, then its bytes.
    pub(crate) fn string(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()?;
        self.bytes(length as usize)
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

/// Maps the errno of an error to the number on the wire. An error without a number in the protocol becomes EPERM if the
/// client lacks the permission, EINVAL if the request is invalid, and EIO otherwise.
pub(crate) fn wire_error_of(error: &Error) -> u32 {
    match error.errno() {
        libc::EPERM | libc::EACCES | libc::EROFS => wire_error::EPERM,
        libc::ENOMEM => wire_error::ENOMEM,
        libc::EINVAL | libc::ENOENT | libc::EEXIST => wire_error::EINVAL,
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => wire_error::ENOSPC,
        libc::EOVERFLOW => wire_error::EOVERFLOW,
        libc::EOPNOTSUPP => wire_error::ENOTSUP,
        libc::ESHUTDOWN => wire_error::ESHUTDOWN,
        _ => wire_error::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::ErrorKind;

    impl RequestHeader {
        /// As a client sends it.
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

    #[test]
    fn a_request_is_decoded_as_it_was_encoded() {
        let header =
            RequestHeader { flags: 1, command: 6, cookie: 0x0102_0304, offset: 1 << 40, length: 4096 };
        assert_eq!(RequestHeader::decode(&header.encode()), Some(header));
    }

    #[test]
    fn a_request_with_any_wrong_bit_in_its_magic_is_none() {
        let header = RequestHeader { flags: 0, command: 0, cookie: 0, offset: 0, length: 0 };
        for bit in 0..32 {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(RequestHeader::decode(&bytes), None);
        }
    }

    #[test]
    fn every_error_has_a_number_that_the_protocol_defines() {
        let number = |kind| wire_error_of(&Error::new(kind, "x"));
        assert_eq!(number(ErrorKind::ReadOnly), wire_error::EPERM);
        assert_eq!(number(ErrorKind::Permission), wire_error::EPERM);
        assert_eq!(number(ErrorKind::NoSpace), wire_error::ENOSPC);
        assert_eq!(number(ErrorKind::OutOfRange), wire_error::EINVAL);
        assert_eq!(number(ErrorKind::InvalidArgument), wire_error::EINVAL);
        assert_eq!(number(ErrorKind::Unsupported), wire_error::ENOTSUP);
        assert_eq!(number(ErrorKind::Stopped), wire_error::ESHUTDOWN);
        for kind in
            [ErrorKind::Media, ErrorKind::Backing, ErrorKind::Busy, ErrorKind::TimedOut, ErrorKind::System]
        {
            assert_eq!(number(kind), wire_error::EIO, "{}", kind.name());
        }
    }

    #[test]
    fn a_reader_returns_none_past_its_end() {
        let mut reader = Reader(&[0, 0, 0, 2, b'a']);
        assert_eq!(reader.string(), None);
        let mut reader = Reader(&[0, 0, 0, 1, b'a', 9]);
        assert_eq!(reader.string(), Some(&b"a"[..]));
        assert_eq!(reader.u16(), None);
        assert!(!reader.is_empty());
        assert_eq!(reader.bytes(1), Some(&[9][..]));
        assert!(reader.is_empty());
    }
}
