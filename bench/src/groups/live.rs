//! Caches that change while clients use their device.

mod stall;

use crate::figures::Figures;
use crate::options::Options;
use cbd_types::Result;

/// Runs the measurements.
///
/// # Errors
/// The errors of the engine and of the system, and wrong data.
pub fn run(_options: &Options, figures: &mut Figures) -> Result<()> {
    stall::run(figures)
}
