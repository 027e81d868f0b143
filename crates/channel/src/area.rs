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

/// Makes room for so many more items.
///
/// # Errors
/// [`ErrorKind::System`] without memory.
pub fn reserve<T>(items: &mut Vec<T>, more: usize) -> Result<()> {
    items.try_reserve(more).map_err(|_| Error::new(ErrorKind::System, "there is no memory for the channel"))
}

/// Stores a line and makes it visible.
pub fn publish_line<M: Pmem>(region: &Region<M>, point: MutationPoint, at: u64, line: &[u8; LINE as usize]) {
    region.share(point, at, line);
}

/// A line of the other side, as it is now; `None` if the memory fails.
pub fn observe_line<M: Pmem>(region: &Region<M>, at: u64) -> Option<[u8; LINE as usize]> {
    let mut line = [0; LINE as usize];
    region.observe(MutationPoint::ChannelObserve, at, LINE);
    region.load(at, &mut line).ok()?;
    Some(line)
}

/// Stores a header in both of its lines and makes it visible. The second line is first: while the first one is incomplete, the other
/// side and a later process of this one find the new header in the second.
pub fn publish_header<M: Pmem>(region: &Region<M>, area: u64, line: &[u8; LINE as usize]) {
    if MutationPoint::ChannelHeaderSecond.is_active() {
        publish_line(region, MutationPoint::ChannelHeaderPublish, area + LINE, line);
    }
    publish_line(region, MutationPoint::ChannelHeaderPublish, area, line);
}

/// The header of an area, as it is now; `None` if neither line has one.
pub fn observe_header<M: Pmem, H>(
    region: &Region<M>,
    area: u64,
    verify: impl Fn(&[u8; LINE as usize]) -> Option<H>,
) -> Option<H> {
    let read = |at| observe_line(region, at).and_then(|line| verify(&line));
    read(area).or_else(|| read(area + LINE))
}

/// Clears the checksum of a line that a former process has not stored completely. Otherwise the other side could find the line of the
/// former process whole while the next one is stored over it: the words that are missing may be the same in both.
pub fn clear_torn<M: Pmem>(region: &Region<M>, at: u64, is_whole: impl Fn(&[u8; LINE as usize]) -> bool) {
    let is_whole = observe_line(region, at).is_some_and(|line| is_whole(&line));
    if !is_whole && MutationPoint::ChannelTornCleared.is_active() {
        region.share(MutationPoint::ChannelEntryPublish, at, &[0; 8]);
    }
}

/// Stores data and makes it visible, before what is published after it. Returns its checksum.
pub fn publish_data<M: Pmem>(region: &Region<M>, at: u64, data: &[u8]) -> u32 {
    region.share_summed(MutationPoint::ChannelDataPublish, at, data)
}

/// Copies the other side's data, and returns whether it has this checksum.
///
/// # Errors
/// The memory fails.
pub fn observe_data<M: Pmem>(region: &Region<M>, at: u64, into: &mut [u8], checksum: u32) -> Result<bool> {
    region.observe(MutationPoint::ChannelDataObserve, at, into.len() as u64);
    let found = region.load_summed(at, into)?;
    Ok(MutationPoint::ChannelDataChecksum.holds(found == checksum))
}

/// Copies the other side's data, which is still to be compared with its checksum.
///
/// # Errors
/// The memory fails.
pub fn observe_unverified<M: Pmem>(region: &Region<M>, at: u64, into: &mut [u8]) -> Result<()> {
    region.observe(MutationPoint::ChannelDataObserve, at, into.len() as u64);
    region.load(at, into)
}
