//! Damage of a region, end to end: no wrong data is read or written back; lost ranges are listed until they are
//! overwritten; and the daemon starts without a command, in bounded time, with all undamaged data.
//!
//! The region is a file that the daemon has mapped, so a change of the file is a change of the daemon's memory.

mod support;

use serde_json::Value;
use std::time::{Duration, Instant};
use support::region::RegionFile;
use support::{Fixture, MIB, until};

const BLOCK: u64 = 4096;
const SIZE: u64 = 8 * MIB;
/// The contents of the disk before it was cached.
const OLD: u8 = 1;
/// Timeout of the start of a daemon, on a busy machine.
const START_MAX: Duration = Duration::from_secs(20);

/// A daemon with backend 0 on a disk of old data.
struct Damaged {
    fixture: Fixture,
    disk: String,
}

impl Damaged {
    /// With `held`, no data is written back while the daemon runs.
    fn new(held: bool) -> Self {
        let mut fixture = Fixture::new();
        fixture.decorate = held.then(|| "fault:op=write".to_owned());
        fixture.start();
        fixture.register("64M");
        std::fs::write(fixture.path("disk"), vec![OLD; SIZE as usize]).expect("a disk");
        let disk = fixture.text("disk");
        fixture.start_backend(&disk);
        Self { fixture, disk }
    }

    fn region(&self) -> RegionFile {
        RegionFile::open(&self.fixture.region())
    }

    fn write(&self, at: u64, length: u64, value: u8) {
        self.fixture.client().write(at, &vec![value; length as usize], true).expect("written");
    }

    /// The data that a client reads; `None` for an error, which must be that of failing media.
    fn read(&self, at: u64, length: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0xee; length as usize];
        match self.fixture.client().read(at, &mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) => {
                assert_eq!(error.errno(), 5, "{error}");
                None
            }
        }
    }

    #[track_caller]
    fn expect(&self, at: u64, length: u64, value: u8) {
        let bytes = self.read(at, length).unwrap_or_else(|| panic!("{length} bytes at {at} cannot be read"));
        assert!(bytes.iter().all(|byte| *byte == value), "{length} bytes at {at} are not all {value}");
    }

    #[track_caller]
    fn expect_lost(&self, at: u64, length: u64) {
        for block in (at..at + length).step_by(BLOCK as usize) {
            assert_eq!(self.read(block, BLOCK), None, "the block at {block} must fail to read");
        }
        let listed = self.listed();
        assert!(
            (at..at + length)
                .step_by(BLOCK as usize)
                .all(|block| listed.iter().any(|range| range.0 <= block && range.1 >= block + BLOCK)),
            "{at}..{} is not listed: {listed:?}",
            at + length
        );
    }

    fn listed(&self) -> Vec<(u64, u64)> {
        let cache = self.fixture.cache();
        let number = |range: &Value, name: &str| range[name].as_u64().expect("a number");
        let ranges = cache["quarantined"].as_array().expect("a list");
        ranges.iter().map(|range| (number(range, "start"), number(range, "end"))).collect()
    }

    /// Asserts that the daemon starts without a command and in time.
    #[track_caller]
    fn start(&mut self) {
        self.fixture.decorate = None;
        let begin = Instant::now();
        self.fixture.start();
        assert!(begin.elapsed() < START_MAX, "it took {:?}", begin.elapsed());
    }

    fn on_disk(&self, at: u64, length: u64) -> Vec<u8> {
        let bytes = std::fs::read(&self.disk).expect("the disk");
        bytes[at as usize..(at + length) as usize].to_vec()
    }

    fn drain(&self) {
        self.fixture.run(&["drain", "--backend", "0"]);
        until("everything on the disk", || self.fixture.cache()["dirty_bytes"] == 0);
    }

    /// Overwrites the whole device, after which no damage must be left, and stops the backend.
    fn expect_healed_by_overwriting(self) {
        let value = |at: u64| (at / 65536 % 200 + 3) as u8;
        for at in (0..SIZE).step_by(65536) {
            self.write(at, 65536, value(at));
        }
        self.drain();
        assert_eq!(self.listed(), []);
        until("a consistent disk", || self.fixture.cache()["void"].is_null());
        self.fixture.ok(&["backend-stop", "--backend", "0"]);
        let plain = std::fs::read(&self.disk).expect("the disk");
        let wrong = plain.iter().enumerate().find(|(at, byte)| **byte != value(*at as u64));
        assert_eq!(wrong, None, "on the plain disk");
    }
}

