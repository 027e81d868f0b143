//! Hit ratio: the engine against LRU, ARC and S3-FIFO on the same traces.
//!
//! Invariants: all policies get the same requests in the same order and begin empty, and every request counts. The same seed
//! gives the same figures on every machine. The other policies have as many blocks of 4 KiB as fit in the bytes of the cache. The
//! headers, records, free segments and segments being filled of the cache hold no blocks and count against it; `space` has the
//! share of each of them. The figures named `same_blocks` compare the cache with policies that hold only as many blocks as the
//! cache does.

mod arc;
mod least_recent;
pub mod model_disk;
mod pacing;
mod reads;
mod rig;
mod s3fifo;
pub mod trace;

use crate::in_parallel::in_parallel;
use crate::options::Options;
use crate::{Figures, rounded};
use arc::Arc;
use cbd_types::Result;
use least_recent::LeastRecent;
use rig::{Rig, Scale, Served, Space};
use s3fifo::S3Fifo;
pub use trace::Zipf;
use trace::{LENGTH, Request, TRACES, Trace};

/// A hit ratio below this value is not used as a divisor.
const NEXT_TO_NOTHING: f64 = 0.01;

/// The other policies.
const OTHERS: [&str; 3] = ["lru", "arc", "s3fifo"];

/// Requests for each block of the large cache: fewer, because it has sixteen times as many blocks.
const LENGTH_OF_LARGE: u32 = 16;

/// A replacement policy as in its paper.
trait Policy {
    /// One request for `block`; returns whether it was a hit. The block is held afterwards.
    fn access(&mut self, block: u32) -> bool;
}

/// Runs the comparison.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    figures.add("seed", options.seed);
    figures.add("write_percent", options.write_percent);
    pacing::run(options, figures)?;
    let mut worst = [f64::INFINITY; 3];
    let mut worst_same_blocks = [f64::INFINITY; 3];
    let mut zipf_over_arc = f64::INFINITY;
    let compare = |trace: &Trace| compare(trace, options);
    for (trace, found) in TRACES.iter().zip(for_each_trace(usize::MAX, &compare)) {
        let found = found?;
        let hit = found.hit;
        figures.add(format!("{}.hit", trace.name), rounded(hit, 4));
        for (number, name) in OTHERS.into_iter().enumerate() {
            let (other, same_blocks) = (found.others[number], found.same_blocks[number]);
            figures.add(format!("{}.{name}", trace.name), rounded(other, 4));
            figures.add(format!("{}.over_{name}", trace.name), rounded(over(hit, other), 3));
            let path = format!("{}.same_blocks.over_{name}", trace.name);
            figures.add(path, rounded(over(hit, same_blocks), 3));
            if (trace.name, name) == ("zipf", "arc") {
                zipf_over_arc = over(hit, same_blocks);
            }
            if trace.has_budget {
                worst[number] = worst[number].min(over(hit, other));
                worst_same_blocks[number] = worst_same_blocks[number].min(over(hit, same_blocks));
            }
        }
        figures.add(format!("{}.same_blocks.held", trace.name), rounded(found.held, 3));
        let Space { blocks, overwritten, records, unused, free } = found.space;
        let shares = [blocks, overwritten, records, unused, free];
        for (name, share) in ["blocks", "overwritten", "records", "unused", "free"].into_iter().zip(shares) {
            figures.add(format!("{}.space.{name}", trace.name), rounded(share, 4));
        }
    }
    for (number, name) in OTHERS.into_iter().enumerate() {
        figures.add(format!("worst_over_{name}"), rounded(worst[number], 3));
        figures.add(format!("same_blocks.worst_over_{name}"), rounded(worst_same_blocks[number], 3));
    }
    figures.add("zipf_over_arc", rounded(zipf_over_arc, 3));
    run_large(options, figures)?;
    reads::run(options, figures)
}

