//! Objects that are stored in two slots.

use super::{Checker, NOTHING_TO_DO, REPAIR, SECOND_COPY};
use crate::Bytes;
use crate::finding::{Place, Repair, Severity, SlotKind, Structure};
use cbd_format::{Slot, SlotContent};

/// The content of two slots.
pub(crate) struct Look<T> {
    pub(crate) at: [u64; 2],
    pub(crate) slots: [Option<Slot<T>>; 2],
    /// All zeroes: never written, or cleared.
    pub(crate) blank: [bool; 2],
}

impl<T: SlotContent> Look<T> {
    /// The valid content.
    pub(crate) fn newest(&self) -> Option<Slot<T>> {
        Slot::newest(self.slots[0], self.slots[1]).map(|(_, slot)| slot)
    }

    /// Whether the object was never written.
    pub(crate) fn is_unused(&self) -> bool {
        self.blank == [true; 2]
    }
}

/// Reads two slots.
pub(crate) fn look<T: SlotContent>(bytes: &dyn Bytes, at: [u64; 2], place: u64) -> Look<T> {
    let mut slots = [None; 2];
    let mut blank = [false; 2];
    for (number, at) in at.into_iter().enumerate() {
        let mut slot = vec![0; T::SLOT_SIZE];
        if bytes.load(at, &mut slot).is_ok() {
            blank[number] = slot.iter().all(|byte| *byte == 0);
            slots[number] = Slot::decode(place, &slot);
        }
    }
    Look { at, slots, blank }
}

/// The update method of an object in two slots.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Updated {
    /// Both slots, one after the other.
    Twice,
    /// The two slots alternately.
    InTurns,
}

/// The checked object.
pub(super) struct Object {
    pub(super) structure: Structure,
    pub(super) kind: SlotKind,
    /// The seed of its checksums.
    pub(super) seed: u64,
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) updated: Updated,
    /// The severity and the cost of losing both slots.
    pub(super) if_lost: (Severity, &'static str),
}

impl Checker<'_> {
    /// Checks an object in two slots.
    pub(super) fn two_slots<T: SlotContent>(&mut self, look: &Look<T>, object: &Object) {
        self.report.counted.slots += 2;
        self.report.note_recovered(look.newest().map_or(0, |slot| content_sum(&slot)));
        let name = &object.name;
        let repair = || {
            let (kind, at, place) = (object.kind, look.at, object.seed);
            Some(Repair::Slot { what: name.clone(), kind, at, place })
        };
        let place_of = |slot: usize| Place {
            at: Some(look.at[slot]),
            length: Some(T::SLOT_SIZE as u64),
            ..object.place
        };
        match look.slots {
            [Some(a), Some(b)] => {
                let differ = content_sum(&a) != content_sum(&b);
                if object.updated == Updated::Twice && differ {
                    let old = usize::from(b.sequence <= a.sequence);
                    self.add(
                        Severity::Note,
                        object.structure,
                        place_of(old),
                        format!("{name}: one slot is a version older than the other, as a crash between two stores leaves it"),
                        "nothing: the newer one counts, but it stands in one place only",
                        REPAIR,
                        repair(),
                    );
                }
            }
            [Some(good), None] | [None, Some(good)] => {
                let bad = usize::from(look.slots[0].is_some());
                if look.blank[bad] && good.sequence <= 1 {
                    if object.updated == Updated::Twice {
                        let what = format!("{name}: its first update reached one slot, then came a crash");
                        let cost = "nothing: it counts, but it stands in one place only";
                        self.add(
                            Severity::Note,
                            object.structure,
                            place_of(bad),
                            what,
                            cost,
                            REPAIR,
                            repair(),
                        );
                    }
                    return;
                }
                let (what, cost) = match object.updated {
                    Updated::Twice => (format!("{name}: one of its two slots is damaged"), SECOND_COPY),
                    Updated::InTurns => (
                        format!("{name}: one of its two slots was torn by a power cut, or is damaged"),
                        "the other slot serves; it may be the older of the two",
                    ),
                };
                self.add(Severity::Corrected, object.structure, place_of(bad), what, cost, REPAIR, repair());
            }
            [None, None] if look.is_unused() => {}
            [None, None] if object.updated == Updated::Twice && look.blank[1] => self.add(
                Severity::Note,
                object.structure,
                place_of(0),
                format!("{name}: its first update was cut off by a crash: it counts as one that never was"),
                "nothing",
                NOTHING_TO_DO,
                None,
            ),
            [None, None] => {
                let (severity, cost) = object.if_lost;
                let what = format!("{name}: both of its slots are damaged");
                let advice = "cannot be repaired: its content is not known";
                self.add(severity, object.structure, place_of(0), what, cost, advice, None);
            }
        }
    }
}

fn content_sum<T: SlotContent>(slot: &Slot<T>) -> u64 {
    u64::from(cbd_format::crc32c(cbd_format::record::bytes_of(&slot.content))) | 1 << 32
}
