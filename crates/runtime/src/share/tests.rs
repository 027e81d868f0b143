use super::*;
use cbd_engine::{HitCurve, RANKS};

/// A cache whose hits rise by these amounts with each further ten segments.
fn member(segments: u32, min: u32, max: u32, hits: &[f64]) -> Member {
    let reads = hits.iter().sum();
    let curve = Curve { hits: hits.to_vec(), rank: 10.0, reads, sample: 0.01 };
    Member { segments, min, max, weight: 1, curve, is_waiting: false }
}

fn total(members: &[Member]) -> u64 {
    members.iter().map(|member| u64::from(member.segments)).sum()
}

/// Does what the plan says; returns the free segments then, and how many were given up.
fn round(members: &mut [Member], free: u32, is_moving: bool) -> (u32, u32) {
    let plan = plan(members, free, is_moving);
    let given: u32 = plan.shrinks.iter().sum();
    members.iter_mut().zip(&plan.shrinks).for_each(|(member, segments)| member.segments -= segments);
    let more = grow(members, &plan.targets, free + given);
    members.iter_mut().zip(&more).for_each(|(member, segments)| member.segments += segments);
    (free + given - more.iter().sum::<u32>(), given)
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn members(&mut self) -> Vec<Member> {
        (0..1 + self.below(5))
            .map(|_| {
                let min = 2 + self.below(30) as u32;
                let max = min + self.below(200) as u32;
                let segments = min + self.below(u64::from(max - min) + 1) as u32;
                let hits: Vec<f64> = (0..RANKS).map(|_| (self.below(100) * self.below(2)) as f64).collect();
                let weight = 1 + self.below(5) as u16;
                let is_waiting = self.below(6) == 0;
                Member { weight, is_waiting, ..member(segments, min, max, &hits) }
            })
            .collect()
    }
}

#[test]
fn whatever_the_curves_are_sizes_keep_their_bounds_and_their_sum() {
    let mut random = Random(1);
    for step in 0..3000 {
        let mut members = random.members();
        let mut free = random.below(100) as u32;
        let all = total(&members) + u64::from(free);
        for _ in 0..3 {
            let before = members.clone();
            let plan = plan(&members, free, false);
            let sum: u64 = plan.targets.iter().map(|target| u64::from(*target)).sum();
            let most: u64 = members.iter().map(|member| u64::from(member.max)).sum();
            assert_eq!(sum, all.min(most), "step {step}");
            (free, _) = round(&mut members, free, step % 2 == 0);
            assert_eq!(total(&members) + u64::from(free), all, "step {step}");
            for (now, before) in members.iter().zip(&before) {
                assert!((now.min..=now.max).contains(&now.segments), "step {step}: {now:?}");
                let given = before.segments.saturating_sub(now.segments);
                assert!(given <= (before.segments / 10).max(1), "step {step}: {before:?} {now:?}");
            }
            assert!(free == 0 || members.iter().all(|member| member.segments == member.max), "step {step}");
        }
    }
}

#[test]
fn more_space_takes_nothing_from_anybody() {
    let mut random = Random(2);
    for step in 0..1000 {
        let mut members = random.members();
        members.iter_mut().for_each(|member| member.is_waiting = false);
        let (less, more) = (plan(&members, 10, false).targets, plan(&members, 40, false).targets);
        // One segment is rounding.
        assert!(
            less.iter().zip(&more).all(|(less, more)| *less <= more + 1),
            "step {step}: {less:?} {more:?}"
        );
    }
}

#[test]
fn no_other_division_has_more_hits() {
    let mut random = Random(3);
    for step in 0..300 {
        let mut members = random.members();
        members.truncate(3);
        members.iter_mut().for_each(|member| member.is_waiting = false);
        let free = random.below(100) as u32;
        let targets = plan(&members, free, false).targets;
        let hits = |sizes: &[u32]| -> f64 {
            members.iter().zip(sizes).map(|(member, size)| member.hits_at(*size)).sum()
        };
        let best = hits(&targets);
        for _ in 0..200 {
            let mut other = targets.clone();
            let (from, to) =
                (random.below(members.len() as u64) as usize, random.below(members.len() as u64) as usize);
            let room = (other[from] - members[from].low()).min(members[to].high() - other[to]);
            let moved = random.below(u64::from(room) + 1) as u32;
            other[from] -= moved;
            other[to] += moved;
            // Sizes are whole segments, at most half a segment beside the ends of pieces.
            assert!(hits(&other) <= best * 1.02 + 10.0, "step {step}: {targets:?} {other:?}");
        }
    }
}

#[test]
fn a_pool_comes_to_rest_and_stays_there_in_spite_of_noise() {
    let mut random = Random(4);
    for step in 0..200 {
        let mut members = random.members();
        members.iter_mut().for_each(|member| member.is_waiting = false);
        let steady: Vec<Vec<f64>> = members.iter().map(|member| member.curve.hits.clone()).collect();
        let mut free = random.below(50) as u32;
        let mut given = 0;
        for _ in 0..100 {
            (free, given) = round(&mut members, free, given > 0);
        }
        assert_eq!(given, 0, "step {step}");
        let rest: Vec<u32> = members.iter().map(|member| member.segments).collect();
        for _ in 0..50 {
            for (member, steady) in members.iter_mut().zip(&steady) {
                let noisy = steady.iter().map(|hits| hits * (0.999 + random.below(100) as f64 / 50_000.0));
                member.curve.hits = noisy.collect();
            }
            let (_, moved) = round(&mut members, free, false);
            assert_eq!(moved, 0, "step {step}");
        }
        assert_eq!(rest, members.iter().map(|member| member.segments).collect::<Vec<_>>());
    }
}