/// The budgeted traces against LRU, in a cache of 4 GiB.
fn run_large(options: &Options, figures: &mut Figures) -> Result<()> {
    let mut worst = f64::INFINITY;
    // One after the other: each takes more than 4 GiB of memory.
    let compare = |trace: &Trace| trace.has_budget.then(|| compare_large(trace, options)).transpose();
    for (trace, found) in TRACES.iter().zip(for_each_trace(1, &compare)) {
        let Some((hit, held, lru)) = found? else { continue };
        figures.add(format!("large.{}.hit", trace.name), rounded(hit, 4));
        figures.add(format!("large.{}.held", trace.name), rounded(held, 3));
        figures.add(format!("large.{}.over_lru", trace.name), rounded(over(hit, lru), 3));
        worst = worst.min(over(hit, lru));
    }
    figures.add("large.worst_over_lru", rounded(worst, 3));
    Ok(())
}

/// The hit ratio of the large cache, the share of its bytes that held blocks, and the hit ratio of LRU.
fn compare_large(trace: &Trace, options: &Options) -> Result<(f64, f64, f64)> {
    let mut rig = Rig::new(Scale::large(options.quick), options.seed)?;
    let capacity = rig.capacity();
    let requests = trace.requests(capacity, LENGTH_OF_LARGE, options.seed, options.write_percent);
    let Served { hit, held } = rig.serve(&requests)?;
    drop(rig);
    let lru = simulated(LeastRecent::new(capacity as usize), &requests);
    Ok((hit, held as f64 / f64::from(capacity), lru))
}

/// The hit ratios of reads.
struct Found {
    hit: f64,
    /// The policies with as many blocks as fit in the bytes of the cache.
    others: [f64; 3],
    /// The policies with as many blocks as the cache held.
    same_blocks: [f64; 3],
    /// The number of held blocks as a share of the blocks that fit in the bytes of the cache.
    held: f64,
    /// The use of its bytes at the end.
    space: Space,
}

/// Runs `compare` for all traces, at most `threads_max` at once and as many as there are processors: they are
/// independent.
fn for_each_trace<T: Send>(
    threads_max: usize,
    compare: &(impl Fn(&Trace) -> Result<T> + Sync),
) -> Vec<Result<T>> {
    in_parallel(TRACES.len(), threads_max, |number| compare(&TRACES[number]))
}

fn compare(trace: &Trace, options: &Options) -> Result<Found> {
    let mut rig = Rig::new(Scale::of(options.quick), options.seed)?;
    let capacity = rig.capacity();
    let requests = trace.requests(capacity, LENGTH, options.seed, options.write_percent);
    let Served { hit, held } = rig.serve(&requests)?;
    let space = rig.space();
    // The memory of the rig is no longer needed.
    drop(rig);
    let others = |capacity: usize| {
        [
            simulated(LeastRecent::new(capacity), &requests),
            simulated(Arc::new(capacity), &requests),
            simulated(S3Fifo::new(capacity), &requests),
        ]
    };
    Ok(Found {
        hit,
        others: others(capacity as usize),
        same_blocks: others(held as usize),
        held: held as f64 / f64::from(capacity),
        space,
    })
}

/// A hit ratio over another one. If the other is near zero, a higher hit ratio gives 1 and not a multiple.
fn over(hit: f64, other: f64) -> f64 {
    if hit >= other && other < NEXT_TO_NOTHING { 1.0 } else { hit / other }
}

/// The hit ratio of reads.
fn simulated(mut policy: impl Policy, requests: &[Request]) -> f64 {
    let (mut reads, mut hits) = (0_u64, 0_u64);
    for request in requests {
        let is_hit = policy.access(request.block);
        reads += u64::from(!request.is_write);
        hits += u64::from(is_hit && !request.is_write);
    }
    hits as f64 / reads as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `h` for each hit, `-` for each miss.
    pub fn outcomes(mut policy: impl Policy, requests: &[u32]) -> String {
        requests.iter().map(|&block| if policy.access(block) { 'h' } else { '-' }).collect()
    }

    #[test]
    fn a_ratio_over_nearly_zero_is_one() {
        assert_eq!(over(0.5, 0.0), 1.0);
        assert_eq!(over(0.0, 0.0), 1.0);
        assert_eq!(over(0.5, 0.25), 2.0);
        assert_eq!(over(0.002, 0.008), 0.25);
        assert_eq!(over(0.0, 0.008), 0.0);
    }
}
