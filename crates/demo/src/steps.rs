//! The steps of the demonstration, in order.
//!
//! Invariants: each folder, mount and process has an owner whose drop removes it; the drops run in reverse order.

use crate::Arguments;
use crate::block::{BLOCK, Log};
use crate::folders::{self, Folder};
use crate::measure;
use crate::output::{Output, grouped};
use crate::report::{Common, Drain, Region, Report, Results};
use crate::servers::{Daemon, MemoryServer, Started};
use crate::target::{ExportKind, Target, system};
use crate::work::{self, Logs};
use crate::{filesystem, interrupt};
use cbd_backing::ThrottleParameters;
use cbd_daemon::size::format_size;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The sizes and durations of a demonstration.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Bytes of the disk.
    pub disk: u64,
    /// Bytes that are written and read.
    pub working_set: u64,
    /// Bytes of the cache.
    pub cache: u64,
    /// Duration of each measurement of the slow disk.
    pub slow: Duration,
    /// Duration of each other measurement.
    pub fast: Duration,
    /// Duration of the checksummed writes before the kill.
    pub before: Duration,
    /// Duration of the checksummed writes after the kill.
    pub after: Duration,
}

/// The default.
pub const FULL: Scale = Scale {
    disk: 512 << 20,
    working_set: 64 << 20,
    cache: 256 << 20,
    slow: Duration::from_secs(8),
    fast: Duration::from_secs(4),
    before: Duration::from_secs(4),
    after: Duration::from_secs(3),
};

/// With `--quick`.
pub const QUICK: Scale = Scale {
    disk: 256 << 20,
    working_set: 16 << 20,
    cache: 96 << 20,
    slow: Duration::from_millis(2500),
    fast: Duration::from_millis(1500),
    before: Duration::from_millis(1500),
    after: Duration::from_secs(1),
};

const DISK: ThrottleParameters = ThrottleParameters::HARD_DISK;

impl Scale {
    const fn slots(&self) -> u32 {
        (self.working_set / BLOCK as u64) as u32
    }

    /// Bytes of the region: the cache, and the tables and superblocks of a transport.
    const fn region(&self) -> u64 {
        self.cache + (16 << 20)
    }
}

impl Report {
    /// A report without results.
    pub fn new(scale: &Scale) -> Self {
        Self {
            common: Common::new(DISK, [scale.disk, scale.working_set, scale.cache]),
            path: None,
            fallback_reason: None,
            results: Results::default(),
            kill: None,
        }
    }
}

/// Runs all steps.
///
/// # Errors
/// The error of the first step that fails.
pub fn run(arguments: &Arguments, scale: &Scale, output: Output, report: &mut Report) -> Result<()> {
    output.print("CBD: a persistent-memory write-back cache, shown on this machine.");
    report.common.swept = sweep(output);
    let (export, reason) = choose(arguments)?;
    let folder = Folder::create(&folders::temporary())?;
    let mut demo = Demo { panics: arguments.panic, scale: *scale, output, export, folder };
    report.fallback_reason = reason;
    demo.print_export(report);
    report.results.memory = match demo.memory() {
        // The trial did not find the problem.
        Err(error)
            if export == ExportKind::FuseLoop && arguments.path.is_none() && !interrupt::requested() =>
        {
            report.fallback_reason = Some(error.line());
            demo.export = ExportKind::Nbd;
            demo.print_export(report);
            Some(demo.memory()?)
        }
        result => Some(result?),
    };
    demo.disk(report)
}

/// Removes what killed demonstrations left, and returns the paths of its folders.
pub fn sweep(output: Output) -> Vec<String> {
    let swept = folders::sweep();
    if !swept.is_empty() {
        output.print(&format!("Removed the leftovers of {} killed demonstrations.", swept.len()));
    }
    swept.iter().map(|path| path.display().to_string()).collect()
}

