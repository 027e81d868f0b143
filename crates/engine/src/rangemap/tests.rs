//! The map against an array.

use super::*;
use alloc::vec;

const SIZE: u64 = 40;

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange { start, end }
}

fn random() -> impl FnMut(u64) -> u64 {
    let mut random = 7_u64;
    move |below| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    }
}

/// The value of each byte, from ranges that must be in order and apart.
fn flat(parts: impl Iterator<Item = (ByteRange, u64)>) -> [Option<u64>; SIZE as usize] {
    let (mut bytes, mut end) = ([None; SIZE as usize], 0);
    for (part, value) in parts {
        assert!(end <= part.start && part.start < part.end, "{part} behind {end}");
        end = part.end;
        bytes[part.start as usize..part.end as usize].fill(Some(value));
    }
    bytes
}

#[test]
fn the_map_agrees_with_an_array() {
    let mut next = random();
    for _ in 0..200 {
        let mut map = RangeMap::default();
        let mut model = [None; SIZE as usize];
        for value in 0..40 {
            let start = next(SIZE);
            let range = range(start, start + 1 + next((SIZE - start).min(12)));
            let bytes = range.start as usize..range.end as usize;
            let odd = |known: &u64| known % 2 == 1;
            match next(4) {
                0 => {
                    map.remove(range, odd);
                    model[bytes.clone()].iter_mut().for_each(|byte| *byte = byte.filter(|known| !odd(known)));
                }
                1 => {
                    map.insert(range, value, odd);
                    let stay = |byte: Option<u64>| byte.filter(odd).or(Some(value));
                    model[bytes.clone()].iter_mut().for_each(|byte| *byte = stay(*byte));
                }
                _ => {
                    map.insert(range, value, |_| false);
                    model[bytes.clone()].fill(Some(value));
                }
            }
            assert_eq!(flat(map.iter()), model);
            assert_eq!(map.is_empty(), model.iter().all(Option::is_none));
            let mut touched = [None; SIZE as usize];
            touched[bytes.clone()].copy_from_slice(&model[bytes]);
            assert_eq!(flat(map.touching(range)), touched);
        }
    }
}

#[test]
fn an_empty_range_changes_and_touches_nothing() {
    let mut map = RangeMap::default();
    map.insert(range(3, 3), 1, |_| false);
    assert!(map.is_empty());
    map.insert(range(2, 6), 1, |_| false);
    map.insert(range(4, 4), 2, |_| false);
    assert_eq!(map.touching(range(4, 4)).next(), None);
    assert_eq!(map.iter().collect::<Vec<_>>(), [(range(2, 6), 1)]);
}

/// Random changes of a map of many extents, and of an array. Each change was reserved.
fn change_many(
    map: &mut RangeMap<u64>,
    model: &mut [Option<u64>],
    next: &mut dyn FnMut(u64) -> u64,
    grows: bool,
) {
    let size = model.len() as u64;
    let start = next(size);
    let longest = if next(50) == 0 { size } else { 8 };
    let range = range(start, start + 1 + next((size - start).min(longest)));
    let bytes = &mut model[range.start as usize..range.end as usize];
    map.reserve(range).expect("there is memory");
    let (spare, room) = (map.spare.len(), map.runs.capacity());
    let runs = map.runs.len();
    if next(10) < if grows { 3 } else { 8 } {
        map.remove(range, |known| known % 3 == 1);
        bytes.iter_mut().for_each(|byte| *byte = byte.filter(|known| known % 3 != 1));
    } else {
        let value = next(9);
        map.insert(range, value, |known| known % 3 == 2);
        bytes.iter_mut().for_each(|byte| *byte = byte.filter(|known| known % 3 == 2).or(Some(value)));
    }
    let added = map.runs.len().saturating_sub(runs);
    assert!(added <= spare, "{added} runs were added, {spare} were reserved");
    assert_eq!(map.runs.capacity(), room, "the list of runs was allocated again");
}

#[test]
fn a_map_of_many_extents_agrees_with_an_array_while_it_grows_and_shrinks() {
    let mut next = random();
    let (mut map, mut model) = (RangeMap::default(), vec![None; 6000]);
    let mut most = 0;
    for step in 0..24_000_u32 {
        change_many(&mut map, &mut model, &mut next, step % 8000 < 5000);
        most = most.max(map.runs.len());
        assert!(map.runs.iter().all(|run| (1..=RUN).contains(&run.len()) && run.capacity() == RUN));
        if step % 100 == 0 {
            let mut bytes = vec![None; model.len()];
            let mut end = 0;
            for (part, value) in map.iter() {
                assert!(end <= part.start && part.start < part.end, "{part} behind {end}");
                end = part.end;
                bytes[part.start as usize..part.end as usize].fill(Some(value));
            }
            assert_eq!(bytes, model, "step {step}");
        }
    }
    assert!(most > 10, "{most} runs at most");
    let everything = range(0, model.len() as u64);
    map.remove(everything, |_| true);
    assert!(map.is_empty() && map.spare.len() <= SPARE, "{} spare runs", map.spare.len());
}

