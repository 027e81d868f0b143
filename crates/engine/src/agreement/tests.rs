//! A vote that is stored while it is read.

use super::Votes;
use crate::tests::Ram;
use cbd_format::{Holding, Layout, Object, SharedLayout, Slot, Vote};
use cbd_types::{Durability, MediaError, Pmem, Region};
use core::sync::atomic::{AtomicUsize, Ordering};

/// Memory in which another host acts before the load number `at`, counted from 0.
struct Interrupted {
    ram: Ram,
    loads: AtomicUsize,
    at: usize,
    act: fn(&Ram),
}

impl Pmem for Interrupted {
    fn len(&self) -> u64 {
        self.ram.len()
    }

    fn durability(&self) -> Durability {
        self.ram.durability()
    }

    fn store(&self, at: u64, from: &[u8]) {
        self.ram.store(at, from);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        self.ram.store_summed(at, from, first, checksums);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.ram.store_line(at, line);
    }

    fn fence(&self) {}

    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        if self.loads.fetch_add(1, Ordering::Relaxed) == self.at {
            (self.act)(&self.ram);
        }
        self.ram.load(at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        self.ram.load_summed(at, into)
    }

    fn write_back(&self, _: u64, _: u64) {}
}

const OBJECT: Object = Object::Group(0);

fn parts() -> SharedLayout {
    let layout = Layout::shared(1 << 20, 64 << 10, 2, 2, 1).expect("it fits");
    layout.shared_parts().expect("it is shared")
}

/// Stores what host 0 knows: the decision `version`, with this sequence number.
fn store(ram: &Ram, sequence: u64, version: u64) {
    let vote = Vote {
        version: version.into(),
        decided: Holding { state: 1.into(), ..Holding::NONE },
        ..Vote::BLANK
    };
    let bytes = Slot { sequence, content: vote }.encode(parts().place(OBJECT, 0));
    ram.store(parts().vote(OBJECT, 0)[(sequence - 1) as usize % 2], &bytes);
}

/// Of a host that had published decision 2 before the read began, and stores later ones meanwhile.
fn known_with(at: usize, act: fn(&Ram)) -> u64 {
    let ram = Ram::new(1 << 20, false);
    store(&ram, 1, 1);
    store(&ram, 2, 2);
    let region = Region::new(Interrupted { ram, loads: AtomicUsize::new(0), at, act });
    Votes::new(&region, parts(), OBJECT).known().expect("it can be read").version
}

#[test]
fn a_vote_that_is_stored_while_it_is_read_is_not_older_than_when_the_read_began() {
    // The third decision goes over the first one, and a fourth one is being stored over the second: a single read has the first one
    // alone.
    let act: fn(&Ram) = |ram| {
        store(ram, 3, 3);
        ram.store(parts().vote(OBJECT, 0)[1], &[7; 64]);
    };
    for at in 0..6 {
        let known = known_with(at, act);
        assert!(known >= 2, "interrupted before load {at}: {known}");
    }
    assert_eq!(known_with(usize::MAX, act), 2);
}
