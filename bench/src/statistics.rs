//! Medians, and the scatter of samples.

/// The median of some samples, and the range that holds most of them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Summary {
    /// Half of the samples are below.
    pub median: f64,
    /// A tenth of the samples is below.
    pub low: f64,
    /// A tenth of the samples is above.
    pub high: f64,
}

impl Summary {
    /// Summarizes samples; all values are zero if there are no samples.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self { median: quantile(&sorted, 0.5), low: quantile(&sorted, 0.1), high: quantile(&sorted, 0.9) }
    }
}

/// The 95 % confidence range of the true median, by ranks: no distribution of the samples is assumed.
pub fn median_range(samples: &[f64]) -> (f64, f64) {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let share = 0.98 / (samples.len().max(1) as f64).sqrt();
    (quantile(&sorted, (0.5 - share).max(0.0)), quantile(&sorted, (0.5 + share).min(1.0)))
}

/// The value below which `share` of the sorted samples lie, interpolated between neighbours.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = share * last as f64;
    let below = place.floor() as usize;
    let above = place.ceil() as usize;
    let part = place - below as f64;
    sorted[below.min(last)] * (1.0 - part) + sorted[above.min(last)] * part
}

/// The smallest sample that is at least as large as `share` of all sorted samples: an observed value, for small numbers of
/// samples. Zero if there are no samples.
pub fn percentile(sorted: &[u32], share: f64) -> u32 {
    let place = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(place.saturating_sub(1).min(sorted.len().saturating_sub(1))).copied().unwrap_or(0)
}

/// A figure with `digits` digits after the point, or with more, where it would be 0 without its first
/// significant digit.
pub fn rounded(value: f64, digits: i32) -> f64 {
    let to = |digits: i32| (value * 10_f64.powi(digits)).round() / 10_f64.powi(digits);
    let figure = to(digits);
    if figure == 0.0 && value.is_normal() { to(-(value.abs().log10().floor() as i32)) } else { figure }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_outlier_does_not_move_the_median() {
        let summary = Summary::of(&[10.0, 11.0, 900.0, 10.0, 11.0]);
        assert_eq!(summary.median, 11.0);
    }

    #[test]
    fn a_small_figure_is_not_rounded_to_nothing() {
        assert_eq!(rounded(1.234, 2), 1.23);
        assert_eq!(rounded(-0.0, 2), 0.0);
        assert_eq!(rounded(0.0017, 2), 0.002);
        assert_eq!(rounded(-0.000_96, 2), -0.001);
        assert_eq!(rounded(0.006, 2), 0.01);
    }

    #[test]
    fn more_samples_make_the_median_more_certain() {
        let few: Vec<f64> = (0..9).map(f64::from).collect();
        let many: Vec<f64> = (0..900).map(|number| f64::from(number) / 100.0).collect();
        let width = |(low, high): (f64, f64)| high - low;
        assert!(width(median_range(&few)) > 3.0 * width(median_range(&many)));
    }

    #[test]
    fn a_percentile_is_a_sample_that_was_seen() {
        let sorted: Vec<u32> = (1..=10_000).collect();
        assert_eq!(percentile(&sorted, 0.5), 5000);
        assert_eq!(percentile(&sorted, 0.9999), 9999);
        assert_eq!(percentile(&sorted, 1.0), 10_000);
        assert_eq!(percentile(&[7], 0.9999), 7);
        assert_eq!(percentile(&[], 0.5), 0);
    }

    #[test]
    fn a_quantile_between_two_samples_lies_between_them() {
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), 2.5);
        assert_eq!(quantile(&[7.0], 0.9), 7.0);
        assert_eq!(quantile(&[], 0.9), 0.0);
    }
}
