//! Ranges of a lane that have no data but a meaning: zeroes, or damage.
//!
//! A discard can cover a terabyte and damage a whole lane, so these are extents beside the index, each with its place
//! in the log. Whoever looks up a block compares the place of its record with that of the extent: the later one
//! counts.
//!
//! Always true here: extents do not overlap, and where two were given the later one stayed.

use crate::rangemap::RangeMap;
use cbd_types::{ByteRange, Safeguard};

/// A place in the history of a lane: ordinal of the segment, then slot.
pub(crate) type Place = (u64, u32);

/// What an extent means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Meaning {
    /// Reads as zeroes.
    Zeroes,
    /// Damaged: reads fail.
    Damaged,
}

/// The extents of one lane.
#[derive(Default)]
pub(crate) struct Overlay {
    extents: RangeMap<(Meaning, Place)>,
    /// Damage was ever inserted. Nearly always false, and then nobody looks for it among many zeroes.
    was_damaged: bool,
}

impl Overlay {
    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// `range` means `meaning` since `place`, but for what has a later meaning already.
    pub(crate) fn insert(&mut self, range: ByteRange, meaning: Meaning, place: Place) {
        self.was_damaged |= meaning == Meaning::Damaged;
        self.extents.insert(range, (meaning, place), |(_, present)| {
            Safeguard::OverlayKeepsLater.is_kept() && *present > place
        });
    }

    /// Forgets the zeroes that the record at `place` gave to `range`: the backing device knows them.
    pub(crate) fn forget_zeroes(&mut self, range: ByteRange, place: Place) {
        self.extents.remove(range, |(meaning, since)| {
            *meaning == Meaning::Zeroes && Safeguard::ReclaimOwnZeroes.holds(*since == place)
        });
    }

    /// Forgets all zeroes: the backing device knows them.
    pub(crate) fn forget_all_zeroes(&mut self) {
        let everything = ByteRange { start: 0, end: u64::MAX };
        self.extents.remove(everything, |(meaning, _)| *meaning == Meaning::Zeroes);
    }

    /// Forgets all zeroes that records of the segment `ordinal` gave.
    pub(crate) fn forget_segment(&mut self, ordinal: u64) {
        let everything = ByteRange { start: 0, end: u64::MAX };
        self.extents.remove(everything, |(meaning, place)| *meaning == Meaning::Zeroes && place.0 == ordinal);
    }

    /// A record behind `place` holds `range`: the damage of that place does not cover it. Other damage may be later.
    pub(crate) fn heal_at(&mut self, range: ByteRange, place: Place) {
        self.extents.remove(range, |extent| *extent == (Meaning::Damaged, place));
    }

    /// All of `range` was overwritten: damage in it is healed.
    pub(crate) fn heal(&mut self, range: ByteRange) {
        self.extents.remove(range, |(meaning, _)| *meaning == Meaning::Damaged);
    }

    /// Parts of `range` that have a meaning later than a record at `place`, or any at all without one.
    pub(crate) fn later_than(
        &self,
        range: ByteRange,
        place: Option<Place>,
    ) -> impl Iterator<Item = (ByteRange, Meaning)> + '_ {
        self.extents.touching(range).filter_map(move |(part, (meaning, since))| {
            let counts = place.is_none_or(|place| match meaning {
                Meaning::Zeroes => Safeguard::ZeroesByPlace.holds(since > place),
                // Damage has the place of the record that it condemns.
                Meaning::Damaged => Safeguard::DamageByPlace.holds(since >= place),
            });
            counts.then_some((part, meaning))
        })
    }

    /// Damaged parts of `range`.
    pub(crate) fn damaged_in(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, Place)> + '_ {
        self.extents
            .touching(range)
            .filter(|(_, (meaning, _))| *meaning == Meaning::Damaged)
            .map(|(range, (_, place))| (range, place))
    }

    /// All damaged extents.
    pub(crate) fn damaged(&self) -> impl Iterator<Item = (ByteRange, Place)> + '_ {
        self.was_damaged
            .then(|| self.extents.iter())
            .into_iter()
            .flatten()
            .filter(|(_, (meaning, _))| *meaning == Meaning::Damaged)
            .map(|(range, (_, place))| (range, place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

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
