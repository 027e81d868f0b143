//! The error of the advice: the difference between the hit ratio that it foretells for a size, and that of a cache of this size.
//!
//! Invariants: the advice and the cache get the same requests. The same seed gives the same figures on every machine.

use super::super::policy::trace::{self, DEVICE, LENGTH, TRACES};
use super::real::Real;
use crate::in_parallel::in_parallel;
use crate::options::Options;
use crate::{Figures, rounded};
use cbd_advise::{
    Action, BLOCKS_MAX, CacheForm, MEMORY_MAX, Options as AdviceOptions, Outcome, Request, Seen, SeenRequest,
    Simulation, Survey,
};
use cbd_device::{LastSampled, Sampled};
use cbd_engine::Settings;
use cbd_runtime::sampled::{Moment, Moments, earlier::Earlier};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Result};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// The machine for which the caches are created.
const PROCESSORS: u32 = 2;
/// Sizes of caches over the size for which a trace is made.
const SIZES: [(&str, f64); 3] = [("half", 0.5), ("same", 1.0), ("twice", 2.0)];
/// The index of the present size.
const PRESENT: usize = 1;
/// Microseconds between two requests.
const REQUEST_US: u64 = 20;

/// The size of the cache for which traces are made, and the requests for each block of the cache.
const fn scale(quick: bool) -> (u64, u32) {
    if quick { (64 << 20, LENGTH / 2) } else { (512 << 20, LENGTH) }
}

/// The errors: of the advice from a trace; of the same with so little memory that all sizes are simulated on the sparsest sample; of the
/// advice from the sample that the device of the present size keeps.
const ERRORS: [&str; 3] = ["error", "sampled_error", "live_error"];

/// Moments of the service of a trace at which is noted what was read.
const MOMENTS: usize = 128;

/// Measures.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let mut worst = [0.0_f64; ERRORS.len()];
    let names = || TRACES.iter().map(|trace| trace.name).chain(["mixed"]);
    let found = in_parallel(names().count(), 2, |number| compare(number, options));
    for (name, found) in names().zip(found) {
        for ((size, _), Compared { hit, late_hit, errors }) in SIZES.iter().zip(found?) {
            figures.add(format!("advice.{name}.{size}.hit"), rounded(hit, 4));
            figures.add(format!("advice.{name}.{size}.late_hit"), rounded(late_hit, 4));
            for ((kind, error), worst) in ERRORS.iter().zip(errors).zip(&mut worst) {
                figures.add(format!("advice.{name}.{size}.{kind}"), rounded(error, 4));
                *worst = worst.max(error.abs());
            }
        }
    }
    for (kind, worst) in ERRORS.iter().zip(worst) {
        figures.add(format!("advice_{kind}"), rounded(worst, 4));
    }
    Ok(())
}

/// A size.
struct Compared {
    /// The hit ratio of the cache, of the whole trace, and of the part that counts for the live advice.
    hit: f64,
    late_hit: f64,
    /// In the order of [`ERRORS`].
    errors: [f64; ERRORS.len()],
}

/// The caches and what is foretold of them.
fn compare(trace: usize, options: &Options) -> Result<Vec<Compared>> {
    let (bytes, length) = scale(options.quick);
    let requests = requests(trace, bytes, length, options);
    let mut survey = Survey::new();
    requests.iter().for_each(|request| survey.add(request));
    let form = |(_, factor): &(&str, f64)| CacheForm::new((bytes as f64 * factor) as u64, None, PROCESSORS);
    let forms = SIZES.iter().map(form).collect::<Result<Vec<_>>>()?;
    let whole = advise(&requests, &forms, &survey, MEMORY_MAX)?;
    let sampled = advise(&requests, &forms, &survey, 0)?;
    let size = survey.end.next_multiple_of(1 << 22);
    let served = forms.iter().map(|form| serve(form, size, &requests, options.seed));
    let served = served.collect::<Result<Vec<_>>>()?;
    // The present size is that in the middle.
    let present = &served[PRESENT];
    let (last, earlier) = (present.0.last_sampled(present.2.end()), &present.2);
    let mut moments = Moments::default();
    present.1.iter().for_each(|moment| moments.note(*moment));
    let end = last.first + last.requests.len() as u64;
    let found = moments.behind_middle(last.first, end).unwrap_or_default();
    let late = present.1.iter().position(|moment| *moment == found).unwrap_or_default();
    let live = foretell((earlier, &last), found, &present.0.moment(), &survey, &forms)?;
    let compared = |number: usize| {
        let (real, moments, _) = &served[number];
        let hit = |read: Moment| read.hit_bytes as f64 / read.read_bytes as f64;
        let (hit, late_hit) = (hit(real.moment()), hit(real.moment().since(moments[late])));
        let errors = [whole[number].hit - hit, sampled[number].hit - hit, live[number].hit - late_hit];
        Compared { hit, late_hit, errors }
    };
    Ok((0..forms.len()).map(compared).collect())
}

/// A cache that has served the requests, what was read at moments on the way, and what its sample no longer has.
type Served = (Real, Vec<Moment>, Earlier);

fn serve(form: &CacheForm, size: u64, requests: &[Request], seed: u64) -> Result<Served> {
    let mut real = Real::new(form, size, seed)?;
    let (mut moments, mut earlier) = (vec![real.moment()], Earlier::default());
    for part in requests.chunks(requests.len().div_ceil(MOMENTS)) {
        part.iter().try_for_each(|request| real.serve(request))?;
        moments.push(real.moment());
        real.take_earlier(&mut earlier);
    }
    Ok((real, moments, earlier))
}

/// What is foretold by the sample that a device keeps.
fn foretell(
    (earlier, last): (&Earlier, &LastSampled),
    from: Moment,
    end: &Moment,
    survey: &Survey,
    forms: &[CacheForm],
) -> Result<Vec<Outcome>> {
    let request =
        |sampled: &Sampled| SeenRequest { ms: sampled.ms, is_write: sampled.is_write, group: sampled.group };
    let seen = Seen {
        one_of: last.one_of,
        earlier: earlier.requests().collect(),
        earlier_is_all: earlier.is_all(),
        period_ms: Sampled::PERIOD_MS,
        requests: last.requests.iter().map(request).collect(),
        counted_from: from.sampled.saturating_sub(last.first) as usize,
        read_bytes: end.since(from).read_bytes,
        request_bytes: (survey.read_bytes + survey.written_bytes) / (survey.reads + survey.writes).max(1),
    };
    Ok(seen.foretell(forms, &advice_options(MEMORY_MAX))?.outcomes)
}

fn advice_options(memory_max: u64) -> AdviceOptions {
    let settings = Settings::default();
    AdviceOptions { memory_max, blocks_max: BLOCKS_MAX, settings, disk_rate: None, has_times: true }
}

/// What is foretold.
fn advise(
    requests: &[Request],
    forms: &[CacheForm],
    survey: &Survey,
    memory_max: u64,
) -> Result<Vec<Outcome>> {
    let options = advice_options(memory_max);
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
