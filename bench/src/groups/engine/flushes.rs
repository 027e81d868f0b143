//! The time of a flush after a write, and of FUA, in a cache of 16 lanes.

use super::pair::Pair;
use crate::Figures;
use crate::rig;
use crate::scale::Sources;
use crate::turns::{Comparison, Turn, compare};
use cbd_types::{ByteRange, Result};
use std::cell::RefCell;

/// Divisor of the number of turns: each flush closes an epoch that must be written back, so there are fewer turns.
const FEWER: usize = 4;

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine.
pub fn measure(pair: &mut Pair, figures: &mut Figures) -> Result<()> {
    figures.add("flush_lanes", pair.rig.status().lanes);
    let found = with_flush(pair, false)?;
    figures.add_difference("flush_extra_us", "write_4k_and_flush", "write_4k", &found);
    let found = with_flush(pair, true)?;
    figures.add_difference("fua_extra_us", "write_4k_fua", "write_4k", &found);
    Ok(())
}

/// A write followed by a flush, or a FUA write, against the write alone.
fn with_flush(pair: &mut Pair, only_own_lanes: bool) -> Result<Comparison> {
    let sources = Sources::new(4096);
    let rounds = pair.rounds.div_ceil(FEWER);
    let pair = RefCell::new(pair);
    compare(
        rounds,
        || {
            let pair = &mut *pair.borrow_mut();
            pair.rest_before(1)?;
            let places = pair.places(4096, 1);
            let cache = pair.rig.cache();
            Turn::measure(places.len(), || {
                for (number, &place) in places.iter().enumerate() {
                    if !rig::write(cache, place, sources.get(number))? {
                        return Err(rig::no_space());
                    }
                    if only_own_lanes {
                        cache.force_unit_access(&[ByteRange::at(place, 4096)])?;
                    } else {
                        cache.flush()?;
                    }
                }
                Ok(())
            })
        },
        || pair.borrow_mut().write_turn(4096, &sources),
    )
}
