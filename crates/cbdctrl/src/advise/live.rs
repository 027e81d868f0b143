//! What more or less cache would bring, from what the daemon has noted of the requests of a backend.
//!
//! Invariants: nothing is foretold from too few requests, or for a size of which the sample says too little. Where the forecast for
//! the present size is not what the cache had, no advice is given, and a warning says so.
//!
//! Elsewhere: what the daemon notes (`cbd-device`), the simulation (`cbd-advise`).

use super::{Present, SizeInfo, forms_of, invalid, size_info, table};
use crate::cli::AdviseArguments;
use crate::command::Output;
use crate::table::fit;
use cbd_advise::{BLOCKS_MAX, EarlierRequest, Foretold, Options, Outcome, Seen, SeenRequest};
use cbd_daemon::api::RequestSample;
use cbd_daemon::client::Client;
use cbd_daemon::size::format_size;
use cbd_types::Result;
use serde::Serialize;
use std::path::Path;

/// The sizes to try, over the present one.
const FACTORS: [f64; 5] = [0.25, 0.5, 1.0, 2.0, 4.0];
/// How far the forecast for the present size may be from what the cache had.
const MISFIT_MAX: f64 = 0.05;
/// Sizes that are tried are multiples of this.
const UNIT: u64 = 1 << 20;

/// The result.
#[derive(Serialize)]
struct LiveAdvice {
    seen: SeenInfo,
    sizes: Vec<SizeInfo>,
    /// Why the sizes, or some of them, are not to be relied on.
    warning: Option<String>,
    /// Absent if the present size is not to be relied on.
    advice: Option<String>,
}

/// What the daemon has noted. Bytes and rates of all requests are estimates.
#[derive(Serialize)]
struct SeenInfo {
    /// Requests of the sample.
    sampled_requests: u64,
    /// One block of so many is in the sample.
    sampled_one_of: u64,
    seconds: f64,
    read_bytes: u64,
    written_bytes: u64,
    used_bytes: u64,
    /// Reads of the sample that count for the hit ratios: those behind its middle.
    counted_reads: u64,
    /// Bytes that clients have read meanwhile, and the share of them that the cache had.
    counted_read_bytes: u64,
    read_hit_ratio: f64,
    /// Share of what was read meanwhile that had not been seen before: it counts as missed at any size.
    first_read_share: f64,
    write_bytes_per_s_max: Option<f64>,
}

pub(super) fn execute(
    arguments: &AdviseArguments,
    present: &Present,
    socket: &Path,
    output: &Output,
) -> Result<()> {
    let Some(backend) = &arguments.backend else { return Err(invalid("--trace or --backend is needed")) };
    let path = format!("/v1/transports/{}/backends/{backend}/sample", arguments.on.transport);
    let sample: RequestSample = Client::new(socket).get(&path)?;
    if sample.one_of == 0 {
        return Err(invalid("the daemon has noted no request of this backend yet: ask again later"));
    }
    let seen = seen_of(&sample)?;
    let options = Options {
        memory_max: arguments.memory,
        blocks_max: BLOCKS_MAX,
        settings: present.settings,
        disk_rate: arguments.disk_rate,
        has_times: true,
    };
    let forms = forms_of(sizes(arguments, present, &seen)?, present)?;
    let foretold = seen.foretell(&forms, &options)?;
    let survey = &foretold.survey;
    let info = seen_info(&seen, &sample, &foretold);
    let known: Vec<Outcome> =
        foretold.outcomes.iter().filter(|outcome| outcome.bytes <= foretold.known_bytes).copied().collect();
    let now = known.iter().find(|outcome| Some(outcome.bytes) == present.size);
    let misfit = now.and_then(|now| misfit(now.hit, info.read_hit_ratio, info.first_read_share));
    let sizes = foretold.outcomes.iter().map(|outcome| {
        let info = size_info(outcome, survey, &options);
        if outcome.bytes <= foretold.known_bytes {
            return info;
        }
        SizeInfo { read_hit_ratio: None, disk_read_bytes: None, ..info }
    });
    let is_known = known.len() == foretold.outcomes.len();
    let is_reliable = misfit.is_none() && (is_known || now.is_some());
    let advice = LiveAdvice {
        sizes: sizes.collect(),
        advice: is_reliable.then(|| cbd_advise::sentence(&known, present.size, survey)),
        warning: misfit.or_else(|| (!is_known).then(|| unknown(foretold.known_bytes))),
        seen: info,
    };
    output.result(&advice, &fit(&page(&advice, present.size, arguments.disk_rate.is_some())))
}

/// Why the forecast is not to be relied on: for the present size it is `foretold`, and the cache had `real`. What had not been seen
/// before, the share `new` of the reads, is foretold as missed, and the cache may have had it.
fn misfit(foretold: f64, real: f64, new: f64) -> Option<String> {
    let fits = (foretold - MISFIT_MAX..=foretold + new + MISFIT_MAX).contains(&real);
    (!fits).then(|| {
        format!(
            "for the present size {:.1} % are foretold, and the cache had {:.1} %: do not rely on the other sizes either; record a \
             trace (--trace)",
            100.0 * foretold,
            100.0 * real
        )
    })
}

