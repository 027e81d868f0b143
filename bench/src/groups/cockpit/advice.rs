//! The error of the advice: the difference between the hit ratio that it foretells for a size, and that of a cache of this size.
//!
//! Invariants: the advice and the cache get the same requests. The same seed gives the same figures on every machine.

use super::super::policy::trace::{self, DEVICE, LENGTH, TRACES};
use super::real::Real;
use crate::in_parallel::in_parallel;
use crate::options::Options;
use crate::{Figures, rounded};
use cbd_advise::{
    Action, BLOCKS_MAX, CacheForm, MEMORY_MAX, Options as AdviceOptions, Outcome, Request, Simulation, Survey,
};
use cbd_engine::Settings;
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Result};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// The machine for which the caches are created.
const PROCESSORS: u32 = 2;
/// Sizes of caches over the size for which a trace is made.
const SIZES: [(&str, f64); 3] = [("half", 0.5), ("same", 1.0), ("twice", 2.0)];
/// Microseconds between two requests.
const REQUEST_US: u64 = 20;

/// The size of the cache for which traces are made, and the requests for each block of the cache.
const fn scale(quick: bool) -> (u64, u32) {
    if quick { (64 << 20, LENGTH / 2) } else { (512 << 20, LENGTH) }
}

/// The memory with which the advice simulates a size: by default, and so little that all sizes are simulated on a sample.
const MEMORY: [(&str, u64); 2] = [("error", MEMORY_MAX), ("sampled_error", 0)];

/// Measures.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let mut worst = [0.0_f64; MEMORY.len()];
    let names = || TRACES.iter().map(|trace| trace.name).chain(["mixed"]);
    let found = in_parallel(names().count(), 2, |number| compare(number, options));
    for (name, found) in names().zip(found) {
        for ((size, _), Compared { real, advised }) in SIZES.iter().zip(found?) {
            figures.add(format!("advice.{name}.{size}.hit"), rounded(real, 4));
            for (((error, _), advised), worst) in MEMORY.iter().zip(advised).zip(&mut worst) {
                figures.add(format!("advice.{name}.{size}.{error}"), rounded(advised - real, 4));
                *worst = worst.max((advised - real).abs());
            }
        }
    }
    let [whole, sampled] = worst;
    figures.add("advice_error", rounded(whole, 4));
    figures.add("advice_sampled_error", rounded(sampled, 4));
    Ok(())
}

/// The hit ratio of a cache, and what is foretold with each amount of memory.
struct Compared {
    real: f64,
    advised: [f64; MEMORY.len()],
}

/// The hit ratios of each size.
fn compare(trace: usize, options: &Options) -> Result<Vec<Compared>> {
    let (bytes, length) = scale(options.quick);
    let requests = requests(trace, bytes, length, options);
    let mut survey = Survey::new();
    requests.iter().for_each(|request| survey.add(request));
    let forms = SIZES
        .iter()
        .map(|(_, factor)| CacheForm::new((bytes as f64 * factor) as u64, None, PROCESSORS))
        .collect::<Result<Vec<_>>>()?;
    let advised = MEMORY.map(|(_, memory_max)| advise(&requests, &forms, &survey, memory_max));
    let [whole, sampled] = advised;
    let advised = whole?.into_iter().zip(sampled?);
    forms
        .iter()
        .zip(advised)
        .map(|(form, (whole, sampled))| {
            let mut real = Real::new(form, survey.end.next_multiple_of(1 << 22), options.seed)?;
            requests.iter().try_for_each(|request| real.serve(request))?;
            Ok(Compared { real: real.hit(), advised: [whole.hit, sampled.hit] })
        })
        .collect()
}

/// What is foretold.
fn advise(
    requests: &[Request],
    forms: &[CacheForm],
    survey: &Survey,
    memory_max: u64,
) -> Result<Vec<Outcome>> {
    let settings = Settings::default();
    let options =
        AdviceOptions { memory_max, blocks_max: BLOCKS_MAX, settings, disk_rate: None, has_times: true };
    let mut simulation = Simulation::new(forms, survey, &options)?;
    requests.iter().try_for_each(|request| simulation.feed(*request))?;
    simulation.finish()
}

/// The requests of a trace of the group `policy`, or of the mixed one.
fn requests(trace: usize, bytes: u64, length: u32, options: &Options) -> Vec<Request> {
    let capacity = (bytes / CHECKSUM_BLOCK) as u32;
    let Some(kind) = TRACES.get(trace) else { return mixed(capacity, options.seed) };
    let of_trace = kind.requests(capacity, length, options.seed, options.write_percent);
    let request = |(number, request): (usize, &trace::Request)| Request {
        us: number as u64 * REQUEST_US,
        action: if request.is_write { Action::Write } else { Action::Read },
        range: ByteRange::at(u64::from(request.block) * CHECKSUM_BLOCK, CHECKSUM_BLOCK),
    };
    of_trace.iter().enumerate().map(request).collect()
}

/// Requests of several lengths: a hot set in blocks, some of them written; random records of 64 KiB from a part of the device that is as
/// large as the cache; and a file that is read in sequence by 256 KiB, again and again, of three times the cache.
fn mixed(capacity: u32, seed: u64) -> Vec<Request> {
    let mut random = SmallRng::seed_from_u64(seed);
    let (mut requests, mut at) = (Vec::new(), 0);
    let device = DEVICE * capacity;
    for number in 0..4 * capacity {
        let us = u64::from(number) * REQUEST_US;
        let (action, block, blocks) = match number % 16 {
            0 => {
                at = (at + 64) % (3 * capacity);
                (Action::Read, at, 64_u32)
            }
            1..4 => (Action::Read, device / 2 + random.random_range(0..capacity / 16) * 16, 16),
            4 => (Action::Write, device - 1 - random.random_range(0..capacity / 2), 1),
            _ => (Action::Read, device - 1 - random.random_range(0..capacity / 2), 1),
        };
        let range = ByteRange::at(u64::from(block) * CHECKSUM_BLOCK, u64::from(blocks) * CHECKSUM_BLOCK);
        requests.push(Request { us, action, range });
    }
    requests
}
