//! A cache that is full to the brim and aged, of random 4 KiB blocks.

use crate::rig::{self, Rig};
use crate::scale::{Sources, random_places};
use crate::window::Window;
use cbd_pmem::Mapping;
use cbd_types::Result;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::Arc;

/// Blocks on the device for each that fits into the cache, so that nearly all that is cached is a block of its own.
const SPREAD: u64 = 16;

/// How often the cache is written around.
const AGE: u64 = 2;

/// Fills a new cache in the first `region` bytes of `mapping`.
///
/// # Errors
/// Those of the engine.
pub fn rig(mapping: &Arc<Mapping>, region: u64) -> Result<Rig> {
    let mut rig = Rig::new(Window::new(Arc::clone(mapping), 0, region), SPREAD * region)?;
    let sources = Sources::new(4096);
    let mut random = SmallRng::seed_from_u64(4);
    let mut places = |count| random_places(&mut random, SPREAD * region, 4096, count);
    // In pieces, for memory is counted, and the places themselves are not to be.
    for _ in 0..AGE * region / 4096 / PIECE as u64 {
        rig.write_all(&places(PIECE), &sources)?;
    }
    // And up to the brim.
    loop {
        for (number, &place) in places(PIECE).iter().enumerate() {
            if !rig::write(rig.cache(), place, sources.get(number))? {
                return Ok(rig);
            }
        }
    }
}

/// Writes for which places are made at once.
const PIECE: usize = 1024;