#[test]
fn runs_that_are_nearly_empty_are_joined() {
    let mut map = RangeMap::default();
    for number in 0..2000 {
        map.insert(range(2 * number, 2 * number + 1), number, |_| false);
    }
    let full = map.runs.len();
    map.remove(range(0, 4000), |number| number % 16 != 0);
    assert_eq!(map.iter().count(), 125);
    assert!(map.runs.len() <= full / 4, "{} of {full} runs", map.runs.len());
    let expected: Vec<_> =
        (0..125).map(|number| (range(32 * number, 32 * number + 1), 16 * number)).collect();
    assert_eq!(map.iter().collect::<Vec<_>>(), expected);
}

/// A map of runs of so many extents each: extent `number` is byte `2 * number`.
fn with_runs(lengths: &[usize]) -> RangeMap<u64> {
    let mut number = 0..;
    let runs = lengths.iter().map(|length| {
        let mut run = Vec::with_capacity(RUN);
        run.extend(
            number
                .by_ref()
                .take(*length)
                .map(|at: u64| Extent { range: range(2 * at, 2 * at + 1), value: at }),
        );
        run
    });
    RangeMap { runs: runs.collect(), spare: Vec::new() }
}

fn lengths(map: &RangeMap<u64>) -> Vec<usize> {
    map.runs.iter().map(Vec::len).collect()
}

#[test]
fn a_full_run_is_split_in_the_middle_and_no_other() {
    let (run, half) = (RUN as u64, RUN / 2);
    for at in 0..=run {
        for length in [RUN - 1, RUN] {
            let mut map = with_runs(&[length]);
            let at = at.min(length as u64);
            let before = (2 * at).checked_sub(1);
            let added = before.map_or_else(|| range(2 * run, 2 * run + 1), |start| range(start, start + 1));
            map.insert(added, 999, |_| false);
            let expected = match (length == RUN, before) {
                (false, _) => vec![RUN],
                (true, Some(_)) if at as usize <= half => vec![half + 1, half],
                (true, _) => vec![half, half + 1],
            };
            assert_eq!(lengths(&map), expected, "{at} of {length}");
            assert!(map.iter().zip(map.iter().skip(1)).all(|((a, _), (b, _))| a.end <= b.start));
            assert_eq!(map.iter().count(), length + 1);
        }
    }
    // Behind all others there is room in the last run.
    let mut map = with_runs(&[RUN, 3]);
    map.insert(range(1000, 1001), 1, |_| false);
    assert_eq!(lengths(&map), [RUN, 4]);
}

#[test]
fn a_run_that_loses_an_extent_is_joined_if_it_is_short_and_both_are_half_a_run() {
    let (short, half) = (RUN / 4, RUN / 2);
    for (before, removed, expected) in [
        (vec![short + 1, 5], 0, vec![short, 5]),
        (vec![short, 5], 0, vec![short + 4]),
        (vec![short, half + 1 - short], 0, vec![half]),
        (vec![short, half + 2 - short], 0, vec![short - 1, half + 2 - short]),
        (vec![10, short], 10, vec![9 + short]),
        (vec![10, short, 4], 10, vec![10 + short + 3]),
        (vec![RUN, short, 4], RUN, vec![RUN, short + 3]),
        (vec![5, 1, 7], 5, vec![5, 7]),
        (vec![RUN], 7, vec![RUN - 1]),
    ] {
        let mut map = with_runs(&before);
        let at = 2 * removed as u64;
        map.remove(range(at, at + 1), |_| true);
        assert_eq!(lengths(&map), expected, "{before:?}");
        assert!(map.iter().map(|(_, value)| value).is_sorted());
    }
}

#[test]
fn emptied_runs_are_kept_where_the_list_of_them_has_room() {
    for room in [0, 4] {
        let mut emptied = with_runs(&[1, RUN]);
        emptied.spare = Vec::with_capacity(room);
        emptied.remove(range(0, 1), |_| true);
        let mut joined = with_runs(&[RUN / 4, 3]);
        joined.spare = Vec::with_capacity(room);
        joined.remove(range(0, 1), |_| true);
        for map in [emptied, joined] {
            assert_eq!((map.runs.len(), map.spare.len(), map.spare.capacity()), (1, room.min(1), room));
        }
    }
}

#[test]
fn as_many_runs_are_reserved_as_a_change_can_add_and_few_of_them_are_kept() {
    let quarter = RUN / 4;
    for (touched, runs) in [(0, 3), (1, 3), (quarter - 2, 3), (quarter - 1, 4), (2 * quarter - 2, 4)] {
        let mut map = with_runs(&[RUN]);
        let all = range(0, 2 * touched as u64);
        map.reserve(all).expect("there is memory");
        assert_eq!(map.spare.len(), runs, "{touched} extents");
        map.reserve(all).expect("there is memory");
        assert_eq!(map.spare.len(), runs, "they are there already");
        map.spare.resize_with(9, || Vec::with_capacity(RUN));
        map.insert(range(0, 1), 5, |_| false);
        assert_eq!(map.spare.len(), SPARE);
        map.spare.resize_with(9, || Vec::with_capacity(RUN));
        map.remove(range(1, 2), |_| true);
        assert_eq!(map.spare.len(), SPARE);
    }
}
