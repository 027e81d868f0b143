//! The speed at which recovery rebuilds the index from the logs of a full aged cache.
//!
//! Invariants: the rate is per second of processor time, summed over all processors of the process; the elapsed time is shown,
//! too.

use crate::figures::{Certainty, spread};
use crate::options::Options;
use crate::rig::Rig;
use crate::scale::Scale;
use crate::statistics::{Summary, median_range, rounded};
use crate::turns::is_noisy;
use crate::window::Window;
use crate::{Figures, full};
use cbd_pmem::Mapping;
use cbd_types::Result;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, json};
use std::sync::Arc;
use std::time::Instant;

/// Number of recoveries. Each finds the same state: recovery changes nothing in an intact cache.
const TIMES: usize = 9;

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let region = Scale::of(options).full_region;
    let mapping = Arc::new(Mapping::anonymous(region)?);
    let records = full::rig(&mapping, region)?.records() as f64;
    let (mut rates, mut seconds) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let memory = Window::new(Arc::clone(&mapping), 0, region);
        let (ran, begun) = (process_seconds(), Instant::now());
        let rig = Rig::reopen(memory)?;
        seconds.push(begun.elapsed().as_secs_f64());
        rates.push(records / (process_seconds() - ran));
        drop(rig);
    }
    let rate = Summary::of(&rates);
    let range = median_range(&rates);
    let mut detail = Map::new();
    detail.insert("records".to_owned(), json!(records));
    let median_s = Summary::of(&seconds).median;
    detail.insert("absolute".to_owned(), json!(format!("{records} records in {median_s:.3} s")));
    detail.insert("region_bytes".to_owned(), json!(region));
    detail.insert("times".to_owned(), json!(TIMES));
    detail.insert("p10_p90".to_owned(), spread(rate, 0));
    let certainty = Certainty { range, is_noisy: is_noisy(rate, range) };
    figures.add_detailed("records_per_core_second", rate.median.round(), detail, Some(certainty));
    figures.add("seconds", rounded(median_s, 4));
    drop(mapping);
    super::restart::run(options, figures)
}

/// Processor time of the threads of this process, in seconds.
fn process_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