/// Why nothing is said about caches of more than `bytes`.
fn unknown(bytes: u64) -> String {
    format!(
        "what was used while the daemon has watched fills a cache of {}: what a larger one would have held from before is not known; ask \
         again later, or record a trace (--trace)",
        format_size(bytes)
    )
}

fn seen_of(sample: &RequestSample) -> Result<Seen> {
    let (count, earlier) = (sample.groups.len(), sample.earlier_groups.len());
    let are_equal = [sample.times_ms.len(), sample.writes.len()] == [count; 2];
    if !are_equal || sample.earlier_writes.len() != earlier {
        return Err(invalid(
            "the sample of the daemon has lists of different lengths: is it another version?",
        ));
    }
    let requests = sample.groups.iter().zip(&sample.times_ms).zip(&sample.writes);
    let request = |((group, ms), is_write): ((&u64, &u32), &bool)| SeenRequest {
        ms: *ms,
        is_write: *is_write,
        group: *group,
    };
    let earlier = sample.earlier_groups.iter().zip(&sample.earlier_writes);
    Ok(Seen {
        one_of: sample.one_of,
        earlier: earlier.map(|(&group, &is_write)| EarlierRequest { group, is_write }).collect(),
        earlier_is_all: sample.earlier_is_all,
        period_ms: sample.period_ms,
        requests: requests.map(request).collect(),
        counted_from: usize::try_from(sample.counted_from).unwrap_or(usize::MAX),
        read_bytes: sample.read_bytes,
        request_bytes: sample.request_bytes,
    })
}

/// The sizes to try: not those of which the sample says too little.
fn sizes(arguments: &AdviseArguments, present: &Present, seen: &Seen) -> Result<Vec<u64>> {
    let least = seen.least_bytes();
    if let Some(size) = arguments.sizes.iter().find(|size| **size < least) {
        return Err(invalid(format!(
            "a size of {} is too small for the sample of one block of {}: the smallest is {}; record a trace (--trace) for others",
            format_size(*size),
            seen.one_of,
            format_size(least)
        )));
    }
    if !arguments.sizes.is_empty() {
        return Ok(arguments.sizes.clone());
    }
    let size = present.size.unwrap_or_default();
    let around = FACTORS.iter().map(|factor| (size as f64 * factor) as u64);
    let rounded = around.map(|bytes| if bytes == size { size } else { bytes.next_multiple_of(UNIT) });
    let least = least.max(present.segment.map_or(0, |segment| 9 * segment));
    Ok(rounded.filter(|bytes| *bytes >= least).collect())
}

fn seen_info(seen: &Seen, sample: &RequestSample, foretold: &Foretold) -> SeenInfo {
    let survey = &foretold.survey;
    SeenInfo {
        sampled_requests: seen.requests.len() as u64,
        sampled_one_of: seen.one_of,
        seconds: survey.us as f64 / 1e6,
        read_bytes: survey.read_bytes,
        written_bytes: survey.written_bytes,
        used_bytes: survey.working_set(),
        counted_reads: seen.counted_reads() as u64,
        counted_read_bytes: sample.read_bytes,
        read_hit_ratio: sample.hit_bytes as f64 / sample.read_bytes.max(1) as f64,
        first_read_share: foretold.new_reads,
        write_bytes_per_s_max: survey.write_rate_max(),
    }
}

fn page(advice: &LiveAdvice, present: Option<u64>, has_rate: bool) -> String {
    let seen = &advice.seen;
    let mut text = format!(
        "the last {:.0} s: about {} read and {} written, {} of the device used (by a sample of 1 of {} blocks, {} requests)\n\
         the second half counts: {} read, of which the cache had {:.1} %; {:.1} % had not been seen before, and miss at any size here\n\n",
        seen.seconds,
        format_size(seen.read_bytes),
        format_size(seen.written_bytes),
        format_size(seen.used_bytes),
        seen.sampled_one_of,
        seen.sampled_requests,
        format_size(seen.counted_read_bytes),
        100.0 * seen.read_hit_ratio,
        100.0 * seen.first_read_share,
    );
    text.push_str(&table(&advice.sizes, present, true, has_rate));
    for line in
        advice.warning.iter().map(|warning| format!("WARNING: {warning}")).chain(advice.advice.clone())
    {
        text.push_str(&format!("\n{line}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::misfit;

    #[test]
    fn a_forecast_that_is_wrong_for_the_present_size_is_not_relied_on() {
        // What no request of the sample has shown before may have been in the cache.
        for (foretold, real, new) in [(0.5, 0.5, 0.0), (0.5, 0.46, 0.0), (0.5, 0.54, 0.0), (0.3, 0.7, 0.4)] {
            assert_eq!(misfit(foretold, real, new), None, "{foretold} {real} {new}");
        }
        for (foretold, real, new) in [(0.45, 0.0, 0.0), (0.5, 0.44, 0.3), (0.3, 0.7, 0.3)] {
            let warning = misfit(foretold, real, new).expect("it does not fit");
            assert!(warning.contains(&format!("{:.1} % are foretold", 100.0 * foretold)), "{warning}");
            assert!(warning.contains(&format!("had {:.1} %", 100.0 * real)), "{warning}");
        }
    }
}
