//! Which sizes to try, and what follows from their figures.

use crate::{Outcome, Survey};
use cbd_runtime::size::format_size;
use cbd_types::CHECKSUM_BLOCK;

/// Points of the hit ratio that are not worth another size.
const NEGLIGIBLE: f64 = 0.01;
/// The share of a cache that holds data, for the time to full and for the size that holds a working set.
const DATA_SHARE: f64 = 0.9;
/// Sizes that are tried end at multiples of this.
const UNIT: u64 = 1 << 20;

/// The sizes to try: from an eighth of the present size to four times as much; without a present size up to one that holds all that
/// the trace uses. None is below `least`.
#[must_use]
pub fn sizes_around(present: Option<u64>, survey: &Survey, least: u64) -> Vec<u64> {
    let rounded = |bytes: f64| ((bytes / UNIT as f64).ceil() as u64 * UNIT).max(least);
    let mut sizes: Vec<u64> = match present {
        Some(present) => [0.125, 0.25, 0.5, 1.0, 2.0, 4.0]
            .iter()
            .map(|factor| if *factor == 1.0 { present } else { rounded(present as f64 * factor) })
            .collect(),
        None => {
            let all = survey.working_set().max(CHECKSUM_BLOCK) as f64 / DATA_SHARE;
            (0..=6).rev().map(|halvings| rounded(all / f64::from(1 << halvings))).collect()
        }
    };
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The smallest size whose hit ratio is next to that of the largest.
#[must_use]
pub fn knee(outcomes: &[Outcome]) -> Option<&Outcome> {
    let best = outcomes.iter().map(|outcome| outcome.hit).fold(0.0, f64::max);
    outcomes.iter().filter(|outcome| outcome.hit >= best - NEGLIGIBLE).min_by_key(|outcome| outcome.bytes)
}

/// The seconds in which writes at the highest rate of the trace fill a cache of `bytes` in front of a disk that takes `disk_rate` bytes a
/// second; `None` if the disk keeps up, and if the trace has no such rate.
#[must_use]
pub fn time_to_full_s(bytes: u64, survey: &Survey, disk_rate: u64) -> Option<f64> {
    let excess = survey.write_rate_max()? - disk_rate as f64;
    (excess > 0.0).then(|| bytes as f64 * DATA_SHARE / excess)
}

/// One sentence about the present size, or else about the smallest one that is enough.
#[must_use]
pub fn sentence(outcomes: &[Outcome], present: Option<u64>, survey: &Survey) -> String {
    if survey.reads == 0 {
        return "The trace has no reads: the size of the cache matters for writes alone.".to_owned();
    }
    let of_present = present.and_then(|bytes| outcomes.iter().find(|outcome| outcome.bytes == bytes));
    let Some(chosen) = of_present.or_else(|| knee(outcomes)) else { return String::new() };
    let mut others: Vec<String> = Vec::new();
    let larger = outcomes.iter().filter(|other| other.bytes > chosen.bytes).min_by_key(|other| other.bytes);
    let smaller = outcomes.iter().filter(|other| other.bytes < chosen.bytes).max_by_key(|other| other.bytes);
    if let Some(larger) = larger {
        let name = named(larger.bytes, chosen.bytes);
        others.push(format!("{name} would bring {}", points(larger.hit - chosen.hit)));
    }
    if let Some(smaller) = smaller {
        let name = named(smaller.bytes, chosen.bytes);
        others.push(format!("{name} would cost {}", points(chosen.hit - smaller.hit)));
    }
    let begin = format!("{} has {:.1} % of what is read", format_size(chosen.bytes), 100.0 * chosen.hit);
    if others.is_empty() { format!("{begin}.") } else { format!("{begin}; {}.", others.join("; ")) }
}

/// A size beside another one.
fn named(bytes: u64, beside: u64) -> String {
    if bytes == 2 * beside {
        "twice the cache".to_owned()
    } else if 2 * bytes == beside {
        "half the cache".to_owned()
    } else {
        format_size(bytes)
    }
}

/// A difference of hit ratios, in percentage points.
fn points(difference: f64) -> String {
    let points = 100.0 * difference.max(0.0);
    match points {
        _ if points < 0.5 => "nothing".to_owned(),
        _ if points < 1.5 => "1 point".to_owned(),
        _ => format!("{points:.0} points"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Action, Request};
    use cbd_types::ByteRange;

    fn outcome(bytes: u64, hit: f64) -> Outcome {
        Outcome {
            bytes,
            hit,
            disk_read_bytes: 0,
            dirty_bytes_max: 0,
            dirty_bytes_mean: 0,
            sampled_one_of: 1,
            memory_bytes: 0,
        }
    }

    fn survey(writes_per_s: u64) -> Survey {
        let mut survey = Survey::new();
        survey.add(&Request { us: 0, action: Action::Read, range: ByteRange::at(0, 4096) });
        for second in 0..=60 {
            let range = ByteRange::at(0, writes_per_s);
            survey.add(&Request { us: second * 1_000_000, action: Action::Write, range });
        }
        survey
    }

    #[test]
    fn the_sentence_says_what_twice_and_half_the_cache_bring() {
        let outcomes = [outcome(1 << 30, 0.5), outcome(2 << 30, 0.7), outcome(4 << 30, 0.731)];
        let text = sentence(&outcomes, Some(2 << 30), &survey(0));
        assert_eq!(
            text,
            "2 GiB has 70.0 % of what is read; twice the cache would bring 3 points; half the cache would cost 20 points."
        );
        let text = sentence(&outcomes, None, &survey(0));
        assert!(text.starts_with("4 GiB has 73.1 %"), "{text}");
    }

    #[test]
    fn the_smallest_size_that_is_enough_is_chosen() {
        let outcomes = [outcome(1, 0.5), outcome(2, 0.895), outcome(4, 0.9)];
        assert_eq!(knee(&outcomes).map(|outcome| outcome.bytes), Some(2));
    }

    #[test]
    fn a_cache_is_full_when_what_the_disk_cannot_take_has_filled_it() {
        let seconds = time_to_full_s(1 << 30, &survey(20 << 20), 10 << 20).expect("the disk is too slow");
        assert!((seconds - 0.9 * 1024.0 / 10.0).abs() < 5.0, "{seconds}");
        assert_eq!(time_to_full_s(1 << 30, &survey(20 << 20), 30 << 20), None);
    }

    #[test]
    fn the_sizes_are_around_the_present_one_or_up_to_the_working_set() {
        let sizes = sizes_around(Some(1 << 30), &survey(0), 9 << 20);
        assert_eq!(
            sizes.iter().map(|size| size >> 20).collect::<Vec<_>>(),
            [128, 256, 512, 1024, 2048, 4096]
        );
        assert_eq!(sizes_around(None, &survey(0), 9 << 20), [9 << 20]);
    }
}
