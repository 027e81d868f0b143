//! `cbdctrl demo --hosts`: what two hosts on one region do.
//!
//! Host a has the backend of a slow disk, and a block device on it. Host b has another block device on that backend: its
//! requests go through the region to a. Clients write checksummed blocks while the daemon of a is killed, while that of
//! b is killed, and while the backend moves to b and back. At the end the disk alone is compared with the log of writes.
//!
//! Invariants: a step that finds anything that is not true ends the demonstration with an error. Each folder and process
//! has an owner whose drop removes it; daemons end before their folders are removed.
//!
//! Elsewhere: the processes (`servers`), blocks and their log (`block`), the measurement (`measure`), the comparison of
//! the disk (`proof`).

mod clients;
mod host;
mod kills;
mod moves;
mod report;

use crate::Arguments;
use crate::block::{BLOCK, Log};
use crate::folders::{self, Folder};
use crate::measure::{self, Compared, Pair, read_all};
use crate::output::{Output, grouped};
use crate::report::{Drain, Region};
use crate::steps::{self, new_disk, print_pair, seed};
use crate::target::{ExportKind, Sync, Target};
use crate::{interrupt, proof};
use cbd_backing::ThrottleParameters;
use cbd_daemon::api::HostInfo;
use cbd_daemon::size::format_size;
use cbd_types::{Error, ErrorKind, Result};
use host::Host;
pub use report::Report;
use report::{SeenBy, Verified};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The sizes and durations of this demonstration.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Bytes of the disk.
    pub disk: u64,
    /// Bytes that are written and read.
    pub working_set: u64,
    /// Bytes of the cache.
    pub cache: u64,
    /// Duration of each measurement.
    pub measured: Duration,
    /// Duration of the writes before and after each kill and each move.
    pub writes: Duration,
    /// Time for which a killed daemon is left dead.
    pub down: Duration,
    /// How often each daemon is killed, and how often the backend moves to b and back.
    pub rounds: usize,
}

/// The default.
pub const FULL: Scale = Scale {
    disk: 256 << 20,
    working_set: 16 << 20,
    cache: 96 << 20,
    measured: Duration::from_millis(2500),
    writes: Duration::from_millis(600),
    down: Duration::from_secs(1),
    rounds: 2,
};

/// With `--quick`.
pub const QUICK: Scale = Scale {
    disk: 128 << 20,
    working_set: 8 << 20,
    cache: 48 << 20,
    measured: Duration::from_millis(700),
    writes: Duration::from_millis(300),
    down: Duration::from_millis(400),
    rounds: 1,
};

const DISK: ThrottleParameters = ThrottleParameters::HARD_DISK;

/// Host a, which has the backend at first.
const A: usize = 0;
/// Host b.
const B: usize = 1;
const NAMES: [&str; 2] = ["a", "b"];

/// Timeout of what one host sees of the other one, more than the interval of its looks.
const SEEN_TIMEOUT: Duration = Duration::from_secs(20);

impl Scale {
    const fn slots(&self) -> u32 {
        (self.working_set / BLOCK as u64) as u32
    }

    /// Bytes of the region: tables, channels, and a cache on either host during a move.
    const fn region(&self) -> u64 {
        2 * self.cache + (32 << 20)
    }
}

