//! A virtual machine that migrates between two hosts while it writes: each host has a daemon, and both have a block device on one
//! backend, exported through vhost-user-blk.
//!
//! The proof: fio in the machine compares what it reads with what it wrote, all the time, and a reader a file that does not
//! change with its checksum: from the disk, and again from the page cache, which only the daemons fill. A page that was not
//! transferred after a daemon had stored to it stays wrong there. In the end its file system is checked, and the device
//! reads the same through the last host and from the disk alone.

use super::daemon::Daemon;
use super::memory::shipped;
use super::{CUTS, Given, Host};
use crate::driven::Driven;
use crate::monitor::Monitor;
use crate::plan::{MIB, Plan};
use crate::shell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const DISK: u64 = 192 * MIB;
/// A part of the disk, so that writeback and reclaim have work.
const CACHE: &str = "64M";
const REGION: &str = "256M";

/// The hosts, by their number.
const NAMES: [&str; 2] = ["a", "b"];

/// Limit of an order that waits for nothing but an emulated guest, whose processors others may use, too.
const SOON: Duration = Duration::from_secs(120);

/// Limit of a migration, and of an order that waits for a round of fio.
const LATER: Duration = Duration::from_secs(300);

/// When a daemon is killed during a migration, which takes longer.
const KILL: Duration = Duration::from_secs(2);

/// Limit of the job.
const LIMIT: Duration = Duration::from_secs(900);

/// What a daemon logs when the front end of an export begins to migrate.
const BEGINS: &str = "begins to migrate its guest";

/// What is done while the machine writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The machine migrates to the other host.
    Migrate,
    /// The backend moves to the other host.
    Move,
    /// Both at the same time.
    Both,
    /// The machine migrates, and the daemon that it leaves is killed and started again meanwhile.
    Kill,
    /// The same with the daemon that has the backend.
    KillOwner,
}

/// The steps: the machine is on the host of the backend before some migrations, and on the other one before others.
const STEPS: [Step; 6] = [Step::Migrate, Step::Migrate, Step::Move, Step::Both, Step::Kill, Step::KillOwner];

/// How often long runs take them.
const ROUNDS: usize = 5;

/// What the machine does before it takes orders.
const SCRIPT: &str = "
    mkfs.ext4 -q /dev/vda
    mount -t ext4 /dev/vda /mnt
    load() {
        round=0
        while [ ! -e /tmp/enough ]; do
            fio --name=verify --directory=/mnt --size=24M --bsrange=4k-64k --bs_unaligned=0 --rw=randwrite \
                --ioengine=io_uring --iodepth=8 --direct=1 --verify=crc32c --verify_fatal=1 --fsync=64 \
                --randseed=$round >/tmp/fio 2>&1 || return 1
            round=$((round + 1))
            echo $round >/tmp/round
        done
    }
    head -c 25165824 /dev/urandom >/mnt/known
    sync
    known=$(md5sum </mnt/known)
    reader() {
        while [ ! -e /tmp/enough ]; do
            echo 1 >/proc/sys/vm/drop_caches
            for pass in 1 2 3; do
                read=$(md5sum </mnt/known)
                test \"$read\" = \"$known\" || { echo \"pass $pass reads $read instead of $known\" >/tmp/reader; return 1; }
            done
        done
    }
    echo 0 >/tmp/round
    load &
    load=$!
    reader &
    reader=$!
    failures() { cat /tmp/reader; tail -n 20 /tmp/fio; dmesg | tail -n 40; return 1; }
    # Waits until fio has begun and finished a whole round.
    rounds() {
        wanted=$(($(cat /tmp/round) + 2))
        until [ $(cat /tmp/round) -ge $wanted ]; do
            kill -0 $load && kill -0 $reader || failures || return
            sleep 0.2
        done
    }
    finish() {
        touch /tmp/enough
        wait $load && wait $reader || failures || return
        umount /mnt
        fsck.ext4 -f -n /dev/vda || return 1
        ! dmesg | grep 'I/O error\\|EXT4-fs error\\|blocked for more' || return 1
        echo 3 >/proc/sys/vm/drop_caches
        echo sum $(md5sum </dev/vda)
    }
";

