//! Signs of life: each host raises a number in a line of its own, and others see it change.
//!
//! Invariants: a host is seen to live only by changes that the observer has timed with its own monotonic clock; no host compares its
//! clock with another's. That a host gave no sign of life proves nothing: a paused virtual machine gives none.
//!
//! Elsewhere: when signs are given, and how long an observer looks (`cbd-runtime`).

use super::{Member, Members};
use crate::Environment;
use cbd_format::{HostBeat, Slot};
use cbd_types::{BootId, HostId, MutationPoint};

/// A sign of life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Beat {
    /// The incarnation of the host that gave it.
    pub incarnation: u64,
    /// Its number.
    pub number: u64,
    /// The boot of the host's machine.
    pub boot: BootId,
    /// The host's process on that machine.
    pub process: u32,
}

/// What an observer has seen of a host.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Life {
    last: Option<(u64, u64)>,
    changed_ms: Option<u64>,
    first_ms: Option<u64>,
}

impl Life {
    /// Notes what was seen at this time of the observer's monotonic clock.
    pub fn note(&mut self, beat: Option<&Beat>, now_ms: u64) {
        let is_first = self.first_ms.is_none();
        self.first_ms = self.first_ms.or(Some(now_ms));
        let seen = beat.map(|beat| (beat.incarnation, beat.number));
        // What is there at the first look may be old.
        if !is_first && seen.is_some() && seen != self.last {
            self.changed_ms = Some(now_ms);
        }
        self.last = seen.or(self.last);
    }

    /// Milliseconds since the last sign of life that the observer has seen come; `None` if it saw none.
    #[must_use]
    pub fn since_ms(&self, now_ms: u64) -> Option<u64> {
        self.changed_ms.map(|changed| now_ms.saturating_sub(changed))
    }

    /// Milliseconds since the observer began to look, or saw the last sign of life.
    #[must_use]
    pub fn silent_ms(&self, now_ms: u64) -> u64 {
        self.changed_ms.or(self.first_ms).map_or(0, |since| now_ms.saturating_sub(since))
    }
}

impl<E: Environment> Members<E> {
    /// The last sign of life in an area. `None` if there is none, or while it is stored.
    pub fn beat_of(&self, id: HostId) -> Option<Beat> {
        if id.0 >= self.parts.hosts {
            return None;
        }
        let at = self.parts.beat(id.0);
        let mut bytes = [0; 64];
        self.region.observe(MutationPoint::BeatObserve, at, 64);
        self.region.load(at, &mut bytes).ok()?;
        let slot = Slot::<HostBeat>::decode(u64::from(id.0), &bytes)?;
        let HostBeat { incarnation, beat, boot, process, .. } = slot.content;
        Some(Beat {
            incarnation: incarnation.get(),
            number: beat.get(),
            boot: BootId(boot),
            process: process.get(),
        })
    }

    /// Gives a sign of life, with a number that is above all earlier ones of this member.
    pub fn beat(&self, member: &Member, number: u64, process: u32) {
        self.store_beat(member, member.incarnation, number, process);
    }

    /// Says that the host has left.
    pub(super) fn end_beat(&self, member: &Member) {
        self.store_beat(member, 0, 0, 0);
    }

    fn store_beat(&self, member: &Member, incarnation: u64, number: u64, process: u32) {
        let content = HostBeat {
            incarnation: incarnation.into(),
            beat: number.into(),
            boot: self.region.boot().0,
            process: process.into(),
            reserved: [0; 12],
        };
        let line = Slot { sequence: number, content }.encode_line(u64::from(member.id.0));
        let at = self.parts.beat(member.id.0);
        let stored = self.region.store_line(at, &line);
        self.region.publish(MutationPoint::BeatPublish, stored, at, 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(incarnation: u64, number: u64) -> Beat {
        Beat { incarnation, number, boot: BootId::UNKNOWN, process: 1 }
    }

    #[test]
    fn a_host_that_joins_while_the_observer_looks_lives() {
        let mut life = Life::default();
        life.note(None, 100);
        life.note(Some(&beat(1, 1)), 600);
        assert_eq!(life.since_ms(700), Some(100));
    }

    #[test]
    fn only_a_change_is_a_sign_of_life() {
        let mut life = Life::default();
        life.note(Some(&beat(1, 7)), 100);
        assert_eq!((life.since_ms(100), life.silent_ms(150)), (None, 50), "it may be old");
        life.note(Some(&beat(1, 7)), 200);
        assert_eq!(life.since_ms(300), None);
        life.note(None, 300);
        life.note(Some(&beat(1, 7)), 400);
        assert_eq!(life.since_ms(500), None, "a line that was being stored is no sign by itself");
        life.note(Some(&beat(1, 8)), 600);
        assert_eq!((life.since_ms(650), life.silent_ms(650)), (Some(50), 50));
        life.note(Some(&beat(2, 1)), 700);
        assert_eq!(life.since_ms(710), Some(10), "another incarnation lives");
        life.note(Some(&beat(2, 1)), 5000);
        assert_eq!(life.silent_ms(5000), 4300);
    }
}
