//! Ranges of a lane that have no data but a meaning: zeroes, or damage.
//!
//! A discard can cover a terabyte, and damage can cover a whole lane. Therefore these are extents beside the index, each with
//! its position in the log. A lookup of a block compares the position of its record with that of the extent: the later one
//! counts.
//!
//! Invariants:
//! - extents do not overlap; of two that were inserted for a range the later one stays;
//! - damage that counts as noted has a durable quarantine record.

use crate::{position::Place, rangemap::RangeMap};
use alloc::vec::Vec;
use cbd_types::ByteRange;

/// The meaning of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Meaning {
    /// Reads as zeroes.
    Zeroes,
    /// Damaged: reads fail.
    Damaged,
}

/// The damage of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Damage {
    /// The position of the record that is marked bad.
    pub place: Place,
    /// Ordinal of the segment whose quarantine record notes the damage; 0 while no record does.
    pub noted: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Extent {
    meaning: Meaning,
    place: Place,
    /// As in [`Damage`]; 0 for zeroes.
    noted: u64,
}

impl Extent {
    fn damage(&self) -> Option<Damage> {
        (self.meaning == Meaning::Damaged).then_some(Damage { place: self.place, noted: self.noted })
    }
}

/// The extents of one lane.
#[derive(Default)]
pub(crate) struct Overlay {
    extents: RangeMap<Extent>,
    /// Whether damage was ever inserted. Nearly always false; many zeroes need not be searched for damage then.
    was_damaged: bool,
}

impl Overlay {
    /// Whether there are no extents.
    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Reserves memory for one change of `range`. `None` if there is none.
    pub(crate) fn reserve(&mut self, range: ByteRange) -> Option<()> {
        self.extents.reserve(range)
    }

    /// Gives `range` the meaning `meaning` as of `place`, except where it has a later meaning. The same damage, if it is known
    /// already, stays as it is, noted or not.
    pub(crate) fn insert(&mut self, range: ByteRange, meaning: Meaning, place: Place) {
        self.was_damaged |= meaning == Meaning::Damaged;
        let is_same = |present: &Extent| {
            present.meaning == Meaning::Damaged && present.meaning == meaning && present.place == place
        };
        self.extents.insert(range, Extent { meaning, place, noted: 0 }, |present| {
            present.place > place || is_same(present)
        });
    }

    /// Marks `range` as damaged as of `place`, except where it has a later meaning. The segment `ordinal` holds the quarantine
    /// record that notes this damage.
    pub(crate) fn insert_noted(&mut self, range: ByteRange, place: Place, ordinal: u64) {
        self.was_damaged = true;
        self.extents.insert(range, Extent { meaning: Meaning::Damaged, place, noted: ordinal }, |present| {
            present.place > place
        });
    }

    /// Marks the damage in `range` that `which` selects as noted: the segment `ordinal` holds a durable quarantine record for
    /// it.
    pub(crate) fn note(&mut self, range: ByteRange, ordinal: u64, which: impl Fn(Damage) -> bool) {
        let parts: Vec<_> =
            self.extents.touching(range).filter(|(_, extent)| extent.damage().is_some_and(&which)).collect();
        for (part, extent) in parts {
            self.extents.insert(part, Extent { noted: ordinal, ..extent }, |_| false);
        }
    }

    /// Removes the zeroes that the record at `place` set in `range`: the backing device has them.
    pub(crate) fn forget_zeroes(&mut self, range: ByteRange, place: Place) {
        self.extents.remove(range, |extent| extent.meaning == Meaning::Zeroes && extent.place == place);
    }

    /// Removes the zeroes of `range`, whichever record set them: the backing device has what counts.
    pub(crate) fn forget_zeroes_in(&mut self, range: ByteRange) {
        self.extents.remove(range, |extent| extent.meaning == Meaning::Zeroes);
    }

    /// Removes all zeroes: the backing device has them.
    pub(crate) fn forget_all_zeroes(&mut self) {
        let everything = ByteRange { start: 0, end: u64::MAX };
        self.extents.remove(everything, |extent| extent.meaning == Meaning::Zeroes);
    }

    /// Removes all zeroes that records of the segment `ordinal` set.
    pub(crate) fn forget_segment(&mut self, ordinal: u64) {
        let everything = ByteRange { start: 0, end: u64::MAX };
        self.extents
            .remove(everything, |extent| extent.meaning == Meaning::Zeroes && extent.place.0 == ordinal);
    }

