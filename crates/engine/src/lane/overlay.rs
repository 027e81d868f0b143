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
}
