//! Memory that fails under a running daemon, simulated by truncating the region: requests that access it fail, the
//! daemon reports it, and all other requests continue.

mod support;

use std::fs::File;
use support::region::RegionFile;
use support::{Fixture, MIB, until};

const BLOCK: u64 = 4096;
const SIZE: u64 = 16 * MIB;
const WRITTEN: u64 = 1000;

fn value(block: u64) -> u8 {
    (block % 200) as u8 + 1
}

/// The data of a block that was read; `None` for an error.
fn read(fixture: &Fixture, socket: &str, block: u64) -> Option<[u8; BLOCK as usize]> {
    let mut bytes = [0xee; BLOCK as usize];
    match fixture.client_of(socket).read(block * BLOCK, &mut bytes) {
        Ok(()) => Some(bytes),
        Err(error) => {
            assert_eq!(error.errno(), 5, "{error}");
            None
        }
    }
}

fn write(fixture: &Fixture, socket: &str, block: u64) -> cbd_types::Result<()> {
    fixture.client_of(socket).write(block * BLOCK, &[value(block); BLOCK as usize], true)
}

/// A region of a backend with `WRITTEN` blocks, dirty where `held`, and a second region that no client uses.
fn fixture_with_two_regions(held: bool) -> Fixture {
    let mut fixture = Fixture::new();
    fixture.decorate = held.then(|| "fault:op=write".to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", SIZE);
    fixture.start_backend(&disk);
    let other = fixture.in_memory("other-region");
    fixture.ok(&["tp-reg", "-p", &other, "-s", "32M", "-H", "node1", "--format"]);
    let second = fixture.disk("second", SIZE);
    let export = format!("nbd:unix:{}", fixture.text("second.sock"));
    fixture.ok(&["backend-start", "-t", "1", "-p", &second, "-c", "12M", "-D", "-e", &export]);
    (0..WRITTEN).for_each(|block| write(&fixture, "nbd.sock", block).expect("written"));
    write(&fixture, "second.sock", 0).expect("written");
    fixture
}

/// Truncates the region such that its last records lose their data and the first do not.
fn cut(fixture: &Fixture) -> File {
    let region = RegionFile::open(&fixture.region());
    let end = region.newest((WRITTEN / 2) * BLOCK).data / BLOCK * BLOCK;
    let file = File::options().write(true).open(fixture.region()).expect("the region");
    file.set_len(end).expect("cut");
    file
}

#[test]
fn loads_of_a_region_that_was_cut_short_are_errors_and_the_daemon_lives() {
    let fixture = fixture_with_two_regions(true);
    let pid = fixture.pid();
    let _file = cut(&fixture);
    let mut lost = 0;
    for block in 0..WRITTEN {
        match read(&fixture, "nbd.sock", block) {
            Some(bytes) => assert!(bytes == [value(block); BLOCK as usize], "block {block} is wrong"),
            None => lost += 1,
        }
    }
    assert!((1..WRITTEN).contains(&lost), "{lost} blocks lost");
    assert_eq!(fixture.pid(), pid);
    let cache = fixture.cache();
    assert!(cache["damage_found"].as_u64() >= Some(1), "{cache}");
    assert!(cache["quarantined"].as_array().is_some_and(|list| !list.is_empty()), "{cache}");
    assert_eq!(read(&fixture, "second.sock", 0), Some([value(0); BLOCK as usize]), "the other region");
}

#[test]
fn clean_data_of_a_region_that_was_cut_short_is_read_from_the_disk() {
    let fixture = fixture_with_two_regions(false);
    fixture.ok(&["drain", "-b", "0"]);
    let _file = cut(&fixture);
    for block in 0..WRITTEN {
        assert!(read(&fixture, "nbd.sock", block) == Some([value(block); BLOCK as usize]), "block {block}");
    }
    assert!(fixture.cache()["damage_healed"].as_u64() >= Some(1));
}

#[test]
fn a_failed_store_acknowledges_no_write_and_no_data_is_wrong_after_a_restart() {
    let mut fixture = fixture_with_two_regions(true);
    let file = cut(&fixture);
    // New records are stored in the remaining part of the region, until one is not.
    let mut acknowledged = Vec::new();
    let error = (0..SIZE / BLOCK)
        .find_map(|number| {
            let block = (WRITTEN + number) % (SIZE / BLOCK);
            match write(&fixture, "nbd.sock", block) {
                Ok(()) => {
                    acknowledged.push(block);
                    None
                }
                Err(error) => Some(error),
            }
        })
        .expect("a store fails in the end");
    assert_eq!(error.errno(), 5, "{error}");
    let status = fixture.json(&["status", "--json"]);
    let said = status["transports"][0]["error"].as_str().unwrap_or_default().to_owned();
    assert!(said.contains("memory failed at byte"), "{status}");
    let line = format!("{}: the region's memory failed at byte", fixture.region());
    until("the log line", || fixture.log().lines().any(|it| it.contains("ERROR") && it.contains(&line)));
    assert!(write(&fixture, "nbd.sock", 0).is_err(), "nothing more is taken");
    write(&fixture, "second.sock", 1).expect("the other region takes everything");
    fixture.kill();
    // The memory exists again, without its contents.
    file.set_len(64 * MIB).expect("grown");
    fixture.decorate = None;
    fixture.start();
    for block in (0..WRITTEN).chain(acknowledged) {
        let found = read(&fixture, "nbd.sock", block);
        assert!(found.is_none_or(|bytes| bytes == [value(block); BLOCK as usize]), "block {block} is wrong");
    }
    assert_eq!(read(&fixture, "second.sock", 1), Some([value(1); BLOCK as usize]));
    // After the whole device was overwritten, no error is left.
    let mut client = fixture.client();
    for at in (0..SIZE).step_by(MIB as usize) {
        client.write(at, &[7; MIB as usize], true).expect("written");
    }
    drop(client);
    until("a healed cache", || fixture.cache()["quarantined"] == serde_json::json!([]));
    fixture.ok(&["backend-stop", "-b", "0"]);
    assert!(std::fs::read(fixture.path("disk")).expect("the disk").iter().all(|byte| *byte == 7));
}
