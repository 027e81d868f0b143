use super::*;
use alloc::vec::Vec;

/// Bytes of log for so many blocks that a cache holds.
const fn bytes_for(blocks: u64) -> u64 {
    blocks * LOG_BYTES * 8 / 7 + 8
}

/// The number of other blocks that were read since each block was read last; `None` for the first read of a block.
fn distances(trace: &[u32]) -> Vec<Option<u32>> {
    let highest = trace.iter().copied().max().unwrap_or(0) as usize;
    let mut last: Vec<Option<usize>> = alloc::vec![None; highest + 1];
    // A Fenwick tree over the positions of the trace: 1 where a block was read last.
    let mut tree: Vec<i32> = alloc::vec![0; trace.len() + 1];
    let add = |tree: &mut Vec<i32>, mut at: usize, by: i32| {
        at += 1;
        while at < tree.len() {
            tree[at] += by;
            at += at & at.wrapping_neg();
        }
    };
    let sum = |tree: &Vec<i32>, mut end: usize| {
        let mut sum = 0;
        while end > 0 {
            sum += tree[end];
            end &= end - 1;
        }
        sum
    };
    let mut found = Vec::new();
    for (now, &key) in trace.iter().enumerate() {
        found.push(last[key as usize].map(|then| {
            let distance = sum(&tree, now) - sum(&tree, then + 1);
            add(&mut tree, then, -1);
            distance as u32
        }));
        add(&mut tree, now, 1);
        last[key as usize] = Some(now);
    }
    found
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

const LIMIT: u32 = 1 << 17;

/// The largest difference between the hit ratios of the model and the exact ones, over the sizes that `counts` accepts.
fn largest_error(trace: &[u32], counts: impl Fn(f64) -> bool) -> f64 {
    let mut curve = Curve::new(bytes_for(LIMIT.into())).expect("memory");
    trace.iter().for_each(|key| curve.note_read(*key));
    let mut sum = HitCurve::default();
    curve.add_to(&mut sum);
    let rank_blocks = sum.rank_bytes as f64 * 7.0 / 8.0 / LOG_BYTES as f64;
    assert!((rank_blocks * RANKS as f64 / f64::from(LIMIT) - 1.0).abs() < 0.01, "{rank_blocks}");
    let distances = distances(trace);
    // The hottest blocks hit at the first place. Whether they are in the sample is chance, and corrected (SHARDS-adj).
    let expected = trace.len() as f64 / sum.sampled_one_of as f64;
    let (mut hits, mut worst) = (expected - sum.reads as f64, 0.0_f64);
    for (rank, more) in sum.hits.iter().enumerate() {
        hits += *more as f64;
        let blocks = rank_blocks * (rank + 1) as f64;
        let exact = distances.iter().flatten().filter(|distance| f64::from(**distance) < blocks).count();
        let error = hits / expected - exact as f64 / trace.len() as f64;
        if counts(blocks) {
            worst = worst.max(error.abs());
        }
    }
    worst
}

#[test]
fn the_curve_of_a_zipf_load_is_the_exact_one() {
    let mut random = Random(5);
    let ranks = f64::from(LIMIT * 4).ln();
    // Ranks with a probability proportional to one over the rank, scattered.
    let trace: Vec<u32> = (0..1_500_000)
        .map(|_| {
            let rank = (random.below(1 << 30) as f64 / f64::from(1 << 30) * ranks).exp() as u32;
            rank.wrapping_mul(2_654_435_761) % (LIMIT * 4)
        })
        .collect();
    let error = largest_error(&trace, |_| true);
    assert!(error < 0.03, "{error}");
}

#[test]
fn the_curve_of_a_loop_rises_where_the_loop_fits() {
    let length = LIMIT / 2;
    let trace: Vec<u32> = (0..10 * length).map(|step| step % length).collect();
    // The sets of the model are not equally full, so that the step is a slope.
    let error = largest_error(&trace, |blocks| (blocks / f64::from(length) - 1.0).abs() > 0.45);
    assert!(error < 0.02, "{error}");
}

#[test]
fn a_scan_has_no_hits_at_any_size() {
    let trace: Vec<u32> = (0..1_000_000).collect();
    let error = largest_error(&trace, |_| true);
    assert!(error < 0.02, "{error}");
}

#[test]
fn a_model_weighs_less_than_a_byte_for_eight_blocks() {
    let curve = Curve::new(bytes_for(1 << 20)).expect("memory");
    assert!(curve.bytes() * 8 < 1 << 20, "{}", curve.bytes());
}

#[test]
fn small_lanes_and_no_lane_are_counted_without_a_panic() {
    for bytes in [0, 1, 4096, 100_000] {
        let mut curve = Curve::new(bytes).expect("memory");
        (0..100).chain(0..100).for_each(|key| curve.note_read(key));
        assert_eq!(curve.counts[0].reads, 200, "{bytes}");
    }
    let mut none = Curve::none();
    (0..100).for_each(|key| none.note_read(key));
    let mut sum = HitCurve::default();
    none.add_to(&mut sum);
    assert_eq!((none.counts.len(), none.bytes(), sum), (0, 0, HitCurve::default()));
}

#[test]
fn a_block_counts_at_its_place_and_moves_to_the_front() {
    // One set, and every block is in the sample.
    let mut curve = Curve::new(4096).expect("memory");
    (0..40).for_each(|key| curve.note_read(key));
    curve.note_read(39);
    curve.note_read(8);
    curve.note_read(8);
    // It was evicted.
    curve.note_read(7);
    let mut expected = [0; RANKS];
    (expected[0], expected[31]) = (2, 1);
    assert_eq!(*curve.counts[0].hits, expected);
    assert_eq!((curve.sample, curve.counts[0].reads), (0, 44));
}
