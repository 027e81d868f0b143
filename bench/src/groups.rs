//! What can be measured.

mod engine;

use crate::Figures;
use crate::options::Options;
use cbd_types::Result;

/// Figures that belong together.
pub struct Group {
    /// What it is called.
    pub name: &'static str,
    /// Measures.
    pub run: fn(&Options, &mut Figures) -> Result<()>,
}

/// All groups.
pub const GROUPS: [Group; 1] = [Group { name: "engine", run: engine::run }];
