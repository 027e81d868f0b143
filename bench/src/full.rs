//! A completely full, aged cache of random 4 KiB blocks.

use crate::rig::{self, Rig};
use crate::scale::{Sources, random_places};
use crate::window::Window;
use cbd_pmem::Mapping;
use cbd_types::Result;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::Arc;

/// Blocks on the device for each block of the cache, so that nearly all cached blocks are isolated.
const SPREAD: u64 = 16;

/// How many times the size of the cache is written.
const AGE: u64 = 2;

/// Fills a new cache in the first `region` bytes of `mapping`.
///
/// # Errors
/// The errors of the engine.
pub fn rig(mapping: &Arc<Mapping>, region: u64) -> Result<Rig> {
    let mut rig = Rig::new(Window::new(Arc::clone(mapping), 0, region), SPREAD * region)?;
    let sources = Sources::new(4096);
    let mut random = SmallRng::seed_from_u64(4);
    let mut places = |count| random_places(&mut random, SPREAD * region, 4096, count);
    // Offsets are generated in pieces, because memory is counted, and the offsets must not be part of the count.
    for _ in 0..AGE * region / 4096 / PIECE as u64 {
        rig.write_all(&places(PIECE), &sources)?;
    }
    fill(&rig, places, &sources)?;
    Ok(rig)
}

/// Writes other blocks to a cache from [`rig()`], as many as half of it holds, and then until it is full again.
///
/// # Errors
/// The errors of the engine.
pub fn write_again(rig: &mut Rig, region: u64) -> Result<()> {
    let sources = Sources::new(4096);
    let mut random = SmallRng::seed_from_u64(5);
    let mut places = |count| random_places(&mut random, SPREAD * region, 4096, count);
    for _ in 0..region / 2 / 4096 / PIECE as u64 {
        rig.write_all(&places(PIECE), &sources)?;
    }
    fill(rig, places, &sources)
}

/// Writes until the cache is full.
fn fill(rig: &Rig, mut places: impl FnMut(usize) -> Vec<u64>, sources: &Sources) -> Result<()> {
    loop {
        for (number, &place) in places(PIECE).iter().enumerate() {
            if !rig::write(rig.cache(), place, sources.get(number))? {
                return Ok(());
            }
        }
    }
}

/// Number of writes for which offsets are generated at once.
const PIECE: usize = 1024;