fn choose(arguments: &Arguments) -> Result<(ExportKind, Option<String>)> {
    if arguments.path == Some(ExportKind::Nbd) {
        return Ok((ExportKind::Nbd, Some("requested with --path nbd".to_owned())));
    }
    match filesystem::try_file_system() {
        Ok(()) => Ok((ExportKind::FuseLoop, None)),
        Err(reason) => {
            interrupt::check()?;
            if arguments.path == Some(ExportKind::FuseLoop) {
                return Err(Error::new(ErrorKind::Unsupported, format!("--path fuse-loop: {reason}")));
            }
            Ok((ExportKind::Nbd, Some(reason)))
        }
    }
}

/// The parameters of all steps.
pub struct Demo {
    pub panics: bool,
    pub scale: Scale,
    pub output: Output,
    pub export: ExportKind,
    pub folder: Folder,
}

impl Demo {
    fn print_export(&self, report: &mut Report) {
        report.path = Some(self.export);
        self.output.print(&format!("The device is reached through {}.", self.export.description()));
        if let Some(reason) = &report.fallback_reason {
            self.output.print(&format!("(Not through a kernel block device: {reason}.)"));
        }
    }

    fn measure(&self, target: &Target, log: &Log, duration: Duration) -> Result<measure::Pair> {
        measure::measure(target, log, duration, None, &|text| self.output.bar(text))
    }

    fn memory(&self) -> Result<measure::Pair> {
        self.output.title("1. The limit: the same export over plain memory, without any disk.");
        let folder = self.folder.subfolder("memory")?;
        let server = MemoryServer::start(&folder, self.scale.disk, self.export)?;
        let log = Log::new(self.scale.slots(), seed());
        let target = Target::create(self.export, &server.device(), &folder, log.slots())?;
        let pair = self.measure(&target, &log, self.scale.fast)?;
        target.close()?;
        server.stop()?;
        self.report(&pair);
        Ok(pair)
    }

    fn report(&self, pair: &measure::Pair) {
        print_pair(self.output, "", pair);
    }

    fn new_disk(&self) -> Result<PathBuf> {
        new_disk(&self.folder, self.scale.disk)
    }

    fn disk(&self, report: &mut Report) -> Result<()> {
        let (region_folder, reason) = folders::for_region(self.scale.region())?;
        let region = region_folder.path().join("region");
        report.common.region = Some(Region {
            path: region.display().to_string(),
            bytes: self.scale.region(),
            shared_memory: reason.is_none(),
            reason: reason.clone(),
        });
        let disk = self.new_disk()?;
        let daemon = Daemon::start(&self.folder.subfolder("daemon")?, &DISK.to_string(), self.export)?;
        daemon.register(&region, self.scale.region())?;

        self.output.title(&format!(
            "2. The disk alone: a file of {} that is made as slow as a hard disk ({} ms seek, {} rpm, {} MiB/s).",
            format_size(self.scale.disk),
            DISK.seek_ms,
            DISK.rpm,
            DISK.mib_per_s
        ));
        let alone = self.alone(&daemon, &disk)?;
        self.report(&alone);
        report.results.uncached = Some(alone);

        self.output.title(&format!(
            "3. The same disk with a cache of {} in {}.",
            format_size(self.scale.cache),
            match reason {
                None => "shared memory".to_owned(),
                Some(reason) => format!("a file ({reason})"),
            }
        ));
        let disk = self.new_disk()?;
        let (logs, daemon) = self.cached(daemon, &disk, report)?;
        daemon.stop()?;

        self.output.title(
            "6. The disk alone again: the daemon is gone, and the plain file is compared with the log.",
        );
        let found = self.compare_plain(&disk, &logs)?;
        self.output.print(&format!(
            "   All {} acknowledged writes are there, in {} blocks{}.",
            grouped(found.verified),
            grouped(found.blocks),
            match found.file_system_checked {
                Some(true) => ", and e2fsck finds no fault",
                _ => "",
            }
        ));
        report.common.backing = Some(found);
        report.common.backing_verified = true;
        Ok(())
    }