#[test]
fn damaged_dirty_data_loses_its_own_block_only_until_it_is_overwritten() {
    let mut damaged = Damaged::new(true);
    damaged.write(MIB, 65536, 7);
    let lost = MIB + 3 * BLOCK;
    damaged.region().damage_data(lost + 1000);
    let check = |damaged: &Damaged| {
        assert_eq!(damaged.read(MIB, 65536), None, "a read of it and more fails");
        damaged.expect_lost(lost, BLOCK);
        assert_eq!(damaged.listed(), [(lost, lost + BLOCK)]);
        assert!(damaged.fixture.cache()["void"].is_string(), "the disk alone lacks it");
        damaged.expect(MIB, 3 * BLOCK, 7);
        damaged.expect(lost + BLOCK, 12 * BLOCK, 7);
    };
    check(&damaged);
    damaged.fixture.kill();
    damaged.start();
    check(&damaged);
    damaged.drain();
    check(&damaged);
    assert_eq!(damaged.on_disk(lost, BLOCK), vec![OLD; BLOCK as usize], "damage is not written back");
    assert_eq!(damaged.on_disk(MIB, 3 * BLOCK), vec![7; 3 * BLOCK as usize]);
    assert_eq!(damaged.on_disk(lost + BLOCK, 12 * BLOCK), vec![7; 12 * BLOCK as usize]);
    damaged.fixture.terminate();
    damaged.start();
    check(&damaged);
    damaged.fixture.kill();
    damaged.start();
    check(&damaged);
    // A write to a part of the block does not restore the rest.
    damaged.write(lost, 512, 8);
    damaged.expect(lost, 512, 8);
    assert_eq!(damaged.read(lost + 512, 512), None);
    damaged.write(lost, BLOCK, 9);
    damaged.expect(lost, BLOCK, 9);
    assert_eq!(damaged.listed(), []);
    damaged.expect_healed_by_overwriting();
}

#[test]
fn damaged_clean_data_is_read_from_the_disk_and_cached_again() {
    let mut damaged = Damaged::new(false);
    damaged.write(MIB, 65536, 7);
    damaged.drain();
    damaged.region().damage_data(MIB + 3 * BLOCK);
    damaged.expect(MIB, 65536, 7);
    let cache = damaged.fixture.cache();
    assert_eq!((&cache["damage_healed"], damaged.listed()), (&1.into(), vec![]), "{cache}");
    assert!(cache["void"].is_null());
    until("the block in the cache", || {
        let before = damaged.fixture.cache()["read_miss_bytes"].clone();
        damaged.expect(MIB, 65536, 7);
        damaged.fixture.cache()["read_miss_bytes"] == before
            && damaged.fixture.cache()["damage_healed"] == cache["damage_healed"]
    });
    damaged.fixture.kill();
    damaged.start();
    damaged.expect(MIB, 65536, 7);
    assert_eq!(damaged.listed(), []);
    damaged.expect_healed_by_overwriting();
}

#[test]
fn a_clean_record_whose_copies_are_both_damaged_loses_no_data() {
    for restarted in [false, true] {
        let mut damaged = Damaged::new(false);
        damaged.write(MIB, BLOCK, 7);
        damaged.write(2 * MIB, BLOCK, 8);
        damaged.write(3 * MIB, BLOCK, 9);
        damaged.drain();
        let region = damaged.region();
        if restarted {
            damaged.fixture.kill();
        }
        region.lose_record(2 * MIB);
        if restarted {
            damaged.start();
        }
        for (at, value) in [(MIB, 7), (2 * MIB, 8), (3 * MIB, 9)] {
            damaged.expect(at, BLOCK, value);
        }
        assert_eq!(damaged.listed(), []);
        damaged.expect_healed_by_overwriting();
    }
}

#[test]
fn a_dirty_record_whose_copies_are_both_damaged_affects_older_data_only() {
    let mut damaged = Damaged::new(true);
    for number in 0..10 {
        damaged.write(number * 65536, BLOCK, 10 + number as u8);
    }
    let region = damaged.region();
    damaged.fixture.kill();
    region.lose_record(5 * 65536);
    damaged.start();
    let check = |damaged: &Damaged| {
        for number in 0..10 {
            if number <= 5 {
                damaged.expect_lost(number * 65536, BLOCK);
            } else {
                damaged.expect(number * 65536, BLOCK, 10 + number as u8);
            }
        }
        // Its range is not known: it may have been any range.
        damaged.expect_lost(4 * MIB, BLOCK);
    };
    check(&damaged);
    damaged.drain();
    check(&damaged);
    assert_eq!(damaged.on_disk(5 * 65536, BLOCK), vec![OLD; BLOCK as usize]);
    assert_eq!(damaged.on_disk(6 * 65536, BLOCK), vec![16; BLOCK as usize]);
    damaged.fixture.kill();
    damaged.start();
    check(&damaged);
    damaged.expect_healed_by_overwriting();
}
