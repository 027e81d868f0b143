//! Changes of caches while they are in use: the longest request meanwhile (`stall`), and caches that share space against fixed
//! divisions of it.
//!
//! Three caches on one transport serve loads of 4 : 1 : 1 whose working sets differ. The space is divided by the rule of the daemon, and
//! by hand in each way of a grid. Then the loads move.
//!
//! Invariants: time passes with the requests and all random numbers come from the seed, so the figures are the same on every machine;
//! all divisions get the same requests.

mod rig;
mod stall;

use crate::in_parallel::in_parallel;
use crate::options::Options;
use crate::{Figures, rounded};
use cbd_types::Result;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rig::{Pool, Sizes};

/// Caches.
pub const CACHES: usize = 3;
/// Parts of the space in the grid of fixed divisions.
const PARTS: u32 = 8;
/// The loads.
const LOADS: [u32; CACHES] = [4, 1, 1];
/// Sizes of the working sets, in hundredths of the space.
const WORKING_SETS: [u32; CACHES] = [160, 60, 30];
/// Requests a second.
const RATE: u32 = 12_000;
/// Seconds of a load.
const SECONDS: u32 = 90;
/// The seconds of it that count: the caches are warm.
const COUNTED: u32 = 45;

/// Requests of one load: the cache, and the block of its device.
type Requests = Vec<(u8, u32)>;

/// Runs everything.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    stall::run(figures)?;
    let pool_blocks = Pool::blocks(options.quick);
    let requests = requests(&LOADS, pool_blocks, options.seed, SECONDS);
    let counted = ((SECONDS - COUNTED) * RATE) as usize;
    let mut best = (0.0_f64, [0; CACHES]);
    let divisions = grid();
    for (division, hit) in divisions.iter().zip(each(&divisions, options, &requests, counted)) {
        let hit = hit?;
        if hit > best.0 {
            best = (hit, *division);
        }
    }
    figures.add("best_fixed_hit", rounded(best.0, 4));
    figures.add("best_fixed_parts", format!("{:?} of {PARTS}", best.1));

    let mut pool = Pool::new(options.quick, options.seed, Sizes::Shared)?;
    let mut sizes = Vec::new();
    let shared = served(&mut pool, &requests, counted, &mut |segments| sizes.push(segments))?;
    figures.add("shared_hit", rounded(shared, 4));
    figures.add("shared_segments", format!("{:?} of {}", pool.segments(), pool.all_segments()));
    // A load that stays moves nothing once the caches are warm.
    let steady = &sizes[sizes.len() / 2..];
    figures.add("steady_changes", steady.windows(2).filter(|pair| pair[0] != pair[1]).count());
    figures.add("shared_over_fixed", rounded(shared / best.0, 4));

    // The loads move: what the first cache had, the last one has now.
    let moved = [LOADS[2], LOADS[1], LOADS[0]];
    let requests = self::requests(&moved, pool_blocks, options.seed ^ 1, SECONDS);
    sizes.clear();
    served(&mut pool, &requests, counted, &mut |segments| sizes.push(segments))?;
    figures.add("follow_s", follow_s(&sizes));
    figures.add("moved_segments", format!("{:?} of {}", pool.segments(), pool.all_segments()));
    // No client reads from the last one: it has its minimum then, and no less.
    let requests = self::requests(&[1, 0, 0], pool_blocks, options.seed ^ 2, SECONDS);
    served(&mut pool, &requests, counted, &mut |_| ())?;
    figures.add("idle_segments", format!("{:?} of {}", pool.segments(), pool.all_segments()));
    figures.add("min_kept", rounded(pool.least_over_minimum(), 3));
    Ok(())
}

/// Seconds until the sizes have gone nine tenths of the way to where they end.
fn follow_s(sizes: &[[u32; CACHES]]) -> f64 {
    let Some((first, last)) = sizes.first().zip(sizes.last()) else { return 0.0 };
    let way = |from: &[u32; CACHES]| -> u32 {
        from.iter().zip(last).map(|(from, last)| from.abs_diff(*last)).sum()
    };
    let all = way(first);
    let rounds = sizes.iter().position(|sizes| way(sizes) * 10 <= all).unwrap_or(sizes.len());
    rounded(rounds as f64 * rig::ROUND_S, 1)
}

/// All ways to divide [`PARTS`] parts among the caches, one part at least for each.
fn grid() -> Vec<[u32; CACHES]> {
    let ways = |first: u32| (1..PARTS - first).map(move |second| [first, second, PARTS - first - second]);
    (1..PARTS - 1).flat_map(ways).collect()
}

/// The hit ratio of each fixed division, on as many threads as there are processors.
fn each(
    divisions: &[[u32; CACHES]],
    options: &Options,
    requests: &Requests,
    counted: usize,
) -> Vec<Result<f64>> {
    in_parallel(divisions.len(), usize::MAX, |number| {
        Pool::new(options.quick, options.seed, Sizes::Fixed(divisions[number], PARTS))
            .and_then(|mut pool| served(&mut pool, requests, counted, &mut |_| ()))
    })
}

/// Serves the requests; returns the hit ratio of those behind the first `uncounted`. Calls `round` with the sizes after each round.
fn served(
    pool: &mut Pool,
    requests: &Requests,
    uncounted: usize,
    round: &mut dyn FnMut([u32; CACHES]),
) -> Result<f64> {
    let mut hits = 0_u64;
    for (number, (cache, block)) in requests.iter().enumerate() {
        let is_hit = pool.read(usize::from(*cache), *block)?;
        hits += u64::from(is_hit && number >= uncounted);
        if (number + 1).is_multiple_of((f64::from(RATE) * rig::ROUND_S) as usize) {
            pool.divide()?;
            round(pool.segments());
        }
    }
    Ok(hits as f64 / (requests.len() - uncounted) as f64)
}

/// Requests whose blocks have a Zipf distribution in the working set of each cache, and whose caches are drawn by the loads.
fn requests(loads: &[u32; CACHES], pool_blocks: u32, seed: u64, seconds: u32) -> Requests {
    let mut random = SmallRng::seed_from_u64(seed);
    // The places are those of the caches, whichever load they have.
    let mut of_places = SmallRng::seed_from_u64(7);
    let sets: Vec<(Vec<u32>, super::policy::Zipf)> = WORKING_SETS
        .iter()
        .map(|hundredths| {
            let mut places: Vec<u32> = (0..pool_blocks * hundredths / 100).collect();
            places.shuffle(&mut of_places);
            let zipf = super::policy::Zipf::new(places.len());
            (places, zipf)
        })
        .collect();
    let all: u32 = loads.iter().sum();
    (0..seconds * RATE)
        .map(|_| {
            let mut drawn = random.random_range(0..all);
            let mut cache = 0;
            while drawn >= loads[cache] {
                drawn -= loads[cache];
                cache += 1;
            }
            let (places, zipf) = &sets[cache];
            (cache as u8, places[zipf.draw(&mut random)])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_has_all_divisions_and_each_cache_a_part() {
        let grid = grid();
        assert_eq!(grid.len(), 21);
        assert!(grid.iter().all(|parts| parts.iter().sum::<u32>() == PARTS && !parts.contains(&0)));
    }

    #[test]
    fn sizes_have_followed_when_a_tenth_of_the_way_is_left() {
        assert_eq!(follow_s(&[]), 0.0);
        let sizes = [[100, 50, 10], [80, 50, 30], [62, 50, 48], [60, 50, 50], [60, 50, 50]];
        assert_eq!(follow_s(&sizes), 4.0);
    }
}
