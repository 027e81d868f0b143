//! Objects that are stored in two slots.

use super::{Checker, NOTHING_TO_DO, REPAIR, SECOND_COPY};
use crate::Bytes;
use crate::finding::{Location, Repair, Severity, SlotKind, Structure};
use cbd_format::{Slot, SlotContent};

/// The two slots of an object, as read.
pub(crate) struct TwoSlotsRead<T> {
    pub(crate) at: [u64; 2],
    pub(crate) slots: [Option<Slot<T>>; 2],
    /// All zeroes: never written, or cleared.
    pub(crate) blank: [bool; 2],
}

impl<T: SlotContent> TwoSlotsRead<T> {
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
pub(crate) fn read_two_slots<T: SlotContent>(bytes: &dyn Bytes, at: [u64; 2], seed: u64) -> TwoSlotsRead<T> {
    let mut slots = [None; 2];
    let mut blank = [false; 2];
    for (number, at) in at.into_iter().enumerate() {
        let mut slot = vec![0; T::SLOT_SIZE];
        if bytes.load(at, &mut slot).is_ok() {
            blank[number] = slot.iter().all(|byte| *byte == 0);
            slots[number] = Slot::decode(seed, &slot);
        }
    }
    TwoSlotsRead { at, slots, blank }
}

/// The update method of an object in two slots.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Updated {
    /// Both slots, one after the other.
    Both,
    /// The two slots alternately.
    Alternately,
}

/// The checked object.
pub(super) struct Object {
    pub(super) structure: Structure,
    pub(super) kind: SlotKind,
    /// The seed of its checksums.
    pub(super) seed: u64,
    pub(super) name: String,
    pub(super) location: Location,
    pub(super) updated: Updated,
    /// The severity and the cost of losing both slots.
    pub(super) if_lost: (Severity, &'static str),
}

impl Checker<'_> {
    /// Checks an object in two slots.
    pub(super) fn two_slots<T: SlotContent>(&mut self, pair: &TwoSlotsRead<T>, object: &Object) {
        self.report.counted.slots += 2;
        self.report.add_to_fingerprint(pair.newest().map_or(0, |slot| content_checksum(&slot)));
        let name = &object.name;
        let repair = || {
            let (kind, at, seed) = (object.kind, pair.at, object.seed);
            Some(Repair::Slot { what: name.clone(), kind, at, seed })
        };
        let locate = |slot: usize| Location {
            at: Some(pair.at[slot]),
            length: Some(T::SLOT_SIZE as u64),
            ..object.location
        };
        match pair.slots {
            [Some(a), Some(b)] => {
                let differ = content_checksum(&a) != content_checksum(&b);
                if object.updated == Updated::Both && differ {
                    let old = usize::from(b.sequence <= a.sequence);
                    self.add(
                        Severity::Note,
                        object.structure,
                        locate(old),
                        format!("{name}: one slot is a version older than the other, as after a crash between two stores"),
                        "nothing: the newer one counts, but only one slot has it",
                        REPAIR,
                        repair(),
                    );
                }
            }
            [Some(good), None] | [None, Some(good)] => {
                let bad = usize::from(pair.slots[0].is_some());
                if pair.blank[bad] && good.sequence <= 1 {
                    if object.updated == Updated::Both {
                        let what = format!("{name}: a crash interrupted its first update after one slot");
                        let cost = "nothing: it counts, but only one slot has it";
                        self.add(Severity::Note, object.structure, locate(bad), what, cost, REPAIR, repair());
                    }
                    return;
                }
                let (what, cost) = match object.updated {
                    Updated::Both => (format!("{name}: one of its two slots is damaged"), SECOND_COPY),
                    Updated::Alternately => (
                        format!("{name}: one of its two slots was torn by a power cut, or is damaged"),
                        "the other slot is valid; it may be the older of the two",
                    ),
                };
                self.add(Severity::Corrected, object.structure, locate(bad), what, cost, REPAIR, repair());
            }
            [None, None] if pair.is_unused() => {}
            [None, None] if object.updated == Updated::Both && pair.blank[1] => self.add(
                Severity::Note,
                object.structure,
                locate(0),
                format!("{name}: a crash cut off its first update: it counts as never written"),
                "nothing",
                NOTHING_TO_DO,
                None,
            ),
            [None, None] => {
                let (severity, cost) = object.if_lost;
                let what = format!("{name}: both of its slots are damaged");
                let advice = "cannot be repaired: its content is not known";
                self.add(severity, object.structure, locate(0), what, cost, advice, None);
            }
        }
    }
}

fn content_checksum<T: SlotContent>(slot: &Slot<T>) -> u64 {
    u64::from(cbd_format::crc32c(cbd_format::record::bytes_of(&slot.content))) | 1 << 32
}
