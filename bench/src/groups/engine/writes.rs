//! Random writes, each durable when it completes, into an aged cache.

use super::copy;
use super::reads;
use super::rig::Rig;
use super::scale::{Scale, Sources, random_places};
use crate::options::Options;
use crate::turns::{Comparison, Turn, compare};
use crate::window::Window;
use crate::{Figures, rounded};
use cbd_pmem::Mapping;
use cbd_types::{ByteRange, Error, ErrorKind, Pmem, Result};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::cell::RefCell;
use std::sync::Arc;

/// How often the aged cache has been written around.
const AGE: u64 = 3;

/// Writes of 4 KiB and 512 bytes against the bare copy, what a flush adds, and reads.
pub fn measure(options: &Options, scale: Scale, figures: &mut Figures) -> Result<()> {
    let mapping = Arc::new(Mapping::anonymous(2 * scale.region)?);
    let bare = Window::new(Arc::clone(&mapping), scale.region, scale.region);
    touch(&bare);
    let mut rig = Rig::new(Window::new(Arc::clone(&mapping), 0, scale.region), scale.device)?;
    let mut random = SmallRng::seed_from_u64(2);

    figures.add("memory", mapping.describe());
    figures.add("region_bytes", scale.region);
    figures.add("device_bytes", scale.device);
    let sources = Sources::new(4096);
    let around = usize::try_from(AGE * scale.region / 4096).unwrap_or(usize::MAX);
    rig.write_all(&random_places(&mut random, scale.device, 4096, around), &sources)?;
    rig.settle()?;
    let status = rig.status();
    figures.add("lanes", status.lanes);
    let cached = status.index_blocks as f64 * 4096.0 / scale.device as f64;
    figures.add("overwrites_share", rounded(cached, 3));

    let before = rig.status();
    let found = against_copy(options, scale, &mut rig, &bare, &mut random, 4096)?;
    let after = rig.status();
    figures.add_comparison("write_4k", "copy", "copy_4k", &found);
    let stored = (after.stored_bytes - before.stored_bytes) as f64;
    let written = (after.written_bytes - before.written_bytes) as f64;
    figures.add("stored_over_written_4k", rounded(stored / written, 4));

    let found = with_flush(options, &mut rig, &mut random, scale, false)?;
    figures.add("flush_after_write_4k_ns", rounded(found.a.median - found.b.median, 1));
    figures.add_comparison("write_4k_and_flush", "write", "write_4k_before_flush", &found);
    let found = with_flush(options, &mut rig, &mut random, scale, true)?;
    figures.add("fua_of_write_4k_ns", rounded(found.a.median - found.b.median, 1));
    figures.add_comparison("write_4k_fua", "write", "write_4k_without_fua", &found);

    reads::measure(options, scale, &mut rig, &bare, figures)?;

    let found = against_copy(options, scale, &mut rig, &bare, &mut random, 512)?;
    figures.add_comparison("write_512", "copy", "copy_512", &found);
    Ok(())
}

/// Writes of `length` bytes against copies of as many to the same places of the region.
fn against_copy(
    options: &Options,
    scale: Scale,
    rig: &mut Rig,
    bare: &Window<Mapping>,
    random: &mut SmallRng,
    length: u64,
) -> Result<Comparison> {
    let sources = Sources::new(length as usize);
    let places = random_places(random, scale.device, length, scale.between_rests());
    let log = rig.log();
    let (written, stores) = log.record(|| rig.write_all(&places, &sources));
    written?;
    // What maintenance moved is not a write of ours.
    let stores: Vec<_> = stores.into_iter().filter(|store| store.length as u64 == length).collect();
    let mut copies = stores.chunks(scale.turn).cycle();
    let mut rests = Rests::new(scale);
    compare(
        options.rounds(),
        || {
            rests.rest(rig)?;
            turn(rig, &random_places(random, scale.device, length, scale.turn), &sources)
        },
        || copy::turn(bare, &sources, copies.next().unwrap_or_default()),
    )
}

/// A write with a flush or FUA after it, against the write alone.
fn with_flush(
    options: &Options,
    rig: &mut Rig,
    random: &mut SmallRng,
    scale: Scale,
    only_own_lanes: bool,
) -> Result<Comparison> {
    let sources = Sources::new(4096);
    let rig = RefCell::new(rig);
    let random = RefCell::new(random);
    let places = || random_places(&mut random.borrow_mut(), scale.device, 4096, scale.turn);
    let rests = RefCell::new(Rests::new(scale));
    compare(
        // Each flush is an epoch to write back, so there are fewer turns.
        options.rounds() / 4,
        || {
            rests.borrow_mut().rest(&mut rig.borrow_mut())?;
            let rig = rig.borrow();
            let places = places();
            Turn::measure(places.len(), || {
                for (number, &place) in places.iter().enumerate() {
                    if !rig.write(place, sources.get(number))? {
                        return Err(no_space());
                    }
                    if only_own_lanes {
                        rig.cache().force_unit_access(ByteRange::at(place, 4096))?;
                    } else {
                        rig.cache().flush()?;
                    }
                }
                Ok(())
            })
        },
        || {
            rests.borrow_mut().rest(&mut rig.borrow_mut())?;
            turn(&rig.borrow(), &places(), &sources)
        },
    )
}

/// When maintenance runs.
struct Rests {
    every: usize,
    turns: usize,
}

impl Rests {
    fn new(scale: Scale) -> Self {
        Self { every: scale.turns_between_rests, turns: 0 }
    }

    /// To be called before each turn.
    fn rest(&mut self, rig: &mut Rig) -> Result<()> {
        if self.turns.is_multiple_of(self.every) {
            rig.settle()?;
        }
        self.turns += 1;
        Ok(())
    }
}

/// Writes, and nothing else.
fn turn(rig: &Rig, places: &[u64], sources: &Sources) -> Result<Turn> {
    Turn::measure(places.len(), || {
        for (number, &place) in places.iter().enumerate() {
            if !rig.write(place, sources.get(number))? {
                return Err(no_space());
            }
        }
        Ok(())
    })
}

fn no_space() -> Error {
    Error::new(ErrorKind::NoSpace, "the free part of the cache is too small for a turn without maintenance")
}

/// Stores to every page once, so that no turn pays for the system's work on first use.
fn touch(memory: &Window<Mapping>) {
    let page = [0; 4096];
    for at in (0..memory.len()).step_by(4096) {
        memory.store(at, &page);
    }
    memory.fence();
}
