//! The daemon is killed under a mounted ext4, with the region kept or discarded.
//!
//! Invariants: the log of acknowledged writes is in this process. A write with O_DSYNC that has returned is
//! acknowledged.

mod support;

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use support::pattern::{Random, SECTOR, fill, seed, version_of};
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, text_of, tool, try_tool};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 512;
const FILES: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(150);

/// Counts beginnings and ends of writes.
static CLOCK: AtomicU64 = AtomicU64::new(0);

/// The writes of one thread to its file: write `n` (the first is 1) was to block `writes[n - 1]`.
#[derive(Debug, Default)]
struct Log {
    writes: Vec<u64>,
    /// The number of acknowledged writes; at most one more was in flight.
    acknowledged: usize,
    /// The times at which each began and was acknowledged, by a clock that all threads share.
    began: Vec<u64>,
    ended: Vec<u64>,
}

impl Log {
    /// Removes a write that was not acknowledged, or counts it as acknowledged, as found on the disk.
    fn compare(&mut self, last_is_there: bool) {
        if !last_is_there {
            self.writes.truncate(self.acknowledged);
            self.began.truncate(self.acknowledged);
        }
        self.acknowledged = self.writes.len();
        self.ended.resize(self.acknowledged, CLOCK.fetch_add(1, Ordering::SeqCst));
    }

    /// The version of every block after the first `count` writes; 0 for zeroes.
    fn state(&self, count: usize) -> Vec<u64> {
        let mut blocks = vec![0; BLOCKS as usize];
        for (version, &block) in (1..).zip(&self.writes[..count]) {
            blocks[block as usize] = version;
        }
        blocks
    }
}

fn block_of(number: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    for (index, sector) in (0..).zip(bytes.chunks_exact_mut(SECTOR)) {
        fill(sector, number * 8 + index, version);
    }
    bytes
}

/// The versions of all blocks of a file; each block must be of one write.
fn read_blocks(file: &Path) -> Vec<u64> {
    let bytes = std::fs::read(file).expect("the file can be read");
    assert_eq!(bytes.len(), BLOCK * BLOCKS as usize);
    let sectors: Vec<u64> = (0..)
        .zip(bytes.chunks_exact(SECTOR))
        .map(|(number, sector)| version_of(sector, number).unwrap_or_else(|text| panic!("{text}")))
        .collect();
    for (number, block) in sectors.chunks_exact(8).enumerate() {
        assert!(block.iter().all(|version| *version == block[0]), "block {number} is torn: {block:?}");
    }
    sectors.chunks_exact(8).map(|block| block[0]).collect()
}

fn make_files(mounted: &Mounted) {
    for number in 0..FILES {
        let path = mounted.path(&number.to_string());
        std::fs::write(&path, vec![0; BLOCK * BLOCKS as usize]).expect("a file");
        File::open(&path).and_then(|file| file.sync_all()).expect("synced");
    }
    tool("sync", &["-f", &text_of(&mounted.path("0"))]);
}

fn write_until_failure(file: &File, log: &mut Log, mut random: Random, killing: &AtomicBool) {
    loop {
        let block = random.below(BLOCKS);
        let version = log.writes.len() as u64 + 1;
        log.writes.push(block);
        log.began.push(CLOCK.fetch_add(1, Ordering::SeqCst));
        if let Err(error) = file.write_all_at(&block_of(block, version), block * BLOCK as u64) {
            assert!(killing.load(Ordering::Relaxed), "a write failed before the kill: {error}");
            return;
        }
        log.ended.push(CLOCK.fetch_add(1, Ordering::SeqCst));
        log.acknowledged = log.writes.len();
    }
}