    fn alone(&self, daemon: &Daemon, disk: &Path) -> Result<measure::Pair> {
        let started = daemon.start_backend(disk, None)?;
        let log = Log::new(self.scale.slots(), seed());
        let target = Target::create(self.export, &started.device, self.folder.path(), log.slots())?;
        let pair = self.measure(&target, &log, self.scale.slow)?;
        target.close()?;
        daemon.stop_backend(started.backend, |_| {})?;
        Ok(pair)
    }

    /// The steps while the disk has a cache.
    fn cached(&self, daemon: Daemon, disk: &Path, report: &mut Report) -> Result<(Logs, Daemon)> {
        let mut daemon = daemon;
        let started = daemon.start_backend(disk, Some(self.scale.cache))?;
        let logs = Logs::new(self.scale.slots(), seed());
        let target = Target::create(self.export, &started.device, self.folder.path(), logs.blocks.slots())?;
        assert!(!self.panics, "a panic was requested");
        let missed = || daemon.read_missed_bytes(started.backend);
        let pair = measure::measure(&target, &logs.blocks, self.scale.fast, Some(&missed), &|text| {
            self.output.bar(text)
        })?;
        self.report(&pair);
        if let Some(missed) = pair.read_missed_bytes.filter(|&missed| missed > 0) {
            self.output.print(&format!(
                "   ({} of the reads were not in the cache, and came from the disk.)",
                format_size(missed)
            ));
        }
        report.results.cached = Some(pair);

        self.output.title(&format!(
            "4. {} threads write{}; meanwhile the daemon is killed with SIGKILL.",
            work::WRITERS,
            if target.root().is_some() { ", another saves files" } else { "" }
        ));
        let target = self.kill(target, &logs, &mut daemon, &started, report)?;
        target.close()?;

        self.output.title("5. Drain: writeback of the dirty data to the slow disk.");
        report.common.drain = Some(self.drain(&daemon, &started)?);
        Ok((logs, daemon))
    }

    fn drain(&self, daemon: &Daemon, started: &Started) -> Result<Drain> {
        let begun = Instant::now();
        let dirty_bytes = daemon.dirty_bytes(started.backend)?;
        let bar = self.output.bar("draining");
        let done = daemon.stop_backend(started.backend, |progress| {
            let all = progress.dirty_bytes_at_start.max(1);
            bar.set(1.0 - progress.dirty_bytes as f64 / all as f64);
        })?;
        drop(bar);
        let seconds = begun.elapsed().as_secs_f64();
        self.output.print(&format!(
            "   {} in the log, with every version of each block; {} written to the disk in {seconds:.1} s.",
            format_size(dirty_bytes),
            format_size(done.written_bytes),
        ));
        Ok(Drain {
            dirty_bytes,
            written_bytes: done.written_bytes,
            seconds: (seconds * 100.0).round() / 100.0,
        })
    }
}

/// Prints the figures of a device in one line, which `prefix` begins.
pub fn print_pair(output: Output, prefix: &str, pair: &measure::Pair) {
    let (write, read) = (&pair.write, &pair.read);
    output.print(&format!(
        "   {prefix}{} writes a second, {} reads a second; half of them within {:.1} and {:.1} us.",
        grouped(write.iops.round() as u64),
        grouped(read.iops.round() as u64),
        write.p50_us,
        read.p50_us
    ));
}

/// An empty disk: a file of `bytes` in `folder`.
///
/// # Errors
/// The system error.
pub fn new_disk(folder: &Folder, bytes: u64) -> Result<PathBuf> {
    let path = folder.path().join("disk");
    File::create(&path)
        .and_then(|file| file.set_len(bytes))
        .map_err(|error| system(path.display().to_string(), &error))?;
    Ok(path)
}

/// A number that differs between runs.
pub fn seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
