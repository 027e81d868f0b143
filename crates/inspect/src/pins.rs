//! The two copies of a cache's list of pins, as they are on the medium.
//!
//! Invariants: a copy is read whole only if its header names this cache and a length that fits.
//!
//! Elsewhere: what a finding says (`check`), and how a list is shown (`dump`).

use crate::Bytes;
use crate::check::StateLocation;
use cbd_format::Pin;
use cbd_format::pins::{PinCopy, PinListHeader, claimed_length, decode};

/// A copy.
pub(crate) struct ListRead {
    /// Its offset in the region.
    pub(crate) at: u64,
    /// Its header as it is; zeroes if the memory fails.
    pub(crate) header: Vec<u8>,
    /// The memory of the header can be read.
    pub(crate) is_readable: bool,
    /// Bytes of the list that the header claims, or of the header alone.
    pub(crate) length: u64,
    /// What it says.
    pub(crate) copy: PinCopy,
}

impl ListRead {
    fn read(bytes: &dyn Bytes, cache_id: u64, at: u64, most: u64) -> Self {
        let mut list = vec![0; size_of::<PinListHeader>()];
        let is_readable = bytes.load(at, &mut list).is_ok();
        let header = list.clone();
        if !is_readable {
            return Self { at, length: list.len() as u64, header, is_readable, copy: PinCopy::Damaged };
        }
        if let Some(length) = claimed_length(cache_id, &header, most) {
            list.resize(length, 0);
        }
        let is_whole = bytes.load(at, &mut list).is_ok();
        let copy = if is_whole { decode(cache_id, &list) } else { PinCopy::Damaged };
        Self { at, length: list.len() as u64, header, is_readable, copy }
    }

    /// The number and the pins of a valid copy.
    pub(crate) const fn list(&self) -> Option<(u64, &Vec<Pin>)> {
        match &self.copy {
            PinCopy::Valid(number, pins) => Some((*number, pins)),
            PinCopy::Blank | PinCopy::Damaged => None,
        }
    }
}

/// Both copies; none if the cache has no room for a list.
pub(crate) fn read_lists(bytes: &dyn Bytes, cache_id: u64, state: &StateLocation) -> Option<[ListRead; 2]> {
    let (at, most) = state.pins()?;
    Some(at.map(|at| ListRead::read(bytes, cache_id, at, most)))
}

/// The copy that counts: the valid one with the larger number.
pub(crate) fn newest(lists: &[ListRead; 2]) -> Option<usize> {
    match [lists[0].list(), lists[1].list()] {
        [Some((first, _)), Some((second, _))] => Some(usize::from(second > first)),
        [Some(_), None] => Some(0),
        [None, Some(_)] => Some(1),
        [None, None] => None,
    }
}