/// The job.
pub fn between_hosts(host: &Host, given: &Given) -> Result<(), String> {
    let rounds = if given.cuts > CUTS { ROUNDS } else { 1 };
    let mut hosts = Hosts::new(host, given)?;
    let mut done = Vec::new();
    let steps = STEPS.repeat(rounds);
    hosts.play(&steps, &mut done).map_err(|text| {
        let last = done.last().map_or("before the first step", String::as_str);
        format!("{last}: {text}\n{}", hosts.last_words())
    })
}

/// The region, in memory; removed at the end.
struct Region(PathBuf);

impl Drop for Region {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

struct Hosts<'a> {
    host: &'a Host,
    folder: PathBuf,
    end: Instant,
    daemons: Vec<Daemon>,
    region: Region,
    machine: Option<Driven>,
    /// Where the machine is.
    at: usize,
    /// Which host has the backend.
    owner: usize,
    /// Number of QEMUs that were started.
    started: usize,
}

impl<'a> Hosts<'a> {
    fn new(host: &'a Host, given: &Given) -> Result<Self, String> {
        let disk = given.folder.join("disk");
        File::create(&disk)
            .and_then(|file| file.set_len(DISK))
            .map_err(|error| format!("cannot make {}: {error}", disk.display()))?;
        let daemon = |name: &&str| {
            let folder = given.folder.join(name);
            std::fs::create_dir(&folder)
                .map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
            let mut daemon = Daemon::new(&folder)?;
            daemon.start()?;
            Ok(daemon)
        };
        Ok(Self {
            host,
            folder: given.folder.clone(),
            end: Instant::now() + LIMIT,
            daemons: NAMES.iter().map(daemon).collect::<Result<_, String>>()?,
            region: Region(format!("/dev/shm/cbd-migration-{}", std::process::id()).into()),
            machine: None,
            at: 0,
            owner: 0,
            started: 0,
        })
    }

    fn socket(&self, host: usize) -> PathBuf {
        self.folder.join(format!("{}.sock", NAMES[host]))
    }

    /// The socket at which the QEMU with this number takes orders.
    fn monitor(&self, number: usize) -> PathBuf {
        self.folder.join(format!("monitor{number}"))
    }

    /// A block device of each host, on one backend.
    fn begin(&self) -> Result<(), String> {
        let region = self.region.0.display().to_string();
        let [a, b] = [0, 1].map(|host| &self.daemons[host]);
        let [at_a, at_b] = [0, 1].map(|host| format!("vhost-user:{}", self.socket(host).display()));
        let disk = self.folder.join("disk").display().to_string();
        a.control(&["tp-reg", "--path", &region, "--size", REGION, "--host", "a", "--format", "--shared"])?;
        a.control(&["backend-start", "-p", &disk, "-c", CACHE])?;
        a.control(&["dev-start", "-b", "0", "--shared", "-e", &at_a])?;
        b.control(&["tp-reg", "--path", &region, "--host", "b"])?;
        self.retried(b, &["dev-start", "-b", "0", "--shared", "-e", &at_b])
    }