    /// Removes the damage of the record at `place` from `range`, which a later record holds. Other damage may be later, and
    /// stays.
    pub(crate) fn heal_at(&mut self, range: ByteRange, place: Place) {
        self.extents.remove(range, |extent| extent.meaning == Meaning::Damaged && extent.place == place);
    }

    /// Removes all damage from `range`, which was overwritten.
    pub(crate) fn heal(&mut self, range: ByteRange) {
        self.extents.remove(range, |extent| extent.meaning == Meaning::Damaged);
    }

    /// Parts of `range` that have a meaning later than a record at `place`; all parts that have a meaning if there is no
    /// `place`.
    pub(crate) fn later_than(
        &self,
        range: ByteRange,
        place: Option<Place>,
    ) -> impl Iterator<Item = (ByteRange, Meaning)> + '_ {
        self.extents.touching(range).filter_map(move |(part, Extent { meaning, place: since, .. })| {
            let counts = place.is_none_or(|place| match meaning {
                Meaning::Zeroes => since > place,
                // Damage has the position of the record that it marks bad.
                Meaning::Damaged => since >= place,
            });
            counts.then_some((part, meaning))
        })
    }

    /// Parts of `range` that read as zeroes unless a later record covers them, with the position of the record that zeroed them.
    pub(crate) fn zeroes_in(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, Place)> + '_ {
        let zeroes = |(part, extent): (ByteRange, Extent)| {
            (extent.meaning == Meaning::Zeroes).then_some((part, extent.place))
        };
        self.extents.touching(range).filter_map(zeroes)
    }

    /// Damaged parts of `range`.
    pub(crate) fn damaged_in(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, Damage)> + '_ {
        self.extents.touching(range).filter_map(|(part, extent)| Some((part, extent.damage()?)))
    }

    /// All damaged extents.
    pub(crate) fn damaged(&self) -> impl Iterator<Item = (ByteRange, Damage)> + '_ {
        self.was_damaged
            .then(|| self.extents.iter())
            .into_iter()
            .flatten()
            .filter_map(|(range, extent)| Some((range, extent.damage()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overlay_agrees_with_an_array() {
        let mut overlay = Overlay::default();
        let mut model = alloc::vec![None::<(Meaning, Place)>; 200];
        let mut random = 7u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for step in 0..3000 {
            let start = next(190);
            let range = ByteRange::at(start, 1 + next(200 - start));
            let meaning = if next(4) == 0 { Meaning::Damaged } else { Meaning::Zeroes };
            let place = (next(100), next(50) as u32);
            overlay.insert(range, meaning, place);
            for byte in range.start..range.end {
                let known = &mut model[byte as usize];
                if known.is_none_or(|(_, before)| before <= place) {
                    *known = Some((meaning, place));
                }
            }
            if step % 3 == 0 {
                overlay.forget_zeroes(range, place);
                for known in &mut model[range.start as usize..range.end as usize] {
                    if *known == Some((Meaning::Zeroes, place)) {
                        *known = None;
                    }
                }
            }
            if step % 50 == 49 {
                overlay.heal(range);
                for known in &mut model[range.start as usize..range.end as usize] {
                    if known.is_some_and(|(meaning, _)| meaning == Meaning::Damaged) {
                        *known = None;
                    }
                }
            }
            for byte in 0..200 {
                let found: Vec<_> =
                    overlay.later_than(ByteRange::at(byte, 1), None).map(|(_, meaning)| meaning).collect();
                let expected: Vec<_> = model[byte as usize].iter().map(|(meaning, _)| *meaning).collect();
                assert_eq!(found, expected, "step {step} byte {byte}");
            }
        }
    }

    /// What an array knows of each byte: meaning, place and the segment that notes it.
    type Model = [Option<(Meaning, Place, u64)>; 64];

    /// One random change of both.
    fn change(overlay: &mut Overlay, model: &mut Model, next: &mut dyn FnMut(u64) -> u64) {
        let start = next(60);
        let range = ByteRange::at(start, 1 + next(64 - start));
        let bytes = &mut model[range.start as usize..range.end as usize];
        let place = (1 + next(4), next(3) as u32);
        match next(9) {
            0 | 1 => {
                let meaning = if next(2) == 0 { Meaning::Damaged } else { Meaning::Zeroes };
                overlay.insert(range, meaning, place);
                for byte in bytes {
                    let is_same = meaning == Meaning::Damaged
                        && byte.is_some_and(|(known, at, _)| (known, at) == (meaning, place));
                    if !is_same && byte.is_none_or(|(_, at, _)| at <= place) {
                        *byte = Some((meaning, place, 0));
                    }
                }
            }
            2 => {
                let ordinal = 1 + next(9);
                overlay.insert_noted(range, place, ordinal);
                for byte in bytes.iter_mut().filter(|byte| byte.is_none_or(|(_, at, _)| at <= place)) {
                    *byte = Some((Meaning::Damaged, place, ordinal));
                }
            }
            3 => {
                let ordinal = 1 + next(9);
                overlay.note(range, ordinal, |damage| damage.place == place);
                for (meaning, at, noted) in bytes.iter_mut().flatten() {
                    if *meaning == Meaning::Damaged && *at == place {
                        *noted = ordinal;
                    }
                }
            }
            4 => {
                overlay.forget_zeroes(range, place);
                forget(bytes, |meaning, at| meaning == Meaning::Zeroes && at == place);
            }
            5 => {
                overlay.heal_at(range, place);
                forget(bytes, |meaning, at| meaning == Meaning::Damaged && at == place);
            }
            6 => {
                overlay.heal(range);
                forget(bytes, |meaning, _| meaning == Meaning::Damaged);
            }
            7 => {
                overlay.forget_segment(place.0);
                forget(model, |meaning, at| meaning == Meaning::Zeroes && at.0 == place.0);
            }
            _ if next(2) == 0 => {
                overlay.forget_all_zeroes();
                forget(model, |meaning, _| meaning == Meaning::Zeroes);
            }
            _ => {}
        }
    }

    fn forget(bytes: &mut [Option<(Meaning, Place, u64)>], goes: impl Fn(Meaning, Place) -> bool) {
        for byte in bytes {
            *byte = byte.filter(|(meaning, at, _)| !goes(*meaning, *at));
        }
    }

    fn compare(overlay: &Overlay, model: &Model, place: Place, range: ByteRange) {
        assert_eq!(overlay.is_empty(), model.iter().all(Option::is_none));
        let mut later = [None; 64];
        for (part, meaning) in overlay.later_than(range, Some(place)) {
            later[part.start as usize..part.end as usize].fill(Some(meaning));
        }
        let mut damaged = [None; 64];
        for (part, damage) in overlay.damaged_in(range) {
            damaged[part.start as usize..part.end as usize].fill(Some((damage.place, damage.noted)));
        }
        let mut all = [None; 64];
        for (part, damage) in overlay.damaged() {
            all[part.start as usize..part.end as usize].fill(Some((damage.place, damage.noted)));
        }
        for (number, byte) in model.iter().enumerate() {
            let is_inside = range.contains(&ByteRange::at(number as u64, 1));
            let expected = byte.filter(|(meaning, at, _)| match meaning {
                Meaning::Zeroes => *at > place,
                Meaning::Damaged => *at >= place,
            });
            assert_eq!(later[number], expected.filter(|_| is_inside).map(|(meaning, ..)| meaning));
            let damage = byte.filter(|(meaning, ..)| *meaning == Meaning::Damaged);
            let damage = damage.map(|(_, at, noted)| (at, noted));
            assert_eq!(all[number], damage);
            assert_eq!(damaged[number], damage.filter(|_| is_inside));
        }
    }

    #[test]
    fn what_is_noted_healed_and_forgotten_agrees_with_an_array() {
        let mut random = 9u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for _ in 0..60 {
            let (mut overlay, mut model) = (Overlay::default(), [None; 64]);
            for _ in 0..50 {
                change(&mut overlay, &mut model, &mut next);
                let start = next(60);
                let range = ByteRange::at(start, 1 + next(64 - start));
                compare(&overlay, &model, (1 + next(4), next(3) as u32), range);
            }
        }
    }

    #[test]
    fn damage_that_was_noted_before_it_was_found_is_listed() {
        let mut overlay = Overlay::default();
        assert_eq!(overlay.damaged().count(), 0);
        overlay.insert_noted(ByteRange::at(3, 4), (2, 1), 5);
        let known = Damage { place: (2, 1), noted: 5 };
        assert_eq!(overlay.damaged().collect::<Vec<_>>(), [(ByteRange::at(3, 4), known)]);
    }
}
