//! The hits of a cache at each size, from what the engine has counted lately.
//!
//! Invariants: counts of the past lose half of their weight every [`HALF_LIFE_S`] seconds.

use cbd_engine::{HitCurve, RANKS};

/// Seconds after which a read counts half.
pub const HALF_LIFE_S: f64 = 10.0;

/// Hits at each size of a cache.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    /// Hits a second that each further [`rank`](Self::rank) brings.
    pub hits: Vec<f64>,
    /// Segments of a rank; above 0 if there are hits.
    pub rank: f64,
    /// Reads a second.
    pub reads: f64,
    /// Reads a second that one read of the sample stands for.
    pub sample: f64,
}

impl Curve {
    /// Hits a second of a cache of so many segments.
    #[must_use]
    pub fn hits_at(&self, segments: f64) -> f64 {
        if self.rank <= 0.0 {
            return 0.0;
        }
        let ranks = segments / self.rank;
        let share = |number: usize| (ranks - number as f64).clamp(0.0, 1.0);
        self.hits.iter().enumerate().map(|(number, hits)| hits * share(number)).sum()
    }

    /// The concave hull of the curve from `low` to `high` segments: slopes that fall, each with its number of segments.
    #[must_use]
    pub fn hull(&self, low: u32, high: u32) -> Vec<(f64, f64)> {
        let (low, high) = (f64::from(low), f64::from(high));
        if high <= low || self.rank <= 0.0 {
            return Vec::new();
        }
        let between =
            (1..=self.hits.len()).map(|rank| rank as f64 * self.rank).filter(|at| *at > low && *at < high);
        let mut points = vec![(low, self.hits_at(low))];
        for at in between.chain([high]) {
            let point = (at, self.hits_at(at));
            // A point that a straight line passes above is not part of the hull.
            while let [.., before, last] = points[..]
                && slope(before, last) <= slope(last, point)
            {
                points.pop();
            }
            points.push(point);
        }
        points.windows(2).map(|ends| (slope(ends[0], ends[1]), ends[1].0 - ends[0].0)).collect()
    }

    /// The height at `segments` of the hull from `low` to `high`.
    #[must_use]
    pub fn hull_at(&self, low: u32, high: u32, segments: u32) -> f64 {
        if segments <= low {
            return self.hits_at(segments.into());
        }
        let mut left = f64::from(segments) - f64::from(low);
        let mut height = self.hits_at(low.into());
        for (slope, width) in self.hull(low, high) {
            height += slope * left.clamp(0.0, width);
            left -= width;
        }
        height
    }
}

fn slope(from: (f64, f64), to: (f64, f64)) -> f64 {
    (to.1 - from.1) / (to.0 - from.0)
}

/// Follows the counts of a cache.
#[derive(Clone, Debug, Default)]
pub struct Tracker {
    last: Option<HitCurve>,
    hits: Vec<f64>,
    reads: f64,
    seconds: f64,
}

impl Tracker {
    /// Notes what the engine has counted since the cache was opened, `seconds` after the last time.
    #[expect(clippy::cast_precision_loss, reason = "counts of a few seconds")]
    pub fn note(&mut self, now: &HitCurve, seconds: f64) {
        let is_same = |last: &HitCurve| {
            (last.rank_bytes, last.sampled_one_of) == (now.rank_bytes, now.sampled_one_of)
                && last.reads <= now.reads
        };
        let Some(last) = self.last.replace(now.clone()).filter(is_same) else {
            // Counting was reset, with other sizes.
            (self.hits, self.reads, self.seconds) = (vec![0.0; RANKS], 0.0, 0.0);
            return;
        };
        let kept = 0.5_f64.powf(seconds / HALF_LIFE_S);
        for (sum, (now, last)) in self.hits.iter_mut().zip(now.hits.iter().zip(&last.hits)) {
            *sum = *sum * kept + now.saturating_sub(*last) as f64;
        }
        self.reads = self.reads * kept + (now.reads - last.reads) as f64;
        self.seconds = self.seconds * kept + seconds;
    }

    /// The hits at each size now, for a transport with such segments.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a size of memory")]
    pub fn curve(&self, segment_size: u64) -> Curve {
        let Some(last) = self.last.as_ref().filter(|last| last.rank_bytes > 0 && self.seconds > 0.0) else {
            return Curve::default();
        };
        let sample = last.sampled_one_of as f64 / self.seconds;
        Curve {
            hits: self.hits.iter().map(|hits| hits * sample).collect(),
            rank: last.rank_bytes as f64 / segment_size as f64,
            reads: self.reads * sample,
            sample,
        }
    }
}
