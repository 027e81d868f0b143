//! Access to the areas of a channel: lines and data that one side publishes and the other one observes.

use alloc::vec::Vec;
use cbd_format::LINE;
use cbd_types::{Error, ErrorKind, MutationPoint, Pmem, Region, Result};

/// Offsets of the areas of a channel in the region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Areas {
    /// The area that the client stores in.
    pub client: u64,
    /// The area that the server stores in.
    pub server: u64,
}

/// [`ChannelCompletion::status`](cbd_format::ChannelCompletion): the data that arrived is not that of the request, which is to be
/// submitted again.
pub const STATUS_AGAIN: u32 = u32::MAX;

/// The kinds of errors, by their number in a completion less 1. Numbers never change.
const KINDS: [ErrorKind; 19] = [
    ErrorKind::InvalidArgument,
    ErrorKind::NotFound,
    ErrorKind::AlreadyExists,
    ErrorKind::Busy,
    ErrorKind::NoSpace,
    ErrorKind::OutOfRange,
    ErrorKind::ReadOnly,
    ErrorKind::Media,
    ErrorKind::Backing,
    ErrorKind::Damaged,
    ErrorKind::Foreign,
    ErrorKind::Unsupported,
    ErrorKind::Stopped,
    ErrorKind::Permission,
    ErrorKind::TimedOut,
    ErrorKind::Exchanged,
    ErrorKind::Torn,
    ErrorKind::Mismatch,
    ErrorKind::System,
];

/// The number of a kind of error in a completion.
pub fn status_of(kind: ErrorKind) -> u32 {
    KINDS.iter().position(|known| *known == kind).map_or(KINDS.len() as u32, |index| index as u32 + 1)
}

/// The kind of error of a completion's number.
pub fn kind_of(status: u32) -> ErrorKind {
    let index = (status as usize).checked_sub(1);
    index.and_then(|index| KINDS.get(index)).copied().unwrap_or(ErrorKind::System)
}

/// Makes room for so many more items.
///
/// # Errors
/// [`ErrorKind::System`] without memory.
pub fn reserve<T>(items: &mut Vec<T>, more: usize) -> Result<()> {
    items.try_reserve(more).map_err(|_| Error::new(ErrorKind::System, "there is no memory for the channel"))
}

/// Stores a line and makes it visible.
pub fn publish_line<M: Pmem>(region: &Region<M>, point: MutationPoint, at: u64, line: &[u8; LINE as usize]) {
    let stored = region.store_line(at, line);
    region.publish(point, stored, at, LINE);
}

/// A line of the other side, as it is now; `None` if the memory fails.
pub fn observe_line<M: Pmem>(region: &Region<M>, at: u64) -> Option<[u8; LINE as usize]> {
    let mut line = [0; LINE as usize];
    region.observe(MutationPoint::ChannelObserve, at, LINE);
    region.load(at, &mut line).ok()?;
    Some(line)
}

/// Stores data and makes it visible. Lines are whole: what follows the data in the last one is the writer's, too.
pub fn publish_data<M: Pmem>(region: &Region<M>, at: u64, data: &[u8]) {
    let stored = region.store(at, data);
    region.publish(MutationPoint::ChannelDataPublish, stored, at, data.len() as u64);
}

/// Copies the other side's data.
///
/// # Errors
/// The memory fails, or the data differs from its checksum.
pub fn observe_data<M: Pmem>(region: &Region<M>, at: u64, into: &mut [u8], checksum: u32) -> Result<bool> {
    region.observe(MutationPoint::ChannelDataObserve, at, into.len() as u64);
    let found = region.load_summed(at, into)?;
    Ok(MutationPoint::ChannelDataChecksum.holds(found == checksum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_error_has_a_number_that_leads_back_to_it() {
        for kind in KINDS {
            let status = status_of(kind);
            assert!(status != 0 && status != STATUS_AGAIN);
            assert_eq!(kind_of(status), kind);
        }
        assert_eq!(kind_of(1000), ErrorKind::System);
    }
}
