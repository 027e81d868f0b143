//! The two contestants: an aged cache and bare memory, in one mapping.

use crate::rig::{self, Rig};
use crate::rounded;
use crate::scale::{Scale, Sources, random_places};
use crate::turns::Turn;
use crate::window::{Store, StoreLog, Window};
use cbd_engine::Cache;
use cbd_pmem::Mapping;
use cbd_runtime::ProcessEnvironment;
use cbd_types::{Pmem, Result};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::sync::Arc;

/// How many times the size of the region is written to age the cache.
const AGE: u64 = 3;

/// A cache and bare memory of the same size.
pub struct Pair {
    /// The cache.
    pub rig: Rig,
    /// The other half of the mapping.
    pub bare: Window<Mapping>,
    /// The sizes.
    pub scale: Scale,
    /// Turns of each contestant.
    pub rounds: usize,
    /// Records where the cache stores data.
    log: Arc<StoreLog>,
    random: SmallRng,
    turns_since_rest: usize,
}

impl Pair {
    /// Ages a new cache in the first half of `mapping`, with at most `lanes` lanes if given.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn new(mapping: &Arc<Mapping>, scale: Scale, rounds: usize, lanes: Option<u32>) -> Result<Self> {
        let bare = Window::new(Arc::clone(mapping), scale.region, scale.region);
        bare.fill();
        let memory = Window::new(Arc::clone(mapping), 0, scale.region);
        let log = memory.log();
        let mut rig = match lanes {
            Some(lanes) => Rig::with_lanes(memory, scale.device, lanes)?,
            None => Rig::new(memory, scale.device)?,
        };
        let mut random = SmallRng::seed_from_u64(2);
        let around = usize::try_from(AGE * scale.region / 4096).unwrap_or(usize::MAX);
        rig.write_all(&random_places(&mut random, scale.device, 4096, around), &Sources::new(4096))?;
        rig.settle()?;
        Ok(Self { rig, bare, scale, rounds, log, random, turns_since_rest: 0 })
    }

    /// A description of the memory.
    pub fn describe(&self) -> String {
        self.bare.describe()
    }

    /// The share of overwrites among writes to random offsets.
    pub fn overwrites_share(&self) -> f64 {
        rounded(self.rig.status().index_blocks as f64 * 4096.0 / self.scale.device as f64, 3)
    }

    /// Random offsets for `turns` turns of operations of `length` bytes.
    pub fn places(&mut self, length: u64, turns: usize) -> Vec<u64> {
        random_places(&mut self.random, self.scale.device, length, turns * self.scale.turn(length))
    }

    /// The offsets at which the engine stores writes of `length` bytes; the copy repeats them.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn stores(&mut self, length: u64) -> Result<Vec<Store>> {
        let sources = Sources::new(length as usize);
        let places = self.places(length, self.scale.turns_between_rests);
        let log = Arc::clone(&self.log);
        let (written, stores) = log.record(|| self.rig.write_all(&places, &sources));
        written?;
        self.rest()?;
        // Background work also moves data; those stores are not client writes.
        Ok(stores.into_iter().filter(|store| store.length as u64 == length).collect())
    }

    /// Runs background work if the free part of the cache may be too small for `turns` turns of writes. Call it before these
    /// turns.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn rest_before(&mut self, turns: usize) -> Result<()> {
        if self.turns_since_rest + turns > self.scale.turns_between_rests {
            self.rest()?;
        }
        self.turns_since_rest += turns;
        Ok(())
    }

    fn rest(&mut self) -> Result<()> {
        self.turns_since_rest = 0;
        self.rig.settle()
    }

    /// A turn that consists only of writes.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn write_turn(&mut self, length: u64, sources: &Sources) -> Result<Turn> {
        self.rest_before(1)?;
        let places = self.places(length, 1);
        write(self.rig.cache(), &places, sources)
    }
}

/// Writes to all `places`, without background work.
///
/// # Errors
/// The errors of the engine, and an error if the cache has no space.
pub fn write<P: Pmem + 'static>(
    cache: &Cache<ProcessEnvironment<P>>,
    places: &[u64],
    sources: &Sources,
) -> Result<Turn> {
    Turn::measure(places.len(), || {
        for (number, &place) in places.iter().enumerate() {
            if !rig::write(cache, place, sources.get(number))? {
                return Err(rig::no_space());
            }
        }
        Ok(())
    })
}
