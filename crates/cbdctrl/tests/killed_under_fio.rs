//! The daemon is killed, and stopped for a while, under fio, which writes through NBD and through a block device.
//!
//! The proof: fio logs each request that succeeded (its latency log, one line per request, with offset and length), and
//! fio is not killed, so the log is complete. A round's pass over a device writes no byte twice, and each 16 bytes that
//! it writes have the round and the offset of the request. So after a kill each logged request must be there, complete
//! and of this round; of the others at most as many may be there as fio keeps in flight; all other blocks are
//! unchanged.
//!
//! The NBD client of fio 3.33 sometimes waits forever on a connection that has ended; the test then kills it. A pass whose
//! fio was killed, or died of a signal, has no complete log: it proves only that no earlier pass lost data and that no block
//! is torn. The test permits few of them.
//!
//! `CBD_KILLS` sets the number of kills (20), `CBD_SEED` the seed of the random choices.

mod support;

use cbd_testkit::Client;
use cbd_types::AlignedBuffer;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::pattern::{Random, seed};
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, text_of, until, wait};

const BLOCK: usize = 4096;
/// Large compared with the cache, so that writeback and reclaim run continuously.
const SIZE: u64 = 64 * MIB;
/// Requests that fio keeps in flight on each device.
const DEPTH: usize = 8;
/// Timeout for fio to end after its device has ended.
const FIO_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for a daemon to serve again after a kill.
const START_MAX: Duration = Duration::from_secs(10);

/// The transport by which fio and the checks access a device.
#[derive(Clone, Debug)]
enum Export {
    Nbd,
    Block(String),
}

/// The request that wrote a block: its round and offset. Round 0: no request.
type Origin = (u64, u64);

/// A device, and the request that wrote each of its blocks.
struct Device {
    name: &'static str,
    export: Export,
    blocks: Vec<Origin>,
    /// Whether fio ended its pass without a kill, so that its log is complete.
    has_log: bool,
}

/// A request that succeeded, by fio's log.
#[derive(Clone, Copy, Debug)]
struct Answered {
    offset: u64,
    length: u64,
}

impl Device {
    fn new(name: &'static str, export: Export) -> Self {
        Self { name, export, blocks: vec![(0, 0); SIZE as usize / BLOCK], has_log: true }
    }

    fn fio(&self, fixture: &Fixture) -> Command {
        let mut command = Command::new("fio");
        // Threads: a job that is a process of its own would outlive a fio that has to be killed.
        command.args(["--name=load", "--thread", "--output-format=terse", "--verify_state_save=0"]);
        command.arg(format!("--size={SIZE}")).arg(format!("--iodepth={DEPTH}"));
        match &self.export {
            Export::Nbd => command.args(["--ioengine=nbd", &format!("--uri={}", fixture.uri())]),
            Export::Block(path) => {
                command.args(["--ioengine=libaio", "--direct=1", &format!("--filename={path}")])
            }
        };
        command
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .current_dir(fixture.path("dev").parent().expect("a parent"));
        support::child::dies_with_the_test(&mut command);
        let error_file =
            File::options().create(true).append(true).open(self.error_file(fixture)).expect("a file");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(error_file);
        command
    }

    /// Starts a pass in which every 16 bytes are the round and the offset of the request.
    fn load(&self, fixture: &Fixture, round: u64, seed: u64) -> Child {
        let mut command = self.fio(fixture);
        command.args(["--rw=randwrite", "--bsrange=4k-64k", "--verify=pattern", "--do_verify=0"]);
        command.arg(format!("--verify_pattern=\"R{round:07}\"%o")).arg(format!("--randseed={}", seed >> 1));
        command.arg(format!("--write_lat_log={}", text_of(&self.log(fixture)))).arg("--log_offset=1");
        command.args(["--disable_clat=1", "--disable_slat=1"]);
        command.spawn().expect("fio")
    }

    fn log(&self, fixture: &Fixture) -> PathBuf {
        fixture.path(self.name)
    }

    /// Fio's standard error.
    fn error_file(&self, fixture: &Fixture) -> PathBuf {
        fixture.path(&format!("{}.said", self.name))
    }

