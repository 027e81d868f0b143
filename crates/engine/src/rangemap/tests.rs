//! The map against an array.

use super::*;

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
