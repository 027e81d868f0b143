//! The writes of the clients to both disks, and whether two disks show one cut of them.
//!
//! Invariants: a slot has one writer, which submits a write when the one before has ended; so what a disk shows of a slot is
//! the result of all its writes up to one of them.

use crate::image::DiskImage;
use cbd_types::{ByteRange, CHUNK};

/// Number of disks.
pub(super) const DISKS: usize = 2;
/// Slots of a client on a disk.
const SLOTS: usize = 6;
/// Bytes of a disk: two chunks, so that its cache has two lanes.
pub(super) const SIZE: u64 = 2 * CHUNK;

/// A range that one client writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slot {
    /// The number of the disk.
    pub disk: usize,
    number: usize,
}

impl Slot {
    /// One of the slots of `user` on a disk; any `choice` is right.
    pub(super) const fn of(user: usize, disk: usize, choice: usize) -> Self {
        Self { disk, number: user * SLOTS + choice % SLOTS }
    }

    /// The range on the disk: a sector, a block, or three blocks.
    pub(super) const fn range(self) -> ByteRange {
        let bytes = [512, 4096, 3 * 4096][self.number % 3];
        ByteRange::at((self.number % 2) as u64 * CHUNK + self.number as u64 * (16 << 10), bytes)
    }
}

/// A write to a slot, or zeroes.
#[derive(Clone, Copy, Debug)]
struct Written {
    /// Zero for zeroes.
    content: u64,
    begun: u64,
    ended: Option<u64>,
}

/// All writes so far.
pub(super) struct History {
    users: usize,
    /// The disks before the first write.
    fresh: [DiskImage; DISKS],
    now: u64,
    /// For each slot of each disk; the first one is the fresh disk.
    writes: Vec<Vec<Written>>,
}

impl History {
    pub(super) fn new(users: usize, fresh: [DiskImage; DISKS]) -> Self {
        let none = vec![Written { content: 0, begun: 0, ended: Some(0) }];
        Self { users, fresh, now: 0, writes: vec![none; users * SLOTS * DISKS] }
    }