/// Writes with O_DSYNC for a while, then kills the daemon; returns the logs, which begin with `logs`.
fn write_and_kill(fixture: &mut Fixture, mounted: &Mounted, logs: Vec<Log>, random: &mut Random) -> Vec<Log> {
    let killing = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = logs
        .into_iter()
        .enumerate()
        .map(|(number, mut log)| {
            let path = mounted.path(&number.to_string());
            let file = File::options().write(true).custom_flags(libc::O_DSYNC).open(path).expect("a file");
            let (random, killing) = (Random(random.number()), Arc::clone(&killing));
            std::thread::spawn(move || {
                write_until_failure(&file, &mut log, random, &killing);
                log
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(400 + random.below(800)));
    let dirty = fixture.cache()["dirty_bytes"].as_u64();
    assert!(dirty.is_some_and(|dirty| dirty > 0), "nothing is dirty: {dirty:?}");
    killing.store(true, Ordering::Relaxed);
    fixture.kill();
    threads.into_iter().map(|thread| thread.join().expect("no writer panicked")).collect()
}

/// A slow disk, so that some data is always dirty.
fn fixture_with_ext4(folder: &Path) -> (Fixture, String, String) {
    let mut fixture = Fixture::under(folder);
    fixture.decorate = Some("throttle:ssd,mib_per_s=30,flush_us=3000".to_owned());
    fixture.start();
    fixture.register("128M");
    let disk = fixture.disk("disk", 128 * MIB);
    let device = fixture.start_block_device(&disk, "32M");
    // With blocks of a page, so that a write is to one contiguous range.
    tool("mkfs.ext4", &["-q", "-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0", &device]);
    (fixture, disk, device)
}

#[test]
fn every_acknowledged_write_is_readable_after_the_daemon_was_killed() {
    in_sandbox("every_acknowledged_write_is_readable_after_the_daemon_was_killed", TIMEOUT, |folder| {
        let mut random = Random(seed());
        let (mut fixture, disk, device) = fixture_with_ext4(folder);
        let mut mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
        make_files(&mounted);
        let mut logs: Vec<Log> = (0..FILES).map(|_| Log::default()).collect();
        for round in 0..3 {
            logs = write_and_kill(&mut fixture, &mounted, logs, &mut random);
            mounted.unmount();
            if round == 2 {
                fixture.decorate = None;
            }
            fixture.start();
            mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
            for (number, log) in logs.iter_mut().enumerate() {
                println!("round {round}, file {number}: {} writes acknowledged", log.acknowledged);
                let found = read_blocks(&mounted.path(&number.to_string()));
                let whole = [log.writes.len(), log.acknowledged].map(|count| log.state(count));
                assert!(whole.contains(&found), "round {round}, file {number}: {}", missing(log, &found));
                log.compare(found == whole[0]);
                assert!(log.acknowledged > 20 * (round + 1), "the load was too light");
            }
        }
        mounted.unmount();
        tool("e2fsck", &["-fn", &device]);
        fixture.ok(&["backend-stop", "-b", "0"]);
        tool("e2fsck", &["-fn", &disk]);
    });
}

fn missing(log: &Log, found: &[u64]) -> String {
    let wanted = log.state(log.acknowledged);
    let wrong: Vec<_> = (0..wanted.len()).filter(|&block| found[block] != wanted[block]).collect();
    let first = wrong.first().map(|&block| (block, wanted[block], found[block]));
    format!("{} blocks differ, the first is (block, acknowledged, found) {first:?}", wrong.len())
}

#[test]
fn without_the_region_a_strict_backing_device_equals_a_plain_disk_after_a_power_cut() {
    let name = "without_the_region_a_strict_backing_device_equals_a_plain_disk_after_a_power_cut";
    in_sandbox(name, TIMEOUT, |folder| {
        let mut random = Random(seed());
        let (mut fixture, disk, device) = fixture_with_ext4(folder);
        assert_eq!(fixture.cache()["consistency"], "strict");
        let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
        make_files(&mounted);
        mounted.unmount();
        fixture.ok(&["drain", "-b", "0"]);
        let mut logs: Vec<Log> = (0..FILES).map(|_| Log::default()).collect();
        let mut behind = 0;
        for round in 0..5 {
            let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
            logs = write_and_kill(&mut fixture, &mounted, logs, &mut random);
            mounted.unmount();
            let copy = text_of(&folder.join("copy"));
            tool("cp", &["--sparse=always", &disk, &copy]);
            behind += check_alone(folder, &copy, &logs, round);
            fixture.start();
            let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
            for (number, log) in logs.iter_mut().enumerate() {
                let found = read_blocks(&mounted.path(&number.to_string()));
                let whole = [log.writes.len(), log.acknowledged].map(|count| log.state(count));
                assert!(whole.contains(&found), "round {round}, file {number}: {}", missing(log, &found));
                log.compare(found == whole[0]);
            }
            mounted.unmount();
        }
        assert!(behind > 0, "the disk was never behind: the test shows nothing");
    });
}

/// Checks the backing device alone: the file system is consistent after the journal's replay, and each file is as after
/// some of its writes, which were flushed one by one. Returns the number of missing writes.
fn check_alone(folder: &Path, copy: &str, logs: &[Log], round: usize) -> usize {
    let checked = try_tool("e2fsck", &["-fy", copy]);
    assert!((0..=1).contains(&checked.code), "round {round}: {}\n{}", checked.stdout, checked.stderr);
    let repaired = ["FIXED", "Clear? yes", "Fix? yes"].iter().find(|word| checked.stdout.contains(**word));
    assert_eq!(repaired, None, "more than the journal's replay was needed: {}", checked.stdout);
    let mounted = Mounted::new(copy, &folder.join("alone"), "loop,ro");
    let mut behind = 0;
    let mut newest_of_each = Vec::new();
    for (number, log) in logs.iter().enumerate() {
        let found = read_blocks(&mounted.path(&number.to_string()));
        let newest = found.iter().copied().max().unwrap_or(0) as usize;
        assert!(
            found == log.state(newest),
            "round {round}, file {number}: write {newest} is there, but not all before it: {}",
            missing(&Log { writes: log.writes.clone(), acknowledged: newest, ..Log::default() }, &found)
        );
        println!("round {round}, file {number}: write {newest} of {} acknowledged", log.acknowledged);
        behind += log.acknowledged.saturating_sub(newest);
        newest_of_each.push(newest);
    }
    // A write that was flushed before another one began must be there if the later one is, in any file.
    for (newer, &count) in logs.iter().zip(&newest_of_each).filter(|(_, count)| **count > 0) {
        for (number, (older, &there)) in logs.iter().zip(&newest_of_each).enumerate() {
            let before = older.ended.partition_point(|ended| *ended < newer.began[count - 1]);
            assert!(
                there >= before,
                "round {round}: a write is there, but not write {before} of file {number}, which was flushed before"
            );
        }
    }
    mounted.unmount();
    behind
}
