//! Random writes, each durable when it completes, into an aged cache.

use super::copy;
use super::pair::Pair;
use crate::scale::Sources;
use crate::turns::{Comparison, compare};
use crate::{Figures, rounded};
use cbd_types::Result;
use std::cell::RefCell;

/// Writes of 4 KiB, and the number of bytes that they store.
///
/// # Errors
/// The errors of the engine.
pub fn pages(pair: &mut Pair, figures: &mut Figures) -> Result<()> {
    let before = pair.rig.status();
    let found = against_copy(pair, 4096)?;
    let after = pair.rig.status();
    figures.add_comparison("write_4k", "copy", "copy_4k", &found);
    let stored = (after.stored_bytes - before.stored_bytes) as f64;
    let written = (after.written_bytes - before.written_bytes) as f64;
    figures.add("write_amplification", rounded(stored / written, 4));
    Ok(())
}

/// Writes of 512 bytes.
///
/// # Errors
/// The errors of the engine.
pub fn sectors(pair: &mut Pair, figures: &mut Figures) -> Result<()> {
    let found = against_copy(pair, 512)?;
    figures.add_comparison("write_512", "copy", "copy_512", &found);
    Ok(())
}

/// Writes of 64 KiB.
///
/// # Errors
/// The errors of the engine.
pub fn large(pair: &mut Pair, figures: &mut Figures) -> Result<()> {
    let found = against_copy(pair, 64 << 10)?;
    figures.add_comparison("write_64k", "copy", "copy_64k", &found);
    Ok(())
}

/// Writes of `length` bytes against the same number of copies to the same offsets of the region.
fn against_copy(pair: &mut Pair, length: u64) -> Result<Comparison> {
    let sources = Sources::new(length as usize);
    let stores = pair.stores(length)?;
    let mut copies = stores.chunks(pair.scale.turn(length)).cycle();
    let rounds = pair.rounds;
    let pair = RefCell::new(pair);
    compare(
        rounds,
        || pair.borrow_mut().write_turn(length, &sources),
        || copy::turn(&pair.borrow().bare, &sources, copies.next().unwrap_or_default()),
    )
}