#[test]
fn space_goes_to_the_cache_whose_hits_rise_most() {
    // One has its working set in 40 segments, the other gains up to 80.
    let steep = member(50, 10, 100, &[9.0, 9.0, 9.0, 9.0]);
    let flat = member(50, 10, 100, &[5.0; 8]);
    assert_eq!(plan(&[steep, flat], 0, false).targets, [40, 60]);
}

#[test]
fn a_weight_multiplies_the_hits() {
    let one = member(50, 10, 100, &[5.0; 10]);
    let other = Member { weight: 3, ..member(50, 10, 100, &[2.0; 10]) };
    assert_eq!(plan(&[one.clone(), other.clone()], 0, false).targets, [10, 90]);
    assert_eq!(plan(&[one, Member { weight: 2, ..other }], 0, false).targets, [90, 10]);
}

#[test]
fn a_loop_that_does_not_fit_is_worth_the_slope_of_its_hull() {
    // All of its hits are at 80 segments: 1.25 for each segment on the way.
    let looping = member(50, 10, 100, &[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 100.0]);
    let flat = member(50, 10, 100, &[5.0; 10]);
    let plan = plan(&[looping, flat], 0, false);
    assert_eq!(plan.targets, [80, 20]);
    assert_eq!(plan.shrinks, [0, 5]);
}

#[test]
fn a_cache_without_reads_keeps_its_minimum_and_what_no_cache_wants() {
    let idle = member(60, 10, 100, &[0.0; 10]);
    let reading = member(20, 10, 100, &[5.0, 5.0, 5.0, 5.0]);
    let next = plan(&[idle.clone(), reading], 0, false);
    assert_eq!((next.targets, next.shrinks), (vec![40, 40], vec![6, 0]));
    let other = member(20, 10, 100, &[0.0; 10]);
    let next = plan(&[idle, other], 30, false);
    assert_eq!((&next.targets, next.shrinks), (&vec![75, 35], vec![0, 0]));
}

#[test]
fn free_segments_are_used_first_and_nothing_moves_for_a_small_gain() {
    let one = member(50, 10, 100, &[5.0; 5]);
    let other = member(50, 10, 100, &[4.97; 10]);
    let even = plan(&[one.clone(), other.clone()], 20, false);
    assert_eq!((even.targets, even.shrinks), (vec![50, 70], vec![0, 0]));
    let better = member(50, 10, 100, &[5.03; 10]);
    assert_eq!(plan(&[one, better], 0, false).shrinks, [0, 0], "0.6 % more hits");
}

#[test]
fn a_gain_that_chance_can_make_moves_nothing() {
    let mut one = member(50, 10, 100, &[5.0; 5]);
    let other = member(50, 10, 100, &[7.0; 10]);
    assert_eq!(plan(&[one.clone(), other.clone()], 0, false).shrinks, [5, 0]);
    one.curve.sample = 10.0;
    assert_eq!(plan(&[one, other], 0, false).shrinks, [0, 0]);
}

#[test]
fn writers_that_wait_get_what_no_reads_use_and_no_more() {
    let idle = member(60, 10, 100, &[0.0; 10]);
    let reading = member(30, 10, 100, &[5.0, 5.0, 5.0]);
    let waiting = Member { is_waiting: true, ..member(20, 10, 60, &[0.0; 10]) };
    let next = plan(&[idle, reading, waiting], 0, false);
    assert_eq!((next.targets, next.shrinks), (vec![20, 30, 60], vec![6, 0, 0]));
}

#[test]
fn room_is_made_down_to_the_minima_where_it_costs_least() {
    let idle = member(40, 30, 100, &[0.0; 10]);
    let reading = member(50, 10, 100, &[9.0, 9.0, 1.0, 1.0, 1.0]);
    let members = [idle, reading];
    assert_eq!(make_room(&members, 5), Ok(vec![5, 0]));
    assert_eq!(make_room(&members, 30), Ok(vec![10, 20]));
    assert_eq!(make_room(&members, 50), Ok(vec![10, 40]));
    assert_eq!(make_room(&members, 51), Err(50));
    assert_eq!(make_room(&[], 1), Err(0));
}

#[test]
fn hits_of_the_past_count_half_after_ten_seconds_and_counting_can_be_reset() {
    let mut counted = HitCurve { rank_bytes: 1000, sampled_one_of: 64, ..HitCurve::default() };
    let mut tracker = Tracker::default();
    counted.hits[0] = 1_000_000;
    counted.reads = 1_000_000;
    tracker.note(&counted, 10.0);
    assert_eq!(tracker.curve(100), Curve::default(), "what was counted before is not of the last seconds");
    let mut rate = |tracker: &mut Tracker, hits: u64| {
        counted.hits[0] += hits;
        counted.reads += 2 * hits;
        tracker.note(&counted, 10.0);
        let curve = tracker.curve(100);
        (curve.rank, curve.hits[0], curve.reads)
    };
    assert_eq!(rate(&mut tracker, 10), (10.0, 64.0, 128.0));
    assert_eq!(rate(&mut tracker, 0), (10.0, 5.0 * 64.0 / 15.0, 10.0 * 64.0 / 15.0));
    tracker.note(&HitCurve { rank_bytes: 2000, sampled_one_of: 64, ..HitCurve::default() }, 10.0);
    assert_eq!(tracker.curve(100), Curve::default());
}
