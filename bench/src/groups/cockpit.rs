//! What users are told: what it costs to count their requests, and how near the advice about sizes is to the caches themselves.

mod advice;
mod cost;
mod real;

use crate::Figures;
use crate::options::Options;
use cbd_types::Result;

/// Measures everything.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    cost::run(options, figures)?;
    advice::run(options, figures)
}