/// Runs all steps.
///
/// # Errors
/// The error of the first step that fails.
pub fn run(arguments: &Arguments, scale: &Scale, output: Output, report: &mut Report) -> Result<()> {
    if arguments.path == Some(ExportKind::FuseLoop) {
        let text = "--path fuse-loop: with --hosts the block devices are reached through NBD alone";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    output.print(
        "CBD: two hosts on one region, shown on this machine. The block devices are reached through NBD.",
    );
    report.common.swept = steps::sweep(output);
    let mut scene = Scene::new(scale, output, arguments.panic, report)?;
    scene.measure(report)?;

    scene.output.title("4. The daemon of host a is killed with SIGKILL while clients of host b write.");
    for _ in 0..scale.rounds {
        report.kills_of_a.push(scene.kill_a()?);
    }
    scene.output.title("5. The daemon of host b is killed with SIGKILL while clients of both hosts write.");
    for _ in 0..scale.rounds {
        report.kills_of_b.push(scene.kill_b()?);
    }
    scene.output.title("6. The backend moves to host b and back while clients of both hosts write.");
    for _ in 0..scale.rounds {
        report.moves.push(scene.move_backend(A, B)?);
        report.moves.push(scene.move_backend(B, A)?);
    }
    scene.end(report)
}

/// Two hosts and what they share. The fields are dropped in this order.
struct Scene {
    hosts: [Host; 2],
    _region: Folder,
    folder: Folder,
    scale: Scale,
    output: Output,
    /// All writes of clients of both hosts.
    log: Log,
    disk: PathBuf,
    /// Number of the backend.
    backend: u32,
    panics: bool,
}

impl Scene {
    /// Starts two daemons on a new region, and a block device on each of them.
    fn new(scale: &Scale, output: Output, panics: bool, report: &mut Report) -> Result<Self> {
        let folder = Folder::create(&folders::temporary())?;
        let (region_folder, reason) = folders::for_region(scale.region())?;
        let region = region_folder.path().join("region");
        report.common.region = Some(Region {
            path: region.display().to_string(),
            bytes: scale.region(),
            shared_memory: reason.is_none(),
            reason: reason.clone(),
        });
        if let Some(reason) = reason {
            let text = format!("several hosts need a region in memory, and there is none: {reason}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        output.title(&format!(
            "1. Two daemons, a and b, on one region of {} in shared memory; a disk, which is a file that is made as slow \
             as a hard disk.",
            format_size(scale.region())
        ));
        let start = |name| Host::start(name, &folder.subfolder(name)?, &DISK.to_string());
        let hosts = [start(NAMES[A])?, start(NAMES[B])?];
        hosts[A].create_region(&region, scale.region())?;
        hosts[B].join_region(&region)?;
        let disk = new_disk(&folder, scale.disk)?;
        report.results.disk = Some(alone(&hosts[A], scale, output, &disk)?);

        // The measurement has written to it.
        let disk = new_disk(&folder, scale.disk)?;
        let backend = hosts[A].start_backend(&disk, scale.cache)?;
        let scene = Self {
            hosts,
            _region: region_folder,
            folder,
            scale: *scale,
            output,
            log: Log::new(scale.slots(), seed()),
            disk,
            backend,
            panics,
        };
        scene.start_blkdevs(report)?;
        Ok(scene)
    }

    fn start_blkdevs(&self, report: &mut Report) -> Result<()> {
        let [a, b] = &self.hosts;
        self.output.title(&format!(
            "2. Host a starts the backend with a cache of {}. Both hosts start a block device on it.",
            format_size(self.scale.cache)
        ));
        a.start_blkdev(self.backend)?;
        b.start_blkdev(self.backend)?;
        if !a.has_backend(self.backend)? || b.has_backend(self.backend)? {
            return Err(untrue("the backend is not on host a alone"));
        }
        for host in &self.hosts {
            let seen = host.see_all(&NAMES)?;
            self.output.print(&format!("   Host {} sees {}.", host.name(), in_words(&seen)));
            report.hosts.push(SeenBy { host: host.name(), hosts: seen });
        }
        Ok(())
    }

    /// Measures the block device of each host, and reads what the one has written through the other one.
    fn measure(&self, report: &mut Report) -> Result<()> {
        self.output.title("3. The same disk through both hosts, one request at a time.");
        let missed = || self.hosts[A].read_missed_bytes(self.backend);
        for host in &self.hosts {
            let target = host.target();
            let pair = measure::measure(&target, &self.log, self.scale.measured, Some(&missed), &|text| {
                self.output.bar(text)
            })?;
            let prefix = format!("host {}: ", host.name());
            print_pair(self.output, &prefix, &pair);
            *report.results.of(host.name()) = Some(pair);
        }
        report.verified_through_both = Some(self.compare("after the measurement")?);
        self.output.print("   Each host reads what clients of the other one have written.");
        Ok(())
    }

    /// Compares all blocks with the log, through either host, while no client writes.
    fn compare(&self, moment: &str) -> Result<Verified> {
        let bar = self.output.bar("comparing");
        let through = |host: &Host| -> Result<Compared> {
            let mut io = host.target().open(Sync::Completed)?;
            let compared = read_all(&mut io, &self.log, &bar, |slot, block| self.log.validate(slot, block))?;
            compared.check(&format!("{moment}, through host {}", host.name()))
        };
        let compared = through(&self.hosts[A])?;
        through(&self.hosts[B])?;
        let acknowledged = self.log.acknowledged_total();
        if compared.verified != acknowledged {
            let text = format!("{} of {acknowledged} acknowledged writes were verified", compared.verified);
            return Err(untrue(text));
        }
        Ok(Verified { acknowledged, verified: compared.verified, lost: compared.lost })
    }

    /// Removes the block devices and the backend, ends the daemons, and compares the disk with the log.
    fn end(self, report: &mut Report) -> Result<()> {
        let Self { hosts: [a, b], output, log, disk, backend, folder: _folder, _region, .. } = self;
        output.title("7. Drain, and the disk alone: the daemons are gone, and the plain file is compared with the log.");
        b.stop_blkdev()?;
        let begun = Instant::now();
        let dirty_bytes = a.dirty_bytes(backend)?;
        let bar = output.bar("draining");
        let done = a.stop_backend(backend, &bar)?;
        drop(bar);
        let seconds = (begun.elapsed().as_secs_f64() * 100.0).round() / 100.0;
        report.common.drain = Some(Drain { dirty_bytes, written_bytes: done.written_bytes, seconds });
        b.stop()?;
        a.stop()?;
        let found = proof::compare_file(&disk, &log, &output.bar("comparing"))?;
        if found.verified != log.acknowledged_total() {
            return Err(untrue("not every acknowledged write was compared with the disk"));
        }
        output.print(&format!(
            "   {} still had to be written to the disk, in {seconds:.1} s. All {} acknowledged writes are there, in {} blocks.",
            format_size(done.written_bytes),
            grouped(found.verified),
            grouped(found.blocks)
        ));
        report.common.backing = Some(found);
        report.common.backing_verified = true;
        Ok(())
    }
}

/// Measures the slow disk without a cache.
fn alone(host: &Host, scale: &Scale, output: Output, disk: &std::path::Path) -> Result<Pair> {
    let started = host.start_uncached(disk)?;
    let log = Log::new(scale.slots(), seed());
    let target = Target::create(ExportKind::Nbd, &started.device, disk, log.slots())?;
    let pair = measure::measure(&target, &log, scale.measured, None, &|text| output.bar(text))?;
    host.stop_uncached(&started)?;
    print_pair(output, "the disk alone: ", &pair);
    Ok(pair)
}

/// An error that says what is not as it must be.
fn untrue(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Damaged, text.into())
}

