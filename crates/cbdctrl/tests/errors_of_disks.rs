//! A disk that fails at the n-th operation, once or permanently, for every n of a workload: writes are still accepted,
//! reads return the right data or an error, and finally all data is on the disk.
//!
//! With `CBD_KILLS`, as in long runs, each operation fails once by every kind of fault. A decorator, from the daemon's
//! hidden option for tests, injects the faults in front of the real file.

mod support;

use std::sync::atomic::{AtomicU64, Ordering};
use support::{Fixture, MIB, until};

const BLOCK: u64 = 65536;
const SIZE: u64 = 8 * MIB;
/// The contents of the disk before it was cached.
const OLD: u8 = 200;
/// More operations than the workload has.
const OPERATIONS_MAX: u64 = 200;

/// A daemon on a disk of old data, which fails by `rule`, and the expected contents of its device, block by block.
struct Failing {
    fixture: Fixture,
    disk: String,
    model: Vec<u8>,
    /// Reads that failed.
    errors: u64,
}

impl Failing {
    fn new(rule: &str) -> Self {
        let mut fixture = Fixture::new();
        fixture.decorate = Some(format!("fault:{rule}"));
        fixture.start();
        fixture.register("32M");
        std::fs::write(fixture.path("disk"), vec![OLD; SIZE as usize]).expect("a disk");
        let disk = fixture.text("disk");
        fixture.start_backend(&disk);
        Self { fixture, disk, model: vec![OLD; (SIZE / BLOCK) as usize], errors: 0 }
    }

    /// Reads old data; writes, zeroes and discards in three epochs; and reads ranges that are neither cached nor old.
    fn work(&mut self) {
        let mut client = self.fixture.client();
        let blocks = self.model.len() as u64;
        for epoch in 0..3 {
            self.read(epoch * 7);
            for number in 0..12 {
                let block = (number * 11 + epoch * 5) % blocks;
                let value = (epoch * 12 + number + 1) as u8;
                client.write(block * BLOCK, &[value; BLOCK as usize], false).expect("writes need no disk");
                self.model[block as usize] = value;
            }
            let (zeroed, trimmed) = (40 + epoch, 60 + epoch);
            client.write_zeroes(zeroed * BLOCK, BLOCK as u32, false, false).expect("nor do zeroes");
            client.trim(trimmed * BLOCK, BLOCK as u32, false).expect("nor do discards");
            self.model[zeroed as usize] = 0;
            self.model[trimmed as usize] = 0;
            client.flush().expect("nor do flushes");
        }
        drop(client);
        (100..104).for_each(|block| self.read(block));
    }

    fn read(&mut self, block: u64) {
        let mut bytes = [0xee; BLOCK as usize];
        match self.fixture.client().read(block * BLOCK, &mut bytes) {
            Ok(()) => assert!(bytes == [self.model[block as usize]; BLOCK as usize], "block {block}"),
            Err(error) => {
                // The error of the disk, or that the disk failed.
                assert!([5, 28].contains(&error.errno()), "{error}");
                self.errors += 1;
            }
        }
    }

    fn read_all(&mut self) {
        (0..self.model.len() as u64).for_each(|block| self.read(block));
    }

    /// Stops the backend; the plain disk must have all data.
    fn finish(self) {
        self.fixture.ok(&["backend-stop", "--backend", "0"]);
        let plain = std::fs::read(&self.disk).expect("the disk");
        for (block, bytes) in plain.chunks_exact(BLOCK as usize).enumerate() {
            assert!(bytes.iter().all(|byte| *byte == self.model[block]), "block {block} of the plain disk");
        }
    }
}

/// Runs the workload while operation `n` of the disk and all later ones fail, until the daemon is restarted. Returns
/// whether an operation failed.
fn fail_for_good(n: u64) -> bool {
    let error = if n.is_multiple_of(2) { "backing" } else { "no_space" };
    let mut failing = Failing::new(&format!("after={n},error={error}"));
    failing.work();
    let drained = failing.fixture.run(&["drain", "--backend", "0", "--timeout", "1"]);
    let mut cache = failing.fixture.cache();
    if drained.code == 0 {
        assert_eq!(cache["dirty_bytes"], 0, "{cache}");
    } else {
        // It may also have failed because the file system did not answer for a second: the error, or the end, comes later.
        until("writeback fails or ends", || {
            cache = failing.fixture.cache();
            cache["last_error"].is_string() || cache["dirty_bytes"] == 0
        });
    }
    let is_drained = cache["dirty_bytes"] == 0;
    let failed = !is_drained || failing.errors > 0;
    failing.read_all();
    failing.fixture.kill();
    failing.fixture.decorate = None;
    failing.fixture.start();
    let backend = failing.fixture.json(&["backend-list"])[0].clone();
    assert_eq!(backend["blkdevs"][0]["alive"], true, "{backend}");
    failing.errors = 0;
    failing.read_all();
    assert_eq!(failing.errors, 0, "the disk works again");
    failing.finish();
    failed
}

/// Runs the workload while operation `n` of the disk fails once by `how`, without a command to recover.
fn fail_once(n: u64, how: &str) {
    let mut failing = Failing::new(&format!("after={n},times=1,how={how}"));
    failing.work();
    failing.fixture.ok(&["drain", "--backend", "0"]);
    failing.read_all();
    assert!(failing.errors <= 1, "one operation failed, and {} reads", failing.errors);
    failing.errors = 0;
    failing.read_all();
    assert_eq!(failing.errors, 0);
    assert!(failing.fixture.cache()["last_error"].is_null());
    failing.finish();
}

/// Runs `test` with 0, 1, 2 and so on in several threads, until it returns false.
fn for_every_n(test: impl Fn(u64) -> bool + Sync) -> u64 {
    let (next, end) = (AtomicU64::new(0), AtomicU64::new(OPERATIONS_MAX));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::SeqCst);
                    if n >= end.load(Ordering::SeqCst) {
                        return;
                    }
                    if !test(n) {
                        end.fetch_min(n, Ordering::SeqCst);
                    }
                }
            });
        }
    });
    end.into_inner()
}

#[test]
fn a_disk_that_fails_at_any_operation_for_good_or_once_loses_nothing() {
    let operations = for_every_n(fail_for_good);
    println!("the workload has {operations} operations of the disk");
    assert!((15..OPERATIONS_MAX).contains(&operations), "{operations}");
    let faults = ["fail", "fail_after", "partial"];
    // Each operation fails by one of the three kinds of fault; in long runs by each of them.
    let rounds = if std::env::var("CBD_KILLS").is_ok() { faults.len() as u64 } else { 1 };
    for round in 0..rounds {
        for_every_n(|n| {
            if n < operations {
                fail_once(n, faults[((n + round) % faults.len() as u64) as usize]);
            }
            n < operations
        });
    }
}

#[test]
fn writes_since_the_last_successful_flush_are_repeated_when_a_flush_fails() {
    let failing = Failing::new("op=flush,times=1,how=fail_after");
    let data = [7; BLOCK as usize];
    let mut client = failing.fixture.client();
    (0..16).for_each(|block| client.write(block * BLOCK, &data, false).expect("written"));
    failing.fixture.ok(&["drain", "--backend", "0"]);
    let written = failing.fixture.cache()["written_back_bytes"].as_u64();
    assert_eq!(written, Some(2 * 16 * BLOCK), "all of it twice");
    until("no error", || failing.fixture.cache()["last_error"].is_null());
}
