//! What it costs that a region is shared: local writes on a region of four hosts, against the same on a region of one host.
//!
//! Invariants: both regions are files of memory of one size, with caches of one size, of one number of lanes and of one age. The
//! order of the turns alternates. Background work runs between the turns, heartbeats of all hosts throughout.

use super::region::OpenRegion;
use crate::Figures;
use crate::groups::engine::write;
use crate::options::Options;
use crate::rig::Rig;
use crate::scale::{Scale, Sources, random_places};
use crate::turns::{Turn, compare_both_orders};
use cbd_pmem::Mapping;
use cbd_types::{Error, ErrorKind, Result};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::cell::RefCell;

/// Hosts of the shared region.
const HOSTS: usize = 4;

/// How many times as many turns as elsewhere: the difference is small.
const MORE: usize = 2;

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine; [`ErrorKind::Stopped`] if a host falls silent.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    let regions = [OpenRegion::shared(scale.region, HOSTS)?, OpenRegion::of_one_host(scale.region)?];
    // A shared region has tables of each host.
    let free = regions.each_ref().map(|region| region.transport(0).info().free_segments);
    let segments = free[0].min(free[1]);
    let [shared, alone] = regions.each_ref().map(|region| Side::new(region, segments, scale));
    let (shared, alone) = (RefCell::new(shared?), RefCell::new(alone?));
    let lanes = [&shared, &alone].map(|side| side.borrow().rig.status().lanes);
    if lanes[0] != lanes[1] {
        return Err(Error::new(ErrorKind::Damaged, format!("the caches have {lanes:?} lanes")));
    }
    let sources = Sources::new(4096);
    let found = compare_both_orders(
        MORE * options.rounds(),
        || shared.borrow_mut().turn(&sources),
        || alone.borrow_mut().turn(&sources),
    )?;
    regions[0].require_all_alive()?;
    figures.add("shared_hosts", HOSTS);
    figures.add_comparison("shared_write_4k", "unshared", "unshared_write_4k", &found);
    figures.add_ratio("shared_write_cost", &found);
    Ok(())
}

/// An aged cache of the first host of a region.
struct Side {
    rig: Rig<Mapping>,
    scale: Scale,
    random: SmallRng,
    turns_since_rest: usize,
}

impl Side {
    fn new(region: &OpenRegion, segments: u32, scale: Scale) -> Result<Self> {
        let mut random = SmallRng::seed_from_u64(2);
        let rig = region.aged_cache(segments, scale.device, &mut random)?;
        Ok(Self { rig, scale, random, turns_since_rest: 0 })
    }

    /// A turn of random writes of 4 KiB.
    fn turn(&mut self, sources: &Sources) -> Result<Turn> {
        if self.turns_since_rest == self.scale.turns_between_rests {
            self.turns_since_rest = 0;
            self.rig.settle()?;
        }
        self.turns_since_rest += 1;
        let places = random_places(&mut self.random, self.scale.device, 4096, self.scale.turn(4096));
        write(self.rig.cache(), &places, sources)
    }
}
