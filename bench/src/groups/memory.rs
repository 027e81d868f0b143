//! The memory of the index of a cache that is full of random 4 KiB blocks, counted by the allocator, and the
//! memory of a daemon.

mod daemon;

use crate::full;
use crate::options::Options;
use crate::rig::Rig;
use crate::scale::Scale;
use crate::{Figures, counting, rounded};
use cbd_engine::IndexResize;
use cbd_pmem::Mapping;
use cbd_types::Result;
use serde_json::{Map, json};
use std::sync::Arc;
use std::time::Instant;

/// Measures the index, and a daemon.
///
/// # Errors
/// The errors of the engine and of the system.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    index(options, figures)?;
    daemon::run(options, figures)
}

/// What resizes of the index of a full cache take and leave.
struct Resized {
    /// Bytes for a block when the index has grown to twice its size and the cache has been written again, and when the index was
    /// twice as large and has shrunk. Background worker included.
    after_growth: f64,
    after_shrink: f64,
    /// The duration of a resize to twice the size, and of its steps: the median and the slowest of a hundred.
    resize_ms: f64,
    step_us: f64,
    step_us_p99: f64,
}

/// Resizes the index of a full cache, which ends with its first size. `before` is the memory without the cache.
fn resize(rig: &mut Rig, region: u64, before: i64) -> Result<Resized> {
    let share = |rig: &Rig| (counting::live_bytes() - before) as f64 / rig.status().index_blocks as f64;
    let segments = rig.status().segments;
    let blocks = rig.cache().index_blocks_per_lane(segments);
    rig.cache().resize_index(blocks / 2, || {})?;
    let mut steps = Vec::with_capacity(1 << 16);
    let mut resize = IndexResize::new(blocks);
    let begun = Instant::now();
    loop {
        let step = Instant::now();
        let is_more = rig.cache().step_index_resize(&mut resize)?;
        steps.push(step.elapsed().as_secs_f64() * 1e6);
        if !is_more {
            break;
        }
    }
    let resize_ms = begun.elapsed().as_secs_f64() * 1e3;
    steps.sort_unstable_by(f64::total_cmp);
    let (step_us, step_us_p99) = (steps[steps.len() / 2], steps[steps.len() * 99 / 100]);
    drop(steps);
    full::write_again(rig, region)?;
    let after_growth = share(rig);
    rig.cache().resize_index(2 * blocks, || {})?;
    rig.cache().resize_index(blocks, || {})?;
    Ok(Resized { after_growth, after_shrink: share(rig), resize_ms, step_us, step_us_p99 })
}

fn index(options: &Options, figures: &mut Figures) -> Result<()> {
    let region = Scale::of(options).full_region;
    let mapping = Arc::new(Mapping::anonymous(region)?);
    counting::start();
    let before = counting::live_bytes();
    let mut rig = full::rig(&mapping, region)?;
    let status = rig.status();
    let with_worker = counting::live_bytes();
    let resized = resize(&mut rig, region, before)?;
    let resized_with_worker = counting::live_bytes();
    let rig = rig.without_worker();
    // Without what the background worker holds.
    let held = (counting::live_bytes() - before + with_worker - resized_with_worker) as f64;
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
    figures.add("index_bytes_after_growth", rounded(resized.after_growth, 2));
    figures.add("index_bytes_after_shrink", rounded(resized.after_shrink, 2));
    figures.add("index_resize_ms", rounded(resized.resize_ms, 1));
    figures.add("index_resize_step_us", rounded(resized.step_us, 1));
    figures.add("index_resize_step_us_p99", rounded(resized.step_us_p99, 1));
    // The figure of a smaller region in a quick run is extrapolated to the size of the budget.
    figures.add("index_bytes_4gib", (held * ((4_u64 << 30) as f64 / region as f64)).round());
    Ok(())
}
