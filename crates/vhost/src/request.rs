//! Validation of a chain as a request to the device.
//!
//! Invariants: a valid request consists of whole sectors inside the device and has as much data as its ranges; an
//! invalid one is answered with its status; if it has no room for a status, that is an error that stops its ring.

use crate::chain::Chain;
use crate::config::{DeviceConfig, RANGES_MAX, SECTOR};
use crate::malformed;
use cbd_types::{ByteRange, Operation, Result};
use virtio_bindings::virtio_blk as blk;
use vm_memory::GuestMemory;

/// Bytes of a request's head.
pub(crate) const HEAD: u64 = 16;
/// Bytes of a range of a discard or zeroing.
const RANGE: usize = 16;
/// Bytes of a device's identity.
pub(crate) const IDENTITY: usize = 20;
const UNMAP: u32 = blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;

/// The status of a request that the guest receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Status {
    Done,
    Failed,
    Unsupported,
}

impl Status {
    pub(crate) const fn byte(self) -> u8 {
        match self {
            Self::Done => blk::VIRTIO_BLK_S_OK as u8,
            Self::Failed => blk::VIRTIO_BLK_S_IOERR as u8,
            Self::Unsupported => blk::VIRTIO_BLK_S_UNSUPP as u8,
        }
    }
}

/// What a request asks the server to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Task {
    /// An operation of the device, range after range; a flush has one empty range.
    Device(Operation),
    /// Return the device's name.
    Identify,
    /// Only answer with this status.
    Answer(Status),
}

/// Validates `chain`; stores the ranges of a device operation in `list`.
///
/// # Errors
/// The chain has no head or no room for the status.
pub(crate) fn validate<M: GuestMemory>(
    config: &DeviceConfig,
    memory: &M,
    chain: &Chain,
    list: &mut Vec<ByteRange>,
) -> Result<Task> {
    list.clear();
    if chain.readable.len() < HEAD {
        return Err(malformed(format!(
            "a request has {} bytes to read, too few for a head",
            chain.readable.len()
        )));
    }
    if chain.writable.len() == 0 {
        return Err(malformed("a request has no room for its status"));
    }
    let mut head = [0; HEAD as usize];
    chain.readable.load(memory, 0, &mut head)?;
    let [kind, _, low, high] = words(&head);
    let sector = u64::from(high) << 32 | u64::from(low);
    let (given, wanted) = (chain.readable.len() - HEAD, chain.writable.len() - 1);
    Ok(match kind {
        blk::VIRTIO_BLK_T_IN => transfer(config, Operation::Read, device_range(config, sector, wanted), list),
        blk::VIRTIO_BLK_T_OUT => {
            transfer(config, Operation::Write, device_range(config, sector, given), list)
        }
        blk::VIRTIO_BLK_T_FLUSH => {
            list.push(ByteRange { start: 0, end: 0 });
            Task::Device(Operation::Flush)
        }
        blk::VIRTIO_BLK_T_GET_ID => Task::Identify,
        blk::VIRTIO_BLK_T_DISCARD => ranges(config, memory, chain, Operation::Discard, list)?,
        blk::VIRTIO_BLK_T_WRITE_ZEROES => ranges(config, memory, chain, Operation::WriteZeroes, list)?,
        _ => Task::Answer(Status::Unsupported),
    })
}

fn transfer(
    config: &DeviceConfig,
    operation: Operation,
    range: Option<ByteRange>,
    list: &mut Vec<ByteRange>,
) -> Task {
    match range.filter(|_| config.allows(operation)) {
        None => Task::Answer(Status::Failed),
        Some(range) if range.is_empty() => Task::Answer(Status::Done),
        Some(range) => {
            list.push(range);
            Task::Device(operation)
        }
    }
}

/// The range of the device, if it consists of whole sectors inside the device.
fn device_range(config: &DeviceConfig, sector: u64, length: u64) -> Option<ByteRange> {
    let start = sector.checked_mul(SECTOR)?;
    let end = start.checked_add(length)?;
    let unit = u64::from(config.geometry.sector);
    (end <= config.size() && start.is_multiple_of(unit) && end.is_multiple_of(unit))
        .then_some(ByteRange { start, end })
}

fn ranges<M: GuestMemory>(
    config: &DeviceConfig,
    memory: &M,
    chain: &Chain,
    operation: Operation,
    list: &mut Vec<ByteRange>,
) -> Result<Task> {
    let length = chain.readable.len() - HEAD;
    if !config.allows(operation) {
        return Ok(Task::Answer(if operation == Operation::Discard {
            Status::Unsupported
        } else {
            Status::Failed
        }));
    }
    if length == 0 || !length.is_multiple_of(RANGE as u64) || length > u64::from(RANGES_MAX) * RANGE as u64 {
        return Ok(Task::Answer(Status::Failed));
    }
    let mut raw = [0; RANGES_MAX as usize * RANGE];
    let raw = &mut raw[..length as usize];
    chain.readable.load(memory, HEAD, raw)?;
    let mut whole = operation;
    for range in raw.as_chunks::<RANGE>().0 {
        let [low, high, sectors, flags] = words(range);
        let unmaps = match (operation, flags) {
            (_, 0) => false,
            (Operation::WriteZeroes, UNMAP) => true,
            _ => return Ok(Task::Answer(Status::Unsupported)),
        };
        let sector = u64::from(high) << 32 | u64::from(low);
        let range = device_range(config, sector, u64::from(sectors) * SECTOR);
        let Some(range) = range.filter(|_| sectors <= config.range_sectors()) else {
            return Ok(Task::Answer(Status::Failed));
        };
        // Discarded ranges read as zeroes here, so a zeroing with the UNMAP flag becomes a discard, unless one of its
        // ranges lacks the flag.
        if operation == Operation::WriteZeroes {
            let discards =
                unmaps && config.geometry.discard && (list.is_empty() || whole == Operation::Discard);
            whole = if discards { Operation::Discard } else { Operation::WriteZeroes };
        }
        if !range.is_empty() {
            list.push(range);
        }
    }
    Ok(if list.is_empty() { Task::Answer(Status::Done) } else { Task::Device(whole) })
}

fn words(bytes: &[u8; 16]) -> [u32; 4] {
    let (words, _) = bytes.as_chunks::<4>();
    [0, 1, 2, 3].map(|at| u32::from_le_bytes(words[at]))
}

/// A device's identity: its name, truncated or padded with zeroes.
pub(crate) fn identity(name: &str) -> [u8; IDENTITY] {
    let mut identity = [0; IDENTITY];
    for (byte, from) in identity.iter_mut().zip(name.bytes()) {
        *byte = from;
    }
    identity
}
