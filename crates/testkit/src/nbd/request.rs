//! The requests and completions of a client, and the encoding of a request.
//!
//! Invariants: no I/O. Requests that a server refuses are encoded, too; the only error is a request whose reply could not be
//! received.

use super::protocol::{RequestHeader, command, command_flag};
use cbd_types::{Error, ErrorKind, Result};
use std::time::Duration;

/// Longest read, in bytes.
const READ_MAX: u32 = 64 << 20;

/// The parameters of a connection.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The name of the export; empty for the default one.
    pub export_name: String,
    /// Whether to negotiate structured replies: errors then have a text, and block status is possible.
    pub structured: bool,
    /// Whether to negotiate the contexts of block status.
    pub contexts: bool,
    /// Whether `cbd:verify` is one of them: block status then reads the device.
    pub verify: bool,
    /// Timeout for each reply of the server.
    pub timeout: Duration,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            export_name: String::new(),
            structured: true,
            contexts: true,
            verify: false,
            timeout: Duration::from_secs(60),
        }
    }
}

/// One request. Offsets and lengths are in bytes; servers accept only whole sectors.
#[derive(Clone, Copy, Debug)]
pub enum Command<'a> {
    /// Read `length` bytes.
    Read {
        /// First byte.
        offset: u64,
        /// At most 64 MiB.
        length: u32,
    },
    /// Write `data`.
    Write {
        /// First byte.
        offset: u64,
        /// The data.
        data: &'a [u8],
        /// Complete when durable.
        fua: bool,
    },
    /// Flush: all writes that completed before become durable.
    Flush,
    /// The range's data is no longer needed.
    Trim {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u32,
        /// Complete when durable.
        fua: bool,
    },
    /// The range reads as zeroes.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u32,
        /// Complete when durable.
        fua: bool,
        /// The range stays allocated.
        no_hole: bool,
        /// Fail if zeroing is not faster than writing (FAST_ZERO).
        fast: bool,
    },
    /// Prefetch the range.
    Cache {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u32,
    },
    /// Block status of the range.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u32,
        /// Only the first extent (REQ_ONE).
        one: bool,
    },
}

/// An extent of block status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockStatus {
    /// The metadata context.
    pub context: &'static str,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u32,
    /// Flags of the extent: [`status_flag`](cbd_nbd::status_flag).
    pub flags: u32,
}

/// A completed request.
#[derive(Debug)]
pub struct Completed {
    /// The number that [`Client::submit`](super::Client::submit) returned for it.
    pub cookie: u64,
    /// Its result.
    pub result: Result<()>,
    /// The data of a read; empty for other commands and after an error. [`Client::recycle`](super::Client::recycle)
    /// reuses it.
    pub data: Vec<u8>,
    /// The extents of a block status request.
    pub status: Vec<BlockStatus>,
}

pub(super) fn length_of(bytes: &[u8]) -> Result<u32> {
    u32::try_from(bytes.len()).map_err(|_| {
        Error::new(ErrorKind::InvalidArgument, format!("{} bytes in one NBD request", bytes.len()))
    })
}

/// The header of a request, and the data that follows it.
pub(super) fn encode(request: Command<'_>, cookie: u64) -> Result<(RequestHeader, &[u8])> {
    let flag = |set: bool, flag: u16| if set { flag } else { 0 };
    let fua_flag = |fua| flag(fua, command_flag::FUA);
    let mut body: &[u8] = &[];
    let (command, flags, offset, length) = match request {
        Command::Read { length, .. } if length > READ_MAX => {
            let text = format!("a read of {length} bytes: at most {READ_MAX} are possible at once");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        Command::Read { offset, length } => (command::READ, 0, offset, length),
        Command::Write { offset, data, fua } => {
            body = data;
            (command::WRITE, fua_flag(fua), offset, length_of(data)?)
        }
        Command::Flush => (command::FLUSH, 0, 0, 0),
        Command::Trim { offset, length, fua } => (command::TRIM, fua_flag(fua), offset, length),
        Command::WriteZeroes { offset, length, fua, no_hole, fast } => {
            let flags =
                fua_flag(fua) | flag(no_hole, command_flag::NO_HOLE) | flag(fast, command_flag::FAST_ZERO);
            (command::WRITE_ZEROES, flags, offset, length)
        }
        Command::Cache { offset, length } => (command::CACHE, 0, offset, length),
        Command::BlockStatus { offset, length, one } => {
            (command::BLOCK_STATUS, flag(one, command_flag::REQ_ONE), offset, length)
        }
    };
    Ok((RequestHeader { flags, command, cookie, offset, length }, body))
}
