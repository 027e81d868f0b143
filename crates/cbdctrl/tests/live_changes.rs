//! Caches that are attached, detached and resized, and regions that grow, while clients use their device, and daemons that are
//! killed meanwhile.

mod support;

use cbd_testkit::Client;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::pattern::{Random, SECTOR, fill, seed, version_of};
use support::{Fixture, MIB, until};

const BLOCK: usize = 4096;
/// The blocks that each writer writes: larger than the cache.
const BLOCKS: u64 = 4096;
const WRITERS: u64 = 2;

/// Commands that change the cache of backend 0, in turns, and the log segments that it has afterwards; segments have 1 MiB.
const CHANGES: [(&[&str], u64); 4] = [
    (&["cache-attach", "-b", "0", "-c", "24M"], 23),
    (&["cache-resize", "-b", "0", "-c", "40M"], 39),
    (&["cache-resize", "-b", "0", "-c", "18M"], 17),
    (&["cache-detach", "-b", "0"], 0),
];

/// The versions of a writer's blocks: what was acknowledged, and what may be there besides.
struct Versions {
    first: u64,
    acknowledged: Vec<u64>,
    in_flight: Option<(u64, u64)>,
    next: u64,
}

impl Versions {
    fn new(writer: u64) -> Self {
        Self { first: writer * BLOCKS, acknowledged: vec![0; BLOCKS as usize], in_flight: None, next: 1 }
    }