    /// A time later than all before.
    pub(super) const fn now(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    const fn index(&self, slot: Slot) -> usize {
        slot.disk * self.users * SLOTS + slot.number
    }

    /// A client submits a write. Returns its content; zeroes have none.
    pub(super) fn begin(&mut self, slot: Slot, zeroes: bool) -> u64 {
        let begun = self.now();
        let content = if zeroes { 0 } else { begun };
        let index = self.index(slot);
        self.writes[index].push(Written { content, begun, ended: None });
        content
    }

    /// The last write of a slot has completed; or, if it found no space, has not happened.
    pub(super) fn end(&mut self, slot: Slot, happened: bool) {
        let (ended, index) = (self.now(), self.index(slot));
        let writes = &mut self.writes[index];
        match writes.last_mut() {
            Some(last) if happened => last.ended = Some(ended),
            _ => {
                writes.pop();
            }
        }
    }

    /// Whether the disks show one cut of the history, which contains everything that had completed at the time `before`: if
    /// a write is there, every write is there that had completed when it was submitted.
    pub(super) fn check(&self, disks: &[DiskImage; DISKS], before: u64) -> Result<(), String> {
        let slots: Vec<Slot> = (0..DISKS)
            .flat_map(|disk| (0..self.users * SLOTS).map(move |number| Slot { disk, number }))
            .collect();
        let mut shown = Vec::new();
        for slot in &slots {
            shown.push(self.candidates(*slot, &disks[slot.disk])?);
        }
        // Zeroes do not say which of several writes they are of: the first ones that contradict nothing.
        let mut chosen: Vec<usize> = shown.iter().map(|candidates| candidates[0]).collect();
        loop {
            let last = slots.iter().zip(&chosen).map(|(slot, chosen)| (self.of(*slot)[*chosen].begun, *slot));
            let (begun, cause) = last.max_by_key(|(begun, _)| *begun).unwrap_or((0, slots[0]));
            let mut is_settled = true;
            for ((slot, candidates), chosen) in slots.iter().zip(&shown).zip(&mut chosen) {
                let is_required =
                    |written: &Written| written.ended.is_some_and(|ended| ended < begun || ended < before);
                let required = self.of(*slot).iter().rposition(is_required).unwrap_or(0);
                if *chosen >= required {
                    continue;
                }
                let Some(later) = candidates.iter().find(|candidate| **candidate >= required) else {
                    return Err(format!(
                        "{slot:?} shows {:?}, and {:?} is missing, which completed before {before} or before {cause:?} was \
                         written at {begun}",
                        self.of(*slot)[*chosen],
                        self.of(*slot)[required]
                    ));
                };
                *chosen = *later;
                is_settled = false;
            }
            if is_settled {
                return Ok(());
            }
        }
    }

    fn of(&self, slot: Slot) -> &[Written] {
        &self.writes[self.index(slot)]
    }

    /// The writes of a slot that the disk may show.
    fn candidates(&self, slot: Slot, disk: &DiskImage) -> Result<Vec<usize>, String> {
        let (shown, fresh) = (read(disk, slot), read(&self.fresh[slot.disk], slot));
        let is_shown = |(number, written): (usize, &Written)| match number {
            0 => shown == fresh,
            _ => shown == written.content.to_le_bytes().repeat(shown.len() / 8),
        };
        let writes = self.of(slot).iter().enumerate();
        let candidates: Vec<usize> =
            writes.filter(|write| is_shown(*write)).map(|(number, _)| number).collect();
        if candidates.is_empty() {
            return Err(format!("{slot:?} shows what no write has written: {:?} and so on", &shown[..8]));
        }
        Ok(candidates)
    }
}

fn read(disk: &DiskImage, slot: Slot) -> Vec<u8> {
    let mut bytes = vec![0; slot.range().len() as usize];
    disk.read(slot.range().start, &mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(history: &mut History, disk: usize) -> (Slot, u64) {
        let slot = Slot::of(0, disk, 0);
        let content = history.begin(slot, false);
        history.end(slot, true);
        (slot, content)
    }

    fn history() -> History {
        History::new(1, disks(&[]))
    }

    fn disks(shown: &[(Slot, u64)]) -> [DiskImage; DISKS] {
        let mut disks = [DiskImage::fresh(SIZE, 512), DiskImage::fresh(SIZE, 512)];
        for (slot, content) in shown {
            let bytes = content.to_le_bytes().repeat(slot.range().len() as usize / 8);
            disks[slot.disk].write(slot.range(), Some(&bytes));
        }
        disks
    }

    #[test]
    fn a_write_without_one_that_completed_before_it_is_no_cut() {
        let mut history = history();
        let (first, second) = (write(&mut history, 0), write(&mut history, 1));
        assert!(history.check(&disks(&[]), 0).is_ok());
        assert!(history.check(&disks(&[first]), 0).is_ok());
        assert!(history.check(&disks(&[first, second]), 0).is_ok());
        assert!(history.check(&disks(&[second]), 0).is_err());
    }

    #[test]
    fn what_completed_before_the_command_must_be_there() {
        let mut history = history();
        let first = write(&mut history, 0);
        let before = history.now();
        let second = write(&mut history, 1);
        assert!(history.check(&disks(&[]), before).is_err());
        assert!(history.check(&disks(&[first]), before).is_ok());
        assert!(history.check(&disks(&[first, second]), before).is_ok());
    }

    #[test]
    fn zeroes_are_of_any_write_that_contradicts_nothing() {
        let mut history = history();
        let first = write(&mut history, 0);
        history.begin(first.0, true);
        history.end(first.0, true);
        let second = write(&mut history, 1);
        assert_eq!(
            history.check(&disks(&[(first.0, 0), second]), 0),
            Ok(()),
            "the zeroes behind the first write"
        );
        assert!(history.check(&disks(&[first, second]), 0).is_err());
        assert!(history.check(&disks(&[(first.0, 77)]), 0).is_err(), "no client has written that");
    }
}
