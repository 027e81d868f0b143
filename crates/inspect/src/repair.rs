//! Repair: restores second copies. No other repair is safe, so the tool makes no other one.
//!
//! Invariants:
//! - a store only overwrites a copy that is damaged, or a version older than its other copy; never the only good one.
//!   So a crash between any two stores leaves the former state, or a better one;
//! - a repaired region recovers to exactly the former result: every repair is first applied to a private copy, and
//!   recovery runs over that copy. If its result differs, the tool stores nothing;
//! - each store is fenced and read back.
//!
//! Elsewhere: asking for confirmation (`cbdctrl`).

use crate::check::{DataChecked, check};
use crate::finding::{Finding, Repair, Severity, SlotKind};
use crate::report::Report;
use crate::{Bytes, PrivateMemory, Progress};
use cbd_engine::{TwoSlots, copy_over};
use cbd_format::{
    AreaHeader, BackendEntry, BlkdevEntry, Drained, FormerDisk, HostEntry, LaneMark, LaneTail, SegmentEntry,
    SlotContent, Vote,
};
use cbd_types::{Error, ErrorKind, Pmem, Region, Result};
use std::sync::Arc;

/// The steps of a repair and its effect.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The findings before the repair.
    pub before: Report,
    /// The findings after the repair.
    pub after: Report,
    /// The steps, in this order.
    pub repairs: Vec<Repair>,
}

impl Plan {
    /// Damage that is left, since it cannot be repaired without guessing.
    pub fn not_repaired(&self) -> impl Iterator<Item = &Finding> {
        self.after.findings.iter().filter(|finding| finding.severity > Severity::Note)
    }
}

/// Plans a repair, and tries it on a private copy.
///
/// # Errors
/// [`ErrorKind::Damaged`] when recovery of the repaired region would have another result. The repair must then not be
/// applied.
pub fn plan(bytes: &Arc<dyn Bytes>, progress: &mut dyn FnMut(Progress)) -> Result<Plan> {
    let before = check(Arc::clone(bytes), DataChecked::Dirty, progress);
    let repairs = before.repairs.clone();
    if repairs.is_empty() {
        return Ok(Plan { after: before.clone(), before, repairs });
    }
    let copy = PrivateMemory::new(Arc::clone(bytes));
    let trial = Region::new(copy.clone());
    for repair in &repairs {
        apply(&trial, repair)?;
    }
    let after = check(Arc::new(copy), DataChecked::Dirty, progress);
    if after.fingerprint != before.fingerprint {
        return Err(Error::new(
            ErrorKind::Damaged,
            "recovery of the repaired region would have another result: nothing was changed; keep a copy of \
             the region and report it",
        ));
    }
    Ok(Plan { before, after, repairs })
}

/// Applies one repair, durably.
///
/// # Errors
/// [`ErrorKind::Media`] when the memory fails or returns other data.
pub fn apply<P: Pmem>(region: &Region<P>, repair: &Repair) -> Result<()> {
    match repair {
        Repair::Copy { from, to, length, .. } => {
            let mut good = vec![0; *length as usize];
            region.load(*from, &mut good)?;
            copy_over(region, *from, *to, good.len())?;
            let mut read = vec![0; good.len()];
            region.load(*to, &mut read)?;
            if read != good {
                return Err(store_failed(repair));
            }
        }
        Repair::Slot { kind, at, seed, .. } => {
            let is_whole = match kind {
                SlotKind::Host => store_newest::<HostEntry, P>(region, *at, *seed),
                SlotKind::Backend => store_newest::<BackendEntry, P>(region, *at, *seed),
                SlotKind::Blkdev => store_newest::<BlkdevEntry, P>(region, *at, *seed),
                SlotKind::SegmentEntry => store_newest::<SegmentEntry, P>(region, *at, *seed),
                SlotKind::Vote => store_newest::<Vote, P>(region, *at, *seed),
                SlotKind::AreaHeader => store_newest::<AreaHeader, P>(region, *at, *seed),
                SlotKind::Drained => store_newest::<Drained, P>(region, *at, *seed),
                SlotKind::Tail => store_newest::<LaneTail, P>(region, *at, *seed),
                SlotKind::Mark => store_newest::<LaneMark, P>(region, *at, *seed),
                SlotKind::Former => store_newest::<FormerDisk, P>(region, *at, *seed),
            };
            if !is_whole {
                return Err(store_failed(repair));
            }
        }
    }
    if region.memory().failed_at().is_some() { Err(store_failed(repair)) } else { Ok(()) }
}

fn store_failed(repair: &Repair) -> Error {
    Error::new(
        ErrorKind::Media,
        format!(
            "a store into the region's memory failed ({repair}): rescue the dirty data, then replace the memory"
        ),
    )
}

/// Stores the newest content into the other slot; returns whether both slots have it now.
fn store_newest<T: SlotContent, P: Pmem>(region: &Region<P>, at: [u64; 2], seed: u64) -> bool {
    let mut slots = TwoSlots::<T>::read(region, at, seed);
    if !slots.store_again(region) {
        return false;
    }
    let sum = |content: &T| cbd_format::crc32c(cbd_format::record::bytes_of(content));
    let expected = slots.content().map(sum);
    let read = at.map(|at| {
        let mut bytes = vec![0; T::SLOT_SIZE];
        region.load(at, &mut bytes).ok()?;
        Some(sum(&cbd_format::Slot::<T>::decode(seed, &bytes)?.content))
    });
    read == [expected; 2]
}