    /// Writes and reads random blocks until the daemon is gone or `ended` is set. Each read must return what was written last.
    fn work(&mut self, mut client: Client, random: &mut Random, ended: &AtomicBool, done: &AtomicU64) {
        let mut block = vec![0; BLOCK];
        while !ended.load(Ordering::SeqCst) {
            let at = random.below(BLOCKS);
            if random.percent(30) {
                if client.read((self.first + at) * BLOCK as u64, &mut block).is_err() {
                    return;
                }
                assert_eq!(self.version(at, &block), self.acknowledged[at as usize], "block {at}");
            } else {
                let version = self.next;
                self.next += 1;
                self.fill(at, version, &mut block);
                self.in_flight = Some((at, version));
                let flushed = random.percent(5);
                if client.write((self.first + at) * BLOCK as u64, &block, flushed).is_err() {
                    return;
                }
                self.acknowledged[at as usize] = version;
                self.in_flight = None;
            }
            done.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn fill(&self, at: u64, version: u64, block: &mut [u8]) {
        for (sector, bytes) in (0..).zip(block.chunks_exact_mut(SECTOR)) {
            fill(bytes, (self.first + at) * 8 + sector, version);
        }
    }

    /// The version of a block, which is that of all its sectors.
    fn version(&self, at: u64, block: &[u8]) -> u64 {
        let mut versions = (0..).zip(block.chunks_exact(SECTOR)).map(|(sector, bytes)| {
            version_of(bytes, (self.first + at) * 8 + sector).expect("it is not torn")
        });
        let first = versions.next().expect("a sector");
        assert!(versions.all(|version| version == first), "block {at} is of several writes");
        first
    }

    /// Reads all blocks; a write whose completion its client did not see may be there or not.
    fn check(&mut self, read: &mut dyn FnMut(u64, &mut [u8])) {
        let mut block = vec![0; BLOCK];
        let in_flight = self.in_flight.take();
        for at in 0..BLOCKS {
            read((self.first + at) * BLOCK as u64, &mut block);
            let (found, expected) = (self.version(at, &block), self.acknowledged[at as usize]);
            if found != expected {
                assert_eq!(Some((at, found)), in_flight, "block {at}: {expected} was acknowledged");
                self.acknowledged[at as usize] = found;
            }
        }
    }
}

/// A daemon with a slow disk that has an NBD server and no cache.
fn uncached() -> (Fixture, String) {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("throttle:ssd,mib_per_s=200,flush_us=500".to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 64 * MIB);
    let nbd = fixture.nbd();
    fixture.ok(&["backend-start", "-p", &disk, "-c", "0", "-D", "-e", &nbd]);
    (fixture, disk)
}

fn segments(fixture: &Fixture) -> u64 {
    fixture.json(&["backend-list", "--json"])[0]["cache_segs"].as_u64().expect("a number")
}

fn rounds(usually: u64) -> u64 {
    std::env::var("CBD_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(usually)
}

/// Runs the writers beside `beside`, which gets the number of requests that have completed.
fn beside_writers(
    fixture: &Fixture,
    writers: &mut [Versions],
    random: &mut Random,
    beside: impl FnOnce(&AtomicU64) -> bool,
) -> bool {
    let (ended, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let randoms: Vec<Random> = writers.iter().map(|_| Random(random.number())).collect();
    std::thread::scope(|scope| {
        for (writer, mut random) in writers.iter_mut().zip(randoms) {
            let (client, ended, done) = (fixture.client(), &ended, &done);
            scope.spawn(move || writer.work(client, &mut random, ended, done));
        }
        let result = beside(&done);
        ended.store(true, Ordering::SeqCst);
        result
    })
}

#[test]
fn nothing_is_lost_and_no_request_fails_while_the_cache_comes_changes_and_goes() {
    let (fixture, disk) = uncached();
    let mut random = Random(seed());
    let mut writers: Vec<Versions> = (0..WRITERS).map(Versions::new).collect();
    beside_writers(&fixture, &mut writers, &mut random, |done| {
        for _ in 0..rounds(6) {
            for (command, expected) in CHANGES {
                let before = done.load(Ordering::SeqCst);
                fixture.ok(command);
                assert_eq!(segments(&fixture), expected, "{command:?}");
                until("requests after the change", || done.load(Ordering::SeqCst) > before + 50);
            }
        }
        true
    });
    let mut client = fixture.client();
    for writer in &mut writers {
        assert_eq!(writer.in_flight, None, "a request failed");
        writer.check(&mut |at, block| client.read(at, block).expect("it can be read"));
    }
    drop(client);
    fixture.ok(&["dev-stop", "-d", "0"]);
    let plain = std::fs::read(&disk).expect("the disk");
    for writer in &mut writers {
        writer.check(&mut |at, block| block.copy_from_slice(&plain[at as usize..at as usize + block.len()]));
    }
}

#[test]
fn a_daemon_that_is_killed_at_any_moment_of_a_change_has_made_it_or_not_and_lost_nothing() {
    let (mut fixture, _) = uncached();
    let mut random = Random(seed());
    let mut writers: Vec<Versions> = (0..WRITERS).map(Versions::new).collect();
    let (mut made, mut unmade, mut typical) = (0, 0, [Duration::from_millis(30); 4]);
    for _ in 0..rounds(5) {
        for (number, (command, expected)) in CHANGES.into_iter().enumerate() {
            let before = segments(&fixture);
            let socket = fixture.socket();
            let delay = typical[number].mul_f64(random.below(140) as f64 / 100.0);
            let pid = fixture.pid();
            beside_writers(&fixture, &mut writers, &mut random, |done| {
                until("the load", || done.load(Ordering::SeqCst) > 100);
                std::thread::scope(|scope| {
                    let began = Instant::now();
                    let change = scope.spawn(|| fixture.run_at(&socket, command));
                    std::thread::sleep(delay);
                    kill(pid);
                    let code = change.join().expect("no panic").code;
                    if code == 0 {
                        typical[number] = began.elapsed();
                    } else {
                        typical[number] = typical[number].max(delay) + Duration::from_millis(2);
                    }
                });
                true
            });
            fixture.kill();
            fixture.start();
            let now = segments(&fixture);
            assert!(now == before || now == expected, "{command:?}: {before}, then {now}");
            (made, unmade) = if now == expected { (made + 1, unmade) } else { (made, unmade + 1) };
            let mut client = fixture.client();
            for writer in &mut writers {
                writer.check(&mut |at, block| client.read(at, block).expect("it can be read"));
            }
            if now != expected {
                fixture.ok(command);
                assert_eq!(segments(&fixture), expected, "{command:?} after the restart");
            }
        }
    }
    println!("{made} changes were made before the kill, {unmade} were not");
    assert!(made > 0 && unmade > 0, "the kills came always too early, or too late");
}

fn region_size(fixture: &Fixture) -> u64 {
    let transport = &fixture.json(&["tp-list", "--json"])[0];
    let [size, count] =
        ["bytes_per_segment", "segment_num"].map(|name| transport[name].as_u64().expect("a number"));
    size * count
}

fn extend(file: &str, size: u64) {
    File::options().write(true).open(file).and_then(|file| file.set_len(size)).expect("larger");
}

/// The region is whole: `check` finds nothing that it reports as lost.
fn check_region(fixture: &Fixture) {
    let ran = fixture.run(&["check", &fixture.region(), "--data"]);
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn a_region_grows_under_load_its_cache_uses_the_new_space_and_the_next_daemon_finds_all() {
    let (mut fixture, disk) = uncached();
    let mut random = Random(seed());
    let mut writers: Vec<Versions> = (0..WRITERS).map(Versions::new).collect();
    fixture.ok(&["cache-attach", "-b", "0", "-c", "50M"]);
    let region = fixture.region();
    beside_writers(&fixture, &mut writers, &mut random, |done| {
        // An extension by the command, one by the user, and one more.
        let steps: [(u64, &[&str], &str); 3] = [
            (96, &["tp-grow", "-s", "96M", "--json"], "80M"),
            (128, &["tp-grow", "-t", "0", "--json"], "100M"),
            (160, &["tp-grow", "-s", "160M", "--json"], "150M"),
        ];
        for (size, command, cache) in steps {
            let before = done.load(Ordering::SeqCst);
            if !command.contains(&"-s") {
                extend(&region, size * MIB);
            }
            let grown = fixture.json(command);
            assert_eq!(grown["now"].as_u64(), Some(size * MIB), "{grown}");
            assert!(grown["new_segments"].as_u64().is_some_and(|count| count >= 30), "{grown}");
            fixture.ok(&["cache-resize", "-b", "0", "-c", cache]);
            until("requests after the change", || done.load(Ordering::SeqCst) > before + 2000);
        }
        true
    });
    assert!(std::fs::metadata(&region).expect("it is there").len() == 160 * MIB);
    assert!(region_size(&fixture) > 150 * MIB && segments(&fixture) == 149);
    let status = fixture.ok(&["status"]);
    assert!(!status.contains("tp-grow"), "{status}");
    for _ in 0..2 {
        let mut client = fixture.client();
        for writer in &mut writers {
            writer.check(&mut |at, block| client.read(at, block).expect("it can be read"));
        }
        drop(client);
        fixture.kill();
        check_region(&fixture);
        fixture.start();
        assert!(region_size(&fixture) > 150 * MIB && segments(&fixture) == 149);
    }
    let log = fixture.log();
    assert!(
        log.contains("is being grown to 96 MiB") && log.contains("has grown from 64 MiB to 96 MiB"),
        "{log}"
    );
    fixture.ok(&["backend-stop", "-b", "0", "-F"]);
    fixture.ok(&["backend-start", "-p", &disk, "-D", "-e", &fixture.nbd()]);
    let mut client = fixture.client();
    for writer in &mut writers {
        writer.check(&mut |at, block| client.read(at, block).expect("it can be read"));
    }
}

#[test]
fn a_daemon_that_is_killed_while_a_region_grows_has_grown_it_or_not_and_lost_nothing() {
    let (mut fixture, _) = uncached();
    let mut random = Random(seed());
    let mut writers: Vec<Versions> = (0..WRITERS).map(Versions::new).collect();
    fixture.ok(&["cache-attach", "-b", "0", "-c", "30M"]);
    let (mut grown, mut typical) = (0, Duration::from_millis(30));
    for round in 0..rounds(7).min(7) {
        let (size, socket, pid) = (format!("{}M", 80 + 16 * round), fixture.socket(), fixture.pid());
        let before = region_size(&fixture);
        let delay = typical.mul_f64(random.below(150) as f64 / 100.0);
        beside_writers(&fixture, &mut writers, &mut random, |done| {
            until("the load", || done.load(Ordering::SeqCst) > 100);
            std::thread::scope(|scope| {
                let began = Instant::now();
                let change = scope.spawn(|| fixture.run_at(&socket, &["tp-grow", "-s", &size]));
                std::thread::sleep(delay);
                kill(pid);
                if change.join().expect("no panic").code == 0 {
                    typical = began.elapsed();
                } else {
                    typical = typical.max(delay) + Duration::from_millis(4);
                }
            });
            true
        });
        fixture.kill();
        check_region(&fixture);
        fixture.start();
        let now = region_size(&fixture);
        assert!(now >= before, "{before}, then {now}");
        grown += u32::from(now > before);
        let mut client = fixture.client();
        for writer in &mut writers {
            writer.check(&mut |at, block| client.read(at, block).expect("it can be read"));
        }
        drop(client);
        fixture.ok(&["tp-grow", "-s", &size]);
        assert!(region_size(&fixture) > before + 14 * MIB);
        fixture.ok(&["cache-resize", "-b", "0", "-c", &format!("{}M", 40 + 16 * round)]);
    }
    println!("{grown} growths were made before the kill");
    let ran = fixture.run(&["tp-grow", "-s", "256M"]);
    assert!(ran.code == 1 && ran.stderr.contains("has grown 7 times"), "{ran:?}");
    assert_eq!(
        std::fs::metadata(fixture.region()).expect("it is there").len(),
        176 * MIB,
        "it was not extended"
    );
    // What cannot be used is neither shown as used nor recommended.
    extend(&fixture.region(), 256 * MIB);
    fixture.kill();
    let checked = fixture.run(&["check", &fixture.region()]);
    assert!(
        checked.stdout.contains("cut the file back to") && !checked.stdout.contains("tp-grow"),
        "{checked:?}"
    );
    fixture.start();
    assert_eq!(fixture.json(&["status", "--json"])["transports"][0]["size"].as_u64(), Some(176 * MIB));
    assert!(!fixture.ok(&["status"]).contains("tp-grow"));
}

#[test]
fn a_file_that_was_made_larger_than_its_file_system_has_space_does_not_keep_the_next_daemon_from_serving() {
    let (mut fixture, _) = uncached();
    let mut random = Random(seed());
    let mut writers: Vec<Versions> = (0..WRITERS).map(Versions::new).collect();
    let size = 96 * MIB + 12 * 4096;
    fixture.ok(&["tp-grow", "-s", &size.to_string()]);
    let exact = format!("to {} KiB", size >> 10);
    assert!(fixture.log().contains(&exact), "the superblocks can be made again with the sizes in the log");
    fixture.ok(&["cache-attach", "-b", "0", "-c", "80M"]);
    beside_writers(&fixture, &mut writers, &mut random, |done| {
        until("requests", || done.load(Ordering::SeqCst) > 1000);
        extend(&fixture.region(), 15 << 40);
        true
    });
    let ran = fixture.run(&["tp-grow"]);
    assert!(ran.code == 1, "{ran:?}");
    fixture.kill();
    fixture.start();
    let shown = |fixture: &Fixture| fixture.json(&["status", "--json"])["transports"][0]["size"].as_u64();
    assert_eq!(shown(&fixture), Some(size));
    let status = fixture.ok(&["status"]);
    assert!(status.contains("only its first") && status.contains(&size.to_string()), "{status}");
    extend(&fixture.region(), 128 * MIB);
    fixture.ok(&["tp-grow"]);
    let status = fixture.ok(&["status"]);
    assert!(shown(&fixture) == Some(128 * MIB) && !status.contains("only its first"), "{status}");
    fixture.kill();
    check_region(&fixture);
    fixture.start();
    let mut client = fixture.client();
    for writer in &mut writers {
        writer.check(&mut |at, block| client.read(at, block).expect("it can be read"));
    }
}

#[test]
fn caches_that_share_space_grow_into_what_the_region_got() {
    let (fixture, _) = uncached();
    let mut random = Random(seed());
    let mut writers: Vec<Versions> = (0..WRITERS).map(Versions::new).collect();
    fixture.ok(&["cache-attach", "-b", "0", "-c", "20M..200M"]);
    beside_writers(&fixture, &mut writers, &mut random, |_| {
        fixture.ok(&["tp-grow", "-s", "128M"]);
        until("the cache is larger than the region was", || segments(&fixture) > 64);
        true
    });
    let mut client = fixture.client();
    for writer in &mut writers {
        writer.check(&mut |at, block| client.read(at, block).expect("it can be read"));
    }
}

#[test]
fn a_region_that_cannot_grow_is_refused_with_the_reason_and_serves_as_before() {
    let (fixture, _) = uncached();
    fixture.ok(&["cache-attach", "-b", "0", "-c", "24M"]);
    let (region, before) = (fixture.region(), region_size(&fixture));
    let refused = |arguments: &[&str], code: i32, parts: &[&str]| {
        let ran = fixture.run(arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {ran:?}");
        assert_eq!(ran.stderr.trim().lines().count() == 1, code == 1, "{ran:?}");
        for part in parts {
            assert!(ran.stderr.contains(part), "{part}: {ran:?}");
        }
        assert_eq!(region_size(&fixture), before);
    };
    refused(&["tp-grow", "-t", "3"], 1, &["there is no transport 3", "tp-list"]);
    refused(&["tp-grow", "-s", "soon"], 2, &["soon"]);
    refused(&["tp-grow", "-s", "32M"], 1, &[&region, "64 MiB already", "a region does not shrink"]);
    refused(&["tp-grow", "-s", "64T"], 1, &[&region, "register the transport again"]);
    refused(&["tp-grow", "-s", "65M"], 1, &["no room for one more segment", "grows to 66628 KiB at least"]);
    let same = fixture.ok(&["tp-grow"]);
    assert!(same.contains("as before"), "{same}");
    assert!(fixture.ok(&["tp-grow", "-s", "64M"]).contains("as before"));
    // More than the file system has, if it has a limit, and more than a machine has.
    let free = fixture.run(&["tp-grow", "-s", "60G"]);
    assert!(free.code == 1 && free.stderr.contains("file system has") || free.code == 0, "{free:?}");
    if free.code == 1 {
        assert_eq!(std::fs::metadata(&region).expect("it is there").len(), 64 * MIB);
        extend(&region, 100 * MIB);
        refused(&["tp-grow", "-s", "80M"], 1, &["100 MiB already", "leave out --size"]);
        until("the warning", || fixture.ok(&["status"]).contains("cbdctrl tp-grow -t 0 uses all"));
        let moved = format!("{region}.moved");
        std::fs::rename(&region, &moved).expect("moved");
        std::fs::rename(&moved, &region).expect("moved back");
        extend(&region, 48 * MIB);
        refused(&["tp-grow"], 1, &[&region, "it was cut short, from 64 MiB to 48 MiB"]);
        extend(&region, 64 * MIB);
        std::fs::remove_file(&region).expect("deleted");
        refused(&["tp-grow", "-s", "96M"], 1, &[&region, "cannot grow"]);
    }
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is ours");
}

#[test]
fn what_cannot_be_changed_is_refused_with_the_reason_and_stays_as_it_was() {
    let (fixture, _) = uncached();
    let refused = |arguments: &[&str], parts: &[&str]| {
        let ran = fixture.run(arguments);
        assert_eq!(ran.code, 1, "{arguments:?}: {ran:?}");
        for part in parts {
            assert!(ran.stderr.contains(part), "{part}: {ran:?}");
        }
    };
    refused(&["cache-detach", "-b", "0"], &["backend 0 has no cache"]);
    refused(&["cache-resize", "-b", "0", "-c", "24M"], &["no cache to resize", "cache-attach"]);
    refused(&["cache-attach", "-b", "0", "-c", "4G"], &["4 GiB", "free space of the transport"]);
    refused(&["cache-attach", "-b", "0", "-c", "2M"], &["too small", "9 MiB"]);
    refused(&["cache-attach", "-b", "3", "-c", "24M"], &["no backend 3"]);
    assert_eq!(segments(&fixture), 0);
    fixture.ok(&["cache-attach", "-b", "0", "-c", "24M"]);
    refused(&["cache-attach", "-b", "0", "-c", "24M"], &["has a cache already"]);
    refused(&["cache-resize", "-b", "0", "-c", "4M"], &["cannot shrink to 4 MiB", "lanes need"]);
    refused(&["cache-resize", "-b", "0", "-c", "4G"], &["cannot grow", "are free"]);
    refused(&["cache-resize", "-b", "0", "-c", "0"], &["cbdctrl cache-detach -b 0"]);
    assert_eq!(segments(&fixture), 23);
}

#[test]
fn a_cache_whose_disk_fails_is_not_detached_and_goes_on() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 16 * MIB);
    fixture.start_backend(&disk);
    let mut client = fixture.client();
    client.write(0, &[7; 65536], true).expect("the cache takes it");
    let ran = fixture.run(&["cache-detach", "-b", "0", "--timeout", "2"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stderr.contains("was not detached") && ran.stderr.contains("fails"), "{ran:?}");
    let cache = fixture.cache();
    assert_eq!(
        (cache["dirty_bytes"].as_u64(), cache["cache_mode"].as_str()),
        (Some(65536), Some("writeback"))
    );
    client.write(65536, &[8; 4096], true).expect("writes are cached as before");
    let mut read = [0; 4096];
    client.read(0, &mut read).expect("it can be read");
    assert_eq!(read, [7; 4096]);
}