/// Polls until `is_over`, which may fail.
fn until(what: &str, mut is_over: impl FnMut() -> Result<bool>) -> Result<()> {
    let mut result = Ok(false);
    let over = interrupt::poll_until(SEEN_TIMEOUT, || {
        result = interrupt::check().and_then(|()| is_over());
        !matches!(result, Ok(false))
    });
    result?;
    if over {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::TimedOut, format!("{what} did not happen within 20 s")))
    }
}

/// Hosts as `host-list` shows them.
fn in_words(hosts: &[HostInfo]) -> String {
    let one = |host: &HostInfo| {
        let seen = match host.seen_ms {
            _ if host.this => "itself".to_owned(),
            Some(ms) => format!("seen {:.1} s ago", ms as f64 / 1000.0),
            None => "never seen".to_owned(),
        };
        let alive = if host.alive { "alive" } else { "dead" };
        format!("{} (number {}, {alive}, {seen})", host.hostname, host.host_id)
    };
    hosts.iter().map(one).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_listed_as_one_of_them_sees_them() {
        let host = |host_id, name: &str, alive, this, seen_ms| HostInfo {
            host_id,
            hostname: name.to_owned(),
            alive,
            this,
            seen_ms,
            clearing: false,
        };
        let hosts = [host(0, "a", true, true, Some(9)), host(1, "b", false, false, Some(4250))];
        assert_eq!(in_words(&hosts), "a (number 0, alive, itself) and b (number 1, dead, seen 4.2 s ago)");
    }

    #[test]
    fn what_is_awaited_ends_with_its_error() {
        let mut asked = 0;
        until("the third answer", || {
            asked += 1;
            Ok(asked == 3)
        })
        .unwrap();
        assert_eq!(asked, 3);
        let error = until("an answer", || Err(untrue("it is not so"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged);
    }
}
