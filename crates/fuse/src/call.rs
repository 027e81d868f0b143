//! Decodes the bytes of a message into a call. No field of a message is used before it is validated.
//!
//! Invariants: decoding never panics, whatever the bytes; a decoded call has all its arguments, and a write
//! carries as much data as its header states.
//!
//! Elsewhere: whether offsets fit the device, and the reply ([`crate::filesystem`]).

use crate::wire::{
    self, FallocateIn, InHeader, InitIn, InitInExtended, OpenIn, ReadIn, SetAttrIn, WriteIn, opcode,
};
use zerocopy::FromBytes;

/// The longest arguments that are decoded, except the data of a WRITE: a SETATTR, a name.
const ARGUMENTS: usize = 512;

/// A request of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// Negotiate versions and capabilities.
    Init { major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32 },
    /// Look up a name in the root directory; `found` tells whether it is the expected one.
    Lookup { found: bool },
    /// Attributes of a node.
    GetAttr,
    /// Change attributes of a node.
    SetAttr { valid: u32, size: u64 },
    /// Open the file.
    Open { flags: u32 },
    /// Open the root directory.
    OpenDir,
    /// The last user of an open file has closed it.
    Release,
    /// The same for the directory.
    ReleaseDir,
    /// List the root directory.
    ReadDir { offset: u64, size: u32 },
    /// Read data.
    Read { offset: u64, size: u32 },
    /// Write the data that follows the head.
    Write { offset: u64, size: u32, flags: u32 },
    /// Make written data durable before the reply.
    Fsync,
    /// The same for the directory.
    FsyncDir,
    /// Punch a hole, write zeroes, or another mode, which is not supported.
    Fallocate { offset: u64, length: u64, mode: u32 },
    /// Sizes of the file system.
    StatFs,
    /// The file system is being unmounted.
    Destroy,
    /// A message that expects no reply.
    NoReply,
    /// An unsupported call. (FLUSH at a close too: the kernel then treats every close as a success.)
    Unknown,
}

/// A message whose fields contradict each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed {
    /// The number to reply to, where the header could be read.
    pub unique: Option<u64>,
}

/// Decodes a message: `head` has the header and the beginning of the arguments, up to [`wire::HEAD`] bytes, and
/// `payload` the rest, which for a WRITE is its data. `expected_name` is the only name in the root directory.
pub fn decode(head: &[u8], payload: &[u8], expected_name: &[u8]) -> Result<(InHeader, Call), Malformed> {
    let received = head.len() + payload.len();
    let (header, arguments) = InHeader::read_from_prefix(head).map_err(|_| Malformed { unique: None })?;
    let malformed = Malformed { unique: Some(header.unique) };
    if header.len as usize != received {
        return Err(malformed);
    }
    let call = match header.opcode {
        opcode::WRITE => {
            let write = WriteIn::read_from_bytes(arguments).map_err(|_| malformed)?;
            if write.size as usize != payload.len() {
                return Err(malformed);
            }
            Call::Write { offset: write.offset, size: write.size, flags: write.flags }
        }
        opcode::READ => {
            let (read, _) = ReadIn::read_from_prefix(arguments).map_err(|_| malformed)?;
            Call::Read { offset: read.offset, size: read.size }
        }
        other => decode_rare(other, arguments, payload, expected_name).ok_or(malformed)?,
    };
    Ok((header, call))
}

/// Calls that are not on the data path; their arguments may continue in `rest`. `None` when they are too
/// short.
fn decode_rare(opcode: u32, first: &[u8], rest: &[u8], expected_name: &[u8]) -> Option<Call> {
    let mut room = [0; ARGUMENTS];
    let taken = rest.len().min(ARGUMENTS - first.len().min(ARGUMENTS));
    let (front, back) = room.split_at_mut_checked(first.len())?;
    front.copy_from_slice(first);
    back.get_mut(..taken)?.copy_from_slice(rest.get(..taken)?);
    let arguments = room.get(..first.len() + taken)?;
    Some(match opcode {
        opcode::INIT => {
            let (init, rest) = InitIn::read_from_prefix(arguments).ok()?;
            let InitIn { major, minor, max_readahead, flags } = init;
            let extended = InitInExtended::read_from_prefix(rest).ok();
            let extended = extended.filter(|_| flags & wire::INIT_EXTENDED != 0);
            let flags2 = extended.map_or(0, |(extended, _)| extended.flags2);
            Call::Init { major, minor, max_readahead, flags, flags2 }
        }
        opcode::LOOKUP => {
            let end = arguments.iter().position(|&byte| byte == 0)?;
            Call::Lookup { found: arguments.get(..end)? == expected_name }
        }
        opcode::GETATTR => Call::GetAttr,
        opcode::SETATTR => {
            let (set, _) = SetAttrIn::read_from_prefix(arguments).ok()?;
            Call::SetAttr { valid: set.valid, size: set.size }
        }
        opcode::OPEN => Call::Open { flags: OpenIn::read_from_prefix(arguments).ok()?.0.flags },
        opcode::OPENDIR => Call::OpenDir,
        opcode::RELEASE => Call::Release,
        opcode::RELEASEDIR => Call::ReleaseDir,
        opcode::READDIR => {
            let (read, _) = ReadIn::read_from_prefix(arguments).ok()?;
            Call::ReadDir { offset: read.offset, size: read.size }
        }
        opcode::FSYNC => Call::Fsync,
        opcode::FSYNCDIR => Call::FsyncDir,
        opcode::FALLOCATE => {
            let (fallocate, _) = FallocateIn::read_from_prefix(arguments).ok()?;
            Call::Fallocate { offset: fallocate.offset, length: fallocate.length, mode: fallocate.mode }
        }
        opcode::STATFS => Call::StatFs,
        opcode::DESTROY => Call::Destroy,
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => Call::NoReply,
        _ => Call::Unknown,
    })
}