    /// Takes the requests of the pass that succeeded, and removes their log.
    fn answered(&self, fixture: &Fixture) -> Vec<Answered> {
        let path = PathBuf::from(format!("{}_lat.1.log", text_of(&self.log(fixture))));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| {
            let error_file = std::fs::read_to_string(self.error_file(fixture)).unwrap_or_default();
            panic!("fio left no log {}: {error}; it said: {error_file}", path.display())
        });
        std::fs::remove_file(&path).expect("its own log");
        text.lines()
            .map(|line| {
                // Milliseconds, nanoseconds, direction, bytes, offset, priority.
                let fields: Vec<&str> = line.split(',').map(str::trim).collect();
                let number =
                    |at: usize| fields.get(at).and_then(|text| text.parse().ok()).expect("a log of fio");
                assert_eq!(number(2), 1, "only writes are logged: {line}");
                Answered { length: number(3), offset: number(4) }
            })
            .collect()
    }

    fn reader(&self, fixture: &Fixture) -> Reader {
        match &self.export {
            Export::Nbd => Reader::Nbd(Box::new(fixture.client())),
            Export::Block(path) => {
                let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(path);
                Reader::File(file.expect("the device"))
            }
        }
    }

    /// Reads and checks every block; returns the number of requests that had succeeded.
    fn check(&mut self, fixture: &Fixture, round: u64) -> usize {
        let answered = if self.has_log { self.answered(fixture) } else { Vec::new() };
        assert!(!self.has_log || answered.len() > 10, "{}, round {round}: the load was too light", self.name);
        let found = self.reader(fixture).origins(self.name);
        self.compare(round, &answered, found)
            .unwrap_or_else(|text| panic!("{}, round {round}: {text}", self.name));
        answered.len()
    }

    /// Compares every block with its permitted contents after `round`, and records the contents.
    fn compare(&mut self, round: u64, answered: &[Answered], found: Vec<Origin>) -> Result<(), String> {
        let mut wanted = self.blocks.clone();
        for request in answered {
            let blocks = [request.offset, request.offset + request.length].map(|at| at as usize / BLOCK);
            wanted[blocks[0]..blocks[1]].fill((round, request.offset));
        }
        let mut unanswered = BTreeSet::new();
        for (number, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            if found == wanted {
                continue;
            }
            if found.0 != round || wanted.0 == round {
                return Err(format!(
                    "block {number} is of {found:?}, but it was answered that it is of {wanted:?}"
                ));
            }
            unanswered.insert(found.1);
        }
        if self.has_log && unanswered.len() > DEPTH {
            let count = unanswered.len();
            return Err(format!("{count} requests are there that were not answered; {DEPTH} were in flight"));
        }
        self.blocks = found;
        self.has_log = true;
        Ok(())
    }

    fn check_plain(&self, disk: &str) {
        let found = Reader::File(File::open(disk).expect("the disk")).origins(disk);
        let differs = found.iter().zip(&self.blocks).position(|(found, wanted)| found != wanted);
        assert_eq!(differs, None, "{disk} differs at this block");
    }
}

/// Reads a device without the page cache.
enum Reader {
    Nbd(Box<Client>),
    File(File),
}

impl Reader {
    fn read(&mut self, at: u64, into: &mut [u8]) {
        match self {
            Self::Nbd(client) => client.read(at, into).expect("every byte can be read"),
            Self::File(file) => file.read_exact_at(into, at).expect("every byte can be read"),
        }
    }

    /// The request of each block.
    fn origins(&mut self, name: &str) -> Vec<Origin> {
        let mut origins = Vec::with_capacity(SIZE as usize / BLOCK);
        let mut piece = AlignedBuffer::zeroed(1 << 20);
        for at in (0..SIZE).step_by(1 << 20) {
            self.read(at, &mut piece);
            origins.extend(piece.chunks_exact(BLOCK).enumerate().map(|(number, block)| {
                origin(block)
                    .unwrap_or_else(|| panic!("{name}: block {number} from {at} on is of no single request"))
            }));
        }
        origins
    }
}

