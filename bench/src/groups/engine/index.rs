//! What the index weighs when a cache is full of random 4 KiB blocks, counted by the allocator, and how fast it is
//! rebuilt.

use super::rig::Rig;
use super::scale::{Scale, Sources, random_places};
use crate::window::Window;
use crate::{Figures, counting, rounded};
use cbd_pmem::Mapping;
use cbd_types::Result;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::Arc;

/// Blocks on the device for each that fits into the cache, so that nearly all that is cached is a block of its own.
const SPREAD: u64 = 16;

/// Weighs the index.
pub fn measure(scale: Scale, figures: &mut Figures) -> Result<()> {
    let region = scale.index_region;
    let mapping = Arc::new(Mapping::anonymous(region)?);
    let memory = || Window::new(Arc::clone(&mapping), 0, region);
    let sources = Sources::new(4096);
    let mut random = SmallRng::seed_from_u64(4);
    // Twice around, in pieces, for the places themselves are not to be counted.
    let mut fill = |rig: &mut Rig| -> Result<()> {
        for _ in 0..8 {
            let count = usize::try_from(region / 4096 / 4).unwrap_or(usize::MAX);
            rig.write_all(&random_places(&mut random, SPREAD * region, 4096, count), &sources)?;
        }
        // And up to the brim.
        loop {
            let places = random_places(&mut random, SPREAD * region, 4096, 1024);
            for (number, &place) in places.iter().enumerate() {
                if !rig.write(place, sources.get(number))? {
                    return Ok(());
                }
            }
        }
    };

    counting::start();
    let before = counting::live_bytes();
    let mut rig = Rig::new(memory(), SPREAD * region)?;
    fill(&mut rig)?;
    let status = rig.status();
    let rig = rig.without_maintenance();
    let held = (counting::live_bytes() - before) as f64;
    drop(rig);
    let blocks = status.index_blocks as f64;
    figures.add("index_region_bytes", region);
    figures.add("index_blocks", status.index_blocks);
    figures.add("index_bytes_per_block", rounded(held / blocks, 2));
    // A smaller region in a quick run is projected to the size that is promised.
    figures.add("index_bytes_4gib", (held * ((4_u64 << 30) as f64 / region as f64)).round());
    figures.add("index_bytes_by_its_own_account", status.index_bytes);

    let records = blocks;
    let (_, seconds) = Rig::reopen(memory())?;
    figures.add("recovery_seconds", rounded(seconds, 3));
    figures.add("recovery_million_records_per_second", rounded(records / seconds / 1e6, 2));
    Ok(())
}
