//! The steps of a verification of metadata, and structures that are the same bytes twice.
//!
//! Invariants: a step looks at a bounded number of structures under each lock.
//!
//! Elsewhere: objects in two slots (`slots::whole`), the structures (`cache::metadata`, `transport::metadata`).

use crate::slots::{Found, Object, check_repairs};
use cbd_types::{MutationPoint, Pmem, Region, Result, VerifiedMetadata};

/// Structures that one step looks at, at most.
pub(crate) const STEP: u64 = 64;

/// Structures of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Area {
    #[default]
    Superblocks,
    Hosts,
    Backends,
    Blkdevs,
    Segments,
    /// What a cache has once, former disks and pins.
    State,
    Tails,
    Marks,
    Logs,
    End,
}

impl Area {
    const ORDER: [Self; 10] = [
        Self::Superblocks,
        Self::Hosts,
        Self::Backends,
        Self::Blkdevs,
        Self::Segments,
        Self::State,
        Self::Tails,
        Self::Marks,
        Self::Logs,
        Self::End,
    ];
}

/// Where a verification of metadata is; it begins at the default.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MetadataPlace {
    area: Area,
    /// The next row or lane of the area.
    next: u64,
    /// Of the log of the lane: the ordinals that are still to be looked at.
    ordinals: Option<(u64, u64)>,
}

impl MetadataPlace {
    /// Whether everything was looked at.
    #[must_use]
    pub fn is_at_end(&self) -> bool {
        self.area == Area::End
    }

    /// The structures that come next.
    pub(crate) const fn area(&self) -> Area {
        self.area
    }

    /// The ordinals of the segments of the lane's log that are still to be looked at. At the beginning of a log these are all up to
    /// `end`: segments that are opened later were stored just then.
    pub(crate) fn in_log(&self, end: u64) -> (u64, u64) {
        self.ordinals.unwrap_or((0, end))
    }

    /// The row or lane that comes next.
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }

    /// Goes on behind the segment with this ordinal, up to `end`.
    pub(crate) const fn go_on_behind(&mut self, ordinal: u64, end: u64) {
        self.ordinals = Some((ordinal + 1, end));
    }

    /// Goes on with the log of the next of so many lanes.
    pub(crate) fn end_log(&mut self, lanes: u64) {
        (self.next, self.ordinals) = (self.next + 1, None);
        if self.next == lanes {
            self.end_area();
        }
    }

    /// Goes on with the next area.
    pub(crate) fn end_area(&mut self) {
        let next = Area::ORDER.into_iter().skip_while(|area| *area != self.area).nth(1);
        *self = Self { area: next.unwrap_or(Area::End), ..Self::default() };
    }

    /// The rows or lanes of this step, of `count` in all. The place is behind them then.
    pub(crate) fn take(&mut self, count: u64) -> core::ops::Range<usize> {
        let end = (self.next + STEP).min(count);
        let taken = self.next as usize..end as usize;
        self.next = end;
        if end == count {
            self.end_area();
        }
        taken
    }
}

/// Looks at both copies of a structure that is the same bytes twice, and durably stores the damaged one again. `is_good` tells
/// whether bytes are what was stored last. The caller has the lock of the structure's writer.
pub(crate) fn verify_copies<P: Pmem, const BYTES: usize>(
    region: &Region<P>,
    object: Object,
    at: [u64; 2],
    is_good: impl Fn(&[u8; BYTES]) -> bool,
    found: &mut VerifiedMetadata,
) {
    found.structures += 1;
    let mut copies = [[0; BYTES]; 2];
    let mut states = [Found::Whole; 2];
    for (number, copy) in copies.iter_mut().enumerate() {
        states[number] = match region.load(at[number], copy) {
            Err(_) => Found::Unreadable,
            Ok(()) if is_good(copy) => Found::Whole,
            Ok(()) => Found::Damaged,
        };
    }
    let good = states.iter().position(|state| *state == Found::Whole);
    for number in [0, 1].into_iter().filter(|number| states[*number] != Found::Whole) {
        let mut is_repaired = false;
        if let Some(good) = good
            && states[number] == Found::Damaged
        {
            match restore(region, at[number], &copies[good]) {
                Ok(()) => is_repaired = true,
                Err(error) => drop(found.error.get_or_insert(error)),
            }
        }
        object.note(found, at[number], states[number], is_repaired);
    }
}

/// Durably stores the bytes of the good copy over the damaged one.
fn restore<P: Pmem>(region: &Region<P>, at: u64, bytes: &[u8]) -> Result<()> {
    check_repairs(region)?;
    let stored = region.store(at, bytes);
    region.fence(MutationPoint::VerifyHeaderFence, stored);
    region.check_stores(MutationPoint::VerifyStoreCheck)
}