/// Whether `valid` of a SETATTR requests a change that a block device cannot make.
pub const fn sets_more_than_times(valid: u32) -> bool {
    valid & (wire::SET_MODE | wire::SET_USER | wire::SET_GROUP | wire::SET_SIZE) != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::HEAD;
    use zerocopy::IntoBytes;

    fn message(opcode: u32, arguments: &[u8]) -> Vec<u8> {
        let len = (size_of::<InHeader>() + arguments.len()) as u32;
        let header = InHeader { len, opcode, unique: 7, nodeid: 2, ..InHeader::default() };
        [header.as_bytes(), arguments].concat()
    }

    fn decode_whole(bytes: &[u8]) -> Result<(InHeader, Call), Malformed> {
        let (head, payload) = bytes.split_at(bytes.len().min(HEAD));
        decode(head, payload, b"cbd0")
    }

    #[test]
    fn a_write_is_decoded_with_its_offset_and_size() {
        let write = WriteIn { offset: 4096, size: 3, flags: 5, ..WriteIn::default() };
        let bytes = message(opcode::WRITE, &[write.as_bytes(), b"abc"].concat());
        let (header, call) = decode_whole(&bytes).unwrap();
        assert_eq!(header.unique, 7);
        assert_eq!(call, Call::Write { offset: 4096, size: 3, flags: 5 });
    }

    #[test]
    fn a_write_with_less_or_more_data_than_its_header_states_is_malformed() {
        for size in [0, 2, 4, u32::MAX] {
            let write = WriteIn { size, ..WriteIn::default() };
            let bytes = message(opcode::WRITE, &[write.as_bytes(), b"abc"].concat());
            assert_eq!(decode_whole(&bytes).unwrap_err(), Malformed { unique: Some(7) });
        }
    }

    #[test]
    fn a_length_that_differs_from_the_received_one_is_malformed() {
        let mut bytes = message(opcode::READ, ReadIn::default().as_bytes());
        for invalid in [0_u32, 79, 81, u32::MAX] {
            bytes[..4].copy_from_slice(&invalid.to_ne_bytes());
            assert!(decode_whole(&bytes).is_err());
        }
    }

    #[test]
    fn every_call_truncated_at_every_byte_is_decoded_or_malformed_without_a_panic() {
        for opcode in (0..60).chain([4096, u32::MAX]) {
            for length in 0..700 {
                let mut bytes = message(opcode, &vec![0xff; length]);
                let _ = decode_whole(&bytes);
                let cut = bytes.len().min(length);
                bytes.truncate(cut);
                if let Some(field) = bytes.get_mut(..4) {
                    field.copy_from_slice(&(cut as u32).to_ne_bytes());
                }
                let _ = decode_whole(&bytes);
            }
        }
    }

    #[test]
    fn arguments_that_extend_beyond_the_head_are_joined() {
        let set = SetAttrIn { valid: wire::SET_SIZE, size: 99, gid: 1, ..SetAttrIn::default() };
        let (_, call) = decode_whole(&message(opcode::SETATTR, set.as_bytes())).unwrap();
        assert_eq!(call, Call::SetAttr { valid: wire::SET_SIZE, size: 99 });
    }

    #[test]
    fn the_second_word_of_flags_is_used_only_if_the_first_announces_it() {
        for (flags, expected) in [(0, 0), (wire::INIT_EXTENDED, wire::HAS_RESEND)] {
            let init = InitIn { major: 7, minor: 42, max_readahead: 0, flags };
            let extended = InitInExtended { flags2: wire::HAS_RESEND };
            let bytes = message(opcode::INIT, &[init.as_bytes(), extended.as_bytes(), &[0; 44]].concat());
            let (_, call) = decode_whole(&bytes).unwrap();
            assert!(matches!(call, Call::Init { flags2, .. } if flags2 == expected), "{call:?}");
        }
        let init = InitIn { flags: wire::INIT_EXTENDED, ..InitIn::default() };
        let (_, call) = decode_whole(&message(opcode::INIT, init.as_bytes())).unwrap();
        assert!(matches!(call, Call::Init { flags2: 0, .. }), "{call:?}");
    }

    #[test]
    fn a_name_is_compared_whole() {
        for (name, found) in [(&b"cbd0\0"[..], true), (b"cbd\0", false), (b"cbd00\0", false), (b"\0", false)]
        {
            let (_, call) = decode_whole(&message(opcode::LOOKUP, name)).unwrap();
            assert_eq!(call, Call::Lookup { found });
        }
        assert!(decode_whole(&message(opcode::LOOKUP, b"no end")).is_err());
    }
}