    /// Repeats a command until the hosts know each other.
    fn retried(&self, daemon: &Daemon, arguments: &[&str]) -> Result<(), String> {
        let end = Instant::now() + SOON;
        loop {
            match daemon.control(arguments) {
                Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(500)),
                other => return other,
            }
        }
    }

    /// A QEMU at a host; with `incoming` it waits for the machine there.
    fn start(&mut self, at: usize, incoming: Option<&Path>) -> Result<Driven, String> {
        let plan = Plan {
            memory: 512 * MIB,
            vhost_user: vec![self.socket(at)],
            files: shipped(&["mkfs.ext4", "fsck.ext4", "fio"])?,
            monitor: Some(self.monitor(self.started)),
            incoming: incoming.map(Path::to_owned),
            timeout: self.end.saturating_duration_since(Instant::now()),
            ..Plan::default()
        };
        self.started += 1;
        Driven::start(self.host, NAMES[at], plan, SCRIPT)
    }

    fn order(&mut self, order: &str, limit: Duration) -> Result<String, String> {
        self.machine.as_mut().ok_or("the machine is off")?.order(order, limit)
    }

    fn play(&mut self, steps: &[Step], done: &mut Vec<String>) -> Result<(), String> {
        self.begin()?;
        self.machine = Some(self.start(0, None)?);
        self.order("rounds", LATER)?;
        for (number, step) in steps.iter().enumerate() {
            let begun = Instant::now();
            let what = match step {
                Step::Migrate => self.migrate(|_| Ok(None))?,
                Step::Both => self.migrate(|hosts| hosts.move_backend().map(Some))?,
                Step::Kill => self.migrate(|hosts| hosts.kill(hosts.at))?,
                Step::KillOwner => self.migrate(|hosts| hosts.kill(hosts.owner))?,
                Step::Move => self.move_backend()?,
            };
            self.order("rounds", LATER)?;
            let took = begun.elapsed().as_secs_f64();
            done.push(format!("step {} of {}, {what}: {took:.1} s", number + 1, steps.len()));
            println!("    {}", done[number]);
        }
        let said = self.order("finish", LATER)?;
        let sum = said.lines().find_map(|line| line.strip_prefix("sum ")).and_then(first_word);
        let sum = sum.ok_or_else(|| format!("the machine does not say what is on its disk:\n{said}"))?;
        self.machine = None;
        for (daemon, device) in self.daemons.iter().zip(["0", "1"]) {
            daemon.control(&["dev-stop", "-d", device])?;
        }
        self.daemons[self.owner].control(&["backend-stop", "-b", "0"])?;
        let alone = shell::output_of(Command::new("md5sum").arg(self.folder.join("disk")), SOON)
            .map_err(|end| format!("md5sum: {end}"))?;
        if first_word(&alone) != Some(sum) {
            return Err(format!("the machine has read {sum}, and on the disk is {alone}"));
        }
        Ok(())
    }

    fn move_backend(&mut self) -> Result<String, String> {
        let to = 1 - self.owner;
        self.daemons[self.owner].control(&["backend-move", "-b", "0", "--to", NAMES[to]])?;
        self.owner = to;
        Ok(format!("the backend is at {}", NAMES[to]))
    }

    /// Kills the daemon of a host, and starts another one.
    fn kill(&mut self, which: usize) -> Result<Option<String>, String> {
        std::thread::sleep(KILL);
        let daemon = &mut self.daemons[which];
        daemon.kill()?;
        daemon.start()?;
        Ok(Some(format!("the daemon of {} was killed", NAMES[which])))
    }

    /// Migrates the machine, and does something else meanwhile, which is to end before the migration does.
    fn migrate(
        &mut self,
        meanwhile: impl FnOnce(&mut Self) -> Result<Option<String>, String>,
    ) -> Result<String, String> {
        let (from, to) = (self.at, 1 - self.at);
        let channel = self.folder.join(format!("incoming{}", self.started));
        let mut source = Monitor::connect(&self.monitor(self.started - 1))?;
        let mut next = self.start(to, Some(&channel))?;
        // QEMU answers when its devices exist, and then listens at the channel.
        drop(Monitor::connect(&self.monitor(self.started - 1))?);
        let (migrated, did) = std::thread::scope(|scope| {
            let migrating = scope.spawn(|| source.migrate(&channel, LATER));
            let mut did = meanwhile(self);
            if migrating.is_finished() && matches!(did, Ok(Some(_))) {
                did = Err("the migration ended before what was to happen meanwhile".to_owned());
            }
            (migrating.join().unwrap_or_else(|_| Err("its thread failed".to_owned())), did)
        });
        let migrated = migrated.map_err(|text| format!("{text}\nthe destination:\n{}", next.last_words()))?;
        if let Some(machine) = self.machine.take() {
            next.continue_from(machine);
        }
        (self.machine, self.at) = (Some(next), to);
        if !self.daemons[from].log().contains(BEGINS) {
            return Err(format!("the daemon of {} has not logged that the machine {BEGINS}", NAMES[from]));
        }
        let did = did?.map_or_else(String::new, |text| format!(", {text}"));
        Ok(format!(
            "the machine is at {} ({} ms, {} ms not running, {} rounds){did}",
            NAMES[to], migrated.total, migrated.down, migrated.rounds
        ))
    }

    fn last_words(&mut self) -> String {
        let logs = self.daemons.iter().zip(NAMES).map(|(daemon, name)| {
            let log = daemon.log();
            let lines: Vec<&str> = log.lines().collect();
            format!("the log of {name}:\n{}\n", lines[lines.len().saturating_sub(30)..].join("\n"))
        });
        let logs: String = logs.collect();
        let machine = self.machine.as_mut().map(Driven::last_words).unwrap_or_default();
        format!("{machine}\n{logs}")
    }
}

fn first_word(text: &str) -> Option<&str> {
    text.split_whitespace().next()
}