/// The request of a block; `None` if it is not of exactly one.
fn origin(block: &[u8]) -> Option<Origin> {
    // Every 16 bytes are the same.
    if block[16..] != block[..block.len() - 16] {
        return None;
    }
    let first = &block[..16];
    if first.iter().all(|byte| *byte == 0) {
        return Some((0, 0));
    }
    let round = std::str::from_utf8(&first[..8]).ok()?.strip_prefix('R')?.parse().ok()?;
    Some((round, u64::from_le_bytes(first[8..].try_into().ok()?)))
}

/// A daemon with a device behind NBD and one that is a kernel block device, over disks that are slower than the load.
fn fixture_with_both(folder: &Path) -> (Fixture, Vec<Device>, Vec<String>) {
    let mut fixture = Fixture::under(folder);
    fixture.decorate = Some("throttle:ssd,mib_per_s=120,flush_us=1000".to_owned());
    fixture.start();
    fixture.register("64M");
    let disks = vec![fixture.disk("disk", SIZE), fixture.disk("second", SIZE)];
    fixture.start_backend(&disks[0]);
    let printed =
        fixture.ok(&["backend-start", "-p", &disks[1], "-c", "16M", "--start-dev", "--export", "fuse-loop"]);
    let device = printed.trim().to_owned();
    (fixture, vec![Device::new("nbd", Export::Nbd), Device::new("block", Export::Block(device))], disks)
}

/// The kernel functions in which the threads of a process wait.
fn kernel_stack(process: &Child) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.id())).into_iter().flatten().flatten();
    let stack = |task: &Path| std::fs::read_to_string(task.join("stack")).unwrap_or_default();
    tasks.map(|task| format!("\n{}:\n{}", task.path().display(), stack(&task.path()))).collect()
}

/// A number of the status, for each of both caches.
fn of_both(fixture: &Fixture, name: &str) -> [u64; 2] {
    let status = fixture.json(&["status", "--json"]);
    [0, 1].map(|backend| {
        status["transports"][0]["backends"][backend]["cache"][name].as_u64().expect("a number")
    })
}

/// Waits until fio has begun to write on both devices.
fn until_written(fixture: &Fixture) {
    until("the load", || of_both(fixture, "written_bytes").iter().all(|written| *written > MIB));
}

