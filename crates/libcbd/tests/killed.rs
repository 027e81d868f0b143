//! A program that is killed in the middle of its writes loses no acknowledged one, whichever process opens
//! the region next.

mod support;

use cbd::{Device, Region};
use cbd_daemon::control::Control;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{BLOCK, MIB, Place, version};

const THREADS: u64 = 2;

/// The example of that name, which cargo builds beside the tests.
fn example(name: &str) -> PathBuf {
    let mut path = std::env::current_exe().unwrap();
    path.pop();
    path.pop();
    path.join("examples").join(name)
}

struct Writer(Child);

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program that writes versions from `first_version` on, kills it after `acknowledged` writes, and
/// returns the last acknowledged version of each block.
fn write_and_kill(place: &Place, first_version: u64, acknowledged: usize) -> BTreeMap<u64, u64> {
    let mut writer = Writer(
        Command::new(example("writer"))
            .arg(place.region_path())
            .arg(place.disk())
            .arg(THREADS.to_string())
            .arg(first_version.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(writer.0.stdout.take().unwrap()).lines();
    let mut last = BTreeMap::new();
    let mut note = |line: &str| {
        // The last line may be truncated.
        let Some((block, number)) = line.split_once(' ') else { return };
        let (Ok(block), Ok(number)) = (block.parse::<u64>(), number.parse::<u64>()) else { return };
        last.entry(block).and_modify(|known| *known = number.max(*known)).or_insert(number);
    };
    for _ in 0..acknowledged {
        note(&lines.next().expect("the writer is alive").unwrap());
    }
    writer.0.kill().unwrap();
    let status = writer.0.wait().unwrap();
    assert!(!status.success());
    // Acknowledgements that were not read yet; a truncated number is smaller than the complete one.
    lines.map_while(Result::ok).for_each(|line| note(&line));
    assert!(!last.is_empty());
    last
}

/// A region with the disk behind a cache of `cache_size` bytes.
fn prepared(cache_size: u64) -> Place {
    let place = Place::new();
    let (region, device) = place.cached(cache_size);
    device.close().unwrap();
    drop(region);
    place
}

fn read(device: &Device, block: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    device.read_at(&mut bytes, block * BLOCK as u64).unwrap();
    bytes
}

#[test]
fn the_library_finds_every_acknowledged_write_of_a_killed_program() {
    let place = prepared(8 * MIB);
    let mut known: BTreeMap<u64, u64> = BTreeMap::new();
    for round in 0..5 {
        // Versions of a later round are higher, so an old one is never taken for a new one.
        known.extend(write_and_kill(&place, 1 + 1_000_000 * round, 500 + 700 * round as usize));
        let region: Region = place.open();
        let entry = region.backends().pop().unwrap();
        let device = region.open_device(entry.id).unwrap();
        for (&block, &number) in &known {
            let found = version(block, &read(&device, block));
            assert!(
                found >= number,
                "round {round}: block {block} is {found}, and {number} was acknowledged"
            );
        }
    }
}

#[test]
fn the_daemon_finds_every_acknowledged_write_of_a_killed_program() {
    let place = prepared(MIB);
    let acknowledged = write_and_kill(&place, 1, 4000);
    let daemon = place.daemon();
    daemon.register_transport(&place.registration(false)).unwrap();
    // The kernel still has writes of the killed program in flight, and with them its lock on the disk: the daemon retries.
    let end = Instant::now() + Duration::from_secs(60);
    let backend = loop {
        let backend = daemon.backends(0, false).unwrap().pop().unwrap();
        if backend.alive {
            break backend;
        }
        let error = backend.error.unwrap_or_default();
        assert!(error.contains("in use") && Instant::now() < end, "{error}");
        std::thread::sleep(Duration::from_millis(100));
    };
    daemon.take_off(backend.backend_id);
    for (block, number) in acknowledged {
        let found = version(block, &place.on_disk(block));
        assert!(found >= number, "block {block} is {found}, and {number} was acknowledged");
    }
}
