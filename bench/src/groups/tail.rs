//! The slowest 4 KiB writes while writeback and reclaim run, against the slowest bare copies, in turns.
//!
//! Invariants: the background worker runs during the turns of both contestants, on another processor if there is one. The disk
//! completes every operation at once, so the worker is never idle. No write waits for space, or the wait is counted and reported.
//! Every operation is timed, for both contestants alike.

use crate::figures::{Certainty, Figures};
use crate::live::Live;
use crate::options::Options;
use crate::processors::Processors;
use crate::scale::{Scale, Sources, random_places};
use crate::statistics::{Summary, median_range, percentile, rounded};
use crate::window::{Store, Window};
use cbd_pmem::Mapping;
use cbd_types::{Pmem, Result};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Operations in a turn.
const TURN: usize = 2048;

/// Number of parts of the run, from which the scatter of the figure is computed.
const PARTS: usize = 10;

/// The part of the distribution that is shown: shares of faster operations.
const SHARES: [f64; 7] = [0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 1.0];

/// A ratio of the slowest operations with a wider range than this share is reported as uncertain.
const NOISY: f64 = 0.5;

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine and of the system.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    let mapping = Arc::new(Mapping::anonymous(2 * scale.region)?);
    let bare = Window::new(Arc::clone(&mapping), scale.region, scale.region);
    let memory = Window::new(Arc::clone(&mapping), 0, scale.region);
    let (log, processors) = (memory.log(), Arc::new(Processors::new()?));
    let theirs = Arc::clone(&processors);
    // If the thread cannot be pinned, it runs wherever the system schedules it.
    let live = Live::new(memory, scale.device, move || drop(theirs.pin(1)))?;
    let mut random = SmallRng::seed_from_u64(6);
    live.age(&mut random, scale.device, 2 * scale.region)?;
    let (aged, stores) = log.record(|| live.age(&mut random, scale.device, scale.region / 4));
    aged?;
    let stores: Vec<_> = stores.into_iter().filter(|store| store.length == 4096).collect();
    bare.fill();

    processors.pin(0)?;
    let found = turns(&live, &bare, &stores, scale, &mut random);
    processors.unpin()?;
    report(&found?, figures);
    Ok(())
}

/// The time of each operation, in nanoseconds and in the order of the run.
struct Found {
    writes: Vec<u32>,
    copies: Vec<u32>,
    waited_for_space: u64,
    written_back_bytes: u64,
}

fn turns(
    live: &Live<Window<Mapping>>,
    bare: &Window<Mapping>,
    stores: &[Store],
    scale: Scale,
    random: &mut SmallRng,
) -> Result<Found> {
    let sources = Sources::new(4096);
    let operations = scale.tail_operations / TURN * TURN;
    // The arrays are written before the measurement, so that no turn includes page faults.
    let (mut writes, mut copies) = (vec![1; operations], vec![1; operations]);
    let mut waited_for_space = 0;
    let mut destinations = stores.iter().cycle();
    let before = live.cache.status().written_back_bytes;
    for (writes, copies) in writes.chunks_mut(TURN).zip(copies.chunks_mut(TURN)) {
        let places = random_places(random, scale.device, 4096, TURN);
        live.cache.flush()?;
        live.wait_for_space()?;
        let mut last = Instant::now();
        for (number, (&place, taken)) in places.iter().zip(writes).enumerate() {
            waited_for_space += u64::from(!live.write(place, sources.get(number))?);
            last = lap(last, taken);
        }
        let destinations: Vec<_> = destinations.by_ref().take(TURN).collect();
        let mut last = Instant::now();
        for (number, (store, taken)) in destinations.into_iter().zip(copies).enumerate() {
            bare.store(store.at, sources.get(number));
            bare.fence();
            last = lap(last, taken);
        }
    }
    let written_back_bytes = live.cache.status().written_back_bytes - before;
    Ok(Found { writes, copies, waited_for_space, written_back_bytes })
}

/// Records the time since `last`; returns the present time.
fn lap(last: Instant, taken: &mut u32) -> Instant {
    let now = Instant::now();
    *taken = u32::try_from((now - last).as_nanos()).unwrap_or(u32::MAX);
    now
}

fn report(found: &Found, figures: &mut Figures) {
    let part = found.writes.len().div_ceil(PARTS);
    let parts = found.writes.chunks(part).zip(found.copies.chunks(part));
    let ratios: Vec<_> = parts
        .map(|(writes, copies)| at_shares(writes, &[0.9999])[0] / at_shares(copies, &[0.9999])[0])
        .collect();
    let (writes, copies) = (at_shares(&found.writes, &SHARES), at_shares(&found.copies, &SHARES));
    figures.add("operations", found.writes.len());
    figures.add("waited_for_space", found.waited_for_space);
    figures.add("written_back_mib", found.written_back_bytes >> 20);
    figures.add("percentiles", SHARES.map(|share| rounded(share * 100.0, 3)).to_vec());
    figures.add("write_4k_us", in_us(&writes));
    figures.add("copy_4k_us", in_us(&copies));

    let spread = Summary::of(&ratios);
    let mut detail = Map::new();
    detail.insert("p10_p90".to_owned(), json!([rounded(spread.low, 2), rounded(spread.high, 2)]));
    let absolute = format!("{:.1} us against {:.1} us", writes[4] / 1000.0, copies[4] / 1000.0);
    detail.insert("absolute".to_owned(), json!(absolute));
    detail.insert("write_4k_p9999_us".to_owned(), json!(rounded(writes[4] / 1000.0, 2)));
    detail.insert("copy_4k_p9999_us".to_owned(), json!(rounded(copies[4] / 1000.0, 2)));
    let range = median_range(&ratios);
    let certainty = Certainty { range, is_noisy: range.1 - range.0 > NOISY * spread.median };
    figures.add_detailed("p9999_over_copy", rounded(writes[4] / copies[4], 2), detail, Some(certainty));
    figures.add("max_ms", rounded(writes[6] / 1e6, 3));
    figures.add("copy_max_ms", rounded(copies[6] / 1e6, 3));
}

fn at_shares(taken: &[u32], shares: &[f64]) -> Vec<f64> {
    let mut sorted = taken.to_vec();
    sorted.sort_unstable();
    shares.iter().map(|&share| f64::from(percentile(&sorted, share))).collect()
}

fn in_us(nanoseconds: &[f64]) -> Value {
    nanoseconds.iter().map(|one| rounded(one / 1000.0, 2)).collect()
}
