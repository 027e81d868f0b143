//! Each structure of a region is damaged in one copy and in both, while no daemon runs. The next daemon starts without
//! a command and in time, serves undamaged data, reports the damage, and never returns wrong data.

mod support;

use serde_json::Value;
use std::time::{Duration, Instant};
use support::region::RegionFile;
use support::{Fixture, MIB};

const BLOCK: u64 = 4096;
const SIZE: u64 = 4 * MIB;
/// Timeout of the start of a daemon, on a busy machine.
const START_MAX: Duration = Duration::from_secs(20);
/// The blocks that were written and drained before the daemon was killed.
const DRAINED: std::ops::Range<u64> = 0..20;
/// The blocks that were dirty.
const DIRTY: std::ops::Range<u64> = 20..40;

/// No block.
const NOTHING: [u64; 0] = [];

/// The value of a block; 0 for one that was never written.
fn value(block: u64) -> u8 {
    if block < DIRTY.end { 100 + block as u8 } else { 0 }
}

/// A killed daemon's files: a region with backends 0 and 1, and a second region with one more.
struct Killed {
    fixture: Fixture,
    region: Vec<u8>,
}

impl Killed {
    fn new() -> Self {
        let mut fixture = Fixture::with_region();
        let disk = fixture.disk("disk", SIZE);
        fixture.start_backend(&disk);
        let second = fixture.disk("second", SIZE);
        let export = |name: &str| format!("nbd:unix:{}", fixture.text(name));
        fixture.ok(&["backend-start", "-p", &second, "-c", "12M", "-D", "-e", &export("second.sock")]);
        let other = fixture.in_memory("other-region");
        fixture.ok(&["tp-reg", "-p", &other, "-s", "32M", "-H", "node1", "--format"]);
        let third = fixture.disk("third", SIZE);
        fixture.ok(&[
            "backend-start",
            "-t",
            "1",
            "-p",
            &third,
            "-c",
            "12M",
            "-D",
            "-e",
            &export("third.sock"),
        ]);
        for socket in ["nbd.sock", "second.sock", "third.sock"] {
            let mut client = fixture.client_of(socket);
            DRAINED.for_each(|block| {
                client.write(block * BLOCK, &[value(block); BLOCK as usize], false).expect("written")
            });
        }
        for transport in ["0", "1"] {
            fixture.ok(&["drain", "-t", transport]);
        }
        for socket in ["nbd.sock", "second.sock", "third.sock"] {
            let mut client = fixture.client_of(socket);
            DIRTY.for_each(|block| {
                client.write(block * BLOCK, &[value(block); BLOCK as usize], true).expect("written")
            });
        }
        fixture.kill();
        let region = std::fs::read(fixture.region()).expect("the region");
        Self { fixture, region }
    }

    /// The region of the killed daemon with `damage` applied, and a new daemon on it.
    #[track_caller]
    fn start_with(&mut self, damage: impl FnOnce(&RegionFile)) -> Value {
        std::fs::write(self.fixture.region(), &self.region).expect("the region");
        // The killed daemon may have logged newer recovery points: the region would be refused as older than its disk.
        let points = self.fixture.path("state/recovery-points");
        if points.exists() {
            std::fs::remove_dir_all(points).expect("removed");
        }
        damage(&RegionFile::open(&self.fixture.region()));
        let begin = Instant::now();
        self.fixture.start();
        assert!(begin.elapsed() < START_MAX, "it took {:?}", begin.elapsed());
        self.fixture.json(&["status", "--json"])
    }

    /// Reads every block of a device: each has the right data or fails. Returns the blocks that fail.
    #[track_caller]
    fn unreadable(&self, socket: &str) -> Vec<u64> {
        let mut client = self.fixture.client_of(socket);
        let mut lost = Vec::new();
        for block in 0..SIZE / BLOCK {
            let mut bytes = [0xee; BLOCK as usize];
            match client.read(block * BLOCK, &mut bytes) {
                Ok(()) => {
                    assert!(bytes == [value(block); BLOCK as usize], "block {block} is wrong: {}", bytes[0])
                }
                Err(error) => {
                    assert_eq!(error.errno(), 5, "{error}");
                    lost.push(block);
                }
            }
        }
        lost
    }

    #[track_caller]
    fn expect_others_undamaged(&self, with_second: bool) {
        if with_second {
            assert_eq!(self.unreadable("second.sock"), NOTHING, "the other backend of the region");
        }
        assert_eq!(self.unreadable("third.sock"), NOTHING, "the backend of the other region");
    }
}

/// A backend of transport 0 in the status; null if it does not exist.
fn backend(status: &Value, number: u64) -> Value {
    let all = status["transports"][0]["backends"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|backend| backend["backend_id"] == number).unwrap_or_default()
}

fn listed(status: &Value) -> Vec<u64> {
    let ranges = backend(status, 0)["cache"]["quarantined"].as_array().cloned().unwrap_or_default();
    let blocks = ranges.iter().flat_map(|range| {
        let end = range["end"].as_u64().expect("a number");
        (range["start"].as_u64().expect("a number") / BLOCK)..end.div_ceil(BLOCK)
    });
    blocks.collect()
}

