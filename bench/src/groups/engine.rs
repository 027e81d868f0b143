//! The engine in process: against the bare persistent copy, and what its index weighs.
//!
//! Always true here: engine and copy work in two halves of one mapping, copy from the same sources, and the copy goes to
//! the places to which the engine put the same writes; maintenance runs between the turns, not in them.

mod copy;
mod index;
mod reads;
mod rig;
mod scale;
mod writes;

use crate::Figures;
use crate::options::Options;
use cbd_types::Result;
use scale::Scale;

/// Measures.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    writes::measure(options, scale, figures)?;
    // Last, for from then on every allocation is counted.
    index::measure(scale, figures)
}
