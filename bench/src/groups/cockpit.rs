//! What users are told: how near the advice about sizes is to the caches themselves.

mod advice;
mod real;

use crate::Figures;
use crate::options::Options;
use cbd_types::Result;

/// Measures everything.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    advice::run(options, figures)
}
