//! Caches that share the space of their transport: the commands, and data that stay right while space moves and the daemon is killed.

mod support;

use std::time::{Duration, Instant};
use support::pattern::{SECTOR, fill, version_of};
use support::{Fixture, MIB};

const BLOCK: usize = 64 << 10;
/// Blocks of each disk: more than a half of the space.
const BLOCKS: u64 = 640;

/// The sizes of the caches in MiB.
fn sizes(fixture: &Fixture) -> Vec<u64> {
    let list = fixture.json(&["backend-list", "--json"]);
    let size = |backend: &serde_json::Value| backend["cache_size"].as_u64().expect("a number") / MIB;
    list.as_array().expect("a list").iter().map(size).collect()
}

fn socket(fixture: &Fixture, disk: u64) -> String {
    fixture.text(&format!("share{disk}.sock"))
}

/// The content of a block of a disk.
fn content(disk: u64, block: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    for (sector, bytes) in (0..).zip(bytes.chunks_exact_mut(SECTOR)) {
        fill(bytes, (disk * BLOCKS + block) * (BLOCK / SECTOR) as u64 + sector, version);
    }
    bytes
}

/// Reads a disk, not in sequence; each block must have its version.
fn check(fixture: &Fixture, disk: u64, version: u64) {
    let mut client = fixture.client_of(&socket(fixture, disk));
    let mut bytes = vec![0; BLOCK];
    for step in 0..BLOCKS {
        let block = step * 77 % BLOCKS;
        client.read(block * BLOCK as u64, &mut bytes).expect("it can be read");
        let first = (disk * BLOCKS + block) * (BLOCK / SECTOR) as u64;
        assert_eq!(version_of(&bytes[..SECTOR], first), Ok(version), "block {block} of disk {disk}");
        assert!(bytes == content(disk, block, version), "block {block} of disk {disk}");
    }
}

#[test]
fn space_follows_the_reads_and_nothing_is_lost_when_the_daemon_is_killed_meanwhile() {
    let mut fixture = Fixture::new();
    fixture.start();
    fixture.register("64M");
    for disk in 0..2 {
        let path = fixture.disk(&format!("shared{disk}"), BLOCKS * BLOCK as u64);
        let export = format!("nbd:unix:{}", socket(&fixture, disk));
        fixture.ok(&["backend-start", "-p", &path, "-c", "12M..60M", "-D", "-e", &export]);
        let mut client = fixture.client_of(&socket(&fixture, disk));
        for block in 0..BLOCKS {
            client.write(block * BLOCK as u64, &content(disk, block, 1), false).expect("it is written");
        }
    }
    for reader in 0..2 {
        let end = Instant::now() + Duration::from_secs(120);
        let mut version = 1;
        while sizes(&fixture)[reader as usize] < 40 {
            check(&fixture, reader, version);
            // A few writes, so that not everything is clean.
            version += 1;
            let mut client = fixture.client_of(&socket(&fixture, reader));
            for block in 0..BLOCKS {
                client.write(block * BLOCK as u64, &content(reader, block, version), false).expect("written");
            }
            assert!(sizes(&fixture).iter().all(|size| *size >= 12), "{:?}", sizes(&fixture));
            assert!(Instant::now() < end, "{:?}", sizes(&fixture));
        }
        // In the middle of what moves.
        fixture.kill();
        fixture.start();
        let list = fixture.json(&["backend-list", "--json"]);
        for backend in 0..2 {
            assert_eq!(list[backend]["cache_min"].as_u64(), Some(12 * MIB), "{list}");
            assert_eq!(list[backend]["cache_max"].as_u64(), Some(60 * MIB), "{list}");
        }
        assert!(sizes(&fixture).iter().sum::<u64>() <= 64 && sizes(&fixture).iter().all(|size| *size >= 12));
        check(&fixture, reader, version);
        // Both begin with the same content again.
        let mut client = fixture.client_of(&socket(&fixture, reader));
        for block in 0..BLOCKS {
            client.write(block * BLOCK as u64, &content(reader, block, 1), false).expect("it is written");
        }
    }
    (0..2).for_each(|disk| check(&fixture, disk, 1));
}

#[test]
fn commands_name_and_change_the_bounds_and_refuse_impossible_ones() {
    let mut fixture = Fixture::new();
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 16 * MIB);
    let start = |size: &'static str, more: &[&'static str]| {
        let mut arguments = vec!["backend-start", "-p", disk.as_str(), "-c", size];
        arguments.extend(more);
        fixture.run(&arguments)
    };
    for (size, more, code, part) in [
        ("..16M", &[][..], 2, "has no minimum"),
        ("12M..", &[], 2, "has no maximum"),
        ("16M..12M", &[], 2, "minimum above its maximum"),
        ("0..12M", &[], 2, "needs a minimum"),
        ("12M..16M", &["--weight", "0"], 2, "0 is not in 1..=1000"),
        ("12M..16M", &["--weight", "1001"], 2, "1001 is not in 1..=1000"),
        ("12M", &["--weight", "2"], 1, "MIN..MAX"),
        ("4M..16M", &[], 1, "too small"),
        ("100M..200M", &[], 1, "free space of the transport"),
    ] {
        let ran = start(size, more);
        assert!(ran.code == code && ran.stderr.contains(part), "{size} {more:?}: {ran:?}");
    }
    let ran = start("12M..1T", &["--weight", "3"]);
    assert!(ran.code == 0 && ran.stderr.contains("more than the region has"), "{ran:?}");
    let status = fixture.ok(&["status"]);
    assert!(status.contains("share") && status.contains("12 MiB to 1 TiB, weight 3"), "{status}");
    fixture.ok(&["cache-resize", "-b", "0", "-c", "10M..20M"]);
    let shared = &fixture.cache()["shared"];
    assert_eq!((shared["max"].as_u64(), shared["weight"].as_u64()), (Some(20 * MIB), Some(1)));
    fixture.ok(&["cache-resize", "-b", "0", "-c", "20M"]);
    assert!(fixture.cache()["shared"].is_null());
}