#[test]
fn one_damaged_copy_of_any_structure_loses_no_data() {
    let mut killed = Killed::new();
    killed.start_with(|_| ());
    let pairs = RegionFile::open(&killed.fixture.region()).pairs();
    killed.fixture.kill();
    for (name, copies, length) in pairs {
        for (number, at) in copies.into_iter().enumerate() {
            println!("copy {number} of {name}");
            let status = killed.start_with(|region| region.damage(at, length));
            assert_eq!(backend(&status, 0)["alive"], true, "{status}");
            assert_eq!(killed.unreadable("nbd.sock"), NOTHING, "copy {number} of {name}");
            killed.expect_others_undamaged(true);
            assert_eq!(listed(&killed.fixture.json(&["status", "--json"])), NOTHING);
            killed.fixture.kill();
        }
    }
}

/// The loss when both copies of a structure are damaged.
struct Loss {
    /// Whether backend 0 is served, with the right data in every block that is not lost.
    served: bool,
    /// Number of lost blocks.
    lost: u64,
    /// The error of the transport or backend in the status, if it is not served.
    said: &'static str,
    /// Whether the other backend of the region is undamaged.
    other: bool,
}

/// The loss for each structure. All blocks are lost if the lane may have held any of them.
fn loss_of_both(name: &str) -> Loss {
    let nothing = Loss { served: true, lost: 0, said: "", other: true };
    match name {
        "superblock" => Loss { served: false, said: "both superblocks are gone", other: false, ..nothing },
        "row of the backend" => Loss { served: false, said: "backend 0: both copies of its row", ..nothing },
        "row of the block device" => {
            Loss { served: false, said: "both copies of row 0 of the block devices", ..nothing }
        }
        "segment table" => Loss { served: false, said: "its state segment", other: false, ..nothing },
        "header of a segment" | "page of records" => Loss { lost: SIZE / BLOCK, ..nothing },
        _ => nothing,
    }
}

#[test]
fn two_damaged_copies_of_any_structure_never_return_wrong_data_and_others_continue() {
    let mut killed = Killed::new();
    killed.start_with(|_| ());
    let pairs = RegionFile::open(&killed.fixture.region()).pairs();
    killed.fixture.kill();
    for (name, copies, length) in pairs {
        let status = killed.start_with(|region| copies.into_iter().for_each(|at| region.damage(at, length)));
        let loss = loss_of_both(name);
        let served = backend(&status, 0)["blkdevs"][0]["alive"] == true;
        assert_eq!(served, loss.served, "{name}: {status}");
        assert!(killed.fixture.ok(&["status"]).contains(loss.said), "{name}: the status says it: {status}");
        let lost = if served { killed.unreadable("nbd.sock") } else { Vec::new() };
        assert_eq!(lost.len() as u64, loss.lost, "{name}: {lost:?}");
        let listed = listed(&killed.fixture.json(&["status", "--json"]));
        assert!(
            lost.iter().all(|block| listed.contains(block)),
            "{name}: {lost:?} is not listed: {listed:?}"
        );
        killed.expect_others_undamaged(loss.other);
        killed.fixture.kill();
    }
}

#[test]
fn a_backend_whose_row_is_lost_keeps_its_space_and_its_number() {
    let mut killed = Killed::new();
    let free = |status: &Value| status["transports"][0]["free_segments"].as_u64().expect("a number");
    let before = killed.start_with(|_| ());
    let region = RegionFile::open(&killed.fixture.region());
    let pairs = region.pairs();
    let (_, row, length) = pairs.iter().find(|(name, ..)| *name == "row of the backend").expect("it has one");
    killed.fixture.kill();
    let status = killed.start_with(|region| row.iter().for_each(|at| region.damage(*at, *length)));
    assert_eq!(free(&status), free(&before), "its segments may hold dirty data");
    let disk = killed.fixture.disk("another", SIZE);
    killed.fixture.ok(&["backend-start", "-p", &disk, "-c", "12M"]);
    let numbers: Vec<Value> = killed
        .fixture
        .json(&["backend-list"])
        .as_array()
        .expect("a list")
        .iter()
        .map(|backend| backend["backend_id"].clone())
        .collect();
    assert_eq!(numbers, [1, 2], "0 is not given to another");
}

#[test]
fn a_backend_that_lost_its_block_device_is_warned_of_until_it_has_one() {
    let mut killed = Killed::new();
    killed.start_with(|_| ());
    let pairs = RegionFile::open(&killed.fixture.region()).pairs();
    let (_, row, length) =
        pairs.iter().find(|(name, ..)| *name == "row of the block device").expect("it has one");
    killed.fixture.kill();
    killed.start_with(|region| row.iter().for_each(|at| region.damage(*at, *length)));
    let said =
        |fixture: &Fixture| fixture.ok(&["status"]).contains("both copies of row 0 of the block devices");
    assert!(said(&killed.fixture), "{}", killed.fixture.ok(&["status"]));
    let before = killed.fixture.ok(&["status"]);
    assert!(
        before.contains("without a block device: backend 0 (") && before.contains("dev-start"),
        "{before}"
    );
    killed.fixture.ok(&["dev-start", "-b", "0", "--export", &killed.fixture.nbd()]);
    assert!(!said(&killed.fixture), "{}", killed.fixture.ok(&["status"]));
    assert_eq!(killed.unreadable("nbd.sock"), NOTHING);
}
