//! The engine in process, against the bare persistent copy.
//!
//! Invariants: the engine and the copy use two halves of one mapping and copy from the same sources. The copy uses the offsets at
//! which the engine stored the same writes. Background work runs between the turns, not in them.

mod copy;
mod flushes;
mod pair;
mod reads;
mod scaling;
mod writes;

use crate::Figures;
use crate::options::Options;
use crate::scale::Scale;
use cbd_pmem::Mapping;
use cbd_types::Result;
pub use pair::{Pair, write};
use std::sync::Arc;

/// Runs the measurements.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    let mapping = Arc::new(Mapping::anonymous(2 * scale.region)?);
    let mut pair = Pair::new(&mapping, scale, options.rounds(), None)?;
    figures.add("memory", pair.describe());
    figures.add("region_bytes", scale.region);
    figures.add("device_bytes", scale.device);
    figures.add("lanes", pair.rig.status().lanes);
    figures.add("overwrites_share", pair.overwrites_share());
    // In this order: the measurements that change the aged cache least come first.
    writes::pages(&mut pair, figures)?;
    reads::measure(&mut pair, figures)?;
    scaling::measure(&mut pair, figures)?;
    writes::sectors(&mut pair, figures)?;
    writes::large(&mut pair, figures)?;
    drop(pair);
    flushes::measure(&mut Pair::new(&mapping, scale, options.rounds(), Some(16))?, figures)
}
