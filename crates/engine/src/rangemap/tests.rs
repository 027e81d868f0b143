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