#[test]
fn requests_that_fio_saw_complete_are_there_after_every_kill() {
    let kills = std::env::var("CBD_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_u64);
    let timeout = Duration::from_secs(60 + 8 * kills);
    in_sandbox("requests_that_fio_saw_complete_are_there_after_every_kill", timeout, |folder| {
        let mut random = Random(seed());
        let (mut fixture, mut devices, disks) = fixture_with_both(folder);
        let (mut acknowledged, mut dirty, mut interrupted, mut slowest) = (0, 0, 0, Duration::ZERO);
        let mut without_log = 0;
        for round in 1..=kills {
            let mode = ["strict", "checkpoint", "none"][round as usize % 3];
            for backend in ["0", "1"] {
                fixture.ok(&["set", "--backend", backend, &format!("consistency={mode}")]);
            }
            let loads: Vec<Child> =
                devices.iter().map(|device| device.load(&fixture, round, random.number())).collect();
            until_written(&fixture);
            std::thread::sleep(Duration::from_millis(random.below(300)));
            dirty += u64::from(of_both(&fixture, "dirty_bytes").iter().all(|dirty| *dirty > 0));
            if round % 5 == 0 {
                // Killed while it is stopped.
                fixture.pause();
                std::thread::sleep(Duration::from_millis(random.below(400)));
            }
            fixture.kill();
            for (mut load, device) in loads.into_iter().zip(&mut devices) {
                let Some(ended) = wait(&mut load, FIO_TIMEOUT) else {
                    println!("{}, round {round}: fio does not end: {}", device.name, kernel_stack(&load));
                    load.kill().and_then(|()| load.wait()).expect("it is ours");
                    device.has_log = false;
                    without_log += 1;
                    continue;
                };
                if let Some(signal) = ended.signal() {
                    println!("{}, round {round}: fio died of signal {signal}", device.name);
                    device.has_log = false;
                    without_log += 1;
                    continue;
                }
                interrupted += usize::from(!ended.success());
            }
            let began = Instant::now();
            fixture.start();
            slowest = slowest.max(began.elapsed());
            let fixture = &fixture;
            acknowledged += std::thread::scope(|scope| {
                let checks: Vec<_> = devices
                    .iter_mut()
                    .map(|device| scope.spawn(move || device.check(fixture, round)))
                    .collect();
                checks.into_iter().map(|check| check.join().expect("the check")).sum::<usize>()
            });
        }
        println!(
            "{kills} kills, {dirty} with dirty data on both devices, {interrupted} passes of fio interrupted, {acknowledged} requests \
             answered, slowest start {slowest:?}, {without_log} passes without a log"
        );
        assert!(slowest < START_MAX, "a start took {slowest:?}");
        assert!(dirty >= kills / 2, "the disks were too fast");
        assert!(interrupted as u64 + without_log >= kills, "the passes were too short");
        assert!(without_log <= 1 + kills / 10, "of too many passes it is not known what was answered");
        for (backend, (device, disk)) in devices.iter().zip(&disks).enumerate() {
            fixture.ok(&["backend-stop", "--backend", &backend.to_string()]);
            device.check_plain(disk);
        }
    });
}

#[test]
fn a_daemon_that_is_stopped_for_seconds_continues_and_fio_verifies_all_data() {
    let name = "a_daemon_that_is_stopped_for_seconds_continues_and_fio_verifies_all_data";
    in_sandbox(name, Duration::from_secs(120), |folder| {
        let (fixture, devices, _) = fixture_with_both(folder);
        let mut loads: Vec<Child> = devices
            .iter()
            .map(|device| {
                let mut command = device.fio(&fixture);
                // Fio's own verification: it reads and compares all its writes after the pass.
                command.args(["--rw=randwrite", "--bsrange=4k-64k", "--verify=crc32c", "--verify_fatal=1"]);
                command.spawn().expect("fio")
            })
            .collect();
        let mut stopped_in_time = 0;
        for stopped_s in [3, 1, 2] {
            until_written(&fixture);
            std::thread::sleep(Duration::from_millis(30));
            fixture.pause();
            for load in &mut loads {
                stopped_in_time += usize::from(load.try_wait().expect("it is ours").is_none());
            }
            std::thread::sleep(Duration::from_secs(stopped_s));
            fixture.resume();
        }
        assert!(stopped_in_time >= 2, "fio was done before the daemon was stopped");
        for mut load in loads {
            let ended = wait(&mut load, Duration::from_secs(60)).expect("fio ends");
            assert!(ended.success(), "fio found an error: {ended}");
        }
        for backend in ["0", "1"] {
            fixture.ok(&["backend-stop", "--backend", backend]);
        }
    });
}

#[test]
fn a_block_of_two_requests_is_detected() {
    let mut block = Vec::new();
    for _ in 0..BLOCK / 16 {
        block.extend(b"R0000007");
        block.extend(65536_u64.to_le_bytes());
    }
    assert_eq!(origin(&block), Some((7, 65536)));
    block[4000] ^= 1;
    assert_eq!(origin(&block), None);
    assert_eq!(origin(&[0; BLOCK]), Some((0, 0)));
}

#[test]
fn the_check_detects_missing_stale_and_surplus_blocks() {
    let answered = [Answered { offset: 8192, length: 8192 }];
    let after = |change: &dyn Fn(&mut Vec<Origin>)| {
        let mut device = Device::new("test", Export::Nbd);
        device.blocks[7] = (3, 28672);
        let mut found = device.blocks.clone();
        found[2..4].fill((4, 8192));
        change(&mut found);
        device.compare(4, &answered, found)
    };
    assert_eq!(after(&|_| ()), Ok(()));
    assert_eq!(after(&|found| found[9] = (4, 36864)), Ok(()), "one that was in flight");
    assert!(after(&|found| found[3] = (0, 0)).is_err(), "half of an answered request");
    assert!(after(&|found| found[2..4].fill((3, 8192))).is_err(), "an older version");
    assert!(after(&|found| found[7] = (0, 0)).is_err(), "something of an earlier round");
    let many = |found: &mut Vec<Origin>| (20..40).for_each(|block| found[block] = (4, block as u64 * 4096));
    assert!(after(&many).is_err(), "more than was in flight");
}
