//! The memory of the index of a cache that is full of random 4 KiB blocks, counted by the allocator, and the
//! memory of a daemon.

mod daemon;

use crate::full;
use crate::options::Options;
use crate::scale::Scale;
use crate::{Figures, counting, rounded};
use cbd_pmem::Mapping;
use cbd_types::Result;
use serde_json::{Map, json};
use std::sync::Arc;

/// Measures the index, and a daemon.
///
/// # Errors
/// The errors of the engine and of the system.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    index(options, figures)?;
    daemon::run(options, figures)
}

fn index(options: &Options, figures: &mut Figures) -> Result<()> {
    let region = Scale::of(options).full_region;
    let mapping = Arc::new(Mapping::anonymous(region)?);
    counting::start();
    let before = counting::live_bytes();
    let rig = full::rig(&mapping, region)?;
    let status = rig.status();
    let rig = rig.without_worker();
    let held = (counting::live_bytes() - before) as f64;
    drop(rig);

    figures.enter("engine");
    let mut detail = Map::new();
    let absolute = format!("{:.1} MB for {} blocks", held / 1e6, status.index_blocks);
    detail.insert("absolute".to_owned(), json!(absolute));
    detail.insert("region_bytes".to_owned(), json!(region));
    detail.insert("blocks".to_owned(), json!(status.index_blocks));
    detail.insert("allocated_bytes".to_owned(), json!(held));
    detail.insert("bytes_by_its_own_account".to_owned(), json!(status.index_bytes));
    let share = held / status.index_blocks as f64;
    figures.add_detailed("index_bytes_per_block", rounded(share, 2), detail, None);
    // The figure of a smaller region in a quick run is extrapolated to the size of the budget.
    figures.add("index_bytes_4gib", (held * ((4_u64 << 30) as f64 / region as f64)).round());
    Ok(())
}
